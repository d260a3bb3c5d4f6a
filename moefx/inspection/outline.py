"""The outline of a block's graph for drawing: boxes and arrows, with repeated experts merged.

A captured graph repeats a few ops for every expert. Two nodes count as the same step of different experts if they agree
in op, parameters (up to numbers in names), repeated inputs and repeated users. A frequent step becomes one box "× 64".
Only drawings use the outline.
"""

from __future__ import annotations

import dataclasses
import re
from collections import Counter
from collections.abc import Hashable, Iterable, Sequence

from torch.fx import Node

from ..ir.graphs.block_graph import BlockGraph
from ..ir.graphs.display_names import format_attribute_path, format_body, format_ranges, get_attribute_name
from ..ir.graphs.graph_codegen import is_getitem
from ..ir.graphs.graph_levels import is_dead
from ..ir.graphs.graph_printer import print_lines
from ..ir.node_values import BUILD_PFT, format_target, format_value

MIN_REPEATS = 4  # fewer equal steps are drawn one by one
_ROUNDS = 2


@dataclasses.dataclass(eq=False)
class Box:
    """One box of the picture.

    Attributes:
        title: the op.
        details: lines below it: parameters, body, shape.
        kind: "input", "output", "kept" (the user's own submodule), "dialect" or "op"; determines the colour.
        tooltip: the printed line or lines.
        count: number of nodes in the box.
    """

    title: str
    details: list[str]
    kind: str
    tooltip: str
    count: int = 1


@dataclasses.dataclass
class Outline:
    """Boxes and the arrows between them."""

    boxes: list[Box]
    arrows: set[tuple[Box, Box]]


def build_outline(block: BlockGraph) -> Outline:
    """Return the boxes and arrows of a graph."""
    visible_nodes = [node for node in block.graph.nodes if not _is_hidden(node)]
    classes = _label_repeated_steps(visible_nodes)
    lines = {line.node: f"{line.name} = {line.code}".removeprefix(" = ") for line in print_lines(block)}
    boxes: dict[Hashable, Box] = {}
    box_of: dict[Node, Box] = {}
    members: dict[Box, list[Node]] = {}
    for node in visible_nodes:
        step = classes.get(node, node)
        box = boxes.get(step)
        if box is None:
            box = boxes[step] = Box(*_describe_node(node), lines.get(node, ""))
            members[box] = []
        box_of[node] = box
        members[box].append(node)
    for box, nodes in members.items():
        box.count = len(nodes)
        if box.count > 1:
            box.details = [*_list_parameters(nodes), *filter(None, [format_value(_find_first_result(nodes[0]))])]
            box.tooltip = "\n".join([*(lines.get(node, "") for node in nodes[:3]), "..."])
    arrows = {
        (box_of[source], box_of[node])
        for node in visible_nodes
        for source in map(_find_producer, node.all_input_nodes)
        if source in box_of and box_of[source] is not box_of[node]
    }
    connected_boxes = {box for arrow in arrows for box in arrow}
    return Outline([box for box in boxes.values() if box in connected_boxes] or list(boxes.values()), arrows)


def _is_hidden(node: Node) -> bool:
    letters = node.meta.get("letters")
    is_size = format_target(node) == "aten::sym_size" or (isinstance(letters, str) and node.op == "call_function")
    return node.op == "get_attr" or is_getitem(node) or is_size or is_dead(node)


def _find_producer(node: Node) -> Node:
    """Return the node that computes a value; for an unpacked result, the node before `getitem`."""
    while is_getitem(node) and isinstance(node.args[0], Node):
        node = node.args[0]
    return node


# -- text ------------------------------------------------------------------------------------------


def _describe_node(node: Node) -> tuple[str, list[str], str]:
    """Return title, details and kind of a node on its own."""
    shape = [format_value(_find_first_result(node))]
    if node.op == "placeholder":
        return node.name, shape, "input"
    if node.op == "output":
        return "return", [], "output"
    if node.op == "call_module":
        return format_attribute_path(str(node.target)), ["kept as it is", *filter(None, shape)], "kept"
    name = format_target(node)
    short = name.partition("::")[2] or name
    details = _list_parameters([node])
    if body := node.kwargs.get("body"):
        details.append(format_body(str(body)))
    if node.kwargs.get("reduce"):
        details.append("sums the rows of each token")
    if keep := node.kwargs.get("keep"):
        details.append(f'keeps "{keep}" for backward')
    if name == BUILD_PFT:
        shape = ["ERI arrays, B = S*K rows"]
    return (
        short.strip("_") or short,
        [*details, *filter(None, shape)],
        "dialect" if name.startswith("moefx::") else "op",
    )


def _find_first_result(node: Node) -> Node:
    results = sorted((u for u in node.users if is_getitem(u)), key=lambda u: str(u.args[1]))
    return results[0] if results else node


def _list_parameters(nodes: Sequence[Node]) -> list[str]:
    """Return the names of parameters that nodes read, as ranges."""
    names: list[str] = []
    for node in nodes:
        names += [get_attribute_name(n) for n in node.all_input_nodes if n.op == "get_attr"]
    runs = format_ranges(list(dict.fromkeys(names)))
    return runs if len(runs) <= 4 else [*runs[:3], f"and {len(runs) - 3} more"]


# -- repeated steps --------------------------------------------------------------------------------


def _label_repeated_steps(nodes: Sequence[Node]) -> dict[Node, Hashable]:
    """Return a label for each node of a repeated step, equal for all its nodes."""
    labels: dict[Node, Hashable] = {node: _make_label(node) for node in nodes if node.op.startswith("call")}
    for _ in range(_ROUNDS):
        repeated_labels = _find_frequent(labels, 2)
        labels = {node: _refine_label(node, labels, repeated_labels) for node in labels}
    common = _find_frequent(labels, MIN_REPEATS)
    return {node: label for node, label in labels.items() if label in common}


def _find_frequent(labels: dict[Node, Hashable], min_count: int) -> set[Hashable]:
    return {label for label, count in Counter(labels.values()).items() if count >= min_count}


def _make_label(node: Node) -> Hashable:
    parameters = tuple(re.sub(r"\d+", "#", get_attribute_name(n)) for n in node.all_input_nodes if n.op == "get_attr")
    target = re.sub(r"\d+", "#", node.target) if isinstance(node.target, str) else node.target
    return node.op, str(target), parameters, len(node.all_input_nodes)


def _refine_label(node: Node, labels: dict[Node, Hashable], repeated_labels: set[Hashable]) -> Hashable:
    """Extend a label by those of repeated neighbours.

    Ignores neighbours that only the first or last expert has, and steps of the same kind, such as the running sum over
    experts.
    """
    label_here = labels[node]

    def among(neighbours: Iterable[Node]) -> list[Hashable]:
        neighbour_labels = (labels.get(_find_producer(n)) for n in neighbours)
        return [label for label in neighbour_labels if label in repeated_labels and label != label_here]

    users = [u for user in node.users for u in (user.users if is_getitem(user) else [user])]
    return label_here, tuple(among(node.all_input_nodes)), frozenset(among(users))
