"""Run one GEMM on the CPU, in place: torch's own, or oneDNN's if that is known to be faster.

torch sends float32 GEMMs to MKL, which runs its AVX2 kernels on AMD processors. oneDNN (in every x86 build of torch,
used by Inductor too) uses AVX-512 there, and is 1.6 to 2 times faster for large GEMMs on Zen 5. It compiles a kernel
for every new shape, so numbers of rows are rounded up first (see `choose_padding`).
"""

from __future__ import annotations

import functools
import pathlib

import torch
from torch import Tensor

# Multiplications. For smaller GEMMs, the set-up of oneDNN (about 10 us) and separate groups (see `SegmentGemms`) cost
# more than oneDNN saves.
_MIN_SIZE = 2**21
# oneDNN sums along k without blocking, so rounding errors of long sums are up to twice MKL's. Blocks keep them close.
_K_BLOCK = 512


def linear(left: Tensor, w: Tensor, bias: Tensor | None = None) -> Tensor:
    """Compute left @ w.t() + bias."""
    if not _should_use_onednn(left, w):
        return left @ w.t() if bias is None else torch.addmm(bias, left, w.t())
    if left.shape[1] <= _K_BLOCK:
        product = _onednn(left, w)
        return product if bias is None else product.add_(bias)
    return linear_into(left.new_empty((left.shape[0], w.shape[0])), left, w, bias)


def linear_into(out: Tensor, left: Tensor, w: Tensor, bias: Tensor | None = None, *, add: bool = False) -> Tensor:
    """Compute out = left @ w.t() + bias, or out += left @ w.t() if `add`.

    `out` may have another floating dtype than the operands. The bias has the dtype of `left`; 16-bit sums with it are
    rounded once, as in `torch.nn.functional.linear`.
    """
    if not _should_use_onednn(left, w):
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
    """Compute left @ w.t() with oneDNN. Copies `w` if it has gaps between rows: oneDNN is 500 times slower on them."""
    if not (w.is_contiguous() or w.t().is_contiguous()):
        w = w.contiguous()
    return torch.ops.mkldnn._linear_pointwise.default(left, w, None, "none", [], "")


def _should_use_onednn(left: Tensor, w: Tensor) -> bool:
    large = left.numel() * w.shape[0] >= _MIN_SIZE
    return large and left.dtype is torch.float32 and left.device.type == "cpu" and is_onednn_faster()


def choose_padding(num_rows: int, matrix_size: int, dtype: torch.dtype) -> int | None:
    """Return the number of rows to add to an expert's rows, so that its GEMMs have few different sizes.

    oneDNN takes 0.4 ms for the first GEMM with a new number of rows and 1.5 ms for a new inner size, and caches 1024
    kernels. Routing changes the number of rows in every step. Rounding leaves about 16 sizes in an octave.

    Args:
        matrix_size: elements of the smallest matrix that the rows are multiplied with.

    Returns:
        None if torch's own GEMMs run, which need no padding.
    """
    if num_rows * matrix_size < _MIN_SIZE or dtype is not torch.float32 or not is_onednn_faster():
        return None
    step = max(8, 1 << num_rows.bit_length() >> 5)
    return -num_rows % step


@functools.cache
def is_onednn_faster() -> bool:
    """Return whether float32 GEMMs go to oneDNN: an AMD processor with AVX-512, and a torch with MKL and oneDNN."""
    if not (torch.backends.mkl.is_available() and torch.backends.mkldnn.is_available()):
        return False
    try:
        processor = pathlib.Path("/proc/cpuinfo").read_text()
    except OSError:
        return False
    return "AuthenticAMD" in processor and torch.backends.cpu.get_cpu_capability() == "AVX512"
