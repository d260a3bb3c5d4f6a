"""Autocast as it is on the device that a block runs on. A capture runs on the CPU, where it does something else.

Which functions compute in which precision depends on the kind of device: of bfloat16, `softmax` is float32 on CUDA and
bfloat16 on the CPU. torch has the lists of all devices in every build, and is asked: by the same call with tensors of
the device that hold no memory.
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

from ..errors import CaptureError
from .tensor_trees import collect_tensors, map_tensors

aten = torch.ops.aten
# What autocast knows by another name than the operation that is run.
_KNOWN_AS = {
    aten._softmax.default: lambda x, dim, _: aten.softmax.int(x, dim),
    aten._log_softmax.default: lambda x, dim, _: aten.log_softmax.int(x, dim),
}
_LOW = (torch.bfloat16, torch.float16)
_local = threading.local()


class DeviceState(NamedTuple):
    """For which kind of device captures are, and what autocast casts to outside of the block (None: nothing)."""

    device: str
    dtype: torch.dtype | None


def get_device_state() -> DeviceState:
    """Of this thread. Where nobody said, captures are for the CPU."""
    return getattr(_local, "state", None) or DeviceState("cpu", _of("cpu"))


@contextlib.contextmanager
def use_device_autocast(device: str, dtype: torch.dtype | None) -> Iterator[None]:
    """Captures in this context are for a device, under its autocast with this dtype or (None) without."""
    device = "cpu" if device == "meta" else device
    before, _local.state = getattr(_local, "state", None), DeviceState(device, dtype)
    try:
        with contextlib.ExitStack() as stack:
            for kind in {"cpu", device}:
                stack.enter_context(_set(kind, dtype))
            yield
    finally:
        _local.state = before


def get_autocast_dtype() -> torch.dtype | None:
    """What autocast casts to at this place of a block; None where it is off."""
    device, outside = get_device_state()
    if device != "cpu" and (there := _of(device)) != outside:
        return there
    return _of("cpu")  # a block that asks its tensors for their device is told that it is the CPU


def is_changed_by_block() -> bool:
    """Whether the block has switched autocast on or off here, for any device that it may be on."""
    device, outside = get_device_state()
    return any(_of(kind) != (outside if kind in ("cpu", device) else None) for kind in ("cpu", "cuda", device))


def _of(kind: str) -> torch.dtype | None:
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None


@contextlib.contextmanager
def _set(kind: str, dtype: torch.dtype | None) -> Iterator[None]:
    """As `torch.autocast`, which refuses devices that this machine does not have."""
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
    """Whether a capture is for another device than the CPU, whose autocast then must not act by itself."""
    return get_device_state().device != "cpu"


def use_cpu_autocast(dtype: torch.dtype | None) -> contextlib.AbstractContextManager[None]:
    """What the CPU's autocast casts to meanwhile."""
    return contextlib.nullcontext() if _of("cpu") is dtype else _set("cpu", dtype)


def cast_arguments(
    func: Any, args: tuple, kwargs: dict[str, Any], dtype: torch.dtype, cast: Callable[..., torch.Tensor]
) -> tuple[tuple, dict[str, Any]] | None:
    """The arguments with the casts that autocast to `dtype` makes there; None where it leaves a function alone."""
    device = get_device_state().device
    if not _is_listed(func, device):
        return None
    floats = [t for t in collect_tensors((args, kwargs)) if t.is_floating_point()]
    casts, without, result = _asked(func, args, kwargs, device, dtype)
    if not casts and result != without:  # by a `dtype` that it fills in, or beside casts of the function's own
        casts = [result if t.dtype in _LOW else None for t in floats]
    wanted = {id(t): to for t, to in zip(floats, casts, strict=False) if to not in (None, t.dtype)}
    args, kwargs = map_tensors((args, kwargs), lambda t: cast(t, wanted[id(t)]) if id(t) in wanted else t)
    return args, kwargs


def check_result(func: Any, args: tuple, kwargs: dict[str, Any], dtype: torch.dtype, out: Any) -> Any:
    """`out`, the result of such a call here, if it has the dtype that it has there."""
    device = get_device_state().device
    is_listed = _is_listed(func, device)
    if not is_listed and (_result(out) is None or getattr(func, "__name__", "") not in _composites()):
        return out
    try:
        expected = _asked(func, args, kwargs, device, dtype)[2]
    except CaptureError:
        if is_listed:
            raise
        return out
    if expected != _result(out):
        raise CaptureError(f"autocast on {device} makes {expected} of {func}, which is not reproduced here")
    return out


def changes_call(func: Any, args: tuple, kwargs: dict[str, Any], dtype: torch.dtype, out: Any) -> bool:
    """Whether autocast would do something to such a call when it is run again, other than make `out` of it."""
    device = get_device_state().device
    if not _is_listed(func, device):
        return False
    try:
        casts, _, result = _asked(func, args, kwargs, device, dtype)
    except CaptureError:
        return True
    floats = [t.dtype for t in collect_tensors((args, kwargs)) if t.is_floating_point()]
    return result != _result(out) or any(to not in (None, was) for to, was in zip(casts, floats, strict=False))


@functools.cache
def _names(device: str) -> frozenset[str]:
    """Of the operations, with overloads, for which autocast does something."""
    key = f"Autocast{device.upper()}"
    try:
        every = torch._C._dispatch_get_all_op_names()
        return frozenset(n for n in every if torch._C._dispatch_has_kernel_for_dispatch_key(n, key))
    except RuntimeError:  # no such key
        raise CaptureError(f"what autocast does on {device} is not known") from None


@functools.cache
def _functions(device: str) -> frozenset[str]:
    return frozenset(name.partition("::")[2].partition(".")[0] for name in _names(device))


def _is_listed(func: Any, device: str) -> bool:
    if isinstance(func, torch._ops.OpOverload):
        return func in _KNOWN_AS or func.name() in _names(device)
    return getattr(func, "__name__", "").strip("_") in _functions(device)


@functools.cache
def _composites() -> frozenset[str]:
    """Functions that torch makes of others, of which autocast may know one."""
    key = "CompositeImplicitAutograd"
    names = (n for n in torch._C._dispatch_get_all_op_names() if n.startswith("aten::"))
    return frozenset(
        n.partition("::")[2].partition(".")[0] for n in names if torch._C._dispatch_has_kernel_for_dispatch_key(n, key)
    )


class _Casts(TorchDispatchMode):
    """Which of some tensors are cast, and to what."""

    def __init__(self, watched: list[torch.Tensor]):
        super().__init__()
        self.index = {id(t): i for i, t in enumerate(watched)}
        self.found: list[torch.dtype | None] = [None] * len(watched)

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        if func is aten._to_copy.default and id(args[0]) in self.index:
            self.found[self.index[id(args[0])]] = kwargs.get("dtype")
        return func(*args, **kwargs)


_Answer = tuple[list[torch.dtype | None], torch.dtype | None, torch.dtype | None]
_answers: dict[Any, _Answer] = {}


def _asked(func: Any, args: tuple, kwargs: dict[str, Any], device: str, dtype: torch.dtype) -> _Answer:
    """(to what autocast casts each floating argument, the dtypes of the result without and with autocast)."""
    forms = map_tensors((args, kwargs), lambda t: (t.dtype, *map(int, t.shape)))
    key = (func, device, dtype, repr(forms))
    if key not in _answers:
        with _disable_current_modes(), torch.DisableTorchFunction():
            like_args, like_kwargs = map_tensors(
                (args, kwargs), lambda t: torch.empty([int(n) for n in t.shape], dtype=t.dtype, device="meta")
            )
        with ThreadPoolExecutor(1) as other:  # inside of an operation, this thread would leave autocast out
            _answers[key] = other.submit(_ask, func, like_args, like_kwargs, device, dtype).result()
    return _answers[key]


def _ask(func: Any, args: tuple, kwargs: dict[str, Any], device: str, dtype: torch.dtype) -> _Answer:
    call: Any = _KNOWN_AS.get(func, func)
    with FakeTensorMode(), torch.no_grad():
        args, kwargs = map_tensors((args, kwargs), lambda t: torch.empty(t.shape, dtype=t.dtype, device=device))
        floats = [t for t in collect_tensors((args, kwargs)) if t.is_floating_point()]
        without = None
        with _set(device, None), _Casts(floats) as before, contextlib.suppress(Exception):  # dtypes that only it allows
            without = _result(call(*args, **kwargs))
        try:
            with _set(device, dtype), _Casts(floats) as casts:
                result = _result(call(*args, **kwargs))
        except Exception as error:
            raise CaptureError(f"what autocast does to {func} on {device} is not known: {error}") from None
    # What a function casts by itself it casts here as well.
    return casts.found if casts.found != before.found else [], without, result


def _result(out: Any) -> torch.dtype | None:
    return next((t.dtype for t in collect_tensors(out) if t.is_floating_point()), None)
