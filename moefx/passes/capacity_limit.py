"""Limit the rows of each expert by `Plan(capacity_factor=...)`, for models without a capacity of their own.

Results then differ from the original's.
"""

from __future__ import annotations

import operator
from fractions import Fraction
from typing import Any

import torch
from torch import fx

from ..errors import InvalidPlan
from ..ir.graphs.block_graph import BlockGraph
from ..ir.node_values import get_argument
from .pass_manager import graph_pass

aten = torch.ops.aten
ops = torch.ops.moefx


@graph_pass(level="fused", name="limit")
def limit_capacity(block: BlockGraph, plan: Any) -> BlockGraph:
    """Limit each expert to ceil(capacity_factor * slots / experts) rows; `plan.drop` is the drop rule."""
    block = block.copy()
    for pft in block.find(ops.build_pft.default):
        if pft.kwargs.get("capacity") is not None:
            raise InvalidPlan(
                f"Plan(capacity_factor={plan.capacity_factor}): {block.name or 'the model'} drops choices by a rule of "
                f"its own{_source_text(pft)}, which moefx does not change: leave capacity_factor out"
            )
        if plan.drop == "weight" and get_argument(pft, "topk_weights") is None:
            raise InvalidPlan(
                f"Plan(drop='weight'): the experts of {block.name or 'the model'} have no routing "
                f"weights{_source_text(pft)}; take drop='position_token'"
            )
        with block.graph.inserting_before(pft):
            num_experts = pft.meta.get("num_experts", pft.kwargs["num_experts"])  # of all kinds of experts
            capacity = _emit_capacity(block.graph, get_argument(pft, "topk_ids"), plan.capacity_factor, num_experts)
        pft.update_kwarg("capacity", capacity)
        pft.update_kwarg("drop", plan.drop)
    return block


def _emit_capacity(graph: fx.Graph, topk_ids: fx.Node, factor: float, num_experts: int) -> fx.Node:
    """Emit the capacity in integer arithmetic, which is exact: ceil(n * a / b) = (n * a + b - 1) // b."""
    top_k = topk_ids.meta["val"].shape[1]
    share = Fraction(factor).limit_denominator(1 << 20) * top_k / num_experts
    node = graph.call_function(aten.sym_size.int, (topk_ids, 0))
    node.meta["letters"] = "S"
    for target, number, name in (
        (operator.mul, share.numerator, None),
        (operator.add, share.denominator - 1, None),
        (operator.floordiv, share.denominator, "capacity"),
    ):
        node = graph.create_node("call_function", target, (node, number), name=name)
        node.meta["letters"] = ""
    return node


def _source_text(node: fx.Node) -> str:
    source = node.meta.get("source", "")
    return f" ({source})" if source else ""
