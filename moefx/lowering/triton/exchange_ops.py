"""Providers "triton" of the exchange ops: they find, pack, unpack and sum the rows that travel.

Their launches are not replayed (see `launch_replay`), because the number of rows changes with every call.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton import language as tl
from triton import next_power_of_2

from ...ir.ops import counts_layout, exchange_routes
from ...ir.ops.row_packing import Column, RowLayout, build_row_layout, count_max_rows
from . import destination_kernels
from . import row_kernels as rows
from .build_pft import build_pft
from .launch import cdiv, choose_block, launch, use_device

_ELEMENTS = 4096  # elements of a block
_TOKENS = 128  # tokens of a block, with all their slots


def combine(
    rows_in: Tensor, combine_weights: Tensor | None, token_ids: Tensor, expert_offsets: Tensor, inverse: Tensor
) -> Tensor:
    """See `ir.ops.token_routing.combine`."""
    scale = None if combine_weights is None else rows.identity_scale
    with use_device(rows_in.device):
        return sum_rows_of_tokens(rows_in.contiguous(), combine_weights, inverse, rows_in.dtype, scale)


def sum_rows_of_tokens(
    rows_in: Tensor, row_weights: Tensor | None, inverse: Tensor, dtype: torch.dtype, scale: Any
) -> Tensor:
    """Sum each token's rows, each times `scale(weight)`, [S,width].

    Args:
        scale: a Triton function, or None.
    """
    (num_tokens, top_k), width = inverse.shape, rows_in.shape[1]
    out = rows_in.new_empty((num_tokens, width), dtype=dtype)
    bt, bd = choose_block(width)
    if out.numel():
        launch(
            rows.combine_kernel,
            (cdiv(num_tokens, bt), cdiv(width, bd)),
            (rows_in, row_weights, inverse.contiguous(), out, num_tokens, width),
            dict(SCALE=scale, K=top_k, HAS_SCALE=scale is not None, BT=bt, BD=bd),
        )
    return out


def place_choices(topk_ids: Tensor, keep: Tensor | None, *, places: Sequence[int]) -> Tensor:
    """See `ir.ops.exchange_routes.place_choices`."""
    destinations = topk_ids.new_empty(topk_ids.shape, dtype=torch.int32)
    if not destinations.numel():
        return destinations
    table = exchange_routes.build_destination_table(places, topk_ids.device)
    keep_bytes = None if keep is None else keep.contiguous().view(torch.uint8)
    with use_device(destinations.device):
        launch(
            destination_kernels.destinations_kernel,
            (cdiv(destinations.numel(), 1024),),
            (topk_ids.contiguous(), keep_bytes, table, destinations, destinations.numel(), len(places)),
            dict(HAS_KEEP=keep is not None, HAS_TABLE=table is not None, BLOCK=1024),
        )
    return destinations


def plan_dispatch(
    destinations: Tensor, *, num_ranks: int, num_slots: int, dedup: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """See `ir.ops.exchange_routes.plan_dispatch`."""
    if not dedup or not destinations.numel():
        return exchange_routes.plan_dispatch.reference(
            destinations, num_ranks=num_ranks, num_slots=num_slots, dedup=dedup
        )
    pilots = torch.empty_like(destinations, memory_format=torch.contiguous_format)
    num_tokens, top_k = destinations.shape
    with use_device(destinations.device):
        launch(
            destination_kernels.pilots_kernel,
            (cdiv(num_tokens, _TOKENS),),
            (destinations.contiguous(), pilots, num_tokens, num_slots),
            dict(K=top_k, BLOCK=_TOKENS),
        )
    return build_pft(pilots, None, None, num_experts=num_ranks)[:4]


def count_rows(
    destinations: Tensor,
    *,
    levels: Sequence[int],
    num_slots: int,
    dedup: bool,
    near: Sequence[int],
    fingerprint: int = 0,
) -> Tensor:
    """See `ir.ops.exchange_routes.count_rows`."""
    counts = _zeros_ending_with(fingerprint, counts_layout.num_row_counts(levels, near), destinations.device).clone()
    if not destinations.numel():
        return counts
    table, bins = _build_count_table(tuple(levels), num_slots, dedup, tuple(near), destinations.device)
    num_tokens, top_k = destinations.shape
    with use_device(destinations.device):
        launch(
            destination_kernels.count_rows_kernel,
            (cdiv(num_tokens, _TOKENS), table.shape[0]),
            (destinations.contiguous(), counts, table, num_tokens),
            dict(K=top_k, BINS=bins, BLOCK=_TOKENS),
        )
    return counts


@functools.lru_cache(maxsize=64)
def _zeros_ending_with(last: int, size: int, device: torch.device) -> Tensor:
    return torch.tensor([*[0] * (size - 1), last], device=device)


@functools.lru_cache(maxsize=64)
def _build_count_table(
    levels: tuple[int, ...], destinations_per_rank: int, dedup: bool, near: tuple[int, ...], device: torch.device
) -> tuple[Tensor, int]:
    """Return the requests of `count_rows_kernel` in the order of its results, and its number of bins."""
    units, (begin, end) = counts_layout.count_units(levels), (p * destinations_per_rank for p in near or (0, 0))
    positions = units[-1]
    requests = [[n, positions // n * destinations_per_rank, int(dedup), 0, begin, end] for n in units]
    requests += [[near[1] - near[0], destinations_per_rank, int(dedup), 1, begin, end]] if near else []
    requests += [[positions, destinations_per_rank, 0, 0, 0, 0]]
    begins = itertools.accumulate([0, *(request[0] for request in requests[:-1])])
    table = [[first_count, *request] for first_count, request in zip(begins, requests, strict=True)]
    return torch.tensor(table, dtype=torch.int32, device=device), max(
        16, next_power_of_2(max(request[0] for request in requests))
    )


class _SendArrays(NamedTuple):
    """The index arrays that map sent rows to their slots."""

    destinations: Tensor
    token_ids: Tensor
    slot_ids: Tensor
    rank_offsets: Tensor


class _ColumnMemory(NamedTuple):
    """The memory of a column: tensor, bytes from row to row, bytes to the first row."""

    base: Tensor
    stride: int
    begin: int = 0

    @classmethod
    def of(cls, values: Tensor) -> _ColumnMemory:
        values = values if values.stride(-1) == 1 else values.contiguous()
        return cls(values, values.stride(0) * values.element_size())


_ColumnMove = tuple[Column, _ColumnMemory, _ColumnMemory]  # column, source, output
_MAX_NARROW_BYTES = 256  # of a narrow column


def pack_rows(
    token_values: Sequence[Tensor],
    slot_values: Sequence[Tensor],
    destinations: Tensor,
    token_ids: Tensor,
    slot_ids: Tensor,
    rank_offsets: Tensor,
    *,
    num_rows: int | None = None,
    num_slots: int,
    dedup: bool,
) -> Tensor:
    """See `ir.ops.row_packing.pack_rows`."""
    num_packed = count_max_rows(destinations, rank_offsets, dedup) if num_rows is None else num_rows
    layout = build_row_layout(token_values, slot_values, destinations, destinations_per_rank=num_slots, dedup=dedup)
    packed = layout.empty(num_packed, destinations)
    destinations = destinations.contiguous()
    sources = [*token_values, *slot_values, destinations]
    if not dedup:  # a row for each slot
        sources[len(token_values) :] = [values.reshape(-1, 1) for values in sources[len(token_values) :]]
    moves = [
        (column, _ColumnMemory.of(source), _ColumnMemory(packed, layout.num_bytes, begin))
        for column, source, begin in zip(layout.columns, sources, layout.begins, strict=True)
    ]
    _, ids_source, ids_out = moves.pop()
    send = _SendArrays(destinations, token_ids, slot_ids, rank_offsets)
    local_ids = (_INT32._replace(width=layout.columns[-1].width), layout.columns[-1].dtype, ids_source, ids_out)
    with use_device(packed.device):
        _launch_moves(
            moves[: len(token_values)],
            moves[len(token_values) :],
            local_ids,
            num_packed,
            send,
            num_slots,
            by_slot=not dedup,
        )
    return packed


def join_columns(columns: Sequence[Tensor]) -> Tensor:
    """See `ir.ops.row_packing.join_columns`."""
    layout = RowLayout([*map(Column.of, columns)])
    packed = layout.empty(columns[0].shape[0], columns[0])
    moves = [
        (column, _ColumnMemory.of(source), _ColumnMemory(packed, layout.num_bytes, begin))
        for column, source, begin in zip(layout.columns, columns, layout.begins, strict=True)
    ]
    with use_device(packed.device):
        _launch_moves(*_split_by_width(moves), None, packed.shape[0])
    return packed


def split_columns(
    buffers: Sequence[Tensor], *, dtypes: Sequence[str], widths: Sequence[int], places: bool = False
) -> list[Tensor]:
    """See `ir.ops.row_packing.split_columns`."""
    layout = RowLayout.of(dtypes, widths)
    result_dtypes = [column.dtype for column in layout.columns]
    if places:
        result_dtypes[-1] = torch.int32
    num_rows, device = sum([buffer.shape[0] for buffer in buffers]), buffers[0].device
    columns = [
        torch.empty((num_rows, column.width), dtype=dtype, device=device)
        for column, dtype in zip(layout.columns, result_dtypes, strict=True)
    ]
    row = 0
    with use_device(device):
        for buffer in buffers:
            outs = columns if len(buffers) == 1 else [out[row : row + buffer.shape[0]] for out in columns]
            row += buffer.shape[0]
            moves = [
                (column, _ColumnMemory(buffer, layout.num_bytes, begin), _ColumnMemory.of(out))
                for column, out, begin in zip(layout.columns, outs, layout.begins, strict=True)
            ]
            ids_move = None
            if places:
                column, source, out = moves.pop()
                ids_move = (column, torch.int32, source, out)
            _launch_moves(*_split_by_width(moves), ids_move, buffer.shape[0])
    return columns


def _split_by_width(moves: Sequence[_ColumnMove]) -> tuple[list[_ColumnMove], list[_ColumnMove]]:
    wide, narrow = [], []
    for move in moves:
        (narrow if move[0].num_bytes <= _MAX_NARROW_BYTES else wide).append(move)
    return wide, narrow


def _launch_moves(
    wide: Iterable[_ColumnMove],
    narrow: Iterable[_ColumnMove],
    local_ids: tuple[Column, torch.dtype, _ColumnMemory, _ColumnMemory] | None,
    num_rows: int,
    send: _SendArrays | None = None,
    destinations_per_rank: int = 1,
    by_slot: bool = False,
) -> None:
    """Move rows without changing their values: a wide column, a narrow one and one of ids in each launch.

    The kernel gets columns as bytes, because creating a view of a tensor takes as long as a launch.
    """
    if not num_rows:
        return
    top_k = 0 if send is None else send.destinations.shape[1]
    sent_columns = (None, None, None) if send is None else send[1:]
    num_ranks = 0 if send is None else send.rank_offsets.shape[0] - 1
    for wide_move, narrow_move, ids_move in itertools.zip_longest(
        wide, narrow, [] if local_ids is None else [local_ids]
    ):
        wide_column, wide_args = _column_arguments(wide_move)
        narrow_column, narrow_args = _column_arguments(narrow_move)
        ids_column, ids_args = None, _NO_COLUMN
        if ids_move is not None:
            column, dtype, source, out = ids_move
            ids_column = _WORD_TYPES[column.dtype], column.width, source.begin, out.begin, _WORD_TYPES[dtype]
            strides = source.stride // column.dtype.itemsize, out.stride // dtype.itemsize
            ids_args = (source.base, strides[0], out.base, strides[1])
        width = 0 if wide_column is None else wide_column[1]
        bt, bd = choose_block(width, _ELEMENTS) if width else (_TOKENS, 1)
        constants = dict(WIDE=wide_column, NARROW=narrow_column, LOCAL_IDS=ids_column, BT=bt, BD=bd)
        constants |= dict(NARROW_PAD=_padded_width(narrow_column), LOCAL_IDS_PAD=_padded_width(ids_column))
        launch(
            rows.move_kernel,
            (cdiv(num_rows, bt), max(1, cdiv(width, bd))),
            (*wide_args, width, *narrow_args, *ids_args, *sent_columns, num_rows, destinations_per_rank, num_ranks),
            {**constants, "K": top_k, "GATHER": send is not None, "BY_SLOT": by_slot},
        )


_WORD_TYPES = {torch.int64: tl.int64, torch.int32: tl.int32, torch.int16: tl.int16, torch.int8: tl.int8}
_WORD_TYPES_BY_SIZE = {dtype.itemsize: word for dtype, word in _WORD_TYPES.items()}
_INT32 = Column(torch.int32, 1)
_NO_COLUMN = (None, 0, None, 0)


def _column_arguments(move: _ColumnMove | None) -> tuple[Any, Sequence[Any]]:
    """Return the kernel's arguments for a column, in the largest words that divide its sizes."""
    if move is None or not move[0].num_bytes:
        return None, _NO_COLUMN
    column, source, out = move
    spans = [column.num_bytes, source.stride, source.begin, out.stride, out.begin]
    size = math.gcd(8, source.base.data_ptr(), out.base.data_ptr(), *spans)
    layout = (_WORD_TYPES_BY_SIZE[size], column.num_bytes // size, source.begin, out.begin)
    return layout, (source.base, source.stride // size, out.base, out.stride // size)


def _padded_width(column: Any) -> int:
    return 0 if column is None else next_power_of_2(column[1])
