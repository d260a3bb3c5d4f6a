"""Provider "grouped_mm": torch's grouped GEMM, one kernel over all experts without a host sync, for bfloat16.

`torch.nn.functional.grouped_mm` takes the offsets on the device. It has fused kernels for bfloat16 on sm90 and newer,
and on AMD's gfx942 and newer. On other devices torch loops over the experts on the host, and "segments" is faster.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ...ir.ops.expert_gemms import (
    check_dtypes,
    check_weight_shape,
    expert_rows_backward,
    find_row_experts,
    grouped_mm,
    grouped_mm_backward,
    has_separate_gradients,
    is_stacked,
)
from ...ir.ops.token_routing import combine
from .segments import PftIndex
from .weight_lists import stack_weights

_ALIGNMENT = 8  # elements of 16 bit: the kernels read 16 bytes at a time


def supports_grouped_mm(rows: Tensor, dtype: torch.dtype | None, *weights: Sequence[Tensor]) -> bool:
    """Return whether the fused kernel takes these rows and these lists of weights."""
    if rows.device.type != "cuda" or (dtype or rows.dtype) is not torch.bfloat16 or rows.shape[0] == 0:
        return False
    widths = [rows.shape[-1], *(size for w in weights for size in w[0].shape[-2:])]
    # Stacked weights are read in place, by their strides. Separate weights, or weights to be cast, may be copied.
    in_place = [w[0] for w in weights if is_stacked(w, 2) and w[0].dtype is torch.bfloat16]
    return (
        all(w % _ALIGNMENT == 0 for w in widths) and all(map(_is_readable, in_place)) and _has_fused_kernel(rows.device)
    )


@functools.cache
def _has_fused_kernel(device: torch.device) -> bool:
    return torch.cuda.get_device_capability(device) >= (9, 0)


def _is_readable(w: Tensor) -> bool:
    *outer, row, column = w.stride()
    strides = (*outer, max(row, column))
    return min(row, column) == 1 and all(s % _ALIGNMENT == 0 for s in strides) and w.data_ptr() % 16 == 0


def _multiply_grouped(left: Tensor, right: Tensor, ends: Tensor) -> Tensor:
    """Multiply [B,n] @ [E,n,m] in blocks of rows, or [n,B] @ [B,m] -> [E,n,m] in blocks of the inner dimension."""
    return torch.nn.functional.grouped_mm(left, right, offs=ends)


class WholeGroup:
    """All rows as one group (see `segments.Group`)."""

    index = 0

    def drop_padding(self, rows: Tensor) -> Tensor:
        return rows

    def clear_padding(self, rows: Tensor, *, copy: bool = False) -> Tensor:
        return rows

    repeat_last = drop_padding


class GroupedGemms:
    """The GEMMs of one call as grouped GEMMs, with the interface of `segments.SegmentGemms`.

    The kernels allocate their results.
    """

    def __init__(self, expert_offsets: Tensor, dtype: torch.dtype, matrix_size: int = 0):
        self.expert_offsets, self.ends, self.dtype = expert_offsets, expert_offsets[1:], dtype

    def for_each_group(
        self,
        work: Callable[[WholeGroup], Any],
        then: Callable[[WholeGroup, Any], None] | None = None,
        *,
        multiplications: int,
    ) -> None:
        result = work(WholeGroup())
        if then is not None:
            then(WholeGroup(), result)

    def prepare_weights(self, w: Sequence[Tensor], transposed: bool) -> Tensor:
        stacked = stack_weights(w, self.dtype)
        return stacked.transpose(1, 2) if transposed else stacked

    def transpose_weights(self, w: Tensor) -> Tensor:
        return w.transpose(1, 2)

    def prepare_biases(self, v: Sequence[Tensor] | None) -> Tensor | None:
        if v is None:
            return None
        return v[0] if is_stacked(v, 1) else torch.stack(list(v))

    def input_slices(self, rows: Tensor) -> list[Tensor]:
        return [rows]

    def result_slices(self, rows: Tensor) -> list[Tensor]:
        return [rows]

    def new_rows(self, like: Tensor, num_rows: int, width: int, dtype: torch.dtype) -> Tensor | None:
        return None

    def new_sum(self, index: PftIndex, width: int, dtype: torch.dtype) -> TokenSum:
        return TokenSum(index)

    def new_stack(self, parameters: Sequence[Tensor], dim: int) -> Tensor | None:
        return None

    def finish_rows(self, rows: Tensor) -> Tensor:
        return rows

    def finish_stack(self, stack: Tensor, parameters: Sequence[Tensor]) -> list[Tensor]:
        if has_separate_gradients(parameters, stack.dim() - 1):
            return [g.clone() for g in stack]
        return [stack.contiguous()]

    def multiply(
        self,
        group: WholeGroup,
        rows: Tensor,
        w: Tensor,
        out: Tensor | None = None,
        *,
        bias: Tensor | None = None,
        add: bool = False,
    ) -> Tensor:
        product = self.add_bias(group, _multiply_grouped(rows.contiguous(), w, self.ends), bias)
        return product if out is None or not add else out.add_(product)

    def outer(self, group: WholeGroup, left: Tensor, right: Tensor, out: None, dtype: torch.dtype) -> Tensor:
        return _multiply_grouped(left.contiguous().t(), right.contiguous(), self.ends).to(dtype)

    def add_bias(self, group: WholeGroup, rows: Tensor, bias: Tensor | None) -> Tensor:
        return rows if bias is None else rows.add_(self._repeat_by_row(bias, rows))

    def dot_bias(self, group: WholeGroup, rows: Tensor, bias: Tensor) -> Tensor:
        return (rows * self._repeat_by_row(bias, rows)).sum(1, keepdim=True, dtype=torch.float32)

    def sum_rows(self, group: WholeGroup, rows: Tensor, out: None, dtype: torch.dtype) -> Tensor:
        # A GEMM with ones accumulates in float32 and fixed order, and ignores the tail.
        rows = rows.to(self.dtype)
        ones = torch.ones((rows.shape[0], _ALIGNMENT), dtype=rows.dtype, device=rows.device)
        return self.outer(group, ones, rows, None, dtype)[:, 0]

    def _repeat_by_row(self, table: Tensor, rows: Tensor) -> Tensor:
        return table.to(rows.dtype).index_select(0, find_row_experts(self.expert_offsets, rows.shape[0]))


class TokenSum:
    """The sum of each token's rows, [S,width]."""

    def __init__(self, index: PftIndex):
        self.index, self.rows = index, torch.empty(0, dtype=torch.float32)

    def add(self, group: WholeGroup, rows: Tensor) -> None:
        self.rows = rows

    def result(self) -> Tensor:
        return combine(self.rows, None, self.index.token_ids, self.index.expert_offsets, self.index.inverse)


@grouped_mm.provider(
    "grouped_mm", supports=lambda rows, w, *_, transposed, dtype=None: supports_grouped_mm(rows, dtype, w)
)
def _grouped_mm(
    rows: Tensor,
    w: list[Tensor],
    expert_offsets: Tensor,
    summand: Tensor | None = None,
    *,
    transposed: bool,
    dtype: torch.dtype | None = None,
) -> Tensor:
    gemms = GroupedGemms(expert_offsets, check_dtypes("grouped_mm", rows, w, dtype))
    check_weight_shape("grouped_mm", w, expert_offsets, transposed, rows.shape[1])
    product = gemms.multiply(WholeGroup(), rows, gemms.prepare_weights(w, transposed))
    return product if summand is None else product.add_(summand)


@grouped_mm_backward.provider(
    "grouped_mm",
    supports=lambda grad, rows, expert_offsets, *, transposed, dtype: (
        supports_grouped_mm(rows, None) and grad.shape[-1] % _ALIGNMENT == 0
    ),
)
def _grouped_mm_backward(
    grad: Tensor, rows: Tensor, expert_offsets: Tensor, *, transposed: bool, dtype: torch.dtype
) -> Tensor:
    left, right = (grad, rows) if transposed else (rows, grad)
    return GroupedGemms(expert_offsets, rows.dtype).outer(WholeGroup(), left, right, None, dtype)


@expert_rows_backward.provider(
    "grouped_mm", supports=lambda grad, expert_offsets, *, dtype: supports_grouped_mm(grad, None)
)
def _expert_rows_backward(grad: Tensor, expert_offsets: Tensor, *, dtype: torch.dtype) -> Tensor:
    return GroupedGemms(expert_offsets, grad.dtype).sum_rows(WholeGroup(), grad, None, dtype).contiguous()
