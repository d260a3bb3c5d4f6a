"""Fold pointwise ops on known numbers: `x * 0`, `x + 0`, a `where` with a known condition, sums of constants."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from .index_arithmetic import broadcast
from .term import Term, constant_value, is_const, is_pointwise_term

if TYPE_CHECKING:
    from .normal_form import Terms

aten = torch.ops.aten
_MAX_COMPUTED = 1 << 20  # elements


def fold_pointwise(terms: Terms, name: str, items: tuple, kwargs: dict, shape: tuple[int, ...]) -> Term | None:
    """Simplify a pointwise op: x * 0, x + 0, a known condition, known numbers. None if nothing applies."""
    if name in ("mul", "add", "sub", "div"):
        a, b = items
        if name == "mul" and (is_const(a, 0) or is_const(b, 0)):
            return terms.const(0, shape)
        if name == "div" and is_const(a, 0):
            return terms.const(0, shape)
        neutral = 0 if name in ("add", "sub") else 1
        if is_const(b, neutral) and a.shape == shape:
            return a
        if name in ("add", "mul") and is_const(a, neutral) and b.shape == shape:
            return b
    elif name == "where":
        if items[0].op == "const":
            return terms.expand(items[1] if items[0].args[0] else items[2], shape)
        if items[0].op == "array" and not shape:
            raise AssertionError("scalar arrays are constants")
    elif name in ("cast", "detach"):
        again = name == "detach" and is_pointwise_term(items[0], name)
        if again or items[0].op in ("const", "array"):
            return items[0]
    if all(t.op in ("const", "array") for t in items if isinstance(t, Term)):
        return _compute(terms, name, items, kwargs, shape)
    return None


def _compute(terms: Terms, name: str, items: tuple, kwargs: dict, shape: tuple[int, ...]) -> Term | None:
    """Compute a pointwise op on known numbers, in float64. None if it is large, or torch refuses it."""
    if math.prod(broadcast([t.shape for t in items if isinstance(t, Term) and t.op == "array"])) > _MAX_COMPUTED:
        return None
    values = [torch.as_tensor(constant_value(t), dtype=torch.float64) if isinstance(t, Term) else t for t in items]
    if name == "where":
        values[0] = values[0] != 0
    packet, _, overload = name.partition(".")
    op = getattr(aten, packet)
    try:
        out = (getattr(op, overload) if overload else op)(*values, **kwargs)
    except (RuntimeError, TypeError):
        return None
    return terms.expand(terms.array(out), shape)
