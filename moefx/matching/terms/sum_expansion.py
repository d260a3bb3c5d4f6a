"""Sums over routed axes, written out as additions.

An axis is routed if the routing determines its elements, such as the axis of the experts. Written out, the summands of
experts that a token did not select fold to zero.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from .index_arithmetic import reshape_group
from .term import Term, is_const

if TYPE_CHECKING:
    from .normal_form import Terms

_MAX_TERMS = 1 << 16
_MAX_ELEMENTS = 4096  # of a vector whose elements become one term each
_COST = {
    "const": 0,
    "array": 0,
    "param": 1,
    "buffer": 1,
    "node": 1,
    "index_put": 2,
    "reshape": 2,
    "expand": 2,
    "permute": 2,
    "index": 3,
    "sum": 4,
    "pointwise": 5,
}


def cost(t: Term) -> tuple[int, int]:
    """Return the sort key of an operand: those that are likely to be zero, and cheap to pick, come first."""
    inner = t
    while inner.op in ("reshape", "expand", "permute", "slice"):
        inner = inner.args[0]
    return _COST.get(inner.op, 9), math.prod(t.shape)


def shift_axes(dims: set[int], gone: int) -> list[int]:
    """Renumber axes after one is removed."""
    return [d - (d > gone) for d in dims]


def routed_axes(terms: Terms, t: Term) -> frozenset[int]:
    """Return the axes along which the routing determines the elements."""
    if t.routed_axes is None:
        t.routed_axes = frozenset(d for d in _find_routed_axes(terms, t) if t.shape[d] > 1)
    return t.routed_axes


def _find_routed_axes(terms: Terms, t: Term) -> set[int]:
    """Compute `routed_axes` from those of the operands; axes of size one may be among them."""
    match t.op:
        case "const" | "node" | "buffer" | "call":
            return set()
        case "param":
            return set(terms.routed_parameters.get(t, ()))
        case "array":
            return set(range(len(t.shape)))
        case "pointwise":
            return {d + len(t.shape) - len(a.shape) for a in t.operands for d in routed_axes(terms, a)}
        case "einsum":
            inputs, output, *operands = t.args
            routed = {s[d] for s, o in zip(inputs, operands, strict=True) for d in routed_axes(terms, o)}
            return {d for d, label in enumerate(output) if label in routed}
        case "permute":
            inner = routed_axes(terms, t.args[0])
            return {d for d, source in enumerate(t.args[1]) if source in inner}
        case "expand" | "slice":
            return set(routed_axes(terms, t.args[0]))
        case "cat":
            dim, *pieces = t.args
            return (
                {dim}.union(*[routed_axes(terms, p) for p in pieces])
                if all(p.shape[dim] == 1 for p in pieces)
                else set().union(*[routed_axes(terms, p) for p in pieces])
            )
        case "reshape":
            inner = routed_axes(terms, t.args[0])
            if not inner:
                return set()
            return {
                d for d, n in enumerate(t.shape) if n > 1 and inner & set(reshape_group(t.args[0].shape, t.shape, d)[0])
            }
        case "index":
            inner, dims, indices, position = t.args
            width = indices.value.dim() - 1
            rest = [d for d in range(len(inner.shape)) if d not in dims]
            out = {position + k for k in range(width)}
            return out | {
                r if r < position else r + width for r, d in enumerate(rest) if d in routed_axes(terms, inner)
            }
        case "index_put":
            base, dims, _, values, _ = t.args
            rest = [d for d in range(len(base.shape)) if d not in dims]
            return (
                set(dims) | set(routed_axes(terms, base)) | {rest[d - 1] for d in routed_axes(terms, values) if d > 0}
            )
        case "sum" | "axis_op":
            inner = t.args[-1]
            routed = routed_axes(terms, inner)
            if t.op == "axis_op" and t.args[2]:
                return set(routed)
            gone = {d % len(inner.shape) for d in t.args[0 if t.op == "sum" else 1]}
            left = [d for d in range(len(inner.shape)) if d not in gone]
            return {k for k, d in enumerate(left) if d in routed}
        case "select":
            inner, indices = t.args
            free = [d for d in range(len(inner.shape)) if d not in dict(indices)]
            return {k for k, d in enumerate(free) if d in routed_axes(terms, inner)}
    raise AssertionError(t.op)


def resolve(terms: Terms, t: Term) -> Term:
    """Write out all sums over routed axes in a term."""
    match t.op:
        case "sum":
            return _resolve_sum(terms, t)
        case "einsum":
            return _resolve_einsum(terms, t)
        case "pointwise":
            name, kwargs, *items = t.args
            resolved: list = list(items)
            for k in sorted(
                (k for k, a in enumerate(items) if isinstance(a, Term)),
                key=lambda k: math.prod(items[k].shape),
            ):
                resolved[k] = terms.resolve(items[k])
                if name == "mul" and is_const(resolved[k], 0):
                    return terms.const(0, t.shape)
            return terms.expand(terms.pointwise(name, *resolved, **dict(kwargs)), t.shape)
        case "axis_op":
            name, dims, keep, static, inner = t.args
            return terms.axis_op(name, dims, keep, static, terms.resolve(inner))
        case "reshape":
            return terms.reshape(terms.resolve(t.args[0]), t.shape)
        case "permute":
            return terms.permute(terms.resolve(t.args[0]), t.args[1])
        case "expand":
            return terms.expand(terms.resolve(t.args[0]), t.shape)
        case "slice":
            return terms.slice(terms.resolve(t.args[0]), *t.args[1:])
        case "cat":
            return terms.cat([terms.resolve(p) for p in t.args[1:]], t.args[0])
        case "index_put" | "index" if len(t.shape) == 1 and t.shape[0] <= _MAX_ELEMENTS:
            parts = [terms.reshape(terms.resolve(terms.pick(t, 0, i)), (1,)) for i in range(t.shape[0])]
            return terms.cat(parts, 0)
    return t


def _resolve_sum(terms: Terms, t: Term) -> Term:
    """Write a sum over one routed axis out as an addition of its picks."""
    dims, inner = t.args
    routed = routed_axes(terms, inner) & {d % len(inner.shape) for d in dims}
    if not routed or inner.shape[min(routed)] > _MAX_TERMS:
        return terms.sum(terms.resolve(inner), dims)
    axis = min(routed)
    left = [d % len(inner.shape) for d in dims]
    left.remove(axis)
    total = terms.const(0, t.shape)
    for i in range(inner.shape[axis]):
        total = terms.pointwise(
            "add", total, terms.resolve(terms.sum(terms.pick(inner, axis, i), shift_axes(set(left), axis)))
        )
    return total


def _resolve_einsum(terms: Terms, t: Term) -> Term:
    inputs, output, *operands = t.args
    for s, o in zip(inputs, operands, strict=True):
        for d in routed_axes(terms, o):
            if s[d] not in output:
                return _expand_label(terms, t, s[d])
        if o.op == "cat" and s[o.args[0]] not in output:
            return _split_label(terms, t, s[o.args[0]], [p.shape[o.args[0]] for p in o.args[1:]])
    return terms.einsum(inputs, output, [terms.resolve(o) for o in operands])


def _expand_label(terms: Terms, t: Term, label: str) -> Term:
    """Write the sum over a label of an einsum out as additions, without the summands that have a factor of zero."""
    inputs, output, *operands = t.args
    n = next(o.shape[s.index(label)] for s, o in zip(inputs, operands, strict=True) if label in s)
    total = terms.const(0, t.shape)
    order = sorted(range(len(operands)), key=lambda k: cost(operands[k]))
    for i in range(n):
        picked = list(operands)
        for k in order:
            if label in inputs[k]:
                picked[k] = terms.pick(operands[k], inputs[k].index(label), i)
                if is_const(terms.resolve(picked[k]) if not picked[k].shape else picked[k], 0):
                    break
        else:
            term = terms.einsum([s.replace(label, "") for s in inputs], output, picked)
            total = terms.pointwise("add", total, terms.resolve(term))
    return total


def _split_label(terms: Terms, t: Term, label: str, sizes: list[int]) -> Term:
    """Write the sum over a label of an einsum as a sum over consecutive parts of these sizes."""
    inputs, output, *operands = t.args
    total, start = terms.const(0, t.shape), 0
    for n in sizes:
        parts = [
            terms.slice(o, s.index(label), start, start + n) if label in s else o
            for s, o in zip(inputs, operands, strict=True)
        ]
        total = terms.pointwise("add", total, terms.resolve(terms.einsum(inputs, output, parts)))
        start += n
    return total
