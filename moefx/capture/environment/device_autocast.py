"""Emulate the autocast of a block's device in captures, which run on the CPU.

The precision of a function depends on the kind of device: under bfloat16 autocast, `softmax` returns float32 on CUDA
and bfloat16 on the CPU. Every build of torch has the lists of all devices. This module runs the same call on fake
tensors of the device, and applies the casts that it sees.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from ...errors import CaptureError
from ...util.tensor_trees import collect_tensors, map_tensors
from .code_locations import suppress_program_errors

aten = torch.ops.aten
# Ops that autocast lists under another name.
_KNOWN_AS = {
    aten._softmax.default: lambda x, dim, _: aten.softmax.int(x, dim),
    aten._log_softmax.default: lambda x, dim, _: aten.log_softmax.int(x, dim),
}
_LOW = (torch.bfloat16, torch.float16)
_local = threading.local()


class DeviceState(NamedTuple):
    """The kind of device that captures emulate, and the dtype of autocast outside of the block (None: off)."""

    device: str
    dtype: torch.dtype | None


def get_device_state() -> DeviceState:
    """Return the state of this thread; the CPU's if none was set."""
    return getattr(_local, "state", None) or DeviceState("cpu", _read_dtype("cpu"))


@contextlib.contextmanager
def use_device_autocast(device: str, dtype: torch.dtype | None) -> Iterator[None]:
    """Let captures in this context emulate a device, with its autocast to `dtype` or (None) without autocast."""
    device = "cpu" if device == "meta" else device
    before, _local.state = getattr(_local, "state", None), DeviceState(device, dtype)
    try:
        with contextlib.ExitStack() as stack:
            for kind in {"cpu", device}:
                stack.enter_context(_set_autocast(kind, dtype))
            yield
    finally:
        _local.state = before


def get_autocast_dtype() -> torch.dtype | None:
    """Return the dtype of autocast at the current line of a block; None if it is off."""
    device, outer_dtype = get_device_state()
    if device != "cpu" and (dtype := _read_dtype(device)) != outer_dtype:
        return dtype
    return _read_dtype("cpu")  # a block whose autocast takes the device of a tensor sees the CPU


def is_changed_by_block() -> bool:
    """Return whether the block has switched autocast on or off here, for any device that it may run on."""
    device, outer_dtype = get_device_state()
    if _read_dtype("cpu") != outer_dtype or (device != "cpu" and _read_dtype(device) != outer_dtype):
        return True
    return device != "cuda" and _read_dtype("cuda") is not None


def _read_dtype(kind: str) -> torch.dtype | None:
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None


@contextlib.contextmanager
def _set_autocast(kind: str, dtype: torch.dtype | None) -> Iterator[None]:
    """Do the same as `torch.autocast`, which refuses devices that this machine does not have."""
    before = torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)
    torch.autocast_increment_nesting()
    try:
        torch.set_autocast_enabled(kind, dtype is not None)
        torch.set_autocast_dtype(kind, dtype or before[1])
        yield
    finally:
        if torch.autocast_decrement_nesting() == 0:
            torch.clear_autocast_cache()
        torch.set_autocast_enabled(kind, before[0])
        torch.set_autocast_dtype(kind, before[1])


def is_emulated() -> bool:
    """Return whether captures emulate another device, so that the CPU's autocast must be off."""
    return get_device_state().device != "cpu"


def use_cpu_autocast(dtype: torch.dtype | None) -> contextlib.AbstractContextManager[None]:
    """Set the dtype of the CPU's autocast in this context; None switches it off."""
    return contextlib.nullcontext() if _read_dtype("cpu") is dtype else _set_autocast("cpu", dtype)


def cast_arguments(
    func: Any, args: tuple, kwargs: dict[str, Any], dtype: torch.dtype, cast: Callable[..., torch.Tensor]
) -> tuple[tuple, dict[str, Any]] | None:
    """Cast arguments as autocast to `dtype` on the device does. Return None if it leaves the function alone."""
    device = get_device_state().device
    if not _is_listed(func, device):
        return None
    floats = [t for t in collect_tensors((args, kwargs)) if t.is_floating_point()]
    casts, plain_dtype, result_dtype = _find_casting(func, args, kwargs, device, dtype)
    if not casts and result_dtype != plain_dtype:  # autocast sets a `dtype`, or the function has casts of its own
        casts = [result_dtype if t.dtype in _LOW else None for t in floats]
    dtype_by_id = {id(t): to for t, to in zip(floats, casts, strict=False) if to not in (None, t.dtype)}
    args, kwargs = map_tensors((args, kwargs), lambda t: cast(t, dtype_by_id[id(t)]) if id(t) in dtype_by_id else t)
    return args, kwargs


def check_result_dtype(func: Any, args: tuple, kwargs: dict[str, Any], dtype: torch.dtype, out: Any) -> Any:
    """Return `out`, the result of a call here.

    Raises:
        CaptureError: its dtype differs from the device's, or the device's is unknown.
    """
    device = get_device_state().device
    is_listed = _is_listed(func, device)
    if not is_listed and (_result_dtype(out) is None or getattr(func, "__name__", "") not in _list_composites()):
        return out
    try:
        expected = _find_casting(func, args, kwargs, device, dtype)[2]
    except CaptureError:
        if is_listed:
            raise
        return out
    if expected != _result_dtype(out):
        raise CaptureError(f"autocast on {device} returns {expected} from {func}, and the capture {_result_dtype(out)}")
    return out


def changes_call(func: Any, args: tuple, kwargs: dict[str, Any], dtype: torch.dtype, out: Any) -> bool:
    """Return whether autocast would cast arguments of a recorded call, or change the dtype of its result `out`, in a
    rerun."""
    device = get_device_state().device
    if not _is_listed(func, device):
        return False
    try:
        casts, _, result = _find_casting(func, args, kwargs, device, dtype)
    except CaptureError:
        return True
    floats = [t.dtype for t in collect_tensors((args, kwargs)) if t.is_floating_point()]
    return result != _result_dtype(out) or any(to not in (None, was) for to, was in zip(casts, floats, strict=False))


@functools.cache
def _list_ops(device: str) -> frozenset[str]:
    """Return the names with overloads of the ops that autocast on a device changes."""
    key = f"Autocast{device.upper()}"
    try:
        op_names = torch._C._dispatch_get_all_op_names()
        return frozenset(n for n in op_names if torch._C._dispatch_has_kernel_for_dispatch_key(n, key))
    except RuntimeError:  # no such key
        raise CaptureError(f"the autocast of {device} is unknown") from None


@functools.cache
def _list_functions(device: str) -> frozenset[str]:
    return frozenset(name.partition("::")[2].partition(".")[0] for name in _list_ops(device))


def _is_listed(func: Any, device: str) -> bool:
    if isinstance(func, torch._ops.OpOverload):
        return func in _KNOWN_AS or func.name() in _list_ops(device)
    return getattr(func, "__name__", "").strip("_") in _list_functions(device)


@functools.cache
def _list_composites() -> frozenset[str]:
    """Return the names of composite functions, which may call a function that autocast changes."""
    key = "CompositeImplicitAutograd"
    names = (n for n in torch._C._dispatch_get_all_op_names() if n.startswith("aten::"))
    return frozenset(
        n.partition("::")[2].partition(".")[0] for n in names if torch._C._dispatch_has_kernel_for_dispatch_key(n, key)
    )


class _Casts(TorchDispatchMode):
    """Records the dtypes that some tensors are cast to."""

    def __init__(self, tensors: list[torch.Tensor]):
        super().__init__()
        self.index = {id(t): i for i, t in enumerate(tensors)}
        self.dtypes: list[torch.dtype | None] = [None] * len(tensors)

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        if func is aten._to_copy.default and id(args[0]) in self.index:
            self.dtypes[self.index[id(args[0])]] = kwargs.get("dtype")
        return func(*args, **kwargs)


_Casting = tuple[list[torch.dtype | None], torch.dtype | None, torch.dtype | None]
_castings: dict[Any, _Casting] = {}


def _find_casting(func: Any, args: tuple, kwargs: dict[str, Any], device: str, dtype: torch.dtype) -> _Casting:
    """Return the dtype that autocast casts each floating argument to, and the result's dtypes without and with it."""
    forms = map_tensors((args, kwargs), lambda t: (t.dtype, *map(int, t.shape)))
    key = (func, device, dtype, repr(forms))
    if key not in _castings:
        with _disable_current_modes(), torch.DisableTorchFunction():
            like_args, like_kwargs = map_tensors(
                (args, kwargs), lambda t: torch.empty([int(n) for n in t.shape], dtype=t.dtype, device="meta")
            )
        with ThreadPoolExecutor(1) as other:  # autocast is off in this thread, inside an op
            _castings[key] = other.submit(_run_on_device, func, like_args, like_kwargs, device, dtype).result()
    return _castings[key]


def _run_on_device(func: Any, args: tuple, kwargs: dict[str, Any], device: str, dtype: torch.dtype) -> _Casting:
    call: Any = _KNOWN_AS.get(func, func)
    with FakeTensorMode(), torch.no_grad():
        args, kwargs = map_tensors((args, kwargs), lambda t: torch.empty(t.shape, dtype=t.dtype, device=device))
        floats = [t for t in collect_tensors((args, kwargs)) if t.is_floating_point()]
        plain_dtype = None
        with _set_autocast(device, None), _Casts(floats) as before, suppress_program_errors():  # mixed dtypes
            plain_dtype = _result_dtype(call(*args, **kwargs))
        try:
            with _set_autocast(device, dtype), _Casts(floats) as casts:
                result = _result_dtype(call(*args, **kwargs))
        except Exception as error:
            raise CaptureError(f"the effect of autocast on {func} on {device} is unknown: {error}") from None
    # The function makes casts of its own here, too.
    return casts.dtypes if casts.dtypes != before.dtypes else [], plain_dtype, result


def _result_dtype(out: Any) -> torch.dtype | None:
    return next((t.dtype for t in collect_tensors(out) if t.is_floating_point()), None)
