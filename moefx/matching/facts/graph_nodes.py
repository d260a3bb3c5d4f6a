"""Queries on the nodes of a capture: the op, the line, the axis of a selection, and the inputs of an integer."""

# torch.fx types the arguments of a node as a wide union, and this code knows the op and so the type.
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportOptionalMemberAccess=false
# pyright: reportIndexIssue=false, reportOptionalSubscript=false, reportOptionalIterable=false, reportCallIssue=false
# pyright: reportAssignmentType=false, reportReturnType=false, reportOperatorIssue=false, reportUnhashable=false
# pyright: reportGeneralTypeIssues=false

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor

from ...capture.search.skipped_calls import UnknownResult
from ...capture.tracing.capture_result import Capture, HostRead
from ...capture.tracing.node_origins import is_abstract
from ...capture.tracing.op_sets import SHAPE_ONLY
from ...ir.ancestors import fold_ancestors
from ...ir.node_values import get_argument, get_op_name
from ...util.tensor_trees import is_float
from .op_classes import INDEXED_WRITES, LOOKUPS

Line = tuple[Any, Any]  # op, source


def line(node: fx.Node) -> Line:
    """Return the op and the source line of a node: equal for all runs of a loop."""
    return node.target, node.meta["source"]


def skip_moves(node: fx.Node, moves: Collection[str]) -> fx.Node:
    """Follow a tensor back through ops that only move its elements."""
    while node.args and isinstance(node.args[0], fx.Node) and get_op_name(node) in moves:
        node = node.args[0]
    return node


# ops that return (values, indices): functions that give the selected dim, and whether the result keeps it
SELECTION_DIMS: dict[str, Callable[[fx.Node], tuple[int, bool]]] = {
    "topk": lambda n: (get_argument(n, "dim"), True),
    "sort": lambda n: (n.kwargs.get("dim", next((a for a in n.args[1:] if type(a) is int), -1)), True),
    **dict.fromkeys(("max", "min", "kthvalue"), lambda n: (get_argument(n, "dim"), get_argument(n, "keepdim"))),
}


# ops that read or write entries of a tensor: functions that list axes with their indices; None for the flat tensor
_INDICES: dict[str, Callable[[fx.Node], Iterable[tuple[int | None, Any]]]] = {
    **dict.fromkeys(LOOKUPS | INDEXED_WRITES, lambda n: [(n.args[1], n.args[2])]),
    **dict.fromkeys(("index", "index_put"), lambda n: enumerate(n.args[1])),
    "embedding": lambda n: [(0, n.args[1])],
    "take": lambda n: [(None, n.args[1])],
}


def find_lookups(node: fx.Node) -> Iterator[tuple[fx.Node, int | None, range]]:
    """Yield the integer nodes by which an op reads or writes entries of a tensor, with axis and allowed values.

    The axis is None if they count the elements of the flat tensor, as in `take`.
    """
    name, base = get_op_name(node), node.args[0] if node.args else None
    if name not in _INDICES or not isinstance(base, fx.Node):
        return
    shape = base.meta["val"].shape
    for dim, i in _INDICES[name](node):
        size = math.prod(shape) if dim is None else shape[dim] if shape else 1
        if isinstance(i, fx.Node):
            yield i, dim, range(-size if name.startswith(("index", "take")) else 0, size)


def position_axis(node: fx.Node) -> int | None:
    """Return the dim of `argmax`, `argmin` or `argsort`; None for all elements."""
    last = -1 if get_op_name(node) == "argsort" else None
    return node.kwargs.get("dim", next((a for a in node.args[1:] if type(a) is int), last))


def follows_from_integers(node: fx.Node) -> bool:
    """Return whether a value depends on integers only, so that the capture knows it."""
    return bool(node.meta.get("from_integers")) and node.op != "placeholder"


def is_state(node: fx.Node) -> bool:
    """Return whether a node is a parameter, a buffer, or a tensor in an ordinary attribute."""
    return node.op == "get_attr" and node.meta["kind"] != "constant"


def is_matrix_of_integers(node: fx.Node) -> bool:
    """Return whether a node is a float copy of an integer parameter or buffer with two axes or more."""
    roots = node.all_input_nodes
    is_copy = str(node.target).startswith("aten._to_copy") and is_state(roots[0])
    if not is_copy or not node.meta["val"].is_floating_point():
        return False
    val = roots[0].meta["val"]
    return val.dim() > 1 and not val.is_floating_point() and val.dtype is not torch.bool


def find_extremes(capture: Capture, n: fx.Node) -> set[float]:
    """Return the least and the largest element of a node."""
    value = (
        capture.concrete_value(n)
        if isinstance(n.meta.get("val"), torch.Tensor)
        else torch.empty(0, dtype=torch.float32)
    )
    value = value.double() if is_float(value) else value  # torch has no order of 8-bit floats
    return {float(value.min()), float(value.max())} if value.numel() else set()


def collect_numbers(nodes: Iterable[fx.Node]) -> dict[Any, int | float | None]:
    """Collect the numbers in the arguments of ops.

    Returns:
        Numbers by (source, op, path in the arguments); None if runs of the line have different numbers.
    """
    numbers: dict[Any, int | float | None] = {}
    for n in nodes:
        if n.op == "call_function":
            for path, value in _walk_numbers((n.args, n.kwargs)):
                argument_key = (n.meta["source"], str(n.target), path)
                numbers[argument_key] = value if numbers.get(argument_key, value) == value else None
    return numbers


def _walk_numbers(tree: Any, path: tuple = ()) -> Iterator[tuple[tuple, int | float]]:
    if type(tree) in (int, float):
        yield path, tree
    elif isinstance(tree, (tuple, list)):
        for i, item in enumerate(tree):
            yield from _walk_numbers(item, (*path, i))
    elif isinstance(tree, dict):
        for key, item in tree.items():
            yield from _walk_numbers(item, (*path, key))


def describe_node(node: fx.Node) -> tuple[str, str]:
    """Return the operation of a node with its shape, and its source line, as texts for reports."""
    val = node.meta.get("val")
    shape = f" [{', '.join(map(str, val.shape))}]" if isinstance(val, torch.Tensor) else ""
    return f"{get_op_name(node) or node.op}{shape}", str(node.meta.get("source") or "")


def is_random(node: fx.Node) -> bool:
    """Return whether an op draws random numbers."""
    return torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())


def is_skipped(node: fx.Node) -> bool:
    """Return whether a node stands for a submodule that captures do not run (see `capture.search.skipped_calls`)."""
    return getattr(node.target, "__self__", None) is UnknownResult


def follows_from_state(node: fx.Node) -> bool:
    """Return whether a value depends on parameters and buffers only, and so is equal for all tokens of a call."""

    def is_computed(n: fx.Node, inputs: list[bool]) -> bool:
        if n.op == "get_attr":
            return n.meta["kind"] in ("param", "buffer") and isinstance(n.meta["val"], FakeTensor)
        return bool(inputs) and not is_random(n) and all(inputs)

    return fold_ancestors(node, "from_state", is_computed)


# ---- dependences of integers. Each function counts other values as sources, and ends its search at other ops.
def depends_on_routing(node: Any) -> bool:
    """Return whether an integer depends on floats or arguments, so that another routing may change it.

    Floats count if they are abstract, and if a capture computes them from integers.
    """

    def is_source(n: fx.Node) -> bool:
        return n.op == "placeholder" or isinstance(n.meta.get("val"), FakeTensor)

    return isinstance(node, fx.Node) and _fold_dependence(node, "routed", is_source)


def depends_on_choices(node: fx.Node) -> bool:
    """Return whether a value depends on abstract floats or arguments: unlike in `depends_on_routing`, floats that a
    capture computes from integers do not count.
    """
    return _fold_dependence(node, "from_choices", lambda n: n.op == "placeholder" or is_abstract(n))


def depends_on_floats(node: fx.Node) -> bool:
    """Return whether an integer depends on floats: unlike in `depends_on_routing`, integer arguments do not count."""
    return _fold_dependence(node, "depends_on_floats", lambda n: isinstance(n.meta.get("val"), FakeTensor))


def depends_on_call(node: fx.Node) -> bool:
    """Return whether a value depends on integers that may differ in the next call: arguments or buffers.

    A dependence by way of abstract floats does not count.
    """
    return _fold_dependence(node, "from_call", lambda n: n.op == "placeholder" or is_state(n), is_abstract)


def depends_on_arguments(node: fx.Node) -> bool:
    """Return whether a value depends on integers that are arguments, but not by way of abstract floats."""
    return _fold_dependence(node, "from_arguments", lambda n: n.op == "placeholder", is_abstract)


def _fold_dependence(
    node: fx.Node,
    name: str,
    is_source: Callable[[fx.Node], bool],
    is_excluded: Callable[[fx.Node], bool] = lambda n: False,
) -> bool:
    """Return whether a value depends on sources, by more than their shapes.

    Args:
        name: the key in `meta` that caches the results.
        is_excluded: nodes that are no sources, and whose inputs do not count.
    """

    def depends(n: fx.Node, inputs: list[bool]) -> bool:
        return any(inputs) or (is_source(n) and not is_excluded(n))

    def inputs_of(n: fx.Node) -> list[fx.Node]:
        return [] if n.target in SHAPE_ONLY or is_excluded(n) or is_source(n) else n.all_input_nodes

    return fold_ancestors(node, name, depends, inputs_of)


def find_buffers(read: HostRead) -> list[str]:
    """Return the names of the buffers that a read depends on; empty if it depends on anything else, too."""
    stack = [read.node] if read.node is not None else [n for n in read.origins if isinstance(n, fx.Node)]
    buffer_names, visited = list[str](), set[fx.Node]()
    while stack:
        node = stack.pop()
        if node in visited:
            continue
        visited.add(node)
        if node.op == "placeholder" or is_random(node) or (is_state(node) and node.meta["kind"] != "buffer"):
            return []
        if is_state(node):
            buffer_names.append(str(node.meta["fqn"]))
        stack += node.all_input_nodes
    return sorted(buffer_names)
