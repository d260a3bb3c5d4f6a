"""Shadows: concrete values of abstract floats, for where integers follow from them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.node import map_arg

from .op_sets import CONTRACTIONS, SHAPE_ONLY


def compute_concrete_value(node: fx.Node, invent: Callable[[fx.Node], torch.Tensor]) -> torch.Tensor:
    """The concrete value of a node, computed from what is invented at the nearest contraction; kept at each node."""
    stack = [node]
    while stack:
        top = stack[-1]
        if "concrete" not in top.meta:
            value = top.meta.get("val")
            if isinstance(value, torch.Tensor) and not isinstance(value, FakeTensor):
                top.meta["concrete"] = value
            elif pending := [a for a in _asked_of(top) if "concrete" not in a.meta]:
                stack.extend(pending)
                continue
            else:
                top.meta["concrete"] = _value(top, invent, lambda n: n.meta["concrete"])
        stack.pop()
    return node.meta["concrete"]


def recompute_values(
    nodes: Sequence[fx.Node], invent: Callable[[fx.Node], torch.Tensor]
) -> dict[fx.Node, torch.Tensor]:
    """The values of nodes, which are in program order with all that they are computed from: the integers that follow
    from floats, too.

    Raises:
        Exception: an op does not run on these, as where the number of them is another one.
    """
    found: dict[fx.Node, torch.Tensor] = {}
    for n in nodes:
        value = n.meta.get("val")
        if isinstance(value, torch.Tensor) and not isinstance(value, FakeTensor) and not n.all_input_nodes:
            found[n] = value
        elif all(a in found for a in _asked_of(n)):  # not what only something invented was made of
            found[n] = _value(n, invent, found.__getitem__)
    return found


def _asked_of(node: fx.Node) -> list[fx.Node]:
    """The nodes whose values say what this one's is."""
    return [] if _is_invented(node) or node.target in SHAPE_ONLY else node.all_input_nodes


def _value(
    node: fx.Node, invent: Callable[[fx.Node], torch.Tensor], value_of: Callable[[fx.Node], torch.Tensor]
) -> torch.Tensor:
    if _is_invented(node):
        return invent(node)
    if node.target in SHAPE_ONLY:
        like = node.args[0].meta["val"]  # type: ignore[union-attr]
        zeros = torch.zeros(like.shape, dtype=like.dtype)
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
    # a product with a weight makes new scores; a product of two activations follows from theirs
    kinds = {_is_weight(a) for a in node.all_input_nodes if not a.meta.get("known")}
    return kinds == {True, False}


def _is_weight(node: fx.Node) -> bool:
    """Computed from parameters and constants only."""
    if "weight" not in node.meta:
        inputs = node.all_input_nodes
        if node.op == "placeholder" or node.meta.get("opaque"):
            node.meta["weight"] = False
        else:
            node.meta["weight"] = node.op == "get_attr" or (bool(inputs) and all(_is_weight(a) for a in inputs))
    return node.meta["weight"]
