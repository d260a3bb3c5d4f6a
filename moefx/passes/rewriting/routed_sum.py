"""Emit the cut in the dialect: routing data, the experts on rows, and the sum of each token's rows."""

from __future__ import annotations

import math
import operator
from typing import Any

import torch
from torch import fx

from ...errors import Refused
from ...ir.memory_order import invert_permutation, memory_order
from ...matching.facts.graph_nodes import depends_on_arguments, skip_moves
from ...matching.lift.canonical_form import Body, NodeRef, walk_body
from ...matching.results.match_result import Match, ProvenGroup
from .aligned_nodes import AlignedNodes
from .expert_emission import ExpertBodyEmitter
from .op_emission import OpEmitter
from .residual_graph import ResidualGraph

aten = torch.ops.aten
ops = torch.ops.moefx
_KEEPS_ALL = {
    "_to_copy", "_unsafe_view", "clone", "contiguous", "expand", "flatten", "permute", "reshape", "squeeze", "t",
    "transpose", "unsqueeze", "view",
}  # fmt: skip
_MOVES = {*_KEEPS_ALL, "getitem", "index", "select", "slice", "sort"}


def _memory_order(cut: AlignedNodes) -> tuple[int, ...] | None:
    """Return the memory order of the original's axes if it is not contiguous, since later code may depend on it."""
    vals = [t.meta["val"] for t in cut]
    orders = {memory_order(val.shape, val.stride()) for val in vals if 1 not in val.shape}  # axes of 1 have any stride
    order = orders.pop() if len(orders) == 1 else None
    return None if order is None or list(order) == sorted(order) else order


class RoutedSum:
    """Emits the ops that replace the cut: the PFT, each group of experts, and the sum of their results."""

    def __init__(self, match: Match, residual: ResidualGraph):
        self.match, self.form, self.residual = match, match.forms[0], residual
        self.emitter = OpEmitter(residual)
        self.inverses: list[fx.Node] = []  # for each group the row of each slot, -1 if the slot is dropped
        # Whether ids may lie outside of [0, E). Integers from the caller may, even if the captures' integers do not.
        self.may_be_outside = any(map(depends_on_arguments, self.form.expert_index.nodes)) or self._has_ids_outside(
            match.num_experts
        )

    def emit_sum(self) -> fx.Node:
        cut = self.residual.cut
        val = cut.first.meta["val"]
        ids = self._emit_ids()
        keep = self._emit_keep()
        total: fx.Node | None = None
        for group in self.match.groups:
            part = self._emit_group(group, ids, keep)
            total = part if total is None else self.emitter.call(aten.add.Tensor, (total, part), letters=("S", "D"))
        assert total is not None
        if total.meta["val"].dtype != val.dtype:
            total = self.emitter.call(aten._to_copy.default, (total,), {"dtype": val.dtype})
        if self.form.unrouted_value:
            total = self._emit_fallback(total, self.form.unrouted_value)
        for ref in self.form.shared:
            row = self.emitter.reshape(self.residual.get_node(ref.node), (-1, val.shape[-1]))
            total = self.emitter.call(aten.add.Tensor, (row, total), letters=("S", "D"))
        cut_meta, order = self.residual.build_meta(cut), _memory_order(cut)
        if val.dim() != 2:
            shape = [
                self.residual.sizes.emit_integer([t.meta["val"].shape[d] for t in cut], "the output")
                for d in range(val.dim())
            ]
            meta = {"letters": cut_meta["letters"]} if order else cut_meta
            total = self.emitter.call(aten.view.default, (total, shape), meta=meta)
        else:
            total.meta["letters"] = cut_meta["letters"]
        if order:
            letters = tuple(cut_meta["letters"][d] for d in order)
            total = self.emitter.call(aten.permute.default, (total, list(order)), letters=letters)
            memory_format = {"memory_format": torch.contiguous_format}
            total = self.emitter.call(aten.clone.default, (total,), memory_format, letters=letters)
            total = self.emitter.call(aten.permute.default, (total, invert_permutation(order)), meta=cut_meta)
        return total

    def _emit_fallback(self, total: fx.Node, ref: NodeRef) -> fx.Node:
        """Emit `total` [S,D] with the rows of `ref` for tokens whose slots are all dropped."""
        is_routed: fx.Node | None = None
        for rows in self.inverses:
            has_row = self.emitter.call(aten.any.dim, (self.emitter.call(aten.ge.Scalar, (rows, 0)), 1, True))
            is_routed = (
                has_row if is_routed is None else self.emitter.call(aten.logical_or.default, (is_routed, has_row))
            )
        row = self.emitter.reshape(self.residual.get_node(ref.node), (-1, total.meta["val"].shape[-1]))
        return self.emitter.call(aten.where.self, (is_routed, total, row), letters=("S", "D"))

    def _emit_keep(self) -> fx.Node | None:
        if not self.match.keep_masks:
            return None
        keep = self._emit_per_slot(self.match.keep_masks[0])
        if self.match.keep_masks[0].inverted:
            keep = self.emitter.call(aten.eq.Scalar, (keep, 0))
        elif keep.meta["val"].dtype != torch.bool:
            keep = self.emitter.call(aten.ne.Scalar, (keep, 0))
        return keep

    def _emit_per_slot(self, ref: NodeRef, slot: int | None = None) -> fx.Node:
        """Emit a residual value as [S,K], or as [S,1] for one slot."""
        if ref.columns:
            columns = [self._emit_per_slot(c, k) for k, c in enumerate(ref.columns)]
            return self.emitter.call(aten.cat.default, (columns, 1), letters=("S", "K"))
        K = 1 if slot is not None else self.form.slots
        node, axes = self.emitter.expand_to_tokens(ref, self.match)
        axes = tuple(a for i, a in enumerate(axes) if a != "t" or "t" not in axes[:i])
        shape = [n for n in node.meta["val"].shape if not isinstance(n, int) or n != 1]  # axes of 1 have no letter
        match axes:
            case ("t", "k"):
                out = self.emitter.reshape(node, (-1, K))
            case ("k", "t"):
                out = self.emitter.call(aten.t.default, (self.emitter.reshape(node, (K, -1)),))
            case ("tk",):
                out = self.emitter.reshape(node, (-1, K))
            case ("kt",):
                out = self.emitter.call(aten.t.default, (self.emitter.reshape(node, (K, -1)),))
            case ("t",):
                out = self.emitter.reshape(node, (-1, 1))
                if K > 1:
                    out = self.emitter.call(aten.expand.default, (out, [-1, K]))
            case ("t", "e"):
                out = self.emitter.call(
                    aten.gather.default,
                    (self.emitter.reshape(node, (-1, shape[-1])), 1, self._emit_clamped_ids(shape[-1], slot)),
                )
            case ("t", "m"):
                expert_ids = self.emitter.reshape(node, (-1, shape[-1]))
                device = self.residual.emit_input_device()
                expert_range = self.emitter.call(
                    aten.arange.default,
                    (shape[-1],),
                    {"device": device},
                    fake=torch.int64,
                    shape=(shape[-1],),
                )
                out = self.emitter.call(
                    aten.expand_as.default, (self.emitter.call(aten.unsqueeze.default, (expert_range, 0)), expert_ids)
                )
            case ("e", "t"):
                flat = self.emitter.call(aten.t.default, (self.emitter.reshape(node, (shape[0], -1)),))
                out = self.emitter.call(aten.gather.default, (flat, 1, self._emit_clamped_ids(shape[0], slot)))
            case ("e",):
                out = self.emitter.call(
                    aten.index.Tensor,
                    (self.emitter.reshape(node, (shape[0],)), [self._emit_clamped_ids(shape[0], slot)]),
                )
            case _:
                out = self.emitter.call(
                    aten.expand.default,
                    (
                        self.emitter.reshape(node, (1, 1)),
                        [
                            self.residual.sizes.emit_integer([math.prod(form.tokens) for form in self.match.forms], ""),
                            K,
                        ],
                    ),
                )
        out.meta["letters"] = ("S", "K")
        return out

    def _emit_ids(self, slot: int | None = None) -> fx.Node:
        """Emit the expert index [S,K], or [S,1] for one slot. Ids that count from the end become ids from the start."""
        index = self.form.expert_index
        if slot is None:
            ids = self._emit_per_slot(index)
        elif index.columns:
            ids = self._emit_per_slot(index.columns[slot], slot)
        else:
            ids = self.emitter.call(aten.slice.Tensor, (self._emit_per_slot(index), 1, slot, slot + 1))
        if ids.meta["val"].dtype is torch.bool:  # a bool selects one of two experts
            ids = self.emitter.call(aten._to_copy.default, (ids,), {"dtype": torch.int64}, letters=("S", "K"))
        # raise for the same ids as the program
        if self.may_be_outside and (size := self._count_indexed_experts(_KEEPS_ALL)):
            return self.emitter.call(aten.index.Tensor, (self._emit_table(list(range(size))), [ids]))
        if self.may_be_outside and (size := self._count_indexed_experts(_MOVES)):
            from_the_end = self.emitter.call(aten.lt.Scalar, (ids, 0))
            ids = self.emitter.call(
                aten.where.self, (from_the_end, self.emitter.call(aten.add.Tensor, (ids, size)), ids)
            )
        return ids

    def _count_indexed_experts(self, moves: set[str]) -> int:
        """Return the size of the parameter axis that the ids index, possibly through ops in `moves`; 0 if they index
        none. In an index, negative ids count from the end."""
        index_nodes = {skip_moves(n, moves) for n in self.form.expert_index.nodes}
        for n in (n for n in self.form.replaced_nodes if n.target is aten.index.Tensor):
            base, indices = n.args
            for dim, i in enumerate(indices):  # type: ignore[arg-type]
                if i is not None and skip_moves(i, moves) in index_nodes and base in self.form.replaced_nodes:
                    return base.meta["val"].shape[dim]  # type: ignore[union-attr]
        return 0

    def _emit_clamped_ids(self, width: int, slot: int | None = None) -> fx.Node:
        ids = self._emit_ids(slot)
        if ids.meta["val"].dtype != torch.int64:
            ids = self.emitter.call(aten._to_copy.default, (ids,), {"dtype": torch.int64})
        may_be_outside = self.may_be_outside or self._has_ids_outside(width)
        return self.emitter.call(aten.clamp.default, (ids, 0, width - 1)) if may_be_outside else ids

    def _has_ids_outside(self, width: int) -> bool:
        return any(bool((form.ids < 0).any() or (form.ids >= width).any()) for form in self.match.forms)

    def _emit_group(self, group: ProvenGroup, ids: fx.Node, keep: fx.Node | None) -> fx.Node:
        if group.ids != list(range(len(group.ids))) or len(self.match.groups) > 1:
            ids = self._emit_local_ids(group, ids)
        scalars = [i for i in _used_values(group.body) if math.prod(_value_shape(group.body, i)) == 1]
        weights = {i: self._emit_per_slot(group.values[i][0]) for i in scalars}
        pft_value = scalars[0] if scalars else None
        kwargs: dict[str, Any] = {"num_experts": len(group.ids)}
        if self.match.drop_rule is not None:
            kwargs |= {
                "capacity": self.residual.sizes.emit_formula(self.match.drop_rule.capacity),
                "drop": self.match.drop_rule.order,
            }
        pft = self.emitter.call(ops.build_pft.default, (ids, weights.get(pft_value), keep), kwargs)  # type: ignore[arg-type]
        pft.meta["num_experts"] = sum(len(g.ids) for g in self.match.groups)
        letters = (("B",), ("B",), ("E+1",), ("S", "K"), ("B",))
        pft.meta["letters"] = letters
        parts = [self.emitter.call(operator.getitem, (pft, i), letters=letters[i]) for i in range(5)]
        self.inverses.append(parts[3])
        rows = ExpertBodyEmitter(self.emitter, self.match, group, parts, weights, pft_value)
        y = rows.emit_value(group.body)
        if y.kind != "row":
            raise _explain_constant(group, str(self.match.forms[0].cut.meta["source"]))
        out = self.emitter.call(ops.combine.default, (y.node, None, parts[0], parts[2], parts[3]))
        out.meta["letters"] = ("S", "D")
        return out

    def _emit_local_ids(self, group: ProvenGroup, ids: fx.Node) -> fx.Node:
        """Emit expert ids within one of several groups; -1 for experts of other groups."""
        low, high = group.ids[0], group.ids[-1]
        if group.ids == list(range(low, high + 1)):
            local_ids = self.emitter.call(aten.sub.Tensor, (ids, low)) if low else ids
            inside = self.emitter.call(aten.lt.Scalar, (local_ids, len(group.ids)))
            return self.emitter.call(aten.where.ScalarOther, (inside, local_ids, -1))
        table = [-1] * (max(self.match.num_experts, 1 + max(int(form.ids.max()) for form in self.match.forms)))
        for local, e in enumerate(group.ids):
            table[e] = local
        if self.may_be_outside:  # ids on either side belong to no expert
            table = [-1, *table, -1]
            ids = self.emitter.call(
                aten.clamp.default, (self.emitter.call(aten.add.Tensor, (ids, 1)), 0, len(table) - 1)
            )
        return self.emitter.call(aten.index.Tensor, (self._emit_table(table), [ids]))

    def _emit_table(self, values: list[int]) -> fx.Node:
        options = {"dtype": torch.int64, "device": self.residual.emit_input_device()}
        return self.emitter.call(torch.tensor, (values,), options, fake=torch.int64, shape=(len(values),))


def _used_values(body: Body) -> list[int]:
    return sorted({b.args[0] for b in walk_body(body) if b.op == "value"})


def _value_shape(body: Body, i: int) -> tuple[int, ...]:
    return next(b.shape for b in walk_body(body) if b.op == "value" and b.args[0] == i)


def _explain_constant(group: ProvenGroup, source: str) -> Refused:
    if group.body.op == "const" and math.isnan(group.body.args[0]):
        return Refused(
            f"tokens with the number {group.ids[0]}, which is no expert's, keep memory that was never written, or NaN",
            source=source,
            remedy="start from torch.zeros_like(x) instead of torch.empty_like(x)",
        )
    return Refused(
        "the result of the experts does not depend on the token",
        source=source,
        remedy="look it up by the chosen expert instead of running experts: table[ids]",
    )
