"""Build einsums in normal form, so that equal contractions are equal terms."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING

from .term import Term, constant_value, is_const

if TYPE_CHECKING:
    from .normal_form import Terms

_NOT_IN_PRODUCTS = ("const", "permute")  # ops of terms that are not operands of an einsum in normal form


def build_einsum(terms: Terms, inputs: Sequence[str], output: str, operands: Sequence[Term]) -> Term:
    """Return an einsum in normal form: no scalars, constants, permutations or size-one labels among the operands."""
    size = {
        label: n for labels, t in zip(inputs, operands, strict=True) for label, n in zip(labels, t.shape, strict=True)
    }
    shape = tuple(size[label] for label in output)
    if len(operands) > 1 and 1 not in size.values() and all(t.shape and t.op not in _NOT_IN_PRODUCTS for t in operands):
        renamed = _rename_labels(tuple(inputs), output)
        if renamed is not None:
            return terms.make("einsum", (*renamed, *operands), shape)
    if any(is_const(t, 0) for t in operands):
        return terms.const(0, shape)
    factor, scalars, kept = 1.0, [], []
    for labels, t in zip(inputs, operands, strict=True):
        if any(size[label] == 1 for label in labels):
            t = terms.reshape(t, [n for n in t.shape if n != 1])
            labels = "".join(label for label in labels if size[label] != 1)
        elsewhere = set("".join(other for other in inputs if other is not labels)) | set(output)
        if t.op == "const" and set(labels) <= elsewhere:
            factor *= constant_value(t)
        elif not labels:
            scalars.append((t, not kept))
        else:
            if t.op == "permute":
                labels = "".join(labels[t.args[1].index(d)] for d in range(len(t.shape)))
                t = t.args[0]
            kept.append((labels, t))
    out = "".join(label for label in output if size[label] != 1)
    result = terms.reshape(_contract(terms, kept, out, size), shape)
    for label in set("".join(inputs)) - set(output) - set("".join(labels for labels, _ in kept)):
        factor *= size[label]
    for s, leads in scalars:  # in the order of the operands
        result = terms.pointwise("mul", s, result) if leads else terms.pointwise("mul", result, s)
    return terms.pointwise("mul", result, terms.const(factor)) if factor != 1 else result


def _contract(terms: Terms, kept: list[tuple[str, Term]], out: str, size: dict[str, int]) -> Term:
    """Multiply operands, each with its labels, and sum over the labels that are not in `out`."""
    labels = set("".join(s for s, _ in kept))
    if not kept or not set(out) <= labels:
        return _expand_missing(terms, kept, out, size)
    if len(kept) == 1:
        (s, t), gone = kept[0], [i for i, label in enumerate(kept[0][0]) if label not in out]
        t = terms.sum(t, gone)
        s = "".join(label for label in s if label in out)
        return terms.permute(t, [s.index(label) for label in out])
    if labels == set(out):  # no label is summed: a product with broadcasting
        aligned = [
            terms.reshape(
                terms.permute(t, [s.index(x) for x in out if x in s]),
                [size[x] if x in s else 1 for x in out],
            )
            for s, t in kept
        ]
        result = aligned[0]
        for t in aligned[1:]:
            result = terms.pointwise("mul", result, t)
        return result
    renamed = _rename_labels(tuple(s for s, _ in kept), out)
    assert renamed is not None
    return terms.make("einsum", (*renamed, *[t for _, t in kept]), [size[x] for x in out])


def _expand_missing(terms: Terms, kept: list[tuple[str, Term]], out: str, size: dict[str, int]) -> Term:
    have = "".join(label for label in out if any(label in s for s, _ in kept))
    inner = _contract(terms, kept, have, size) if kept else terms.const(1)
    inner = terms.reshape(inner, [size[x] if x in have else 1 for x in out])
    return terms.expand(inner, [size[x] for x in out])


@functools.cache
def _rename_labels(inputs: tuple[str, ...], output: str) -> tuple[tuple[str, ...], str] | None:
    """Rename the labels of an einsum in order of appearance. None if it sums over no label, or broadcasts."""
    labels = set("".join(inputs))
    if not set(output) < labels:
        return None
    names = dict(zip(dict.fromkeys("".join(inputs)), "abcdefghijklmnopqrstuvwxyz", strict=False))
    return tuple("".join(names[x] for x in s) for s in inputs), "".join(names[x] for x in output)
