"""How long calls take, as a count of ops: the same on a busy machine as on an idle one."""

from __future__ import annotations

from typing import Any

import torch
import torch.utils._pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

_OP, _ELEMENT, _FLOP = 3e-5, 2e-9, 3e-10  # seconds on one core of a CPU, in float64


class WorkCount(TorchDispatchMode):
    """Counts what runs under it.

    Attributes:
        seconds: about how long one core of a CPU takes.
    """

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        self.seconds = 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        elements = sum(t.numel() for t in pytree.tree_leaves(out) if isinstance(t, torch.Tensor))
        count_flops = flop_registry.get(getattr(func, "overloadpacket", None))
        flops = count_flops(*args, **kwargs, out_val=out) if count_flops else 0
        self.seconds += _OP + _ELEMENT * elements + _FLOP * flops
        return out


__all__ = ["WorkCount"]
