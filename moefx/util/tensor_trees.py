"""Tensors in the arguments and results of ops: find them, replace them, and run ops on them without dispatch modes."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes, _pop_mode, _push_mode

_LITERALS = frozenset([type(None), bool, int, float, str, torch.dtype, torch.device])


def is_float(t: torch.Tensor) -> bool:
    return t.is_floating_point() or t.is_complex()


def has_values(t: torch.Tensor) -> bool:
    """Return whether a tensor has elements: not on the meta device, nor fake, as under `torch.export`."""
    return not (t.is_meta or isinstance(t, FakeTensor))


def map_tensors(tree: Any, fn: Callable[[torch.Tensor], Any]) -> Any:
    """Map tensors: `tree_map_only(Tensor)` for the containers that op arguments are made of; several times faster."""
    kind = type(tree)
    if kind in _LITERALS:
        return tree
    if kind is tuple or kind is list:
        return kind([x if type(x) in _LITERALS else map_tensors(x, fn) for x in tree])
    if isinstance(tree, torch.Tensor):
        return fn(tree)
    if kind is dict:
        return {k: map_tensors(v, fn) for k, v in tree.items()}
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):  # without a constructor that inspects its arguments
        return tuple.__new__(type(tree), [map_tensors(x, fn) for x in tree])
    if isinstance(tree, (tuple, list, dict)):
        return pytree.tree_map_only(torch.Tensor, fn, tree)
    return tree


def collect_tensors(tree: Any) -> list[torch.Tensor]:
    tensors: list[torch.Tensor] = []
    map_tensors(tree, tensors.append)
    return tensors


def suspend_modes() -> contextlib.AbstractContextManager[Any]:
    """Run ops without dispatch modes. torch's own context costs as much as an op, even without a mode."""
    count = torch._C._len_torch_dispatch_stack()
    if count > 1 or torch._C._dispatch_tls_is_dispatch_key_included(_PRE_DISPATCH):  # as in `torch.export`
        return _disable_current_modes()
    return _SuspendedMode() if count else _NOTHING


class _SuspendedMode:
    def __enter__(self) -> None:
        self.mode: Any = _pop_mode()

    def __exit__(self, *_: Any) -> None:
        _push_mode(self.mode)


_NOTHING = contextlib.nullcontext()
_PRE_DISPATCH = torch.DispatchKey.PreDispatch
