"""A loop over experts as a graph."""

import operator

import torch
from torch.fx import Graph

from moefx.ir.graphs.block_graph import BlockGraph

aten = torch.ops.aten


def build_loop(num_experts: int, chained: bool = True) -> BlockGraph:
    """Build the graph of a captured loop over experts."""
    g = Graph()
    x = g.placeholder("x")
    routed = g.call_function(aten.topk.default, (g.call_module("gate", (x,)), 2))
    ids = g.call_function(operator.getitem, (routed, 1))
    weights = g.call_function(operator.getitem, (routed, 0))
    out = first = g.call_function(aten.zeros_like.default, (x,))
    for e in range(num_experts):
        found = g.call_function(aten.nonzero.default, (g.call_function(aten.eq.Scalar, (ids, e)),))
        token = g.call_function(aten.select.int, (found, 1, 0))
        slot = g.call_function(aten.select.int, (found, 1, 1))
        rows = g.call_function(aten.index.Tensor, (x, [token]))
        names = [f"experts.{e}.{name}.weight" for name in ("gate", "up", "down")]
        gate, up, down = map(g.get_attr, names)
        act = g.call_function(aten.silu.default, (g.call_function(aten.linear.default, (rows, gate)),))
        act = g.call_function(aten.mul.Tensor, (act, g.call_function(aten.linear.default, (rows, up))))
        y = g.call_function(aten.linear.default, (act, down))
        y = g.call_function(aten.mul.Tensor, (y, g.call_function(aten.index.Tensor, (weights, [token, slot]))))
        out = g.call_function(aten.index_add.default, (out if chained else first, 0, token, y))
    g.output(out)
    return BlockGraph("layers.0.mlp", g)
