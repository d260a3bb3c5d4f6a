"""Packed, unpacked and summed rows equal the references bit by bit."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from moefx.ir.ops import exchange_routes, row_packing, token_routing
from moefx.ir.ops.exchange_routes import plan_dispatch
from moefx.lowering.triton import exchange_ops


def check_equal(got: Tensor, want: Tensor) -> None:
    assert got.dtype == want.dtype and got.shape == want.shape and torch.equal(got.cpu(), want)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "dtype, width", [(torch.bfloat16, 32), (torch.bfloat16, 7), (torch.float64, 3), (torch.float32, 5000)]
)
@pytest.mark.parametrize("dedup", [True, False])
def test_packed_rows_split_into_the_same_columns(device, dtype, width, dedup):
    ranks, slots, tokens, top_k = 3, 200, 21, 4
    place = torch.stack([torch.randperm(ranks * slots)[:top_k] for _ in range(tokens)]).int()
    place[torch.rand(place.shape) < 0.2] = -1
    place[5] = -1
    token_ids, slot_ids, offsets, _ = plan_dispatch(place, num_ranks=ranks, num_slots=slots, dedup=dedup)
    x = torch.randn(tokens, 2 * width)[:, width:].to(dtype)  # rows with a stride
    extra, weights, floats = torch.randn(tokens, 6), torch.rand(tokens, top_k), torch.rand(top_k, tokens).T.double()
    args = ([x, extra], [weights, floats], place, token_ids, slot_ids, offsets)
    options = dict(num_rows=int(offsets[-1]), num_slots=slots, dedup=dedup)
    want = row_packing.pack_rows.reference(*args, **options)
    there = [[t.to(device) for t in a] if isinstance(a, list) else a.to(device) for a in args]
    got = exchange_ops.pack_rows(*there, **options)
    num_rows = options.pop("num_rows")
    most = exchange_ops.pack_rows(*there, **options)  # the maximum number of rows, with the valid ones first
    assert most.shape[0] == row_packing.pack_rows.reference(*args, **options).shape[0] == tokens * (3 if dedup else 4)
    layout = row_packing.build_row_layout(
        [x, extra], [weights, floats], place, destinations_per_rank=slots, dedup=dedup
    )
    assert layout.columns[-1].dtype is torch.int16
    for a, b, c in zip(layout.views(got), layout.views(want), layout.views(most[:num_rows]), strict=True):
        check_equal(a, b)
        check_equal(c, b)
    columns = dict(dtypes=[c.dtype_name for c in layout.columns], widths=[c.width for c in layout.columns])
    parts = [want[:4], want[4:4], want[4:]]
    split = exchange_ops.split_columns([p.to(device) for p in parts], **columns)
    for a, b in zip(split, row_packing.split_columns.reference(parts, **columns), strict=True):
        check_equal(a, b)
    *_, places = exchange_ops.split_columns([p.to(device) for p in parts], **columns, places=True)
    check_equal(places, split[-1].cpu().int())
    for a, b in zip(layout.views(exchange_ops.join_columns(split)), layout.views(want), strict=True):
        check_equal(a, b)


def test_exchanges_without_rows_run(device):
    none = torch.zeros(0, 3, device=device)
    packed = exchange_ops.join_columns([none])
    assert packed.shape == (0, 16)
    (split,) = exchange_ops.split_columns([packed], dtypes=["float32"], widths=[3])
    assert split.shape == (0, 3)
    inverse = torch.full((4, 2), -1, dtype=torch.int32, device=device)
    nobody = torch.zeros(0, dtype=torch.int32, device=device)
    out = exchange_ops.combine(none, None, nobody, torch.zeros(3, dtype=torch.int32, device=device), inverse)
    assert torch.equal(out.cpu(), torch.zeros(4, 3))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("weighted", [True, False])
def test_combine_equals_the_reference(device, dtype, weighted):
    ids = torch.randint(-1, 5, (37, 3))
    token_ids, _, offsets, inverse, weights = token_routing.build_pft(ids, torch.rand(37, 3), None, num_experts=5)
    rows = torch.randn(token_ids.shape[0], 130).to(dtype)
    rows[int(offsets[-1]) :] = float("nan")  # nothing reads the tail
    args = (rows, weights if weighted else None, token_ids, offsets, inverse)
    got = exchange_ops.combine(*(None if a is None else a.to(device) for a in args))
    torch.testing.assert_close(
        got.cpu(),
        token_routing.combine.reference(*args),
        rtol=1e-6 if dtype is torch.float32 else 0,
        atol=1e-6 if dtype is torch.float32 else 0,
    )


@pytest.mark.parametrize("moved", [False, True])
@pytest.mark.parametrize("keep", [False, True])
def test_destinations_equal_the_reference(device, moved, keep):
    ids = torch.randint(-2, 9, (300, 5))
    places = torch.randperm(7).tolist() if moved else list(range(7))
    kept = torch.rand(ids.shape) < 0.5 if keep else None
    got = exchange_ops.place_choices(ids.to(device), None if kept is None else kept.to(device), places=places)
    check_equal(got, exchange_routes.place_choices.reference(ids, kept, places=places))


@pytest.mark.sampled(5)
@pytest.mark.parametrize("dedup", [True, False])
@pytest.mark.parametrize("levels", [[4], [2, 3], [2, 2, 2]])
def test_plans_and_counts_equal_the_reference(device, dedup, levels):
    ranks = math.prod(levels)
    place = torch.randint(-1, ranks * 5, (261, 4)).int()
    there = place.to(device)
    options = dict(num_ranks=ranks, num_slots=5, dedup=dedup)
    for got, want in zip(
        exchange_ops.plan_dispatch(there, **options),
        exchange_routes.plan_dispatch.reference(place, **options),
        strict=True,
    ):
        check_equal(got, want)
    for near in ([], [2, 4] if ranks == 8 else [3, 6]) if len(levels) > 1 else ([],):
        counted = dict(levels=levels, num_slots=5, dedup=dedup, near=near, fingerprint=2**55 + 3)
        check_equal(exchange_ops.count_rows(there, **counted), exchange_routes.count_rows.reference(place, **counted))
        empty = exchange_routes.count_rows.reference(place[:0], **counted)
        check_equal(exchange_ops.count_rows(there[:0], **counted), empty)
