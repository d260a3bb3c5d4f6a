"""Sizes that remember comparisons.

`x.shape[0]` inside a captured forward is a `Size`: an int that knows it is, say, B*S, and logs what it was compared
with. A branch on a size becomes a guard of the rewritten block instead of being silently baked in.
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

MAX_COMPARISONS = 256  # of sizes, in one capture
COMPARE = {
    "lt": operator.lt,
    "le": operator.le,
    "gt": operator.gt,
    "ge": operator.ge,
    "eq": operator.eq,
    "ne": operator.ne,
}


def evaluate_size(expr: str, dims: Mapping[str, int]) -> Any:
    """An expression that a `Size` carries: dims, numbers and arithmetic, nothing else."""
    return eval(_compiled(expr), {"__builtins__": {}, **FUNCTIONS}, dict(dims))


@functools.lru_cache(maxsize=4096)
def _compiled(expr: str) -> types.CodeType:
    """Many are evaluated at hundreds of sizes."""
    return compile(expr, "<sizes>", "eval")


@dataclasses.dataclass(frozen=True)
class SizeGuard:
    """`left op right` came out as `value`; both sides are expressions over the input dims, such as `B*S`. Where that
    of `unless` is 0 it does not matter. `source` is the line that compares."""

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
    """What it divides by that may be 0 where there are tokens: the program does not come to it there."""
    found = set()
    for node in ast.walk(ast.parse(expr, mode="eval")) if {*"/%"} & {*expr} else ():
        if isinstance(node, ast.BinOp) and isinstance(node.op, _DIVIDE):
            inner = {type(n.op) for n in ast.walk(node.right) if isinstance(n, ast.BinOp)}
            if inner & {ast.Sub, ast.FloorDiv, ast.Mod} and not _divisors(ast.unparse(node.right)):
                found.add(f"({ast.unparse(node.right)})")
    return frozenset(found)


_DIVIDE = (ast.Div, ast.FloorDiv, ast.Mod)


class SizeLog:
    """Which sizes are symbolic in this capture, and what was asked about them.

    Attributes:
        guards: comparisons, each once.
        leaks: expressions that became plain numbers (`int(n / 2)`, `math.sqrt(n)`): comparisons with these go unseen.
        used: expressions of the sizes that ops were called with.
        given: the numbers that the op at work was called with, of those that follow from sizes or from the routing.
        routed: whether a number that follows from the routing (a `Count`) became a plain one.
    """

    def __init__(self, dims: dict[str, int] | None = None, fixed: Sequence[int] = ()):
        """`fixed`: sizes of the token axes that the model fixes. Products with these count as sizes, too."""
        self.dims = dims or {}
        self.tokens = math.prod((*self.dims.values(), *fixed))
        self.tokens_text = "*".join((*self.dims, *([str(math.prod(fixed))] if fixed else [])))
        self.guards: list[SizeGuard] = []
        self.seen: set[SizeGuard] = set()  # comparisons, as they were made
        self.leaks: set[str] = set()
        self.used: set[str] = set()
        self.given: frozenset[int | float] = frozenset()
        self.routed = False
        self.expressions: dict[int, str] = {}  # of single dims before those of products
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
        """Comparisons that other captures have noted, by their names: B*S and S are one number here, where B is 1."""
        names: dict[tuple[str, str, str], list[SizeGuard]] = {}
        for guard in known:
            names.setdefault((self._called(guard.left), guard.op, self._called(guard.right)), []).append(guard)
        guards = []
        for guard in self.guards:
            alike = names.get((guard.left, guard.op, guard.right), [])
            exact = [k for k in alike if (k.left, k.right) == (guard.left, guard.right)]
            guards += [dataclasses.replace(k, value=guard.value) for k in exact or alike] or [guard]
        self.guards = list(dict.fromkeys(guards))

    def _called(self, text: str) -> str:
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
    """1, and the products of some of these, ascending."""
    several = (itertools.combinations(factors, count) for count in range(len(factors) + 1))
    return sorted({math.prod(chosen) for chosen in itertools.chain.from_iterable(several)})


class NumberNotTaken(Refused, AttributeError):
    """A function of torch asks a number for the symbol that torch's own symbolic numbers have."""


class NotHashable(Refused, TypeError):
    """A size is asked for its hash."""


class Number:
    """What `Size` and `Ratio` share: a number with the expression it came from, None for one from the routing."""

    value: Any
    expr: Any
    log: Any
    _is: type

    # `isinstance(n, int)` holds as it does for the number; torch takes it as its own symbolic number, and it is not a
    # real int because `0.5 * n` would then be left to `float`, which knows nothing of expressions
    __class__ = property(lambda self: self._is)  # type: ignore[assignment]

    def __init__(self, value: Any, expr: Any, log: Any):
        self.value, self.expr, self.log = value, expr, log

    def __getattr__(self, name: str) -> Any:
        if name == "node":
            source = find_user_source()
            what = f"the size {self.expr}" if isinstance(self.expr, str) else "a number of the routing"
            raise NumberNotTaken(
                f"torch is given {what} here in a way that captures do not follow: {source.text}",
                source=str(source), remedy="give it to torch.arange, torch.full or a method of a tensor instead",
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

    # From here on the number is Python's own, and what it is compared with is not seen.
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
        """Another number of the same origin."""
        return _made(value, expr, self.log)

    def __divmod__(self, other: Any) -> Any:
        return self // other, self % other

    def __rdivmod__(self, other: Any) -> Any:
        return other // self, other % self


class Size(Number, torch.SymInt):
    """An int with the expression it came from.

    It cannot be hashed, as torch's own symbolic numbers cannot: a cache that is keyed by sizes would keep it, and hand
    it out when the capture is over.
    """

    _is = int

    def __hash__(self) -> int:
        source = find_user_source()
        raise NotHashable(
            f"unhashable type: the size {self.expr} is symbolic here, and a dict, a set or a cache asks for its hash: "
            f"{source.text}",
            source=str(source), remedy="use int(...) of it as a key",
        )  # fmt: skip

    def __index__(self) -> int:
        """Asked for by Python: an op is given the number itself."""
        self.log.leak(self.expr)
        return self.value


class Ratio(Number, torch.SymFloat):
    """A float that was computed from a `Size`."""

    _is = float


def _expr(x: Any) -> str | None:
    if isinstance(x, Number):
        return x.expr if isinstance(x.expr, str) else None
    return f"({x!r})" if type(x) in (int, float) and x < 0 else repr(x) if type(x) in (int, float, bool) else None


def peek_value(x: Any) -> Any:
    """The number itself, without telling anybody that it is used."""
    return x.value if isinstance(x, Number) else x


_PLAIN = frozenset([type(None), bool, int, float, str, torch.Tensor, FakeTensor, fx.Node])


def unwrap_numbers(x: Any) -> Any:
    """For an op: a `Size` or `Ratio` as the number it is, also in the containers that arguments are made of."""
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


def _made(value: Any, expr: str, log: SizeLog) -> Any:
    if type(value) is int:
        return Size(value, expr, log)
    return Ratio(value, expr, log) if type(value) is float else value


def _arithmetic(symbol: str, fn: Callable, swapped: bool) -> Callable:
    def method(self: Any, other: Any) -> Any:
        if isinstance(other, torch.Tensor):
            self.log.use(self)
            return fn(other, self.value) if swapped else fn(self.value, other)
        a, b = (other, self) if swapped else (self, other)
        left, right = _expr(a), _expr(b)
        if left is None or right is None:
            return NotImplemented
        return _made(fn(peek_value(a), peek_value(b)), f"({left}{symbol}{right})", self.log)

    return method


def _unary(text: str, fn: Callable) -> Callable:
    return lambda self: self._like(fn(self.value), text.format(self.expr))


def _comparison(name: str, fn: Callable) -> Callable:
    def method(self: Any, other: Any) -> Any:
        if isinstance(other, torch.Tensor):
            self.log.use(self)
            return fn(self.value, other)
        right = _expr(other)
        if right is None:
            return NotImplemented
        value = fn(self.value, peek_value(other))
        if right != self.expr:
            self.log.note(self.expr, name, right, value)
        return value

    return method


def _followed(name: str, fn: Callable) -> Callable:
    """A function of a number, of which a `Size` keeps the expression; `math.sqrt` asks for a float of it."""

    def function(x: Any, *rest: Any) -> Any:
        known = isinstance(x, Number) and not rest
        return x._like(fn(x.value), f"{name}({x.expr})") if known else fn(x, *rest)

    return function


SYMBOLIC_FUNCTIONS = {name: _followed(name, fn) for name, fn in FUNCTIONS.items()}


def _define(kind: type) -> None:
    """The operators; those that torch's symbolic numbers have would look for a symbol of torch's."""
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
_define(Number)


def wrap_sizes(value: Any, log: SizeLog) -> Any:
    """`value` (an int or a `torch.Size`) with the symbolic ones among its sizes replaced by `Size`s."""
    if type(value) is int:
        expr = log.expressions.get(value)
        return Size(value, expr, log) if expr else value
    if isinstance(value, tuple) and any(v in log.expressions for v in value):
        return torch.Size([wrap_sizes(v, log) for v in value])
    return value
