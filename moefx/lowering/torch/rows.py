"""Provider "bag" of `combine` on the CPU: embedding_bag is a gather-sum in fixed order without copies."""

from __future__ import annotations

import torch
from torch import Tensor

from ...ir.routing import combine, combine_backward

# Rows at a time in the backward: intermediates stay in a core's cache.
_BLOCK = 1024


def _on_cpu(rows: Tensor, combine_weights: Tensor | None, *_: Tensor) -> bool:
    # embedding_bag takes weights in the dtype of the rows only, and accumulates in float32 or better only for
    # these.
    same = combine_weights is None or combine_weights.dtype == rows.dtype
    return rows.device.type == "cpu" and same and rows.dtype in (torch.float32, torch.float64)


@combine.provider("bag", supports=_on_cpu)
def _combine(
    rows: Tensor, combine_weights: Tensor | None, token_ids: Tensor, expert_offsets: Tensor, inverse: Tensor
) -> Tensor:
    num_tokens, num_slots = inverse.shape
    if rows.shape[0] == 0:
        return rows.new_zeros((num_tokens, rows.shape[1]))
    row = inverse.reshape(-1)
    if int(expert_offsets[-1]) == rows.shape[0]:
        start = torch.arange(0, row.shape[0], num_slots, dtype=torch.int32)
    else:
        # With drops the bags have different lengths; bags, and rows within a bag, keep their order.
        valid = inverse >= 0
        count = valid.sum(1, dtype=torch.int32)
        row, start = row[valid.reshape(-1)], torch.cumsum(count, 0, dtype=torch.int32) - count
    weights = None if combine_weights is None else combine_weights.index_select(0, row)
    return torch.embedding_bag(rows.contiguous(), row, start, False, 0, False, weights)[0]


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
