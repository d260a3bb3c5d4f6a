"""The modes and hooks around a call: transforms of its derivatives, and observers of its ops."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch._C._functorch import peek_interpreter_stack
from torch.autograd import forward_ad
from torch.overrides import _get_current_function_mode_stack, _pop_mode_temporarily
from torch.utils._python_dispatch import _disable_current_modes


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
