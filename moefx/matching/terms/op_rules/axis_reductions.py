"""Rules for ops that act along some axes: sums, means, softmax, norms."""

# fx types an argument as anything that a program can hold: the code knows better.
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportOptionalMemberAccess=false
# pyright: reportIndexIssue=false, reportOptionalSubscript=false, reportOptionalIterable=false, reportCallIssue=false
# pyright: reportAssignmentType=false, reportReturnType=false, reportOperatorIssue=false, reportUnhashable=false
# pyright: reportGeneralTypeIssues=false

from __future__ import annotations

import math
from typing import Any

from torch import fx

from ...graph_nodes import op_name
from ..term import Term
from .rule_registry import TermBuilder, rule


def _dims(t: Term, dim: Any) -> list[int]:
    if dim is None or dim == []:
        return list(range(len(t.shape)))
    return [d % len(t.shape) for d in (dim if isinstance(dim, (list, tuple)) else [dim])]


def _reshape_to_result(S: TermBuilder, n: fx.Node, out: Term) -> Term:
    return S.T.reshape(out, n.meta["val"].shape)


def _as_result(S: TermBuilder, n: fx.Node, a: Term) -> Term:
    """Cast the operand to the dtype of the result, as the op (by its `dtype`) or autocast does first."""
    old, new = n.args[0].meta["val"].dtype, n.meta["val"].dtype
    cast = old != new and old.is_floating_point
    return S.T.pw("cast", a, dtype=str(new).removeprefix("torch.")) if cast else a


@rule("sum")
def _sum(S: TermBuilder, n: fx.Node, a: Term, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Term:
    return _reshape_to_result(S, n, S.T.sum(_as_result(S, n, a), _dims(a, dim)))


@rule("mean")
def _mean(S: TermBuilder, n: fx.Node, a: Term, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Term:
    a = _as_result(S, n, a)
    dims = _dims(a, dim)
    return _reshape_to_result(S, n, S.T.pw("div", S.T.sum(a, dims), S.T.const(math.prod(a.shape[d] for d in dims))))


@rule("_softmax", "_log_softmax", "softmax", "log_softmax")
def _softmax(S: TermBuilder, n: fx.Node, a: Term, dim: int, *_: Any) -> Term:
    return S.T.row("log_softmax" if "log" in op_name(n) else "softmax", [dim], True, (), a)


@rule("cumsum", "cumprod", "logcumsumexp")
def _scan(S: TermBuilder, n: fx.Node, a: Term, dim: int, **kw: Any) -> Term:
    return S.T.row(op_name(n), [dim], True, (), a)


@rule("amax", "amin", "logsumexp", "prod", "argmax")
def _reduce(S: TermBuilder, n: fx.Node, a: Term, dim: Any = None, keepdim: bool = False, **kw: Any) -> Term | None:
    if kw.get("dtype") is not None:
        return None
    return _reshape_to_result(S, n, S.T.row(op_name(n), _dims(a, dim), False, (), a))


@rule("linalg_vector_norm")
def _vector_norm(
    S: TermBuilder,
    n: fx.Node,
    a: Term,
    ord: float = 2,
    dim: Any = None,
    keepdim: bool = False,
    *,
    dtype: Any = None,
) -> Term | None:
    return (
        None
        if dtype is not None
        else _reshape_to_result(S, n, S.T.row("linalg_vector_norm", _dims(a, dim), False, (ord,), a))
    )


@rule("var")
def _var(
    S: TermBuilder,
    n: fx.Node,
    a: Term,
    dim: Any = None,
    unbiased: Any = None,
    keepdim: bool = False,
    *,
    correction: Any = None,
) -> Term | None:
    if isinstance(unbiased, bool):
        correction = 1 if unbiased else 0
    return _reshape_to_result(S, n, S.T.row("var", _dims(a, dim), False, (1 if correction is None else correction,), a))


@rule("rms_norm")
def _rms_norm(S: TermBuilder, n: fx.Node, x: Term, shape: Any, weight: Term | None = None, eps: Any = None) -> Term:
    out = S.T.row("rms_norm", range(-len(shape), 0), True, (eps,), _as_result(S, n, x))
    return out if weight is None else S.T.pw("mul", out, weight)


def norm(S: TermBuilder, bundle: fx.Node) -> Term:
    """Translate layer norm or RMS norm: normalise, then scale and shift."""
    layer = op_name(bundle) == "native_layer_norm"
    x, shape, weight, *rest = (S.value(a) for a in bundle.args)
    bias, eps = rest if layer else (None, rest[0])
    out = S.T.row("layer_norm" if layer else "rms_norm", range(-len(shape), 0), True, (eps,), x)
    if weight is not None:
        out = S.T.pw("mul", out, weight)
    if bias is not None:
        out = S.T.pw("add", out, bias)
    return out if bundle.meta["grad"] else S.T.pw("detach", out)


def batch_norm(S: TermBuilder, bundle: fx.Node) -> Term | None:
    """Translate batch norm in eval mode: elementwise, with buffers as statistics."""
    x, weight, bias, mean, var = (S.value(a) for a in bundle.args[:5])
    if mean is None or var is None:
        return None
    T, channels = S.T, (mean.shape[0], *[1] * (len(x.shape) - 2))

    def row(t: Term) -> Term:
        return T.reshape(t, channels)

    out = T.pw("mul", T.pw("sub", x, row(mean)), row(T.pw("rsqrt", T.pw("add", var, T.const(bundle.args[7])))))
    if weight is not None:
        out = T.pw("mul", out, row(weight))
    if bias is not None:
        out = T.pw("add", out, row(bias))
    return out if bundle.meta["grad"] else T.pw("detach", out)
