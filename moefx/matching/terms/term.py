"""Terms: what one element, row or block of a captured tensor is, as an expression.

Once routing is concrete, every way to write dispatch and combine (loops, masks, one-hot products, sorting, gathered
weights) only moves rows about. So a captured tensor becomes one lazy, hash-consed expression. `Terms` makes them.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections import defaultdict
from typing import Any

import torch


class Term:
    """One expression. `op` and `args` identify it; equal terms are the same object.

    | op | args |
    |---|---|
    | `node` | an FX node taken as it is |
    | `param`, `buffer` | FQN |
    | `const` | a number, in every element |
    | `array` | an `Array` of known numbers |
    | `pw` | name, keyword arguments, items (terms and static values): elementwise with broadcasting |
    | `ein` | input labels, output labels, operands |
    | `row` | name, acted-on dims (negative), keeps them, static arguments, operand: softmax, norms, reductions |
    | `sum` | dims, operand |
    | `reshape`, `permute`, `expand`, `slice`, `cat` | as in torch |
    | `index` | operand, dims, `Array` [m, *I], position of I: advanced indexing |
    | `put` | base, dims, `Array` [m, n], values [n, *rest], accumulate: every kind of scatter |
    | `at` | operand, ((axis, i), ...): an element that stays symbolic |
    | `call` | function, arguments and keyword arguments (terms as `Operand`), which of its results, operands |
    """

    __slots__ = ("args", "op", "shape", "structure")

    def __init__(self, op: str, args: tuple, shape: tuple[int, ...]):
        self.op, self.args, self.shape = op, args, shape
        self.structure: frozenset[int] | None = None

    def __repr__(self) -> str:
        return format_term(self)

    @property
    def terms(self) -> tuple[Term, ...]:
        return tuple([a for a in self.args if isinstance(a, Term)])  # in less time than of a generator


class Array:
    """Concrete integers (int64) or numbers (float64) inside a term; interned, so identity is equality."""

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

    def hits(self, row: int, i: int) -> list[int]:
        """Positions along the last axis where row `row` equals `i`."""
        return self._positions[row].get(i, [])

    def all_hits(self, row: int) -> dict[int, list[int]]:
        """The same for all numbers that row `row` has."""
        return self._positions[row]


@dataclasses.dataclass(frozen=True)
class Operand:
    """Where the operand of this number stands among the arguments of a `call`."""

    number: int


def format_term(t: Any, depth: int = 6) -> str:
    if not isinstance(t, Term):
        return repr(tuple(t.value.shape)) if isinstance(t, Array) else repr(t)
    if t.op == "const":
        return f"{t.args[0]:g}"
    if t.op in ("param", "buffer", "node"):
        return str(t.args[0])
    if depth == 0:
        return "..."
    if t.op == "call":
        return f"{getattr(t.args[0], '__name__', t.args[0])}({', '.join(format_term(a, depth - 1) for a in t.terms)})"
    head = t.args[0] if t.op in ("pw", "row") else t.op
    rest = t.args[2:] if t.op == "pw" else t.args[1:] if t.op == "row" else t.args
    return f"{head}({', '.join(format_term(a, depth - 1) for a in rest)})"


class TooLarge(Exception):
    """More elements were asked for than any mixture of experts needs."""


OVERWRITTEN = "overwritten"  # elementwise, of several that one write puts at the same place: the last one, on the CPU
MASKED = -1e8  # a score below counts as masked: its softmax beside any other score rounds to 0


def is_const(t: Any, value: float | None = None) -> bool:
    return isinstance(t, Term) and t.op == "const" and (value is None or t.args[0] == value)


def is_pw(t: Any, name: str) -> bool:
    return isinstance(t, Term) and t.op == "pw" and t.args[0] == name


def constant_value(t: Term) -> Any:
    if t.op == "array":
        return t.args[0].value
    return math.nan if t.args[0] == "nan" else t.args[0]


Write = tuple[Term, bool, list[int]]  # values, whether they are added, and which of them
