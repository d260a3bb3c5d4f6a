"""Let the experts of a rank compute on received rows: replace values, and select the rank's own parameters."""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

import torch
from torch import fx

from ...ir.expert_placement import Placement
from ...ir.expressions.expert_body import ExpertBody
from ...ir.node_values import get_argument, set_argument
from .routed_region import RoutedRegion

aten = torch.ops.aten
ops = torch.ops.moefx


class ReceivedRows(NamedTuple):
    """The values that an exchange brings to a rank.

    Attributes:
        values: the received value for each sent one.
        pft: the result of the new `build_pft` for each result of the old one.
    """

    values: dict[fx.Node, fx.Node]
    pft: dict[fx.Node, fx.Node]


def move_experts(routed: RoutedRegion, received: ReceivedRows, placement: Placement) -> None:
    """Let the experts compute on the received rows, with this rank's parameters."""
    for node in routed.region:
        if node in routed.token_gathers or node in routed.slot_gathers:
            routed.set_source(node, received.values[routed.get_source(node)])
        for before, after in received.pft.items():
            node.replace_input_with(before, after)
        _select_parameters(node, placement)
        _mark_as_received(node)


def read_local_parts(graph: fx.Graph, stacked: Collection[str], placement: Placement) -> None:
    """Read the local part of each DTensor that holds all experts.

    Args:
        stacked: the names of these parameters.
    """
    for root in [n for n in graph.nodes if n.op == "get_attr" and n.target in stacked]:
        with graph.inserting_after(root):
            local = graph.call_method("to_local", (root,))
        local.meta["source"] = root.meta.get("source", "")
        root.replace_all_uses_with(local, delete_user_cb=lambda user, local=local: user is not local)
        if "val" in root.meta:
            full_value = root.meta["val"]
            local.meta["val"] = full_value.new_empty((len(full_value) // placement.num_ranks, *full_value.shape[1:]))
        users = list(local.users)
        for node in users:  # derived values now have fewer experts
            node.meta.pop("val", None)
            users += [user for user in node.users if user not in users]


def _select_parameters(node: fx.Node, placement: Placement) -> None:
    """Replace the parameters of all experts by the local experts' parameters, in the order of local ids."""
    if node.target is ops.expert_mlp.default:
        body = ExpertBody.from_json(get_argument(node, "body"))
        biased = [g for g in body.up if g.bias]
        gemms = (body.up, biased, [body.down], [body.down] if body.down.bias else [])
        for name, group_gemms in zip(("up", "up_bias", "down", "down_bias"), gemms, strict=True):
            set_argument(node, name, _select(get_argument(node, name), [g.num for g in group_gemms], placement))
        node.update_kwarg("body", body.with_experts(placement.experts_per_rank).to_json())
    elif node.target is ops.grouped_mm.default:
        _select_all(node, "w", placement)
    elif node.target is ops.expert_rows.default:
        _select_all(node, "v", placement)


def _select_all(node: fx.Node, name: str, placement: Placement) -> None:
    """Select the local experts' parameters from an argument that holds one group."""
    parameters = get_argument(node, name)
    set_argument(node, name, _select(parameters, [len(parameters)], placement))


def _select(parameters: list[fx.Node], sizes: list[int], placement: Placement) -> list[fx.Node]:
    """Select this rank's parameters from a flat list of groups: one stack of all experts, or E separate ones."""
    selected_nodes: list[fx.Node] = []
    for size in sizes:
        group, parameters = parameters[:size], parameters[size:]
        if size == 1:
            selected_nodes += group
            _shorten_stacks(group[0], placement)
            continue
        local_nodes = [group[e] for e in placement.local_experts]
        if size > 1 and group[0].target is aten.select.int and len({get_argument(n, "self") for n in group}) == 1:
            for local_id, node in enumerate(local_nodes):  # selected from a stack, which holds local experts only
                set_argument(node, "dim", 0)
                set_argument(node, "index", local_id)
        selected_nodes += local_nodes
    return selected_nodes


def _shorten_stacks(node: fx.Node, placement: Placement) -> None:
    """Shorten stacks of separate parameters to this rank's experts."""
    left = [node]
    while left:
        node = left.pop()
        if node.target is aten.stack.default and len(stacked := get_argument(node, "tensors")) == placement.num_experts:
            set_argument(node, "tensors", [stacked[e] for e in placement.local_experts])
            node.meta.pop("val", None)
        elif node.op == "call_function":
            left += node.all_input_nodes


def _mark_as_received(node: fx.Node) -> None:
    """Drop the node's value, which has the shape of this rank's own rows, and rename letters S and s to R."""
    node.meta.pop("val", None)
    letters = node.meta.get("letters")
    if isinstance(letters, tuple) and all(isinstance(a, str) for a in letters):
        node.meta["letters"] = tuple("R" if a in ("S", "s") else a for a in letters)
