"""Symbolic sizes: integers with an expression over the token dims, which log their comparisons.

Inside a captured forward `x.shape[0]` is a `Size` with an expression such as `B*S`. A branch on a size becomes a guard
of the rewritten block instead of a silent assumption.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import itertools
import math
import operator
import re
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor

from ..errors import Refused
from ..ir.graph_codegen import FUNCTIONS
from .code_locations import find_user_source

MAX_COMPARISONS = 256  # different comparisons of sizes in one capture
COMPARE = {
    "lt": operator.lt,
    "le": operator.le,
    "gt": operator.gt,
    "ge": operator.ge,
    "eq": operator.eq,
    "ne": operator.ne,
}


def evaluate_size(expr: str, dims: Mapping[str, int]) -> Any:
    """Evaluate the expression of a `Size`: dims, numbers and arithmetic."""
    return eval(_compiled(expr), {"__builtins__": {}, **FUNCTIONS}, dict(dims))


@functools.lru_cache(maxsize=4096)
def _compiled(expr: str) -> types.CodeType:
    """Compile an expression once; many are evaluated at hundreds of sizes."""
    return compile(expr, "<sizes>", "eval")


@dataclasses.dataclass(frozen=True)
class SizeGuard:
    """A condition on sizes: `left op right` is `value`.

    Attributes:
        left, right: expressions over the input dims, such as `B*S`.
        unless: the guard holds, too, if this expression is 0.
        source: the user's line that compares.
    """

    left: str
    op: str
    right: str
    value: bool
    unless: str = dataclasses.field(default="", compare=False)
    source: str = dataclasses.field(default="", compare=False)

    def holds(self, dims: dict[str, int]) -> bool:
        if self.unless and evaluate_size(self.unless, dims) == 0:
            return True
        left, right = (evaluate_size(side, dims) for side in (self.left, self.right))
        return COMPARE[self.op](left, right) is self.value

    def __str__(self) -> str:
        symbol = {"lt": "<", "le": "<=", "gt": ">", "ge": ">=", "eq": "==", "ne": "!="}[self.op]
        unless = f", or {self.unless} == 0" if self.unless else ""
        return f"{self.left} {symbol} {self.right} is {self.value}{unless}"


@functools.lru_cache(maxsize=4096)
def _divisors(expr: str) -> frozenset[str]:
    """Return the divisors in an expression that may be 0 for some sizes; the program never divides at these."""
    found = set()
    for node in ast.walk(ast.parse(expr, mode="eval")) if {*"/%"} & {*expr} else ():
        if isinstance(node, ast.BinOp) and isinstance(node.op, _DIVIDE):
            inner = {type(n.op) for n in ast.walk(node.right) if isinstance(n, ast.BinOp)}
            if inner & {ast.Sub, ast.FloorDiv, ast.Mod} and not _divisors(ast.unparse(node.right)):
                found.add(f"({ast.unparse(node.right)})")
    return frozenset(found)


_DIVIDE = (ast.Div, ast.FloorDiv, ast.Mod)


class SizeLog:
    """The symbolic sizes of a capture, and how the program used them.

    Attributes:
        guards: comparisons, each once.
        seen: the same, without sources and conditions.
        leaks: expressions that became plain numbers (`int(n / 2)`, `math.sqrt(n)`), whose comparisons go unseen.
        used: expressions of the sizes that ops were called with.
        given: sizes and routed numbers among the arguments of the current op.
        routed: whether a routed number became a plain one.
        expressions: the expression of each symbolic size, by its value; single dims win over products.
    """

    def __init__(self, dims: dict[str, int] | None = None, fixed: Sequence[int] = ()):
        """Args: fixed: sizes of the token axes that the model fixes. Their products with dims are sizes, too."""
        self.dims = dims or {}
        self.tokens = math.prod((*self.dims.values(), *fixed))
        self.tokens_text = "*".join((*self.dims, *([str(math.prod(fixed))] if fixed else [])))
        self.guards: list[SizeGuard] = []
        self.seen: set[SizeGuard] = set()
        self.leaks: set[str] = set()
        self.used: set[str] = set()
        self.given: frozenset[int | float] = frozenset()
        self.routed = False
        self.expressions: dict[int, str] = {}
        for count, times in itertools.product(range(1, len(self.dims) + 1), _products(fixed)):
            for chosen in itertools.combinations(self.dims, count):
                text = "*".join((*chosen, *([str(times)] if times > 1 else [])))
                self.expressions.setdefault(times * math.prod(self.dims[d] for d in chosen), text)

    def note(self, left: str, op: str, right: str, value: bool) -> None:
        guard = SizeGuard(left, op, right, value)
        if guard not in self.seen:
            self.seen.add(guard)
            unless, source = "*".join(_divisors(left) | _divisors(right)), find_user_source()
            if len(self.seen) > MAX_COMPARISONS:
                raise Refused(
                    f"it compares {left} with more than {MAX_COMPARISONS} numbers: {source.text}",
                    source=str(source),
                    remedy="compare with the bounds of a range, as in 8 <= n < 512, or with fewer numbers",
                )
            self.guards.append(dataclasses.replace(guard, unless=unless, source=str(source)))

    def unify_names(self, known: Iterable[SizeGuard]) -> None:
        """Rewrite the guards in the expressions of other captures: with B = 1, B*S and S are one number here.

        Args:
            known: guards of other captures.
        """
        names: dict[tuple[str, str, str], list[SizeGuard]] = {}
        for guard in known:
            names.setdefault((self._rename(guard.left), guard.op, self._rename(guard.right)), []).append(guard)
        guards = []
        for guard in self.guards:
            same = names.get((guard.left, guard.op, guard.right), [])
            exact = [k for k in same if (k.left, k.right) == (guard.left, guard.right)]
            guards += [dataclasses.replace(k, value=guard.value) for k in exact or same] or [guard]
        self.guards = list(dict.fromkeys(guards))

    def _rename(self, text: str) -> str:
        """Replace products of dims by the expressions that this capture has for their values."""
        name = "|".join(map(re.escape, self.dims))
        products = rf"\b(?:{name})(?:\*(?:{name}))*\b"
        if not self.dims:
            return text
        return re.sub(
            products, lambda m: self.expressions.get(evaluate_size(m[0], self.dims), m[0]), text
        )  # S*S has none

    def leak(self, expr: str) -> None:
        self.leaks.add(expr)

    def use(self, size: Number) -> None:
        self.used.add(size.expr)
        self.given |= {size.value}


def _products(factors: Sequence[int]) -> list[int]:
    """Return 1 and the products of subsets of `factors`, ascending."""
    several = (itertools.combinations(factors, count) for count in range(len(factors) + 1))
    return sorted({math.prod(chosen) for chosen in itertools.chain.from_iterable(several)})


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
            what = f"the size {self.expr}" if isinstance(self.expr, str) else "a number of the routing"
            raise NumberNotTaken(
                f"captures do not support this use of {what} by torch: {source.text}",
                source=str(source), remedy="pass it to torch.arange, torch.full or a method of a tensor instead",
            )  # fmt: skip
        if name in ("value", "expr", "log") or name.startswith("__"):
            raise AttributeError(name)
        self.log.leak(self.expr)
        return getattr(self.value, name)

    def __repr__(self) -> str:
        self.log.leak(self.expr)
        return repr(self.value)

    __str__ = __repr__

    def __format__(self, spec: str) -> str:
        self.log.leak(self.expr)
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
        self.log.leak(self.expr)
        return int(self.value)

    def __float__(self) -> float:
        self.log.leak(self.expr)
        return float(self.value)

    def __hash__(self) -> int:
        self.log.leak(self.expr)
        return hash(self.value)

    def __round__(self, digits: int | None = None) -> Any:
        if digits is not None:
            return round(float(self), digits)
        return self._like(round(self.value), f"round({self.expr})")

    def __floor__(self) -> Any:
        return self._like(math.floor(self.value), f"floor({self.expr})")

    def __ceil__(self) -> Any:
        return self._like(math.ceil(self.value), f"ceil({self.expr})")

    def __trunc__(self) -> Any:
        return self._like(math.trunc(self.value), f"trunc({self.expr})")

    def _like(self, value: Any, expr: str) -> Any:
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
        """Python indexes by it. Ops get the plain number another way."""
        self.log.leak(self.expr)
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
        return kind([unwrap_numbers(v) for v in x])
    if isinstance(x, Number):
        x.log.use(x)
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


def _arithmetic(symbol: str, fn: Callable, swapped: bool) -> Callable:
    def method(self: Any, other: Any) -> Any:
        if isinstance(other, torch.Tensor):
            self.log.use(self)
            return fn(other, self.value) if swapped else fn(self.value, other)
        a, b = (other, self) if swapped else (self, other)
        left, right = _find_expression(a), _find_expression(b)
        if left is None or right is None:
            return NotImplemented
        return _make_number(fn(peek_value(a), peek_value(b)), f"({left}{symbol}{right})", self.log)

    return method


def _unary(text: str, fn: Callable) -> Callable:
    return lambda self: self._like(fn(self.value), text.format(self.expr))


def _comparison(name: str, fn: Callable) -> Callable:
    def method(self: Any, other: Any) -> Any:
        if isinstance(other, torch.Tensor):
            self.log.use(self)
            return fn(self.value, other)
        right = _find_expression(other)
        if right is None:
            return NotImplemented
        value = fn(self.value, peek_value(other))
        if right != self.expr:
            self.log.note(self.expr, name, right, value)
        return value

    return method


def _make_symbolic(name: str, fn: Callable) -> Callable:
    """Wrap a function of a number so that its result keeps an expression; `math.sqrt` would return a plain float."""

    def function(x: Any, *rest: Any) -> Any:
        known = isinstance(x, Number) and not rest
        return x._like(fn(x.value), f"{name}({x.expr})") if known else fn(x, *rest)

    return function


SYMBOLIC_FUNCTIONS = {name: _make_symbolic(name, fn) for name, fn in FUNCTIONS.items()}


def _define_operators(kind: type) -> None:
    """Define the operators. Those of torch's symbolic numbers need a symbol."""
    for name, (symbol, fn) in ARITHMETIC.items():
        setattr(kind, f"__{name}__", _arithmetic(symbol, fn, False))
        setattr(kind, f"__r{name}__", _arithmetic(symbol, fn, True))
    for name, text, fn in (("neg", "(-{})", operator.neg), ("pos", "{}", operator.pos), ("abs", "abs({})", abs)):
        setattr(kind, f"__{name}__", _unary(text, fn))
    for name, fn in COMPARE.items():
        setattr(kind, f"__{name}__", _comparison(name, fn))


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
