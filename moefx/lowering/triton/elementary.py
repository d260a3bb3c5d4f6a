"""Functions that Triton's language lacks, in float32; and derived formulas (see `epilogue`) as functions of Triton."""

from __future__ import annotations

import functools
import linecache
import zlib
from collections.abc import Sequence
from typing import Any

import triton
import triton.language as tl

from .. import epilogue


@triton.jit
def expm1(x):
    """Without the cancellation near 0 (Kahan)."""
    e = tl.exp(x)
    return tl.where(e == 1.0, x, tl.where(e - 1.0 == -1.0, -1.0, (e - 1.0) * x / tl.log(e)))


@triton.jit
def log1p(x):
    u = 1.0 + x
    return tl.where(u == 1.0, x, tl.log(u) * x / (u - 1.0))


@triton.jit
def tanh(x):
    decay = tl.exp(-2.0 * tl.abs(x))
    large = (1.0 - decay) / (1.0 + decay)
    square = x * x
    series = x * (1.0 + square * (-1.0 / 3 + square * (2.0 / 15 + square * (-17.0 / 315 + square * (62.0 / 2835)))))
    return tl.where(tl.abs(x) < 0.25, series, tl.where(x < 0, -large, large))


@triton.jit
def sign(x):
    return (x > 0).to(tl.float32) - (x < 0).to(tl.float32)


@triton.jit
def power(x, n: tl.constexpr):
    result = x
    for _ in tl.static_range(n - 1):
        result = result * x
    return result


@functools.lru_cache(maxsize=1024)
def _function(text: str) -> Any:
    """The Triton function of a source text. The same text is the same function."""
    name = text.partition("(")[0].removeprefix("def ")
    filename = f"<moefx {zlib.crc32(text.encode()):08x}>"
    # Triton reads the source of what it compiles back from the file.
    linecache.cache[filename] = (len(text), None, text.splitlines(keepends=True), filename)
    scope = dict(
        __name__=__name__, tl=tl, expm1=expm1, log1p=log1p, tanh=tanh, sign=sign, power=power
    )
    exec(compile(text, filename, "exec"), scope)
    return triton.jit(scope[name])


def derived(name: str, parameters: Sequence[str], results: Sequence[Any]) -> Any:
    """`epilogue.source` as a function for kernels."""
    return _function(epilogue.source(name, parameters, results))
