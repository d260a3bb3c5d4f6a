"""Walk from a node to the nodes that it depends on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import fx


def fold_ancestors(
    node: fx.Node,
    name: str,
    combine: Callable[[fx.Node, list[Any]], Any],
    inputs_of: Callable[[fx.Node], list[fx.Node]] = lambda n: n.all_input_nodes,
) -> Any:
    """Evaluate `combine(n, results of its inputs)` for a node and its ancestors, once each, without recursion.

    Args:
        name: the key in `meta` that caches the result of each node.
        inputs_of: the inputs of a node that count.
    """
    stack = [node]
    while stack:
        n = stack[-1]
        if name not in n.meta:
            inputs = inputs_of(n)
            if pending := [a for a in inputs if name not in a.meta]:
                stack += pending
                continue
            n.meta[name] = combine(n, [a.meta[name] for a in inputs])
        stack.pop()
    return node.meta[name]


def collect_ancestors(
    *nodes: fx.Node, inputs_of: Callable[[fx.Node], list[fx.Node]] = lambda n: n.all_input_nodes
) -> set[fx.Node]:
    """Return these nodes and all nodes that they depend on.

    Args:
        inputs_of: the inputs of a node that count.
    """
    seen: set[fx.Node] = set()
    stack = [*nodes]
    while stack:
        n = stack.pop()
        if n not in seen:
            seen.add(n)
            stack.extend(inputs_of(n))
    return seen


def has_ancestor(node: fx.Node, ancestor: fx.Node) -> bool:
    """Return whether `node` is `ancestor`, or is computed from it."""
    stack, seen = [node], set()
    while stack:
        n = stack.pop()
        if n is ancestor:
            return True
        if n not in seen:
            seen.add(n)
            stack += n.all_input_nodes
    return False
