"""The pointwise part of an expert as formulas: aten -> FX -> SymPy, its derivatives, and source text for kernels.

No activation is named here. torch's own decompositions take any pointwise op apart into the primitives below; SymPy
differentiates what is left, and shares common subexpressions between the value and its derivatives. Derivatives
follow torch at the kinks: relu has none at 0, clamp passes it at its bounds, equal operands of maximum share it.

Everything is computed in float32; casts in the expression are left out, which rounds less often than the original.
"""

from __future__ import annotations

import functools
import math
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import sympy
import torch
from sympy import Function, Symbol
from torch.fx.experimental.proxy_tensor import make_fx

from ..ir.expression import Expr, canonical, program, variables


class Underivable(Exception):
    """The expression has something in it for which there is no rule; the message says what."""


# -- primitives: functions that SymPy neither evaluates nor simplifies, with the derivative that torch has
# -----------------------------------------------------------------------------------------------------


class Exp(Function):
    def fdiff(self, argindex=1):
        return self


class Expm1(Function):
    def fdiff(self, argindex=1):
        return Exp(self.args[0])


class Log(Function):
    def fdiff(self, argindex=1):
        return 1 / self.args[0]


class Log1p(Function):
    def fdiff(self, argindex=1):
        return 1 / (1 + self.args[0])


class Sigmoid(Function):
    def fdiff(self, argindex=1):
        return self * (1 - self)


class Tanh(Function):
    def fdiff(self, argindex=1):
        return 1 - self**2


class Erf(Function):
    def fdiff(self, argindex=1):
        return 2 / math.sqrt(math.pi) * Exp(-(self.args[0] ** 2))


class Sqrt(Function):
    def fdiff(self, argindex=1):
        return 1 / (2 * self)


class Sin(Function):
    def fdiff(self, argindex=1):
        return Cos(self.args[0])


class Cos(Function):
    def fdiff(self, argindex=1):
        return -Sin(self.args[0])


class Sign(Function):
    def fdiff(self, argindex=1):
        return sympy.Integer(0)


class Absolute(Function):
    def fdiff(self, argindex=1):
        return Sign(self.args[0])


class Compare(Function):
    """Compare(kind, a, b), a condition; kind is one of the names in `_COMPARISONS`."""


class All(Function):
    """Both conditions."""


class Any_(Function):
    """Either condition."""


class Not(Function):
    """The condition does not hold; true for a NaN as well."""


class Where(Function):
    """Where(condition, a, b)."""

    def _eval_derivative(self, s: Any) -> Any:
        condition, a, b = self.args
        da, db = sympy.diff(a, s), sympy.diff(b, s)
        return da if da == db else Where(condition, da, db)


_COMPARISONS = {"lt": "<", "le": "<=", "gt": ">", "ge": ">=", "eq": "==", "ne": "!="}


def _compare(kind: str) -> Callable[..., Any]:
    return lambda a, b: Compare(Symbol(kind), a, b)


def _less(a: Any, b: Any) -> Any:
    return Compare(Symbol("lt"), a, b)


def _at_least(x: Any, low: Any) -> Any:
    return x if low is None else Where(_less(x, low), low, x)  # a NaN stays one


def _at_most(x: Any, high: Any) -> Any:
    return x if high is None else Where(_less(high, x), high, x)


def _maximum(a: Any, b: Any) -> Any:
    return Where(_less(b, a), a, Where(_less(a, b), b, (a + b) / 2))


def _power(x: Any, exponent: Any) -> Any:
    exponent = sympy.sympify(exponent)
    if not x.is_Number and exponent.is_Number and exponent == int(exponent):
        return x ** int(exponent)
    if exponent.is_Number and exponent * 2 == int(exponent * 2):
        return Sqrt(x) ** int(exponent * 2)
    raise Underivable(f"a power with exponent {exponent}")


def _no_rounding(function: Callable[..., Any]) -> Callable[..., Any]:
    def checked(a: Any, b: Any, rounding_mode: str | None = None) -> Any:
        if rounding_mode is not None:
            raise Underivable(f"a division that rounds ({rounding_mode})")
        return function(a, b)

    return checked


def _same(x: Any, *_: Any, **kwargs: Any) -> Any:
    dtype = next((a for a in (*_, *kwargs.values()) if isinstance(a, torch.dtype)), torch.float32)
    if not dtype.is_floating_point:
        raise Underivable(f"a cast to {dtype}")
    return x


# aten and prims names (without overload) -> rule
_RULES: dict[str, Callable[..., Any]] = {
    "add": lambda a, b, alpha=1: a + alpha * b,
    "sub": lambda a, b, alpha=1: a - alpha * b,
    "rsub": lambda a, b, alpha=1: b - alpha * a,
    "mul": lambda a, b: a * b,
    "div": _no_rounding(lambda a, b: a / b),
    "neg": lambda a: -a,
    "reciprocal": lambda a: 1 / a,
    "square": lambda a: a**2,
    "pow": _power,
    "exp": Exp,
    "exp2": lambda a: Exp(a * math.log(2)),
    "expm1": Expm1,
    "log": Log,
    "log2": lambda a: Log(a) / math.log(2),
    "log1p": Log1p,
    "sigmoid": Sigmoid,
    "tanh": Tanh,
    "erf": Erf,
    "sqrt": Sqrt,
    "rsqrt": lambda a: 1 / Sqrt(a),
    "sin": Sin,
    "cos": Cos,
    "sign": Sign,
    "abs": Absolute,
    "where": Where,
    "maximum": _maximum,
    "minimum": lambda a, b: -_maximum(-a, -b),
    "fmax": _maximum,
    "fmin": lambda a, b: -_maximum(-a, -b),
    "clamp": lambda x, min=None, max=None: _at_most(_at_least(x, min), max),
    "clamp_min": _at_least,
    "clamp_max": _at_most,
    "logical_and": All,
    "bitwise_and": All,
    "logical_or": Any_,
    "bitwise_or": Any_,
    "logical_not": Not,
    "bitwise_not": Not,
    **{name: _compare(name) for name in _COMPARISONS},
    **dict.fromkeys(("_to_copy", "to", "convert_element_type", "clone", "detach", "alias", "view_of"), _same),
    **dict.fromkeys(("zeros_like", "new_zeros"), lambda *_, **__: sympy.Integer(0)),
    **dict.fromkeys(("ones_like", "new_ones"), lambda *_, **__: sympy.Integer(1)),
    **dict.fromkeys(("full_like", "full", "fill", "new_full"), lambda _, value, **__: sympy.sympify(value)),
    "scalar_tensor": lambda value, **__: sympy.sympify(value),
    "broadcast_in_dim": lambda x, *_: x,
    "expand": lambda x, *_, **__: x,
}


# -- from aten to SymPy
# -----------------------------------------------------------------------------------------------------


@functools.lru_cache(maxsize=1024)
def formula(text: str, names: tuple[str, ...]) -> Any:
    """The SymPy expression of an expression given as its `canonical` text; variables become real symbols.

    Raises:
        Underivable: there is no rule for something in it.
    """
    graph = _in_fresh_thread(lambda: _traced(text, names))
    values: dict[Any, Any] = {}
    symbols = iter(names)

    def value_of(argument: Any) -> Any:
        if isinstance(argument, torch.fx.Node):
            return values[argument]
        if isinstance(argument, (list, tuple)):
            return [value_of(a) for a in argument]
        return _exactly(argument) if isinstance(argument, float) else argument

    for node in graph.nodes:
        if node.op == "placeholder":
            values[node] = Symbol(next(symbols), real=True)
        elif node.op == "get_attr":
            values[node] = _exactly(float(getattr(graph.owning_module, node.target)))
        elif node.op == "output":
            (result,) = node.args[0]
            return sympy.sympify(value_of(result))
        else:
            name = _base_name(node.target)
            if name not in _RULES:
                raise Underivable(f"{name}, for which there is no rule")
            try:
                values[node] = _RULES[name](*map(value_of, node.args), **{k: value_of(v) for k, v in node.kwargs.items()})
            except (TypeError, AttributeError) as error:
                raise Underivable(f"{name} with arguments {node.args[1:]} {dict(node.kwargs)}") from error
    raise AssertionError("a graph without output")


def _exactly(number: float) -> Any:
    """Whole numbers as such, so that factors of 1.0 disappear."""
    return sympy.Integer(int(number)) if number.is_integer() else sympy.Float(number, 17)


def _traced(text: str, names: Sequence[str]) -> torch.fx.Graph:
    def function(*args: torch.Tensor) -> list[torch.Tensor]:
        return [program(text)(dict(zip(names, args, strict=True)))]

    # float32 whatever the call computes in: no promotions to undo.
    args = [torch.ones((2, 3), device="meta") for _ in names]
    trace = make_fx(function, decomposition_table=_decompositions())
    try:
        module = trace(*args)
    except Exception as error:  # whatever torch's decompositions raise for what they do not take
        raise Underivable(f"something that torch cannot trace ({type(error).__name__}: {error})") from error
    module.graph.eliminate_dead_code()
    return module.graph


@functools.cache
def _decompositions() -> dict[Any, Any]:
    overloads = [op for op in torch._decomp.decomposition_table if isinstance(op, torch._ops.OpOverload)]
    return {op: torch._decomp.decomposition_table[op] for op in overloads if _base_name(op) not in _RULES}


def _base_name(op: Any) -> str:
    """`silu` of aten::silu.out."""
    return op._schema.name.rpartition("::")[2]


def _in_fresh_thread(function: Callable[[], Any]) -> Any:
    """As in `ir.derivative`: inside an op torch's thread-local state is not what tracing wants."""
    outcome: dict[str, Any] = {}

    def run() -> None:
        try:
            outcome["value"] = function()
        except BaseException as error:  # handed to the caller's thread
            outcome["error"] = error

    thread = threading.Thread(target=run, name="moefx-epilogue")
    thread.start()
    thread.join()
    if "error" in outcome:
        raise outcome["error"]
    return outcome["value"]


def formula_of(expr: Expr, names: Sequence[str] | None = None) -> Any:
    """`formula` of an expression tree."""
    return formula(canonical(expr), tuple(variables(expr) if names is None else names))


def with_gradients(value: Any, grad: str, wrt: Sequence[str]) -> list[Any]:
    """[value, grad * d value / d wrt[0], ...]."""
    g = Symbol(grad, real=True)
    return [value, *(g * sympy.diff(value, Symbol(name, real=True)) for name in wrt)]


def factor_of(expr: Expr, name: str, other: Sequence[str]) -> Any:
    """c of an expression that is name * c, linear in `name` (see `expression.is_linear`)."""
    value = formula_of(expr, (name, *other))
    return value.subs(Symbol(name, real=True), 1)


# -- from SymPy to source text
# -----------------------------------------------------------------------------------------------------


def source(name: str, parameters: Sequence[str], results: Sequence[Any]) -> str:
    """The text of a Python function of `parameters` that returns `results` (a tuple if there are several).

    It is written for Triton: `tl.exp` and the like, and the functions of `triton.elementary`.
    """
    shared, reduced = sympy.cse(list(results), symbols=sympy.numbered_symbols("t"), order="none", list=True)
    lines = [f"    {symbol} = {_text(value)}" for symbol, value in shared]
    like = parameters[0]
    texts = [_text(r) if r.free_symbols else f"tl.zeros_like({like}) + {_text(r)}" for r in reduced]
    return "\n".join([f"def {name}({', '.join(parameters)}):", *lines, f"    return {', '.join(texts)}", ""])


_FUNCTIONS: Mapping[type, str] = {
    Exp: "tl.exp",
    Expm1: "expm1",
    Log: "tl.log",
    Log1p: "log1p",
    Sigmoid: "tl.sigmoid",
    Tanh: "tanh",
    Erf: "tl.erf",
    Sqrt: "tl.sqrt",
    Sin: "tl.sin",
    Cos: "tl.cos",
    Sign: "sign",
    Absolute: "tl.abs",
    Where: "tl.where",
}


def _text(expr: Any) -> str:
    """One expression, with parentheses around everything but atoms and calls."""
    if isinstance(expr, Compare):
        kind, a, b = expr.args
        return f"({_text(a)} {_COMPARISONS[kind.name]} {_text(b)})"
    if isinstance(expr, (All, Any_)):
        a, b = expr.args
        return f"({_text(a)} {'&' if isinstance(expr, All) else '|'} {_text(b)})"
    if isinstance(expr, Not):
        return f"({_text(expr.args[0])} == 0)"
    if isinstance(expr, Function):
        return f"{_FUNCTIONS[type(expr)]}({', '.join(map(_text, expr.args))})"
    if expr.is_Symbol:
        return expr.name
    if expr.is_Number:
        return _number(expr)
    if expr.is_Add:
        first, *rest = sorted(expr.args, key=lambda term: term.could_extract_minus_sign())
        return "(" + _text(first) + "".join(map(_signed, rest)) + ")"
    if expr.is_Mul:
        above, below = [], []
        for factor in expr.args:
            base, exponent = factor.as_base_exp()
            inverse = exponent.is_Integer and exponent < 0
            (below if inverse else above).append(base**-exponent if inverse else factor)
        text = " * ".join(map(_text, above)) or "1.0"
        return f"({text})" if not below else f"({text} / ({' * '.join(map(_text, below))}))"
    if expr.is_Pow and expr.exp.is_Integer:
        base, exponent = _text(expr.base), int(expr.exp)
        power = " * ".join([base] * abs(exponent)) if abs(exponent) <= 4 else f"power({base}, {abs(exponent)})"
        return f"({power})" if exponent > 0 else f"(1.0 / ({power}))"
    raise Underivable(f"{expr}, for which there is no text")


def _signed(term: Any) -> str:
    return f" - {_text(-term)}" if term.could_extract_minus_sign() else f" + {_text(term)}"


def _number(value: Any) -> str:
    if value.is_infinite or value is sympy.nan:
        return f'float("{float(value)}")'
    return repr(float(value))
