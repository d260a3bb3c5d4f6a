"""One GEMM on the CPU, written into place: torch's own, or oneDNN's where that is known to be faster.

torch sends float32 GEMMs to MKL, which runs its AVX2 kernels on AMD processors. oneDNN (in every x86 build of
torch, Inductor uses the same op) uses AVX-512 there: 1.6 to 2 times faster from 64 rows on, measured on Zen
5.
"""

from __future__ import annotations

import functools
import pathlib

import torch
from torch import Tensor

_MIN_SIZE = 64  # in any dimension; below, setting oneDNN up costs more than it gains
# oneDNN adds up along k without blocking: rounding errors of long sums are up to twice MKL's. Blocks keep
# them close.
_K_BLOCK = 512


def mm(left: Tensor, right: Tensor) -> Tensor:
    """left @ right."""
    if left.shape[1] <= _K_BLOCK and _use_onednn(left, right):
        return torch.ops.mkldnn._linear_pointwise.default(left, right.t(), None, "none", [], "")
    return mm_into(left.new_empty((left.shape[0], right.shape[1])), left, right)


def mm_into(out: Tensor, left: Tensor, right: Tensor, *, add: bool = False) -> Tensor:
    """out = left @ right, or out += left @ right. `out` may have another floating dtype than the operands."""
    if not _use_onednn(left, right):
        if out.dtype != left.dtype:  # gradients of float32 parameters under autocast
            product = left @ right
            return out.add_(product) if add else out.copy_(product)
        return torch.addmm(out, left, right, out=out) if add else torch.mm(left, right, out=out)
    linear = torch.ops.mkldnn._linear_pointwise.default
    for start in range(0, left.shape[1], _K_BLOCK):
        block = slice(start, start + _K_BLOCK)
        product = linear(left[:, block], right[block].t(), None, "none", [], "")
        add = bool(add or start)
        out.add_(product) if add else out.copy_(product)
    return out


def _use_onednn(left: Tensor, right: Tensor) -> bool:
    (rows, inner), columns = left.shape, right.shape[1]
    large = rows >= _MIN_SIZE and inner >= _MIN_SIZE and columns >= _MIN_SIZE
    return large and left.dtype is torch.float32 and left.device.type == "cpu" and onednn_is_faster()


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
