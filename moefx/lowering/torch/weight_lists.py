"""Read lists of expert parameters, and count how they were read (see `ir.op_providers.count_weight_path`)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ...ir.op_providers import count_weight_path
from ...ir.ops.expert_gemms import is_stacked


def unstack_weights(w: Sequence[Tensor], dtype: torch.dtype) -> Sequence[Tensor]:
    """Return each expert's matrix, for separate GEMMs. Never copies; a caller that multiplies in `dtype` casts."""
    stacked = is_stacked(w, 2)
    _count("stacked" if stacked else "separate", w, dtype)
    return w[0].unbind(0) if stacked else w


def stack_weights(w: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """Return all experts' matrices as one tensor [E,...] for grouped GEMMs, a view if the storage allows it."""
    if is_stacked(w, 2):
        _count("stacked", w, dtype)
        return w[0].to(dtype)
    view = make_strided_view(w)
    if view is not None:
        _count("view", w, dtype)
        return view.to(dtype)
    count_weight_path("stacked_copy")  # the copy casts, too
    copy = torch.empty((len(w), *w[0].shape), dtype=dtype, device=w[0].device)
    torch._foreach_copy_(  # pyright: ignore[reportPrivateImportUsage]
        list(copy.unbind(0)), list(w)
    )
    return copy


def _count(path: str, w: Sequence[Tensor], dtype: torch.dtype) -> None:
    count_weight_path(path)
    if w[0].dtype is not dtype:
        count_weight_path("cast")


def make_strided_view(w: Sequence[Tensor]) -> Tensor | None:
    """Return a view [E,...] over equally spaced tensors of one storage; None if they are not."""
    first, size = w[0], w[0].element_size()
    spacing = w[1].data_ptr() - first.data_ptr() if len(w) > 1 else first.numel() * size
    strides = first.stride()
    if spacing <= 0 or spacing % size:
        return None
    for i, tensor in enumerate(w):
        if tensor.data_ptr() != first.data_ptr() + i * spacing or tensor.stride() != strides:
            return None
    # The allocator can space tensors equally by accident: the last one must lie in the storage of the first.
    begin = first.storage_offset() * size
    extent = (sum((n - 1) * s for n, s in zip(first.shape, strides, strict=True)) + 1) * size
    if begin + (len(w) - 1) * spacing + extent > first.untyped_storage().nbytes():
        return None
    return first.detach().as_strided((len(w), *first.shape), (spacing // size, *strides), first.storage_offset())
