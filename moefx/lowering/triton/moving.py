"""Providers "triton" of the ops that find, pack, unpack and add up rows that travel. Nothing is recorded (see `tape`):
how many rows there are changes with every call."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from triton import next_power_of_2

from ...ir import routes
from ...ir.packing import Column, Layout, layout_of_rows
from . import places as _places
from . import rows
from .launch import block_of, cdiv, launch, on
from .routing import build_pft

_ELEMENTS = 4096  # of a block
_TOKENS = 128  # of a block, with all their choices
_WORDS = (torch.int64, torch.int32, torch.int16, torch.int8)


def combine(
    rows_in: Tensor, combine_weights: Tensor | None, token_ids: Tensor, expert_offsets: Tensor, inverse: Tensor
) -> Tensor:
    """See `ir.routing.combine`."""
    scale = None if combine_weights is None else rows.as_it_is
    with on(rows_in.device):
        return sum_rows_of_tokens(rows_in.contiguous(), combine_weights, inverse, rows_in.dtype, scale)


def sum_rows_of_tokens(
    rows_in: Tensor, row_weights: Tensor | None, inverse: Tensor, dtype: torch.dtype, scale: Any
) -> Tensor:
    """The sum of each token's rows, each times `scale` (a function of kernels) of its weight, [S,width]."""
    (num_tokens, num_slots), width = inverse.shape, rows_in.shape[1]
    out = rows_in.new_empty((num_tokens, width), dtype=dtype)
    bt, bd = block_of(width)
    if out.numel():
        launch(
            rows.combine_kernel,
            (cdiv(num_tokens, bt), cdiv(width, bd)),
            (rows_in, row_weights, inverse.contiguous(), out, num_tokens, width),
            dict(SCALE=scale, K=num_slots, HAS_SCALE=scale is not None, BT=bt, BD=bd),
        )
    return out


def place_choices(topk_ids: Tensor, keep: Tensor | None, *, places: Sequence[int]) -> Tensor:
    """See `ir.routes.place_choices`."""
    place = topk_ids.new_empty(topk_ids.shape, dtype=torch.int32)
    if not place.numel():
        return place
    table = routes.table_of(places, topk_ids.device)
    kept = None if keep is None else keep.contiguous().view(torch.uint8)
    with on(place.device):
        launch(
            _places.place_kernel,
            (cdiv(place.numel(), 1024),),
            (topk_ids.contiguous(), kept, table, place, place.numel(), len(places)),
            dict(HAS_KEEP=keep is not None, HAS_TABLE=table is not None, BLOCK=1024),
        )
    return place


def plan_dispatch(
    place: Tensor, *, num_ranks: int, num_slots: int, dedup: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """See `ir.routes.plan_dispatch`."""
    if not dedup or not place.numel():
        return routes.plan_dispatch.reference(place, num_ranks=num_ranks, num_slots=num_slots, dedup=dedup)
    pilot = torch.empty_like(place, memory_format=torch.contiguous_format)
    num_tokens, top_k = place.shape
    with on(place.device):
        launch(
            _places.pilots_kernel,
            (cdiv(num_tokens, _TOKENS),),
            (place.contiguous(), pilot, num_tokens, num_slots),
            dict(K=top_k, BLOCK=_TOKENS),
        )
    return build_pft(pilot, None, None, num_experts=num_ranks)[:4]


def count_rows(
    place: Tensor, *, levels: Sequence[int], num_slots: int, dedup: bool, near: Sequence[int], fingerprint: int = 0
) -> Tensor:
    """See `ir.routes.count_rows`."""
    counts = _zeros_and(fingerprint, routes.num_counts(levels, near), place.device).clone()
    if not place.numel():
        return counts
    wanted, bins = _wanted(tuple(levels), num_slots, dedup, tuple(near), place.device)
    num_tokens, top_k = place.shape
    with on(place.device):
        launch(
            _places.count_rows_kernel,
            (cdiv(num_tokens, _TOKENS), wanted.shape[0]),
            (place.contiguous(), counts, wanted, num_tokens),
            dict(K=top_k, BINS=bins, BLOCK=_TOKENS),
        )
    return counts


@functools.lru_cache(maxsize=64)
def _zeros_and(last: int, size: int, device: torch.device) -> Tensor:
    return torch.tensor([*[0] * (size - 1), last], device=device)


@functools.lru_cache(maxsize=64)
def _wanted(
    levels: tuple[int, ...], num_slots: int, dedup: bool, near: tuple[int, ...], device: torch.device
) -> tuple[Tensor, int]:
    """What `count_rows_kernel` counts, in the order of the numbers; and room for the most units of one."""
    units, (begin, end) = routes.units_of(levels), (p * num_slots for p in near or (0, 0))
    positions = units[-1]
    rows = [[n, positions // n * num_slots, int(dedup), 0, begin, end] for n in units]
    rows += [[near[1] - near[0], num_slots, int(dedup), 1, begin, end]] if near else []
    rows += [[positions, num_slots, 0, 0, 0, 0]]
    stored = itertools.accumulate([0, *(row[0] for row in rows[:-1])])
    table = [[at, *row] for at, row in zip(stored, rows, strict=True)]
    return torch.tensor(table, dtype=torch.int32, device=device), max(16, next_power_of_2(max(row[0] for row in rows)))


def pack_rows(
    tokens: Sequence[Tensor],
    choices: Sequence[Tensor],
    place: Tensor,
    token_ids: Tensor,
    slot_ids: Tensor,
    *,
    num_rows: int,
    num_slots: int,
    dedup: bool,
) -> Tensor:
    """See `ir.packing.pack_rows`."""
    top_k = place.shape[1]
    layout = layout_of_rows(tokens, choices, place, num_slots=num_slots, dedup=dedup)
    packed = layout.empty(num_rows, place)
    if not num_rows:
        return packed
    *columns, places = layout.views(packed)
    with on(packed.device):
        for values, out in zip(tokens, columns, strict=False):
            _move(values, out, token_ids)
        for values, out in zip(choices, columns[len(tokens) :], strict=True):
            _move(values if dedup else values.reshape(-1, 1), out, token_ids, None if dedup else slot_ids, top_k)
        pad = next_power_of_2(top_k)
        bt = max(1, 1024 // pad)
        launch(
            rows.local_places_kernel,
            (cdiv(num_rows, bt),),
            (place.contiguous(), token_ids, slot_ids, places, places.stride(0), num_rows, num_slots),
            dict(K=top_k, K_PAD=pad, DEDUP=dedup, BT=bt),
        )
    return packed


def join_columns(columns: Sequence[Tensor]) -> Tensor:
    """See `ir.packing.join_columns`."""
    layout = Layout([*map(Column.like, columns)])
    packed = layout.empty(columns[0].shape[0], columns[0])
    if packed.shape[0]:
        with on(packed.device):
            for values, out in zip(columns, layout.views(packed), strict=True):
                _move(values, out)
    return packed


def split_columns(buffers: Sequence[Tensor], *, dtypes: Sequence[str], widths: Sequence[int]) -> list[Tensor]:
    """See `ir.packing.split_columns`."""
    layout, found = Layout.of(dtypes, widths), []
    sizes = [buffer.shape[0] for buffer in buffers]
    for column in layout.columns:
        found.append(buffers[0].new_empty((sum(sizes), column.width), dtype=column.dtype))
    with on(buffers[0].device):
        parts = zip(*(out.split(sizes) for out in found), strict=True)
        for buffer, outs in zip(buffers, parts, strict=True):
            for values, out in zip(layout.views(buffer), outs, strict=True):
                if buffer.shape[0]:
                    _move(values, out)
    return found


def _move(
    source: Tensor, out: Tensor, token_ids: Tensor | None = None, slot_ids: Tensor | None = None, top_k: int = 0
) -> None:
    """Rows of values as they are, in the largest words that fit."""
    if source.stride(-1) != 1:
        source = source.contiguous()
    source, out = _in_words(source, out)
    num_rows, width = out.shape
    bt, bd = block_of(width, _ELEMENTS)
    launch(
        rows.move_kernel,
        (cdiv(num_rows, bt), cdiv(width, bd)),
        (source, source.stride(0), token_ids, slot_ids, out, out.stride(0), num_rows, width),
        dict(K=0 if slot_ids is None else top_k, GATHER=token_ids is not None, BT=bt, BD=bd),
    )


def _in_words(*tensors: Tensor) -> list[Tensor]:
    size = tensors[0].element_size()
    spans = [span * size for t in tensors for span in (t.shape[-1], t.stride(0), t.storage_offset())]
    word = next(w for w in _WORDS if w.itemsize <= size or all(span % w.itemsize == 0 for span in spans))
    return [t.view(word) for t in tensors]
