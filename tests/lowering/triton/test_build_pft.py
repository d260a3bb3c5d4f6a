"""`build_pft` in Triton equals the reference bit by bit."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings

from moefx.ir.ops import dialect
from moefx.lowering.triton import build_pft

from ...covering import sample_product
from ...ir.routings import Routing, routings

NAMES = ("token_ids", "slot_ids", "expert_offsets", "inverse", "combine_weights")


def check_equals_the_reference(case: Routing, device: str, block: int) -> None:
    options = dict(num_experts=case.num_experts, capacity=case.capacity, drop=case.drop)
    weights = case.topk_weights.float()
    expected = dialect.build_pft.reference(case.topk_ids, weights, case.keep, **options)
    arguments = [None if t is None else t.to(device) for t in (case.topk_ids, weights, case.keep)]
    for name, got, want in zip(NAMES, build_pft.build_pft(*arguments, **options, block=block), expected, strict=True):
        assert got.dtype == want.dtype and torch.equal(got.cpu(), want), (name, got, want)


@settings(max_examples=30, deadline=None)
@given(case=routings(max_tokens=20, max_experts=6))
def test_equals_the_reference_bit_by_bit(case):
    check_equals_the_reference(case, "cuda" if torch.cuda.is_available() else "cpu", 16)


SIZES = {"90-3-10": (90, 3, 10), "64-1-4": (64, 1, 4), "40-8-24": (40, 8, 24)}


@pytest.mark.parametrize(
    "num_tokens, num_slots, num_experts, drop",
    sample_product(SIZES, {drop: drop for drop in dialect.DROP_RULES}, order=1),
)
def test_a_routing_of_many_blocks_equals_the_reference(device, drop, num_tokens, num_slots, num_experts):
    scores = torch.randn(num_tokens, num_experts) + torch.randn(num_experts)
    weights, ids = scores.softmax(1).topk(num_slots, 1)
    weights = (weights * 64).round() / 64  # ties
    for capacity in [None] if drop == "none" else [-1, 0, 1, num_tokens // 5, 2**40]:
        check_equals_the_reference(Routing(ids, weights, num_experts, None, capacity, drop), device, 64)


def test_weights_of_any_sign_and_nan_are_ordered_as_torch_sorts_them(device):
    special = torch.tensor([float("nan"), float("inf"), -float("inf"), 0.0, -0.0, 1e-40, -1e-40, -2.0, 3.0])
    weights = special[torch.randint(len(special), (60, 2))]
    case = Routing(torch.randint(3, (60, 2)), weights, 3, None, 11, "weight")
    options = dict(num_experts=3, capacity=11, drop="weight")
    expected = dialect.build_pft.reference(case.topk_ids, weights, None, **options)
    got = build_pft.build_pft(case.topk_ids.to(device), weights.to(device), None, **options, block=16)
    for g, want in zip(got, expected, strict=True):
        torch.testing.assert_close(g.cpu(), want, rtol=0, atol=0, equal_nan=True)


@pytest.mark.sampled(6)
@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64])
@pytest.mark.parametrize("weights_dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_dtypes_of_ids_and_weights(device, dtype, weights_dtype):
    ids, weights = torch.randint(6, (50, 2)).to(dtype), torch.rand(50, 2).to(weights_dtype)
    expected = dialect.build_pft.reference(ids, weights, None, num_experts=6)
    results = build_pft.build_pft(ids.to(device), weights.to(device), None, num_experts=6)
    for got, want in zip(results, expected, strict=True):
        assert got.dtype == want.dtype and torch.equal(got.cpu(), want)


@pytest.mark.parametrize("num_valid, room", [(0, 0), (1, 1), (40, 40), (97, 97), (97, 50), (40, 0)])
def test_build_pft_allocates_the_valid_rows(device, num_valid, room):
    ids = torch.full((150,), -1)
    ids[torch.randperm(150)[:num_valid]] = torch.randint(6, (num_valid,))
    ids, weights = ids.view(50, 3).int(), torch.rand(50, 3)
    options = dict(num_experts=6, num_rows=torch.tensor([room]))
    expected = dialect.build_pft.reference(ids, weights, None, **options)
    results = build_pft.build_pft(ids.to(device), weights.to(device), None, **options, block=16)
    for name, got, want in zip(NAMES, results, expected, strict=True):
        assert torch.equal(got.cpu(), want), name


def test_gradient_of_the_weights(device):
    inverse, grad = torch.tensor([[2, -1], [0, 1], [-1, -1]], dtype=torch.int32), torch.tensor([1.0, 2, 3, 99])
    got = build_pft.build_pft_backward(grad.to(device), inverse.to(device))
    assert torch.equal(got.cpu(), dialect.build_pft_backward.reference(grad, inverse))


def test_a_routing_without_tokens_has_no_rows(device):
    got = build_pft.build_pft(torch.zeros((0, 2), dtype=torch.int64, device=device), None, None, num_experts=3)
    assert [tuple(t.shape) for t in got] == [(0,), (0,), (4,), (0, 2), (0,)]
    assert got[2].tolist() == [0, 0, 0, 0]
