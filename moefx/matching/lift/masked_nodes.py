"""Find the nodes behind the masks that a program applies to a value, such as a routing weight.

A mask that has no effect in a capture gives several nodes the same elements::

    weights, ids = scores.topk(2)
    weights = torch.where((ids[:, :1] == 3) & ..., 0.5 * weights, weights)  # no token of the capture has this choice

The graph that reads the last of these nodes computes the masks as the program does, for every choice.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor

from ...capture.tracing.node_origins import is_abstract
from ...ir.expressions.expression_check import is_pointwise
from ...ir.node_values import get_op_name
from ..facts.graph_nodes import depends_on_routing
from ..facts.op_classes import INDEXED_WRITES


class NodesBehindMasks:
    """Finds the later nodes through which every path from a value to the experts leads, behind one mask or more.

    Args:
        inputs_of_cut: the nodes that the routed sum depends on; paths to other nodes do not count.
        expert_nodes: the nodes that depend on expert parameters.
    """

    def __init__(self, inputs_of_cut: Collection[fx.Node], expert_nodes: Collection[fx.Node]):
        self._inputs_of_cut, self._expert_nodes = inputs_of_cut, expert_nodes
        self._known: dict[fx.Node, list[fx.Node]] = {}  # no `functools.cache`: captures search all objects for new ones

    def find(self, node: fx.Node) -> list[fx.Node]:
        """Return these nodes for a float that the experts compute with, in program order."""
        if node not in self._known:
            self._known[node] = self._search(node)
        return self._known[node]

    def _search(self, node: fx.Node) -> list[fx.Node]:
        behind: list[fx.Node] = []
        reached, pending, last_use, is_masked = {node}, [(node.meta["index"], node)], 0, False
        while pending:
            index, n = heapq.heappop(pending)
            if n in self._expert_nodes:
                break
            is_masked = is_masked or _is_mask(n, reached)
            if last_use <= index and is_masked and is_abstract(n):
                behind.append(n)
            for user in n.users:
                if user in self._inputs_of_cut:
                    last_use = max(last_use, user.meta["index"])
                    if user not in reached:
                        reached.add(user)
                        heapq.heappush(pending, (user.meta["index"], user))
        return behind


def _is_mask(n: fx.Node, values: Collection[fx.Node]) -> bool:
    """Return whether an op changes some elements of a value, by integers of the routing or by comparisons of floats.

    An op that gives each slot of a token one element per expert, such as a product with `one_hot(ids)`, is no mask.
    """
    changed = [a for a in n.all_input_nodes if a in values and isinstance(a.meta.get("val"), FakeTensor)]
    if get_op_name(n) in INDEXED_WRITES:
        return n.args[0] in changed
    val = n.meta.get("val")
    is_same_shape = isinstance(val, torch.Tensor) and any(a.meta["val"].shape == val.shape for a in changed)
    conditions = [a for a in n.all_input_nodes if not is_abstract(a)]
    return is_same_shape and is_pointwise(n.target) and any(map(depends_on_routing, conditions))


__all__ = ["NodesBehindMasks"]
