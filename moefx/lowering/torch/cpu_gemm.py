"""One GEMM on the CPU, written into place: torch's own, or oneDNN's where that is known to be faster.

torch sends float32 GEMMs to MKL, which runs its AVX2 kernels on AMD processors. oneDNN (in every x86 build of
torch, Inductor uses the same op) uses AVX-512 there: 1.6 to 2 times faster where there is enough to do,
measured on Zen 5. It compiles a kernel for every new shape, though, so row counts are rounded up first
(see `padding`).
"""

from __future__ import annotations

import functools
import pathlib

import torch
from torch import Tensor

# Multiplications; below, setting oneDNN up (about 10 us), and an expert's being a group of its own for it (see
# `SegmentGemms`), cost more than it gains.
_MIN_SIZE = 2**21
# oneDNN adds up along k without blocking: rounding errors of long sums are up to twice MKL's. Blocks keep
# them close.
_K_BLOCK = 512


def linear(left: Tensor, w: Tensor, bias: Tensor | None = None) -> Tensor:
    """left @ w.t() + bias."""
    if not _use_onednn(left, w):
        return left @ w.t() if bias is None else torch.addmm(bias, left, w.t())
    if left.shape[1] <= _K_BLOCK:
        product = _onednn(left, w)
        return product if bias is None else product.add_(bias)
    return linear_into(left.new_empty((left.shape[0], w.shape[0])), left, w, bias)


def linear_into(out: Tensor, left: Tensor, w: Tensor, bias: Tensor | None = None, *, add: bool = False) -> Tensor:
    """out = left @ w.t() + bias, or out += left @ w.t(). `out` may have another floating dtype than the operands.

    The bias has the dtype of `left`; 16-bit sums with it are rounded once, as those of `torch.nn.functional.linear`.
    """
    if not _use_onednn(left, w):
        if out.dtype != left.dtype:  # gradients of float32 parameters under autocast
            product = linear(left, w, bias)
            return out.add_(product) if add else out.copy_(product)
        summand = out if add else bias
        return torch.mm(left, w.t(), out=out) if summand is None else torch.addmm(summand, left, w.t(), out=out)
    for start in range(0, left.shape[1], _K_BLOCK):
        block = slice(start, start + _K_BLOCK)
        product = _onednn(left[:, block], w[:, block])
        add = bool(add or start)
        out.add_(product) if add else out.copy_(product)
    return out if bias is None else out.add_(bias)


def _onednn(left: Tensor, w: Tensor) -> Tensor:
    """oneDNN has kernels for `left` with any strides, but for `w` with gaps between its rows none that is not a plain
    loop, 500 times as slow."""
    if not (w.is_contiguous() or w.t().is_contiguous()):
        w = w.contiguous()
    return torch.ops.mkldnn._linear_pointwise.default(left, w, None, "none", [], "")


def _use_onednn(left: Tensor, w: Tensor) -> bool:
    large = left.numel() * w.shape[0] >= _MIN_SIZE
    return large and left.dtype is torch.float32 and left.device.type == "cpu" and onednn_is_faster()


def padding(num_rows: int, matrix_size: int, dtype: torch.dtype) -> int | None:
    """How many rows to add to those of an expert so that its GEMMs come in few different sizes.

    oneDNN needs 0.4 ms for the first GEMM with a new number of rows, 1.5 ms for a new inner size, and
    remembers 1024 of them; routing gives every expert another number in every step. Rounded up there are
    about 16 in an octave.

    Args:
        matrix_size: elements of the smallest matrix that the rows are multiplied with.

    Returns:
        None where torch's own GEMMs serve, which do not care.
    """
    if num_rows * matrix_size < _MIN_SIZE or dtype is not torch.float32 or not onednn_is_faster():
        return None
    step = max(8, 1 << num_rows.bit_length() >> 5)
    return -num_rows % step


@functools.cache
def onednn_is_faster() -> bool:
    """Whether float32 GEMMs go to oneDNN: an AMD processor with AVX-512, and a torch with MKL and oneDNN."""
    if not (torch.backends.mkl.is_available() and torch.backends.mkldnn.is_available()):
        return False
    try:
        processor = pathlib.Path("/proc/cpuinfo").read_text()
    except OSError:
        return False
    return "AuthenticAMD" in processor and torch.backends.cpu.get_cpu_capability() == "AVX512"
