"""Python numbers that follow from the routing: the number of tokens of an expert, the id of an expert.

Code may branch on them (`if len(tokens) > 256`), and a capture sees one outcome only. A routed number therefore reports
each comparison to its log, which may force the other outcome.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any, Protocol

import torch

from .size_guards import COMPARE
from .symbolic_sizes import ARITHMETIC, Number

_LINEAR = (operator.add, operator.sub, operator.mul, operator.neg, operator.pos)
ROW_COUNT = object()  # the origin of a number of rows


def is_emptiness_test(op: str, other: Any) -> bool:
    """Return whether a comparison of a number of rows with a plain number tells only whether there are any rows."""
    empty = ("eq", 0), ("ne", 0), ("gt", 0), ("le", 0), ("ge", 1), ("lt", 1)
    return type(other) in (int, float) and (op, other) in empty


def is_row_emptiness_test(number: Number, op: str, other: Any) -> bool:
    """Return whether a comparison tells only whether a tensor has any rows."""
    return number.expr is ROW_COUNT and is_emptiness_test(op, other)


class RoutedNumberLog(Protocol):
    """Receives the uses of routed numbers by the program."""

    def log_comparison(self, number: Number, op: str, other: Any, value: bool) -> bool:
        """Log a comparison with the outcome `value`, and return the outcome that the program gets."""
        ...

    def log_leak(self, expr: Any) -> None:
        """Log that it became a plain number, whose comparisons go unseen."""
        ...

    def log_key(self) -> None:
        """Log that Python used it as a key or an index, or for the number of iterations of a loop."""
        ...

    def log_use(self, size: Number) -> None:
        """Log that an op was called with it."""
        ...


class _RoutedNumber(Number):
    """A number with its origin.

    Attributes:
        expr: the node that it was read from, `ROW_COUNT`, or None if it was computed from routed numbers.
        origins: the nodes, or `ROW_COUNT`, that a computed number was made of.
    """

    origins: frozenset[Any] = frozenset()

    def _derive(self, value: Any, expr: Any = None, other: Any = None) -> Any:
        number = wrap_routed(value, None, self.log)
        if isinstance(number, _RoutedNumber):
            number.origins = self._collect_origins() | (
                other._collect_origins() if isinstance(other, _RoutedNumber) else frozenset()
            )
        return number

    def __hash__(self) -> int:
        self.log.log_key()
        return super().__hash__()

    def _collect_origins(self) -> frozenset[Any]:
        return self.origins if self.expr is None else frozenset([self.expr])


class RoutedInt(_RoutedNumber, torch.SymInt):
    _is = int

    def __index__(self) -> int:
        """Return the plain number for an index in Python. Ops get it another way."""
        self.log.log_leak(self.expr)
        self.log.log_key()
        return self.value

    def bit_length(self) -> Any:
        self.log.log_leak(self.expr)
        return self._derive(self.value.bit_length())

    def bit_count(self) -> Any:
        self.log.log_leak(self.expr)
        return self._derive(self.value.bit_count())


class RoutedFloat(_RoutedNumber, torch.SymFloat):
    _is = float


def wrap_routed(value: Any, node: Any, log: RoutedNumberLog) -> Any:
    """Return a number, or a list of numbers, as routed numbers that report to `log`."""
    if type(value) is list:
        return [wrap_routed(v, node, log) for v in value]
    if type(value) is int:
        return RoutedInt(value, node, log)
    return RoutedFloat(value, node, log) if type(value) is float else value


def _make_arithmetic(fn: Callable, swapped: bool) -> Callable:
    def method(self: _RoutedNumber, other: Any) -> Any:
        if isinstance(other, torch.Tensor):
            self.log.log_use(self)
            return fn(other, self.value) if swapped else fn(self.value, other)
        value = other.value if isinstance(other, Number) else other
        if type(value) not in (int, float, bool):
            return fn(value, self.value) if swapped else fn(self.value, value)  # a list times this number
        result = fn(value, self.value) if swapped else fn(self.value, value)
        if fn not in _LINEAR:  # few tokens may all give one number: `n // 300`
            self.log.log_leak(self.expr)
        is_multiple = fn is operator.mul and type(value) is int and value > 0
        if self.expr is ROW_COUNT and is_multiple:  # 0 only if the tensor has no rows
            return RoutedInt(result, ROW_COUNT, self.log)
        return self._derive(result, None, other)

    return method


def _make_comparison(name: str, fn: Callable) -> Callable:
    def method(self: _RoutedNumber, other: Any) -> Any:
        if isinstance(other, torch.Tensor):
            self.log.log_use(self)
            return fn(self.value, other)
        value = other.value if isinstance(other, Number) else other
        if type(value) not in (int, float, bool):
            return NotImplemented
        return self.log.log_comparison(self, name, other, fn(self.value, value))

    return method


for _name, (_, _fn) in ARITHMETIC.items():
    setattr(_RoutedNumber, f"__{_name}__", _make_arithmetic(_fn, False))
    setattr(_RoutedNumber, f"__r{_name}__", _make_arithmetic(_fn, True))
for _name, _fn in COMPARE.items():
    setattr(_RoutedNumber, f"__{_name}__", _make_comparison(_name, _fn))


__all__ = [
    "ROW_COUNT",
    "RoutedFloat",
    "RoutedInt",
    "RoutedNumberLog",
    "is_emptiness_test",
    "is_row_emptiness_test",
    "wrap_routed",
]
