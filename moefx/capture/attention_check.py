"""Whether a model attends from tokens to others: what the planner asks of one that names no heads."""

from __future__ import annotations

from collections.abc import Iterable

from torch import fx

from .op_sets import CONTRACTIONS


def has_attention(nodes: Iterable[fx.Node]) -> bool:
    """Whether a softmax is of products of activations with each other, or an op is an attention by its name.

    A router's softmax is of products with a weight.

    Args:
        nodes: of a captured run, inputs before what is made of them.
    """
    activations: set[fx.Node] = set()
    scores: set[fx.Node] = set()
    for node in nodes:
        inputs = node.all_input_nodes
        made = [each for each in inputs if each in activations]
        if made or node.op == "placeholder":
            activations.add(node)
        name = str(getattr(node.target, "__name__", node.target))
        if node.op == "call_function" and "attention" in name:
            return True
        if node.target in CONTRACTIONS:
            if len(made) > 1:
                scores.add(node)
        elif any(each in scores for each in inputs):
            if "softmax" in name:
                return True
            scores.add(node)
    return False
