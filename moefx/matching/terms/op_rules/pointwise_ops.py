"""Rules for constants, and for pointwise ops whose schema does not tell enough for a generic rule."""

from __future__ import annotations

from typing import Any

from torch import fx

from ....ir.node_values import get_op_name
from ..term import Term
from .rule_registry import TermBuilder, as_term, rule


@rule("add", "sub", "rsub", "mul", "div", "true_divide")
def _arithmetic(
    builder: TermBuilder, n: fx.Node, a: Any, b: Any, *, alpha: float = 1, rounding_mode: str | None = None
) -> Term | None:
    name = get_op_name(n)
    a, b = as_term(builder, a), as_term(builder, b)
    if rounding_mode is not None:
        return builder.terms.expand(
            builder.terms.pointwise("div.Tensor_mode", a, b, rounding_mode=rounding_mode), n.meta["val"].shape
        )
    if name == "rsub":
        name, a, b = "sub", b, a
    if alpha != 1:
        b = builder.terms.pointwise("mul", b, builder.terms.const(alpha))
    out = builder.terms.pointwise({"true_divide": "div"}.get(name, name), a, b)
    return builder.terms.expand(out, n.meta["val"].shape)


@rule("where")
def _where(builder: TermBuilder, n: fx.Node, c: Term, a: Any, b: Any) -> Term:
    return builder.terms.expand(
        builder.terms.pointwise("where", c, as_term(builder, a), as_term(builder, b)), n.meta["val"].shape
    )


@rule("masked_fill")
def _masked_fill(builder: TermBuilder, n: fx.Node, a: Term, mask: Term, value: Any) -> Term:
    return builder.terms.expand(builder.terms.pointwise("where", mask, as_term(builder, value), a), n.meta["val"].shape)


@rule("_to_copy", "to", "type_as")
def _cast(builder: TermBuilder, n: fx.Node, a: Term, *_: Any, **kw: Any) -> Term:
    old, new = n.args[0].meta["val"].dtype, n.meta["val"].dtype
    return a if old == new else builder.terms.pointwise("cast", a, dtype=str(new).removeprefix("torch."))


@rule("copy")
def _copy(builder: TermBuilder, n: fx.Node, a: Term, b: Term, *_: Any) -> Term:
    source = n.args[1].meta["val"].dtype
    new = n.meta["val"].dtype
    if source != new and source.is_floating_point:
        b = builder.terms.pointwise("cast", b, dtype=str(new).removeprefix("torch."))
    return builder.terms.expand(b, a.shape)


@rule("clone", "contiguous", "lift_fresh", "alias", "lift")
def _same(builder: TermBuilder, n: fx.Node, a: Term, *_: Any, **kw: Any) -> Term:
    return a


@rule("detach")
def _detach(builder: TermBuilder, n: fx.Node, a: Term) -> Term:
    return builder.terms.pointwise("detach", a)


@rule("fill", "full", "full_like", "new_full")
def _fill(builder: TermBuilder, n: fx.Node, *args: Any, **kw: Any) -> Term:
    return builder.terms.expand(as_term(builder, args[-1]), n.meta["val"].shape)


@rule("zero", "zeros", "zeros_like", "new_zeros")
def _zeros(builder: TermBuilder, n: fx.Node, *_: Any, **kw: Any) -> Term:
    return builder.terms.const(0, n.meta["val"].shape)


@rule("ones", "ones_like", "new_ones")
def _ones(builder: TermBuilder, n: fx.Node, *_: Any, **kw: Any) -> Term:
    return builder.terms.const(1, n.meta["val"].shape)


@rule("glu")
def _glu(builder: TermBuilder, n: fx.Node, a: Term, dim: int = -1) -> Term:
    half = a.shape[dim] // 2
    gate = builder.terms.pointwise("sigmoid.default", builder.terms.slice(a, dim, half, 2 * half))
    return builder.terms.pointwise("mul", builder.terms.slice(a, dim, 0, half), gate)


@rule("_prelu_kernel")
def _prelu(builder: TermBuilder, n: fx.Node, x: Term, w: Term) -> Term:
    return builder.terms.expand(
        builder.terms.pointwise(
            "where", builder.terms.pointwise("gt.Scalar", x, 0), x, builder.terms.pointwise("mul", x, w)
        ),
        x.shape,
    )
