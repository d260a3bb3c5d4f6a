"""Align the nodes of several captures: the same step of the program in each of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import fx

from ...capture.environment.code_locations import NOWHERE, Source
from ...errors import Refused
from ...ir.node_values import get_op_name

aten = torch.ops.aten
_CHOOSE = "run the same operations in every call, and choose between their results by torch.where"
_VIEWS = {str(op) for op in (aten.view.default, aten._unsafe_view.default, aten.reshape.default)}


class AlignedNodes(tuple):
    """The nodes of one step of the program, one for each capture."""

    @property
    def first(self) -> fx.Node:
        return self[0]

    def __hash__(self) -> int:
        return hash(self[0])


def list_leaf_nodes(tree: Any) -> list[fx.Node]:
    return [n for n in pytree.tree_leaves(tree) if isinstance(n, fx.Node)]


def name_op_kind(n: fx.Node) -> str:
    """Return the op's name, one for all views: whether a reshape is a view depends on strides, and so on sizes."""
    return "reshape" if str(n.target) in _VIEWS else str(n.target)


def build_routing_refusal(node: fx.Node, other: fx.Node) -> Refused:
    """Build the refusal of a step that differs between captures."""
    if other.op == "get_attr" or node.op == "get_attr":
        state, written = (node, other) if node.op == "get_attr" else (other, node)
        if state.meta["kind"] == "buffer" and written.op == "call_function":
            written_by = (written, *reversed(written.all_input_nodes))
            return Refused(
                f"the routing or the sizes decide whether the block writes to {state.meta['fqn']}",
                culprits=(str(state.meta["fqn"]),),
                source=str(next((n.meta["source"] for n in written_by if n.meta["source"] is not NOWHERE), "")),
                remedy="write to it in every call, for all experts at once: self.counts += "
                "torch.bincount(ids.flatten(), minlength=len(self.experts))",
            )
    return Refused(
        f"code outside the experts depends on the routing or on sizes: {get_op_name(node)} here, "
        f"{get_op_name(other)} there",
        source=str(other.meta["source"]),
        remedy=_CHOOSE,
    )


def build_branch_refusal(branch: Source, buffers: Sequence[str]) -> Refused:
    """Build the refusal of a step that depends on a branch of Python.

    Args:
        buffers: the buffers that decide the branch; empty if anything else does, too.
    """
    value = f"the buffer {', '.join(buffers)}" if buffers else "a value that Python reads from a tensor"
    return Refused(f"code outside the experts depends on {value}: {branch.text}", source=str(branch), remedy=_CHOOSE)
