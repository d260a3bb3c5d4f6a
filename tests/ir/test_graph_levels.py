"""Levels of graphs: effects remain, dead code is removed, illegal nodes name the user's line."""

import operator

import torch
from torch.fx import Graph

from moefx.ir.graphs.block_graph import BlockGraph
from moefx.ir.graphs.graph_levels import LEVELS, eliminate_dead_code, find_violations, has_effect

from .graphs import build_block_graph

aten = torch.ops.aten


class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2


def build_nodes():
    g = Graph()
    x = g.placeholder("x")
    nodes_by_name = {
        "copy": g.call_function(aten.copy_.default, (x, x)),
        "random": g.call_function(aten.rand_like.default, (x,)),
        "module": g.call_module("gate", (x,)),
        "method_": g.call_method("add_", (x, 1)),
        "relu_": g.call_function(torch.relu_, (x,)),
        "python": g.call_function(build_nodes, ()),
    }
    pure = {
        "apply": g.call_function(Double.apply, (x,)),
        "add": g.call_function(aten.add.Tensor, (x, x)),
        "linear": g.call_function(torch.nn.functional.linear, (x, x)),
        "method": g.call_method("sum", (x,)),
        "getattr": g.get_attr("w"),
    }
    pure["item"] = g.call_function(operator.getitem, (pure["add"], 0))
    g.output(x)
    return g, nodes_by_name, pure


def test_nodes_with_effects_are_known():
    _, effects, pure = build_nodes()
    assert all(has_effect(node) for node in effects.values())
    assert not any(has_effect(node) for node in pure.values())


def test_dead_code_is_removed_and_effects_are_kept():
    graph, effects, _ = build_nodes()
    block = eliminate_dead_code(BlockGraph("b", graph))
    assert [n.op for n in block.nodes] == ["placeholder", *(n.op for n in effects.values()), "output"]
    assert len(graph.nodes) > len(block.nodes)


def test_violations_show_the_users_line():
    block = build_block_graph()
    assert find_violations(block, LEVELS["fused"]) == find_violations(block, LEVELS["lowered"]) == []
    (found,) = find_violations(block, LEVELS["dialect"])
    found.node.meta["source"] = "model.py:7"
    assert str(found) == f"{found.node.name}: moefx::expert_mlp does not exist at level 'dialect' (model.py:7)"


def test_autograd_functions_are_legal():
    g = Graph()
    g.output(g.call_function(Double.apply, (g.placeholder("x"),)))
    assert find_violations(BlockGraph("b", g), LEVELS["dialect"]) == []
