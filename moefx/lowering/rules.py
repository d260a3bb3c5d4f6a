"""Rules that translate ATen calls to formulas, by the name of the op."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from sympy import S

from ..ir.expressions.pointwise_expression import is_precision_cast
from .formula import (
    Absolute,
    Add,
    And,
    Asinh,
    Atan,
    Condition,
    Cos,
    Cosh,
    Divide,
    Equal,
    Erf,
    Erfc,
    Exp,
    Exp2,
    Expm1,
    Greater,
    GreaterEqual,
    Hypot,
    Less,
    LessEqual,
    Log,
    Log1p,
    Log2,
    Maximum,
    Minimum,
    Multiply,
    Negate,
    Not,
    NotEqual,
    Or,
    Rsqrt,
    Sigmoid,
    Sign,
    Sin,
    Sinh,
    Sqrt,
    Subtract,
    Tanh,
    Where,
    Xor,
    to_number,
)


class Underivable(Exception):
    """An expression cannot be translated to a formula. The message names the op without a rule."""


def as_number(x: Any) -> Any:
    return Where(x, S.One, S.Zero) if isinstance(x, Condition) else x


def _as_condition(x: Any) -> Any:
    return x if isinstance(x, Condition) else NotEqual(x, S.Zero)


def _logical(function: Any) -> Callable[..., Any]:
    return lambda *args: function(*map(_as_condition, args))


def _bitwise(function: Any) -> Callable[..., Any]:
    def checked(*args: Any) -> Any:
        if not all(isinstance(a, Condition) for a in args):
            raise Underivable("a bitwise operation on numbers")
        return function(*args)

    return checked


def _choose(condition: Any, a: Any, b: Any) -> Any:
    if isinstance(a, Condition) and isinstance(b, Condition):
        return Or(And(condition, a), And(Not(condition), b))
    return Where(_as_condition(condition), as_number(a), as_number(b))


def _with_numbers(function: Any) -> Callable[..., Any]:
    """Wrap a function of numbers, to take conditions as 0 and 1."""
    return lambda *args, **kwargs: function(*map(as_number, args), **kwargs)


def _clamp(x: Any, low: Any = None, high: Any = None, *, min: Any = None, max: Any = None) -> Any:
    low, high = low if min is None else min, high if max is None else max
    x = x if low is None else Maximum(x, low)
    return x if high is None else Minimum(x, high)


def _ignore_nan(function: Any) -> Callable[..., Any]:
    """Wrap a function of two numbers, to return the other one if one is NaN."""
    return lambda a, b: Where(NotEqual(a, a), b, Where(NotEqual(b, b), a, function(a, b)))


def _divide(a: Any, b: Any, rounding_mode: str | None = None) -> Any:
    if rounding_mode is not None:
        raise Underivable(f"a division that rounds ({rounding_mode})")
    return Divide(a, b)


def _power(x: Any, exponent: Any) -> Any:
    if x.is_Number and float(x) > 0:
        return Exp2(exponent) if x == 2 else Exp(Multiply(exponent, to_number(math.log(x))))
    if not exponent.is_Number or not math.isfinite(exponent):
        raise Underivable(f"a power of {x}" if x.is_Number else "a power whose exponent is not a number")
    if exponent < 0:
        return Divide(S.One, _power(x, -exponent))
    whole_exponent = math.floor(exponent)
    result, square, remaining = S.One, x, whole_exponent
    while remaining:
        result = Multiply(result, square) if remaining & 1 else result
        remaining >>= 1
        square = Multiply(square, square) if remaining else square
    if exponent == whole_exponent:
        return result
    fraction = to_number(float(exponent) - whole_exponent)  # in (0, 1): the error of the logarithm does not grow
    return Multiply(result, Sqrt(x) if float(fraction) == 0.5 else Exp(Multiply(fraction, Log(x))))


def _cast(x: Any, *args: Any, **kwargs: Any) -> Any:
    dtype = next((a for a in (*args, *kwargs.values()) if isinstance(a, torch.dtype)), torch.float32)
    if dtype is torch.bool:
        return _as_condition(x)
    if not is_precision_cast(dtype):
        raise Underivable(f"a cast to {dtype}")
    return as_number(x)


def _constant(value: Any, **_: Any) -> Any:
    return NotEqual(to_number(value), S.Zero) if isinstance(value, bool) else value


def _ignore_arguments(value: Any) -> Callable[..., Any]:
    return lambda *_, **__: value


# aten and prims names (without overload) -> rule
RULES: dict[str, Callable[..., Any]] = {
    **{
        name: _with_numbers(function)
        for name, function in {
            "add": lambda a, b, alpha=S.One: Add(a, Multiply(alpha, b)),
            "sub": lambda a, b, alpha=S.One: Subtract(a, Multiply(alpha, b)),
            "rsub": lambda a, b, alpha=S.One: Subtract(b, Multiply(alpha, a)),
            "mul": Multiply,
            "div": _divide,
            "neg": Negate,
            "reciprocal": lambda a: Divide(S.One, a),
            "pow": _power,
            "exp": Exp,
            "exp2": Exp2,
            "expm1": Expm1,
            "log": Log,
            "log2": Log2,
            "log10": lambda a: Multiply(Log(a), to_number(1 / math.log(10))),
            "log1p": Log1p,
            "sqrt": Sqrt,
            "rsqrt": Rsqrt,
            "hypot": Hypot,
            "sigmoid": Sigmoid,
            "erf": Erf,
            "erfc": Erfc,
            "sin": Sin,
            "cos": Cos,
            "tan": lambda a: Divide(Sin(a), Cos(a)),
            "atan": Atan,
            "sinh": Sinh,
            "cosh": Cosh,
            "tanh": Tanh,
            "asinh": Asinh,
            "sign": Sign,
            "abs": Absolute,
            "maximum": Maximum,
            "minimum": Minimum,
            "fmax": _ignore_nan(Maximum),
            "fmin": _ignore_nan(Minimum),
            "clamp": _clamp,
            "clamp_min": Maximum,
            "clamp_max": Minimum,
            "lt": Less,
            "le": LessEqual,
            "gt": Greater,
            "ge": GreaterEqual,
            "eq": Equal,
            "ne": NotEqual,
        }.items()
    },
    "where": _choose,
    "masked_fill": lambda x, mask, value: _choose(mask, value, x),
    "logical_and": _logical(And),
    "logical_or": _logical(Or),
    "logical_xor": _logical(Xor),
    "logical_not": _logical(Not),
    **dict.fromkeys(("bitwise_and", "__and__"), _bitwise(And)),
    **dict.fromkeys(("bitwise_or", "__or__"), _bitwise(Or)),
    **dict.fromkeys(("bitwise_xor", "__xor__"), _bitwise(Xor)),
    "bitwise_not": _bitwise(Not),
    **dict.fromkeys(("_to_copy", "convert_element_type"), _cast),
    **dict.fromkeys(("clone", "detach", "alias", "view_of", "lift_fresh", "lift_fresh_copy"), lambda x, **_: x),
    **dict.fromkeys(("expand", "broadcast_in_dim"), lambda x, *_, **__: x),
    "copy_": lambda _, x, *__: x,
    **dict.fromkeys(("zeros", "zeros_like", "new_zeros", "_efficientzerotensor"), _ignore_arguments(S.Zero)),
    **dict.fromkeys(("ones", "ones_like", "new_ones"), _ignore_arguments(S.One)),
    **dict.fromkeys(("empty", "empty_like", "empty_permuted", "new_empty"), _ignore_arguments(None)),
    **dict.fromkeys(("full", "full_like", "fill"), lambda _, value, **__: _constant(value)),
    "new_full": lambda _, size, value, **__: _constant(value),
    "scalar_tensor": _constant,
}
