"""What does not need the rows that are on their way runs before they are waited for: the shared experts, say, or the
experts on another chunk of tokens; in the backward the gradients of the experts' matrices, too.

A start stands where its inputs are there; a wait where nothing else is left to do, that of the exchange started first
before others. In the backward autograd goes the same way in reverse: the gradients' exchange starts where the forward
waited, and is waited for where the forward started. In between, it comes by each `weights_later`.

What no start needs stands ahead of the last waits, those for the experts' results. There its backward runs beside the
first exchange of gradients; beside the last one those of the matrices do.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from ..ir.block_graph import BlockGraph
from ..ir.graph_levels import has_effect
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


@graph_pass(level="distributed")
def overlap(block: BlockGraph, plan: Any) -> BlockGraph:
    """Put off every wait, and gradients of matrices; of all other nodes the order stays, as far as they do not wait."""
    block = block.copy()
    for experts in block.find(ops.expert_mlp.default):
        _put_off_weights(block.graph, experts)
    *nodes, output = block.graph.nodes
    for node in _scheduled(nodes):
        output.prepend(node)
    return block


def _put_off_weights(graph: fx.Graph, experts: fx.Node) -> None:
    """To where the exchanges that bring the experts' rows have been started: of several hops the first one, between
    nodes, which takes longest. (Its inputs may be further down: the schedule is yet to be made.)"""
    wait = _first_wait(experts.args[0])
    if wait is None:
        return
    with graph.inserting_before(wait):
        weights = experts.args[5], experts.args[7]
        later = graph.create_node("call_function", ops.weights_later.default, weights, name="later")
    later.meta["letters"] = ("0",)
    later.meta["source"] = experts.meta.get("source", "")
    experts.args = (*experts.args[:9], later)


def _first_wait(rows: Any) -> fx.Node | None:
    """Of the exchanges that brought the rows, here or to the rank before."""
    wait = rows.args[0] if rows.target is operator.getitem else None
    if wait is not None and wait.target is ops.wait_gathered.default:
        return wait
    if wait is None or wait.target is not ops.wait_rows.default:
        return None
    return _first_wait(wait.args[3][0]) or wait


def _scheduled(nodes: list[fx.Node]) -> list[fx.Node]:
    needed = _needed(nodes)
    order: dict[fx.Node, int] = {}  # node -> its number
    inputs = [node for node in nodes if node.op == "placeholder"]
    for left in (inputs, _ahead_of_starts(nodes, needed), nodes):
        while left := [node for node in left if node not in order]:
            number = -1
            while number < len(order):  # again, as some stand above what they need
                number = len(order)
                for node in left:
                    if node not in order and node.target not in _WAITS and order.keys() >= needed[node]:
                        order[node] = len(order)
            waits = [node for node in left if node not in order and order.keys() >= needed[node]]
            if waits:
                first = min(waits, key=lambda wait: max(order[n] for n in needed[wait]))  # was started
                order[first] = len(order)
    return list(order)


def _ahead_of_starts(nodes: list[fx.Node], needed: dict[fx.Node, set[fx.Node]]) -> list[fx.Node]:
    """The starts, and all that they need."""
    found: set[fx.Node] = set()
    left = [node for node in nodes if node.target in _STARTS]
    while left:
        node = left.pop()
        if node not in found:
            found.add(node)
            left += needed[node]
    return [node for node in nodes if node in found]


def _needed(nodes: list[fx.Node]) -> dict[fx.Node, set[fx.Node]]:
    """What must run before each node: what it computes with, and of nodes that do more than compute their result the
    one before, for it may see what that one did. So may all nodes behind one that waits itself. Before a
    `weights_later` also the start that it stands behind."""
    found: dict[fx.Node, set[fx.Node]] = {}
    waiting: set[fx.Node] = set()
    effect = barrier = start = None
    for node in nodes:
        found[node] = {n for n in (*node.all_input_nodes, barrier) if n is not None}
        start = node if node.target in _STARTS else start
        if node.target is ops.weights_later.default and start is not None:
            found[node].add(start)
        has = has_effect(node) and node.op != "placeholder"
        if has and effect is not None:
            found[node].add(effect)
        if node.target in _WAITS or not waiting.isdisjoint(found[node]):
            waiting.add(node)
            barrier = node if has else barrier
        effect = node if has else effect
    return found
