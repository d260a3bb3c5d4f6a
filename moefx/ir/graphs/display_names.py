"""Names of values, parameters and expert bodies in printed graphs."""

from __future__ import annotations

import re
from collections.abc import Sequence

import torch
from torch.fx import Graph, Node

from ..attribute_paths import AttributeRange, split_into_ranges
from ..expressions.expert_body import ExpertBody
from ..node_values import BUILD_PFT, format_target
from .graph_codegen import is_getitem

# Default names for results of dialect ops and for their inputs, if the pass that made the node chose none.
_RESULTS = {
    "build_pft": "pft", "dispatch": "rows", "grouped_mm": "h", "expert_mlp": "y", "combine": "out",
    "place_choices": "destinations", "plan_dispatch": "send", "exchange_counts": "counts", "pack_rows": "packed",
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


def choose_display_names(graph: Graph) -> dict[Node, str]:
    """Return the printed name of every node: its own name if a pass chose it, otherwise a name for its role."""
    used_names = {node.name for node in graph.nodes if not _derive_default_name(node)}
    names: dict[Node, str] = {}
    for node in graph.nodes:
        name = _derive_default_name(node)
        if name:
            role = next(filter(None, (_find_role(node, user) for user in node.users)), "")
            producer = node.args[0] if is_getitem(node) else None
            if isinstance(producer, Node) and isinstance(node.args[1], int) and not role:
                if node.args[1] == 0 and (len(producer.users) == 1 or format_target(producer) == "moefx::expert_mlp"):
                    # A single result takes the op's name. So does the first result of `expert_mlp`; its other
                    # results are saved activations.
                    names[node] = names[producer]
                    continue
                name = f"{names[producer]}_{node.args[1]}"
            name = _make_unique(role or name, used_names)
            used_names.add(name)
        names[node] = name or node.name
    return names


def _find_role(node: Node, user: Node) -> str:
    """Return the name that the use of `node` by `user` suggests, or ""."""
    if format_target(user) == "moefx::shard_tokens":  # the name of its shard
        return next(filter(None, (_find_role(user, u) for u in user.users)), "")
    positions = [
        i
        for i, a in enumerate(user.args)
        if a is node or (isinstance(a, (list, tuple)) and len(a) == 1 and a[0] is node)
    ]
    return next((r for i in positions if (r := _ROLES.get((format_target(user), i)))), "")


def _derive_default_name(node: Node) -> str:
    """Return the op's name if FX derived the node's name from it (`mul_tensor_1`), otherwise ""."""
    if is_getitem(node):
        return "item" if re.fullmatch(r"getitem(_\d+)?", node.name) else ""
    if not isinstance(node.target, torch._ops.OpOverload):
        return ""
    name = node.target._schema.name.partition("::")[2]
    overload = re.sub(r"(?<=[a-z\d])(?=[A-Z])", "_", node.target._overloadname).lower()
    is_default = re.fullmatch(rf"{name}(_{overload})?(_\d+)?", node.name)
    if node.kwargs.get("reduce") and name == "expert_mlp" and not _is_sent_back(node):
        name = "combine"  # it returns sums by token
    return _RESULTS.get(name, name.strip("_")) if is_default else ""


def _is_sent_back(node: Node) -> bool:
    """Return whether the sums of an `expert_mlp` go back to other ranks, so that they are not the block's output."""
    return any(format_target(u) == "moefx::all_to_all_back" for first in node.users for u in first.users)


def _make_unique(name: str, used_names: set[str]) -> str:
    number, candidate = 1, name
    while candidate in used_names:
        number, candidate = number + 1, f"{name}_{number}"
    return candidate


# -- parameters --------------------------------------------------------------------------------


def get_attribute_name(node: Node) -> str:
    """Return the parameter's name in the block. Captured graphs record it in `meta`; their target is another name."""
    return str(node.meta.get("fqn") or node.target)


def format_attribute_path(path: str) -> str:
    """Format a path: `experts.0.w` -> `experts[0].w`."""
    return re.sub(r"\.(\d+)(?=\.|$|\[)", r"[\1]", path)


def format_ranges(names: Sequence[str]) -> list[str]:
    """Format parameter names for people: runs as ranges, and ranges over the same experts as one."""
    runs = split_into_ranges(names)
    text = _join_ranges(runs)
    return [text] if text else [format_attribute_path(str(run)) for run in runs]


def _join_ranges(runs: Sequence[AttributeRange | str]) -> str:
    """Format ranges over the same experts as one: `experts[0..63].{gate, up}.weight`. "" if they do not join."""
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
    """Format the JSON text of an `ExpertBody`."""
    return ExpertBody.from_json(body).pretty()
