"""How an element of each kind of term is found, and how routed sums are written out."""

from __future__ import annotations

import math

import torch

from .shapes import reshape_group, unravel
from .terms import Term, Terms, is_const, number, without_row

_WIDEST_SUM = 1 << 16
_MASKED = -1e8


def pick(T: Terms, t: Term, axis: int, i: int) -> Term:
    shape = t.shape[:axis] + t.shape[axis + 1 :]
    match t.op:
        case "const":
            return T.const(number(t), shape)
        case "array":
            if not shape:
                return T.const(t.args[0].flat[i])
            return T.array(t.args[0].value.select(axis, i))
        case "pw":
            return _pick_elementwise(T, t, axis, i)
        case "ein":
            inputs, output, *operands = t.args
            label = output[axis]
            operands = [
                T.pick(o, s.index(label), i) if label in s else o for s, o in zip(inputs, operands, strict=True)
            ]
            return T.ein([s.replace(label, "") for s in inputs], output.replace(label, ""), operands)
        case "permute":
            source = t.args[1][axis]
            order = [d - (d > source) for d in t.args[1] if d != source]
            return T.permute(T.pick(t.args[0], source, i), order)
        case "expand":
            inner = t.args[0]
            return T.expand(T.pick(inner, axis, i if inner.shape[axis] > 1 else 0), shape)
        case "slice":
            inner, dim, start, stop, step = t.args
            if dim == axis:
                return T.pick(inner, axis, start + i * step)
            return T.slice(T.pick(inner, axis, i), dim - (axis < dim), start, stop, step)
        case "cat":
            return _pick_cat(T, t, axis, i)
        case "reshape":
            return _pick_reshape(T, t, axis, i)
        case "index":
            return _pick_index(T, t, axis, i)
        case "put":
            return _pick_put(T, t, axis, i)
        case "sum":
            dims, inner = t.args
            reduced = {d % len(inner.shape) for d in dims}
            source = [d for d in range(len(inner.shape)) if d not in reduced][axis]
            return T.sum(T.pick(inner, source, i), [d - (d > source) for d in reduced])
        case "row":
            return _pick_row(T, t, axis, i)
        case "at":
            inner, where = t.args
            free = [d for d in range(len(inner.shape)) if d not in dict(where)]
            if inner.op == "row":  # the batch axes of a softmax are picked inside it, whatever came first
                return T.picks(T.pick(inner, free[axis], i), {d - (d > free[axis]): j for d, j in where})
            return T.make("at", (inner, tuple(sorted((*where, (free[axis], i))))), shape)
    return T.make("at", (t, ((axis, i),)), shape)


def _pick_elementwise(T: Terms, t: Term, axis: int, i: int) -> Term:
    name, kwargs, *items = t.args
    picked: list = list(items)
    # cheap operands first: a zero mask makes the others irrelevant
    order = sorted((k for k, a in enumerate(items) if isinstance(a, Term)), key=lambda k: _weight(items[k]))
    shape = t.shape[:axis] + t.shape[axis + 1 :]
    for k in order:
        a = items[k]
        d = axis - (len(t.shape) - len(a.shape))
        if d >= 0:
            picked[k] = T.pick(a, d, i if a.shape[d] > 1 else 0)
        if name == "mul" and is_const(picked[k], 0):
            return T.const(0, shape)
        if name == "where" and k == 0 and picked[0].op == "const":
            chosen = 1 if picked[0].args[0] else 2
            a = items[chosen]
            d = axis - (len(t.shape) - len(a.shape))
            return T.expand(T.pick(a, d, i if a.shape[d] > 1 else 0) if d >= 0 else a, shape)
    return T.expand(T.pw(name, *picked, **dict(kwargs)), shape)


_ORDER = {
    "const": 0,
    "array": 0,
    "param": 1,
    "buffer": 1,
    "node": 1,
    "put": 2,
    "reshape": 2,
    "expand": 2,
    "permute": 2,
    "index": 3,
    "sum": 4,
    "pw": 5,
}


def _weight(t: Term) -> tuple[int, int]:
    inner = t
    while inner.op in ("reshape", "expand", "permute", "slice"):
        inner = inner.args[0]
    return _ORDER.get(inner.op, 9), math.prod(t.shape)


def _pick_cat(T: Terms, t: Term, axis: int, i: int) -> Term:
    dim, *pieces = t.args
    if dim != axis:
        return T.cat([T.pick(p, axis, i) for p in pieces], dim - (axis < dim))
    sizes = {p.shape[dim] for p in pieces}
    if len(sizes) == 1:
        n = sizes.pop()
        return T.pick(pieces[i // n], axis, i % n)
    for piece in pieces:
        if i < piece.shape[dim]:
            return T.pick(piece, axis, i)
        i -= piece.shape[dim]
    raise IndexError(i)


def _pick_reshape(T: Terms, t: Term, axis: int, i: int) -> Term:
    """Merged axes unravel the index; split axes become a strided slice of the axis they were split from."""
    inner, shape = t.args[0], t.shape[:axis] + t.shape[axis + 1 :]
    if t.shape[axis] == 1:
        return T.reshape(inner, shape)
    ins, outs = reshape_group(inner.shape, t.shape, axis)
    if len(outs) == 1:
        where = unravel(i, [inner.shape[d] for d in ins])
        return T.reshape(T.picks(inner, dict(zip(ins, where, strict=True))), shape)
    if len(ins) == 1:
        sizes = [t.shape[d] for d in outs]
        elements = torch.arange(math.prod(sizes)).reshape(sizes).select(outs.index(axis), i).reshape(1, -1)
        return T.reshape(T.index(inner, ins, elements, ins[0]), shape)
    merged = (*inner.shape[: ins[0]], math.prod(inner.shape[d] for d in ins), *inner.shape[ins[-1] + 1 :])
    flat = T.make("reshape", (inner,), merged)
    return _pick_reshape(T, T.make("reshape", (flat,), t.shape), axis, i)


def _pick_index(T: Terms, t: Term, axis: int, i: int) -> Term:
    inner, dims, indices, position = t.args
    width = indices.value.dim() - 1
    if position <= axis < position + width:
        return T.index(inner, dims, indices.value.select(axis - position + 1, i), position, routed=True)
    rest = [d for d in range(len(inner.shape)) if d not in dims]
    source = rest[axis if axis < position else axis - width]
    moved = [d - (d > source) for d in dims]
    return T.index(T.pick(inner, source, i), moved, indices.value, position - (axis < position), routed=True)


def _pick_put(T: Terms, t: Term, axis: int, i: int) -> Term:
    added: list[Term] = []
    while t.op == "put":  # a loop over experts leaves one `put` per expert: walk the chain, do not recurse
        base, dims, indices, values, accumulate = t.args
        if axis not in dims:
            break
        hits = indices.hits(dims.index(axis), i)
        if len(dims) > 1 and len(hits):
            break
        if len(hits) and not accumulate:
            return _plus(T, T.pick(values, 0, hits[-1]), added)
        added += [T.pick(values, 0, j) for j in reversed(hits)]
        t = base
    if t.op != "put":
        return _plus(T, T.pick(t, axis, i), added)
    base, dims, indices, values, accumulate = t.args
    under = T.pick(base, axis, i)
    if axis in dims:
        q = dims.index(axis)
        hits = torch.tensor(indices.hits(q, i), dtype=torch.int64)
        left = without_row(indices.value, q)[:, hits]
        values = T.index(values, (0,), hits[None], 0)
        dims = [d - (d > axis) for d in dims if d != axis]
        return _plus(T, T.put(under, dims, left, values, accumulate), added)
    rest = [d for d in range(len(base.shape)) if d not in dims]
    values = T.pick(values, 1 + rest.index(axis), i)
    return _plus(T, T.put(under, [d - (d > axis) for d in dims], indices.value, values, accumulate), added)


def _plus(T: Terms, base: Term, added: list[Term]) -> Term:
    for term in reversed(added):
        base = T.pw("add", base, term)
    return base


def _pick_row(T: Terms, t: Term, axis: int, i: int) -> Term:
    name, dims, keep, static, inner = t.args
    acted = {d % len(inner.shape) for d in dims}
    if not keep:
        source = [d for d in range(len(inner.shape)) if d not in acted][axis]
        return T.row(name, _shift(acted, source), keep, static, T.pick(inner, source, i))
    if axis not in acted:
        return T.row(name, _shift(acted, axis), keep, static, T.pick(inner, axis, i))
    shape = t.shape[:axis] + t.shape[axis + 1 :]
    masked = name == "softmax" and _is_masked(T, inner, axis, i)
    if masked and not all(_is_masked(T, inner, axis, j) for j in range(inner.shape[axis])):
        return T.const(0, shape)  # masked out before the softmax
    return T.make("at", (t, ((axis, i),)), shape)


def _is_masked(T: Terms, scores: Term, axis: int, i: int) -> bool:
    """Whether a score is -inf, or so low (-1e9, `finfo.min`) that its softmax beside any other score rounds to 0."""
    score = T.resolve(T.pick(scores, axis, i))
    return is_const(score) and number(score) <= _MASKED


def _shift(dims: set[int], gone: int) -> list[int]:
    return [d - (d > gone) for d in dims]


# ---------------------------------------------------------------------- routed axes
def structure(T: Terms, t: Term) -> frozenset[int]:
    """The axes of `t` along which routing put different things: sums over these are written out."""
    if t.structure is None:
        t.structure = frozenset(d for d in _structure(T, t) if t.shape[d] > 1)
    return t.structure


def _structure(T: Terms, t: Term) -> set[int]:
    match t.op:
        case "const" | "node" | "param" | "buffer" | "call":
            return set()
        case "array":
            return set(range(len(t.shape)))
        case "pw":
            return {d + len(t.shape) - len(a.shape) for a in t.terms for d in structure(T, a)}
        case "ein":
            inputs, output, *operands = t.args
            routed = {s[d] for s, o in zip(inputs, operands, strict=True) for d in structure(T, o)}
            return {d for d, label in enumerate(output) if label in routed}
        case "permute":
            inner = structure(T, t.args[0])
            return {d for d, source in enumerate(t.args[1]) if source in inner}
        case "expand" | "slice":
            return set(structure(T, t.args[0]))
        case "cat":
            dim, *pieces = t.args
            return (
                {dim}.union(*[structure(T, p) for p in pieces])
                if all(p.shape[dim] == 1 for p in pieces)
                else set().union(*[structure(T, p) for p in pieces])
            )
        case "reshape":
            inner = structure(T, t.args[0])
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
            return out | {r if r < position else r + width for r, d in enumerate(rest) if d in structure(T, inner)}
        case "put":
            base, dims, _, values, _ = t.args
            rest = [d for d in range(len(base.shape)) if d not in dims]
            return set(dims) | set(structure(T, base)) | {rest[d - 1] for d in structure(T, values) if d > 0}
        case "sum" | "row":
            inner = t.args[-1]
            routed = structure(T, inner)
            if t.op == "row" and t.args[2]:
                return set(routed)
            gone = {d % len(inner.shape) for d in t.args[0 if t.op == "sum" else 1]}
            left = [d for d in range(len(inner.shape)) if d not in gone]
            return {k for k, d in enumerate(left) if d in routed}
        case "at":
            inner, where = t.args
            free = [d for d in range(len(inner.shape)) if d not in dict(where)]
            return {k for k, d in enumerate(free) if d in structure(T, inner)}
    raise AssertionError(t.op)


def resolve(T: Terms, t: Term) -> Term:
    match t.op:
        case "sum":
            return _resolve_sum(T, t)
        case "ein":
            return _resolve_ein(T, t)
        case "pw":
            name, kwargs, *items = t.args
            resolved: list = list(items)
            for k in sorted(
                (k for k, a in enumerate(items) if isinstance(a, Term)),
                key=lambda k: math.prod(items[k].shape),
            ):
                resolved[k] = T.resolve(items[k])
                if name == "mul" and is_const(resolved[k], 0):
                    return T.const(0, t.shape)
            return T.expand(T.pw(name, *resolved, **dict(kwargs)), t.shape)
        case "row":
            name, dims, keep, static, inner = t.args
            return T.row(name, dims, keep, static, T.resolve(inner))
        case "reshape":
            return T.reshape(T.resolve(t.args[0]), t.shape)
        case "permute":
            return T.permute(T.resolve(t.args[0]), t.args[1])
        case "expand":
            return T.expand(T.resolve(t.args[0]), t.shape)
        case "slice":
            return T.slice(T.resolve(t.args[0]), *t.args[1:])
        case "cat":
            return T.cat([T.resolve(p) for p in t.args[1:]], t.args[0])
        case "put" | "index" if len(t.shape) == 1 and t.shape[0] <= 4096:
            parts = [T.reshape(T.resolve(T.pick(t, 0, i)), (1,)) for i in range(t.shape[0])]
            return T.cat(parts, 0)
    return t


def _resolve_sum(T: Terms, t: Term) -> Term:
    dims, inner = t.args
    routed = structure(T, inner) & {d % len(inner.shape) for d in dims}
    if not routed or inner.shape[min(routed)] > _WIDEST_SUM:
        return T.sum(T.resolve(inner), dims)
    axis = min(routed)
    left = [d % len(inner.shape) for d in dims]
    left.remove(axis)
    total = T.const(0, t.shape)
    for i in range(inner.shape[axis]):
        total = T.pw("add", total, T.resolve(T.sum(T.pick(inner, axis, i), _shift(set(left), axis))))
    return total


def _resolve_ein(T: Terms, t: Term) -> Term:
    inputs, output, *operands = t.args
    for s, o in zip(inputs, operands, strict=True):
        for d in structure(T, o):
            if s[d] not in output:
                return _expand_label(T, t, s[d])
        if o.op == "cat" and s[o.args[0]] not in output:
            return _split_label(T, t, s[o.args[0]], [p.shape[o.args[0]] for p in o.args[1:]])
    return T.ein(inputs, output, [T.resolve(o) for o in operands])


def _expand_label(T: Terms, t: Term, label: str) -> Term:
    inputs, output, *operands = t.args
    n = next(o.shape[s.index(label)] for s, o in zip(inputs, operands, strict=True) if label in s)
    total = T.const(0, t.shape)
    order = sorted(range(len(operands)), key=lambda k: _weight(operands[k]))
    for i in range(n):
        picked = list(operands)
        for k in order:
            if label in inputs[k]:
                picked[k] = T.pick(operands[k], inputs[k].index(label), i)
                if is_const(T.resolve(picked[k]) if not picked[k].shape else picked[k], 0):
                    break
        else:
            term = T.ein([s.replace(label, "") for s in inputs], output, picked)
            total = T.pw("add", total, T.resolve(term))
    return total


def _split_label(T: Terms, t: Term, label: str, sizes: list[int]) -> Term:
    inputs, output, *operands = t.args
    total, start = T.const(0, t.shape), 0
    for n in sizes:
        parts = [
            T.slice(o, s.index(label), start, start + n) if label in s else o
            for s, o in zip(inputs, operands, strict=True)
        ]
        total = T.pw("add", total, T.resolve(T.ein(inputs, output, parts)))
        start += n
    return total
