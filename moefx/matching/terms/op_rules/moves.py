"""Rules for ops that move elements by shapes alone."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import fx

from ..term import Term
from .rule_registry import TermBuilder, cast_to_result, rule


@rule("view", "_unsafe_view", "reshape", "unsqueeze", "squeeze", "flatten", "unflatten", "view_as")
def _reshape(builder: TermBuilder, n: fx.Node, a: Term, *_: Any, **kw: Any) -> Term | None:
    if n.args[0].meta["val"].dtype != n.meta["val"].dtype:
        return None  # a reinterpretation of the bits
    return builder.terms.reshape(a, n.meta["val"].shape)


@rule("permute")
def _permute(builder: TermBuilder, n: fx.Node, a: Term, order: list[int]) -> Term:
    return builder.terms.permute(a, order)


@rule("transpose", "t")
def _transpose(builder: TermBuilder, n: fx.Node, a: Term, i: int = 0, j: int = 1) -> Term:
    order = list(range(len(a.shape)))
    if len(order) > 1:
        order[i], order[j] = order[j], order[i]
    return builder.terms.permute(a, order)


@rule("expand", "expand_as", "broadcast_to")
def _expand(builder: TermBuilder, n: fx.Node, a: Term, *_: Any, **kw: Any) -> Term:
    return builder.terms.expand(a, n.meta["val"].shape)


@rule("slice")
def _slice(
    builder: TermBuilder,
    n: fx.Node,
    a: Term,
    dim: int = 0,
    start: int | None = None,
    stop: int | None = None,
    step: int = 1,
) -> Term:
    return builder.terms.slice(a, dim, start, stop, step)


@rule("select")
def _select(builder: TermBuilder, n: fx.Node, a: Term, dim: int, i: int) -> Term:
    dim %= len(a.shape)
    return builder.terms.pick(a, dim, i % a.shape[dim])


@rule("cat")
def _cat(builder: TermBuilder, n: fx.Node, terms: list[Term], dim: int = 0) -> Term:
    return builder.terms.cat(cast_to_result(builder, n, *terms), dim)


@rule("stack")
def _stack(builder: TermBuilder, n: fx.Node, terms: list[Term], dim: int = 0) -> Term:
    dim %= len(terms[0].shape) + 1
    return builder.terms.cat([builder.terms.reshape(t, (*t.shape[:dim], 1, *t.shape[dim:])) for t in terms], dim)


@rule("constant_pad_nd")
def _pad(builder: TermBuilder, n: fx.Node, a: Term, pad: list[int], value: float = 0) -> Term | None:
    if min(pad) < 0:
        return None
    for k in range(len(pad) // 2):
        dim = len(a.shape) - 1 - k
        before, after = pad[2 * k : 2 * k + 2]
        pieces = [builder.terms.const(value, (*a.shape[:dim], m, *a.shape[dim + 1 :])) for m in (before, after)]
        a = builder.terms.cat([pieces[0], a, pieces[1]], dim)
    return a


def _reorder(builder: TermBuilder, a: Term, dim: int, order: torch.Tensor) -> Term:
    return builder.terms.index(a, (dim,), order[None], dim)


@rule("repeat")
def _repeat(builder: TermBuilder, n: fx.Node, a: Term, times: list[int]) -> Term:
    a = builder.terms.reshape(a, (1,) * (len(times) - len(a.shape)) + a.shape)
    for dim, k in enumerate(times):
        if a.shape[dim] == 1:
            a = builder.terms.expand(a, (*a.shape[:dim], k, *a.shape[dim + 1 :]))
        elif k != 1:
            a = _reorder(builder, a, dim, torch.arange(a.shape[dim]).repeat(k))
    return a


@rule("repeat_interleave")
def _repeat_interleave(
    builder: TermBuilder, n: fx.Node, a: Term, times: Any, dim: int | None = None, **kw: Any
) -> Term:
    if dim is None:
        a, dim = builder.terms.reshape(a, (math.prod(a.shape),)), 0
    counts = builder.numbers(n.args[1]) if isinstance(n.args[1], fx.Node) else times
    return _reorder(builder, a, dim % len(a.shape), torch.arange(a.shape[dim]).repeat_interleave(counts))


@rule("flip")
def _flip(builder: TermBuilder, n: fx.Node, a: Term, dims: list[int]) -> Term:
    for d in dims if a.shape else ():
        a = _reorder(builder, a, d % len(a.shape), torch.arange(a.shape[d]).flip(0))
    return a


@rule("roll")
def _roll(builder: TermBuilder, n: fx.Node, a: Term, shifts: list[int], dims: list[int] = ()) -> Term | None:
    if not dims:
        return None
    for k, d in zip(shifts, dims, strict=True):
        a = _reorder(builder, a, d % len(a.shape), torch.arange(a.shape[d]).roll(k))
    return a
