"""Arguments of a recorded call at other sizes."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moefx.capture.arguments.block_arguments import Arguments


def list_shapes(arguments: Arguments) -> list[tuple]:
    return [leaf.shape for leaf in arguments.tensors]


class TestLeaves:
    def test_tokens_are_all_axes_but_the_last(self):
        assert Arguments((torch.zeros(2, 7, 6),), {}).dims == ("B", "S")
        assert Arguments((torch.zeros(7, 6),), {}).dims == ("S",)
        assert Arguments((torch.zeros(2, 3, 4, 6),), {}).sizes == {"B": 2, "S": 3, "P": 4}

    def test_masks_and_positions_follow(self):
        x, mask = torch.zeros(2, 7, 6), torch.ones(2, 7, dtype=torch.bool)
        positions, flat = torch.arange(7)[None], torch.zeros(14, dtype=torch.long)
        arguments = Arguments((x,), {"mask": mask, "positions": positions, "flat": flat, "table": torch.zeros(6, 6)})
        assert list_shapes(arguments) == [("B", "S", 6), ("B", "S"), (1, "S"), ("B*S",), (6, 6)]

    def test_both_axes_of_a_square_mask_are_positions(self):
        arguments = Arguments((torch.zeros(2, 7, 6), torch.zeros(2, 1, 7, 7)), {})
        assert list_shapes(arguments)[1] == ("B", 1, "S", "S")

    def test_equal_token_axes_are_named_in_order(self):
        arguments = Arguments((torch.zeros(5, 5, 6), torch.zeros(5, 5)), {})
        assert list_shapes(arguments) == [("B", "S", 6), ("B", "S")]

    def test_as_many_choices_as_sequences(self):
        arguments = Arguments((torch.zeros(2, 9, 6), torch.zeros(2, 9, 2, dtype=torch.long)), {})
        assert list_shapes(arguments) == [("B", "S", 6), ("B", "S", 2)]

    def test_width_is_no_token_axis(self):
        assert list_shapes(Arguments((torch.zeros(6, 6),), {})) == [("S", 6)]

    def test_axes_of_ids_count_tokens(self):
        arguments = Arguments((torch.arange(10).view(2, 5),), {})
        assert arguments.dims == ("B", "S") and arguments.width == 0

    def test_values_other_than_tensors_are_unchanged(self):
        marker = object()
        args, kwargs = Arguments((torch.zeros(4, 6), 3, None), {"flag": True, "m": marker}).build_call({"S": 9})
        assert args[0].shape == (9, 6) and args[1:] == (3, None) and kwargs == {"flag": True, "m": marker}

    def test_a_call_without_tensors_is_rebuilt(self):
        assert Arguments((3,), {}).build_call({"S": 4})[0] == (3,)


class TestAt:
    def test_floats_are_meta_and_integers_drawn_from_the_example(self):
        arguments = Arguments((torch.zeros(4, 6, dtype=torch.bfloat16), torch.tensor([3, 5, 3, 5])), {})
        (x, ids), _ = arguments.build_call({"S": 9})
        assert x.is_meta and x.dtype == torch.bfloat16 and x.shape == (9, 6)
        assert ids.tolist() == [3, 5, 3, 5, 3, 5, 3, 5, 3]

    def test_seeds_vary_the_values_of_integer_arguments(self):
        arguments = Arguments((torch.zeros(8, 6), torch.arange(8)), {})
        first, second = arguments.build_call({"S": 20})[0][1], arguments.build_call({"S": 20}, seed=1)[0][1]
        assert not torch.equal(first, second) and set(second.tolist()) <= set(range(8))
        assert torch.equal(second, arguments.build_call({"S": 20}, seed=1)[0][1])

    def test_tensors_in_containers_are_resized(self):
        arguments = Arguments(({"h": torch.zeros(4, 6), "rest": [torch.ones(4)]},), {})
        ((tree,), _) = arguments.build_call({"S": 3})
        assert tree["h"].shape == (3, 6) and tree["rest"][0].shape == (3,)

    def test_an_axis_may_be_a_product_of_sizes(self):
        arguments = Arguments((torch.zeros(2, 7, 6), torch.zeros(14, 3)), {})
        assert arguments.build_call({"B": 3, "S": 5})[0][1].shape == (15, 3)

    def test_the_callers_tensors_are_not_kept(self):
        x, ids = torch.zeros(4, 6), torch.arange(4)
        arguments = Arguments((x, ids), {})
        ids.fill_(0)
        assert arguments.build_call({"S": 4})[0][0] is not x

    def test_meta_and_empty_integers(self):
        arguments = Arguments(
            (
                torch.zeros(4, 6),
                torch.empty(4, dtype=torch.long, device="meta"),
                torch.empty(0, dtype=torch.long),
            ),
            {},
        )
        (_, ids, none), _ = arguments.build_call({"S": 5})
        assert ids.shape == (5,) and set(ids.tolist()) <= {0, 1} and none.shape == (0,)

    @pytest.mark.parametrize("example", [torch.ones(4, dtype=torch.bool), torch.zeros(4, dtype=torch.long)])
    def test_a_mask_of_ones_varies(self, example):
        arguments = Arguments((torch.zeros(4, 6), example), {})
        for seed in range(3):
            assert set(arguments.build_call({"S": 40}, seed=seed)[0][1].tolist()) == {0, 1}

    def test_boundary_values_are_values_of_the_example(self):
        arguments = Arguments((torch.zeros(2, 8, 6), torch.arange(1, 17).view(2, 8), torch.tensor(5)), {})
        turned = arguments.with_extra_values([(1, 0), (1, -100), (2, 9)])
        for seed in range(3):
            (_, ids, _), _ = turned.build_call({"B": 3, "S": 11}, seed=seed)
            assert {0, -100} < set(ids.flatten().tolist()) <= {0, -100, *range(1, 17)}
        (_, few, _), _ = turned.build_call({"B": 1, "S": 3})
        assert few.min() > 0
        assert [int(turned.build_call({"B": 3, "S": 11}, seed=seed)[0][2]) for seed in range(4)] == [5, 9, 6, 10012]
        assert arguments.tensors[1].extra_values == ()

    def test_requires_grad_is_noted(self):
        assert Arguments((torch.zeros(4, 6, requires_grad=True),), {}).tensors[0].requires_grad


class TestChoose:
    @settings(max_examples=60, deadline=None)
    @given(width=st.integers(1, 64), tokens=st.integers(5, 200), variant=st.integers(0, 6), batched=st.booleans())
    def test_sizes_are_enough_and_unlike(self, width, tokens, variant, batched):
        x = torch.zeros(2, 3, width) if batched else torch.zeros(3, width)
        sizes = Arguments((x,), {}).choose_sizes(tokens, variant)
        assert math.prod(sizes.values()) >= tokens
        assert len({*sizes.values(), width}) == len(sizes) + 1 or width in (2, 3, 4, 5)

    @pytest.mark.parametrize(
        "dims",
        [
            pytest.param((3, 6), marks=pytest.mark.xfail(strict=True, reason="29 for the first three variants")),
            (2, 3, 6),
        ],
    )
    def test_variants_of_sizes_differ(self, dims):
        arguments = Arguments((torch.zeros(dims),), {})
        assert len({tuple(arguments.choose_sizes(25, v).values()) for v in range(3)}) == 3
