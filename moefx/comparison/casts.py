"""Explicit casts of a program, in a run at higher precision."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

_NAMED = {Tensor.float: torch.float32, Tensor.half: torch.float16, Tensor.bfloat16: torch.bfloat16}

_CASTS = {*_NAMED, Tensor.to, Tensor.type}


class NoCopies(TorchFunctionMode):
    """Lets a cast to float32 return its argument, as it does in a float32 program.

    In-place updates of the result (`h = x.to(torch.float32); h *= noise`) then change both tensors, as in the program.

    Args:
        dtype: that of all parameters and inputs. Only float32 has an effect: programs in 16 bits cast in both
            directions.
    """

    def __init__(self, dtype: torch.dtype | None):
        super().__init__()
        self.dtype = dtype if dtype is torch.float32 else None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func not in _CASTS:
            return func(*args, **kwargs)
        if (
            self.dtype is not None
            and _find_cast_dtype(func, args, kwargs) is self.dtype
            and args[0].dtype is torch.float64
        ):
            return args[0]
        return func(*args, **kwargs)


def _find_cast_dtype(func: Any, args: Any, kwargs: dict[str, Any]) -> torch.dtype | None:
    """Return the dtype that a call casts its first argument to, if it does nothing else."""
    if func in _NAMED and len(args) == 1 and not kwargs:
        return _NAMED[func]
    if func in (Tensor.to, Tensor.type) and len(args) + len(kwargs) == 2:
        named = args[1] if len(args) == 2 else kwargs.get("dtype")
        return named if isinstance(named, torch.dtype) else None
    return None
