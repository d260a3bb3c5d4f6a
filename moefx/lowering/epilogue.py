"""The pointwise part of an expert as formulas: aten -> SymPy, value and derivatives, and source text for kernels.

No activation is named here. The expression runs once on small tensors, under torch's autograd and with torch's own
decompositions, while a dispatch mode writes down as SymPy expressions what the calls of the primitives below give.
So the derivatives are those of torch, at the kinks and for infinities too: relu has none at 0, clamp passes it at
its bounds, hardtanh does not, equal operands of maximum share it. Value and derivatives share their subexpressions.

Everything is computed in float32; casts in the expression are left out, which rounds less often than the original.
"""

from __future__ import annotations

import collections
import contextlib
import ctypes
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import sympy
import torch
from sympy import Expr as Expression
from sympy import S, Symbol
from torch._decomp import decomposition_table
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from ..ir.derivative import in_fresh_thread
from ..ir.expression import Expr, canonical, program, variables


class Underivable(Exception):
    """The expression has something in it for which there is no rule; the message says what."""


class _NoRule(Underivable):
    """There is neither a rule nor a decomposition for an op."""


# -- primitives, which SymPy neither evaluates nor reorders
# ------------------------------------------------------------------------------------------------------
# Its own sums and products it does: it multiplies out numbers, merges powers, sorts operands. In floating point that
# cancels and overflows where the expression as written does not.


class Primitive(Expression):
    """A class for each; not SymPy's Function, whose cache compares expressions as trees, which can take forever."""

    text: ClassVar[str]  # in Triton, with the arguments to be filled in

    def __new__(cls, *args: Any) -> Any:
        if len(args) != cls.text.count("{}") or any(a is None for a in args):
            raise TypeError(f"{cls.__name__}{args}")
        result = cls.eval(*args)
        return super().__new__(cls, *args) if result is None else result

    @classmethod
    def eval(cls, *args: Any) -> Any:
        """What it is instead, without a loss; None if nothing."""


class Condition(Primitive):
    """True or false, as tl.where takes it."""


class Add(Primitive):
    text = "({} + {})"

    @classmethod
    def eval(cls, a: Any, b: Any) -> Any:
        if a is S.Zero or b is S.Zero:
            return b if a is S.Zero else a
        return _exactly(float(a) + float(b)) if a.is_Number and b.is_Number else None


class Subtract(Primitive):
    text = "({} - {})"

    @classmethod
    def eval(cls, a: Any, b: Any) -> Any:
        if a is S.Zero or b is S.Zero:
            return Negate(b) if a is S.Zero else a
        return _exactly(float(a) - float(b)) if a.is_Number and b.is_Number else None


class Negate(Primitive):
    text = "(-{})"

    @classmethod
    def eval(cls, a: Any) -> Any:
        if isinstance(a, Negate):
            return a.args[0]
        return _exactly(-float(a)) if a.is_Number else None


class Multiply(Primitive):
    text = "({} * {})"

    @classmethod
    def eval(cls, a: Any, b: Any) -> Any:
        for one, other in ((a, b), (b, a)):
            if one is S.One or one is S.NegativeOne:
                return other if one is S.One else Negate(other)
        return _exactly(float(a) * float(b)) if a.is_Number and b.is_Number else None


class Divide(Primitive):
    text = "({} / {})"

    @classmethod
    def eval(cls, a: Any, b: Any) -> Any:
        if b is S.One:
            return a
        # Written out in torch 2.11's derivative of silu, whose value has it as a primitive.
        if a is S.One and isinstance(b, Add) and b.args[1] is S.One and isinstance(b.args[0], Exp):
            return Sigmoid(Negate(b.args[0].args[0]))
        return _exactly(float(a) / float(b)) if a.is_Number and b.is_Number and b is not S.Zero else None


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
Both = _primitive("Both", "({} & {})", Condition)
Either = _primitive("Either", "({} | {})", Condition)
OneOf = _primitive("OneOf", "({} ^ {})", Condition)
Not = _primitive("Not", "({} == 0)", Condition)


def _exactly(number: float) -> Any:
    """Whole numbers as such, so that factors of 1.0 disappear."""
    if math.isfinite(number):
        return sympy.Integer(int(number)) if number == int(number) else sympy.Float(number, 17)
    return S.NaN if math.isnan(number) else S.Infinity if number > 0 else S.NegativeInfinity


# -- rules
# ------------------------------------------------------------------------------------------------------


def _as_number(x: Any) -> Any:
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
        return Either(Both(condition, a), Both(Not(condition), b))
    return Where(_as_condition(condition), _as_number(a), _as_number(b))


def _on_numbers(function: Any) -> Callable[..., Any]:
    """For arguments among which there may be conditions, which count as 0 and 1."""
    return lambda *args, **kwargs: function(*map(_as_number, args), **kwargs)


def _clamp(x: Any, low: Any = None, high: Any = None, *, min: Any = None, max: Any = None) -> Any:
    low, high = low if min is None else min, high if max is None else max
    x = x if low is None else Maximum(x, low)
    return x if high is None else Minimum(x, high)


def _of_numbers(function: Any) -> Callable[..., Any]:
    """Of a NaN and a number the number."""
    return lambda a, b: Where(NotEqual(a, a), b, Where(NotEqual(b, b), a, function(a, b)))


def _divide(a: Any, b: Any, rounding_mode: str | None = None) -> Any:
    if rounding_mode is not None:
        raise Underivable(f"a division that rounds ({rounding_mode})")
    return Divide(a, b)


def _power(x: Any, exponent: Any) -> Any:
    if x.is_Number and float(x) > 0:
        return Exp2(exponent) if x == 2 else Exp(Multiply(exponent, _exactly(math.log(x))))
    if not exponent.is_Number or not math.isfinite(exponent):
        raise Underivable(f"a power of {x}" if x.is_Number else "a power whose exponent is not a number")
    if exponent < 0:
        return Divide(S.One, _power(x, -exponent))
    whole = math.floor(exponent)
    result, square, rest = S.One, x, whole
    while rest:
        result = Multiply(result, square) if rest & 1 else result
        rest >>= 1
        square = Multiply(square, square) if rest else square
    if exponent == whole:
        return result
    fraction = _exactly(float(exponent) - whole)  # in (0, 1): the error of the logarithm does not grow
    return Multiply(result, Sqrt(x) if float(fraction) == 0.5 else Exp(Multiply(fraction, Log(x))))


def _cast(x: Any, *args: Any, **kwargs: Any) -> Any:
    dtype = next((a for a in (*args, *kwargs.values()) if isinstance(a, torch.dtype)), torch.float32)
    if dtype is torch.bool:
        return _as_condition(x)
    if not dtype.is_floating_point or dtype.itemsize < 2:  # a cast to 8 bits is meant to round
        raise Underivable(f"a cast to {dtype}")
    return _as_number(x)


def _constant(value: Any, **_: Any) -> Any:
    return NotEqual(_exactly(value), S.Zero) if isinstance(value, bool) else value


def _filled(value: Any) -> Callable[..., Any]:
    return lambda *_, **__: value


# aten and prims names (without overload) -> rule
_RULES: dict[str, Callable[..., Any]] = {
    **{
        name: _on_numbers(function)
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
            "log10": lambda a: Multiply(Log(a), _exactly(1 / math.log(10))),
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
            "fmax": _of_numbers(Maximum),
            "fmin": _of_numbers(Minimum),
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
    "logical_and": _logical(Both),
    "logical_or": _logical(Either),
    "logical_xor": _logical(OneOf),
    "logical_not": _logical(Not),
    **dict.fromkeys(("bitwise_and", "__and__"), _bitwise(Both)),
    **dict.fromkeys(("bitwise_or", "__or__"), _bitwise(Either)),
    **dict.fromkeys(("bitwise_xor", "__xor__"), _bitwise(OneOf)),
    "bitwise_not": _bitwise(Not),
    **dict.fromkeys(("_to_copy", "convert_element_type"), _cast),
    **dict.fromkeys(("clone", "detach", "alias", "view_of", "lift_fresh", "lift_fresh_copy"), lambda x, **_: x),
    **dict.fromkeys(("expand", "broadcast_in_dim"), lambda x, *_, **__: x),
    "copy_": lambda _, x, *__: x,
    **dict.fromkeys(("zeros", "zeros_like", "new_zeros", "_efficientzerotensor"), _filled(S.Zero)),
    **dict.fromkeys(("ones", "ones_like", "new_ones"), _filled(S.One)),
    **dict.fromkeys(("empty", "empty_like", "empty_permuted", "new_empty"), _filled(None)),
    **dict.fromkeys(("full", "full_like", "fill"), lambda _, value, **__: _constant(value)),
    "new_full": lambda _, size, value, **__: _constant(value),
    "scalar_tensor": _constant,
}


# -- from aten to SymPy
# ------------------------------------------------------------------------------------------------------


def formula_of(expr: Expr, names: Sequence[str] | None = None) -> Any:
    """The SymPy expression of an expression of the variables `names`, which become symbols.

    Raises:
        Underivable: there is no rule for something in it.
    """
    return _formulas(canonical(expr), tuple(variables(expr) if names is None else names), None, ())[0]


def with_gradients(expr: Expr, grad: str, wrt: Sequence[str], ones: Sequence[str] = ()) -> list[Any]:
    """[expr, grad * d expr / d wrt[0], ...], the variables named in `ones` (and `grad`, if it is) being 1."""
    others = [name for name in variables(expr) if name not in wrt]
    value, *gradients = _formulas(canonical(expr), (*wrt, *others), grad, tuple(ones))
    return [value, *gradients[: len(wrt)]]


def symbols_of(formula: Any) -> set[str]:
    """Names of the variables that occur."""
    return {s.name for s in _operands_first([formula]) if s.is_Symbol}


@functools.lru_cache(maxsize=1024)
def _formulas(text: str, names: tuple[str, ...], grad: str | None, ones: tuple[str, ...]) -> tuple[Any, ...]:
    """The value, and with `grad` its product with the derivative by each of the names."""

    def read() -> tuple[Any, ...]:
        try:
            return _read(text, names, grad, ones, contextlib.nullcontext())
        except _NoRule as reason:
            # Perhaps a derivative without decomposition: then decompose what it is the derivative of.
            try:
                return _read(text, names, grad, ones, _Decomposed())
            except Underivable:
                raise reason from None

    return in_fresh_thread(read)


def _read(text: str, names: Sequence[str], grad: str | None, ones: Sequence[str], above: Any) -> tuple[Any, ...]:
    reader = _Reader()
    try:
        with reader, above:
            inputs = [reader.input(S.One if name in ones else Symbol(name)) for name in names]
            value = program(text)(dict(zip(names, inputs, strict=True)))
            if not isinstance(value, torch.Tensor):
                raise Underivable(f"{value} instead of an expression")
            if not value.dtype.is_floating_point:
                raise Underivable(f"a result in {value.dtype}")
            gradients: Sequence[Any] = ()
            if grad is not None:
                gradients = [None] * len(names)
                if value.requires_grad:
                    seed = reader.input(S.One if grad in ones else Symbol(grad)).to(value.dtype)
                    gradients = torch.autograd.grad(value, inputs, seed, allow_unused=True)
        return tuple(S.Zero if t is None else _as_number(reader.value_of(t)) for t in (value, *gradients))
    except Underivable:
        raise
    except Exception as error:  # whatever torch raises for what it does not take
        reason = (str(error).splitlines() or [""])[0]
        raise Underivable(f"something that torch cannot run ({type(error).__name__}: {reason})") from error


class _Reader(TorchDispatchMode):
    """Runs ATen calls on small tensors, and keeps for each tensor the SymPy expression of its elements.

    What has no rule is taken apart by torch's own decomposition.
    """

    def __init__(self) -> None:
        super().__init__()
        self.values: dict[int, Any] = {}
        self.known: dict[Any, Any] = {}
        self.alive: list[torch.Tensor] = []  # ids stay unique while the tensors live
        self.within: list[str] = []  # what is being decomposed

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # as in `ir.derivative`

    def input(self, value: Any) -> torch.Tensor:
        # float32 whatever the call computes in: no promotions to undo.
        tensor = torch.ones((2, 3), dtype=torch.float32, device="cpu", requires_grad=True)
        return self._keep(tensor, value)

    def _keep(self, tensor: torch.Tensor, value: Any) -> torch.Tensor:
        # The same object for equal expressions: it takes no time to see that they are.
        self.values[id(tensor)] = self.known.setdefault(value, value)
        self.alive.append(tensor)
        return tensor

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = kwargs or {}, _base_name(func)
        if name not in _RULES:
            parts = decomposition_table.get(func, func.decompose)
            self.within.append(name)
            with self:
                output = parts(*args, **kwargs)
            if output is NotImplemented:
                raise _NoRule(f"{' in '.join(dict.fromkeys([name, self.within[0]]))}, for which there is no rule")
            self.within.pop()
            return output
        output = func(*args, **kwargs)
        try:
            value = _RULES[name](*map(self.value_of, args), **{k: self.value_of(v) for k, v in kwargs.items()})
        except (TypeError, AttributeError) as error:
            raise Underivable(f"{name} with arguments {args[1:]} {kwargs}") from error
        return self._keep(output, value)

    def value_of(self, argument: Any) -> Any:
        if isinstance(argument, torch.Tensor):
            # Unknown is only a constant that torch made from a number.
            known = self.values.get(id(argument))
            return _exactly(argument.item()) if known is None and id(argument) not in self.values else known
        if isinstance(argument, (int, float)) and not isinstance(argument, bool):
            return _exactly(argument)
        return argument


class _Decomposed(TorchFunctionMode):
    """Decomposes above autograd, which then differentiates the parts."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if isinstance(func, torch._ops.OpOverload) and _base_name(func) not in _RULES:
            func = decomposition_table.get(func, func)
        return func(*args, **(kwargs or {}))


def _base_name(op: Any) -> str:
    """`silu` of aten::silu.out."""
    return op._schema.name.rpartition("::")[2]


# -- from SymPy to source text
# ------------------------------------------------------------------------------------------------------


def source(name: str, parameters: Sequence[str], results: Sequence[Any]) -> str:
    """The text of a Python function of `parameters` that returns `results` (a tuple if there are several).

    It is written for Triton: `tl.log` and the like, and the functions of `triton.elementary`.
    """
    order = _operands_first(results)
    uses = collections.Counter(results)
    for expr in order:
        uses.update(expr.args)
    texts: dict[Any, str] = {}
    lines: list[str] = []
    for expr in order:
        texts[expr] = text = _text(expr, texts)
        # Long ones too, for the reader, and because Python bounds how deep parentheses may be.
        if expr.args and (uses[expr] > 1 or len(text) > 90):
            texts[expr] = f"t{len(lines)}"
            lines.append(f"    {texts[expr]} = {text}")
    zeros = f"tl.where({parameters[0]} == {parameters[0]}, 0.0, 0.0)"
    returned = [texts[r] if symbols_of(r) else zeros if r is S.Zero else f"{zeros} + {texts[r]}" for r in results]
    return "\n".join([f"def {name}({', '.join(parameters)}):", *lines, f"    return {', '.join(returned)}", ""])


def _operands_first(formulas: Sequence[Any]) -> list[Any]:
    """Each subexpression once. Without recursion: they may be nested deeper than Python's calls."""
    order: dict[Any, None] = {}
    stack = [(f, False) for f in reversed(formulas)]
    while stack:
        expr, done = stack.pop()
        if done:
            order[expr] = None
        elif expr not in order:
            stack += [(expr, True), *((a, False) for a in reversed(expr.args))]
    return list(order)


def _text(expr: Any, texts: Mapping[Any, str]) -> str:
    if expr.is_Symbol:
        return expr.name
    if expr.is_Number:
        return _number(expr)
    arguments = [texts[a] for a in expr.args]
    if all(a.is_Number for a in expr.args):  # for Python to leave it to Triton
        arguments = [f"tl.cast({a}, tl.float32)" for a in arguments]
    return expr.text.format(*arguments)


def _number(value: Any) -> str:
    number = float(value)
    if not math.isfinite(single := ctypes.c_float(number).value):
        return f'float("{single}")'
    # What float32 has only denormals for, Triton would take for float64.
    return f"tl.cast({number!r}, tl.float32)" if 0 < abs(number) < 2.0**-126 else repr(number)
