"""Sizes that remember comparisons.

`x.shape[0]` inside a captured forward is a `Size`: an int that knows it is, say, B*S, and logs what it was compared
with. A branch on a size becomes a guard of the rewritten block instead of being silently baked in.
"""

from __future__ import annotations

import dataclasses
import math
import operator
from collections.abc import Callable
from typing import Any

import torch

_COMPARE = {
    "lt": operator.lt,
    "le": operator.le,
    "gt": operator.gt,
    "ge": operator.ge,
    "eq": operator.eq,
    "ne": operator.ne,
}


@dataclasses.dataclass(frozen=True)
class SizeGuard:
    """`left op right` came out as `value`; both sides are expressions over the input dims, such as `B*S`."""

    left: str
    op: str
    right: str
    value: bool

    def holds(self, dims: dict[str, int]) -> bool:
        # the expressions were written by `Size` below, from dims, numbers and arithmetic only
        left, right = (
            eval(side, {"__builtins__": {}, "ceil": math.ceil}, dims) for side in (self.left, self.right)
        )
        return _COMPARE[self.op](left, right) is self.value

    def __str__(self) -> str:
        symbol = {"lt": "<", "le": "<=", "gt": ">", "ge": ">=", "eq": "==", "ne": "!="}[self.op]
        return f"{self.left} {symbol} {self.right} is {self.value}"


class SizeLog:
    """Which sizes are symbolic in this capture, and what was asked about them."""

    def __init__(self, dims: dict[str, int] | None = None):
        self.dims = dims or {}
        self.guards: list[SizeGuard] = []
        names = list(self.dims)
        self.expressions: dict[int, str] = {}
        for i, a in enumerate(names):
            self.expressions.setdefault(self.dims[a], a)
            for b in names[i + 1 :]:
                self.expressions.setdefault(self.dims[a] * self.dims[b], f"{a}*{b}")

    def note(self, left: str, op: str, right: str, value: bool) -> None:
        guard = SizeGuard(left, op, right, value)
        if guard not in self.guards:
            self.guards.append(guard)


class Size(int):
    """An int with the expression it came from."""

    expr: str
    log: SizeLog

    def __new__(cls, value: int, expr: str, log: SizeLog) -> Size:
        self = super().__new__(cls, value)
        self.expr, self.log = expr, log
        return self

    def __hash__(self) -> int:
        return int.__hash__(self)

    def __reduce__(self) -> Any:
        return int, (int(self),)

    def __deepcopy__(self, memo: Any) -> int:
        return int(self)


class Ratio(float):
    """A float that a `Size` was divided into."""

    expr: str
    log: SizeLog

    def __new__(cls, value: float, expr: str, log: SizeLog) -> Ratio:
        self = super().__new__(cls, value)
        self.expr, self.log = expr, log
        return self

    def __hash__(self) -> int:
        return float.__hash__(self)

    def __ceil__(self) -> Size:
        return Size(math.ceil(float(self)), f"ceil({self.expr})", self.log)


def _expr(x: Any) -> str | None:
    if isinstance(x, (Size, Ratio)):
        return x.expr
    return repr(x) if type(x) in (int, float, bool) else None


def _plain(x: Any) -> Any:
    return int(x) if isinstance(x, Size) else float(x) if isinstance(x, Ratio) else x


def _arithmetic(symbol: str, fn: Callable, base: type, swapped: bool) -> Callable:
    def method(self: Any, other: Any) -> Any:
        a, b = (other, self) if swapped else (self, other)
        left, right = _expr(a), _expr(b)
        if left is None or right is None:
            return NotImplemented
        value, text = fn(_plain(a), _plain(b)), f"({left}{symbol}{right})"
        if isinstance(value, int):
            return Size(value, text, self.log)
        return Ratio(value, text, self.log) if isinstance(value, float) else value

    return method


def _comparison(name: str, fn: Callable) -> Callable:
    def method(self: Any, other: Any) -> Any:
        right = _expr(other)
        if right is None:
            return NotImplemented
        value = fn(_plain(self), _plain(other))
        if right != self.expr:
            self.log.note(self.expr, name, right, value)
        return value

    return method


for _kind in (Size, Ratio):
    for _name, _symbol, _fn in (
        ("add", "+", operator.add), ("sub", "-", operator.sub), ("mul", "*", operator.mul),
        ("floordiv", "//", operator.floordiv), ("mod", "%", operator.mod), ("truediv", "/", operator.truediv),
    ):  # fmt: skip
        setattr(_kind, f"__{_name}__", _arithmetic(_symbol, _fn, _kind, False))
        setattr(_kind, f"__r{_name}__", _arithmetic(_symbol, _fn, _kind, True))
    for _name, _fn in _COMPARE.items():
        setattr(_kind, f"__{_name}__", _comparison(_name, _fn))
    _kind.__bool__ = lambda self: self != 0


def sized(value: Any, log: SizeLog) -> Any:
    """`value` (an int or a `torch.Size`) with the symbolic ones among its sizes replaced by `Size`s."""
    if isinstance(value, int) and not isinstance(value, bool):
        expr = log.expressions.get(value)
        return Size(value, expr, log) if expr else value
    if isinstance(value, tuple) and any(v in log.expressions for v in value):
        return torch.Size([sized(v, log) for v in value])
    return value
