"""Compile the kernels of an op on all cores before the first of them runs.

Triton compiles a kernel at its first launch, one after the other: the 17 kernels of a block took 9 s on the host of an
H200, and their launchers 5 s.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
import triton

from . import launch as launching
from .autotune import seconds_left

_MAX_THREADS = 16


@contextlib.contextmanager
def compile_ahead() -> Iterator[None]:
    """Compile the kernels that the host code in this context launches, in this thread, and launch none of them.

    An error of a compilation is raised at the kernel's first real launch. Nothing is done while `MOEFX_AUTOTUNE` asks
    for tuning, which times launches.
    """
    if seconds_left() > 0 or launching.INTERPRETED:
        yield
        return
    kernels: dict[Any, Any] = {}
    device = torch.cuda.current_device()
    with ThreadPoolExecutor(min(_MAX_THREADS, os.cpu_count() or 1)) as pool:
        with triton.AsyncCompileMode(pool, ignore_errors=True), launching.skip_launches(kernels):
            yield
        list(pool.map(lambda kernel: _load(kernel, device), kernels.values()))


def _load(kernel: Any, device: int) -> None:
    """Compile the launcher of a kernel and load its binary."""
    compiled = kernel.kernel if isinstance(kernel, triton.FutureKernel) else kernel
    if compiled is not None:
        with torch.cuda.device(device), contextlib.suppress(Exception):
            compiled.run  # noqa: B018  a property
