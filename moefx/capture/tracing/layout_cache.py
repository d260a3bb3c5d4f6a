"""Cache the layouts (shape, strides, dtype) that ops return for abstract tensors, over all captures.

A loop over hundreds of experts calls the same ops on the same shapes. A look-up in torch's own cache of fake results
takes several times as long.
"""

from __future__ import annotations

import functools
from collections.abc import Hashable
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

MAX_LAYOUTS = 1 << 14
_PLAIN = {int, float, bool, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format}
_TENSORS = (torch.Tensor, torch.nn.Parameter)  # integers beside abstract floats: only their layouts count
_Layout = tuple[torch.Size, tuple[int, ...], torch.dtype]
_layouts: dict[Hashable, _Layout] = {}


class _NoKey(Exception):
    """The arguments of a call do not determine its result's layout."""


@functools.cache
def is_pure(func: Any) -> bool:
    """Return whether an op returns new tensors whose layouts depend on its arguments' layouts alone."""
    schema = getattr(func, "_schema", None)
    if schema is None or func.namespace != "aten":
        return False
    return not any(a.alias_info is not None for a in (*schema.arguments, *schema.returns))


def make_key(func: Any, args: Any, kwargs: dict[str, Any]) -> Hashable | None:
    """Return the key of a call on abstract tensors; None if an argument of another kind decides its result."""
    try:
        return func, torch.get_default_dtype(), _make_key(args), tuple((k, _make_key(v)) for k, v in kwargs.items())
    except _NoKey:
        return None


def _make_key(x: Any) -> Hashable:
    kind = type(x)
    if kind in _PLAIN:
        return kind, x
    if kind is FakeTensor or (kind in _TENSORS and x.device.type == "cpu"):
        if x.layout is not torch.strided:
            raise _NoKey
        return _describe(x)
    if kind in (tuple, list) or kind is torch.Size:
        return (kind, *[_make_key(v) for v in x])
    raise _NoKey


def find_layout(key: Hashable | None) -> _Layout | None:
    """Return the layout of a call's single result, if a call with this key was stored."""
    return _layouts.get(key) if key is not None else None


def store_layout(key: Hashable | None, out: Any) -> None:
    """Store the layout of a call's result, if that is one abstract tensor of floats."""
    if key is None or type(out) is not FakeTensor or out.layout is not torch.strided:
        return
    if not (out.is_floating_point() or out.is_complex()):
        return
    if len(_layouts) >= MAX_LAYOUTS:
        _layouts.clear()
    _layouts[key] = _describe(out)


def _describe(t: torch.Tensor) -> _Layout:
    return t.shape, t.stride(), t.dtype


def make_meta_tensor(layout: _Layout) -> torch.Tensor:
    shape, stride, dtype = layout
    return torch.empty_strided(shape, stride, dtype=dtype, device="meta")


__all__ = ["find_layout", "is_pure", "make_key", "make_meta_tensor", "store_layout"]
