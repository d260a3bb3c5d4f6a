"""Emit the body of one group of experts on routed rows."""

from __future__ import annotations

import copy
import dataclasses
import math
import operator
from typing import Any

import torch
from torch import fx

from ...errors import Refused
from ...matching.lift.canonical_form import Body, is_weight, walk_body
from ...matching.results.match_result import Match, ProvenGroup
from ...matching.terms.term import Operand
from .expert_weights import ExpertWeights
from .op_emission import OpEmitter
from .pointwise_emission import emit_pointwise

aten = torch.ops.aten
ops = torch.ops.moefx


@dataclasses.dataclass
class BodyValue:
    """An emitted value of a body.

    Attributes:
        node: an fx.Node, or a list of E nodes for separate tensors.
        kind: `row` ([B, ...]), `expert` ([E, ...] or E tensors) or `fixed`.
        num_axes: number of axes of one row, of one expert's tensor, or of the fixed tensor.
    """

    node: Any
    kind: str
    num_axes: int


class ExpertBodyEmitter:
    """Emits the body of a group of experts as ops on routed rows.

    Args:
        pft: the results of `build_pft`.
        weights: [S,K] for each scalar value of the body, by its number.
        pft_value: the number of the value that the PFT holds in row order.
    """

    def __init__(
        self,
        emitter: OpEmitter,
        match: Match,
        group: ProvenGroup,
        pft: list[fx.Node],
        weights: dict[int, fx.Node],
        pft_value: int | None,
    ):
        self.emitter, self.match, self.group, self.weights, self.pft_value = emitter, match, group, weights, pft_value
        self.token_ids, self.slot_ids, self.offsets, self.inverse, self.combine_weights = pft
        self.parameters = ExpertWeights(emitter, match.block)
        self.emitted_values: dict[Body, BodyValue] = {}
        self.source = str(match.forms[0].cut.meta["source"])  # of refusals
        self.expert_number: int | None = None  # the expert whose values are emitted, if only one's

    def call(self, target: Any, args: tuple, kwargs: dict[str, Any] | None = None, **described: Any) -> fx.Node:
        """Emit an op. Its result has routed rows (letter B) if an operand has the same number of them."""
        node = self.emitter.call(target, args, kwargs, **described)
        val = node.meta["val"]
        if isinstance(val, torch.Tensor) and val.dim() and "letters" not in node.meta:
            operands = [a for a in node.all_input_nodes if a.meta.get("letters", ("",))[:1] == ("B",)]
            if any(a.meta["val"].shape[0] == val.shape[0] for a in operands):
                node.meta["letters"] = ("B", *map(str, val.shape[1:]))
        return node

    def emit_value(self, term: Body) -> BodyValue:
        """Emit a term with its shape."""
        value = self._emit_operand(term)
        if not isinstance(value.node, fx.Node) or term.op != "pointwise":
            return value
        node, offset = value.node, int(value.kind != "fixed")
        if tuple(node.meta["val"].shape[offset:]) == term.shape:
            return value
        for _ in range(len(term.shape) - value.num_axes):
            node = self.call(aten.unsqueeze.default, (node, offset))
        node = self.call(aten.expand.default, (node, [*[-1] * offset, *term.shape]))
        return BodyValue(node, value.kind, len(term.shape))

    def _emit_operand(self, term: Body) -> BodyValue:
        """Emit a term for a pointwise op: with a shape that broadcasts, if numbers stand for its larger operands."""
        if term not in self.emitted_values:
            is_computed = self.expert_number is None and is_weight(term) and term.op != "expert"
            by_expert = is_computed and not self._reads_stacks_only(term)
            value = self._emit_per_expert(term) if by_expert else self._emit_body(term)
            self._check_shape(term, value)
            self.emitted_values[term] = value
        return self.emitted_values[term]

    def _check_shape(self, term: Body, value: BodyValue) -> None:
        """Require the number of axes of the term, behind the axis of rows or experts.

        A mistake in the emission of an op must not become a wrong program: most ops would broadcast the wrong shape.
        Numbers and separate tensors are skipped: their users give them a shape, which is checked there.

        Raises:
            Refused: the number of axes differs.
        """
        if not isinstance(value.node, fx.Node):
            return
        shape, num_axes = value.node.meta["val"].shape, value.num_axes if term.op == "pointwise" else len(term.shape)
        if len(shape) != num_axes + (value.kind != "fixed"):
            op = term.args[0] if term.op in ("pointwise", "axis_op") else term.op
            raise self._refuse_op(f"{op} with a result of shape {list(term.shape)} (emitted as {list(shape)})")

    def _reads_stacks_only(self, term: Body) -> bool:
        """Return whether a value of parameters can be computed for all experts at once, from stacked parameters."""
        tables = [self.group.tables[leaf.args[0]] for leaf in walk_body(term) if leaf.op == "expert"]
        return all(map(self.parameters.are_stacked, tables)) and not any(
            inner.op == "call" for inner in walk_body(term)
        )

    def _emit_per_expert(self, term: Body) -> BodyValue:
        """Emit a value of parameters expert by expert. The printer shows these steps once."""
        graph, count = self.emitter.residual.graph, len(self.group.ids)
        first, nodes = len(graph.nodes), []
        for number in range(count):
            before = len(graph.nodes)
            emitter = copy.copy(self)
            emitter.expert_number, emitter.emitted_values = number, {}
            nodes.append(emitter.emit_value(term).node)
            for step, node in enumerate(list(graph.nodes)[before:]):
                node.meta["each"] = (f"{first}.{step}", number, count)
        return BodyValue(nodes, "expert", len(term.shape))

    def _emit_body(self, term: Body) -> BodyValue:
        match term.op:
            case "const":
                return BodyValue(term.args[0], "fixed", 0)
            case "shared":
                return BodyValue(self.parameters.emit_one(term.args[0]), "fixed", len(term.shape))
            case "expert" if self.expert_number is not None:
                part = self.group.tables[term.args[0]][self.expert_number]
                return BodyValue(self.parameters.emit_one(part), "fixed", len(term.shape))
            case "expert":
                return BodyValue(self.parameters.emit_all(self.group.tables[term.args[0]]), "expert", len(term.shape))
            case "value":
                return self._emit_routed_value(term)
            case "pointwise":
                return self._emit_pointwise(term)
            case "einsum":
                return self._emit_contraction(term)
            case "cat":
                return self._emit_joined(term)
            case "call":
                return BodyValue(self._emit_recorded_op(term), "fixed", len(term.shape))
        inner = next(self.emit_value(a) for a in term.args if isinstance(a, Body))
        inner = self._stack(inner)
        offset = 0 if inner.kind == "fixed" else 1
        lead = [-1] if inner.kind == "row" else [len(self.group.ids)] if inner.kind == "expert" else []
        match term.op:
            case "slice":
                _, dim, start, stop, step = term.args
                node = self.call(aten.slice.Tensor, (inner.node, dim + offset, start, stop, step))
            case "select":
                node = inner.node
                for dim, i in reversed(term.args[1]):
                    node = self.call(aten.select.int, (node, dim + offset, i))
            case "reshape":
                node = self.call(aten.reshape.default, (inner.node, [*lead, *term.shape]))
            case "expand":
                inner_val = inner.node.meta["val"]
                unit_dims = [1] * (len(term.shape) - (inner_val.dim() - offset))
                flat = (
                    self.call(aten.reshape.default, (inner.node, [*lead, *unit_dims, *inner_val.shape[offset:]]))
                    if unit_dims
                    else inner.node
                )
                node = self.call(aten.expand.default, (flat, [*([-1] * offset), *term.shape]))
            case "permute":
                node = self.call(
                    aten.permute.default, (inner.node, [*range(offset), *[d + offset for d in term.args[1]]])
                )
            case "sum":
                node = self.call(aten.sum.dim_IntList, (inner.node, list(term.args[0])))
            case "axis_op":
                node = self._emit_axis_op(term, inner)
            case _:
                raise self._refuse_op(term.op)
        return BodyValue(node, inner.kind, len(term.shape))

    def _emit_recorded_op(self, term: Body) -> fx.Node:
        target, args, kwargs, part, *operands = term.args
        nodes = [self.emit_value(a) for a in operands]
        if any(v.kind != "fixed" for v in nodes):
            raise self._refuse_op(str(target))

        def substitute(a: Any) -> Any:
            if isinstance(a, Operand):
                return nodes[a.number].node
            return [substitute(x) for x in a] if isinstance(a, tuple) else a

        node = self.call(target, tuple(map(substitute, args)), {k: substitute(v) for k, v in kwargs})
        return node if part is None else self.call(operator.getitem, (node, part))

    def _emit_joined(self, term: Body) -> BodyValue:
        """Join pieces. The weights of stacked experts are joined once for all experts, not for each of their rows."""
        axis, *parts = term.args
        values = [self.emit_value(a) for a in parts]
        kind = _join_kinds(values)
        lead = [] if kind == "fixed" else [len(self.group.ids)] if kind == "expert" else [self._emit_row_count()]
        nodes = [
            v.node if v.kind == "fixed" else self._stack(v).node if kind == "expert" else
            self._as_rows(v, len(term.shape))
            for v in values
        ]  # fmt: skip
        template = next(n for n in nodes if isinstance(n, fx.Node))
        pieces = []
        for part, value, node in zip(parts, values, nodes, strict=True):
            if not isinstance(node, fx.Node):  # a number, as of padding
                node = self.call(aten.new_full.default, (template, [*lead, *part.shape], node))
            elif value.kind == "fixed" and lead:
                node = self.call(aten.expand.default, (node, [*lead, *part.shape]))
            pieces.append(node)
        return BodyValue(self.call(aten.cat.default, (pieces, axis + len(lead))), kind, len(term.shape))

    def _emit_axis_op(self, term: Body, inner: BodyValue) -> fx.Node:
        name, dims, _, static, _ = term.args
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
            case "max" | "min":
                node = self.call(operator.getitem, (self.call(getattr(aten, name).dim, (x, dims[0])), 0))
                if inner.kind == "row":
                    node.meta["letters"] = ("B", *map(str, node.meta["val"].shape[1:]))
                return node
            case "linalg_vector_norm":
                return self.call(aten.linalg_vector_norm.default, (x, static[0], list(dims)))
            case "var":
                return self.call(aten.var.correction, (x, list(dims)), {"correction": static[0]})
            case "prod":
                for dim in dims:  # from the front, so that the others still count from the end
                    x = self.call(aten.prod.dim_int, (x, dim))
                return x
            case "cumsum" | "cumprod" | "logcumsumexp":
                return self.call(getattr(aten, name).default, (x, dims[0]))
        raise self._refuse_op(name)

    def _refuse_op(self, name: str) -> Refused:
        return Refused(
            f"the experts use {name}, which is not supported on rows",
            source=self.source,
            remedy="compute it with element-wise operations, sums and matrix products, or outside of the experts",
        )

    def _emit_routed_value(self, term: Body) -> BodyValue:
        i = term.args[0]
        ref = self.group.values[i][0]
        if math.prod(term.shape) == 1:
            if i == self.pft_value:
                row_weights = self.emitter.reshape(self.combine_weights, (-1,))
            else:
                row_weights = self._pick_slots(self.weights[i], ("B",))
            for _ in term.shape:  # axes of size one
                row_weights = self.call(aten.unsqueeze.default, (row_weights, 1))
            return BodyValue(row_weights, "row", len(term.shape))
        (node, axes), shape = self.emitter.expand_to_tokens(ref, self.match), term.shape
        if set(axes) <= {"t"}:
            flat = self.emitter.reshape(node, (-1, math.prod(shape)))
            rows = self.call(
                ops.dispatch.default, (flat, self.token_ids, self.offsets, self.inverse), letters=("B", "D")
            )
        else:  # one value per token and slot
            axes = tuple(a for j, a in enumerate(axes) if a != "t" or "t" not in axes[:j])
            K, width = self.match.slots, math.prod(shape)
            if axes in (("t", "k"), ("tk",)):
                by_slot = self.emitter.reshape(node, (-1, K, width))
            elif axes in (("k", "t"), ("kt",)):
                by_slot = self.call(aten.transpose.int, (self.emitter.reshape(node, (K, -1, width)), 0, 1))
            else:
                raise Refused(
                    "the experts' input is computed per token and expert",
                    source=str(ref.node.meta["source"]),
                    remedy="compute it for each token, or for each of its slots, as [S,K,D] with ids [S,K]",
                )
            rows = self._pick_slots(by_slot, ("B", "D"))
        if len(shape) != 1:
            rows = self.call(aten.reshape.default, (rows, [-1, *shape]))
        return BodyValue(rows, "row", len(shape))

    def _pick_slots(self, values: fx.Node, letters: tuple[str, ...]) -> fx.Node:
        return self.call(
            ops.pick_choices.default, (values, self.token_ids, self.slot_ids, self.inverse), letters=letters
        )

    def _stack(self, v: BodyValue) -> BodyValue:
        """Stack E separate tensors for an op that needs them together, which copies them at each call."""
        if isinstance(v.node, list):
            return BodyValue(self.call(aten.stack.default, (v.node,)), v.kind, v.num_axes)
        return v

    def _as_rows(self, v: BodyValue, num_axes: int) -> fx.Node:
        """Emit a value with one leading row axis and `num_axes` more."""
        if v.kind == "expert":
            nodes = v.node if isinstance(v.node, list) else [v.node]
            if v.num_axes != 1:
                flat = self._stack(v).node
                shape = flat.meta["val"].shape[1:]
                nodes = [self.call(aten.reshape.default, (flat, [-1, math.prod(shape)]))]  # of any number of experts
            node = self.call(ops.expert_rows.default, (nodes, self.offsets, self._emit_row_count()))
            node.meta["letters"] = ("B", *map(str, node.meta["val"].shape[1:]))
            if v.num_axes != 1:
                node = self.call(aten.reshape.default, (node, [-1, *shape]))
        else:
            node = v.node
        for _ in range(num_axes - v.num_axes):
            node = self.call(aten.unsqueeze.default, (node, 1))
        return node

    def _emit_row_count(self) -> fx.Node:
        meta = {"val": self.token_ids.meta["val"].shape[0], "letters": "B"}
        return self.call(aten.sym_size.int, (self.token_ids, 0), {}, meta=meta)

    def _emit_pointwise(self, term: Body) -> BodyValue:
        name, kwargs, *items = term.args
        values = [self._emit_operand(a) if isinstance(a, Body) else a for a in items]
        bodies = [v for v in values if isinstance(v, BodyValue)]
        kind = _join_kinds(bodies)
        if name in ("cast", "detach") and kind == "expert" and isinstance(bodies[0].node, list):
            nodes = [emit_pointwise(self.call, name, [n], dict(kwargs)) for n in bodies[0].node]
            return BodyValue(nodes, "expert", bodies[0].num_axes)
        num_axes = max(v.num_axes for v in bodies)
        args: list[Any] = []
        for v in values:
            if not isinstance(v, BodyValue):
                args.append(v)
            elif v.kind == "fixed":
                args.append(v.node)
            elif kind == "row":
                args.append(self._as_rows(v, num_axes))
            else:
                node = self._stack(v).node
                for _ in range(num_axes - v.num_axes):
                    node = self.call(aten.unsqueeze.default, (node, 1))
                args.append(node)
        return BodyValue(emit_pointwise(self.call, name, args, dict(kwargs)), kind, num_axes)

    def _emit_contraction(self, term: Body) -> BodyValue:
        inputs, output, *operands = term.args
        values = [self.emit_value(a) for a in operands]
        if len(values) > 2:
            raise Refused(
                f"a product of {len(values)} tensors inside the experts is not supported",
                source=self.source,
                remedy="multiply two at a time: torch.einsum with two operands, or @",
            )
        if len(values) == 2 and values[0].kind != "row" and values[1].kind == "row":
            values, inputs = values[::-1], inputs[::-1]
        if (
            len(values) == 2
            and values[0].kind == "row"
            and values[1].kind == "expert"
            and values[0].num_axes == 1
            and values[1].num_axes == 2
        ):
            rows, weights = values
            label = inputs[0]
            transposed = inputs[1][1] == label
            nodes = weights.node if isinstance(weights.node, list) else [weights.node]
            out = self.call(ops.grouped_mm.default, (rows.node, nodes, self.offsets), {"transposed": transposed})
            return BodyValue(out, "row", 1)
        if any(v.kind == "row" for v in values):
            args = [self._as_rows(v, v.num_axes) if v.kind != "fixed" else v.node for v in values]
            labels = [("Z" if v.kind != "fixed" else "") + s for v, s in zip(values, inputs, strict=True)]
            return BodyValue(
                self.call(aten.einsum.default, (",".join(labels) + "->Z" + output, args)), "row", len(output)
            )
        stacked = [self._stack(v) for v in values]
        kind = "expert" if any(v.kind == "expert" for v in values) else "fixed"
        labels = [("Z" if v.kind == "expert" else "") + s for v, s in zip(values, inputs, strict=True)]
        equation = ",".join(labels) + "->" + ("Z" if kind == "expert" else "") + output
        return BodyValue(self.call(aten.einsum.default, (equation, [v.node for v in stacked])), kind, len(output))


def _join_kinds(values: list[BodyValue]) -> str:
    """Return the kind of a value that is computed from values of these kinds."""
    kinds = {v.kind for v in values}
    return "row" if "row" in kinds else "expert" if "expert" in kinds else "fixed"
