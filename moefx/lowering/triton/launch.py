"""Launching kernels: Triton's own way takes about 100 us of Python for kernels with so many arguments."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from triton import knobs, next_power_of_2
from triton.runtime import driver

INTERPRETED = knobs.runtime.interpret  # the kernels are defined for Triton's interpreter
_compiled: dict[tuple[Any, ...], Any] = {}
# By id, as a kernel's own hash is a property behind a lock: the kernel, so that no other one gets its id, and the names
# of its constants.
_kernels: dict[int, tuple[Any, tuple[str, ...]]] = {}


def launch(
    kernel: Any,
    grid: tuple[int, ...],
    args: Sequence[Any],
    constants: Mapping[str, Any],
    *,
    warps: int = 4,
    stages: int | None = None,
) -> Callable[..., Any]:
    """kernel[grid](*args, **constants), on the current device. Returns what does it again for other args.

    Triton looks up the compiled kernel by everything that it may have specialised on. So does this, but in one step;
    only what is new goes through Triton.

    Args:
        args: the kernel's arguments other than `tl.constexpr`, which come first: tensors, tensor descriptors, ints,
            None.
        constants: all of its `tl.constexpr`s.
    """
    options = {"num_warps": warps} if stages is None else {"num_warps": warps, "num_stages": stages}
    if INTERPRETED:
        run = functools.partial(kernel[grid], **constants, **options)
        run(*args)
        return run
    options["enable_fp_fusion"] = False  # what a formula rounds is rounded, as in torch
    _, names = _kernels.get(id(kernel)) or _known(kernel)
    values = tuple([constants[name] for name in names])
    device = driver.active.get_current_device()  # pyright: ignore[reportAttributeAccessIssue]
    # What of an argument may be compiled in: at least what Triton looks at.
    kinds = [
        (a.dtype, a.data_ptr() % 16 == 0) if isinstance(a, Tensor)
        else (a % 16 == 0, a == 1, a.bit_length() > 31) if isinstance(a, int)
        else None if a is None
        else (a.base.dtype, *a.block_shape)  # a tensor descriptor
        for a in args
    ]  # fmt: skip
    key = (id(kernel), device, warps, stages, *kinds, *values)
    compiled = _compiled.get(key)
    if compiled is None:
        assert set(names) == set(constants), f"{kernel}: constants {tuple(constants)}, expected {names}"
        compiled = _compiled[key] = kernel[grid](*args, **constants, **options)
        run = compiled[(*grid, 1, 1)[:3]]
    else:
        run = compiled[(*grid, 1, 1)[:3]]
        run(*args, *values)
    return lambda *args: run(*args, *values)


def _known(kernel: Any) -> tuple[Any, tuple[str, ...]]:
    known = _kernels[id(kernel)] = kernel, tuple(p.name for p in kernel.params if p.is_constexpr)
    return known


def underlying_tensor(argument: Any) -> Any:
    """The tensor of a tensor descriptor, Triton's or Gluon's; what else it is, itself."""
    return argument.base if hasattr(argument, "block_shape") else argument


def cdiv(a: int, b: int) -> int:
    """As `triton.cdiv`, which is a function of kernels too and takes its time."""
    return -(-a // b)


def choose_block(width: int, elements: int = 2048) -> tuple[int, int]:
    """(rows, columns) of a block in kernels that are bound by memory."""
    columns = min(next_power_of_2(width), elements)
    return max(1, elements // columns), columns


def use_device(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """Triton launches on the current device, which need not be the tensors'."""
    is_elsewhere = device.type == "cuda" and torch.cuda.current_device() != device.index
    return torch.cuda.device(device) if is_elsewhere else contextlib.nullcontext()
