"""One GEMM on the CPU, written into place: torch's own, or oneDNN's where that is known to be faster.

torch sends float32 GEMMs to MKL, which runs its AVX2 kernels on AMD processors. oneDNN (in every x86 build of
torch, Inductor uses the same op) uses AVX-512 there: 1.6 to 2 times faster where there is enough to do,
measured on Zen 5. It compiles a kernel for every new shape, though, so row counts are rounded up first
(`padded`).
"""

from __future__ import annotations

import functools
import pathlib

import torch
from torch import Tensor

# Multiplications; below, setting oneDNN up (about 10 us) costs more than it gains.
_MIN_SIZE = 2**20
# oneDNN adds up along k without blocking: rounding errors of long sums are up to twice MKL's. Blocks keep
# them close.
_K_BLOCK = 512


def linear(left: Tensor, w: Tensor) -> Tensor:
    """left @ w.t()."""
    if not _use_onednn(left, w):
        return left @ w.t()
    if left.shape[1] <= _K_BLOCK:
        return torch.ops.mkldnn._linear_pointwise.default(left, w, None, "none", [], "")
    return linear_into(left.new_empty((left.shape[0], w.shape[0])), left, w)


def linear_into(out: Tensor, left: Tensor, w: Tensor, *, add: bool = False) -> Tensor:
    """out = left @ w.t(), or out += left @ w.t(). `out` may have another floating dtype than the operands."""
    if not _use_onednn(left, w):
        if out.dtype != left.dtype:  # gradients of float32 parameters under autocast
            product = left @ w.t()
            return out.add_(product) if add else out.copy_(product)
        return torch.addmm(out, left, w.t(), out=out) if add else torch.mm(left, w.t(), out=out)
    for start in range(0, left.shape[1], _K_BLOCK):
        block = slice(start, start + _K_BLOCK)
        product = torch.ops.mkldnn._linear_pointwise.default(
            left[:, block], w[:, block], None, "none", [], ""
        )
        add = bool(add or start)
        out.add_(product) if add else out.copy_(product)
    return out


def _use_onednn(left: Tensor, w: Tensor) -> bool:
    if not pays_onednn(left.numel() * w.shape[0]) or left.dtype is not torch.float32:
        return False
    return left.device.type == "cpu" and onednn_is_faster()


def pays_onednn(multiplications: int) -> bool:
    """Whether a GEMM is large enough for it."""
    return multiplications >= _MIN_SIZE


def padded(num_rows: int) -> int:
    """`num_rows` rounded up to one of about sixteen numbers an octave.

    oneDNN needs 0.4 ms for the first GEMM with a new number of rows, 1.5 ms for a new inner size, and remembers
    1024 of them. Routing gives every expert another number in every step.
    """
    step = max(8, 1 << num_rows.bit_length() >> 5)
    return -(-num_rows // step) * step


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
