"""Casts that a program spells out, in a run with more precision than its own."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

_NAMED = {Tensor.float: torch.float32, Tensor.half: torch.float16, Tensor.bfloat16: torch.bfloat16}

_CASTS = {*_NAMED, Tensor.to, Tensor.type}


class NoCopies(TorchFunctionMode):
    """A cast to the only dtype of a float32 program returns the tensor itself, as it does in that program. What is then
    written in place (`h = x.to(torch.float32); h *= noise`) changes both.

    Args:
        own: the dtype of all that the program is given. Programs of 16 bits cast up and down: there it says little.
    """

    def __init__(self, own: torch.dtype | None):
        super().__init__()
        self.own = own if own is torch.float32 else None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func not in _CASTS:
            return func(*args, **kwargs)
        if self.own is not None and _find_cast_dtype(func, args, kwargs) is self.own and args[0].dtype is torch.float64:
            return args[0]
        return func(*args, **kwargs)


def _find_cast_dtype(func: Any, args: Any, kwargs: dict[str, Any]) -> torch.dtype | None:
    """The dtype that a call casts its first argument to, if it does nothing else."""
    if func in _NAMED and len(args) == 1 and not kwargs:
        return _NAMED[func]
    if func in (Tensor.to, Tensor.type) and len(args) + len(kwargs) == 2:
        named = args[1] if len(args) == 2 else kwargs.get("dtype")
        return named if isinstance(named, torch.dtype) else None
    return None
