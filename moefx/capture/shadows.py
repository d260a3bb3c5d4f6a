"""Shadows: concrete values of abstract floats, for where integers follow from them."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.node import map_arg

from .captured import CONTRACTIONS, SHAPE_ONLY


def shadow(node: fx.Node, invent: Callable[[fx.Node], torch.Tensor]) -> torch.Tensor:
    """The concrete value of a node, computed from what is invented at the nearest contraction; kept at each node."""
    stack = [node]
    while stack:
        top = stack[-1]
        if "shadow" not in top.meta:
            value = top.meta.get("val")
            if isinstance(value, torch.Tensor) and not isinstance(value, FakeTensor):
                top.meta["shadow"] = value
            elif _is_invented(top):
                top.meta["shadow"] = invent(top)
            elif top.target in SHAPE_ONLY:
                like = top.args[0].meta["val"]  # type: ignore[union-attr]
                zeros = torch.zeros(like.shape, dtype=like.dtype)
                top.meta["shadow"] = top.target(zeros, *top.args[1:], **{**top.kwargs, "device": None})  # type: ignore[operator]
            elif pending := [a for a in top.all_input_nodes if "shadow" not in a.meta]:
                stack.extend(pending)
                continue
            else:
                args, kwargs = map_arg((top.args, top.kwargs), lambda n: n.meta["shadow"])
                kwargs = {k: torch.device("cpu") if k == "device" and v is not None else v for k, v in kwargs.items()}
                with torch.no_grad():
                    top.meta["shadow"] = top.target(*args, **kwargs)  # type: ignore[operator]
        stack.pop()
    return node.meta["shadow"]


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
