"""How parts of a graph are called in print: values, parameters, the pointwise part of an expert."""

from __future__ import annotations

import re
from collections.abc import Sequence

import torch
from torch.fx import Graph, Node

from .attribute_paths import AttributeRange, split_into_ranges
from .expert_body import ExpertBody
from .graph_codegen import is_getitem
from .node_values import BUILD_PFT, target_name

# What the results of dialect ops, and the values that go into them, are called when the pass that made the
# node gave no name of its own.
_RESULTS = {
    "build_pft": "pft", "dispatch": "rows", "grouped_mm": "h", "expert_mlp": "y", "combine": "out",
    "place_choices": "place", "plan_dispatch": "send", "exchange_counts": "counts", "pack_rows": "packed",
    "read_counts": "splits", "all_to_all_rows": "sent", "all_to_all_back": "back", "wait_sums": "sums",
}  # fmt: skip
_ROLES = {
    (BUILD_PFT, 0): "topk_ids",
    (BUILD_PFT, 1): "topk_w",
    ("moefx::dispatch", 0): "x",
    ("moefx::expert_mlp", 0): "x",
    ("moefx::place_choices", 0): "topk_ids",
    ("moefx::all_to_all_rows", 0): "x",
    ("moefx::all_to_all_rows", 1): "topk_w",
}


def shown_names(graph: Graph) -> dict[Node, str]:
    """The name of every node in print: its own where somebody chose it, else one that says its role."""
    taken = {node.name for node in graph.nodes if not _default_name(node)}
    names: dict[Node, str] = {}
    for node in graph.nodes:
        name = _default_name(node)
        if name:
            role = next(filter(None, (_role(node, user) for user in node.users)), "")
            producer = node.args[0] if is_getitem(node) else None
            if isinstance(producer, Node) and isinstance(node.args[1], int) and not role:
                if node.args[1] == 0 and (len(producer.users) == 1 or target_name(producer) == "moefx::expert_mlp"):
                    # The only result takes the op's name, so does the first of expert_mlp: the others are
                    # kept values.
                    names[node] = names[producer]
                    continue
                name = f"{names[producer]}_{node.args[1]}"
            name = _unused(role or name, taken)
            taken.add(name)
        names[node] = name or node.name
    return names


def _role(node: Node, user: Node) -> str:
    if target_name(user) == "moefx::shard_tokens":  # as its part is
        return next(filter(None, (_role(user, u) for u in user.users)), "")
    positions = [
        i
        for i, a in enumerate(user.args)
        if a is node or (isinstance(a, (list, tuple)) and len(a) == 1 and a[0] is node)
    ]
    return next((r for i in positions if (r := _ROLES.get((target_name(user), i)))), "")


def _default_name(node: Node) -> str:
    """The op's name when the node's own is the one that FX derived from it (`mul_tensor_1`), else ""."""
    if is_getitem(node):
        return "item" if re.fullmatch(r"getitem(_\d+)?", node.name) else ""
    if not isinstance(node.target, torch._ops.OpOverload):
        return ""
    name = node.target._schema.name.partition("::")[2]
    overload = re.sub(r"(?<=[a-z\d])(?=[A-Z])", "_", node.target._overloadname).lower()
    derived = re.fullmatch(rf"{name}(_{overload})?(_\d+)?", node.name)
    if node.kwargs.get("reduce") and name == "expert_mlp" and not _returned(node):
        name = "combine"  # of the rows or of their sums, whichever it returns
    return _RESULTS.get(name, name.strip("_")) if derived else ""


def _returned(node: Node) -> bool:
    """Whether the sums of an `expert_mlp` go back to other ranks: they are not the block's then."""
    return any(target_name(u) == "moefx::all_to_all_back" for first in node.users for u in first.users)


def _unused(name: str, taken: set[str]) -> str:
    number, candidate = 1, name
    while candidate in taken:
        number, candidate = number + 1, f"{name}_{number}"
    return candidate


# -- parameters --------------------------------------------------------------------------------


def attribute_name(node: Node) -> str:
    """The parameter's name in the block; a captured graph records it beside a target of its own."""
    return str(node.meta.get("fqn") or node.target)


def format_attribute_path(path: str) -> str:
    """`experts.0.w` -> `experts[0].w`."""
    return re.sub(r"\.(\d+)(?=\.|$|\[)", r"[\1]", path)


def format_ranges(names: Sequence[str]) -> list[str]:
    """Parameter names for people: runs as ranges, ranges over the same experts as one."""
    runs = split_into_ranges(names)
    text = _braces(runs)
    return [text] if text else [format_attribute_path(str(run)) for run in runs]


def _braces(runs: Sequence[AttributeRange | str]) -> str:
    """Ranges over the same experts as one: `experts[0..63].{gate, up}.weight`; "" where there is none."""
    first = runs[0] if runs else ""
    if len(runs) < 2 or not isinstance(first, AttributeRange):
        return ""
    parts = [
        run.after.split(".")
        for run in runs
        if isinstance(run, AttributeRange)
        and (run.before, run.start, run.stop) == (first.before, first.start, first.stop)
    ]
    if len(parts) != len(runs) or len({len(p) for p in parts}) != 1:
        return ""
    differ = [i for i in range(len(parts[0])) if len({p[i] for p in parts}) > 1]
    if len(differ) != 1:
        return ""
    choices = f"{{{', '.join(p[differ[0]] for p in parts)}}}"
    after = ".".join([*parts[0][: differ[0]], choices, *parts[0][differ[0] + 1 :]])
    return format_attribute_path(str(AttributeRange(first.before, after, first.start, first.stop)))


# -- bodies --------------------------------------------------------------------------------


def format_body(body: str) -> str:
    """`ExpertBody.pretty` of its JSON."""
    return ExpertBody.from_json(body).pretty()
