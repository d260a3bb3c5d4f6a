"""Rules for ops that move elements by integers: every kind of gather and scatter."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import fx

from ....ir.node_values import get_op_name
from ...facts.graph_nodes import depends_on_routing
from ..index_arithmetic import list_coordinates
from ..normal_form import Terms
from ..term import Term
from .rule_registry import TermBuilder, as_term, rule


@rule("index", "_unsafe_index")
def _index(builder: TermBuilder, n: fx.Node, a: Term, _: Any) -> Term:
    nodes = n.args[1]
    dims = [d for d, i in enumerate(nodes) if i is not None]
    indices = torch.stack(torch.broadcast_tensors(*[builder.numbers(nodes[d]) for d in dims]))
    position = dims[0] if dims == list(range(dims[0], dims[-1] + 1)) else 0
    return builder.terms.index(a, dims, indices, position, routed=any(depends_on_routing(nodes[d]) for d in dims))


@rule("index_select")
def _index_select(builder: TermBuilder, n: fx.Node, a: Term, dim: int, _: Any) -> Term:
    if not a.shape:
        return builder.terms.reshape(a, n.meta["val"].shape)
    dim %= len(a.shape)
    indices = builder.numbers(n.args[2]).reshape(1, -1)
    return builder.terms.index(a, (dim,), indices, dim, routed=depends_on_routing(n.args[2]))


@rule("embedding")
def _embedding(
    builder: TermBuilder,
    n: fx.Node,
    weight: Term,
    ids: Any,
    padding_idx: int = -1,
    by_frequency: bool = False,
    *sparse: bool,
) -> Term | None:
    if padding_idx != -1 or by_frequency or any(sparse):  # the gradients differ from those of an index
        return None
    return builder.terms.index(weight, (0,), builder.numbers(n.args[1])[None], 0, routed=depends_on_routing(n.args[1]))


@rule("gather")
def _gather(builder: TermBuilder, n: fx.Node, a: Term, dim: int, _: Any, **kw: Any) -> Term:
    out = gather(builder.terms, a, dim, builder.numbers(n.args[2]))
    return out if n.meta["val"].dim() else builder.terms.reshape(out, ())  # a scalar, as in `quantile`


@rule("take")
def _take(builder: TermBuilder, n: fx.Node, a: Term, _: Any) -> Term:
    flat = builder.terms.reshape(a, (math.prod(a.shape),))
    return builder.terms.index(flat, (0,), builder.numbers(n.args[1])[None], 0, routed=depends_on_routing(n.args[1]))


def _routed_axes(indices: torch.Tensor, dim: int) -> list[int]:
    """Return `dim` and the axes along which an index tensor varies. It is expanded along the others."""
    varies = [
        d for d in range(indices.dim()) if indices.shape[d] > 1 and not (indices == indices.narrow(d, 0, 1)).all()
    ]
    return sorted({dim, *varies})


def gather(terms: Terms, a: Term, dim: int, indices: torch.Tensor) -> Term:
    """Translate `a.gather(dim, indices)`."""
    if not a.shape:
        return a
    if not indices.numel():  # a mask left no tokens
        return terms.const(0, indices.shape)
    dim %= len(a.shape)
    axes = _routed_axes(indices, dim)
    free = [d for d in range(indices.dim()) if d not in axes]
    for d in free:
        a = terms.slice(a, d, 0, indices.shape[d])
    core = indices[tuple(slice(None) if d in axes else 0 for d in range(indices.dim()))]
    grid = list_coordinates(core.shape)
    grid[axes.index(dim)] = core
    out = terms.index(a, axes, grid, 0)
    placed = [*axes, *free]
    return terms.permute(out, [placed.index(d) for d in range(indices.dim())])


def scatter(terms: Terms, base: Term, dim: int, indices: torch.Tensor, source: Term, accumulate: bool) -> Term | None:
    """Translate `base.scatter(dim, indices, source)`, or `scatter_add` if `accumulate`; None for a scalar base."""
    if not base.shape:
        return None
    if not indices.numel():
        return base
    dim %= len(base.shape)
    axes = [d for d in _routed_axes(indices, dim)]
    free = [d for d in range(indices.dim()) if d not in axes]
    if any(indices.shape[d] != base.shape[d] for d in free):
        axes, free = list(range(indices.dim())), []
    source = terms.expand(source, indices.shape) if not source.shape else source
    for d in range(indices.dim()):
        source = terms.slice(source, d, 0, indices.shape[d])
    core = indices[tuple(slice(None) if d in axes else 0 for d in range(indices.dim()))]
    grid = list_coordinates(core.shape)
    grid[axes.index(dim)] = core
    values = terms.permute(source, [*axes, *free])
    values = terms.reshape(values, (core.numel(), *[base.shape[d] for d in free]))
    return terms.index_put(base, axes, grid.reshape(len(axes), -1), values, accumulate)


@rule("scatter", "scatter_with_reduce")
def _scatter(
    builder: TermBuilder,
    n: fx.Node,
    a: Term,
    dim: int,
    _: Any,
    source: Any = None,
    *,
    value: Any = None,
    reduce: Any = None,
) -> Term | None:
    if reduce not in (None, "add"):
        return None
    source = as_term(builder, value if source is None else source)
    return scatter(builder.terms, a, dim, builder.numbers(n.args[2]), source, reduce == "add")


@rule("scatter_add")
def _scatter_add(builder: TermBuilder, n: fx.Node, a: Term, dim: int, _: Any, source: Term) -> Term | None:
    return scatter(builder.terms, a, dim, builder.numbers(n.args[2]), source, True)


@rule("scatter_reduce")
def _scatter_reduce(
    builder: TermBuilder,
    n: fx.Node,
    a: Term,
    dim: int,
    _: Any,
    source: Term,
    reduce: str,
    *,
    include_self: bool = True,
) -> Term | None:
    if reduce != "sum" or not include_self:
        return None
    return scatter(builder.terms, a, dim, builder.numbers(n.args[2]), source, True)


@rule("index_add", "index_copy", "index_fill")
def _index_add(
    builder: TermBuilder, n: fx.Node, a: Term, dim: int, _: Any, source: Any, *, alpha: float = 1
) -> Term | None:
    if not a.shape:
        return None
    dim %= len(a.shape)
    source = as_term(builder, source)
    if alpha != 1:
        source = builder.terms.pointwise("mul", source, builder.terms.const(alpha))
    indices = builder.numbers(n.args[2]).reshape(1, -1)
    if source.shape:
        source = builder.terms.permute(source, [dim, *[d for d in range(len(a.shape)) if d != dim]])
    return builder.terms.index_put(a, (dim,), indices, source, get_op_name(n) == "index_add")


@rule("index_put", "_unsafe_index_put", "_index_put_impl")
def _index_put(
    builder: TermBuilder, n: fx.Node, a: Term, _: Any, values: Term, accumulate: bool = False, *rest: Any
) -> Term | None:
    nodes = n.args[1]
    dims = [d for d, i in enumerate(nodes) if i is not None]
    indices = torch.stack(torch.broadcast_tensors(*[builder.numbers(nodes[d]) for d in dims]))
    position = dims[0] if dims == list(range(dims[0], dims[-1] + 1)) else 0
    width = indices.dim() - 1
    rest_shape = [m for d, m in enumerate(a.shape) if d not in dims]
    shape = (*rest_shape[:position], *indices.shape[1:], *rest_shape[position:])
    values = builder.terms.expand(
        builder.terms.reshape(values, values.shape[max(0, len(values.shape) - len(shape)) :]), shape
    )
    front = [
        *range(position, position + width),
        *range(position),
        *range(position + width, len(values.shape)),
    ]
    values = builder.terms.reshape(builder.terms.permute(values, front), (math.prod(indices.shape[1:]), *rest_shape))
    return builder.terms.index_put(a, dims, indices.reshape(len(dims), -1), values, bool(accumulate))


@rule("select_scatter")
def _select_scatter(builder: TermBuilder, n: fx.Node, a: Term, b: Term, dim: int, i: int) -> Term:
    dim %= len(a.shape)
    return builder.terms.index_put(
        a, (dim,), torch.tensor([[i % a.shape[dim]]]), builder.terms.reshape(b, (1, *b.shape)), False
    )


@rule("slice_scatter")
def _slice_scatter(
    builder: TermBuilder,
    n: fx.Node,
    a: Term,
    b: Term,
    dim: int = 0,
    start: int | None = None,
    stop: int | None = None,
    step: int = 1,
) -> Term:
    dim %= len(a.shape)
    indices = torch.arange(a.shape[dim])[start:stop:step]
    if len(indices) == a.shape[dim]:
        return b
    b = builder.terms.permute(b, [dim, *[d for d in range(len(a.shape)) if d != dim]])
    return builder.terms.index_put(a, (dim,), indices[None], b, False)


@rule("masked_scatter")
def _masked_scatter(builder: TermBuilder, n: fx.Node, a: Term, _: Any, source: Term) -> Term:
    indices = builder.numbers(n.args[1]).expand(a.shape).nonzero().t()
    flat = builder.terms.reshape(source, (math.prod(source.shape),))
    return builder.terms.index_put(
        a, tuple(range(len(a.shape))), indices, builder.terms.slice(flat, 0, 0, indices.shape[1]), False
    )
