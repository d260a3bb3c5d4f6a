"""Emit pointwise ops from the names and arguments that terms give them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

aten = torch.ops.aten


def emit_pointwise(call: Callable[..., fx.Node], name: str, args: list[Any], kwargs: dict[str, Any]) -> fx.Node:
    """Emit a pointwise op.

    Args:
        call: emits a call of an op.
        name: the name in the term: a packet with its overload, or an op that terms write in one way, as `add`.
        args: nodes of one number of axes, and numbers.
    """
    match name:
        case "cast":
            return call(aten._to_copy.default, (args[0],), {"dtype": getattr(torch, kwargs["dtype"])})
        case "detach":
            return call(aten.detach.default, (args[0],))
        case "where":
            tensors = [isinstance(a, fx.Node) for a in args]
            overload = {
                (True, True): "self", (True, False): "ScalarOther",
                (False, True): "ScalarSelf", (False, False): "Scalar",
            }[tensors[1], tensors[2]]  # fmt: skip
            return call(getattr(aten.where, overload), tuple(args))
        case "add" | "sub" | "mul" | "div":
            if not isinstance(args[0], fx.Node):  # a number on the left
                if name in ("add", "mul"):
                    args = [args[1], args[0]]
                elif name == "sub":
                    return call(aten.rsub.Scalar, (args[1], args[0]))
                else:
                    reciprocal = call(aten.reciprocal.default, (args[1],))
                    return call(aten.mul.Tensor, (reciprocal, args[0]))
            return call(getattr(aten, name).Tensor, tuple(args))
    packet, _, overload = name.partition(".")
    if overload == "Tensor" and not isinstance(args[-1], fx.Node) and hasattr(getattr(aten, packet), "Scalar"):
        overload = "Scalar"
    op = getattr(getattr(aten, packet), overload)
    args = [_scalar(op, i, a) for i, a in enumerate(args)]
    template = next(a for a in args if isinstance(a, fx.Node))
    args = [call(aten.full_like.default, (template, a)) if _needs_tensor(op, i, a) else a for i, a in enumerate(args)]
    return call(op, tuple(args), kwargs)


def _scalar(op: Any, position: int, value: Any) -> Any:
    """Convert a number to int if the op's argument is an int."""
    if isinstance(value, float) and value.is_integer() and "int" in str(op._schema.arguments[position].type):
        return int(value)
    return value


def _needs_tensor(op: Any, position: int, value: Any) -> bool:
    """Return whether an argument is a number although the op takes only a tensor at this position."""
    return isinstance(value, (int, float)) and "Tensor" in str(op._schema.arguments[position].type)
