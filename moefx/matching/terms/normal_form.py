"""The constructors of terms, which keep them in normal form (see `term.py`).

The lifter reads rows with `Terms.pick(term, axis, i)`. Ops that move elements disappear, and zeros fold. The result
shows the input row, the parameters and the weights. Terms are lazy: only picked elements are computed.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from .constant_folding import fold_pointwise
from .einsum_terms import build_einsum
from .element_selection import pick, split_axis
from .index_arithmetic import broadcast, without_row
from .sum_expansion import resolve
from .term import Array, OutOfBounds, Term, TooLarge, Write, constant_value, is_const

_MAX_LISTED = 256


class Terms:
    """The table of terms of one capture, with constructors that keep them in normal form.

    Args:
        max_picks: number of picked elements above which `pick` raises `TooLarge`.

    Attributes:
        overwrites: whether some write puts several values at one index (see `OVERWRITTEN`).
        writes: cache of `element_selection`.
        routed_parameters: parameters of which the routing selects parts, with the axes of the parts.
    """

    def __init__(self, max_picks: int = 1_000_000) -> None:
        self.max_picks = max_picks
        self._table: dict[tuple, Term] = {}
        self._arrays: dict[tuple, Array] = {}
        self._picks: dict[tuple[Term, int, int], Term] = {}
        self._resolved: dict[Term, Term] = {}
        self.overwrites = False
        self.writes: dict[tuple[Term, int], tuple[dict[int, list[Write]], Term]] = {}
        self.routed_parameters: dict[Term, frozenset[int]] = {}

    def mark_routed(self, axes_by_parameter: dict[Term, frozenset[int]]) -> None:
        """Have sums over these axes of parameters written out from now on."""
        self.routed_parameters = axes_by_parameter
        self._resolved.clear()
        for t in self._table.values():
            t.routed_axes = None

    def make(self, op: str, args: tuple, shape: Iterable[int]) -> Term:
        """Return the term with this op and these arguments, without normalisation."""
        shape = tuple(shape)
        key = (op, args, shape)
        term = self._table.get(key)
        if term is None:
            term = self._table[key] = Term(op, args, shape)
        return term

    def intern(self, value: torch.Tensor) -> Array:
        """Return the `Array` with these numbers."""
        value = value.contiguous()
        key = (value.dtype, value.shape, ctypes.string_at(value.data_ptr(), value.nbytes))
        return self._arrays.setdefault(key, Array(value))

    # ------------------------------------------------------------------ leaves
    def const(self, value: float, shape: Iterable[int] = ()) -> Term:
        value = float(value)
        return self.make("const", ("nan" if value != value else value,), shape)

    def array(self, value: torch.Tensor) -> Term:
        value = value.detach().to(torch.float64 if value.is_floating_point() else torch.int64)
        if value.numel() and (same := _find_uniform_value(value)) is not None:
            return self.const(same, value.shape)
        return self.make("array", (self.intern(value),), value.shape)

    # ------------------------------------------------------------------ pointwise
    def pointwise(self, name: str, *items: Any, **kwargs: Any) -> Term:
        """Return a pointwise op on terms and static values. Folds zeros, ones, constant masks and known numbers."""
        terms = [a for a in items if isinstance(a, Term)]
        shape = broadcast([t.shape for t in terms])
        if shape and math.prod(shape) == 1:
            return self.reshape(
                self.pointwise(name, *[self.reshape(a, ()) if isinstance(a, Term) else a for a in items], **kwargs),
                shape,
            )
        items = tuple(self._strip_leading_ones(a) if isinstance(a, Term) else a for a in items)
        folded = fold_pointwise(self, name, items, kwargs, shape)
        if folded is not None:
            return self.expand(folded, shape)
        return self.make("pointwise", (name, tuple(sorted(kwargs.items())), *items), shape)

    def _strip_leading_ones(self, t: Term) -> Term:
        """Remove leading axes of size one, which broadcasting ignores; a single element becomes a scalar."""
        if not t.shape or t.shape[0] != 1:
            return t
        if math.prod(t.shape) == 1:
            return self.reshape(t, ())
        lead = 0
        while t.shape[lead] == 1:
            lead += 1
        return self.reshape(t, t.shape[lead:]) if lead else t

    # ------------------------------------------------------------------ moving
    def reshape(self, t: Term, shape: Iterable[int]) -> Term:
        shape = tuple(shape)
        if t.shape == shape:
            return t
        if t.op == "const":
            return self.const(constant_value(t), shape)
        if t.op == "array":
            return self.array(t.args[0].value.reshape(shape))
        if t.op == "reshape":
            return self.reshape(t.args[0], shape)
        if 1 in t.shape:  # ignore axes of size one, so that equal values are equal terms
            squeezed = self.pick_axes(t, {d: 0 for d, n in enumerate(t.shape) if n == 1})
            return self.reshape(squeezed, shape)
        return self.make("reshape", (t,), shape)

    def permute(self, t: Term, order: Sequence[int]) -> Term:
        order = tuple(d % len(t.shape) for d in order)
        if order == tuple(range(len(order))):
            return t
        shape = tuple(t.shape[d] for d in order)
        if t.op == "const":
            return self.const(constant_value(t), shape)
        if t.op == "array":
            return self.array(t.args[0].value.permute(order))
        if t.op == "permute":
            return self.permute(t.args[0], [t.args[1][d] for d in order])
        return self.make("permute", (t, order), shape)

    def expand(self, t: Term, shape: Iterable[int]) -> Term:
        shape = tuple(shape)
        if t.shape == shape:
            return t
        if t.op == "const":
            return self.const(constant_value(t), shape)
        if len(t.shape) < len(shape):
            t = self.reshape(t, (1,) * (len(shape) - len(t.shape)) + t.shape)
        return t if t.shape == shape else self.make("expand", (t,), shape)

    def slice(self, t: Term, dim: int, start: int | None, stop: int | None, step: int = 1) -> Term:
        dim %= len(t.shape)
        start, stop, step = slice(start, stop, step).indices(t.shape[dim])
        size = len(range(start, stop, step))
        shape = (*t.shape[:dim], size, *t.shape[dim + 1 :])
        if shape == t.shape:
            return t
        if t.op == "const":
            return self.const(constant_value(t), shape)
        if t.op == "array":
            return self.array(t.args[0].value[(slice(None),) * dim + (slice(start, stop, step),)])
        if t.op == "slice" and t.args[1] == dim:
            inner, _, first, _, stride = t.args
            begin = first + start * stride
            end = begin + (size - 1) * step * stride + 1 if size else begin
            return self.slice(inner, dim, begin, end, stride * step)
        if t.op == "reshape" and len(t.shape) == 1 and step == 1:
            block = math.prod(t.args[0].shape[1:])
            if size == block and start % block == 0:  # one row of a flattened matrix
                return self.reshape(self.pick(t.args[0], 0, start // block), shape)
        if t.op == "cat" and t.args[0] == dim and step == 1 and size:
            pieces, low = [], 0
            for piece in t.args[1:]:
                a, b = max(start - low, 0), min(stop - low, piece.shape[dim])
                if a < b:
                    pieces.append(self.slice(piece, dim, a, b))
                low += piece.shape[dim]
            return self.cat(pieces, dim)
        if (part := self._slice_block(t, dim, start, size, step)) is not None:
            return part
        return self.make("slice", (t, dim, start, stop, step), shape)

    def _slice_block(self, t: Term, dim: int, start: int, size: int, step: int) -> Term | None:
        """Return one of several equal blocks of a product, as if the blocks were stacked; None if it is not one.

        The matrices of all experts may stand side by side in one product. Halves are not split: a fused gate and
        up-projection is one product.
        """
        if step != 1 or not size or t.shape[dim] % size or start % size or t.shape[dim] <= 2 * size:
            return None

        if units := {d: 0 for d, n in enumerate(t.shape) if n == 1}:  # ignored, as in `reshape`
            inner = self._slice_block(self.pick_axes(t, units), dim - sum(d < dim for d in units), start, size, step)
            return inner and self.reshape(inner, (*t.shape[:dim], size, *t.shape[dim + 1 :]))
        split = split_axis(self, t, dim, [t.shape[dim] // size, size])
        return None if split is None else self.pick(split, dim, start // size)

    def cat(self, terms: Sequence[Term], dim: int) -> Term:
        terms = [t for t in terms if not (t.shape == (0,) and any(len(s.shape) > 1 for s in terms))]
        dim %= len(terms[0].shape)
        terms = [t for t in terms if t.shape[dim]] or [terms[0]]
        if len(terms) == 1:
            return terms[0]
        size = sum(t.shape[dim] for t in terms)
        shape = (*terms[0].shape[:dim], size, *terms[0].shape[dim + 1 :])
        if all(t.op == "const" and t.args == terms[0].args for t in terms):
            return self.const(constant_value(terms[0]), shape)
        if all(t.op in ("const", "array") for t in terms):
            numbers = [
                torch.as_tensor(constant_value(t), dtype=None if t.op == "array" else torch.float64) for t in terms
            ]
            pieces = [n.expand(t.shape) for n, t in zip(numbers, terms, strict=True)]
            return self.array(torch.cat(pieces, dim))
        return self.make("cat", (dim, *terms), shape)

    def index(
        self, t: Term, dims: Sequence[int], indices: torch.Tensor, position: int, routed: bool = False,
        in_bounds: bool = False,
    ) -> Term:  # fmt: skip
        """Index with `indices` [m, *I] into `dims`; the axes I are at `position` of the result.

        Args:
            routed: the indices depend on the routing, and stay an `index` even if they are a range by chance.
            in_bounds: no index is negative or out of bounds.

        Raises:
            OutOfBounds: an index is not in an axis, as under a forced outcome.
        """
        dims = tuple(dims)
        if not in_bounds:
            indices = _wrap_negative(indices, [t.shape[d] for d in dims])
        if indices.dim() == 1:
            return self.pick_axes(t, dict(zip(dims, indices.tolist(), strict=True)))
        rest = [n for d, n in enumerate(t.shape) if d not in dims]
        shape = (*rest[:position], *indices.shape[1:], *rest[position:])
        if t.op == "const":
            return self.const(constant_value(t), shape)
        if t.op == "index" and dims == (position,) == (t.args[3],) and t.args[2].value.dim() == 2:
            inner, inner_dims, first, _ = t.args  # an index of an index
            return self.index(inner, inner_dims, first.value[:, indices[0]], position, routed, True)
        if len(dims) > 1 and indices.numel():
            for q, row in enumerate(indices):  # a coordinate that is equal for all elements
                if (i := _find_uniform_value(row)) is not None:
                    picked = self.pick(t, dims[q], int(i))
                    left, indices = [d - (d > dims[q]) for d in dims if d != dims[q]], without_row(indices, q)
                    is_full_range = len(left) == 1 and torch.equal(indices[0], torch.arange(picked.shape[left[0]]))
                    return self.index(picked, left, indices, position, routed=not is_full_range, in_bounds=True)
        if not routed and len(dims) == 1 and indices.dim() == 2 and position == dims[0] and indices.numel() > 1:
            line = indices[0].tolist()
            first, last, step = line[0], line[-1], line[1] - line[0]
            if step > 0 and line == list(range(first, last + 1, step)):
                return self.slice(t, dims[0], first, last + 1, step)
        return self.make("index", (t, dims, self.intern(indices), position), shape)

    def index_put(self, base: Term, dims: Sequence[int], indices: torch.Tensor, values: Term, accumulate: bool) -> Term:
        """Write (or add) `values` [n, *rest] into `base` at `indices` [m, n] of `dims`."""
        if indices.shape[1] == 0:
            return base
        rest = tuple(n for d, n in enumerate(base.shape) if d not in dims)
        values = self.expand(values, (indices.shape[1], *rest))
        indices = _wrap_negative(indices, [base.shape[d] for d in dims])
        if len(dims) == 1 and not accumulate and torch.equal(indices[0], torch.arange(base.shape[dims[0]])):
            order = [*range(1, dims[0] + 1), 0, *range(dims[0] + 1, len(base.shape))]
            return self.permute(values, order)  # every element is written
        if self._is_noop_write(base, dims, indices, values, accumulate):
            return base
        return self.make("index_put", (base, tuple(dims), self.intern(indices), values, accumulate), base.shape)

    def _is_noop_write(
        self, base: Term, dims: Sequence[int], indices: torch.Tensor, values: Term, accumulate: bool
    ) -> bool:
        """Return whether a write adds zeros, or writes the values that `base` has: `y[0, 0] += 0 * weight.sum()`."""
        if accumulate:
            return is_const(values, 0)
        if indices.shape[1] > 1:
            return values is self.index(base, dims, indices, 0)
        at = dict(zip(dims, indices[:, 0].tolist(), strict=True))
        return values is self.reshape(self.pick_axes(base, at), values.shape)

    # ------------------------------------------------------------------ contracting
    def einsum(self, inputs: Sequence[str], output: str, operands: Sequence[Term]) -> Term:
        """Return an einsum in normal form (see `einsum_terms`)."""
        return build_einsum(self, inputs, output, operands)

    # ------------------------------------------------------------------ reducing
    def sum(self, t: Term, dims: Iterable[int]) -> Term:
        dims = tuple(sorted(d % len(t.shape) for d in dims))
        if not dims:
            return t
        shape = tuple(n for d, n in enumerate(t.shape) if d not in dims)
        if t.op == "const":
            return self.const(constant_value(t) * math.prod(t.shape[d] for d in dims), shape)
        if t.op == "array":
            return self.array(t.args[0].value.sum(dims))
        if all(t.shape[d] == 1 for d in dims):
            return self.reshape(t, shape)
        return self.make("sum", (tuple(d - len(t.shape) for d in dims), t), shape)

    def axis_op(self, name: str, dims: Iterable[int], keep: bool, static: tuple, t: Term) -> Term:
        """Return an op that acts along `dims`; the other dims are a batch. It acts on a scalar as on one element."""
        if not t.shape:
            return self.reshape(self.axis_op(name, (0,), keep, static, self.reshape(t, (1,))), ())
        dims = tuple(sorted(d % len(t.shape) - len(t.shape) for d in dims))
        shape = t.shape if keep else tuple(n for d, n in enumerate(t.shape) if d - len(t.shape) not in dims)
        return self.make("axis_op", (name, dims, keep, static, t), shape)

    # ------------------------------------------------------------------ picking
    def pick_axes(self, t: Term, index_by_axis: dict[int, int]) -> Term:
        """Select indices by axis, and remove these axes."""
        for axis in sorted(index_by_axis, reverse=True):
            t = self.pick(t, axis, index_by_axis[axis])
        return t

    def pick(self, t: Term, axis: int, i: int) -> Term:
        """Select index `i` of `axis`, and remove the axis.

        Raises:
            TooLarge: more than `max_picks` elements were picked.
        """
        key = (t, axis, i)
        element = self._picks.get(key)
        if element is None:
            if len(self._picks) > self.max_picks:
                raise TooLarge
            element = self._picks[key] = pick(self, t, axis, i)
        return element

    def resolve(self, t: Term) -> Term:
        """Write out the sums over routed axes. Terms are compared in this normal form."""
        resolved = self._resolved.get(t)
        if resolved is None:
            resolved = resolve(self, t)
            self._resolved[t] = self._resolved[resolved] = resolved
        return resolved


def _wrap_negative(indices: torch.Tensor, sizes: list[int]) -> torch.Tensor:
    """Replace negative indices [m, *I], counted from the end of axes of these m sizes.

    Raises:
        OutOfBounds: an index is not in an axis.
    """
    limits = torch.tensor(sizes).reshape(-1, *[1] * (indices.dim() - 1))
    below = indices < 0
    if below.any():
        indices = torch.where(below, indices + limits, indices)
    if ((indices < 0) | (indices >= limits)).any():
        raise OutOfBounds(f"an index is out of bounds for axes of the sizes {sizes}")
    return indices


def _find_uniform_value(value: torch.Tensor) -> float | None:
    """Return the number of all elements, or None if they differ."""
    if value.numel() <= _MAX_LISTED:  # every row of every mask passes here, and a list is faster than two tensor ops
        numbers = value.reshape(-1).tolist()
        first, same = numbers[0], numbers.count(numbers[0]) == len(numbers)
    else:
        first = value.reshape(-1)[0].item()
        same = bool((value == first).all())
    return first if same or (first != first and bool(value.isnan().all())) else None
