"""The rewrite: a proven block as a graph in the PFT dialect (X-MoE section 4.1, listing 1).

    pft  = build_pft(topk_ids, topk_weights)     the user's own router made these
    rows = dispatch(x, pft)                      [B,D], sorted by expert, no padding
    ...    the template F on rows: grouped GEMMs, pointwise ops, per-expert vectors
    out  = combine(rows, pft)                    [S,D]

Everything before and after is the user's own program, re-emitted by `kept`.
"""

from __future__ import annotations

import dataclasses
import math
import operator
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.node import map_arg

from ..capture.concolic import CONTRACTIONS, Effect, autocast_dtype
from ..errors import Refused
from ..ir import dialect  # registers the ops
from .kept import KeptGraph, Twins, is_random
from .match.form import Body, Ref, walk
from .match.paths import Place
from .match.prove import Expert, Match

aten = torch.ops.aten
ops = torch.ops.moefx
_ = dialect


@dataclasses.dataclass
class Rewritten:
    """A graph in the dialect, and what it took from the block.

    Attributes:
        graph: the FX graph; attribute and module targets are relative to the block.
        out_spec: pytree of the output, for the flat list that the graph returns.
        absorbed: names of the expert parameters, which the dialect reads directly.
        repeated: modules that are called as they are, and of which some inner values are computed again.
        attributes: block attributes that a call sets, by name, with the node that holds the new value.
    """

    graph: fx.Graph
    out_spec: pytree.TreeSpec
    absorbed: list[str]
    repeated: list[str]
    attributes: list[str]


@dataclasses.dataclass
class Value:
    """A body value while it is emitted. `kind`: `row` ([B, ...]), `expert` ([E, ...] or E tensors), `fixed`."""

    node: Any  # fx.Node, or list[fx.Node] for E separate tensors
    kind: str
    rank: int  # axes of one row
    transposed: bool = False  # expert matrices given as [out, in]


def rewrite(match: Match, names: list[str]) -> Rewritten:
    """The block in the dialect. `names`: of the placeholders, one for each tensor argument.

    Where the program goes another way at some sizes, the rewrite holds for the others, guarded.
    """
    try:
        return Rewriter(match, names).rewrite()
    except Refused:
        if not match.without_optional():
            raise
        return Rewriter(match, names).rewrite()


class Rewriter:
    def __init__(self, match: Match, names: list[str]):
        self.match, self.lifted = match, match.lifted[0]
        self.kept = KeptGraph(match, self.make_cut)
        self.kept.add_inputs(names)
        self.overwritten: dict[fx.Node, fx.Node] = {}
        self.inverses: list[fx.Node] = []  # of each group: the row of each slot, -1 where it does not count

    def _same_autocast(self) -> None:
        """The ops of the dialect do what autocast asks for; a program that switches it off for the experts does not."""
        for n in self.lifted.absorbed:
            if autocast_dtype() and n.target in CONTRACTIONS and n.meta["autocast"] != autocast_dtype():
                raise Refused("the experts switch autocast off", source=str(n.meta["source"]))

    # ------------------------------------------------------------------ the whole block
    def rewrite(self) -> Rewritten:
        captures = self.kept.captures
        outs = [pytree.tree_flatten(c.out, is_leaf=lambda x: isinstance(x, fx.Node)) for c in captures]
        spec = outs[0][1]
        if any(s != spec for _, s in outs):
            raise Refused("the structure of what the block returns depends on the routing")
        self._same_autocast()
        effects = self._effects()
        for effect, _ in effects:
            if effect.kind == "input":  # what the backward keeps must not change when the input does
                given = self.kept.made[effect.target]
                self.overwritten[effect.target] = given
                self.kept.made[effect.target] = self._call(
                    aten.clone.default, (given,), meta=dict(given.meta)
                )
        roots: list[Twins] = []
        for column in zip(*[flat for flat, _ in outs], strict=True):
            if isinstance(column[0], fx.Node):
                roots.append(Twins(column))
        roots += [twins for _, twins in effects]
        roots += self._needed_by_cut()
        draws = self._random()
        while True:
            before = set(self.kept.inlined)
            plan = self.kept.plan(roots + self._outside_calls(draws))
            if self.kept.inlined == before:
                break
        effects = [(e, t) for e, t in effects if not self._inside_kept_call(e)]
        self.kept.emit(plan)
        flat = [
            self.kept.zip_value(list(column), "the output")
            for column in zip(*[f for f, _ in outs], strict=True)
        ]
        attributes = self._emit_effects(effects)
        self.kept.graph.output(flat)
        _drop_dead(self.kept.graph)
        absorbed = sorted({place.fqn for g in self.match.groups for table in g.tables for place in table})
        return Rewritten(self.kept.graph, spec, absorbed, self.kept.repeated, attributes)

    def _needed_by_cut(self) -> list[Twins]:
        """The kept nodes that the routed sum reads, each in all captures."""
        refs = [
            self.index,
            *[v for g in self.match.groups for v in g.values],
            *([self.match.keep] if self.match.keep else []),
        ]
        refs += [[lifted.shared[i] for lifted in self.match.lifted] for i in range(len(self.lifted.shared))]
        if self.lifted.missed:
            refs.append([lifted.missed for lifted in self.match.lifted])  # type: ignore[misc]
        return [Twins(column) for ref in refs for column in zip(*[r.nodes for r in ref], strict=True)]

    @property
    def index(self) -> list[Ref]:
        return [lifted.index for lifted in self.match.lifted]

    def _random(self) -> list[Twins]:
        """Draws of random numbers stay, used or not: the stream must come out as in the original."""
        draws = [
            [n for n in c.nodes if is_random(n) and n not in lifted.absorbed]
            for c, lifted in zip(self.kept.captures, self.match.lifted, strict=True)
        ]
        if len({len(d) for d in draws}) != 1:
            raise Refused(
                "how often random numbers are drawn depends on the routing",
                source=str(next(n for d in draws for n in d).meta["source"]),
            )
        for lifted in self.match.lifted:
            for n in lifted.absorbed:
                if is_random(n):
                    raise Refused(
                        "the experts draw random numbers (dropout in training?)",
                        culprits=(str(n.target),),
                        source=str(n.meta["source"]),
                    )
        return [Twins(column) for column in zip(*draws, strict=True)]

    def _outside_calls(self, draws: list[Twins]) -> list[Twins]:
        """A kept module draws its own random numbers: it must be called, and its draws must not be repeated."""
        out = []
        for twins in draws:
            call = self.kept.inside_call(twins.first)
            if call is None:
                out.append(twins)
            else:
                out.append(Twins(_leaves(c.out)[0] for c in call))
        return out

    # ------------------------------------------------------------------ effects
    def _effects(self) -> list[tuple[Effect, Twins]]:
        per_capture = [c.effects for c in self.kept.captures]
        out = []
        for column in zip(*per_capture, strict=False):
            first = column[0]
            if len({len(e) for e in per_capture}) != 1 or any(
                (e.kind, str(e.target)) != (first.kind, str(first.target)) for e in column
            ):
                raise Refused(
                    "which buffers or attributes the block changes depends on the routing",
                    culprits=tuple(str(e.target) for e in column),
                )
            if first.kind == "record":
                raise Refused(
                    f"the block keeps a record in its attribute {first.target} at every call",
                    culprits=(str(first.target),),
                    remedy="keep it in a buffer, or record it with a hook",
                )
            if first.kind == "state":
                if any(isinstance(e.node, type(first.node)) is False or e.node != first.node for e in column):
                    raise Refused(
                        f"the block changes its attribute {first.target} at every call",
                        culprits=(str(first.target),),
                    )
                continue
            out.append((first, Twins(e.node for e in column)))
        if len({len(e) for e in per_capture}) != 1:
            raise Refused("which buffers or attributes the block changes depends on the routing")
        for effect, twins in out:
            if twins.first in self.lifted.absorbed and effect.kind == "buffer":
                raise Refused(
                    f"the experts' computation updates the buffer {effect.target}",
                    culprits=(str(effect.target),),
                    source=str(twins.first.meta["source"]),
                )
        return out

    def _inside_kept_call(self, effect: Effect) -> bool:
        """A kept module updates its own buffers and attributes when it is called."""
        if effect.kind == "input":
            return False
        owner = str(effect.target).rpartition(".")[0]
        return any(owner == call[0].fqn or owner.startswith(call[0].fqn + ".") for call in self.kept.calls)

    def _emit_effects(self, effects: list[tuple[Effect, Twins]]) -> list[str]:
        attributes = []
        for effect, twins in effects:
            value = self.kept.node(twins.first)
            if effect.kind == "attribute":
                owner, _, name = str(effect.target).rpartition(".")
                attributes.append(str(effect.target))
                self.kept.call(setattr, (owner, name, value), {}, {"source": str(twins.first.meta["source"])})
                continue
            if effect.kind == "buffer":
                target = self.kept.graph.get_attr(str(effect.target))
            else:
                target = self.overwritten[effect.target]
            self.kept.call(
                aten.copy_.default, (target, value), {}, {"source": str(twins.first.meta["source"])}
            )
        return attributes

    # ------------------------------------------------------------------ the routed sum
    def make_cut(self) -> fx.Node:
        cut = self.kept.cut
        val = cut.first.meta["val"]
        ids = self._per_slot(self.lifted.index)
        keep = self._keep()
        total: fx.Node | None = None
        for group in self.match.groups:
            part = self._group(group, ids, keep, val)
            total = part if total is None else self._call(aten.add.Tensor, (total, part), letters=("S", "D"))
        assert total is not None
        if total.meta["val"].dtype != val.dtype:
            total = self._call(aten._to_copy.default, (total,), {"dtype": val.dtype})
        if self.lifted.missed:
            total = self._or_missed(total, self.lifted.missed)
        for ref in self.lifted.shared:
            row = self._reshape(self.kept.node(ref.node), (-1, val.shape[-1]))
            total = self._call(aten.add.Tensor, (row, total), letters=("S", "D"))
        if val.dim() != 2:
            shape = [
                self.kept.size([t.meta["val"].shape[d] for t in cut], "the output") for d in range(val.dim())
            ]
            total = self._call(aten.view.default, (total, shape), meta=self.kept.describe(cut))
        else:
            total.meta["letters"] = self.kept.describe(cut)["letters"]
        return total

    def _or_missed(self, total: fx.Node, ref: Ref) -> fx.Node:
        """`total` [S,D], and for tokens of which no slot counts the rows of another node."""
        taken: fx.Node | None = None
        for inverse in self.inverses:
            here = self._call(aten.any.dim, (self._call(aten.ge.Scalar, (inverse, 0)), 1, True))
            taken = here if taken is None else self._call(aten.logical_or.default, (taken, here))
        row = self._reshape(self.kept.node(ref.node), (-1, total.meta["val"].shape[-1]))
        return self._call(aten.where.self, (taken, total, row), letters=("S", "D"))

    def _keep(self) -> fx.Node | None:
        if not self.match.keep:
            return None
        keep = self._per_slot(self.match.keep[0])
        if self.match.keep[0].inverted:
            keep = self._call(aten.eq.Scalar, (keep, 0))
        elif keep.meta["val"].dtype != torch.bool:
            keep = self._call(aten.ne.Scalar, (keep, 0))
        return keep

    def _per_slot(self, ref: Ref, slot: int | None = None) -> fx.Node:
        """A kept value as [S,K], or as [S,1] for one slot of it."""
        if ref.columns:
            columns = [self._per_slot(c, k) for k, c in enumerate(ref.columns)]
            return self._call(aten.cat.default, (columns, 1), letters=("S", "K"))
        node, K = self.kept.node(ref.node), 1 if slot is not None else self.lifted.slots
        axes = tuple(a for i, a in enumerate(ref.axes) if a != "t" or "t" not in ref.axes[:i])
        shape = node.meta["val"].shape
        match axes:
            case ("t", "k"):
                out = self._reshape(node, (-1, K))
            case ("k", "t"):
                out = self._call(aten.t.default, (self._reshape(node, (K, -1)),))
            case ("tk",):
                out = self._reshape(node, (-1, K))
            case ("kt",):
                out = self._call(aten.t.default, (self._reshape(node, (K, -1)),))
            case ("t",):
                out = self._reshape(node, (-1, 1))
                if K > 1:
                    out = self._call(aten.expand.default, (out, [-1, K]))
            case ("t", "e"):
                out = self._call(
                    aten.gather.default,
                    (self._reshape(node, (-1, shape[-1])), 1, self._ids64(shape[-1], slot)),
                )
            case ("t", "m"):
                chosen = self._reshape(node, (-1, shape[-1]))
                device = self.kept.input_device()
                every = self._call(
                    aten.arange.default,
                    (shape[-1],),
                    {"device": device},
                    fake=torch.int64,
                    shape=(shape[-1],),
                )
                out = self._call(
                    aten.expand_as.default, (self._call(aten.unsqueeze.default, (every, 0)), chosen)
                )
            case ("e", "t"):
                flat = self._call(aten.t.default, (self._reshape(node, (shape[0], -1)),))
                out = self._call(aten.gather.default, (flat, 1, self._ids64(shape[0], slot)))
            case ("e",):
                out = self._call(
                    aten.index.Tensor, (self._reshape(node, (shape[0],)), [self._ids64(shape[0], slot)])
                )
            case _:
                out = self._call(
                    aten.expand.default,
                    (
                        self._reshape(node, (1, 1)),
                        [self.kept.size([math.prod(li.tokens) for li in self.match.lifted], ""), K],
                    ),
                )
        out.meta["letters"] = ("S", "K")
        return out

    def _ids64(self, width: int, slot: int | None = None) -> fx.Node:
        index = self.lifted.index
        ids = (
            self._per_slot(index)
            if slot is None
            else self._per_slot(index.columns[slot], slot)
            if index.columns
            else None
        )
        if ids is None:
            ids = self._call(aten.slice.Tensor, (self._per_slot(index), 1, slot, slot + 1))  # type: ignore[operator]
        if ids.meta["val"].dtype != torch.int64:
            ids = self._call(aten._to_copy.default, (ids,), {"dtype": torch.int64})
        outside = any((li.ids < 0).any() or (li.ids >= width).any() for li in self.match.lifted)
        return self._call(aten.clamp.default, (ids, 0, width - 1)) if outside else ids

    def _group(self, group: Expert, ids: fx.Node, keep: fx.Node | None, val: torch.Tensor) -> fx.Node:
        if group.ids != list(range(len(group.ids))) or len(self.match.groups) > 1:
            ids = self._local_ids(group, ids)
        scalars = [i for i in _used_values(group.body) if math.prod(_value_shape(group.body, i)) == 1]
        weights = {i: self._per_slot(group.values[i][0]) for i in scalars}
        first = scalars[0] if scalars else None
        kwargs: dict[str, Any] = {"num_experts": len(group.ids)}
        if self.match.drop is not None:
            kwargs |= {"capacity": self.kept.formula(self.match.drop.capacity), "drop": self.match.drop.order}
        pft = self._call(ops.build_pft.default, (ids, weights.get(first), keep), kwargs)  # type: ignore[arg-type]
        letters = (("B",), ("B",), ("E+1",), ("S", "K"), ("B",))
        pft.meta["letters"] = letters
        parts = [self._call(operator.getitem, (pft, i), letters=letters[i]) for i in range(5)]
        self.inverses.append(parts[3])
        rows = _Rows(self, group, parts, weights, first)
        y = rows.value(group.body)
        if y.kind != "row":
            raise Refused("what the experts compute does not depend on the token")
        out = self._call(ops.combine.default, (y.node, None, parts[0], parts[2], parts[3]))
        out.meta["letters"] = ("S", "D")
        return out

    def _local_ids(self, group: Expert, ids: fx.Node) -> fx.Node:
        """Expert ids within one of several groups; -1 for the experts of the others."""
        low, high = group.ids[0], group.ids[-1]
        if group.ids == list(range(low, high + 1)):
            shifted = self._call(aten.sub.Tensor, (ids, low)) if low else ids
            inside = self._call(aten.lt.Scalar, (shifted, len(group.ids)))
            return self._call(aten.where.ScalarOther, (inside, shifted, -1))
        table = [-1] * (max(self.match.num_experts, 1 + max(int(li.ids.max()) for li in self.match.lifted)))
        for local, e in enumerate(group.ids):
            table[e] = local
        node = self._call(
            torch.tensor,
            (table,),
            {"dtype": torch.int64, "device": self.kept.input_device()},
            fake=torch.int64,
            shape=(len(table),),
        )
        return self._call(aten.index.Tensor, (node, [ids]))

    # ------------------------------------------------------------------ emission helpers
    def _reshape(self, node: fx.Node, shape: tuple[int, ...]) -> fx.Node:
        val = node.meta["val"]
        if val.dim() == len(shape) and all(a in (-1, b) for a, b in zip(shape, val.shape, strict=True)):
            return node
        letters = ("S", *map(self.kept.letter, [[n] for n in shape[1:]])) if shape[0] == -1 else None
        return self._call(aten.reshape.default, (node, list(shape)), letters=letters)

    def _call(
        self,
        target: Any,
        args: tuple,
        kwargs: dict[str, Any] | None = None,
        *,
        letters: Any = None,
        meta: dict | None = None,
        fake: torch.dtype | None = None,
        shape: tuple = (),
    ) -> fx.Node:
        kwargs = kwargs or {}
        meta = dict(meta or {})
        if "val" not in meta:
            if fake is not None:
                with self.kept.fake_mode:
                    meta["val"] = torch.empty(shape, dtype=fake)
            else:
                meta["val"] = self._evaluate(target, args, kwargs)
        if letters is not None:
            meta["letters"] = letters
        return self.kept.call(target, args, kwargs, meta)

    def _evaluate(self, target: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        args, kwargs = map_arg(
            (args, kwargs), lambda n: n.meta["val"] if "val" in n.meta else self._number(n)
        )
        with self.kept.fake_mode, torch.no_grad():
            return target(*args, **kwargs)

    def _number(self, n: fx.Node) -> Any:
        """The value of a size node in the first capture."""
        if n.target is aten.sym_size.int:
            return n.args[0].meta["val"].shape[n.args[1]]  # type: ignore[union-attr, index]
        if n.target is getattr:
            return torch.device("cpu")
        args = [self._number(a) if isinstance(a, fx.Node) else a for a in n.args]
        return n.target(*args)  # type: ignore[operator]


class _Rows:
    """Emits the template of one group on routed rows."""

    def __init__(
        self,
        owner: Rewriter,
        group: Expert,
        pft: list[fx.Node],
        weights: dict[int, fx.Node],
        first: int | None,
    ):
        self.owner, self.group, self.weights, self.first = owner, group, weights, first
        self.token_ids, self.slot_ids, self.offsets, self.inverse, self.combine_weights = pft
        self.done: dict[Body, Value] = {}
        self.call = owner._call

    def value(self, b: Body) -> Value:
        if b not in self.done:
            self.done[b] = self._value(b)
        return self.done[b]

    def _value(self, b: Body) -> Value:
        match b.op:
            case "const":
                return Value(b.args[0], "fixed", 0)
            case "shared":
                return Value(self._place(b.args[0]), "fixed", len(b.shape))
            case "expert":
                return self._table(self.group.tables[b.args[0]], b.shape)
            case "value":
                return self._given(b)
            case "pw":
                return self._elementwise(b)
            case "ein":
                return self._contract(b)
        inner = next(self.value(a) for a in b.args if isinstance(a, Body))
        inner = self._stacked(inner)
        off = 0 if inner.kind == "fixed" else 1
        lead = [-1] if inner.kind == "row" else [len(self.group.ids)] if inner.kind == "expert" else []
        match b.op:
            case "slice":
                _, dim, start, stop, step = b.args
                node = self.call(aten.slice.Tensor, (inner.node, dim + off, start, stop, step))
            case "reshape":
                node = self.call(aten.reshape.default, (inner.node, [*lead, *b.shape]))
            case "expand":
                have = inner.node.meta["val"]
                ones = [1] * (len(b.shape) - (have.dim() - off))
                flat = (
                    self.call(aten.reshape.default, (inner.node, [*lead, *ones, *have.shape[off:]]))
                    if ones
                    else inner.node
                )
                node = self.call(aten.expand.default, (flat, [*([-1] * off), *b.shape]))
            case "permute":
                node = self.call(
                    aten.permute.default, (inner.node, [*range(off), *[d + off for d in b.args[1]]])
                )
            case "sum":
                node = self.call(aten.sum.dim_IntList, (inner.node, list(b.args[0])))
            case "row":
                node = self._row_op(b, inner)
            case "cat":
                pieces = [self._as_rows(self.value(a), len(b.shape)) for a in b.args[1:]]
                return Value(self.call(aten.cat.default, (pieces, b.args[0] + 1)), "row", len(b.shape))
            case _:
                raise Refused(f"the experts use {b.op} in a way that is not supported on rows")
        return Value(node, inner.kind, len(b.shape))

    def _row_op(self, b: Body, inner: Value) -> fx.Node:
        name, dims, _, static, _ = b.args
        x = inner.node
        match name:
            case "softmax" | "log_softmax":
                return self.call(getattr(aten, name).int, (x, dims[0]))
            case "layer_norm":
                return self.call(
                    aten.layer_norm.default,
                    (x, list(x.meta["val"].shape[len(dims) * -1 :]), None, None, static[0]),
                )
            case "rms_norm":
                return self.call(
                    aten.rms_norm.default, (x, list(x.meta["val"].shape[len(dims) * -1 :]), None, static[0])
                )
            case "amax" | "amin" | "logsumexp":
                return self.call(getattr(aten, name).default, (x, list(dims)))
            case "linalg_vector_norm":
                return self.call(aten.linalg_vector_norm.default, (x, static[0], list(dims)))
            case "var":
                return self.call(aten.var.correction, (x, list(dims)), {"correction": static[0]})
            case "prod" | "cumsum":
                overload = aten.prod.dim_int if name == "prod" else aten.cumsum.default
                return self.call(overload, (x, dims[0]))
        raise Refused(f"the experts use {name}, which is not supported on rows")

    # ------------------------------------------------------------------ leaves
    def _given(self, b: Body) -> Value:
        i = b.args[0]
        owner, ref = self.owner, self.group.values[i][0]
        if math.prod(b.shape) == 1:
            if i == self.first:
                return Value(owner._reshape(self.combine_weights, (-1,)), "row", 0)
            picked = self.call(
                aten.index.Tensor, (self.weights[i], [self.token_ids, self.slot_ids]), letters=("B",)
            )
            return Value(picked, "row", 0)
        node, shape = owner.kept.node(ref.node), b.shape
        if set(ref.axes) <= {"t"}:
            flat = owner._reshape(node, (-1, math.prod(shape)))
            rows = self.call(
                ops.dispatch.default, (flat, self.token_ids, self.offsets, self.inverse), letters=("B", "D")
            )
        else:  # one value per token and slot
            axes = tuple(a for j, a in enumerate(ref.axes) if a != "t" or "t" not in ref.axes[:j])
            K, width = owner.lifted.slots, math.prod(shape)
            if axes in (("t", "k"), ("tk",)):
                by_slot = owner._reshape(node, (-1, K, width))
            elif axes in (("k", "t"), ("kt",)):
                by_slot = self.call(aten.transpose.int, (owner._reshape(node, (K, -1, width)), 0, 1))
            else:
                raise Refused(
                    "the experts' input is computed per token and expert", source=str(ref.node.meta["source"])
                )
            rows = self.call(
                aten.index.Tensor, (by_slot, [self.token_ids, self.slot_ids]), letters=("B", "D")
            )
        if len(shape) != 1:
            rows = self.call(aten.reshape.default, (rows, [-1, *shape]))
        return Value(rows, "row", len(shape))

    def _place(self, place: Place) -> fx.Node:
        parameter = self.owner.match.block.get_parameter(place.fqn)
        node = self.owner.kept.graph.get_attr(place.fqn)
        with self.owner.kept.fake_mode:
            node.meta["val"] = torch.empty(parameter.shape, dtype=parameter.dtype)
        return self._steps(node, place.steps, 0)

    def _steps(self, node: fx.Node, steps: tuple[tuple, ...], off: int) -> fx.Node:
        """Follow the steps of a place, on one parameter (`off=0`) or on a stack of them (`off=1`)."""
        for op, *rest in steps:
            shape = rest[0]
            if op in ("at", "squeeze"):
                for axis, i in sorted(rest[1], reverse=True):
                    node = self.call(aten.select.int, (node, axis + off, i))
            elif op == "slice":
                _, dim, start, stop, step = rest
                node = self.call(aten.slice.Tensor, (node, dim + off, start, stop, step))
            elif op == "reshape":
                node = self.call(aten.reshape.default, (node, [*node.meta["val"].shape[:off], *shape]))
            elif op == "permute":
                node = self.call(aten.permute.default, (node, [*range(off), *[d + off for d in rest[1]]]))
            elif op == "expand":
                node = self.call(aten.expand.default, (node, [*node.meta["val"].shape[:off], *shape]))
            elif op == "cast":
                node = self.call(aten._to_copy.default, (node,), {"dtype": getattr(torch, shape)})
            elif op == "detach":
                node = self.call(aten.detach.default, (node,))
        return node

    def _table(self, places: list[Place], shape: tuple[int, ...]) -> Value:
        """The parameters of all experts of the group: one stacked tensor where the user has one, else E of them."""
        stack = self._one_stack(places)
        if stack is not None:
            return Value(stack, "expert", len(shape))
        nodes = [self._place(p) for p in places]
        return Value(nodes, "expert", len(shape))

    def _one_stack(self, places: list[Place]) -> fx.Node | None:
        first = places[0]
        if any(p.fqn != first.fqn or len(p.steps) != len(first.steps) for p in places):
            return None
        parameter = self.owner.match.block.get_parameter(first.fqn)
        varying = [k for k in range(len(first.steps)) if any(p.steps[k] != first.steps[k] for p in places)]
        if len(varying) != 1:
            return None
        k = varying[0]
        op, *rest = first.steps[k]
        before = self.owner.kept.graph.get_attr(first.fqn)
        with self.owner.kept.fake_mode:
            before.meta["val"] = torch.empty(parameter.shape, dtype=parameter.dtype)
        before = self._steps(before, first.steps[:k], 0)
        size = before.meta["val"].shape
        if op == "at":
            axis = rest[1][0][0]
            numbers = [p.steps[k][2][0] for p in places]
            others = {p.steps[k][2][1:] for p in places}
            if [a for a, _ in numbers] != [axis] * len(places) or len(others) != 1:
                return None
            order = [i for _, i in numbers]
            node = before if axis == 0 else self.call(aten.movedim.int, (before, axis, 0))
            if order != list(range(size[axis])):
                index = self.call(
                    torch.tensor,
                    (order,),
                    {"device": self.owner.kept.input_device()},
                    fake=torch.int64,
                    shape=(len(order),),
                )
                node = self.call(aten.index_select.default, (node, 0, index))
            for a, i in sorted(others.pop(), reverse=True):
                node = self.call(aten.select.int, (node, a + (1 if a < axis else 0), i))
        elif op == "slice":
            _, dim, start, stop, step = rest
            width = stop - start
            if (
                step != 1
                or size[dim] != width * len(places)
                or [p.steps[k][3] for p in places] != [i * width for i in range(len(places))]
            ):
                return None
            node = self.call(
                aten.reshape.default, (before, [*size[:dim], len(places), width, *size[dim + 1 :]])
            )
            node = node if dim == 0 else self.call(aten.movedim.int, (node, dim, 0))
        else:
            return None
        return self._steps(node, first.steps[k + 1 :], 1)

    def _stacked(self, v: Value) -> Value:
        """E separate tensors as one, where an op needs them together (a copy at every step)."""
        if isinstance(v.node, list):
            return Value(self.call(aten.stack.default, (v.node,)), v.kind, v.rank)
        return v

    def _as_rows(self, v: Value, rank: int) -> fx.Node:
        """A value with one leading row axis and `rank` more."""
        if v.kind == "expert":
            nodes = v.node if isinstance(v.node, list) else [v.node]
            if v.rank != 1:
                flat = self._stacked(v).node
                shape = flat.meta["val"].shape[1:]
                nodes = [self.call(aten.reshape.default, (flat, [flat.meta["val"].shape[0], -1]))]
            total = self.call(
                aten.sym_size.int,
                (self.token_ids, 0),
                {},
                meta={"val": self.token_ids.meta["val"].shape[0], "letters": "B"},
            )
            node = self.call(ops.expert_rows.default, (nodes, self.offsets, total))
            if v.rank != 1:
                node = self.call(aten.reshape.default, (node, [-1, *shape]))
        else:
            node = v.node
        for _ in range(rank - v.rank):
            node = self.call(aten.unsqueeze.default, (node, 1))
        return node

    # ------------------------------------------------------------------ computation
    def _elementwise(self, b: Body) -> Value:
        name, kwargs, *items = b.args
        values = [self.value(a) if isinstance(a, Body) else a for a in items]
        bodies = [v for v in values if isinstance(v, Value)]
        kind = (
            "row"
            if any(v.kind == "row" for v in bodies)
            else "expert"
            if any(v.kind == "expert" for v in bodies)
            else "fixed"
        )
        if name in ("cast", "detach") and kind == "expert" and isinstance(bodies[0].node, list):
            nodes = [self._apply(name, [n], dict(kwargs)) for n in bodies[0].node]
            return Value(nodes, "expert", bodies[0].rank)
        rank = max(v.rank for v in bodies)
        args: list[Any] = []
        for v in values:
            if not isinstance(v, Value):
                args.append(v)
            elif v.kind == "fixed":
                args.append(v.node)
            elif kind == "row":
                args.append(self._as_rows(v, rank))
            else:
                node = self._stacked(v).node
                for _ in range(rank - v.rank):
                    node = self.call(aten.unsqueeze.default, (node, 1))
                args.append(node)
        return Value(self._apply(name, args, dict(kwargs)), kind, rank)

    def _apply(self, name: str, args: list[Any], kwargs: dict[str, Any]) -> fx.Node:
        match name:
            case "cast":
                return self.call(
                    aten._to_copy.default, (args[0],), {"dtype": getattr(torch, kwargs["dtype"])}
                )
            case "detach":
                return self.call(aten.detach.default, (args[0],))
            case "where":
                tensors = [isinstance(a, fx.Node) for a in args]
                overload = {(True, True): "self", (True, False): "ScalarOther", (False, True): "ScalarSelf"}[
                    tensors[1], tensors[2]
                ]
                return self.call(getattr(aten.where, overload), tuple(args))
            case "add" | "sub" | "mul" | "div":
                if not isinstance(args[0], fx.Node):  # a number on the left
                    if name in ("add", "mul"):
                        args = [args[1], args[0]]
                    elif name == "sub":
                        return self.call(aten.rsub.Scalar, (args[1], args[0]))
                    else:
                        reciprocal = self.call(aten.reciprocal.default, (args[1],))
                        return self.call(aten.mul.Tensor, (reciprocal, args[0]))
                return self.call(getattr(aten, name).Tensor, tuple(args))
        packet, _, overload = name.partition(".")
        op = getattr(getattr(aten, packet), overload)
        args = [_scalar(op, i, a) for i, a in enumerate(args)]
        return self.call(op, tuple(args), kwargs)

    def _contract(self, b: Body) -> Value:
        inputs, output, *operands = b.args
        values = [self.value(a) for a in operands]
        if len(values) > 2:
            raise Refused(f"a product of {len(values)} tensors inside the experts is not supported")
        if len(values) == 2 and values[0].kind != "row" and values[1].kind == "row":
            values, inputs = values[::-1], inputs[::-1]
        if (
            len(values) == 2
            and values[0].kind == "row"
            and values[1].kind == "expert"
            and values[0].rank == 1
            and values[1].rank == 2
        ):
            rows, weights = values
            label = inputs[0]
            transposed = inputs[1][1] == label
            nodes = weights.node if isinstance(weights.node, list) else [weights.node]
            out = self.call(
                ops.grouped_mm.default, (rows.node, nodes, self.offsets), {"transposed": transposed}
            )
            out.meta["letters"] = ("B", str(out.meta["val"].shape[-1]))
            return Value(out, "row", 1)
        if any(v.kind == "row" for v in values):
            args = [self._as_rows(v, v.rank) if v.kind != "fixed" else v.node for v in values]
            labels = [("Z" if v.kind != "fixed" else "") + s for v, s in zip(values, inputs, strict=True)]
            return Value(
                self.call(aten.einsum.default, (",".join(labels) + "->Z" + output, args)), "row", len(output)
            )
        stacked = [self._stacked(v) for v in values]
        kind = "expert" if any(v.kind == "expert" for v in values) else "fixed"
        labels = [("Z" if v.kind == "expert" else "") + s for v, s in zip(values, inputs, strict=True)]
        equation = ",".join(labels) + "->" + ("Z" if kind == "expert" else "") + output
        return Value(self.call(aten.einsum.default, (equation, [v.node for v in stacked])), kind, len(output))


def _scalar(op: Any, position: int, value: Any) -> Any:
    """A number where the op wants a tensor becomes one by the op's own rules; where it wants an int, an int."""
    if isinstance(value, float) and value == int(value) and "int" in str(op._schema.arguments[position].type):
        return int(value)
    return value


def _leaves(tree: Any) -> list[fx.Node]:
    return [n for n in pytree.tree_leaves(tree) if isinstance(n, fx.Node)]


def _used_values(body: Body) -> list[int]:
    return sorted({b.args[0] for b in walk(body) if b.op == "value"})


def _value_shape(body: Body, i: int) -> tuple[int, ...]:
    return next(b.shape for b in walk(body) if b.op == "value" and b.args[0] == i)


def _drop_dead(graph: fx.Graph) -> None:
    """Remove what nobody uses, but for effects and random draws."""
    for node in reversed(list(graph.nodes)):
        if node.users or node.op in ("output", "placeholder", "call_module") or is_random(node):
            continue
        if node.target in (aten.copy_.default, setattr):
            continue
        graph.erase_node(node)


__all__ = ["Rewritten", "rewrite"]
_ = (FakeTensor,)
