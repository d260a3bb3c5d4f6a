"""Formulas that a reader can check: each has a name, a unit and a meaning, and prints with its numbers.

For example
    words = Sheet([Formula("A_dispatch", 2 * k * b * s * d, "B", "rows that arrive; X-MoE table 2")])
    words(k=8, b=1, s=4096, d=7168)["A_dispatch"]        # 469762048
    print(words.format_results("A_dispatch", k=8, b=1, s=4096, d=7168))
        A_dispatch = 2*b*d*k*s                           # rows that arrive; X-MoE table 2
                   = 2*1*7168*8*4096 = 448 MiB
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import sympy
from sympy.printing.pycode import PythonCodePrinter
from sympy.printing.str import StrPrinter

from ..runtime.ranks.link_costs import compute_expected_parts
from ..util.unit_text import amount


class distinct_parts(sympy.Function):
    """The function that `distinct` prints as."""

    nargs = 3


def distinct(num_experts: sympy.Expr, top_k: sympy.Expr, parts: sympy.Expr) -> sympy.Expr:
    """Return the expected number of equal parts of the experts that hold a token's experts (X-MoE figure 4)."""
    expression: Any = distinct_parts(num_experts, top_k, parts)
    return expression


@dataclasses.dataclass(frozen=True)
class Formula:
    """One line of a sheet.

    Attributes:
        name: symbol of the result.
        expression: expression over the sheet's inputs and earlier results.
        unit: "B" bytes, "s" seconds, "FLOP", "1" a number.
        meaning: meaning of the result, with the section, table or equation of its paper.
    """

    name: str
    expression: sympy.Expr
    unit: str
    meaning: str

    @property
    def symbol(self) -> sympy.Symbol:
        return quantity(self.name)


def quantity(name: str) -> sympy.Symbol:
    """Return the symbol of this name, declared nonnegative so that formulas simplify."""
    return sympy.Symbol(name, nonnegative=True)


def quantities(names: str) -> tuple[sympy.Symbol, ...]:
    return tuple(map(quantity, names.split()))


class Sheet:
    """A list of formulas; each one may use the results above it.

    Raises:
        ValueError: two formulas have the same name, or a formula uses a later result.
    """

    def __init__(self, formulas: Iterable[Formula]):
        self.formulas = {}
        for formula in formulas:
            if formula.name in self.formulas:
                raise ValueError(f"two formulas are named {formula.name}")
            self.formulas[formula.name] = formula
        defined: set[str] = set()
        for formula in self:
            undefined = _list_symbol_names(formula.expression) & (self.formulas.keys() - defined)
            if undefined:
                raise ValueError(f"{formula.name} uses {', '.join(sorted(undefined))}, which is not above it")
            defined.add(formula.name)

    def __iter__(self) -> Iterator[Formula]:
        return iter(self.formulas.values())

    def __add__(self, other: Sheet) -> Sheet:
        return Sheet([*self, *other])

    @functools.cached_property
    def inputs(self) -> list[str]:
        """Names of the quantities that a call needs, sorted."""
        return sorted(set().union(*(_list_symbol_names(f.expression) for f in self)) - self.formulas.keys())

    def __call__(self, **values: float) -> dict[str, float]:
        """Evaluate all results.

        Raises:
            TypeError: an input is missing.
        """
        try:
            return self._compiled(values)
        except KeyError as missing:
            raise TypeError(f"{missing} is not given") from None

    def dependencies(self, *names: str) -> list[Formula]:
        """Return the formulas of these results, followed by those of the results that they use."""
        formulas, left = [], list(names)
        while left:
            formulas.append(formula := self.formulas[left.pop(0)])
            seen = {f.name for f in formulas} | set(left)
            left += [n for n in self.formulas if n in _list_symbol_names(formula.expression) and n not in seen]
        return formulas

    def format_results(self, *names: str, **values: float) -> str:
        """Format the formulas of results with their numbers, followed by those of the results that they use."""
        results = self(**values)
        all_values, lines = values | results, []
        for formula in self.dependencies(*names):
            margin = " " * (len(formula.name) + 1)
            lines += [f"{formula.name} = {_FormulaPrinter().doprint(formula.expression)}    # {formula.meaning}"]
            numbers = _FormulaPrinter(all_values).doprint(formula.expression)
            value = amount(results[formula.name], formula.unit)
            lines += [f"{margin}= {numbers} = {value}" if numbers != value else f"{margin}= {value}"]
        return "\n".join(lines)

    @functools.cached_property
    def _compiled(self) -> Callable[..., dict[str, float]]:
        """All lines as one Python function, because a search evaluates thousands of plans."""
        printer = _CodePrinter()
        lines = [f"    {f.name} = {printer.doprint(f.expression)}" for f in self]
        bindings = [f"    {name} = values[{name!r}]" for name in self.inputs]
        items = ", ".join(f"{f.name!r}: {f.name}" for f in self)
        space: dict[str, Any] = {"distinct_parts": compute_expected_parts}
        exec("\n".join(["def results(values):", *bindings, *lines, f"    return {{{items}}}"]), space)
        return space["results"]


def format_number(value: float) -> str:
    """Format a number for a formula."""
    return f"{value:.6g}" if value < 1e6 else f"{value:.4g}"


def _list_symbol_names(expression: sympy.Expr) -> set[str]:
    return {symbol.name for symbol in expression.free_symbols}  # type: ignore[attr-defined]


class _CodePrinter(PythonCodePrinter):
    def _print_distinct_parts(self, expression: sympy.Expr) -> str:
        return f"distinct_parts({', '.join(map(self._print, expression.args))})"

    def _print_ceiling(self, expression: sympy.Expr) -> str:
        inside: Any = expression.args[0]
        numerator, denominator = map(self._print, inside.as_numer_denom())
        return f"-(-({numerator}) // ({denominator}))"

    def _print_Max(self, expression: sympy.Expr) -> str:
        return f"max({', '.join(map(self._print, expression.args))})"


class _FormulaPrinter(StrPrinter):
    """Print as papers do: alphabetically. With `values`, print numbers instead of names."""

    def __init__(self, values: Mapping[str, float] | None = None):
        super().__init__()
        self._values = values

    def _print_Symbol(self, expr: sympy.Symbol) -> str:
        return expr.name if self._values is None else format_number(self._values[expr.name])
