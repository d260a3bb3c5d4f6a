"""Symbolic sizes: integers with an expression over the token dims, which log their comparisons.

Inside a captured forward `x.shape[0]` is a `Size` with an expression such as `B*S`. A branch on a size becomes a guard
of the rewritten block instead of a silent assumption.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor

from ...errors import Refused
from ...ir.graphs.graph_codegen import FUNCTIONS
from ..environment.code_locations import find_user_source
from .size_guards import COMPARE, SizeLog


class NumberNotTaken(Refused, AttributeError):
    """A function of torch needs a symbol, which only torch's own symbolic numbers have."""


class NotHashable(Refused, TypeError):
    """The program hashes a symbolic size."""


class Number:
    """A number with its expression; base of `Size`, `Ratio` and the routed numbers."""

    value: Any
    expr: Any
    log: Any
    _is: type

    # `isinstance(n, int)` holds, and torch accepts it as its own symbolic number. It is no real int: `float` would then
    # compute `0.5 * n` and lose the expression.
    __class__ = property(lambda self: self._is)  # type: ignore[assignment]

    def __init__(self, value: Any, expr: Any, log: Any):
        self.value, self.expr, self.log = value, expr, log

    def __getattr__(self, name: str) -> Any:
        if name == "node":
            source = find_user_source()
            subject = f"the size {self.expr}" if isinstance(self.expr, str) else "a number of the routing"
            raise NumberNotTaken(
                f"captures do not support this use of {subject} by torch: {source.text}",
                source=str(source), remedy="pass it to torch.arange, torch.full or a method of a tensor instead",
            )  # fmt: skip
        if name in ("value", "expr", "log") or name.startswith("__"):
            raise AttributeError(name)
        self.log.log_leak(self.expr)
        return getattr(self.value, name)

    def __repr__(self) -> str:
        self.log.log_leak(self.expr)
        return repr(self.value)

    __str__ = __repr__

    def __format__(self, spec: str) -> str:
        self.log.log_leak(self.expr)
        return format(self.value, spec)

    def __bool__(self) -> bool:
        return self != 0

    def __deepcopy__(self, memo: Any) -> Any:
        return self.value

    def __copy__(self) -> Any:
        return self

    def __reduce__(self) -> Any:
        return type(self.value), (self.value,)

    # These return plain numbers, whose comparisons go unseen.
    def __int__(self) -> int:
        self.log.log_leak(self.expr)
        return int(self.value)

    def __float__(self) -> float:
        self.log.log_leak(self.expr)
        return float(self.value)

    def __hash__(self) -> int:
        self.log.log_leak(self.expr)
        return hash(self.value)

    def __round__(self, digits: int | None = None) -> Any:
        if digits is not None:
            return round(float(self), digits)
        return self._derive(round(self.value), f"round({self.expr})")

    def __floor__(self) -> Any:
        return self._derive(math.floor(self.value), f"floor({self.expr})")

    def __ceil__(self) -> Any:
        return self._derive(math.ceil(self.value), f"ceil({self.expr})")

    def __trunc__(self) -> Any:
        return self._derive(math.trunc(self.value), f"trunc({self.expr})")

    def _derive(self, value: Any, expr: str) -> Any:
        """Make another number of the same origin."""
        return _make_number(value, expr, self.log)

    def __divmod__(self, other: Any) -> Any:
        return self // other, self % other

    def __rdivmod__(self, other: Any) -> Any:
        return other // self, other % self


class Size(Number, torch.SymInt):
    """A symbolic int.

    It is not hashable, like torch's own symbolic numbers: a cache with sizes as keys would return it after the capture.
    """

    _is = int

    def __hash__(self) -> int:
        source = find_user_source()
        raise NotHashable(
            f"unhashable type: the size {self.expr} is symbolic here, and a dict, a set or a cache hashes it: "
            f"{source.text}",
            source=str(source), remedy="use int(...) of it as a key",
        )  # fmt: skip

    def __index__(self) -> int:
        """Return the plain number for an index in Python. Ops get it another way."""
        self.log.log_leak(self.expr)
        return self.value


class Ratio(Number, torch.SymFloat):
    """A symbolic float, computed from a `Size`."""

    _is = float


def _find_expression(x: Any) -> str | None:
    if isinstance(x, Number):
        return x.expr if isinstance(x.expr, str) else None
    return f"({x!r})" if type(x) in (int, float) and x < 0 else repr(x) if type(x) in (int, float, bool) else None


def peek_value(x: Any) -> Any:
    """Return the plain number without logging a use."""
    return x.value if isinstance(x, Number) else x


_PLAIN = frozenset([type(None), bool, int, float, str, torch.Tensor, FakeTensor, fx.Node])


def unwrap_numbers(x: Any) -> Any:
    """Return the arguments of an op with plain numbers in the place of symbolic and routed ones, and log their use."""
    kind = type(x)
    if kind in _PLAIN:
        return x
    if kind is tuple or kind is list:
        return kind([v if type(v) in _PLAIN else unwrap_numbers(v) for v in x])
    if isinstance(x, Number):
        x.log.log_use(x)
        return x.value
    if type(x) is torch.Size:
        return torch.Size([unwrap_numbers(v) for v in x])
    if type(x) is dict:
        return {k: unwrap_numbers(v) for k, v in x.items()}
    if type(x) is slice:
        return slice(unwrap_numbers(x.start), unwrap_numbers(x.stop), unwrap_numbers(x.step))
    return x


def _make_number(value: Any, expr: str, log: SizeLog) -> Any:
    if type(value) is int:
        return Size(value, expr, log)
    return Ratio(value, expr, log) if type(value) is float else value


def _make_arithmetic(symbol: str, fn: Callable, swapped: bool) -> Callable:
    def method(self: Any, other: Any) -> Any:
        if isinstance(other, torch.Tensor):
            self.log.log_use(self)
            return fn(other, self.value) if swapped else fn(self.value, other)
        a, b = (other, self) if swapped else (self, other)
        left, right = _find_expression(a), _find_expression(b)
        if left is None or right is None:
            return NotImplemented
        if symbol == "**":
            left = _parenthesize_product(left)
        if symbol in ("/", "//", "%", "**"):
            right = _parenthesize_product(right)
        return _make_number(fn(peek_value(a), peek_value(b)), f"({left}{symbol}{right})", self.log)

    return method


def _parenthesize_product(text: str) -> str:
    """Put the size of merged axes, `B*S`, in parentheses. Other expressions with an operator have them already."""
    return f"({text})" if "*" in text and all(map(str.isidentifier, text.split("*"))) else text


def _make_unary(text: str, fn: Callable) -> Callable:
    return lambda self: self._derive(fn(self.value), text.format(self.expr))


def _make_comparison(name: str, fn: Callable) -> Callable:
    def method(self: Any, other: Any) -> Any:
        if isinstance(other, torch.Tensor):
            self.log.log_use(self)
            return fn(self.value, other)
        right = _find_expression(other)
        if right is None:
            return NotImplemented
        value = fn(self.value, peek_value(other))
        if right != self.expr:
            self.log.log_comparison(self.expr, name, right, value)
        return value

    return method


def _make_symbolic(name: str, fn: Callable) -> Callable:
    """Wrap a function of a number so that its result keeps an expression; `math.sqrt` would return a plain float."""

    def function(x: Any, *rest: Any) -> Any:
        is_symbolic = isinstance(x, Number) and not rest
        return x._derive(fn(x.value), f"{name}({x.expr})") if is_symbolic else fn(x, *rest)

    return function


SYMBOLIC_FUNCTIONS = {name: _make_symbolic(name, fn) for name, fn in FUNCTIONS.items()}


def _define_operators(kind: type) -> None:
    """Define the operators. Those of torch's symbolic numbers need a symbol."""
    for name, (symbol, fn) in ARITHMETIC.items():
        setattr(kind, f"__{name}__", _make_arithmetic(symbol, fn, False))
        setattr(kind, f"__r{name}__", _make_arithmetic(symbol, fn, True))
    for name, text, fn in (("neg", "(-{})", operator.neg), ("pos", "{}", operator.pos), ("abs", "abs({})", abs)):
        setattr(kind, f"__{name}__", _make_unary(text, fn))
    for name, fn in COMPARE.items():
        setattr(kind, f"__{name}__", _make_comparison(name, fn))


ARITHMETIC = {
    "add": ("+", operator.add), "sub": ("-", operator.sub), "mul": ("*", operator.mul), "mod": ("%", operator.mod),
    "floordiv": ("//", operator.floordiv), "truediv": ("/", operator.truediv), "pow": ("**", operator.pow),
    "lshift": ("<<", operator.lshift), "rshift": (">>", operator.rshift), "and": ("&", operator.and_),
    "or": ("|", operator.or_), "xor": ("^", operator.xor),
}  # fmt: skip
_define_operators(Number)


def wrap_sizes(value: Any, log: SizeLog) -> Any:
    """Return an int or a `torch.Size` with a `Size` in the place of each number that equals a symbolic size."""
    if type(value) is int:
        expr = log.expressions.get(value)
        return Size(value, expr, log) if expr else value
    if isinstance(value, tuple) and any(v in log.expressions for v in value):
        return torch.Size([wrap_sizes(v, log) for v in value])
    return value
