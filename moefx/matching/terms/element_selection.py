"""Select an index of an axis in each kind of term: `Terms.pick`."""

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
    """Select index `i` of `axis`, and remove the axis."""
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
            if inner.op == "row":  # pick the batch axes of a softmax inside it, in any order of picks
                return T.pick_axes(T.pick(inner, free[axis], i), {d - (d > free[axis]): j for d, j in where})
            return T.make("at", (inner, tuple(sorted((*where, (free[axis], i))))), shape)
    return T.make("at", (t, ((axis, i),)), shape)


def _pick_elementwise(T: Terms, t: Term, axis: int, i: int) -> Term:
    name, kwargs, *items = t.args
    picked: list = list(items)
    # cheap operands first: after a zero mask the others do not matter
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
    """Pick from a reshape: merged axes unravel the index, split axes become a strided slice of the old axis."""
    inner, shape = t.args[0], t.shape[:axis] + t.shape[axis + 1 :]
    if t.shape[axis] == 1:
        return T.reshape(inner, shape)
    ins, outs = reshape_group(inner.shape, t.shape, axis)
    if len(outs) == 1:
        where = unravel(i, [inner.shape[d] for d in ins])
        return T.reshape(T.pick_axes(inner, dict(zip(ins, where, strict=True))), shape)
    if len(ins) == 1:
        sizes = [t.shape[d] for d in outs]
        if (split := split_axis(T, inner, ins[0], sizes)) is not None:
            return T.reshape(T.pick(split, ins[0] + outs.index(axis), i), shape)
        if axis > outs[0] and is_state_slice(inner):  # a parameter slice with steps would have no index
            return T.make("at", (t, ((axis, i),)), shape)
        elements = torch.arange(math.prod(sizes)).reshape(sizes).select(outs.index(axis), i).reshape(1, -1)
        return T.reshape(T.index(inner, ins, elements, ins[0]), shape)
    merged = (*inner.shape[: ins[0]], math.prod(inner.shape[d] for d in ins), *inner.shape[ins[-1] + 1 :])
    flat = T.make("reshape", (inner,), merged)
    return _pick_reshape(T, T.make("reshape", (flat,), t.shape), axis, i)


def split_axis(T: Terms, t: Term, axis: int, sizes: list[int]) -> Term | None:
    """Split an axis of a product into axes of these sizes, by splitting it in the operands.

    The axis may merge the slots, or the experts, with an expert's columns. None if the term is not a product.
    """
    if t.op == "pw":
        name, kwargs, *items = t.args
        placed = [(a, axis - len(t.shape) + len(a.shape)) if isinstance(a, Term) else (a, -1) for a in items]
        return T.pw(name, *[_reshape_axis(T, a, d, sizes) if d >= 0 else a for a, d in placed], **dict(kwargs))
    if t.op != "ein":
        return None
    inputs, output, *operands = t.args
    label, free = output[axis], [x for x in _LABELS if all(x not in s for s in inputs)]
    labels = "".join(free[: len(sizes)])
    split = [
        _reshape_axis(T, o, s.index(label), sizes) if label in s else o for s, o in zip(inputs, operands, strict=True)
    ]
    return T.ein([s.replace(label, labels) for s in inputs], output.replace(label, labels), split)


def _reshape_axis(T: Terms, t: Term, axis: int, sizes: list[int]) -> Term:
    """Replace an axis by axes of these sizes. An axis of size one becomes axes of size one."""
    if t.shape[axis] == 1:
        sizes = [1] * len(sizes)
    split = split_axis(T, t, axis, sizes)
    return split if split is not None else T.reshape(t, (*t.shape[:axis], *sizes, *t.shape[axis + 1 :]))


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
    while t.op == "put":  # a loop over experts leaves one `put` per expert, too many to recurse
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
    """Collect the writes of a chain of `put` along one axis, by index, the last first, and the term below it."""
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
    """Return the last of the values that one `put` writes at one index.

    Gradients reach all of them, so `OVERWRITTEN` marks the result. Scalars are routing weights: a write that repeats
    an index needs an expert that is selected twice (see `distinct_choices`).
    """
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
        return T.const(0, shape)  # masked before the softmax
    return T.make("at", (t, ((axis, i),)), shape)


def _is_masked(T: Terms, scores: Term, axis: int, i: int) -> bool:
    """Whether a score is -inf, or so low (-1e9, `finfo.min`) that its softmax rounds to 0 beside any other."""
    score = T.resolve(T.pick(scores, axis, i))
    return is_const(score) and constant_value(score) <= MASKED
