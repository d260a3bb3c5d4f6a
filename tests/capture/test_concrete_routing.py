"""Drawn routings: distinct scores, preferred experts first, and three different kinds."""

from __future__ import annotations

import weakref

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import fx

from moefx.capture.tracing.concrete_routing import Routing

KINDS = ("diverse", "skewed", "overloaded")


@pytest.mark.parametrize("kind", [k for k in KINDS if k != "diverse"])
@settings(max_examples=25, deadline=None)
@given(rows=st.integers(1, 40), n=st.integers(2, 40), seed=st.integers(0, 50))
def test_scores_are_distinct_along_each_row(kind, rows, n, seed):
    scores = Routing(kind, seed).draw_scores(rows, n)
    assert scores.shape == (rows, n) and scores.isfinite().all()
    ordered = scores.sort(-1).values
    assert (ordered[:, 1:] > ordered[:, :-1]).all()


@settings(max_examples=25, deadline=None)
@given(rows=st.integers(29, 40), n=st.integers(4, 16), seed=st.integers(0, 50))
def test_a_few_scores_tie(rows, n, seed):
    """Draw a few ties, for which `scores >= kth` selects more than `topk`, but none for fewer than 29 tokens."""
    top = Routing("diverse", seed).draw_scores(rows, n).topk(4).values
    ties = (top[:, :-1] == top[:, 1:]).any(-1).sum()
    assert 0 < ties < rows / 2


@settings(max_examples=25, deadline=None)
@given(rows=st.integers(1, 20), n=st.integers(2, 40), data=st.data())
def test_preferred_experts_are_first_choices(rows, n, data):
    prefer = tuple(data.draw(st.lists(st.integers(0, n - 1), max_size=rows)))
    scores = Routing("diverse", 3, prefer).draw_scores(rows, n)
    assert scores.argmax(-1)[: len(prefer)].tolist() == list(prefer)


def test_preferred_experts_win_their_groups():
    scores = Routing("diverse", 0, prefer=(5, 8)).draw_scores(6, 12)
    groups = scores.view(6, 3, 4).topk(2, -1).values.sum(-1).argmax(-1)
    assert groups[:2].tolist() == [1, 2]


def test_out_of_range_preference_is_ignored():
    assert Routing("diverse", 0, prefer=(99,)).draw_scores(3, 4).shape == (3, 4)


@pytest.mark.parametrize("n", (3, 4, 8, 60))
def test_diverse_makes_every_expert_a_first_choice_with_uneven_counts(n):
    first = Routing("diverse", 0).draw_scores(3 * n + 1, n).argmax(-1)
    counts = torch.bincount(first, minlength=n)
    assert (counts > 0).all() and counts.unique().numel() > 1


@pytest.mark.parametrize("seed", range(4))
def test_skewed_leaves_experts_out(seed):
    counts = torch.bincount(Routing("skewed", seed).draw_scores(40, 6).argmax(-1), minlength=6)
    assert (counts == 0).any() and counts.max() > 40 // 6


@pytest.mark.parametrize("seed", range(4))
def test_overloaded_sends_most_slots_to_two_experts(seed):
    counts = torch.bincount(Routing("overloaded", seed).draw_scores(60, 6).topk(2).indices.flatten(), minlength=6)
    assert counts.topk(2).values.sum() > 0.6 * counts.sum()


@pytest.mark.parametrize("rows", (24, 29, 61))
def test_even_gives_each_expert_the_same_but_for_the_first(rows):
    first = Routing("even").draw_scores(rows, 6).argmax(-1)
    counts = torch.bincount(first, minlength=6)
    assert counts[1:].unique().tolist() == [rows // 6] and (first.diff() >= 0).all()


def test_scores_are_reproducible_and_differ_by_seed_and_draw():
    a, b, c = Routing("diverse", 1), Routing("diverse", 1), Routing("diverse", 2)
    first = a.draw_scores(9, 6)
    assert torch.equal(first, b.draw_scores(9, 6)) and not torch.equal(first, c.draw_scores(9, 6))
    assert not torch.equal(first, a.draw_scores(9, 6))  # the routers of a block get different scores
    assert repr(a) == "Routing('diverse', seed=1)"


class TestInvent:
    def node(self, op: str = "call_function", *shape: int, original: torch.Tensor | None = None, **meta) -> fx.Node:
        graph = fx.Graph()
        node = graph.call_function(torch.relu, ()) if op == "call_function" else graph.placeholder("x")
        node.meta.update(val=torch.empty(shape, device="meta", dtype=meta.pop("dtype", torch.float32)), **meta)
        if original is not None:
            node.meta["original"] = weakref.ref(original)
        return node

    def test_invented_scores_have_shape_and_dtype_of_the_result(self):
        value = Routing().invent_value(self.node("call_function", 2, 3, 5, dtype=torch.bfloat16))
        assert value.shape == (2, 3, 5) and value.dtype == torch.bfloat16

    def test_noise_for_inputs_and_scalars(self):
        assert Routing().invent_value(self.node("placeholder", 2, 3)).shape == (2, 3)
        assert Routing().invent_value(self.node("call_function")).shape == ()

    def test_parameters_keep_their_values(self):
        weight = torch.randn(4, 3)
        value = Routing().invent_value(self.node("call_function", 4, 3, original=weight))
        assert torch.equal(value, weight) and value is not weight

    def test_later_routings_permute_parameters(self):
        weight = torch.randn(4, 3)
        value = Routing(seed=2).invent_value(self.node("call_function", 4, 3, original=weight, fqn="weight"))
        assert not torch.equal(value, weight) and torch.equal(value.flatten().sort()[0], weight.flatten().sort()[0])
        as_it_is = Routing(seed=2, keep_values=True).invent_value(self.node("call_function", 4, 3, original=weight))
        assert torch.equal(as_it_is, weight)

    def test_biases_step_back_for_preferred_experts(self):
        bias = torch.tensor([100.0, 0.0, 0.0])
        assert (
            Routing("diverse", 0, prefer=(1,)).invent_value(self.node("call_function", 3, original=bias)).abs().max()
            < 1
        )
        assert torch.equal(Routing().invent_value(self.node("call_function", 3, original=bias)), bias)

    def test_parameters_without_values_are_small(self):
        original = torch.empty(4, 3, device="meta")
        value = Routing().invent_value(self.node("call_function", 4, 3, original=original))
        assert value.device.type == "cpu" and value.abs().max() < 0.1


class TestIntegers:
    def test_the_first_routing_keeps_integers(self):
        ids = torch.arange(8).flip(0)
        value = Routing("diverse", 0).vary_integers(ids, "b")
        assert torch.equal(value, ids) and value is not ids

    def test_equal_flags_differ_in_later_routings(self):
        flags = torch.ones(8, dtype=torch.bool)
        a, b = ([Routing("diverse", seed).vary_integers(flags, name).tolist() for seed in range(1, 4)] for name in "ab")
        assert a != b

    def test_an_identity_map_is_permuted(self):
        assert not torch.equal(Routing("diverse", 0).vary_integers(torch.arange(8), "b"), torch.arange(8))

    def test_later_routings_permute_integers(self):
        ids = torch.arange(8)
        value = Routing("diverse", 3).vary_integers(ids, "b")
        assert not torch.equal(value, ids) and torch.equal(value.sort().values, ids)

    def test_integers_on_meta_are_zero_and_scalars_vary_by_little(self):
        assert Routing().vary_integers(torch.empty(3, dtype=torch.long, device="meta"), "b").tolist() == [0, 0, 0]
        counts = {Routing("diverse", seed).vary_integers(torch.tensor(5), "b").item() for seed in range(30)}
        assert counts == {4, 5, 6, 7}
        assert Routing("diverse", 2).vary_integers(torch.tensor([True, False]), "b").tolist() == [False, True]
