"""The graph of a capture as the history of a block keeps it: the user's own operations, to be read and drawn."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import fx

from ..ir.ancestors import collect_ancestors
from ..ir.graphs.block_graph import BlockGraph
from ..ir.node_values import TensorSpec
from .tracing.capture_result import Capture

MAX_NODES = 4096  # a copy of a node takes about as long as its capture
_PLAIN = (bool, int, float, complex, str, torch.dtype, torch.device, torch.layout, torch.memory_format)


def build_captured_graph(name: str, capture: Capture, inputs: Sequence[str]) -> BlockGraph | None:
    """Copy the operations that a block's results and side effects depend on.

    The copy holds no tensors, so that a model can be saved with it. It is no program: its sizes and its choices of
    experts are those of one capture.

    Args:
        name: the block's name in the model.
        inputs: names of the tensor arguments.

    Returns:
        The graph; None if it has more than `MAX_NODES` operations, as a loop over hundreds of experts does.
    """
    results = [leaf for leaf in pytree.tree_leaves(capture.out) if isinstance(leaf, fx.Node)]
    written_values = [leaf for effect in capture.effects for leaf in pytree.tree_leaves(effect.node)]
    needed_nodes = collect_ancestors(*results, *(leaf for leaf in written_values if isinstance(leaf, fx.Node)))
    if len(needed_nodes) > MAX_NODES:
        return None
    graph, copies = fx.Graph(), {}
    for node in capture.graph.nodes:
        if node in needed_nodes:
            copies[node] = _copy_node(graph, node, copies)
        if node in needed_nodes and node.op == "placeholder":
            copies[node].name = inputs[node.meta["position"]]
    outputs = [copies[node] for node in results]
    graph.output(outputs[0] if len(outputs) == 1 else tuple(outputs))
    return BlockGraph(name, graph)


def _copy_node(graph: fx.Graph, node: fx.Node, copies: dict[fx.Node, fx.Node]) -> fx.Node:
    """Copy a node with its shape and its source line; arguments that cannot be saved become text."""

    def copy_argument(value: Any) -> Any:
        if isinstance(value, fx.Node):
            return copies[value]
        return value if value is None or isinstance(value, _PLAIN) else str(value)

    args, kwargs = fx.node.map_aggregate((node.args, node.kwargs), copy_argument)  # type: ignore[misc]
    target = node.meta.get("fqn", node.target)  # the capture's own names have no dots
    copy = graph.create_node(node.op, target, args, kwargs, node.name)
    value = node.meta.get("val")
    if isinstance(value, torch.Tensor):
        copy.meta["val"] = TensorSpec(tuple(value.shape), value.dtype, value.device)
    if source := node.meta.get("source"):
        copy.meta["source"] = str(source)
    return copy
