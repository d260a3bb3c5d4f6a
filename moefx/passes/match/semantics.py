"""What each ATen op means as a term. One line an op; an op that is not here is taken as it is (`node`)."""

# fx types an argument as anything that a program can hold: the code knows better.
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportOptionalMemberAccess=false
# pyright: reportIndexIssue=false, reportOptionalSubscript=false, reportOptionalIterable=false, reportCallIssue=false
# pyright: reportAssignmentType=false, reportReturnType=false, reportOperatorIssue=false, reportUnhashable=false
# pyright: reportGeneralTypeIssues=false

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor

from ...capture.concolic import SHAPE_ONLY
from .shapes import positions
from .terms import Term, Terms

aten = torch.ops.aten
_LARGEST_ARRAY = 1 << 22

Rule = Callable[..., Term]
RULES: dict[str, Rule] = {}


def rule(*names: str) -> Callable[[Rule], Rule]:
    def register(fn: Rule) -> Rule:
        for name in names:
            RULES[name] = fn
        return fn

    return register


class Semantics:
    """Terms of the nodes of one captured graph, built on demand and in program order."""

    def __init__(self, nodes: list[fx.Node], shadow: Callable[[fx.Node], torch.Tensor]):
        self.T = Terms()
        self.nodes, self.shadow = nodes, shadow
        self._terms: dict[fx.Node, Term] = {}

    def term(self, node: fx.Node) -> Term:
        """The (unresolved) term of a node."""
        if node not in self._terms:
            needed, stack = set(), [node]
            while stack:
                n = stack.pop()
                if n not in needed and n not in self._terms:
                    needed.add(n)
                    if not _is_known(n):
                        stack.extend(n.all_input_nodes)
            for n in sorted(needed, key=lambda n: n.meta["index"]):
                self._terms[n] = self._build(n)
        return self._terms[node]

    def opaque(self, node: fx.Node) -> Term:
        val = node.meta.get("val")
        return self.T.make("node", (node,), tuple(val.shape) if isinstance(val, torch.Tensor) else ())

    def _build(self, node: fx.Node) -> Term:
        val = node.meta.get("val")
        if node.op == "get_attr" and node.meta["kind"] == "param" and isinstance(val, FakeTensor):
            return self.T.make("param", (node.meta["fqn"],), tuple(val.shape))
        if isinstance(val, torch.Tensor) and not isinstance(val, FakeTensor):
            return self.T.array(val) if val.numel() <= _LARGEST_ARRAY else self.opaque(node)
        if not isinstance(val, torch.Tensor) or node.op != "call_function" or node.meta.get("opaque"):
            return self.opaque(node)
        name = _name(node)
        if name.startswith(("empty", "new_empty")):
            return self.T.const(math.nan, val.shape)
        if _is_known(node) and (name not in RULES or not node.all_input_nodes):
            return self._number(node)
        if name == "getitem":
            return self._part(node)
        found = RULES.get(name)
        if found is not None:
            args = [self._value(a) for a in node.args]
            kwargs = {k: self._value(v) for k, v in node.kwargs.items()}
            out = found(self, node, *args, **kwargs)
        elif getattr(node.target, "tags", None) and torch.Tag.pointwise in node.target.tags:
            out = self._elementwise(node)
        else:
            return self.opaque(node)
        if out is not None and out.op != "node" and not node.meta["grad"] and not node.meta.get("known"):
            out = self.T.pw("detach", out)
        assert out is None or out.shape == tuple(val.shape), (node, node.target, out.shape, val.shape)
        return out if out is not None else self.opaque(node)

    def _value(self, a: Any) -> Any:
        if isinstance(a, fx.Node):
            return self._terms.get(a) or (self.term(a) if isinstance(a.meta.get("val"), torch.Tensor) else a)
        if isinstance(a, (list, tuple)):
            return [self._value(x) for x in a]
        return a

    def _number(self, node: fx.Node) -> Term:
        val = node.meta["val"]
        if val.numel() > _LARGEST_ARRAY:
            return self.opaque(node)
        return self.T.array(self.shadow(node))

    def numbers(self, node: Any) -> torch.Tensor:
        """A concrete integer argument."""
        return torch.as_tensor(node.meta["val"] if isinstance(node, fx.Node) else node, dtype=torch.int64)

    def _elementwise(self, node: fx.Node) -> Term:
        packet, overload = _name(node), node.target._overloadname
        items = tuple(self._value(a) for a in node.args)
        return self.T.pw(f"{packet}.{overload}", *items, **dict(node.kwargs))

    def _part(self, node: fx.Node) -> Term:
        """One result of an op with several: values that a selection took are a gather by the concrete indices."""
        bundle, i = node.args
        name = _name(bundle)
        if i == 0 and name in SELECTIONS:
            dim, keep = SELECTIONS[name](bundle)
            source = self._value(bundle.args[0])
            picked = self.shadow(bundle)[1]
            dim %= max(1, len(source.shape))
            if not keep:
                picked = picked.unsqueeze(dim)
            out = gather(self.T, source, dim, picked)
            out = out if keep else self.T.reshape(out, node.meta["val"].shape)
            return out if bundle.meta["grad"] else self.T.pw("detach", out)
        if i == 0 and name in ("native_layer_norm", "_fused_rms_norm"):
            return _norm(self, bundle)
        if i == 0 and name == "native_dropout" and (not bundle.args[2] or bundle.args[1] == 0):
            return self._value(bundle.args[0])
        return self.opaque(node)


def _arg(node: fx.Node, i: int, name: str, default: Any) -> Any:
    return node.args[i] if len(node.args) > i else node.kwargs.get(name, default)


SELECTIONS: dict[str, Callable[[fx.Node], tuple[int, bool]]] = {
    "topk": lambda n: (_arg(n, 2, "dim", -1), True),
    "sort": lambda n: (n.kwargs.get("dim", next((a for a in n.args[1:] if type(a) is int), -1)), True),
    "max": lambda n: (_arg(n, 1, "dim", 0), bool(_arg(n, 2, "keepdim", False))),
    "min": lambda n: (_arg(n, 1, "dim", 0), bool(_arg(n, 2, "keepdim", False))),
    "kthvalue": lambda n: (_arg(n, 2, "dim", -1), bool(_arg(n, 3, "keepdim", False))),
}


def _is_known(node: fx.Node) -> bool:
    return bool(node.meta.get("known")) and node.op != "placeholder"


def is_routed(node: Any) -> bool:
    """Whether an integer was computed from floats or from arguments: another routing, another integer."""
    if not isinstance(node, fx.Node):
        return False
    stack = [node]
    while stack:
        n = stack[-1]
        if "routed" in n.meta:
            stack.pop()
            continue
        if n.op == "placeholder" or isinstance(n.meta.get("val"), FakeTensor):
            n.meta["routed"] = True
        else:
            inputs = [] if n.target in SHAPE_ONLY else n.all_input_nodes
            unseen = [a for a in inputs if "routed" not in a.meta]
            if unseen:
                stack += unseen
                continue
            n.meta["routed"] = any(a.meta["routed"] for a in inputs)
        stack.pop()
    return node.meta["routed"]


def _name(node: fx.Node) -> str:
    packet = getattr(node.target, "overloadpacket", None)
    return packet.__name__ if packet is not None else getattr(node.target, "__name__", str(node.target))


def _as_term(S: Semantics, a: Any) -> Term:
    return a if isinstance(a, Term) else S.T.const(a)


# ---------------------------------------------------------------------- elementwise
@rule("add", "sub", "rsub", "mul", "div", "true_divide")
def _arithmetic(
    S: Semantics, n: fx.Node, a: Any, b: Any, *, alpha: float = 1, rounding_mode: str | None = None
) -> Term | None:
    if rounding_mode is not None:
        return None
    name = _name(n)
    a, b = _as_term(S, a), _as_term(S, b)
    if name == "rsub":
        name, a, b = "sub", b, a
    if alpha != 1:
        b = S.T.pw("mul", b, S.T.const(alpha))
    out = S.T.pw({"true_divide": "div"}.get(name, name), a, b)
    return S.T.expand(out, n.meta["val"].shape)


@rule("where")
def _where(S: Semantics, n: fx.Node, c: Term, a: Any, b: Any) -> Term:
    return S.T.expand(S.T.pw("where", c, _as_term(S, a), _as_term(S, b)), n.meta["val"].shape)


@rule("masked_fill")
def _masked_fill(S: Semantics, n: fx.Node, a: Term, mask: Term, value: Any) -> Term:
    return S.T.expand(S.T.pw("where", mask, _as_term(S, value), a), n.meta["val"].shape)


@rule("_to_copy", "to", "type_as")
def _cast(S: Semantics, n: fx.Node, a: Term, *_: Any, **kw: Any) -> Term:
    old, new = n.args[0].meta["val"].dtype, n.meta["val"].dtype
    return a if old == new else S.T.pw("cast", a, dtype=str(new).removeprefix("torch."))


@rule("copy")
def _copy(S: Semantics, n: fx.Node, a: Term, b: Term, *_: Any) -> Term:
    source = n.args[1].meta["val"].dtype
    new = n.meta["val"].dtype
    if source != new and source.is_floating_point:
        b = S.T.pw("cast", b, dtype=str(new).removeprefix("torch."))
    return S.T.expand(b, a.shape)


@rule("clone", "contiguous", "lift_fresh", "alias", "lift")
def _same(S: Semantics, n: fx.Node, a: Term, *_: Any, **kw: Any) -> Term:
    return a


@rule("detach")
def _detach(S: Semantics, n: fx.Node, a: Term) -> Term:
    return S.T.pw("detach", a)


@rule("fill", "full", "full_like", "new_full")
def _fill(S: Semantics, n: fx.Node, *args: Any, **kw: Any) -> Term:
    return S.T.expand(_as_term(S, args[-1]), n.meta["val"].shape)


@rule("zero", "zeros", "zeros_like", "new_zeros")
def _zeros(S: Semantics, n: fx.Node, *_: Any, **kw: Any) -> Term:
    return S.T.const(0, n.meta["val"].shape)


@rule("ones", "ones_like", "new_ones")
def _ones(S: Semantics, n: fx.Node, *_: Any, **kw: Any) -> Term:
    return S.T.const(1, n.meta["val"].shape)


@rule("glu")
def _glu(S: Semantics, n: fx.Node, a: Term, dim: int = -1) -> Term:
    half = a.shape[dim] // 2
    gate = S.T.pw("sigmoid.default", S.T.slice(a, dim, half, 2 * half))
    return S.T.pw("mul", S.T.slice(a, dim, 0, half), gate)


# ---------------------------------------------------------------------- moving
@rule("view", "_unsafe_view", "reshape", "unsqueeze", "squeeze", "flatten", "unflatten", "view_as")
def _reshape(S: Semantics, n: fx.Node, a: Term, *_: Any, **kw: Any) -> Term | None:
    if n.args[0].meta["val"].dtype != n.meta["val"].dtype:
        return None  # a reinterpretation of the bits
    return S.T.reshape(a, n.meta["val"].shape)


@rule("permute")
def _permute(S: Semantics, n: fx.Node, a: Term, order: list[int]) -> Term:
    return S.T.permute(a, order)


@rule("transpose", "t")
def _transpose(S: Semantics, n: fx.Node, a: Term, i: int = 0, j: int = 1) -> Term:
    order = list(range(len(a.shape)))
    if len(order) > 1:
        order[i], order[j] = order[j], order[i]
    return S.T.permute(a, order)


@rule("expand", "expand_as", "broadcast_to")
def _expand(S: Semantics, n: fx.Node, a: Term, *_: Any, **kw: Any) -> Term:
    return S.T.expand(a, n.meta["val"].shape)


@rule("slice")
def _slice(
    S: Semantics,
    n: fx.Node,
    a: Term,
    dim: int = 0,
    start: int | None = None,
    stop: int | None = None,
    step: int = 1,
) -> Term:
    return S.T.slice(a, dim, start, stop, step)


@rule("select")
def _select(S: Semantics, n: fx.Node, a: Term, dim: int, i: int) -> Term:
    dim %= len(a.shape)
    return S.T.pick(a, dim, i % a.shape[dim])


@rule("cat")
def _cat(S: Semantics, n: fx.Node, terms: list[Term], dim: int = 0) -> Term:
    return S.T.cat(terms, dim)


@rule("stack")
def _stack(S: Semantics, n: fx.Node, terms: list[Term], dim: int = 0) -> Term:
    dim %= len(terms[0].shape) + 1
    return S.T.cat([S.T.reshape(t, (*t.shape[:dim], 1, *t.shape[dim:])) for t in terms], dim)


@rule("constant_pad_nd")
def _pad(S: Semantics, n: fx.Node, a: Term, pad: list[int], value: float = 0) -> Term | None:
    if min(pad) < 0:
        return None
    for k in range(len(pad) // 2):
        dim = len(a.shape) - 1 - k
        before, after = pad[2 * k : 2 * k + 2]
        pieces = [S.T.const(value, (*a.shape[:dim], m, *a.shape[dim + 1 :])) for m in (before, after)]
        a = S.T.cat([p for p in (pieces[0], a, pieces[1]) if p.shape[dim]], dim)
    return a


def _moved(S: Semantics, a: Term, dim: int, order: torch.Tensor) -> Term:
    return S.T.index(a, (dim,), order[None], dim)


@rule("repeat")
def _repeat(S: Semantics, n: fx.Node, a: Term, times: list[int]) -> Term:
    a = S.T.reshape(a, (1,) * (len(times) - len(a.shape)) + a.shape)
    for dim, k in enumerate(times):
        if a.shape[dim] == 1:
            a = S.T.expand(a, (*a.shape[:dim], k, *a.shape[dim + 1 :]))
        elif k != 1:
            a = _moved(S, a, dim, torch.arange(a.shape[dim]).repeat(k))
    return a


@rule("repeat_interleave")
def _repeat_interleave(
    S: Semantics, n: fx.Node, a: Term, times: Any, dim: int | None = None, **kw: Any
) -> Term:
    if dim is None:
        a, dim = S.T.reshape(a, (math.prod(a.shape),)), 0
    counts = S.numbers(n.args[1]) if isinstance(n.args[1], fx.Node) else times
    return _moved(S, a, dim % len(a.shape), torch.arange(a.shape[dim]).repeat_interleave(counts))


@rule("flip")
def _flip(S: Semantics, n: fx.Node, a: Term, dims: list[int]) -> Term:
    for d in dims:
        a = _moved(S, a, d % len(a.shape), torch.arange(a.shape[d]).flip(0))
    return a


@rule("roll")
def _roll(S: Semantics, n: fx.Node, a: Term, shifts: list[int], dims: list[int] = ()) -> Term | None:
    if not dims:
        return None
    for k, d in zip(shifts, dims, strict=True):
        a = _moved(S, a, d % len(a.shape), torch.arange(a.shape[d]).roll(k))
    return a


# ---------------------------------------------------------------------- moving by concrete integers
@rule("index", "_unsafe_index")
def _index(S: Semantics, n: fx.Node, a: Term, _: Any) -> Term:
    nodes = n.args[1]
    dims = [d for d, i in enumerate(nodes) if i is not None]
    indices = torch.stack(torch.broadcast_tensors(*[S.numbers(nodes[d]) for d in dims]))
    position = dims[0] if dims == list(range(dims[0], dims[-1] + 1)) else 0
    return S.T.index(a, dims, indices, position, routed=any(is_routed(nodes[d]) for d in dims))


@rule("index_select")
def _index_select(S: Semantics, n: fx.Node, a: Term, dim: int, _: Any) -> Term:
    dim %= len(a.shape)
    indices = S.numbers(n.args[2]).reshape(1, -1)
    return S.T.index(a, (dim,), indices, dim, routed=is_routed(n.args[2]))


@rule("embedding")
def _embedding(S: Semantics, n: fx.Node, weight: Term, ids: Any, *_: Any) -> Term:
    return S.T.index(weight, (0,), S.numbers(n.args[1])[None], 0, routed=is_routed(n.args[1]))


@rule("gather")
def _gather(S: Semantics, n: fx.Node, a: Term, dim: int, _: Any, **kw: Any) -> Term:
    return gather(S.T, a, dim, S.numbers(n.args[2]))


@rule("take")
def _take(S: Semantics, n: fx.Node, a: Term, _: Any) -> Term:
    return S.T.index(S.T.reshape(a, (math.prod(a.shape),)), (0,), S.numbers(n.args[1])[None], 0)


def _routed_axes(indices: torch.Tensor, dim: int) -> list[int]:
    """`dim` and the axes along which an index tensor varies; along the others it was merely expanded."""
    varies = [
        d for d in range(indices.dim()) if indices.shape[d] > 1 and not (indices == indices.narrow(d, 0, 1)).all()
    ]
    return sorted({dim, *varies})


def gather(T: Terms, a: Term, dim: int, indices: torch.Tensor) -> Term:
    if not a.shape:
        return a
    dim %= len(a.shape)
    axes = _routed_axes(indices, dim)
    free = [d for d in range(indices.dim()) if d not in axes]
    for d in free:
        a = T.slice(a, d, 0, indices.shape[d])
    core = indices[tuple(slice(None) if d in axes else 0 for d in range(indices.dim()))]
    grid = positions(core.shape)
    grid[axes.index(dim)] = core
    out = T.index(a, axes, grid, 0)
    placed = [*axes, *free]
    return T.permute(out, [placed.index(d) for d in range(indices.dim())])


def scatter(
    T: Terms, base: Term, dim: int, indices: torch.Tensor, source: Term, accumulate: bool
) -> Term | None:
    if not base.shape:
        return None
    dim %= len(base.shape)
    axes = [d for d in _routed_axes(indices, dim)]
    free = [d for d in range(indices.dim()) if d not in axes]
    if any(indices.shape[d] != base.shape[d] for d in free):
        axes, free = list(range(indices.dim())), []
    source = T.expand(source, indices.shape) if not source.shape else source
    for d in range(indices.dim()):
        source = T.slice(source, d, 0, indices.shape[d])
    core = indices[tuple(slice(None) if d in axes else 0 for d in range(indices.dim()))]
    grid = positions(core.shape)
    grid[axes.index(dim)] = core
    values = T.permute(source, [*axes, *free])
    values = T.reshape(values, (core.numel(), *[base.shape[d] for d in free]))
    return T.put(base, axes, grid.reshape(len(axes), -1), values, accumulate)


@rule("scatter")
def _scatter(
    S: Semantics,
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
    source = _as_term(S, value if source is None else source)
    return scatter(S.T, a, dim, S.numbers(n.args[2]), source, reduce == "add")


@rule("scatter_add")
def _scatter_add(S: Semantics, n: fx.Node, a: Term, dim: int, _: Any, source: Term) -> Term | None:
    return scatter(S.T, a, dim, S.numbers(n.args[2]), source, True)


@rule("scatter_reduce")
def _scatter_reduce(
    S: Semantics,
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
    return scatter(S.T, a, dim, S.numbers(n.args[2]), source, True)


@rule("index_add", "index_copy", "index_fill")
def _index_add(S: Semantics, n: fx.Node, a: Term, dim: int, _: Any, source: Any, *, alpha: float = 1) -> Term:
    dim %= len(a.shape)
    source = _as_term(S, source)
    if alpha != 1:
        source = S.T.pw("mul", source, S.T.const(alpha))
    indices = S.numbers(n.args[2]).reshape(1, -1)
    if source.shape:
        source = S.T.permute(source, [dim, *[d for d in range(len(a.shape)) if d != dim]])
    return S.T.put(a, (dim,), indices, source, _name(n) == "index_add")


@rule("index_put", "_unsafe_index_put", "_index_put_impl")
def _index_put(
    S: Semantics, n: fx.Node, a: Term, _: Any, values: Term, accumulate: bool = False, *rest: Any
) -> Term | None:
    nodes = n.args[1]
    dims = [d for d, i in enumerate(nodes) if i is not None]
    indices = torch.stack(torch.broadcast_tensors(*[S.numbers(nodes[d]) for d in dims]))
    position = dims[0] if dims == list(range(dims[0], dims[-1] + 1)) else 0
    width = indices.dim() - 1
    rest_shape = [m for d, m in enumerate(a.shape) if d not in dims]
    values = S.T.expand(values, (*rest_shape[:position], *indices.shape[1:], *rest_shape[position:]))
    front = [
        *range(position, position + width),
        *range(position),
        *range(position + width, len(values.shape)),
    ]
    values = S.T.reshape(S.T.permute(values, front), (math.prod(indices.shape[1:]), *rest_shape))
    return S.T.put(a, dims, indices.reshape(len(dims), -1), values, bool(accumulate))


@rule("select_scatter")
def _select_scatter(S: Semantics, n: fx.Node, a: Term, b: Term, dim: int, i: int) -> Term:
    dim %= len(a.shape)
    return S.T.put(a, (dim,), torch.tensor([[i % a.shape[dim]]]), S.T.reshape(b, (1, *b.shape)), False)


@rule("slice_scatter")
def _slice_scatter(
    S: Semantics,
    n: fx.Node,
    a: Term,
    b: Term,
    dim: int = 0,
    start: int | None = None,
    stop: int | None = None,
    step: int = 1,
) -> Term:
    dim %= len(a.shape)
    where = torch.arange(a.shape[dim])[start:stop:step]
    if len(where) == a.shape[dim]:
        return b
    b = S.T.permute(b, [dim, *[d for d in range(len(a.shape)) if d != dim]])
    return S.T.put(a, (dim,), where[None], b, False)


@rule("masked_scatter")
def _masked_scatter(S: Semantics, n: fx.Node, a: Term, _: Any, source: Term) -> Term:
    where = S.numbers(n.args[1]).expand(a.shape).nonzero().t()
    flat = S.T.reshape(source, (math.prod(source.shape),))
    return S.T.put(a, tuple(range(len(a.shape))), where, S.T.slice(flat, 0, 0, where.shape[1]), False)


# ---------------------------------------------------------------------- contracting
_LETTERS = "abcdefhijklmnopqrstuvw"


@rule("linear")
def _linear(
    S: Semantics,
    n: fx.Node,
    x: Term,
    w: Term,
    b: Term | None = None,
    *,
    bias: Term | None = None,
    weight: Term | None = None,
) -> Term:
    b = bias if b is None else b
    x, w, b = _autocast(S, n, x, w, b)
    lead = _LETTERS[: len(x.shape) - 1]
    out = S.T.ein([lead + "y", "zy"], lead + "z", [x, w])
    return out if b is None else S.T.pw("add", out, b)


def _autocast(S: Semantics, n: fx.Node, *operands: Term | None) -> list[Term | None]:
    """Under autocast a contraction casts its operands itself."""
    dtype = n.meta["val"].dtype
    out: list[Term | None] = []
    flat = [a for a in torch.utils._pytree.tree_leaves((n.args, n.kwargs)) if isinstance(a, fx.Node)]
    for t, a in zip(operands, [*flat, *[None] * len(operands)], strict=False):
        old = a.meta["val"].dtype if a is not None else dtype
        out.append(
            S.T.pw("cast", t, dtype=str(dtype).removeprefix("torch."))
            if t is not None and old != dtype and old.is_floating_point
            else t
        )
    return out


@rule("mm", "bmm", "mv", "dot", "matmul")
def _matmul(S: Semantics, n: fx.Node, x: Term, w: Term, **kw: Any) -> Term | None:
    x, w = _autocast(S, n, x, w)
    a, b = len(x.shape), len(w.shape)
    lead = max(a, b, 2) - 2
    batch = _LETTERS[:lead]
    left = "y" if a == 1 else batch[lead - (a - 2) :] + "xy"
    right = "y" if b == 1 else batch[lead - (b - 2) :] + "yz"
    for label in set(left) & set(right) & set(batch):
        if x.shape[left.index(label)] != w.shape[right.index(label)]:
            big = max(x.shape[left.index(label)], w.shape[right.index(label)])
            x = S.T.expand(x, [big if s == label else m for s, m in zip(left, x.shape, strict=True)])
            w = S.T.expand(w, [big if s == label else m for s, m in zip(right, w.shape, strict=True)])
    return S.T.ein([left, right], batch + ("x" if a > 1 else "") + ("z" if b > 1 else ""), [x, w])


@rule("addmm", "baddbmm", "addmv")
def _addmm(
    S: Semantics, n: fx.Node, bias: Term, x: Term, w: Term, *, beta: float = 1, alpha: float = 1
) -> Term:
    out = (
        S.T.ein(["axy", "ayz"], "axz", [x, w])
        if len(x.shape) == 3
        else S.T.ein(["xy", "yz" if len(w.shape) > 1 else "y"], "xz" if len(w.shape) > 1 else "x", [x, w])
    )
    if alpha != 1:
        out = S.T.pw("mul", out, S.T.const(alpha))
    if beta != 1:
        bias = S.T.pw("mul", bias, S.T.const(beta))
    return S.T.pw("add", out, bias)


@rule("convolution")
def _convolution(
    S: Semantics,
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
    """A kernel of size one is a product with a matrix (or, in groups, with one matrix each)."""
    space = len(w.shape) - 2
    if (
        transposed
        or math.prod(w.shape[2:]) != 1
        or any(s != 1 for s in stride)
        or any(padding)
        or len(x.shape) != space + 2
    ):
        return None
    x, w, b = _autocast(S, n, x, w, b)
    at = _LETTERS[:space]
    out, inner = w.shape[0] // groups, w.shape[1]
    x = S.T.reshape(x, (x.shape[0], groups, inner, *x.shape[2:]))
    w = S.T.reshape(w, (groups, out, inner))
    y = S.T.reshape(S.T.ein([f"xgy{at}", "gzy"], f"xgz{at}", [x, w]), n.meta["val"].shape)
    return y if b is None else S.T.pw("add", y, S.T.reshape(b, (w.shape[0] * out, *[1] * space)))


@rule("_prelu_kernel")
def _prelu(S: Semantics, n: fx.Node, x: Term, w: Term) -> Term:
    return S.T.expand(S.T.pw("where", S.T.pw("gt.Scalar", x, 0), x, S.T.pw("mul", x, w)), x.shape)


@rule("einsum")
def _einsum(S: Semantics, n: fx.Node, equation: Any, *operands: Any) -> Term | None:
    if not isinstance(equation, str):
        return None
    terms = list(operands[0]) if isinstance(operands[0], list) else list(operands)
    terms = _autocast(S, n, *terms)
    left, arrow, out = equation.replace(" ", "").partition("->")
    inputs = left.split(",")
    if "..." in equation:
        free = [x for x in "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz" if x not in equation]
        widths = [
            len(t.shape) - len(s.replace("...", "")) if "..." in s else 0
            for s, t in zip(inputs, terms, strict=True)
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
    for s, t in zip(inputs, terms, strict=True):
        for x, m in zip(s, t.shape, strict=True):
            sizes[x] = max(m, sizes.get(x, 1))
    terms = [S.T.expand(t, [sizes[x] for x in s]) for s, t in zip(inputs, terms, strict=True)]
    return S.T.ein(inputs, out, terms)


@rule("_grouped_mm", "grouped_mm", "grouped_mm_fallback")
def _grouped_mm(
    S: Semantics, n: fx.Node, x: Term, w: Term, offs: Any = None, bias: Any = None, *rest: Any, **kw: Any
) -> Term | None:
    node = n.args[2] if len(n.args) > 2 else n.kwargs.get("offs")
    if node is None or bias is not None or len(x.shape) != 2 or len(w.shape) != 3:
        return None
    bounds = [0, *S.numbers(node).tolist()]
    groups = torch.arange(len(bounds) - 1).repeat_interleave(torch.tensor(bounds).diff())
    used = S.T.slice(x, 0, 0, bounds[-1])
    weights = S.T.index(w, (0,), groups[None], 0)
    out = S.T.ein(["by", "byz"], "bz", [used, weights])
    if bounds[-1] < x.shape[0]:
        out = S.T.cat([out, S.T.const(math.nan, (x.shape[0] - bounds[-1], w.shape[2]))], 0)
    return out


# ---------------------------------------------------------------------- reducing
def _dims(t: Term, dim: Any) -> list[int]:
    if dim is None or dim == []:
        return list(range(len(t.shape)))
    return [d % len(t.shape) for d in (dim if isinstance(dim, (list, tuple)) else [dim])]


def _kept(S: Semantics, n: fx.Node, out: Term) -> Term:
    return S.T.reshape(out, n.meta["val"].shape)


@rule("sum")
def _sum(
    S: Semantics, n: fx.Node, a: Term, dim: Any = None, keepdim: bool = False, *, dtype: Any = None
) -> Term:
    old, new = n.args[0].meta["val"].dtype, n.meta["val"].dtype
    if old != new and old.is_floating_point:
        a = S.T.pw("cast", a, dtype=str(new).removeprefix("torch."))
    return _kept(S, n, S.T.sum(a, _dims(a, dim)))


@rule("mean")
def _mean(
    S: Semantics, n: fx.Node, a: Term, dim: Any = None, keepdim: bool = False, *, dtype: Any = None
) -> Term:
    old, new = n.args[0].meta["val"].dtype, n.meta["val"].dtype
    if old != new and old.is_floating_point:
        a = S.T.pw("cast", a, dtype=str(new).removeprefix("torch."))
    dims = _dims(a, dim)
    return _kept(S, n, S.T.pw("div", S.T.sum(a, dims), S.T.const(math.prod(a.shape[d] for d in dims))))


@rule("_softmax", "_log_softmax", "softmax", "log_softmax")
def _softmax(S: Semantics, n: fx.Node, a: Term, dim: int, *_: Any) -> Term:
    return S.T.row("log_softmax" if "log" in _name(n) else "softmax", [dim], True, (), a)


@rule("cumsum", "cumprod", "logcumsumexp")
def _scan(S: Semantics, n: fx.Node, a: Term, dim: int, **kw: Any) -> Term:
    return S.T.row(_name(n), [dim], True, (), a)


@rule("amax", "amin", "logsumexp", "prod", "argmax")
def _reduce(
    S: Semantics, n: fx.Node, a: Term, dim: Any = None, keepdim: bool = False, **kw: Any
) -> Term | None:
    if kw.get("dtype") is not None:
        return None
    return _kept(S, n, S.T.row(_name(n), _dims(a, dim), False, (), a))


@rule("linalg_vector_norm")
def _vector_norm(
    S: Semantics,
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
        else _kept(S, n, S.T.row("linalg_vector_norm", _dims(a, dim), False, (ord,), a))
    )


@rule("var")
def _var(
    S: Semantics,
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
    return _kept(S, n, S.T.row("var", _dims(a, dim), False, (1 if correction is None else correction,), a))


def _norm(S: Semantics, bundle: fx.Node) -> Term:
    """Layer norm and RMS norm: normalise, then the elementwise part."""
    layer = _name(bundle) == "native_layer_norm"
    x, shape, weight, *rest = (S._value(a) for a in bundle.args)
    bias, eps = rest if layer else (None, rest[0])
    out = S.T.row("layer_norm" if layer else "rms_norm", range(-len(shape), 0), True, (eps,), x)
    if weight is not None:
        out = S.T.pw("mul", out, weight)
    if bias is not None:
        out = S.T.pw("add", out, bias)
    return out if bundle.meta["grad"] else S.T.pw("detach", out)


__all__ = ["RULES", "SELECTIONS", "Semantics", "gather", "is_routed", "scatter"]
