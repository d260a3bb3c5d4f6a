"""Rewrite a proven block to a graph in the PFT dialect (X-MoE section 4.1, listing 1).

    pft  = build_pft(topk_ids, topk_weights)     from the user's own router
    rows = dispatch(x, pft)                      [B,D], sorted by expert, no padding
    ...    the body F on rows: grouped GEMMs, pointwise ops, per-expert vectors
    out  = combine(rows, pft)                    [S,D]

Everything before and after is the user's own program, re-emitted by `residual_graph`.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import fx, nn

from ..capture.environment.device_autocast import get_autocast_dtype
from ..capture.tracing.capture_result import Effect, SubmoduleCall
from ..capture.tracing.op_sets import CONTRACTIONS
from ..errors import Refused
from ..ir.passed_objects import check_structure
from ..matching.facts.graph_nodes import is_random, is_skipped
from ..matching.lift.canonical_form import NodeRef
from ..matching.lift.lift_refusals import refuse_random
from ..matching.results.match_result import Match
from ..matching.results.size_samples import SizeSamples
from ..matching.terms.parameter_slices import get_tensor
from ..matching.unsupported_effects import refuse_effects
from .rewriting.aligned_effects import AlignedEffect, align_effects
from .rewriting.aligned_nodes import AlignedNodes, list_leaf_nodes
from .rewriting.residual_graph import ResidualGraph
from .rewriting.routed_sum import RoutedSum

aten = torch.ops.aten


@dataclasses.dataclass
class DialectGraph:
    """A graph in the dialect, and the parts of the block that it uses.

    Attributes:
        graph: the FX graph; attribute and module targets are relative to the block.
        out_spec: pytree of the output, for the flat list that the graph returns.
        absorbed: names of the expert parameters, which the dialect reads directly.
        recomputed_modules: modules that the graph calls, and some of whose inner values it also computes.
        attributes: names of block attributes that a call sets.
    """

    graph: fx.Graph
    out_spec: pytree.TreeSpec
    absorbed: list[str]
    recomputed_modules: list[str]
    attributes: list[str]


@dataclasses.dataclass(frozen=True)
class Placeholders:
    """Names of the placeholders of a graph.

    Attributes:
        tensors: names of the tensor arguments.
        objects: names by id of the stand-in for an object.
    """

    tensors: list[str]
    objects: dict[int, str]


def rewrite(match: Match, samples: SizeSamples, names: Placeholders) -> tuple[Match, DialectGraph]:
    """Rewrite a block to the dialect. Also return the match for which the rewrite is valid.

    If the program takes another branch at some sizes, this may be the match for the other sizes only, with a guard.
    """
    try:
        return match, Rewriter(match, samples, names).rewrite()
    except Refused:
        narrow_match = match.without_optional()
        if narrow_match is None:
            raise
        return narrow_match, Rewriter(narrow_match, samples.narrow(narrow_match), names).rewrite()


class Rewriter:
    """Builds the graph of a match: the residual with the routed sum in it, and the side effects."""

    def __init__(self, match: Match, samples: SizeSamples, names: Placeholders):
        self.match, self.form = match, match.forms[0]
        self.residual = ResidualGraph(match, samples, lambda: RoutedSum(match, self.residual).emit_sum())
        self.residual.add_inputs(names.tensors)
        self.residual.add_objects(names.objects)
        self.overwritten: dict[fx.Node, fx.Node] = {}
        self.states: list[Effect] = []  # plain values that attributes are set to

    def rewrite(self) -> DialectGraph:
        """Build the graph.

        Raises:
            Refused: the results, effects or random draws of the captures differ, or no graph can express them.
        """
        outputs, out_spec = self._align_outputs()
        self._require_autocast()
        effects = self._align_effects()
        self._copy_overwritten_inputs(effects)
        plan = self._plan_residual(outputs, effects)
        own_effects = self._select_own_effects(effects, plan)
        self.residual.emit(plan)
        self._require_skipped_calls()
        values = [self.residual.merge_values(list(leaves), "the output") for leaves in outputs]
        attributes = self._emit_effects(own_effects)
        self._emit_output(values, outputs, own_effects)
        _drop_dead_nodes(self.residual.graph)
        absorbed = sorted({part.fqn for g in self.match.groups for table in g.tables for part in table})
        return DialectGraph(self.residual.graph, out_spec, absorbed, self.residual.walk.recomputed_modules, attributes)

    def _align_outputs(self) -> tuple[list[tuple[Any, ...]], pytree.TreeSpec]:
        """Return each leaf of the block's result, in all captures, and the structure of the result."""
        trees = [pytree.tree_flatten(c.out, is_leaf=_is_node) for c in self.residual.captures]
        spec = trees[0][1]
        if any(s != spec for _, s in trees):
            raise Refused(
                "the structure of the block's result depends on the routing",
                remedy="return the same structure of tensors in every call",
            )
        return list(zip(*[flat for flat, _ in trees], strict=True)), spec

    def _require_autocast(self) -> None:
        """Refuse a program that switches autocast off for its experts, because ops of the dialect follow autocast."""
        for n in self.form.replaced_nodes:
            if get_autocast_dtype() and n.target in CONTRACTIONS and n.meta["autocast"] != get_autocast_dtype():
                raise Refused(
                    "the experts switch autocast off",
                    source=str(n.meta["source"]),
                    remedy="remove torch.autocast(..., enabled=False) around the experts, or cast inside of them",
                )

    def _copy_overwritten_inputs(self, effects: list[AlignedEffect]) -> None:
        """Let the graph compute with copies of the inputs that it overwrites: the backward must not keep them."""
        for effect, _ in effects:
            if effect.kind == "input":
                placeholder = self.residual.new_nodes[effect.target]
                self.overwritten[effect.target] = placeholder
                self.residual.new_nodes[effect.target] = self.residual.call(
                    aten.clone.default, (placeholder,), {}, dict(placeholder.meta)
                )

    def _plan_residual(self, outputs: list[tuple[Any, ...]], effects: list[AlignedEffect]) -> list[Any]:
        """Plan the nodes and calls of the residual that results, effects, the routed sum and random draws need."""
        roots: list[AlignedNodes] = []
        for leaves in outputs:
            if any(map(_is_node, leaves)):
                if not all(map(_is_node, leaves)):
                    raise Refused(
                        "whether the block returns a tensor depends on the routing",
                        source=next(str(leaf.meta["source"]) for leaf in leaves if _is_node(leaf)),
                        remedy="return a tensor in every call, such as one of zeros",
                    )
                roots.append(AlignedNodes(leaves))
        roots += [aligned for _, leaves in effects for aligned in leaves if isinstance(aligned, AlignedNodes)]
        roots += self._find_inputs_of_cut()
        extra_calls = self._find_random_draws() + self._find_skipped_calls()
        while True:  # a plan may find that a call must be inlined, which changes the calls around it
            before = set(self.residual.walk.inlined)
            plan = self.residual.walk.plan(roots + self._replace_inner_draws(extra_calls))
            if self.residual.walk.inlined == before:
                return plan

    def _select_own_effects(self, effects: list[AlignedEffect], plan: list[Any]) -> list[AlignedEffect]:
        """Return the effects that no submodule of the plan has itself.

        Raises:
            Refused: the block sets an attribute to a plain value outside of these submodules.
        """
        calls = [item[0] for item in plan if isinstance(item, list)]
        own_effects = [aligned for aligned in effects if not self._belongs_to_call(*aligned, calls)]
        for state in self.states:
            if not any(_changes_module(state, call) for call in calls):
                raise Refused(
                    f"the block sets its attribute {state.target} when it is called",
                    culprits=(str(state.target),),
                    remedy="keep it in a buffer, or set it outside of forward; if it is set once, call the model once "
                    "before moefx.compile",
                )
        return own_effects

    def _require_skipped_calls(self) -> None:
        """Refuse a block in which a call with an object, which captures do not run, did not stay a call."""
        if inlined := next((n for n in self.residual.new_nodes if is_skipped(n)), None):
            raise Refused(
                "a submodule gets an object that it may write to, and its call cannot stay a call: an argument or "
                "result is neither a tensor nor a plain value, or the block uses one in another way",
                source=str(inlined.meta["source"]),
                remedy="pass it tensors, numbers and the object, and return tensors that it makes",
            )

    def _emit_output(self, values: list[Any], outputs: list[tuple[Any, ...]], effects: list[AlignedEffect]) -> None:
        """Emit the output. An input that was changed is returned itself, as in `x.add_(y); return x`."""
        new_inputs = {leaves[0].first: self.overwritten[e.target] for e, leaves in effects if e.kind == "input"}
        self.residual.graph.output(
            [
                new_inputs.get(leaves[0], value) if _is_node(leaves[0]) else value
                for value, leaves in zip(values, outputs, strict=True)
            ]
        )

    def _belongs_to_call(self, effect: Effect, leaves: list[Any], calls: list[SubmoduleCall]) -> bool:
        """Return whether a submodule that stays a call makes this change of its own state.

        Raises:
            Refused: the block changes the submodule's state and then reads it. The change is emitted at the end, and
                gradients of a parameter would not reach it.
        """
        if effect.kind == "input":
            return False
        node = next(aligned.first for aligned in leaves if isinstance(aligned, AlignedNodes))
        position, changing = node.meta["index"], [call for call in calls if _changes_module(effect, call)]
        if any(call.start <= position < call.stop for call in changing):
            return True
        is_parameter = effect.kind == "buffer" and isinstance(
            get_tensor(self.match.block, str(effect.target)), nn.Parameter
        )
        if any(call.start > position for call in changing) or (is_parameter and node.users):
            raise Refused(
                f"the block changes {effect.target} when it is called, and then computes with it",
                culprits=(str(effect.target),),
                source=str(node.meta["source"]),
                remedy="leave it as it is and compute with a changed copy: F.linear(x, F.normalize(weight))",
            )
        return False

    def _find_inputs_of_cut(self) -> list[AlignedNodes]:
        """Return the residual nodes that the routed sum reads."""
        refs = [
            self.index,
            *[v for g in self.match.groups for v in g.values],
            *([self.match.keep_masks] if self.match.keep_masks else []),
        ]
        refs += [[form.shared[i] for form in self.match.forms] for i in range(len(self.form.shared))]
        if self.form.unrouted_value:
            refs.append([form.unrouted_value for form in self.match.forms])  # type: ignore[misc]
        return [AlignedNodes(column) for ref in refs for column in zip(*[r.nodes for r in ref], strict=True)]

    @property
    def index(self) -> list[NodeRef]:
        """The expert index of each capture."""
        return [form.expert_index for form in self.match.forms]

    def _find_random_draws(self) -> list[AlignedNodes]:
        """Return all draws of random numbers. Unused draws stay too, so that the stream equals the original's."""
        draws = [
            [n for n in c.nodes if is_random(n) and n not in form.replaced_nodes]
            for c, form in zip(self.residual.captures, self.match.forms, strict=True)
        ]
        if len({len(d) for d in draws}) != 1:
            raise Refused(
                "how often random numbers are drawn depends on the routing",
                source=str(next(n for d in draws for n in d).meta["source"]),
                remedy="draw them in every call, and choose between the results by torch.where",
            )
        for form in self.match.forms:
            for n in form.replaced_nodes:
                if is_random(n):
                    raise refuse_random(n)
        return [AlignedNodes(column) for column in zip(*draws, strict=True)]

    def _find_skipped_calls(self) -> list[AlignedNodes]:
        """Return all calls that may write to an object of the caller. They stay even if their results are unused."""
        skipped = [[n for n in c.nodes if is_skipped(n)] for c in self.residual.captures]
        if len({len(s) for s in skipped}) != 1:
            raise Refused(
                "the number of calls of a submodule with an object that it may write to depends on the routing",
                source=str(next(n for s in skipped for n in s).meta["source"]),
                remedy="call it equally often in every call of the block",
            )
        return [AlignedNodes(column) for column in zip(*skipped, strict=True)]

    def _replace_inner_draws(self, calls: list[AlignedNodes]) -> list[AlignedNodes]:
        """Replace draws inside a submodule call by a result of the call, which makes the draws itself."""
        out = []
        for aligned in calls:
            call = self.residual.walk.inside_call(aligned.first)
            if call is None:
                out.append(aligned)
            else:
                out.append(AlignedNodes(list_leaf_nodes(c.out)[0] for c in call))
        return out

    def _align_effects(self) -> list[AlignedEffect]:
        """Return the effects, which are the same in all captures.

        Raises:
            Refused: they differ, a rewritten block cannot repeat them, or the experts compute the value of a buffer.
        """
        for capture in self.residual.captures:
            refuse_effects(capture)
        effects, self.states = align_effects([c.effects for c in self.residual.captures])
        for effect, leaves in effects:
            if effect.kind == "buffer" and leaves[0].first in self.form.replaced_nodes:
                raise Refused(
                    f"the experts' computation updates the buffer {effect.target}",
                    culprits=(str(effect.target),),
                    source=str(leaves[0].first.meta["source"]),
                    remedy="update it from the sum of all experts, behind their loop",
                )
        return effects

    def _emit_effects(self, effects: list[AlignedEffect]) -> list[str]:
        """Emit the writes to attributes, buffers and inputs, and return the names of the attributes."""
        attributes = []
        for effect, leaves in effects:
            if effect.kind == "attribute":
                owner, _, name = str(effect.target).rpartition(".")
                attributes.append(str(effect.target))
                values = [self.residual.get_node(v.first) if isinstance(v, AlignedNodes) else v for v in leaves]
                value = pytree.tree_unflatten(values, pytree.tree_structure(effect.node))
                source = next(str(v.first.meta["source"]) for v in leaves if isinstance(v, AlignedNodes))
                self.residual.call(setattr, (owner, name, value), {}, {"source": source})
                continue
            aligned = leaves[0]
            value = self.residual.get_node(aligned.first)
            if effect.kind == "buffer":
                target = self.residual.graph.get_attr(str(effect.target))
                if isinstance(get_tensor(self.match.block, str(effect.target)), nn.Parameter):  # through its `.data`
                    target = self.residual.call(aten.detach.default, (target,), {}, {})
            else:
                target = self.overwritten[effect.target]
            self.residual.call(aten.copy_.default, (target, value), {}, {"source": str(aligned.first.meta["source"])})
        return attributes


def _changes_module(effect: Effect, call: SubmoduleCall) -> bool:
    """Return whether an effect changes the state of the called module."""
    return str(effect.target).startswith(call.fqn + ".")


def _is_node(value: Any) -> bool:
    return isinstance(value, fx.Node)


def _drop_dead_nodes(graph: fx.Graph) -> None:
    """Remove unused nodes without effects and random draws."""
    for node in reversed(list(graph.nodes)):
        if node.users or node.op in ("output", "placeholder", "call_module") or is_random(node):
            continue
        if node.target in (aten.copy_.default, setattr, check_structure):
            continue
        graph.erase_node(node)


__all__ = ["DialectGraph", "Placeholders", "rewrite"]
