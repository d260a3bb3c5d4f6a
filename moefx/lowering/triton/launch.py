"""Launch kernels with less overhead: Triton's own path takes about 100 us of Python for kernels with many arguments."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from triton import knobs, next_power_of_2
from triton.runtime import driver

INTERPRETED = knobs.runtime.interpret  # the kernels are defined for Triton's interpreter
_compiled: dict[tuple[Any, ...], Any] = {}
# id -> (kernel, names of its constants). By id, because computing a kernel's hash takes a lock. The entry keeps the
# kernel alive, so that its id stays unique.
_kernels: dict[int, tuple[Any, tuple[str, ...]]] = {}


class _Thread(threading.local):
    skipped: dict[Any, Any] | None = None  # of `skip_launches`


_thread = _Thread()


@contextlib.contextmanager
def skip_launches(kernels: dict[Any, Any]) -> Iterator[None]:
    """Launch nothing in this thread, and add what Triton compiles for the launches to `kernels`."""
    _thread.skipped = kernels
    try:
        yield
    finally:
        _thread.skipped = None


def are_launches_skipped() -> bool:
    return _thread.skipped is not None


def launch(
    kernel: Any,
    grid: tuple[int, ...],
    args: Sequence[Any],
    constants: Mapping[str, Any],
    *,
    warps: int = 4,
    stages: int | None = None,
) -> Callable[..., Any]:
    """Launch kernel[grid](*args, **constants) on the current device.

    Like Triton, looks up the compiled kernel by all properties that Triton specializes on, but in one step. Only new
    combinations go through Triton.

    Args:
        args: the kernel's leading arguments, all but `tl.constexpr`: tensors, tensor descriptors, ints, None.
        constants: all `tl.constexpr` arguments.

    Returns:
        A function that launches the same kernel with other args.
    """
    options = {"num_warps": warps} if stages is None else {"num_warps": warps, "num_stages": stages}
    if INTERPRETED:
        run = functools.partial(kernel[grid], **constants, **options)
        run(*args)
        return run
    options["enable_fp_fusion"] = False  # round each operation, as torch does
    _, names = _kernels.get(id(kernel)) or _register_kernel(kernel)
    values = tuple([constants[name] for name in names])
    device = driver.active.get_current_device()  # pyright: ignore[reportAttributeAccessIssue]
    # The properties of an argument that may be compiled in: at least those that Triton specializes on.
    kinds = [
        (a.dtype, a.data_ptr() % 16 == 0) if isinstance(a, Tensor)
        else (a % 16 == 0, a == 1, a.bit_length() > 31) if isinstance(a, int)
        else None if a is None
        else (a.base.dtype, *a.block_shape)  # a tensor descriptor
        for a in args
    ]  # fmt: skip
    key = (id(kernel), device, warps, stages, *kinds, *values)
    compiled = _compiled.get(key)
    if (skipped := _thread.skipped) is not None:
        if compiled is None and key not in skipped:
            skipped[key] = kernel.warmup(*args, grid=grid, **constants, **options)
        return lambda *args: None
    if compiled is None:
        assert set(names) == set(constants), f"{kernel}: constants {tuple(constants)}, expected {names}"
        compiled = _compiled[key] = kernel[grid](*args, **constants, **options)
        run = compiled[(*grid, 1, 1)[:3]]
    else:
        run = compiled[(*grid, 1, 1)[:3]]
        run(*args, *values)
    return lambda *args: run(*args, *values)


def _register_kernel(kernel: Any) -> tuple[Any, tuple[str, ...]]:
    entry = _kernels[id(kernel)] = kernel, tuple(p.name for p in kernel.params if p.is_constexpr)
    return entry


def unwrap_descriptor(argument: Any) -> Any:
    """Return the tensor of a tensor descriptor (Triton's or Gluon's). Return any other argument unchanged."""
    return argument.base if hasattr(argument, "block_shape") else argument


def cdiv(a: int, b: int) -> int:
    """`triton.cdiv` without the overhead of a function that also runs in kernels."""
    return -(-a // b)


def choose_block(width: int, elements: int = 2048) -> tuple[int, int]:
    """(rows, columns) of a block in memory-bound kernels."""
    columns = min(next_power_of_2(width), elements)
    return max(1, elements // columns), columns


def use_device(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """Make `device` current: Triton launches on the current device, even if the tensors are on another one."""
    is_elsewhere = device.type == "cuda" and torch.cuda.current_device() != device.index
    return torch.cuda.device(device) if is_elsewhere else contextlib.nullcontext()
