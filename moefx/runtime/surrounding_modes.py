"""The modes and hooks around a call: transforms of derivatives, observers of ops, and settings of the thread."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch._C._functorch import peek_interpreter_stack
from torch.autograd import forward_ad
from torch.overrides import _get_current_function_mode_stack, _pop_mode, _pop_mode_temporarily, _push_mode
from torch.utils import _python_dispatch as dispatch_modes
from torch.utils._python_dispatch import _disable_current_modes

from ..util.gpu_streams import find_accelerator_stream


def is_transformed() -> bool:
    """Return whether forward-mode AD or a torch.func transform is active."""
    return forward_ad._current_level >= 0 or peek_interpreter_stack() is not None


def _pack(t: torch.Tensor) -> tuple[torch.Tensor, int]:
    return t, t._version


def _unpack(saved: tuple[torch.Tensor, int]) -> torch.Tensor:
    """Check the version of a saved tensor, which autograd does not check under saved-tensor hooks."""
    t, version = saved
    if t._version != version:
        raise RuntimeError("a tensor that the backward needs was modified by an inplace operation")
    return t


@contextlib.contextmanager
def suspend_observers() -> Iterator[None]:
    """Suspend modes and hooks that observe the caller while a block is captured.

    Otherwise `export(strict=False)` records the capture as the model's, a FLOP counter counts it, and a checkpoint
    keeps its saved tensors.
    """
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.autograd.graph.saved_tensors_hooks(_pack, _unpack))
        for _ in _get_current_function_mode_stack():
            stack.enter_context(_pop_mode_temporarily())
        stack.enter_context(_disable_current_modes())
        yield


class ThreadModes:
    """What torch keeps for each thread, as it is in the thread that makes this object: the device and its stream, grad
    mode, autocast, the default device and other modes, and hooks of saved tensors.

    A profiler keeps its state for each thread, too, and offers no way to pass it on.
    """

    def __init__(self) -> None:
        accelerator = torch.accelerator.current_accelerator()
        kinds = {"cpu"} if accelerator is None else {"cpu", accelerator.type}
        self._stream = find_accelerator_stream()
        self._has_grad = torch.is_grad_enabled()
        self._autocasts = [(kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in kinds]
        self._caches_casts = torch.is_autocast_cache_enabled()
        self._function_modes = _get_current_function_mode_stack()
        self._dispatch_modes = dispatch_modes._get_current_dispatch_mode_stack()
        self._saved_tensor_hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)  # type: ignore[attr-defined]

    @contextlib.contextmanager
    def applied(self) -> Iterator[None]:
        """Apply the modes in a new thread. Some stay applied until the thread ends."""
        if self._stream is not None:
            torch.accelerator.set_stream(self._stream)
        for kind, is_enabled, dtype in self._autocasts:
            torch.set_autocast_enabled(kind, is_enabled)
            torch.set_autocast_dtype(kind, dtype)
        torch.set_autocast_cache_enabled(self._caches_casts)
        # The end of the outermost autocast of a thread clears the casts of all threads.
        torch.autocast_increment_nesting()
        with contextlib.ExitStack() as stack:
            stack.enter_context(torch.set_grad_enabled(self._has_grad))
            if self._saved_tensor_hooks is not None:
                stack.enter_context(torch.autograd.graph.saved_tensors_hooks(*self._saved_tensor_hooks))
            for mode in self._function_modes:
                _push_mode(mode)
                stack.callback(_pop_mode)
            for mode in self._dispatch_modes:
                dispatch_modes._push_mode(mode)
                stack.callback(dispatch_modes._pop_mode)
            yield
