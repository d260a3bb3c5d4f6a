"""Guards on sizes: the comparisons of symbolic sizes in a capture, as expressions over the token dims.

A `SizeLog` belongs to one capture. The proof turns its guards into conditions under which the rewritten block runs.
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
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ...errors import Refused
from ...ir.graphs.graph_codegen import FUNCTIONS
from ..environment.code_locations import find_user_source

MAX_COMPARISONS = 256  # different comparisons of sizes in one capture
COMPARE = {
    "lt": operator.lt,
    "le": operator.le,
    "gt": operator.gt,
    "ge": operator.ge,
    "eq": operator.eq,
    "ne": operator.ne,
}
_SYMBOLS = {"lt": "<", "le": "<=", "gt": ">", "ge": ">=", "eq": "==", "ne": "!="}
_NEGATIONS = {"lt": "ge", "le": "gt", "gt": "le", "ge": "lt", "eq": "ne", "ne": "eq"}


def evaluate_size(expr: str, dims: Mapping[str, int]) -> Any:
    """Evaluate the expression of a `Size`: dims, numbers and arithmetic."""
    return eval(_compile(expr), {"__builtins__": {}, **FUNCTIONS}, dict(dims))


@functools.lru_cache(maxsize=4096)
def _compile(expr: str) -> types.CodeType:
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

    @property
    def symbol(self) -> str:
        """The comparison that holds, in Python: `<=` if `>` was False."""
        return _SYMBOLS[self.op if self.value else _NEGATIONS[self.op]]

    def __str__(self) -> str:
        exception = f", or {self.unless} == 0" if self.unless else ""
        return f"{self.left} {self.symbol} {self.right}{exception}"


@functools.lru_cache(maxsize=4096)
def _find_divisors(expr: str) -> frozenset[str]:
    """Return the divisors in an expression that may be 0 for some sizes; the program never divides at these."""
    divisors = set()
    for node in ast.walk(ast.parse(expr, mode="eval")) if {*"/%"} & {*expr} else ():
        if isinstance(node, ast.BinOp) and isinstance(node.op, _DIVIDE):
            inner = {type(n.op) for n in ast.walk(node.right) if isinstance(n, ast.BinOp)}
            if inner & {ast.Sub, ast.FloorDiv, ast.Mod} and not _find_divisors(ast.unparse(node.right)):
                divisors.add(f"({ast.unparse(node.right)})")
    return frozenset(divisors)


_DIVIDE = (ast.Div, ast.FloorDiv, ast.Mod)


class SizeLog:
    """The symbolic sizes of a capture, and how the program used them.

    Attributes:
        guards: comparisons, each once.
        seen: the same, without sources and conditions.
        leaks: expressions that became plain numbers (`int(n / 2)`, `math.sqrt(n)`), whose comparisons go unseen.
        used: expressions of the sizes that ops were called with.
        op_arguments: sizes and routed numbers among the arguments of the current op.
        leaked_routing: whether a routed number became a plain one.
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
        self.op_arguments: frozenset[int | float] = frozenset()
        self.leaked_routing = False
        self.expressions: dict[int, str] = {}
        for count, times in itertools.product(range(1, len(self.dims) + 1), _list_products(fixed)):
            for combination in itertools.combinations(self.dims, count):
                text = "*".join((*combination, *([str(times)] if times > 1 else [])))
                self.expressions.setdefault(times * math.prod(self.dims[d] for d in combination), text)

    def log_comparison(self, left: str, op: str, right: str, value: bool) -> None:
        guard = SizeGuard(left, op, right, value)
        if guard not in self.seen:
            self.seen.add(guard)
            divisors, source = "*".join(_find_divisors(left) | _find_divisors(right)), find_user_source()
            if len(self.seen) > MAX_COMPARISONS:
                raise Refused(
                    f"it compares {left} with more than {MAX_COMPARISONS} numbers: {source.text}",
                    source=str(source),
                    remedy="compare with the bounds of a range, as in 8 <= n < 512, or with fewer numbers",
                )
            self.guards.append(dataclasses.replace(guard, unless=divisors, source=str(source)))

    def unify_names(self, known_guards: Iterable[SizeGuard]) -> None:
        """Rewrite the guards in the expressions of other captures: with B = 1, B*S and S are one number here.

        Args:
            known_guards: guards of other captures.
        """
        names: dict[tuple[str, str, str], list[SizeGuard]] = {}
        for guard in known_guards:
            names.setdefault((self._rename(guard.left), guard.op, self._rename(guard.right)), []).append(guard)
        guards = []
        for guard in self.guards:
            same_guards = names.get((guard.left, guard.op, guard.right), [])
            exact = [k for k in same_guards if (k.left, k.right) == (guard.left, guard.right)]
            guards += [dataclasses.replace(k, value=guard.value) for k in exact or same_guards] or [guard]
        self.guards = list(dict.fromkeys(guards))

    def _rename(self, text: str) -> str:
        """Replace products of dims by the expressions that this capture has for their values."""
        name = "|".join(map(re.escape, self.dims))
        products = rf"\b(?:{name})(?:\*(?:{name}))*\b"
        if not self.dims:
            return text
        # S*S has none
        return re.sub(products, lambda m: self.expressions.get(evaluate_size(m[0], self.dims), m[0]), text)

    def log_leak(self, expr: str) -> None:
        self.leaks.add(expr)

    def log_use(self, size: Any) -> None:
        self.used.add(size.expr)
        self.op_arguments |= {size.value}


def _list_products(factors: Sequence[int]) -> list[int]:
    """Return 1 and the products of subsets of `factors`, ascending."""
    combinations = (itertools.combinations(factors, count) for count in range(len(factors) + 1))
    return sorted({math.prod(combination) for combination in itertools.chain.from_iterable(combinations)})
