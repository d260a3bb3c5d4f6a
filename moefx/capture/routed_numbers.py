"""Numbers that follow from the routing: how many tokens an expert got, the id of one.

Code may branch on them (`if len(tokens) > 256`), and a capture sees one outcome only. So such a number reports what it
is compared with, as a read of a boolean that can be made to come out the other way.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any, Protocol

import torch

from .symbolic_sizes import ARITHMETIC, COMPARE, Number

_LINEAR = (operator.add, operator.sub, operator.mul, operator.neg, operator.pos)
ROW_COUNT = object()  # where a number came from: it is how many rows there are


def is_empty_test(op: str, other: Any) -> bool:
    """Whether comparing a count with `other` asks if it is 0. A count among the numbers would report the comparison."""
    empty = ("eq", 0), ("ne", 0), ("gt", 0), ("le", 0), ("ge", 1), ("lt", 1)
    return type(other) in (int, float) and (op, other) in empty


def asks_if_empty(count: Number, op: str, other: Any) -> bool:
    """Whether a comparison only asks whether there are any rows."""
    return count.expr is ROW_COUNT and is_empty_test(op, other)


class RoutedNumberLog(Protocol):
    """Who is told."""

    def compared(self, count: Number, op: str, other: Any, value: bool) -> bool:
        """A comparison came out as `value`; returns how it is to come out."""
        ...

    def leak(self, expr: Any) -> None:
        """It became a plain number: what that is compared with is not seen."""
        ...

    def keyed(self) -> None:
        """Python looked for an item of a container by it, or made as many turns."""
        ...

    def use(self, size: Number) -> None:
        """An op was called with it."""
        ...


class _Routed(Number):
    """`expr` is the node that the number was read from, `LENGTH`, or None where it was computed from such. `origins`
    are the nodes, or `LENGTH`, that a computed number was made of."""

    origins: frozenset[Any] = frozenset()

    def _like(self, value: Any, expr: Any = None, other: Any = None) -> Any:
        found = wrap_routed(value, None, self.log)
        if isinstance(found, _Routed):
            found.origins = self._origins() | (other._origins() if isinstance(other, _Routed) else frozenset())
        return found

    def __hash__(self) -> int:
        self.log.keyed()
        return super().__hash__()

    def _origins(self) -> frozenset[Any]:
        return self.origins if self.expr is None else frozenset([self.expr])


class RoutedInt(_Routed, torch.SymInt):
    _is = int

    def __index__(self) -> int:
        """Asked for by Python, as for an item of a list: an op is given the number itself."""
        self.log.leak(self.expr)
        self.log.keyed()
        return self.value

    def bit_length(self) -> Any:
        self.log.leak(self.expr)
        return self._like(self.value.bit_length())

    def bit_count(self) -> Any:
        self.log.leak(self.expr)
        return self._like(self.value.bit_count())


class RoutedFloat(_Routed, torch.SymFloat):
    _is = float


def wrap_routed(value: Any, node: Any, log: RoutedNumberLog) -> Any:
    """`value` (a number, or a list of numbers) as numbers that report comparisons."""
    if type(value) is list:
        return [wrap_routed(v, node, log) for v in value]
    if type(value) is int:
        return RoutedInt(value, node, log)
    return RoutedFloat(value, node, log) if type(value) is float else value


def _arithmetic(fn: Callable, swapped: bool) -> Callable:
    def method(self: _Routed, other: Any) -> Any:
        if isinstance(other, torch.Tensor):
            self.log.use(self)
            return fn(other, self.value) if swapped else fn(self.value, other)
        value = other.value if isinstance(other, Number) else other
        if type(value) not in (int, float, bool):
            return fn(value, self.value) if swapped else fn(self.value, value)  # a list as often as this
        found = fn(value, self.value) if swapped else fn(self.value, value)
        if fn not in _LINEAR:  # it may be one number for all that few tokens have: `n // 300`
            self.log.leak(self.expr)
        stays = (
            self.expr is ROW_COUNT and fn is operator.mul and type(value) is int and value > 0
        )  # still 0 without rows
        return RoutedInt(found, ROW_COUNT, self.log) if stays else self._like(found, None, other)

    return method


def _comparison(name: str, fn: Callable) -> Callable:
    def method(self: _Routed, other: Any) -> Any:
        if isinstance(other, torch.Tensor):
            self.log.use(self)
            return fn(self.value, other)
        value = other.value if isinstance(other, Number) else other
        if type(value) not in (int, float, bool):
            return NotImplemented
        return self.log.compared(self, name, other, fn(self.value, value))

    return method


for _name, (_, _fn) in ARITHMETIC.items():
    setattr(_Routed, f"__{_name}__", _arithmetic(_fn, False))
    setattr(_Routed, f"__r{_name}__", _arithmetic(_fn, True))
for _name, _fn in COMPARE.items():
    setattr(_Routed, f"__{_name}__", _comparison(_name, _fn))


__all__ = ["ROW_COUNT", "RoutedFloat", "RoutedInt", "RoutedNumberLog", "asks_if_empty", "is_empty_test", "wrap_routed"]
