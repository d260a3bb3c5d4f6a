"""Walk the residual in all captures side by side, from its results to its inputs, and list the nodes to emit."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch.utils._pytree as pytree
from torch import fx

from ...capture.environment.code_locations import Source
from ...capture.tracing.capture_result import Capture, HostRead, SubmoduleCall
from ...capture.tracing.node_origins import find_float_decisions
from ...errors import Refused
from ...ir.node_values import get_op_name
from ...matching.facts.graph_nodes import depends_on_routing, find_buffers, is_random
from ...matching.results.match_result import Match
from .aligned_nodes import AlignedNodes, build_branch_refusal, build_routing_refusal, list_leaf_nodes, name_op_kind
from .scalar_reads import ScalarReads
from .submodule_calls import find_module_calls, is_within

LOOP_OVER_STEPS = "if a loop runs once for each step of a sequence, put it into a submodule, which is called unchanged"


class ResidualWalk:
    """The nodes of the residual, and the submodule calls that stay calls.

    Args:
        reads: the numbers that Python read from tensors.

    Attributes:
        cut: the node at which all routed rows are summed.
        aligned: the nodes of the latest plan, by their node in the first capture.
        call_of: for each result of a call that stays a call, the call in all captures.
        inlined: start indices of calls whose nodes are emitted one by one.
        recomputed_modules: called modules some of whose inner values the residual computes again.
    """

    def __init__(self, match: Match, reads: ScalarReads):
        self.match, self.reads = match, reads
        self.captures = [form.capture for form in match.forms]
        self.cut = AlignedNodes(form.cut for form in match.forms)
        self.absorbed = match.forms[0].replaced_nodes
        self.aligned: dict[fx.Node, AlignedNodes] = {}
        self.inlined: set[int] = set()
        self.recomputed_modules: list[str] = []
        self._choose_calls()

    def _choose_calls(self) -> None:
        self.calls = find_module_calls(self.match, self.inlined)
        self.call_by_result = {
            n: call for call in self.calls for n in list_leaf_nodes(call[0].out) if n.meta["index"] >= call[0].start
        }

    def plan(self, roots: Sequence[AlignedNodes]) -> list[Any]:
        """List the nodes to emit for these roots, in program order: `AlignedNodes`, and lists of calls."""
        while True:
            self.aligned.clear()
            plan = self._plan(roots)
            inside = [
                c for c in self.calls if any(is_within(p, c) and p.first not in self.call_by_result for p in plan)
            ]
            # Values from inside a call are computed a second time. A call that draws random numbers is inlined instead,
            # so that it draws them once.
            random = [c for c in inside if any(is_random(n) for n in self.captures[0].nodes[c[0].start : c[0].stop])]
            self.recomputed_modules = sorted({c[0].fqn for c in inside})
            if not random:
                return plan
            self.inlined |= {c[0].start for c in random}
            self._choose_calls()

    def inside_call(self, n: fx.Node) -> list[SubmoduleCall] | None:
        """Return the call that contains a node and stays a call, or None."""
        return next((c for c in self.calls if c[0].start <= n.meta["index"] < c[0].stop), None)

    def _plan(self, roots: Sequence[AlignedNodes]) -> list[Any]:
        """Return the aligned nodes to emit, and the calls that stay calls, in the order of the first capture.

        Nodes have even positions. A call comes before its first node.
        """
        items_by_position: dict[int, Any] = {}
        stack: list[AlignedNodes] = list(roots)
        seen: set[fx.Node] = set()
        while stack:
            aligned = stack.pop()
            n = aligned.first
            if n in seen:
                if tuple(self.aligned[n]) != tuple(aligned):
                    raise self._refuse_difference(
                        n, next(b for a, b in zip(self.aligned[n], aligned, strict=True) if a is not b)
                    )
                continue
            seen.add(n)
            self.aligned[n] = aligned
            if n.op == "placeholder":
                if any(t.op != "placeholder" or t.meta["position"] != n.meta["position"] for t in aligned):
                    raise self._refuse_difference(
                        n,
                        next(t for t in aligned if t.op != "placeholder" or t.meta["position"] != n.meta["position"]),
                    )
                continue
            call = self.call_by_result.get(n)
            if call is not None:
                self._require_same_result(aligned, call)
                if id(call) not in {id(v) for v in items_by_position.values() if isinstance(v, list)}:
                    items_by_position[call[0].start * 2 - 1] = call
                    stack += self._pair_trees([(c.args, c.kwargs) for c in call], f"module {call[0].fqn}")
                continue
            if any(t is c for t, c in zip(aligned, self.cut, strict=True)):
                if tuple(aligned) != tuple(self.cut):
                    are_cuts = [t is c for t, c in zip(aligned, self.cut, strict=True)]
                    raise self._refuse_difference(n, aligned[are_cuts.index(not are_cuts[0])])
                items_by_position[n.meta["index"] * 2] = aligned
                continue
            if n in self.absorbed and n.op != "get_attr":
                raise Refused(
                    "a value from inside the experts is used outside of the routed sum",
                    culprits=(get_op_name(n),),
                    source=str(n.meta["source"]),
                    remedy="leave it out, or compute it from the routing weights or from the output",
                )
            items_by_position[n.meta["index"] * 2] = aligned
            stack += self._pair_arguments(aligned)
        return [items_by_position[i] for i in sorted(items_by_position)]

    def _refuse_difference(self, node: fx.Node, other: fx.Node) -> Refused:
        """Build the refusal of a step that differs between captures. Name the branch of Python that causes it."""
        branch = _find_branch([c for n in (node, other) for c in self.captures if n in c.nodes])
        if branch is None:
            return build_routing_refusal(node, other)
        return build_branch_refusal(branch.source, find_buffers(branch))

    def _require_same_result(self, aligned: AlignedNodes, call: list[SubmoduleCall]) -> None:
        """Refuse unless the nodes are the same result of the call in every capture."""
        columns = zip(*[list_leaf_nodes(c.out) for c in call], strict=True)
        if tuple(aligned) not in {tuple(column) for column in columns}:
            raise self._refuse_difference(aligned[0], next(t for t in aligned[1:] if t is not aligned[0]))

    def _pair_arguments(self, aligned: AlignedNodes) -> list[AlignedNodes]:
        first = aligned.first
        for other in aligned[1:]:
            if other.op != first.op or (first.op == "call_function" and name_op_kind(other) != name_op_kind(first)):
                raise self._refuse_difference(first, other)
        return self._pair_trees([(n.args, n.kwargs) for n in aligned], str(first.meta["source"]))

    def _pair_trees(self, trees: list[Any], line: str) -> list[AlignedNodes]:
        leaves = [pytree.tree_leaves(t) for t in trees]
        flats = [[a for a in flat if isinstance(a, fx.Node)] for flat in leaves]
        if len({len(f) for f in flats}) != 1:
            raise Refused(
                "code outside the experts depends on the routing or on sizes: an op gets a different number of "
                "arguments",
                source=line,
                remedy=LOOP_OVER_STEPS,
            )
        scalar_nodes = [scalar.aligned for column in zip(*leaves, strict=False) if (scalar := self.reads.find(column))]
        return [*(AlignedNodes(column) for column in zip(*flats, strict=True)), *scalar_nodes]


def _find_branch(captures: Sequence[Capture]) -> HostRead | None:
    """Return a read of Python that was forced in a capture, or that differs between captures without the routing.
    Otherwise return a read of activations."""
    forced_reads = [read for capture in captures for read in capture.reads if read.call_stack in capture.interventions]
    if forced_reads:
        return forced_reads[-1]
    value_by_call: dict[tuple[Source, ...], Any] = {}
    for read in (read for capture in captures for read in capture.reads):
        is_branch = type(read.value) is bool and read.node is not None and not depends_on_routing(read.node)
        if is_branch and value_by_call.setdefault(read.call_stack, read.value) is not read.value:
            return read
    return _find_read_of_activations(captures)


def _find_read_of_activations(captures: Sequence[Capture]) -> HostRead | None:
    """Return a read of activations whose outcomes differ between captures, such as the test of a loop that waits for
    one: the numbers of its rounds differ."""
    first_reads: dict[tuple[Source, ...], HostRead] = {}
    outcomes: defaultdict[tuple[Source, ...], set[tuple[Any, ...]]] = defaultdict(set)
    for capture in captures:
        values: defaultdict[tuple[Source, ...], list[Any]] = defaultdict(list)
        for read in capture.reads:
            if read.node is not None and not read.node.meta["ragged"] and find_float_decisions(read.node):
                first_reads.setdefault(read.call_stack, read)
                values[read.call_stack].append(read.value)
        for call_stack, in_order in values.items():
            outcomes[call_stack].add(tuple(in_order))
    return next((first_reads[call_stack] for call_stack, seen in outcomes.items() if len(seen) > 1), None)
