"""Change the memory layout of tensors without changing their values."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

Layout = Literal["", "transposed", "rows apart", "every other number"]


def apply_layout(t: Tensor, layout: Layout) -> Tensor:
    """Copy `t` to another layout, differentiably. Returns `t` if it has one element, or for layout "".

    "transposed" swaps the strides of the last two axes, as in `x.transpose(1, 2)`. "rows apart" leaves unused memory
    after each row, as in a slice of wider rows. "every other number" has stride 2 in the last axis; the other layouts
    fall back to it for tensors without a matrix.
    """
    if not layout or t.numel() < 2 or t.layout != torch.strided:
        return t
    is_matrix = t.ndim > 1 and min(t.shape[-2:]) > 1
    if layout == "transposed" and is_matrix:
        return t.transpose(-1, -2).contiguous().transpose(-1, -2)
    if layout == "rows apart" and is_matrix:
        return torch.cat([t, t], -1)[..., : t.shape[-1]]
    return t.repeat_interleave(2, -1)[..., ::2]


__all__ = ["Layout", "apply_layout"]
