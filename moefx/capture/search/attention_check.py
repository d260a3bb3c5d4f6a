"""Detect attention in a captured graph, for models whose attributes name no heads."""

from __future__ import annotations

from collections.abc import Iterable

from torch import fx

from ..tracing.op_sets import CONTRACTIONS


def has_attention(nodes: Iterable[fx.Node]) -> bool:
    """Return whether a softmax takes products of activations with each other, or an op's name contains "attention".

    A router's softmax takes products with a weight.

    Args:
        nodes: nodes of a captured run, in program order.
    """
    activations: set[fx.Node] = set()
    scores: set[fx.Node] = set()
    for node in nodes:
        inputs = node.all_input_nodes
        from_activations = [value for value in inputs if value in activations]
        if from_activations or node.op == "placeholder":
            activations.add(node)
        name = str(getattr(node.target, "__name__", node.target))
        if node.op == "call_function" and "attention" in name:
            return True
        if node.target in CONTRACTIONS:
            if len(from_activations) > 1:
                scores.add(node)
        elif any(value in scores for value in inputs):
            if "softmax" in name:
                return True
            scores.add(node)
    return False
