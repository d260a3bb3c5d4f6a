"""Functions that Triton's language lacks, in float32; and derived formulas (see `formula`) as functions of Triton.

They are as accurate for tiny arguments as for others, and agree with torch for infinities and NaNs.
"""

from __future__ import annotations

import functools
import hashlib
import linecache
from collections.abc import Sequence
from typing import Any

import triton
import triton.language as tl

from .. import formula


@triton.jit
def expm1(x):
    series = 1.0 / 2 + x * (1.0 / 6 + x * (1.0 / 24 + x * (1.0 / 120 + x * (1.0 / 720 + x * (1.0 / 5040 + x / 40320)))))
    return tl.where(tl.abs(x) < 0.5, x + x * x * series, tl.exp(x) - 1.0)


@triton.jit
def log1p(x):
    u = 1.0 + x
    # The rounding of u - 1 compensates for the same rounding in u.
    ratio = tl.where(u - 1.0 == x, 1.0, x / (u - 1.0))
    return tl.where(u == 1.0, x, tl.log(u) * ratio)


@triton.jit
def tanh(x):
    decay = tl.exp(-2.0 * tl.abs(x))
    large = (1.0 - decay) / (1.0 + decay)
    square = x * x
    series = x * (1.0 + square * (-1.0 / 3 + square * (2.0 / 15 + square * (-17.0 / 315 + square * (62.0 / 2835)))))
    return tl.where(tl.abs(x) < 0.25, series, tl.where(x < 0, -large, large))


@triton.jit
def sinh(x):
    half = tl.exp(0.5 * tl.abs(x))  # its square may be finite although exp overflows
    large = 0.5 * half * half
    return tl.where(tl.abs(x) < 20.0, 0.5 * (expm1(x) - expm1(-x)), tl.where(x < 0, -large, large))


@triton.jit
def cosh(x):
    half = tl.exp(0.5 * tl.abs(x))
    return 0.5 * half * half + 0.5 / half / half


@triton.jit
def asinh(x):
    a = tl.abs(x)
    small = log1p(a + a * a / (1.0 + tl.sqrt(1.0 + a * a)))
    value = tl.where(a < 1e9, small, tl.log(a) + 0.6931471805599453)
    return tl.where(x < 0, -value, value)


@triton.jit
def atan(x):
    a = tl.abs(x)
    large, middle = a > 2.414213562373095, a > 0.4142135623730950  # tan of 3/8 and 1/8 pi
    start = tl.where(large, 1.5707963267948966, tl.where(middle, 0.7853981633974483, 0.0))
    r = tl.where(large, -1.0 / a, tl.where(middle, (a - 1.0) / (a + 1.0), a))
    s = r * r
    # Moshier, Cephes
    series = -3.33329491539e-1 + s * (1.99777106478e-1 + s * (-1.38776856032e-1 + s * 8.05374449538e-2))
    value = start + (r + r * s * series)
    return tl.where(x < 0, -value, value)


@triton.jit
def erfc(x):
    a = tl.where(tl.abs(x) < 12.0, tl.abs(x), 12.0)  # 0 from there on
    t = 1.0 / (1.0 + 0.5 * a)
    # Press et al., Numerical Recipes, 6.2; Horner's scheme, relative error 1.2e-7
    series = 1.48851587 + t * (-0.82215223 + t * 0.17087277)
    series = 0.09678418 + t * (-0.18628806 + t * (0.27886807 + t * (-1.13520398 + t * series)))
    series = -1.26551223 + t * (1.00002368 + t * (0.37409196 + t * series))
    rounded = tl.floor(a * 16.0) / 16.0  # the square of this is exact
    value = t * tl.exp(-rounded * rounded) * tl.exp((rounded - a) * (rounded + a) + series)
    return tl.where(x != x, x, tl.where(x < 0, 2.0 - value, value))


@triton.jit
def hypot(x, y):
    a, b = tl.abs(x), tl.abs(y)
    large, small = tl.maximum(a, b, tl.PropagateNan.ALL), tl.minimum(a, b, tl.PropagateNan.ALL)
    ratio = tl.where(small == large, 1.0, small / large)
    infinite = (a == float("inf")) | (b == float("inf"))  # even beside a NaN
    return tl.where(infinite, float("inf"), large * tl.sqrt(1.0 + ratio * ratio))


@triton.jit
def sign(x):
    return (x > 0).to(tl.float32) - (x < 0).to(tl.float32)


@triton.jit
def exp(x):
    return tl.exp(x)


@triton.jit
def sigmoid(x):
    return tl.sigmoid(x)


@triton.jit
def _ptx(instruction: tl.constexpr, x):
    return tl.inline_asm_elementwise(instruction + ".approx.ftz.f32 $0, $1;", "=f,f", [x], tl.float32, True, 1)


@triton.jit
def ptx_exp(x):
    return _ptx("ex2", x * 1.4426950408889634)


@triton.jit
def ptx_sigmoid(x):
    return _ptx("rcp", 1.0 + _ptx("ex2", x * -1.4426950408889634))


_SCOPE = dict(
    **dict(exp=exp, sigmoid=sigmoid, expm1=expm1, log1p=log1p, tanh=tanh, sinh=sinh, cosh=cosh, asinh=asinh),
    **dict(atan=atan, erfc=erfc, hypot=hypot, sign=sign, tl=tl),
)
# As exact as Triton's own, except that results below 1e-38 become 0. Triton's take twice the instructions.
_PTX = dict(exp=ptx_exp, sigmoid=ptx_sigmoid)


@functools.lru_cache(maxsize=1024)
def _function(text: str, ptx: bool) -> Any:
    """Return the Triton function of a source text. The same text is the same function."""
    name = text.partition("(")[0].removeprefix("def ")
    filename = f"<moefx {hashlib.sha256(text.encode()).hexdigest()[:16]}>"
    # Triton reads the source of a function back from its file.
    linecache.cache[filename] = (len(text), None, text.splitlines(keepends=True), filename)
    scope = dict(_SCOPE | (_PTX if ptx else {}), __name__=__name__)
    exec(compile(text, filename, "exec"), scope)
    return triton.jit(scope[name])


def build_function(name: str, parameters: Sequence[str], results: Sequence[Any], ptx: bool = False) -> Any:
    """Build a Triton function from the text of `formula.write_function`.

    Args:
        ptx: use PTX instructions, for NVIDIA's GPUs only.
    """
    return _function(formula.write_function(name, parameters, results), ptx)
