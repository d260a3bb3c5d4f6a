"""Allocate large buffers on huge pages: the first touch of 4 KiB pages costs as much as writing the data."""

from __future__ import annotations

import ctypes
import functools
import sys
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

_LARGE = 2**22  # bytes, as in NumPy, which does the same with its arrays
_PAGE = 4096
_MADV_HUGEPAGE = 14


def new_buffer(like: Tensor, shape: Sequence[int], dtype: torch.dtype | None = None) -> Tensor:
    """Return an uninitialised tensor on the device of `like`, by default with its dtype.

    Allocators return memory of this size to the system when it is freed, so every step touches new pages. If Linux
    gives huge pages on request only (the default of most distributions), request them.
    """
    tensor = like.new_empty(shape, dtype=dtype)
    advise = _madvise() if tensor.nbytes >= _LARGE and tensor.device.type == "cpu" else None
    if advise is not None:
        start = -(-tensor.data_ptr() // _PAGE) * _PAGE
        advise(start, tensor.data_ptr() + tensor.nbytes - start, _MADV_HUGEPAGE)  # a hint, which Linux may ignore
    return tensor


@functools.cache
def _madvise() -> Callable[[int, int, int], int] | None:
    if sys.platform != "linux":
        return None
    function = ctypes.CDLL(None).madvise
    function.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return function
