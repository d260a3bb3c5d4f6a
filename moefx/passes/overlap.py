"""Schedule independent nodes between the start of an exchange and its wait.

These nodes are shared experts, experts of another chunk of tokens and, in the backward, the gradients of the experts'
matrices. Each start is scheduled as soon as its inputs exist, and each wait only when nothing else can run. Waits
follow the order of the starts.

Autograd runs the graph in reverse. The backward of a wait starts the exchange of gradients, and the backward of the
start waits for it. `weights_later` marks the point in between at which the matrices' gradients are computed.

Nodes that no start needs are placed right before the last waits, which wait for the experts' results. So their backward
overlaps with the first exchange of gradients, and the matrices' gradients overlap with the last one.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from ..ir.graphs.block_graph import BlockGraph
from ..ir.graphs.graph_levels import has_effect
from ..ir.node_values import get_argument, read_item, set_argument
from .pass_manager import graph_pass

ops = torch.ops.moefx
_STARTS = (
    ops.all_to_all_rows.default,
    ops.all_to_all_back.default,
    ops.gather_tokens.default,
    ops.scatter_sums.default,
)
_WAITS = (
    ops.read_counts.default,
    ops.wait_rows.default,
    ops.wait_sums.default,
    ops.wait_gathered.default,
    ops.wait_scattered.default,
)


@graph_pass(level="distributed", name="overlap")
def overlap_exchanges(block: BlockGraph, plan: Any) -> BlockGraph:
    """Delay each wait and the matrices' gradients as far as possible. Other nodes keep their order."""
    block = block.copy()
    for experts in block.find(ops.expert_mlp.default):
        _delay_weights(block.graph, experts)
    *nodes, output = block.graph.nodes
    for node in _schedule(nodes):
        output.prepend(node)
    return block


def _delay_weights(graph: fx.Graph, experts: fx.Node) -> None:
    """Insert `weights_later` between the start and the wait of the experts' rows. Of several hops, take the first one,
    between nodes, which takes longest. `_schedule` moves the node behind its inputs."""
    wait = _find_first_wait(get_argument(experts, "x"))
    if wait is None:
        return
    with graph.inserting_before(wait):
        weights = get_argument(experts, "up"), get_argument(experts, "down")
        later = graph.create_node("call_function", ops.weights_later.default, weights, name="later")
    later.meta["letters"] = ("0",)
    later.meta["source"] = experts.meta.get("source", "")
    set_argument(experts, "later", later)


def _find_first_wait(rows: fx.Node) -> fx.Node | None:
    """Return the wait of the first hop that brought the rows, or None."""
    wait = read_item(rows)[0] if rows.target is operator.getitem else None
    if wait is not None and wait.target is ops.wait_gathered.default:
        return wait
    if wait is None or wait.target is not ops.wait_rows.default:
        return None
    return _find_first_wait(get_argument(wait, "tokens")[0]) or wait


def _schedule(nodes: list[fx.Node]) -> list[fx.Node]:
    """Order nodes: inputs, then the starts with their dependencies, then the rest. Waits come as late as possible."""
    dependencies = _find_dependencies(nodes)
    order: dict[fx.Node, int] = {}  # node -> position
    inputs = [node for node in nodes if node.op == "placeholder"]
    for group in (inputs, _find_ancestors_of_starts(nodes, dependencies), nodes):
        while pending := [node for node in group if node not in order]:
            num_before = -1
            while num_before < len(order):  # repeat: nodes may come before their dependencies
                num_before = len(order)
                for node in pending:
                    if node not in order and node.target not in _WAITS and order.keys() >= dependencies[node]:
                        order[node] = len(order)
            waits = [node for node in pending if node not in order and order.keys() >= dependencies[node]]
            if waits:
                next_wait = min(waits, key=lambda wait: max(order[n] for n in dependencies[wait]))  # by their starts
                order[next_wait] = len(order)
    return list(order)


def _find_ancestors_of_starts(nodes: list[fx.Node], dependencies: dict[fx.Node, set[fx.Node]]) -> list[fx.Node]:
    """Return the starts and all nodes that they depend on."""
    ancestors: set[fx.Node] = set()
    pending = [node for node in nodes if node.target in _STARTS]
    while pending:
        node = pending.pop()
        if node not in ancestors:
            ancestors.add(node)
            pending += dependencies[node]
    return [node for node in nodes if node in ancestors]


def _find_dependencies(nodes: list[fx.Node]) -> dict[fx.Node, set[fx.Node]]:
    """Map each node to the nodes that must run before it: its inputs, for a node with effects the previous one with
    effects, and the last node with effects that depends on a wait. A `weights_later` also depends on the last start
    before it. Reads and writes of the same parameters, buffers and attributes keep their order."""
    dependencies: dict[fx.Node, set[fx.Node]] = {}
    after_waits: set[fx.Node] = set()  # waits, and nodes that depend on one
    last_start = last_effect = last_effect_after_wait = None
    states = _StateAccess()
    for node in nodes:
        dependencies[node] = {n for n in (*node.all_input_nodes, last_effect_after_wait) if n is not None}
        dependencies[node] |= states.add(node)
        if node.target in _STARTS:
            last_start = node
        if node.target is ops.weights_later.default and last_start is not None:
            dependencies[node].add(last_start)
        is_effect = has_effect(node) and node.op != "placeholder"
        if is_effect and last_effect is not None:
            dependencies[node].add(last_effect)
        is_after_wait = node.target in _WAITS or not after_waits.isdisjoint(dependencies[node])
        if is_after_wait:
            after_waits.add(node)
        if is_effect:
            last_effect = node
            last_effect_after_wait = node if is_after_wait else last_effect_after_wait
    return dependencies


class _StateAccess:
    """Parameters, buffers and attributes that nodes read and write, by name.

    A graph reads a `get_attr` where its value is used, so a write must stay behind earlier reads of its value and of
    views of it. Whatever is computed from it counts as a read.
    """

    def __init__(self) -> None:
        self._names: dict[fx.Node, frozenset[str]] = {}
        self._reads: dict[fx.Node, frozenset[str]] = {}  # of the nodes that were added
        self._writes: dict[fx.Node, frozenset[str]] = {}

    def add(self, node: fx.Node) -> set[fx.Node]:
        """Add the next node, and return the earlier nodes that must stay before it."""
        names, written = self._find_names(node), self._find_written_names(node)
        readers = {n for n, others in self._reads.items() if _overlap(written, others)} if written else set()
        writers = {n for n, others in self._writes.items() if _overlap(names, others)} if names else set()
        if names:
            self._reads[node] = names
        if written:
            self._writes[node] = written
        return readers | writers

    def _find_names(self, node: fx.Node) -> frozenset[str]:
        """Return the names of all state that a node's value comes from."""
        if node not in self._names:
            own = {str(node.target)} if node.op in ("get_attr", "call_module") else set()
            self._names[node] = frozenset(own).union(*(self._find_names(n) for n in node.all_input_nodes))
        return self._names[node]

    def _find_written_names(self, node: fx.Node) -> frozenset[str]:
        """Return the names of the state that a node may write. A submodule may write all of its own."""
        if node.op == "call_module":
            return frozenset({str(node.target)})
        if node.target is setattr:
            owner, name = node.args[:2]
            return frozenset({f"{owner}.{name}".lstrip(".")})
        target, first = node.target, node.args[0] if node.args else None
        is_write = target._schema.is_mutable if isinstance(target, torch._ops.OpOverload) else has_effect(node)
        return self._find_names(first) if is_write and isinstance(first, fx.Node) else frozenset()


def _overlap(names: frozenset[str], others: frozenset[str]) -> bool:
    """Return whether a name in one set is also in the other one, or names a part of one, or holds one."""
    return not names.isdisjoint(others) or any(
        a.startswith(f"{b}.") or b.startswith(f"{a}.") for a in names for b in others
    )
