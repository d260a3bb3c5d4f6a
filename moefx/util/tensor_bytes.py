"""View the bytes of a tensor without NumPy, which moefx does not require."""

from __future__ import annotations

import ctypes

from torch import Tensor


def view_bytes(tensor: Tensor) -> memoryview:
    """Return the elements of a tensor as bytes, in row-major order and in the byte order of this machine.

    The view keeps its memory alive. It shares the tensor's memory if the tensor is contiguous and on the CPU; otherwise
    it has a copy.
    """
    local = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
    if not local.numel():
        return memoryview(b"")
    array = (ctypes.c_ubyte * (local.numel() * local.element_size())).from_address(local.data_ptr())
    array.tensor = local  # pyright: ignore[reportAttributeAccessIssue]
    return memoryview(array).cast("B")
