"""How an element of each kind of term is found."""

from __future__ import annotations

import math
import string
from typing import TYPE_CHECKING

import torch

from .index_arithmetic import reshape_group, unravel, without_row
from .parameter_places import is_state_slice
from .sum_expansion import cost, shift_axes
from .term import MASKED, OVERWRITTEN, Term, Write, constant_value, is_const

if TYPE_CHECKING:
    from .normal_form import Terms

_LABELS = string.ascii_letters


def pick(T: Terms, t: Term, axis: int, i: int) -> Term:
    shape = t.shape[:axis] + t.shape[axis + 1 :]
    match t.op:
        case "const":
            return T.const(constant_value(t), shape)
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
                return T.pick_axes(T.pick(inner, free[axis], i), {d - (d > free[axis]): j for d, j in where})
            return T.make("at", (inner, tuple(sorted((*where, (free[axis], i))))), shape)
    return T.make("at", (t, ((axis, i),)), shape)


def _pick_elementwise(T: Terms, t: Term, axis: int, i: int) -> Term:
    name, kwargs, *items = t.args
    picked: list = list(items)
    # cheap operands first: a zero mask makes the others irrelevant
    order = sorted((k for k, a in enumerate(items) if isinstance(a, Term)), key=lambda k: cost(items[k]))
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
        return T.reshape(T.pick_axes(inner, dict(zip(ins, where, strict=True))), shape)
    if len(ins) == 1:
        sizes = [t.shape[d] for d in outs]
        if (apart := split_axis(T, inner, ins[0], sizes)) is not None:
            return T.reshape(T.pick(apart, ins[0] + outs.index(axis), i), shape)
        if axis > outs[0] and is_state_slice(inner):  # of a parameter no range, or one with steps
            return T.make("at", (t, ((axis, i),)), shape)
        elements = torch.arange(math.prod(sizes)).reshape(sizes).select(outs.index(axis), i).reshape(1, -1)
        return T.reshape(T.index(inner, ins, elements, ins[0]), shape)
    merged = (*inner.shape[: ins[0]], math.prod(inner.shape[d] for d in ins), *inner.shape[ins[-1] + 1 :])
    flat = T.make("reshape", (inner,), merged)
    return _pick_reshape(T, T.make("reshape", (flat,), t.shape), axis, i)


def split_axis(T: Terms, t: Term, axis: int, sizes: list[int]) -> Term | None:
    """A product of which one axis is several, such as that of the slots and the columns of each slot's expert, or of
    all experts' columns: the product of operands that have these axes. None: it is none."""
    if t.op == "pw":
        name, kwargs, *items = t.args
        placed = [(a, axis - len(t.shape) + len(a.shape)) if isinstance(a, Term) else (a, -1) for a in items]
        return T.pw(name, *[_reshape_axis(T, a, d, sizes) if d >= 0 else a for a, d in placed], **dict(kwargs))
    if t.op != "ein":
        return None
    inputs, output, *operands = t.args
    label, free = output[axis], [x for x in _LABELS if all(x not in s for s in inputs)]
    labels = "".join(free[: len(sizes)])
    apart = [
        _reshape_axis(T, o, s.index(label), sizes) if label in s else o for s, o in zip(inputs, operands, strict=True)
    ]
    return T.ein([s.replace(label, labels) for s in inputs], output.replace(label, labels), apart)


def _reshape_axis(T: Terms, t: Term, axis: int, sizes: list[int]) -> Term:
    """`t` with axes of these sizes in the place of one, of which there may be one element for all."""
    if t.shape[axis] == 1:
        sizes = [1] * len(sizes)
    apart = split_axis(T, t, axis, sizes)
    return apart if apart is not None else T.reshape(t, (*t.shape[:axis], *sizes, *t.shape[axis + 1 :]))


def _pick_index(T: Terms, t: Term, axis: int, i: int) -> Term:
    inner, dims, indices, position = t.args
    width = indices.value.dim() - 1
    if position <= axis < position + width:
        chosen = indices.value.select(axis - position + 1, i)
        return T.index(inner, dims, chosen, position, routed=True, from_start=True)
    rest = [d for d in range(len(inner.shape)) if d not in dims]
    source = rest[axis if axis < position else axis - width]
    moved = [d - (d > source) for d in dims]
    picked, position = T.pick(inner, source, i), position - (axis < position)
    return T.index(picked, moved, indices.value, position, routed=True, from_start=True)


def _pick_put(T: Terms, t: Term, axis: int, i: int) -> Term:
    added: list[Term] = []
    while t.op == "put":  # a loop over experts leaves one `put` per expert: walk the chain, do not recurse
        base, dims, indices, values, accumulate = t.args
        if axis not in dims:
            break
        if len(dims) == 1:
            writes, t = _collect_writes(T, t, axis)
            for values, accumulate, hits in writes.get(i, ()):
                if not accumulate:
                    return _add_all(T, _keep_last(T, [T.pick(values, 0, j) for j in hits]), added)
                added += [T.pick(values, 0, j) for j in reversed(hits)]
        elif len(indices.hits(dims.index(axis), i)):
            break
        else:
            t = base
    if t.op != "put":
        return _add_all(T, T.pick(t, axis, i), added)
    base, dims, indices, values, accumulate = t.args
    under = T.pick(base, axis, i)
    if axis in dims:
        q = dims.index(axis)
        hits = torch.tensor(indices.hits(q, i), dtype=torch.int64)
        left = without_row(indices.value, q)[:, hits]
        values = T.index(values, (0,), hits[None], 0)
        dims = [d - (d > axis) for d in dims if d != axis]
        return _add_all(T, T.put(under, dims, left, values, accumulate), added)
    rest = [d for d in range(len(base.shape)) if d not in dims]
    values = T.pick(values, 1 + rest.index(axis), i)
    return _add_all(T, T.put(under, [d - (d > axis) for d in dims], indices.value, values, accumulate), added)


def _collect_writes(T: Terms, t: Term, axis: int) -> tuple[dict[int, list[Write]], Term]:
    """What a chain of `put` along one axis writes at each index, the last write first, and the term below the chain."""
    if (t, axis) not in T.writes:
        below, writes = t, dict[int, list[Write]]()
        while below.op == "put" and below.args[1] == (axis,):
            below_it, _, indices, values, accumulate = below.args
            for i, hits in indices.all_hits(0).items():
                writes.setdefault(i, []).append((values, accumulate, hits))
            below = below_it
        T.writes[t, axis] = writes, below
    return T.writes[t, axis]


def _keep_last(T: Terms, written: list[Term]) -> Term:
    """What is at a place that one `put` writes these to. Gradients reach all of them, also where it is the last one:
    of weights that is looked into where a choice may name an expert twice (see `different`)."""
    if len(written) == 1 or not written[0].shape or all(map(is_const, written)):
        return written[-1]
    T.overwrites = True
    return T.pw(OVERWRITTEN, *written)


def _add_all(T: Terms, base: Term, added: list[Term]) -> Term:
    for term in reversed(added):
        base = T.pw("add", base, term)
    return base


def _pick_row(T: Terms, t: Term, axis: int, i: int) -> Term:
    name, dims, keep, static, inner = t.args
    acted = {d % len(inner.shape) for d in dims}
    if not keep:
        source = [d for d in range(len(inner.shape)) if d not in acted][axis]
        return T.row(name, shift_axes(acted, source), keep, static, T.pick(inner, source, i))
    if axis not in acted:
        return T.row(name, shift_axes(acted, axis), keep, static, T.pick(inner, axis, i))
    shape = t.shape[:axis] + t.shape[axis + 1 :]
    masked = name == "softmax" and _is_masked(T, inner, axis, i)
    if masked and not all(_is_masked(T, inner, axis, j) for j in range(inner.shape[axis])):
        return T.const(0, shape)  # masked out before the softmax
    return T.make("at", (t, ((axis, i),)), shape)


def _is_masked(T: Terms, scores: Term, axis: int, i: int) -> bool:
    """Whether a score is -inf, or so low (-1e9, `finfo.min`) that its softmax beside any other score rounds to 0."""
    score = T.resolve(T.pick(scores, axis, i))
    return is_const(score) and constant_value(score) <= MASKED
