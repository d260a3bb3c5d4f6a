"""Rules for ops that act along some axes: sums, means, softmax, norms."""

from __future__ import annotations

import math
from typing import Any

from torch import fx

from ....ir.node_values import get_op_name
from ..term import Term
from .rule_registry import TermBuilder, cast_to_result, rule


def _dims(t: Term, dim: Any) -> list[int]:
    if dim is None or dim == [] or not t.shape:  # a dim of a scalar, 0 or -1, is no axis
        return list(range(len(t.shape)))
    return [d % len(t.shape) for d in (dim if isinstance(dim, (list, tuple)) else [dim])]


def _reshape_to_result(builder: TermBuilder, n: fx.Node, out: Term) -> Term:
    return builder.terms.reshape(out, n.meta["val"].shape)


@rule("sum")
def _sum(
    builder: TermBuilder, n: fx.Node, a: Term, dim: Any = None, keepdim: bool = False, *, dtype: Any = None
) -> Term:
    (a,) = cast_to_result(builder, n, a)
    return _reshape_to_result(builder, n, builder.terms.sum(a, _dims(a, dim)))


@rule("mean")
def _mean(
    builder: TermBuilder, n: fx.Node, a: Term, dim: Any = None, keepdim: bool = False, *, dtype: Any = None
) -> Term:
    (a,) = cast_to_result(builder, n, a)
    dims = _dims(a, dim)
    return _reshape_to_result(
        builder,
        n,
        builder.terms.pointwise(
            "div", builder.terms.sum(a, dims), builder.terms.const(math.prod(a.shape[d] for d in dims))
        ),
    )


@rule("_softmax", "_log_softmax", "softmax", "log_softmax")
def _softmax(builder: TermBuilder, n: fx.Node, a: Term, dim: int, *_: Any, **kw: Any) -> Term:
    (a,) = cast_to_result(builder, n, a)
    return builder.terms.axis_op("log_softmax" if "log" in get_op_name(n) else "softmax", [dim], True, (), a)


@rule("cumsum", "cumprod", "logcumsumexp")
def _scan(builder: TermBuilder, n: fx.Node, a: Term, dim: int, **kw: Any) -> Term:
    (a,) = cast_to_result(builder, n, a)
    return builder.terms.axis_op(get_op_name(n), [dim], True, (), a)


@rule("amax", "amin", "logsumexp", "prod", "argmax")
def _reduce(builder: TermBuilder, n: fx.Node, a: Term, dim: Any = None, keepdim: bool = False, **kw: Any) -> Term:
    if get_op_name(n) != "argmax":
        (a,) = cast_to_result(builder, n, a)
    return _reshape_to_result(builder, n, builder.terms.axis_op(get_op_name(n), _dims(a, dim), False, (), a))


@rule("linalg_vector_norm")
def _vector_norm(
    builder: TermBuilder,
    n: fx.Node,
    a: Term,
    ord: float = 2,
    dim: Any = None,
    keepdim: bool = False,
    *,
    dtype: Any = None,
) -> Term:
    (a,) = cast_to_result(builder, n, a)
    out = builder.terms.axis_op("linalg_vector_norm", _dims(a, dim), False, (ord,), a)
    return _reshape_to_result(builder, n, out)


@rule("var")
def _var(
    builder: TermBuilder,
    n: fx.Node,
    a: Term,
    dim: Any = None,
    unbiased: Any = None,
    keepdim: bool = False,
    *,
    correction: Any = None,
) -> Term | None:
    (a,) = cast_to_result(builder, n, a)
    if isinstance(unbiased, bool):
        correction = 1 if unbiased else 0
    return _reshape_to_result(
        builder, n, builder.terms.axis_op("var", _dims(a, dim), False, (1 if correction is None else correction,), a)
    )


@rule("rms_norm")
def _rms_norm(
    builder: TermBuilder, n: fx.Node, x: Term, shape: Any, weight: Term | None = None, eps: Any = None
) -> Term:
    (x,) = cast_to_result(builder, n, x)
    out = builder.terms.axis_op("rms_norm", range(-len(shape), 0), True, (eps,), x)
    return out if weight is None else builder.terms.pointwise("mul", out, weight)


def norm(builder: TermBuilder, bundle: fx.Node) -> Term:
    """Translate layer norm or RMS norm: normalise, then scale and shift."""
    layer = get_op_name(bundle) == "native_layer_norm"
    x, shape, weight, *rest = (builder.value(a) for a in bundle.args)
    bias, eps = rest if layer else (None, rest[0])
    out = builder.terms.axis_op("layer_norm" if layer else "rms_norm", range(-len(shape), 0), True, (eps,), x)
    if weight is not None:
        out = builder.terms.pointwise("mul", out, weight)
    if bias is not None:
        out = builder.terms.pointwise("add", out, bias)
    return out if bundle.meta["grad"] else builder.terms.pointwise("detach", out)


def batch_norm(builder: TermBuilder, bundle: fx.Node) -> Term | None:
    """Translate batch norm in eval mode: pointwise, with buffers as statistics."""
    x, weight, bias, mean, var = (builder.value(a) for a in bundle.args[:5])
    if mean is None or var is None:
        return None
    terms, channels = builder.terms, (mean.shape[0], *[1] * (len(x.shape) - 2))

    def row(t: Term) -> Term:
        return terms.reshape(t, channels)

    out = terms.pointwise(
        "mul",
        terms.pointwise("sub", x, row(mean)),
        row(terms.pointwise("rsqrt", terms.pointwise("add", var, terms.const(bundle.args[7])))),
    )
    if weight is not None:
        out = terms.pointwise("mul", out, row(weight))
    if bias is not None:
        out = terms.pointwise("add", out, row(bias))
    return out if bundle.meta["grad"] else terms.pointwise("detach", out)
