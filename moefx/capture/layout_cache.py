"""Shapes, strides and dtypes that ops give for abstract tensors, remembered over all captures.

A loop over hundreds of experts calls the same ops on the same shapes. torch's own cache of fake results takes several
times as long to ask.
"""

from __future__ import annotations

import functools
from collections.abc import Hashable
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

MAX_REMEMBERED = 1 << 14
_PLAIN = {int, float, bool, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format}
_TENSORS = (torch.Tensor, torch.nn.Parameter)  # integers beside abstract floats: their layouts count alone
_Layout = tuple[torch.Size, tuple[int, ...], torch.dtype]
_remembered: dict[Hashable, Any] = {}


class Unknown(Exception):
    """A call whose arguments do not say what it gives."""


def layout(t: torch.Tensor) -> _Layout:
    return t.shape, t.stride(), t.dtype


@functools.cache
def is_pure(func: Any) -> bool:
    """Whether an op returns new tensors that depend on the layouts of its arguments alone."""
    schema = getattr(func, "_schema", None)
    if schema is None or func.namespace != "aten":
        return False
    return not any(a.alias_info is not None for a in (*schema.arguments, *schema.returns))


def key_of(func: Any, args: Any, kwargs: dict[str, Any]) -> Hashable | None:
    """A key of a call on abstract tensors; None if another argument decides what it gives."""
    try:
        return func, torch.get_default_dtype(), _key(args), tuple((k, _key(v)) for k, v in kwargs.items())
    except Unknown:
        return None


def _key(x: Any) -> Hashable:
    kind = type(x)
    if kind in _PLAIN:
        return kind, x
    if kind is FakeTensor or (kind in _TENSORS and x.device.type == "cpu"):
        if x.layout is not torch.strided:
            raise Unknown
        return layout(x)
    if kind in (tuple, list) or kind is torch.Size:
        return (kind, *[_key(v) for v in x])
    raise Unknown


def known_result(key: Hashable | None) -> _Layout | None:
    """The layout of the one tensor that a call gives, if a call with this key was seen."""
    return _remembered.get(key) if key is not None else None


def remember(key: Hashable | None, out: Any) -> None:
    """Note what a call gave, if it is one abstract tensor of floats."""
    if key is None or type(out) is not FakeTensor or out.layout is not torch.strided:
        return
    if not (out.is_floating_point() or out.is_complex()):
        return
    if len(_remembered) >= MAX_REMEMBERED:
        _remembered.clear()
    _remembered[key] = layout(out)


def empty(of: _Layout) -> torch.Tensor:
    """A tensor of the meta device with this layout."""
    shape, stride, dtype = of
    return torch.empty_strided(shape, stride, dtype=dtype, device="meta")


__all__ = ["empty", "is_pure", "key_of", "known_result", "remember"]
