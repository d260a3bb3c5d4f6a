"""Rows read from other ranks, and their sums, equal the references."""

from __future__ import annotations

import pytest
import torch

from moefx.ir.ops import peer_rows
from moefx.lowering.triton import peer_ops

RANKS, SLOTS = 3, 4  # expert slots of a rank


def draw_places(num_tokens: int, top_k: int) -> torch.Tensor:
    """Draw destinations: some slots are dropped, and token 2 has none left."""
    place = torch.stack([torch.randperm(RANKS * SLOTS)[:top_k] for _ in range(num_tokens)]).int()
    place[torch.rand(place.shape) < 0.3] = -1
    place[2] = -1
    return place


@pytest.mark.parametrize(
    "dtype, width, top_k", [(torch.bfloat16, 32, 4), (torch.float16, 2100, 3), (torch.float32, 7, 1)]
)
@pytest.mark.parametrize("begin", [0, 1])  # the first byte is a multiple of 16, or not
def test_rows_and_sums_equal_the_references(device, dtype, width, top_k, begin):
    tokens, first = 21, 5
    shown = [torch.randn(tokens, width + 16)[:, begin : begin + width].to(dtype).to(device) for _ in range(RANKS)]
    for rows in shown:
        rows[2] = float("nan")  # of a token without experts, which nobody reads
    place = torch.cat([draw_places(tokens, top_k) for _ in range(RANKS)])
    slots = place - SLOTS  # of rank 1
    got = peer_ops.read_rows(shown, slots.to(device), experts_per_rank=SLOTS)
    want = peer_rows.read_rows.reference(shown, slots.to(device), experts_per_rank=SLOTS)
    assert not got.isnan().any() and torch.equal(got, want)
    own = place[: tokens - first]
    options = dict(experts_per_rank=SLOTS, first_row=first)
    own[2 - first] = -1
    got = peer_ops.add_rows(shown, own.to(device), **options)
    want = peer_rows.add_rows.reference(shown, own.to(device), **options)
    assert got.dtype is dtype and torch.equal(got, want)


def test_exchanges_without_tokens_run(device):
    shown = [torch.zeros(0, 8, device=device) for _ in range(RANKS)]
    nothing = torch.zeros(0, 2, dtype=torch.int32, device=device)
    assert peer_ops.read_rows(shown, nothing, experts_per_rank=SLOTS).shape == (0, 8)
    assert peer_ops.add_rows(shown, nothing, experts_per_rank=SLOTS, first_row=0).shape == (0, 8)
