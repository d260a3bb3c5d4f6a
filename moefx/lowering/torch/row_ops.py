"""Providers of the ops that move or sum rows, from single torch kernels."""

from __future__ import annotations

import torch
from torch import Tensor

from ...ir.ops.expert_gemms import expert_rows_backward
from ...ir.ops.token_routing import combine, combine_backward

# Rows or tokens of a chunk, so that intermediates stay in a core's cache.
_BLOCK = 1024


def _supports_bag(rows: Tensor, combine_weights: Tensor | None, *_: Tensor) -> bool:
    # embedding_bag needs weights in the rows' dtype, and accumulates in float32 or better only for these dtypes.
    wide = _sum_dtype(rows)
    has_same_dtype = combine_weights is None or torch.promote_types(combine_weights.dtype, wide) == wide
    return rows.device.type == "cpu" and has_same_dtype and wide in (torch.float32, torch.float64)


def _sum_dtype(rows: Tensor) -> torch.dtype:
    return torch.promote_types(rows.dtype, torch.float32)


@combine.provider("bag", supports=_supports_bag)
def _combine(
    rows: Tensor, combine_weights: Tensor | None, token_ids: Tensor, expert_offsets: Tensor, inverse: Tensor
) -> Tensor:
    # embedding_bag gathers and sums in fixed order, without a buffer for the gathered rows.
    num_tokens, top_k = inverse.shape
    if rows.shape[0] == 0:
        return rows.new_zeros((num_tokens, rows.shape[1]))
    row = inverse.reshape(-1)
    if int(expert_offsets[-1]) == row.shape[0]:
        start = torch.arange(0, row.shape[0], top_k, dtype=torch.int32, device=row.device)
    else:
        # With dropped slots the bags have different lengths. Bags, and rows within a bag, keep their order.
        valid = inverse >= 0
        count = valid.sum(1, dtype=torch.int32)
        row, start = row[valid.reshape(-1)], torch.cumsum(count, 0, dtype=torch.int32) - count
    wide = _sum_dtype(rows)
    weights = None if combine_weights is None else combine_weights.index_select(0, row).to(wide)
    if rows.dtype == wide:
        return torch.embedding_bag(rows.contiguous(), row, start, False, 0, False, weights)[0]
    out = rows.new_empty((num_tokens, rows.shape[1]))
    ends = [*start[::_BLOCK].tolist(), row.shape[0]]
    for begin, first, end in zip(range(0, num_tokens, _BLOCK), ends, ends[1:], strict=False):
        block = slice(begin, begin + _BLOCK)
        values, order = rows.index_select(0, row[first:end]).to(wide), torch.arange(end - first, device=row.device)
        part = None if weights is None else weights[first:end]
        out[block] = torch.embedding_bag(values, order, start[block] - first, False, 0, False, part)[0]
    return out


@combine_backward.provider("blocks", supports=lambda grad, rows, *_: rows.device.type == "cpu")
def _combine_backward(
    grad: Tensor, rows: Tensor, combine_weights: Tensor, token_ids: Tensor, expert_offsets: Tensor
) -> tuple[Tensor, Tensor]:
    grad_rows, grad_weights = torch.empty_like(rows), torch.zeros_like(combine_weights)
    num_valid = int(expert_offsets[-1])
    grad_rows[num_valid:] = 0
    for start in range(0, num_valid, _BLOCK):
        block = slice(start, min(start + _BLOCK, num_valid))
        grad_rows[block], grad_weights[block] = combine_backward.reference(
            grad, rows[block], combine_weights[block], token_ids[block], expert_offsets
        )
    return grad_rows, grad_weights


@expert_rows_backward.provider(
    "segment_reduce", supports=lambda grad, expert_offsets, *, dtype: grad.device.type == "cuda" and grad.shape[0] > 0
)
def _expert_rows_backward(grad: Tensor, expert_offsets: Tensor, *, dtype: torch.dtype) -> Tensor:
    # The offsets stay on the device, without a host sync. `unsafe` skips the check that they end at the last row.
    wide = grad.to(torch.promote_types(grad.dtype, torch.float32))
    total = torch.segment_reduce(wide, "sum", offsets=expert_offsets.long(), axis=0, initial=0, unsafe=True)
    return total.to(dtype)
