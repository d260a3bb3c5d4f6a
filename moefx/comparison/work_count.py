"""How long calls take, as a count of ops: the same on a busy machine as on an idle one."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch.utils.flop_counter import flop_registry

_OP, _ELEMENT, _FLOP = 3e-5, 2e-9, 3e-10  # seconds on one core of a CPU, in float64


class WorkCount:
    """Counts the work of ops.

    Attributes:
        seconds: about how long one core of a CPU takes.
    """

    def __init__(self) -> None:
        self.seconds = 0.0

    def add(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        """Count one call of an op and its result."""
        results = (out,) if isinstance(out, torch.Tensor) else pytree.tree_leaves(out)
        self.seconds += _OP + _ELEMENT * sum(t.numel() for t in results if isinstance(t, torch.Tensor))
        if (count_flops := _find_flop_formula(func)) is not None:
            self.seconds += _FLOP * count_flops(*args, **kwargs, out_val=out)


@functools.cache
def _find_flop_formula(func: Any) -> Callable[..., int] | None:
    return flop_registry.get(getattr(func, "overloadpacket", None))


__all__ = ["WorkCount"]
