"""Rows of several tensors behind one another in one buffer of bytes, so that they travel in one collective."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

_ALIGNMENT = 16  # bytes; what kernels that load rows by descriptors ask for


def group_of(name: str) -> dist.ProcessGroup:
    """The process group of a name, as `ProcessGroup.group_name` tells it."""
    return dist.distributed_c10d._resolve_process_group(name)  # type: ignore[attr-defined]


def exchanged(columns: Sequence[Tensor], sent: list[int], received: list[int], group: str) -> list[Tensor]:
    """An uneven all-to-all of rows, in the order of the ranks.

    Args:
        columns: tensors of sum(sent) rows each, of any dtypes and shapes behind the first axis.
        sent, received: rows for and from each rank.

    Returns:
        The same tensors with sum(received) rows. The first one is part of the buffer that was received (its rows are
        as far apart as that has them), the others are copies.
    """
    own = group_of(group)
    if len(columns) == 1:
        rows = columns[0].contiguous()
        out = rows.new_empty((sum(received), *rows.shape[1:]))
        dist.all_to_all_single(out, rows, received, sent, group=own)
        return [out]
    begins, width = [], 0
    for column in columns:
        begins.append(width)
        width += -(-_bytes_of_row(column) // _ALIGNMENT) * _ALIGNMENT
    packed = columns[0].new_empty((sum(sent), width), dtype=torch.uint8)
    for begin, column in zip(begins, columns, strict=True):
        _column(packed, begin, column).copy_(column)
    out = packed.new_empty((sum(received), width))
    dist.all_to_all_single(out, packed, received, sent, group=own)
    first, *others = (_column(out, begin, column) for begin, column in zip(begins, columns, strict=True))
    return [first, *(other.contiguous() for other in others)]


def _bytes_of_row(column: Tensor) -> int:
    return math.prod(column.shape[1:]) * column.element_size()


def _column(packed: Tensor, begin: int, like: Tensor) -> Tensor:
    """The part of packed rows that holds values such as `like`."""
    part = packed[:, begin : begin + _bytes_of_row(like)].view(like.dtype)
    return part.unflatten(1, like.shape[1:]) if like.dim() != 2 else part
