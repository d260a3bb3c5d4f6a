"""Pack rows of several tensors side by side into one buffer of bytes, which travels in one collective."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .op_definition import op

_ALIGNMENT = 16  # bytes, for kernels that load whole vectors


class Column(NamedTuple):
    """Dtype and width of a tensor [rows, width] in a packed buffer."""

    dtype: torch.dtype
    width: int

    @classmethod
    def of(cls, rows: Tensor) -> Column:
        return cls(rows.dtype, rows.shape[1])

    @property
    def num_bytes(self) -> int:
        return self.width * self.dtype.itemsize

    @property
    def dtype_name(self) -> str:
        """The dtype as an argument of ops, since torch 2.11 passes a list of dtypes as integers."""
        return str(self.dtype).removeprefix("torch.")


class RowLayout:
    """The layout of packed rows: the first byte of each column (`begins`), and the number of bytes of a row."""

    def __init__(self, columns: Sequence[Column]):
        self.columns = columns
        self.begins = []
        self.num_bytes = 0
        for column in columns:
            self.begins.append(self.num_bytes)
            self.num_bytes += -(-column.num_bytes // _ALIGNMENT) * _ALIGNMENT

    @classmethod
    def of(cls, dtypes: Sequence[str], widths: Sequence[int]) -> RowLayout:
        return cls([Column(getattr(torch, dtype), width) for dtype, width in zip(dtypes, widths, strict=True)])

    def empty(self, num_rows: int, template: Tensor) -> Tensor:
        """Allocate a uint8 buffer [num_rows, num_bytes] on the device of `template`."""
        return template.new_empty((num_rows, self.num_bytes), dtype=torch.uint8)

    def views(self, packed: Tensor) -> list[Tensor]:
        """Return the columns of packed rows as views."""
        spans = zip(self.begins, self.columns, strict=True)
        return [packed[:, begin : begin + column.num_bytes].view(column.dtype) for begin, column in spans]


def build_row_layout(
    token_values: Sequence[Tensor],
    slot_values: Sequence[Tensor],
    destinations: Tensor,
    *,
    destinations_per_rank: int,
    dedup: bool,
) -> RowLayout:
    """Return the layout of `pack_rows` for the same arguments. Local ids use the smallest sufficient integers."""
    integers = next(
        (t for t in (torch.int8, torch.int16) if destinations_per_rank - 1 <= torch.iinfo(t).max), torch.int32
    )
    width = destinations.shape[1] if dedup else 1
    slot_columns = [Column(c.dtype, width) for c in slot_values]
    return RowLayout([*map(Column.of, token_values), *slot_columns, Column(integers, width)])


@op(
    "pack_rows(Tensor[] tokens, Tensor[] choices, Tensor place, Tensor token_ids, Tensor slot_ids, "
    "Tensor rank_offsets, *, SymInt? num_rows=None, int num_slots, bool dedup) -> Tensor",
    contract="tokens[*], choices[*], place[S,K], token_ids[B], slot_ids[B], rank_offsets[E+1] -> packed[_,_]",
)
def pack_rows(
    token_values: list[Tensor],
    slot_values: list[Tensor],
    destinations: Tensor,
    token_ids: Tensor,
    slot_ids: Tensor,
    rank_offsets: Tensor,
    *,
    num_rows: int | None = None,
    num_slots: int,
    dedup: bool,
) -> Tensor:
    """Pack the rows that leave a rank, uint8 [num_rows, bytes]: values of tokens, values of slots, and the local ids of
    the slots' experts on the receiving rank, -1 for experts elsewhere. Without gradients.

    Args:
        token_values: [S,D] each. slot_values: [S,K] each.
        destinations: of each slot of each token. num_slots: destinations behind each rank.
        token_ids, slot_ids: token and slot of each row. The slot's destination determines the receiving rank.
        num_rows: the last of `rank_offsets`, if the host knows it. None: the maximum; rows behind the last hold any
            values.
        dedup: a row holds all slots of its token, otherwise one slot.
    """
    num_packed = count_max_rows(destinations, rank_offsets, dedup) if num_rows is None else num_rows
    row_tokens, row_slots = (ids[:num_packed].to(torch.int64) for ids in (token_ids, slot_ids))
    row_destinations = destinations[row_tokens, row_slots][:, None]
    if dedup:
        local_ids, row_ranks = destinations[row_tokens], torch.div(row_destinations, num_slots, rounding_mode="floor")
        is_there = torch.div(local_ids, num_slots, rounding_mode="floor") == row_ranks
        local_ids = (local_ids % num_slots).masked_fill_(~is_there, -1)
    else:
        local_ids = row_destinations % num_slots
    layout = build_row_layout(token_values, slot_values, destinations, destinations_per_rank=num_slots, dedup=dedup)
    packed = layout.empty(num_packed, destinations)
    slot_columns = [c[row_tokens] if dedup else c[row_tokens, row_slots][:, None] for c in slot_values]
    for view, values in zip(
        layout.views(packed), [*(t[row_tokens] for t in token_values), *slot_columns, local_ids], strict=True
    ):
        view.copy_(values)
    return packed


def count_max_rows(destinations: Tensor, rank_offsets: Tensor, dedup: bool) -> Any:
    """Return the maximum number of rows for destinations [S,K]."""
    num_tokens, top_k = destinations.shape
    return num_tokens * (min(top_k, rank_offsets.shape[0] - 1) if dedup else top_k)


@op("join_columns(Tensor[] columns) -> Tensor", contract="columns[*] -> packed[_,_]")
def join_columns(columns: list[Tensor]) -> Tensor:
    """Pack columns [N,width] into rows, uint8 [N, bytes]."""
    layout = RowLayout([*map(Column.of, columns)])
    packed = layout.empty(columns[0].shape[0], columns[0])
    for view, column in zip(layout.views(packed), columns, strict=True):
        view.copy_(column)
    return packed


@op(
    "split_columns(Tensor[] buffers, *, str[] dtypes, SymInt[] widths, bool places=False) -> Tensor[]",
    contract="buffers[*] -> columns[*]",
)
def split_columns(buffers: list[Tensor], *, dtypes: list[str], widths: list[int], places: bool = False) -> list[Tensor]:
    """Unpack buffers of rows into columns, and concatenate the buffers. With `places`, the last column holds local ids,
    which become int32."""
    layout = RowLayout.of(dtypes, widths)
    columns = [torch.cat(parts) for parts in zip(*map(layout.views, buffers), strict=True)]
    return [*columns[:-1], columns[-1].to(torch.int32)] if places else columns


pack_rows.without_gradient()


@pack_rows.fake
def _(token_values, slot_values, destinations, token_ids, slot_ids, rank_offsets, *, num_rows=None, num_slots, dedup):
    num_rows = count_max_rows(destinations, rank_offsets, dedup) if num_rows is None else num_rows
    return build_row_layout(
        token_values, slot_values, destinations, destinations_per_rank=num_slots, dedup=dedup
    ).empty(num_rows, destinations)


@join_columns.fake
def _(columns):
    return RowLayout([*map(Column.of, columns)]).empty(columns[0].shape[0], columns[0])


@split_columns.fake
def _(buffers, *, dtypes, widths, places=False):
    num_rows, columns = sum(b.shape[0] for b in buffers), [*RowLayout.of(dtypes, widths).columns]
    if places:
        columns[-1] = columns[-1]._replace(dtype=torch.int32)
    return [buffers[0].new_empty((num_rows, c.width), dtype=c.dtype) for c in columns]


# -- shapes for collectives


def pad_rows(rows: Tensor, length: int, value: int = 0) -> Tensor:
    """Pad rows [S, ...] to [L, ...]."""
    num_missing = length - rows.shape[0]
    if not num_missing:
        return rows.contiguous()
    return torch.cat([rows, rows.new_full((num_missing, *rows.shape[1:]), value)])


def make_ticket(template: Tensor, num_rows: Any, width: Any, dtype: torch.dtype | None = None) -> Tensor:
    """Make a tensor [num_rows, width] without memory, on the device of `template` and by default of its dtype."""
    return template.new_empty((), dtype=dtype).expand(num_rows, width)
