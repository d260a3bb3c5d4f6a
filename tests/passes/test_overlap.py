"""What is independent of rows on their way runs before they are waited for."""

from __future__ import annotations

import torch
from torch import fx

from moefx.ir import dialect
from moefx.ir.binding import Binding
from moefx.ir.block import BlockGraph
from moefx.passes.overlap import overlap

ops, aten = torch.ops.moefx, torch.ops.aten
_ = dialect


def block(*, in_place: bool) -> BlockGraph:
    graph = fx.Graph()
    x, y = graph.placeholder("x"), graph.placeholder("y")
    rows = graph.call_function(ops.wait_sums.default, (x,) * 7, {"group": ""})
    changed = graph.call_function(aten.mul_.Tensor if in_place else aten.mul.Tensor, (rows, y))
    shared = graph.create_node("call_module", "shared", (y,))
    more = graph.call_function(aten.neg.default, (shared,))
    graph.output(graph.call_function(aten.add.Tensor, (changed, more)))
    return BlockGraph("", graph, Binding(()), None)


def names(block: BlockGraph) -> list[str]:
    return [str(n.target) for n in block.graph.nodes if n.op.startswith("call")]


def test_independent_nodes_move_before_the_wait_in_their_order():
    moved = names(overlap(block(in_place=False), None))
    assert moved == ["shared", "aten.neg.default", "moefx.wait_sums.default", "aten.mul.Tensor", "aten.add.Tensor"]


def test_nothing_moves_over_what_has_an_effect():
    before = block(in_place=True)
    assert names(overlap(before, None)) == names(before)
