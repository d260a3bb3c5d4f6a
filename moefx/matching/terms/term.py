"""Terms: symbolic expressions for captured tensors, their rows and their elements.

Under a concrete routing, all spellings of dispatch and combine (loops, masks, one-hot products, sorting, gathered
weights) only move rows. So each captured tensor is one lazy expression, and rows that compute the same are one object.
`Terms` constructs them.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections import defaultdict
from typing import Any

import torch


class Term:
    """One expression. Its `op`, `args` and `shape` identify it; equal terms are the same object.

    | op | args |
    |---|---|
    | `node` | an opaque FX node |
    | `param`, `buffer` | FQN |
    | `const` | the number of every element |
    | `array` | an `Array` of known numbers |
    | `pointwise` | name, keyword arguments, items (terms and static values): pointwise with broadcasting |
    | `einsum` | input labels, output labels, operands |
    | `axis_op` | name, dims it acts on (negative), whether it keeps them, static arguments, operand: softmax, norms |
    | `sum` | dims, operand |
    | `reshape`, `permute`, `expand`, `slice`, `cat` | as in torch |
    | `index` | operand, dims, `Array` [m, *I], position of the axes I in the result: advanced indexing |
    | `index_put` | base, dims, `Array` [m, n], values [n, *rest], accumulate: every kind of scatter |
    | `select` | operand, ((axis, i), ...): an element that stays symbolic |
    | `call` | function, arguments and keyword arguments (with `Operand` for terms), index of the result, operands |

    Attributes:
        routed_axes: cached axes along which the routing determines the elements; see `sum_expansion.routed_axes`.
    """

    __slots__ = ("args", "op", "routed_axes", "shape")

    def __init__(self, op: str, args: tuple, shape: tuple[int, ...]):
        self.op, self.args, self.shape = op, args, shape
        self.routed_axes: frozenset[int] | None = None

    def __repr__(self) -> str:
        return format_term(self)

    @property
    def operands(self) -> tuple[Term, ...]:
        """The terms among the arguments."""
        return tuple([a for a in self.args if isinstance(a, Term)])  # a list is faster than a generator


class Array:
    """Known integers (int64) or floats (float64) inside a term. Interned: equal arrays are the same object."""

    def __init__(self, value: torch.Tensor):
        self.value = value

    @functools.cached_property
    def flat(self) -> list[float]:
        return self.value.reshape(-1).tolist()

    @functools.cached_property
    def _positions(self) -> list[dict[int, list[int]]]:
        rows = []
        for row in self.value.tolist():
            rows.append(positions := defaultdict(list))
            for position, number in enumerate(row):
                positions[number].append(position)
        return rows

    def find_positions(self, row: int, i: int) -> list[int]:
        """Return the positions along the last axis at which a row equals `i`."""
        return self._positions[row].get(i, [])

    def find_all_positions(self, row: int) -> dict[int, list[int]]:
        """Return the positions along the last axis of each number of a row."""
        return self._positions[row]


@dataclasses.dataclass(frozen=True)
class Operand:
    """Stands for an operand, by its number, among the arguments of a `call`."""

    number: int


def format_term(t: Any, depth: int = 6) -> str:
    """Format a term for messages, nested at most `depth` deep."""
    if not isinstance(t, Term):
        return repr(tuple(t.value.shape)) if isinstance(t, Array) else repr(t)
    if t.op == "const":
        return f"{t.args[0]:g}"
    if t.op in ("param", "buffer", "node"):
        return str(t.args[0])
    if depth == 0:
        return "..."
    if t.op == "call":
        function = getattr(t.args[0], "__name__", t.args[0])
        return f"{function}({', '.join(format_term(a, depth - 1) for a in t.operands)})"
    head = t.args[0] if t.op in ("pointwise", "axis_op") else t.op
    rest = pointwise_items(t) if t.op == "pointwise" else t.args[1:] if t.op == "axis_op" else t.args
    return f"{head}({', '.join(format_term(a, depth - 1) for a in rest)})"


class TooLarge(Exception):
    """The lift picks more elements than any mixture of experts needs."""


class OutOfBounds(IndexError):
    """An index of the program is out of bounds: abstract tensors do not check them."""


OVERWRITTEN = "overwritten"  # pointwise op on the values that one write puts at one index; the CPU keeps the last
MASKED = -1e8  # scores up to this count as masked: their softmax rounds to 0 beside any other score


def is_const(t: Any, value: float | None = None) -> bool:
    """Return whether all elements of a term are one number, and this number if it is given."""
    return isinstance(t, Term) and t.op == "const" and (value is None or t.args[0] == value)


def is_pointwise_term(t: Any, *names: str) -> bool:
    """Return whether a term is one of these pointwise ops."""
    return isinstance(t, Term) and t.op == "pointwise" and t.args[0] in names


def pointwise_items(t: Term) -> tuple[Any, ...]:
    """Return the items of a `pointwise`: terms and static values."""
    return t.args[2:]


def constant_value(t: Term) -> Any:
    """Return the number of a `const`, or the tensor of an `array`."""
    if t.op == "array":
        return t.args[0].value
    return math.nan if t.args[0] == "nan" else t.args[0]


Write = tuple[Term, bool, list[int]]  # values, whether they are added, and the rows of the values
