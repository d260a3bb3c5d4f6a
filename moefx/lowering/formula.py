"""Primitives of the formulas for an expert's pointwise part, and their source text for kernels.

Formulas are SymPy expressions of these primitives, which SymPy neither evaluates nor reorders. SymPy's own sums and
products would be expanded, merged and sorted; in floating point the result can cancel or overflow although the original
does not.
"""

from __future__ import annotations

import collections
import ctypes
import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import sympy
from sympy import Expr as Expression
from sympy import S


class Primitive(Expression):
    """Base class of the primitives. SymPy's Function is too slow: its cache compares whole trees."""

    text: ClassVar[str]  # Triton source with a placeholder for each argument

    def __new__(cls, *args: Any) -> Any:
        if len(args) != cls.text.count("{}") or any(a is None for a in args):
            raise TypeError(f"{cls.__name__}{args}")
        result = cls.eval(*args)
        return super().__new__(cls, *args) if result is None else result

    @classmethod
    def eval(cls, *args: Any) -> Any:
        """Return an exact simplification of the primitive with these arguments, or None."""


class Condition(Primitive):
    """A primitive with a boolean result."""


class Add(Primitive):
    text = "({} + {})"

    @classmethod
    def eval(cls, a: Any, b: Any) -> Any:
        if a is S.Zero or b is S.Zero:
            return b if a is S.Zero else a
        return to_number(float(a) + float(b)) if a.is_Number and b.is_Number else None


class Subtract(Primitive):
    text = "({} - {})"

    @classmethod
    def eval(cls, a: Any, b: Any) -> Any:
        if a is S.Zero or b is S.Zero:
            return Negate(b) if a is S.Zero else a
        return to_number(float(a) - float(b)) if a.is_Number and b.is_Number else None


class Negate(Primitive):
    text = "(-{})"

    @classmethod
    def eval(cls, a: Any) -> Any:
        if isinstance(a, Negate):
            return a.args[0]
        return to_number(-float(a)) if a.is_Number else None


class Multiply(Primitive):
    text = "({} * {})"

    @classmethod
    def eval(cls, a: Any, b: Any) -> Any:
        for one, other in ((a, b), (b, a)):
            if one is S.One or one is S.NegativeOne:
                return other if one is S.One else Negate(other)
        return to_number(float(a) * float(b)) if a.is_Number and b.is_Number else None


class Divide(Primitive):
    text = "({} / {})"

    @classmethod
    def eval(cls, a: Any, b: Any) -> Any:
        if b is S.One:
            return a
        # torch 2.11 writes sigmoid out in the derivative of silu, but uses the primitive in its value.
        if a is S.One and isinstance(b, Add) and b.args[1] is S.One and isinstance(b.args[0], Exp):
            return Sigmoid(Negate(b.args[0].args[0]))
        return to_number(float(a) / float(b)) if a.is_Number and b.is_Number and b is not S.Zero else None


class Where(Primitive):
    text = "tl.where({}, {}, {})"

    @classmethod
    def eval(cls, condition: Any, a: Any, b: Any) -> Any:
        return a if a == b else None


def _primitive(name: str, text: str, base: type = Primitive) -> Any:
    return type(name, (base,), {"text": text, "__module__": __name__})


Maximum = _primitive("Maximum", "tl.maximum({}, {}, tl.PropagateNan.ALL)")
Minimum = _primitive("Minimum", "tl.minimum({}, {}, tl.PropagateNan.ALL)")
Absolute = _primitive("Absolute", "tl.abs({})")
Sign = _primitive("Sign", "sign({})")
Exp = _primitive("Exp", "exp({})")
Exp2 = _primitive("Exp2", "tl.exp2({})")
Expm1 = _primitive("Expm1", "expm1({})")
Log = _primitive("Log", "tl.log({})")
Log2 = _primitive("Log2", "tl.log2({})")
Log1p = _primitive("Log1p", "log1p({})")
Sqrt = _primitive("Sqrt", "tl.sqrt({})")
Rsqrt = _primitive("Rsqrt", "tl.rsqrt({})")
Hypot = _primitive("Hypot", "hypot({}, {})")
Sigmoid = _primitive("Sigmoid", "sigmoid({})")
Erf = _primitive("Erf", "tl.erf({})")
Erfc = _primitive("Erfc", "erfc({})")
Sin = _primitive("Sin", "tl.sin({})")
Cos = _primitive("Cos", "tl.cos({})")
Atan = _primitive("Atan", "atan({})")
Sinh = _primitive("Sinh", "sinh({})")
Cosh = _primitive("Cosh", "cosh({})")
Tanh = _primitive("Tanh", "tanh({})")
Asinh = _primitive("Asinh", "asinh({})")

Less = _primitive("Less", "({} < {})", Condition)
LessEqual = _primitive("LessEqual", "({} <= {})", Condition)
Greater = _primitive("Greater", "({} > {})", Condition)
GreaterEqual = _primitive("GreaterEqual", "({} >= {})", Condition)
Equal = _primitive("Equal", "({} == {})", Condition)
NotEqual = _primitive("NotEqual", "({} != {})", Condition)
And = _primitive("And", "({} & {})", Condition)
Or = _primitive("Or", "({} | {})", Condition)
Xor = _primitive("Xor", "({} ^ {})", Condition)
Not = _primitive("Not", "({} == 0)", Condition)


def to_number(number: float) -> Any:
    """Return the SymPy number; an Integer for whole numbers, so that factors of 1.0 disappear."""
    if math.isfinite(number):
        return sympy.Integer(int(number)) if number == int(number) else sympy.Float(number, 17)
    return S.NaN if math.isnan(number) else S.Infinity if number > 0 else S.NegativeInfinity


# -- source text


def write_function(name: str, parameters: Sequence[str], results: Sequence[Any]) -> str:
    """Write the source of a Triton function of `parameters` that returns `results` (a tuple if there are several).

    It uses `tl` and the functions of `triton.math_functions`.
    """
    order = _operands_first(results)
    uses = collections.Counter(results)
    for expr in order:
        uses.update(expr.args)
    texts: dict[Any, str] = {}
    lines: list[str] = []
    for expr in order:
        texts[expr] = text = _write_expression(expr, texts)
        # Long texts also become variables: for the reader, and because Python limits the nesting of parentheses.
        if expr.args and (uses[expr] > 1 or len(text) > 90):
            texts[expr] = f"t{len(lines)}"
            lines.append(f"    {texts[expr]} = {text}")
    zeros = f"tl.where({parameters[0]} == {parameters[0]}, 0.0, 0.0)"
    result_texts = [texts[r] if list_symbols(r) else zeros if r is S.Zero else f"{zeros} + {texts[r]}" for r in results]
    return "\n".join([f"def {name}({', '.join(parameters)}):", *lines, f"    return {', '.join(result_texts)}", ""])


def list_symbols(formula: Any) -> set[str]:
    """List the names of the variables in a formula."""
    return {s.name for s in _operands_first([formula]) if s.is_Symbol}


def _operands_first(formulas: Sequence[Any]) -> list[Any]:
    """Yield each subexpression once, operands first. Not recursive, because formulas may be nested deeply."""
    order: dict[Any, None] = {}
    stack = [(f, False) for f in reversed(formulas)]
    while stack:
        expr, has_operands = stack.pop()
        if has_operands:
            order[expr] = None
        elif expr not in order:
            stack += [(expr, True), *((a, False) for a in reversed(expr.args))]
    return list(order)


def _write_expression(expr: Any, texts: Mapping[Any, str]) -> str:
    if expr.is_Symbol:
        return expr.name
    if expr.is_Number:
        return _write_number(expr)
    arguments = [texts[a] for a in expr.args]
    if all(a.is_Number for a in expr.args):  # let Triton evaluate it, not Python
        arguments = [f"tl.cast({a}, tl.float32)" for a in arguments]
    return expr.text.format(*arguments)


def _write_number(value: Any) -> str:
    number = float(value)
    if not math.isfinite(single := ctypes.c_float(number).value):
        return f'float("{single}")'
    # Triton would treat a number below float32's normal range as float64.
    return f"tl.cast({number!r}, tl.float32)" if 0 < abs(number) < 2.0**-126 else repr(number)
