"""Rules for products: linear, matmul, einsum, convolutions with kernels of one element, grouped products."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import fx

from ..term import Term
from .rule_registry import TermBuilder, cast_to_result, rule

_LETTERS = "abcdefhijklmnopqrstuvw"


@rule("linear")
def _linear(
    builder: TermBuilder,
    n: fx.Node,
    x: Term,
    w: Term,
    b: Term | None = None,
    *,
    bias: Term | None = None,
) -> Term:
    b = bias if b is None else b
    x, w, b = cast_to_result(builder, n, x, w, b)
    lead = _LETTERS[: len(x.shape) - 1]
    out = builder.terms.einsum([lead + "y", "zy"], lead + "z", [x, w])
    return out if b is None else builder.terms.pointwise("add", out, b)


@rule("mm", "bmm", "mv", "dot", "matmul")
def _matmul(builder: TermBuilder, n: fx.Node, x: Term, w: Term, **kw: Any) -> Term | None:
    x, w = cast_to_result(builder, n, x, w)
    a, b = len(x.shape), len(w.shape)
    lead = max(a, b, 2) - 2
    batch = _LETTERS[:lead]
    left = "y" if a == 1 else batch[lead - (a - 2) :] + "xy"
    right = "y" if b == 1 else batch[lead - (b - 2) :] + "yz"
    for label in set(left) & set(right) & set(batch):
        if x.shape[left.index(label)] != w.shape[right.index(label)]:
            big = max(x.shape[left.index(label)], w.shape[right.index(label)])
            x = builder.terms.expand(x, [big if s == label else m for s, m in zip(left, x.shape, strict=True)])
            w = builder.terms.expand(w, [big if s == label else m for s, m in zip(right, w.shape, strict=True)])
    return builder.terms.einsum([left, right], batch + ("x" if a > 1 else "") + ("z" if b > 1 else ""), [x, w])


@rule("addmm", "baddbmm", "addmv")
def _addmm(
    builder: TermBuilder, n: fx.Node, bias: Term, x: Term, w: Term, *, beta: float = 1, alpha: float = 1
) -> Term:
    bias, x, w = cast_to_result(builder, n, bias, x, w)
    out = (
        builder.terms.einsum(["axy", "ayz"], "axz", [x, w])
        if len(x.shape) == 3
        else builder.terms.einsum(["xy", "yz" if len(w.shape) > 1 else "y"], "xz" if len(w.shape) > 1 else "x", [x, w])
    )
    if alpha != 1:
        out = builder.terms.pointwise("mul", out, builder.terms.const(alpha))
    if beta != 1:
        bias = builder.terms.pointwise("mul", bias, builder.terms.const(beta))
    return builder.terms.pointwise("add", out, bias)


@rule("convolution")
def _convolution(
    builder: TermBuilder,
    n: fx.Node,
    x: Term,
    w: Term,
    b: Term | None,
    stride: list,
    padding: list,
    dilation: list,
    transposed: bool,
    _: Any,
    groups: int,
) -> Term | None:
    """Translate a convolution with a kernel of one element: a product with a matrix, or with one per group."""
    space = len(w.shape) - 2
    if (
        transposed
        or math.prod(w.shape[2:]) != 1
        or any(s != 1 for s in stride)
        or any(padding)
        or len(x.shape) != space + 2
    ):
        return None
    x, w, b = cast_to_result(builder, n, x, w, b)
    at = _LETTERS[:space]
    out, inner = w.shape[0] // groups, w.shape[1]
    x = builder.terms.reshape(x, (x.shape[0], groups, inner, *x.shape[2:]))
    w = builder.terms.reshape(w, (groups, out, inner))
    y = builder.terms.reshape(builder.terms.einsum([f"xgy{at}", "gzy"], f"xgz{at}", [x, w]), n.meta["val"].shape)
    return (
        y
        if b is None
        else builder.terms.pointwise("add", y, builder.terms.reshape(b, (w.shape[0] * out, *[1] * space)))
    )


@rule("einsum")
def _einsum(builder: TermBuilder, n: fx.Node, equation: Any, *operands: Any) -> Term | None:
    if not isinstance(equation, str):
        return None
    parts = list(operands[0]) if isinstance(operands[0], list) else list(operands)
    parts = cast_to_result(builder, n, *parts)
    left, arrow, out = equation.replace(" ", "").partition("->")
    inputs = left.split(",")
    if "..." in equation:
        free = [x for x in "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz" if x not in equation]
        widths = [
            len(t.shape) - len(s.replace("...", "")) if "..." in s else 0 for s, t in zip(inputs, parts, strict=True)
        ]
        dots = "".join(free[: max(widths)])
        inputs = [s.replace("...", dots[len(dots) - k :]) for s, k in zip(inputs, widths, strict=True)]
        out = out.replace("...", dots) if arrow else dots
    if not arrow:
        letters = "".join(inputs)
        out += "".join(sorted(x for x in set(letters) if letters.count(x) == 1 and x not in out))
    if any(len(set(s)) != len(s) for s in [*inputs, out]):
        return None  # diagonals
    sizes: dict[str, int] = {}
    for s, t in zip(inputs, parts, strict=True):
        for x, m in zip(s, t.shape, strict=True):
            sizes[x] = m if m != 1 else sizes.get(x, 1)
    parts = [builder.terms.expand(t, [sizes[x] for x in s]) for s, t in zip(inputs, parts, strict=True)]
    return builder.terms.einsum(inputs, out, parts)


@rule("_grouped_mm", "grouped_mm", "grouped_mm_fallback")
def _grouped_mm(
    builder: TermBuilder, n: fx.Node, x: Term, w: Term, offs: Any = None, bias: Any = None, *rest: Any, **kw: Any
) -> Term | None:
    node = n.args[2] if len(n.args) > 2 else n.kwargs.get("offs")
    if node is None or bias is not None or len(x.shape) != 2 or len(w.shape) != 3:
        return None
    bounds = [0, *builder.numbers(node).tolist()]
    groups = torch.arange(len(bounds) - 1).repeat_interleave(torch.tensor(bounds).diff())
    used = builder.terms.slice(x, 0, 0, bounds[-1])
    weights = builder.terms.index(w, (0,), groups[None], 0)
    out = builder.terms.einsum(["by", "byz"], "bz", [used, weights])
    if bounds[-1] < x.shape[0]:
        out = builder.terms.cat([out, builder.terms.const(math.nan, (x.shape[0] - bounds[-1], w.shape[2]))], 0)
    return out
