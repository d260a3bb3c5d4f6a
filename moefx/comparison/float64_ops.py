"""Float64 equivalents of torch ops without a float64 kernel, for the truth of programs with these ops."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

aten = torch.ops.aten


def grouped_mm(
    a: Tensor, b: Tensor, offs: Tensor | None = None, bias: Tensor | None = None, out_dtype: torch.dtype | None = None
) -> Tensor:
    """Compute `torch.nn.functional.grouped_mm` in float64: one matrix product per group.

    Args:
        a, b: [T,K] and [G,K,N], groups of rows -> [T,N]; [G,M,K] and [K,T], groups of columns -> [M,T];
            [M,T] and [T,N], groups of the reduction -> [G,M,N]; [G,M,K] and [G,K,N] -> [G,M,N].
        offs: [G], the end of each group. Rows or columns beyond the last group are zero.
    """
    a, b = a.double(), b.double()
    if offs is None:
        return torch.bmm(a, b)
    groups = list(enumerate(pairwise([0, *offs.tolist()])))
    if a.dim() == 2 and b.dim() == 3:
        out = a.new_zeros(a.shape[0], b.shape[2])
        for i, (start, stop) in groups:
            out[start:stop] = a[start:stop] @ b[i]
    elif a.dim() == 3:
        out = a.new_zeros(a.shape[1], b.shape[1])
        for i, (start, stop) in groups:
            out[:, start:stop] = a[i] @ b[:, start:stop]
    else:
        out = torch.stack([a[:, start:stop] @ b[start:stop] for _, (start, stop) in groups])
    return out if bias is None else out + bias


_EQUIVALENTS: dict[Any, Callable[..., Tensor]] = {aten._grouped_mm.default: grouped_mm}


def find_equivalent(func: Any, args: tuple[Any, ...]) -> Callable[..., Tensor] | None:
    """Return the equivalent of an op that is called with float64 tensors; None if the op has a float64 kernel."""
    if (equivalent := _EQUIVALENTS.get(func)) is None:
        return None
    return equivalent if any(isinstance(a, Tensor) and a.dtype == torch.float64 for a in args) else None


__all__ = ["find_equivalent", "grouped_mm"]
