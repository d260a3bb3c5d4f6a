"""Providers "triton" of the ops that find, pack, unpack and add up rows that travel. Nothing is recorded (see `tape`):
how many rows there are changes with every call."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton import next_power_of_2

from ...ir import routes
from ...ir.packing import Column, Layout, layout_of_rows, most_rows
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


class _Send(NamedTuple):
    """Which row is of which choice: those whose ERI arrays these are."""

    place: Tensor
    token_ids: Tensor
    slot_ids: Tensor
    rank_offsets: Tensor


def pack_rows(
    tokens: Sequence[Tensor],
    choices: Sequence[Tensor],
    place: Tensor,
    token_ids: Tensor,
    slot_ids: Tensor,
    rank_offsets: Tensor,
    *,
    num_rows: int | None = None,
    num_slots: int,
    dedup: bool,
) -> Tensor:
    """See `ir.packing.pack_rows`."""
    num_rows = most_rows(place, rank_offsets, dedup) if num_rows is None else num_rows
    layout = layout_of_rows(tokens, choices, place, num_slots=num_slots, dedup=dedup)
    packed = layout.empty(num_rows, place)
    if not dedup:  # a row for each choice
        choices = [values.reshape(-1, 1) for values in choices]
    columns = layout.views(packed)
    place = place.contiguous()
    send = _Send(place, token_ids, slot_ids, rank_offsets)
    places = (place if dedup else place.view(-1, 1), columns.pop())
    with on(packed.device):
        narrow = zip(choices, columns[len(tokens) :], strict=True)
        _move(zip(tokens, columns, strict=False), narrow, places, num_rows, send, num_slots, by_choice=not dedup)
    return packed


def join_columns(columns: Sequence[Tensor]) -> Tensor:
    """See `ir.packing.join_columns`."""
    layout = Layout([*map(Column.like, columns)])
    packed = layout.empty(columns[0].shape[0], columns[0])
    with on(packed.device):
        _move(*_by_width(columns, layout.views(packed)), None, packed.shape[0])
    return packed


def split_columns(
    buffers: Sequence[Tensor], *, dtypes: Sequence[str], widths: Sequence[int], places: bool = False
) -> list[Tensor]:
    """See `ir.packing.split_columns`."""
    layout = Layout.of(dtypes, widths)
    sizes = [buffer.shape[0] for buffer in buffers]
    found = [buffers[0].new_empty((sum(sizes), column.width), dtype=column.dtype) for column in layout.columns]
    if places:
        found[-1] = found[-1].new_empty(found[-1].shape, dtype=torch.int32)
    with on(buffers[0].device):
        for buffer, *outs in zip(buffers, *(out.split(sizes) for out in found), strict=True):
            columns = layout.views(buffer)
            last = (columns.pop(), outs.pop()) if places else None
            _move(*_by_width(columns, outs), last, buffer.shape[0])
    return found


_Pair = tuple[Tensor, Tensor]  # what moves, and where to
_NARROW = 64


def _by_width(sources: Sequence[Tensor], outs: Sequence[Tensor]) -> tuple[list[_Pair], list[_Pair]]:
    wide, narrow = [], []
    for pair in zip(sources, outs, strict=True):
        (narrow if pair[1].shape[1] <= _NARROW else wide).append(pair)
    return wide, narrow


def _move(
    wide: Iterable[_Pair],
    narrow: Iterable[_Pair],
    places: _Pair | None,
    num_rows: int,
    send: _Send | None = None,
    num_slots: int = 1,
    by_choice: bool = False,
) -> None:
    """Rows of values as they are, a wide column, a narrow one and the places in each launch: the wide ones in the
    largest words that fit."""
    if not num_rows:
        return
    top_k = 0 if send is None else send.place.shape[1]
    own = (None, None, None) if send is None else send[1:]
    num_ranks = 0 if send is None else send.rank_offsets.shape[0] - 1
    columns = itertools.zip_longest(wide, narrow, [] if places is None else [places])
    for big, small, last in columns:
        wide_args, width, (bt, bd) = (None, 0, None, 0), 0, (_TOKENS, 1)
        if big is not None and big[1].shape[1]:
            source, out = _in_words(*map(_with_dense_rows, big))
            wide_args, width = (source, source.stride(0), out, out.stride(0)), out.shape[1]
            bt, bd = block_of(width, _ELEMENTS)
        args, widths = [*wide_args, width], []
        for pair in (small and _in_words(*map(_with_dense_rows, small)), last and map(_with_dense_rows, last)):
            if pair is None:
                args += [None, 0, None, 0]
                widths.append(0)
                continue
            source, out = pair
            args += [source, source.stride(0), out, out.stride(0)]
            widths.append(out.shape[1])
        constants = dict(NARROW=widths[0], NARROW_PAD=next_power_of_2(widths[0]), PLACES=widths[1])
        constants |= dict(PLACES_PAD=next_power_of_2(widths[1]), K=top_k, GATHER=send is not None, BY_CHOICE=by_choice)
        launch(
            rows.move_kernel,
            (cdiv(num_rows, bt), max(1, cdiv(width, bd))),
            (*args, *own, num_rows, num_slots, num_ranks),
            {**constants, "HAS_WIDE": width > 0, "BT": bt, "BD": bd},
        )


def _with_dense_rows(values: Tensor) -> Tensor:
    return values if values.stride(-1) == 1 else values.contiguous()


def _in_words(*tensors: Tensor) -> list[Tensor]:
    size = tensors[0].element_size()
    spans = [span * size for t in tensors for span in (t.shape[-1], t.stride(0), t.storage_offset())]
    word = next(w for w in _WORDS if w.itemsize <= size or all(span % w.itemsize == 0 for span in spans))
    return [t.view(word) for t in tensors]
