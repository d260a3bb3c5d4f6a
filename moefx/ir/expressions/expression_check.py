"""Check an expression from outside, such as from an exported program, before it becomes code.

Expressions become Python and Triton source. So each operation must be a pointwise ATen op without side effects, each
variable and keyword an expected identifier, and each value a number or a known name.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Collection
from typing import Any

import torch

from ...errors import InvalidInput

MAX_PARTS = 20_000  # operations, variables and numbers of one expression
MAX_DEPTH = 400
MAX_INTEGER = 1 << 63
_OP_NAME = re.compile(r"[A-Za-z_]\w{0,63}(\.\w{1,63})?", re.ASCII)
_VARIABLE = re.compile(r"[A-Za-z]\w{0,31}", re.ASCII)
_WORDS = ("floor", "trunc", "none", "tanh")  # `rounding_mode` of div, `approximate` of gelu

# Pointwise ops that torch does not tag as such (leaky_relu: torch 2.11).
_UNTAGGED = (
    torch.ops.aten.leaky_relu.default,
    torch.ops.aten.hardswish.default,
    torch.ops.aten.log_sigmoid.default,
    torch.ops.aten.floor_divide.default,
    torch.ops.aten.floor_divide.Scalar,
    torch.ops.aten.full_like.default,
    torch.ops.aten.where.Scalar,
    torch.ops.aten.where.ScalarSelf,
    torch.ops.aten.where.ScalarOther,
)
_CASTS = (torch.ops.aten._to_copy.default, torch.ops.aten.detach.default)


def is_pointwise(target: Any) -> bool:
    """Return whether a node's target is a pointwise ATen op."""
    return target in _UNTAGGED or torch.Tag.pointwise in getattr(target, "tags", ())


def check_expression(expr: Any, variables: Collection[str] | None = None) -> None:
    """Check that `expr` is an expression of pointwise ATen ops (see `pointwise_expression`).

    Args:
        variables: the allowed names; None allows every short identifier.

    Raises:
        InvalidInput: a part is not allowed; the message names the first one.
    """
    pending, num_parts = [(expr, 0)], 0
    while pending:
        part, depth = pending.pop()
        num_parts += 1
        if num_parts > MAX_PARTS or depth > MAX_DEPTH:
            raise InvalidInput(f"an expression has more than {MAX_PARTS} parts or {MAX_DEPTH} levels")
        if isinstance(part, (list, tuple)):
            arguments = list(part)
            if arguments and isinstance(arguments[0], str):
                keywords = arguments.pop() if isinstance(arguments[-1], dict) else {}
                _check_keywords(resolve_op(arguments.pop(0)), keywords)
            pending += [(argument, depth + 1) for argument in arguments]
        elif isinstance(part, str):
            _check_variable(part, variables)
        else:
            _check_number(part)


@functools.cache
def resolve_op(head: str) -> Any:
    """Return the ATen op of a head: `mul.Tensor`, or `mul` for the overload that takes a tensor.

    Raises:
        InvalidInput: the op is not pointwise, or it writes to its arguments.
    """
    op = _find_op(head) if _OP_NAME.fullmatch(head) else None
    if op is None or not (is_pointwise(op) or op in _CASTS) or op._schema.is_mutable:
        raise InvalidInput(f"an expression calls {head[:80]!r}, which is no pointwise ATen op without side effects")
    return op


def _find_op(head: str) -> Any:
    name, _, overload = head.partition(".")
    packet = getattr(torch.ops.aten, name, None) if not name.startswith("__") else None
    if not isinstance(packet, torch._ops.OpOverloadPacket):
        return None
    if overload:
        return getattr(packet, overload) if overload in packet.overloads() else None
    # `mul` also has a "default", for TorchScript's numbers. Take the overload for tensors.
    candidates = [getattr(packet, o) for o in ("default", "Tensor") if o in packet.overloads()]
    return next((c for c in candidates if str(c._schema.arguments[0].type) == "Tensor"), None)


def check_dtype(name: Any) -> None:
    """Raise InvalidInput unless `name` is the name of a dtype, such as `float32`."""
    if not isinstance(name, str) or not isinstance(getattr(torch, name, None), torch.dtype):
        raise InvalidInput(f"{str(name)[:80]!r} is no dtype of torch")


def _check_variable(name: str, variables: Collection[str] | None) -> None:
    if variables is not None and name not in variables:
        raise InvalidInput(
            f"an expression has the variable {name[:80]!r}; the variables are {', '.join(sorted(variables))}"
        )
    if not _VARIABLE.fullmatch(name):
        raise InvalidInput(f"an expression has the variable {name[:80]!r}, which is no short identifier")


def _check_keywords(op: Any, keywords: dict[str, Any]) -> None:
    argument_names = {argument.name for argument in op._schema.arguments}
    for key, value in keywords.items():
        if key not in argument_names:
            raise InvalidInput(f"an expression gives {op} the argument {str(key)[:80]!r}, which it does not have")
        if not isinstance(value, str):
            _check_number(value)
        elif value not in _WORDS and not isinstance(getattr(torch, value, None), (torch.dtype, torch.memory_format)):
            raise InvalidInput(f"an expression gives {op} {key}={value[:80]!r}, which is no dtype or known word")


def _check_number(value: Any) -> None:
    is_large = isinstance(value, int) and abs(value) >= MAX_INTEGER  # too many digits to print
    if is_large or not (value is None or isinstance(value, (bool, int, float))):
        description = "an integer of more than 64 bits" if is_large else repr(value)[:80]
        raise InvalidInput(f"an expression has {description}, which is no allowed number")


__all__ = ["check_dtype", "check_expression", "is_pointwise", "resolve_op"]
