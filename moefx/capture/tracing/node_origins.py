"""Origins of the values in a captured graph: floats, routing, state, gradients.

A capture sees one outcome of each comparison and each selection. These functions tell which outcomes follow from
abstract floats, and may therefore differ in another call.
"""

from __future__ import annotations

import operator
from typing import Any, Literal

import torch
import torch.utils._pytree as pytree
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.node import map_arg

from ...ir.ancestors import fold_ancestors
from ...ir.node_meta import find_original
from ...util.tensor_trees import is_float
from .op_sets import ELEMENT_SELECTIONS, FLOAT_COMPARISONS, NAN_CHECKS, SHAPE_ONLY, bare_name

aten = torch.ops.aten
LeafKind = Literal["state", "other"]


def is_abstract(node: fx.Node) -> bool:
    """Return whether a value is a float that the routing does not determine."""
    return isinstance(node.meta.get("val"), FakeTensor) and not node.meta.get("from_integers")


# ---------------------------------------------------------------- decisions by floats
def find_float_decisions(node: fx.Node) -> list[fx.Node]:
    """Find the nodes that turned abstract floats into the integers or the boolean of a node.

    For integers this is one cast or selection. For a boolean these are the comparisons that it combines.
    """
    val = node.meta.get("val")
    if not isinstance(val, torch.Tensor) or is_float(val) or node.op != "call_function":
        return []
    if val.dtype is torch.bool:
        return _find_comparisons(node)
    maker = node.args[0] if node.target is operator.getitem else node
    assert isinstance(maker, fx.Node)
    return [maker] if any(is_abstract(a) for a in maker.all_input_nodes) else []


def _find_comparisons(node: fx.Node) -> list[fx.Node]:
    """Find the comparisons that a boolean combines, if they compare abstract floats or numbers counted from these.

    A selection, such as `topk`, ends the search: comparisons of its result are decided by the routing.
    """
    stack, seen, comparisons, has_floats = [node], set(), [], False
    has_abstract_inputs = any(map(is_abstract, node.all_input_nodes))
    while stack:
        n = stack.pop()
        if n in seen or n.target in SHAPE_ONLY:
            continue
        seen.add(n)
        name = bare_name(n.target)
        if name in ELEMENT_SELECTIONS:
            return [node] if has_abstract_inputs else []
        if name in FLOAT_COMPARISONS:
            comparisons.append(n)
        for a in n.all_input_nodes:
            if is_abstract(a):
                has_floats = True
            else:
                stack.append(a)
    return comparisons if has_floats else []


def is_nan_check(node: fx.Node) -> bool:
    """Return whether a boolean only tells whether floats are finite, and nothing about experts."""
    comparisons = find_float_decisions(node)
    return bool(comparisons) and all(bare_name(n.target) in NAN_CHECKS for n in comparisons)


def hash_computation(target: Any, args: Any, kwargs: Any) -> int:
    """Hash an op with its arguments: equal for ops of one capture that repeat a computation on the same inputs.

    `token_functions.hash_without_sizes` compares nodes of captures with other sizes instead.
    """

    def combine(n: fx.Node, _: list[Any]) -> int:
        is_input = n.op != "call_function" or torch.Tag.nondeterministic_seeded in getattr(n.target, "tags", ())
        return hash(n.name) if is_input else _hash_call(n.target, n.args, n.kwargs)

    for n in pytree.tree_leaves((args, kwargs)):
        if isinstance(n, fx.Node):
            fold_ancestors(n, "computation", combine)
    return _hash_call(target, args, kwargs)


def _hash_call(target: Any, args: Any, kwargs: Any) -> int:
    return hash((str(target), repr(map_arg((args, kwargs), lambda n: n.meta["computation"]))))  # type: ignore[arg-type]


# ---------------------------------------------------------------- inputs and state
def find_leaf_kinds(node: fx.Node) -> frozenset[LeafKind]:
    """Return which kinds of leaves a value is computed from.

    State is buffers, attributes and single integers among the arguments.
    """

    def combine(n: fx.Node, leaves: list[frozenset[LeafKind]]) -> frozenset[LeafKind]:
        if leaves:
            return frozenset().union(*leaves)
        is_state = n.op == "get_attr" and n.meta.get("kind") in ("buffer", "attribute")
        return frozenset(["state" if is_state or _is_single_integer(n) else "other"])

    return fold_ancestors(node, "leaves", combine)


def _is_single_integer(n: fx.Node) -> bool:
    val = n.meta.get("val")
    return n.op == "placeholder" and isinstance(val, torch.Tensor) and not is_float(val) and val.numel() == 1


def follows_from_floats(node: fx.Node) -> bool:
    """Return whether an integer is computed from arguments or abstract floats, and so belongs to the routing."""

    def combine(n: fx.Node, follow: list[bool]) -> bool:
        return n.op == "placeholder" or isinstance(n.meta.get("val"), FakeTensor) or any(follow)

    return fold_ancestors(node, "from_floats", combine)


def has_gradients(node: fx.Node) -> bool:
    """Return whether gradients may flow from a value to a parameter or an argument."""
    return fold_ancestors(node, "has_gradients", _combine_gradients)


def _combine_gradients(n: fx.Node, have_inputs: list[bool]) -> bool:
    val = n.meta.get("val")
    if isinstance(val, torch.Tensor) and not is_float(val):
        return False
    if n.op in ("get_attr", "placeholder"):
        original = find_original(n) if n.meta.get("kind") == "param" else None
        return n.op == "placeholder" or (original is not None and original.requires_grad)
    packet = getattr(n.target, "overloadpacket", None)
    is_shape_only = n.target in SHAPE_ONLY or getattr(packet, "__name__", "").endswith("_like")
    is_cut = not n.meta["grad"] or n.target is aten.detach.default or is_shape_only
    return not is_cut and any(have_inputs)
