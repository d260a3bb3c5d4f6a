"""What does not need the rows that are on their way runs before they are waited for: the shared experts, say.

A start stands where its inputs are there; a wait, and what follows from it, moves behind everything independent. In the
backward autograd goes the same way in reverse: the gradients' exchange starts where the forward waited, and is waited
for where the forward started.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from ..ir.block import BlockGraph
from ..ir.spec import has_effect
from .manager import graph_pass

ops = torch.ops.moefx
_WAITS = (ops.wait_rows.default, ops.wait_sums.default)


@graph_pass(level="distributed")
def overlap(block: BlockGraph, plan: Any) -> BlockGraph:
    """Move independent nodes before the first wait; the order among them, and among what waits, stays."""
    block = block.copy()
    nodes = list(block.graph.nodes)
    first = next((n for n in nodes if n.target in _WAITS), None)
    if first is not None:
        for node in _independent(nodes[nodes.index(first) :]):
            first.prepend(node)
    return block


def _independent(nodes: list[fx.Node]) -> list[fx.Node]:
    """Those that do not need the first one, up to a node that needs it and does more than compute its result: what is
    behind may see what it did."""
    waiting, found = {nodes[0]}, []
    for node in nodes[1:]:
        if node.op == "output":
            break
        if not waiting.isdisjoint(node.all_input_nodes):
            if has_effect(node):
                break
            waiting.add(node)
        else:
            found.append(node)
    return found
