"""Tensors with the same values that lie otherwise in memory."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

Layout = Literal["", "transposed", "rows apart", "every other number"]


def apply_layout(t: Tensor, layout: Layout) -> Tensor:
    """`t` in another layout, differentiable; itself if it has one number, or for "".

    "transposed" has its last two axes the other way round, as `x.transpose(1, 2)` has. "rows apart" has unused memory
    behind each row, as a slice of wider rows has. "every other number" has stride 2 in the last axis; the other layouts
    fall back to it if an axis is missing.
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
