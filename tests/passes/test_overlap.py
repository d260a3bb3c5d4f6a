"""Nodes that do not depend on rows in transit run before the wait."""

from __future__ import annotations

import operator

import torch
from torch import fx

from moefx.ir.argument_binding import Binding
from moefx.ir.graphs.block_graph import BlockGraph
from moefx.ir.ops import dialect
from moefx.passes.overlap import overlap_exchanges

ops, aten = torch.ops.moefx, torch.ops.aten
_ = dialect


def build_block(*, in_place: bool) -> BlockGraph:
    graph = fx.Graph()
    x, y = graph.placeholder("x"), graph.placeholder("y")
    rows = graph.call_function(ops.wait_sums.default, (x,) * 7, {"group": ""})
    changed = graph.call_function(aten.mul_.Tensor if in_place else aten.mul.Tensor, (rows, y))
    shared = graph.create_node("call_module", "shared", (y,))
    independent = graph.call_function(aten.neg.default, (shared,))
    graph.output(graph.call_function(aten.add.Tensor, (changed, independent)))
    return BlockGraph("", graph, Binding(()), None)


def list_names(block: BlockGraph) -> list[str]:
    return [str(n.target) for n in block.graph.nodes if n.op.startswith("call")]


def test_independent_nodes_move_before_the_wait_in_their_order():
    moved = list_names(overlap_exchanges(build_block(in_place=False), None))
    assert moved == ["shared", "aten.neg.default", "moefx.wait_sums.default", "aten.mul.Tensor", "aten.add.Tensor"]


def test_nothing_moves_over_an_effect():
    before = build_block(in_place=True)
    assert list_names(overlap_exchanges(before, None)) == list_names(before)


def test_waits_are_in_the_order_of_their_starts():
    """Run the experts on the first of two chunks while the second one travels."""
    graph = fx.Graph()
    x, plan = graph.placeholder("x"), graph.placeholder("plan")
    sums = []
    for number in "ab":
        sent = graph.call_function(ops.all_to_all_rows.default, (x,), name=f"sent_{number}")
        wait = graph.call_function(ops.wait_rows.default, ([sent], [sent], [x], [x]), name=f"wait_{number}")
        rows = graph.call_function(operator.getitem, (wait, 0), name=f"rows_{number}")
        w = graph.create_node("get_attr", f"w_{number}", name=f"w_{number}")
        args = (rows, *[plan] * 4, [w], [], [w], [])
        y = graph.call_function(ops.expert_mlp.default, args, name=f"y_{number}")
        back = graph.call_function(ops.all_to_all_back.default, (y,), name=f"back_{number}")
        sums.append(graph.call_function(ops.wait_sums.default, (back, plan), name=f"sums_{number}"))
    shared = graph.create_node("call_module", "shared", (x,), name="shared")
    out = graph.call_function(aten.add.Tensor, tuple(sums), name="out")
    graph.output(graph.call_function(aten.add.Tensor, (out, shared), name="both"))
    moved = overlap_exchanges(BlockGraph("", graph, Binding(()), None), None)
    wanted = (
        "sent_a w_a sent_b w_b later later_1 wait_a rows_a y_a back_a wait_b rows_b y_b back_b shared "
        "sums_a sums_b out both"
    )
    assert [n.name for n in moved.graph.nodes if n.op not in ("placeholder", "output")] == wanted.split()
    moved.graph.lint()


def test_weight_gradients_are_deferred_to_the_first_hop():
    """Defer gradients of weights to the exchange between nodes, which takes longest."""
    graph = fx.Graph()
    x, plan = graph.placeholder("x"), graph.placeholder("plan")
    rows = x
    for hop in ("inter", "intra"):
        sent = graph.call_function(ops.all_to_all_rows.default, ([rows],), name=f"sent_{hop}")
        parts = [graph.call_function(operator.getitem, (sent, i), name=f"{p}_{hop}") for i, p in enumerate("ab")]
        wait = graph.call_function(ops.wait_rows.default, ([parts[0]], [parts[1]], [plan], [rows]), name=f"wait_{hop}")
        rows = graph.call_function(operator.getitem, (wait, 0), name=f"rows_{hop}")
    w = graph.create_node("get_attr", "w", name="w")
    y = graph.call_function(ops.expert_mlp.default, (rows, *[plan] * 4, [w], [], [w], []), name="y")
    graph.output(graph.call_function(ops.all_to_all_back.default, (y,), name="back"))
    moved = overlap_exchanges(BlockGraph("", graph, Binding(()), None), None)
    hops = "sent_inter a_inter b_inter w later wait_inter rows_inter sent_intra a_intra b_intra wait_intra rows_intra"
    found = [n.name for n in moved.graph.nodes if n.op not in ("placeholder", "output")]
    assert found == [*hops.split(), "y", "back"]
    (later,) = [n for n in moved.graph.nodes if n.name == "later"]
    (experts,) = moved.find(ops.expert_mlp.default)
    assert experts.args[9] is later and later.args == ([*experts.args[5]], [*experts.args[7]])


def test_nodes_after_a_waiting_effect_do_not_move():
    graph = fx.Graph()
    x, y = graph.placeholder("x"), graph.placeholder("y")
    rows = graph.call_function(ops.wait_sums.default, (x,) * 7, {"group": ""}, name="rows")
    graph.call_function(aten.add_.Tensor, (y, rows), name="changed")
    graph.call_function(aten.neg.default, (y,), name="read")
    graph.output(y)
    moved = overlap_exchanges(BlockGraph("", graph, Binding(()), None), None)
    assert [n.name for n in moved.graph.nodes if n.op.startswith("call")] == ["rows", "changed", "read"]
