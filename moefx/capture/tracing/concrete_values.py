"""Concrete values of abstract floats, computed if integers follow from them.

A `Routing` invents the values at the nearest contractions, such as router logits. The recorded ops turn these into the
values of a node, so one routing decision holds through groups, masks and thresholds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.node import map_arg

from .op_sets import CONTRACTIONS, SHAPE_ONLY


def compute_concrete_value(node: fx.Node, invent: Callable[[fx.Node], torch.Tensor]) -> torch.Tensor:
    """Return the concrete value of a node, and cache it in the `meta` of each node on the way.

    Args:
        invent: gives the values of contractions, parameters and inputs.
    """
    stack = [node]
    while stack:
        top = stack[-1]
        if "concrete" not in top.meta:
            value = top.meta.get("val")
            if isinstance(value, torch.Tensor) and not isinstance(value, FakeTensor):
                top.meta["concrete"] = value
            elif pending := [a for a in _find_operands(top) if "concrete" not in a.meta]:
                stack.extend(pending)
                continue
            else:
                top.meta["concrete"] = _evaluate(top, invent, lambda n: n.meta["concrete"])
        stack.pop()
    return node.meta["concrete"]


def recompute_values(
    nodes: Sequence[fx.Node], invent: Callable[[fx.Node], torch.Tensor]
) -> dict[fx.Node, torch.Tensor]:
    """Compute the values of nodes for other invented values, including integers that follow from floats.

    Args:
        nodes: in program order, with all their ancestors.

    Raises:
        Exception: an op does not accept the new values, for example another number of rows.
    """
    values: dict[fx.Node, torch.Tensor] = {}
    for n in nodes:
        value = n.meta.get("val")
        if isinstance(value, torch.Tensor) and not isinstance(value, FakeTensor) and not n.all_input_nodes:
            values[n] = value
        elif all(a in values for a in _find_operands(n)):  # no ancestors of invented values only
            values[n] = _evaluate(n, invent, values.__getitem__)
    return values


def _find_operands(node: fx.Node) -> list[fx.Node]:
    """Return the nodes whose values determine the value of a node."""
    return [] if _is_invented(node) or node.target in SHAPE_ONLY else node.all_input_nodes


def _evaluate(
    node: fx.Node, invent: Callable[[fx.Node], torch.Tensor], value_of: Callable[[fx.Node], torch.Tensor]
) -> torch.Tensor:
    if _is_invented(node):
        return invent(node)
    if node.target in SHAPE_ONLY:
        template = node.args[0].meta["val"]  # type: ignore[union-attr]
        zeros = torch.zeros(template.shape, dtype=template.dtype)
        return node.target(zeros, *node.args[1:], **{**node.kwargs, "device": None})  # type: ignore[operator]
    args, kwargs = map_arg((node.args, node.kwargs), value_of)
    kwargs = {k: torch.device("cpu") if k == "device" and v is not None else v for k, v in kwargs.items()}
    with torch.no_grad():
        return node.target(*args, **kwargs)  # type: ignore[operator]


def _is_invented(node: fx.Node) -> bool:
    if node.op in ("placeholder", "get_attr") or node.meta.get("opaque"):
        return True
    if node.target not in CONTRACTIONS:
        return False
    # a product with a weight makes new scores; a product of two activations follows from their values
    kinds = {_is_weight(a) for a in node.all_input_nodes if not a.meta.get("from_integers")}
    return kinds == {True, False}


def _is_weight(node: fx.Node) -> bool:
    """Return whether a value is computed from parameters and constants only."""
    if "weight" not in node.meta:
        inputs = node.all_input_nodes
        if node.op == "placeholder" or node.meta.get("opaque"):
            node.meta["weight"] = False
        else:
            node.meta["weight"] = node.op == "get_attr" or (bool(inputs) and all(_is_weight(a) for a in inputs))
    return node.meta["weight"]
