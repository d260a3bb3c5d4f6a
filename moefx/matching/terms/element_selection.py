"""Select an index of an axis in each kind of term: `Terms.pick`."""

from __future__ import annotations

import math
import string
from typing import TYPE_CHECKING

import torch

from .index_arithmetic import reshape_group, unravel, without_row
from .parameter_slices import is_state_slice
from .sum_expansion import cost, shift_axes
from .term import MASKED, OVERWRITTEN, Term, Write, constant_value, is_const

if TYPE_CHECKING:
    from .normal_form import Terms

_LABELS = string.ascii_letters


def pick(terms: Terms, t: Term, axis: int, i: int) -> Term:
    """Select index `i` of `axis`, and remove the axis."""
    shape = t.shape[:axis] + t.shape[axis + 1 :]
    match t.op:
        case "const":
            return terms.const(constant_value(t), shape)
        case "array":
            if not shape:
                return terms.const(t.args[0].flat[i])
            return terms.array(t.args[0].value.select(axis, i))
        case "pointwise":
            return _pick_pointwise(terms, t, axis, i)
        case "einsum":
            inputs, output, *operands = t.args
            label = output[axis]
            operands = [
                terms.pick(o, s.index(label), i) if label in s else o for s, o in zip(inputs, operands, strict=True)
            ]
            return terms.einsum([s.replace(label, "") for s in inputs], output.replace(label, ""), operands)
        case "permute":
            source = t.args[1][axis]
            order = [d - (d > source) for d in t.args[1] if d != source]
            return terms.permute(terms.pick(t.args[0], source, i), order)
        case "expand":
            inner = t.args[0]
            return terms.expand(terms.pick(inner, axis, i if inner.shape[axis] > 1 else 0), shape)
        case "slice":
            inner, dim, start, stop, step = t.args
            if dim == axis:
                return terms.pick(inner, axis, start + i * step)
            return terms.slice(terms.pick(inner, axis, i), dim - (axis < dim), start, stop, step)
        case "cat":
            return _pick_cat(terms, t, axis, i)
        case "reshape":
            return _pick_reshape(terms, t, axis, i)
        case "index":
            return _pick_index(terms, t, axis, i)
        case "index_put":
            return _pick_index_put(terms, t, axis, i)
        case "sum":
            dims, inner = t.args
            reduced = {d % len(inner.shape) for d in dims}
            source = [d for d in range(len(inner.shape)) if d not in reduced][axis]
            return terms.sum(terms.pick(inner, source, i), [d - (d > source) for d in reduced])
        case "axis_op":
            return _pick_axis_op(terms, t, axis, i)
        case "select":
            inner, indices = t.args
            free = [d for d in range(len(inner.shape)) if d not in dict(indices)]
            if inner.op == "axis_op":  # pick the batch axes of a softmax inside it, in any order of picks
                return terms.pick_axes(terms.pick(inner, free[axis], i), {d - (d > free[axis]): j for d, j in indices})
            return terms.make("select", (inner, tuple(sorted((*indices, (free[axis], i))))), shape)
    return terms.make("select", (t, ((axis, i),)), shape)


def _pick_pointwise(terms: Terms, t: Term, axis: int, i: int) -> Term:
    """Pick from each operand: (a + b)[i] = a[i] + b[i]. Stop at a factor of zero and at a known condition."""
    name, kwargs, *items = t.args
    picked: list = list(items)
    # cheap operands first: after a zero mask the others do not matter
    order = sorted((k for k, a in enumerate(items) if isinstance(a, Term)), key=lambda k: cost(items[k]))
    shape = t.shape[:axis] + t.shape[axis + 1 :]
    for k in order:
        a = items[k]
        d = axis - (len(t.shape) - len(a.shape))
        if d >= 0:
            picked[k] = terms.pick(a, d, i if a.shape[d] > 1 else 0)
        if name == "mul" and is_const(picked[k], 0):
            return terms.const(0, shape)
        if name == "where" and k == 0 and picked[0].op == "const":
            chosen = 1 if picked[0].args[0] else 2
            a = items[chosen]
            d = axis - (len(t.shape) - len(a.shape))
            return terms.expand(terms.pick(a, d, i if a.shape[d] > 1 else 0) if d >= 0 else a, shape)
    return terms.expand(terms.pointwise(name, *picked, **dict(kwargs)), shape)


def _pick_cat(terms: Terms, t: Term, axis: int, i: int) -> Term:
    """Pick from the piece that holds index `i`, or from all pieces if they are joined along another axis."""
    dim, *pieces = t.args
    if dim != axis:
        return terms.cat([terms.pick(p, axis, i) for p in pieces], dim - (axis < dim))
    sizes = {p.shape[dim] for p in pieces}
    if len(sizes) == 1:
        n = sizes.pop()
        return terms.pick(pieces[i // n], axis, i % n)
    for piece in pieces:
        if i < piece.shape[dim]:
            return terms.pick(piece, axis, i)
        i -= piece.shape[dim]
    raise IndexError(i)


def _pick_reshape(terms: Terms, t: Term, axis: int, i: int) -> Term:
    """Pick from a reshape: merged axes unravel the index, split axes become a strided slice of the old axis."""
    inner, shape = t.args[0], t.shape[:axis] + t.shape[axis + 1 :]
    if t.shape[axis] == 1:
        return terms.reshape(inner, shape)
    ins, outs = reshape_group(inner.shape, t.shape, axis)
    if len(outs) == 1:
        indices = unravel(i, [inner.shape[d] for d in ins])
        return terms.reshape(terms.pick_axes(inner, dict(zip(ins, indices, strict=True))), shape)
    if len(ins) == 1:
        sizes = [t.shape[d] for d in outs]
        if (split := split_axis(terms, inner, ins[0], sizes)) is not None:
            return terms.reshape(terms.pick(split, ins[0] + outs.index(axis), i), shape)
        if axis > outs[0] and is_state_slice(inner):  # a parameter slice with steps would have no index
            return terms.make("select", (t, ((axis, i),)), shape)
        elements = torch.arange(math.prod(sizes)).reshape(sizes).select(outs.index(axis), i).reshape(1, -1)
        return terms.reshape(terms.index(inner, ins, elements, ins[0]), shape)
    merged = (*inner.shape[: ins[0]], math.prod(inner.shape[d] for d in ins), *inner.shape[ins[-1] + 1 :])
    flat = terms.make("reshape", (inner,), merged)
    return _pick_reshape(terms, terms.make("reshape", (flat,), t.shape), axis, i)


def split_axis(terms: Terms, t: Term, axis: int, sizes: list[int]) -> Term | None:
    """Split an axis of a product into axes of these sizes, by splitting it in the operands.

    The axis may merge the slots, or the experts, with an expert's columns. None if the term is not a product.
    """
    if t.op == "pointwise":
        name, kwargs, *items = t.args
        placed = [(a, axis - len(t.shape) + len(a.shape)) if isinstance(a, Term) else (a, -1) for a in items]
        return terms.pointwise(
            name, *[_reshape_axis(terms, a, d, sizes) if d >= 0 else a for a, d in placed], **dict(kwargs)
        )
    if t.op != "einsum":
        return None
    inputs, output, *operands = t.args
    label, free = output[axis], [x for x in _LABELS if all(x not in s for s in inputs)]
    labels = "".join(free[: len(sizes)])
    split = [
        _reshape_axis(terms, o, s.index(label), sizes) if label in s else o
        for s, o in zip(inputs, operands, strict=True)
    ]
    return terms.einsum([s.replace(label, labels) for s in inputs], output.replace(label, labels), split)


def _reshape_axis(terms: Terms, t: Term, axis: int, sizes: list[int]) -> Term:
    """Replace an axis by axes of these sizes. An axis of size one becomes axes of size one."""
    if t.shape[axis] == 1:
        sizes = [1] * len(sizes)
    split = split_axis(terms, t, axis, sizes)
    return split if split is not None else terms.reshape(t, (*t.shape[:axis], *sizes, *t.shape[axis + 1 :]))


def _pick_index(terms: Terms, t: Term, axis: int, i: int) -> Term:
    inner, dims, indices, position = t.args
    width = indices.value.dim() - 1
    if position <= axis < position + width:
        chosen = indices.value.select(axis - position + 1, i)
        return terms.index(inner, dims, chosen, position, routed=True, in_bounds=True)
    rest = [d for d in range(len(inner.shape)) if d not in dims]
    source = rest[axis if axis < position else axis - width]
    moved = [d - (d > source) for d in dims]
    picked, position = terms.pick(inner, source, i), position - (axis < position)
    return terms.index(picked, moved, indices.value, position, routed=True, in_bounds=True)


def _pick_index_put(terms: Terms, t: Term, axis: int, i: int) -> Term:
    """Pick the last value written at index `i`, plus the values added after it.

    If other axes are written, too, the result is a smaller `index_put` with the writes at index `i`.
    """
    added: list[Term] = []
    while t.op == "index_put":  # a loop over experts leaves one `index_put` per expert, too many to recurse
        base, dims, indices, values, accumulate = t.args
        if axis not in dims:
            break
        if len(dims) == 1:
            writes, t = _collect_writes(terms, t, axis)
            for values, accumulate, hits in writes.get(i, ()):
                if not accumulate:
                    return _add_all(terms, _keep_last(terms, [terms.pick(values, 0, j) for j in hits]), added)
                added += [terms.pick(values, 0, j) for j in reversed(hits)]
        elif len(indices.find_positions(dims.index(axis), i)):
            break
        else:
            t = base
    if t.op != "index_put":
        return _add_all(terms, terms.pick(t, axis, i), added)
    base, dims, indices, values, accumulate = t.args
    under = terms.pick(base, axis, i)
    if axis in dims:
        q = dims.index(axis)
        hits = torch.tensor(indices.find_positions(q, i), dtype=torch.int64)
        left = without_row(indices.value, q)[:, hits]
        values = terms.index(values, (0,), hits[None], 0)
        dims = [d - (d > axis) for d in dims if d != axis]
        return _add_all(terms, terms.index_put(under, dims, left, values, accumulate), added)
    rest = [d for d in range(len(base.shape)) if d not in dims]
    values = terms.pick(values, 1 + rest.index(axis), i)
    return _add_all(
        terms, terms.index_put(under, [d - (d > axis) for d in dims], indices.value, values, accumulate), added
    )


def _collect_writes(terms: Terms, t: Term, axis: int) -> tuple[dict[int, list[Write]], Term]:
    """Collect the writes of a chain of `index_put` along one axis, by index, the last first, and the term below it."""
    if (t, axis) not in terms.writes:
        below, writes = t, dict[int, list[Write]]()
        while below.op == "index_put" and below.args[1] == (axis,):
            below_it, _, indices, values, accumulate = below.args
            for i, hits in indices.find_all_positions(0).items():
                writes.setdefault(i, []).append((values, accumulate, hits))
            below = below_it
        terms.writes[t, axis] = writes, below
    return terms.writes[t, axis]


def _keep_last(terms: Terms, written: list[Term]) -> Term:
    """Return the last of the values that one `index_put` writes at one index.

    Gradients reach all of them, so `OVERWRITTEN` marks the result. Scalars are routing weights: a write that repeats
    an index needs an expert that is selected twice (see `distinct_choices`).
    """
    if len(written) == 1 or not written[0].shape or all(map(is_const, written)):
        return written[-1]
    terms.overwrites = True
    return terms.pointwise(OVERWRITTEN, *written)


def _add_all(terms: Terms, base: Term, added: list[Term]) -> Term:
    for term in reversed(added):
        base = terms.pointwise("add", base, term)
    return base


def _pick_axis_op(terms: Terms, t: Term, axis: int, i: int) -> Term:
    """Pick a batch axis inside the op: softmax(x)[i] = softmax(x[i]). An index of an axis it acts on stays a `select`,
    except that the softmax of a masked score is zero."""
    name, dims, keep, static, inner = t.args
    acted = {d % len(inner.shape) for d in dims}
    if not keep:
        source = [d for d in range(len(inner.shape)) if d not in acted][axis]
        return terms.axis_op(name, shift_axes(acted, source), keep, static, terms.pick(inner, source, i))
    if axis not in acted:
        return terms.axis_op(name, shift_axes(acted, axis), keep, static, terms.pick(inner, axis, i))
    shape = t.shape[:axis] + t.shape[axis + 1 :]
    masked = name == "softmax" and _is_masked(terms, inner, axis, i)
    if masked and not all(_is_masked(terms, inner, axis, j) for j in range(inner.shape[axis])):
        return terms.const(0, shape)  # masked before the softmax
    return terms.make("select", (t, ((axis, i),)), shape)


def _is_masked(terms: Terms, scores: Term, axis: int, i: int) -> bool:
    """Return whether a score is -inf, or so low (-1e9, `finfo.min`) that its softmax rounds to 0 beside any other."""
    score = terms.resolve(terms.pick(scores, axis, i))
    return is_const(score) and constant_value(score) <= MASKED
