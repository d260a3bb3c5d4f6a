"""Follow integers of a call through the ops that depend on them, and compute these again with other integers."""

from __future__ import annotations

import torch
from torch import fx
from torch.fx.node import map_arg

from ...capture.tracing.capture_result import Capture
from ...ir.ancestors import collect_ancestors
from .graph_nodes import depends_on_call


def find_integer_ancestors(node: fx.Node) -> set[fx.Node]:
    """Return a node and its ancestors that depend on integers of the call."""
    return collect_ancestors(node, inputs_of=lambda n: [a for a in n.all_input_nodes if depends_on_call(a)])


def find_path(leaf: fx.Node, among: set[fx.Node]) -> list[fx.Node]:
    """Return the nodes of `among` that depend on `leaf`, in program order, `leaf` first."""
    dependents, stack = {leaf}, [leaf]
    while stack:
        new_users = [user for user in stack.pop().users if user in among and user not in dependents]
        dependents.update(new_users)
        stack += new_users
    return sorted(dependents, key=lambda n: n.meta["index"])


def evaluate_path(
    captured: Capture, path: list[fx.Node], values: dict[fx.Node, torch.Tensor]
) -> dict[fx.Node, torch.Tensor]:
    """Compute the values of the nodes of a path, given another value of its first node in `values`."""
    for n in path:
        if n.op == "call_function":
            args, kwargs = map_arg(
                (n.args, {k: v for k, v in n.kwargs.items() if k != "device"}),
                lambda a: values[a] if a in values else captured.concrete_value(a),
            )
            values[n] = n.target(*args, **kwargs)  # type: ignore[operator]
    return values


__all__ = ["evaluate_path", "find_integer_ancestors", "find_path"]
