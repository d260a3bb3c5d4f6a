"""Providers that move or sum rows equal the reference."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import moefx.lowering.torch.row_ops
from moefx.ir import op_providers
from moefx.ir.ops import dialect
from tests.ir.routings import Routing, draw_routing, routings


@settings(max_examples=40, deadline=None)
@given(routings(), st.booleans())
def test_bag_and_blocks_are_the_reference(routing: Routing, weighted: bool):
    token_ids, _, offsets, inverse, weights = routing.build()
    rows = torch.randn(token_ids.shape[0], 3, dtype=torch.float64)
    rows[int(offsets[-1]) :] = float("nan")
    rows.requires_grad_()
    leaves = [rows, weights.detach().requires_grad_()] if weighted else [rows]

    def run():
        out = dialect.combine(rows, leaves[1] if weighted else None, token_ids, offsets, inverse)
        gradients = torch.autograd.grad(out.sum(), leaves)
        return [out, *(g[: int(offsets[-1])] for g in gradients)]

    op_providers.reset_counters()
    got = run()
    assert ("combine", "reference") not in op_providers.counters()
    with op_providers.force("combine", "reference"), op_providers.force("combine_backward", "reference"):
        expected = run()
    torch.testing.assert_close(got, expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@settings(max_examples=20, deadline=None)
@given(routing=routings(), weighted=st.booleans(), block=st.sampled_from([1, 2, 1024]))
def test_half_types_are_summed_in_float32(dtype, routing: Routing, weighted: bool, block: int):
    token_ids, _, offsets, inverse, weights = routing.build()
    rows = torch.randn(token_ids.shape[0], 3).to(dtype)
    rows[int(offsets[-1]) :] = float("nan")
    args = (rows, weights.float() if weighted else None, token_ids, offsets, inverse)
    op_providers.reset_counters()
    with mock.patch.object(moefx.lowering.torch.row_ops, "_BLOCK", block):
        got = dialect.combine(*args)
    assert op_providers.counters() == {("combine", "bag"): 1}
    with op_providers.force("combine", "reference"):
        expected = dialect.combine(*args)
    if not weighted:
        assert torch.equal(got, expected)
    torch.testing.assert_close(got, expected)


def test_gradients_in_several_blocks_of_rows_equal_the_reference():
    token_ids, _, offsets, inverse, weights = draw_routing(700, 4, 5).build()  # several blocks
    rows, weights = torch.randn(2800, 2).double().requires_grad_(), weights.detach().requires_grad_()
    out = dialect.combine(rows, weights, token_ids, offsets, inverse)
    got = torch.autograd.grad(out.square().sum(), [rows, weights])
    with op_providers.force("combine_backward", "reference"):
        out = dialect.combine(rows, weights, token_ids, offsets, inverse)
        torch.testing.assert_close(got, torch.autograd.grad(out.square().sum(), [rows, weights]))


@settings(max_examples=40, deadline=None)
@given(routings())
def test_segment_reduce_is_the_reference(routing: Routing):
    token_ids, _, offsets, _, _ = routing.build()
    if token_ids.shape[0] == 0:
        return  # not supported
    grad = torch.randn(token_ids.shape[0], 3, dtype=torch.float64)
    expected = dialect.expert_rows_backward(grad, offsets, dtype=torch.float64)
    grad[int(offsets[-1]) :] = float("nan")
    with op_providers.force("expert_rows_backward", "segment_reduce"):
        got = dialect.expert_rows_backward(grad, offsets, dtype=torch.float64)
    torch.testing.assert_close(got, expected)
