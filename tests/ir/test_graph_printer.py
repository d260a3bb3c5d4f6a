"""Printed graphs equal the golden files."""

import json
import operator

import pytest
import torch
from torch.fx import Graph

from moefx.ir.expressions.expert_body import ExpertBody, Gemm
from moefx.ir.graphs.block_graph import BlockGraph
from moefx.ir.graphs.display_names import format_body

from .. import golden
from .graphs import D, E, build_block_graph, make_meta, ops

aten = torch.ops.aten


def test_a_fused_graph_prints_like_a_listing():
    graph = build_block_graph(64).replace(header="after 2/4 fuse   1.9 ms   +4 -11   passes/fuse.py:88")
    golden.check("printer_fused.txt", str(graph))


def test_one_op_per_step():
    golden.check("printer_steps.txt", str(build_block_graph(256, fused=False)))


def test_stacked_biases_and_drops():
    g = Graph()
    hidden = g.placeholder("hidden_states")
    hidden.meta.update(make_meta(("S", "D"), torch.bfloat16))
    size = g.call_function(aten.sym_size.int, (hidden, 0))
    size.meta["letters"] = "S"
    routed = g.call_module("gate", (hidden,))
    routed.meta["val"] = (hidden.meta["val"],) * 3
    ids, keep = (g.call_function(operator.getitem, (routed, i)) for i in (1, 2))
    ids.name, keep.name = "ids", "keep"
    pft = g.call_function(ops.build_pft.default, (ids, None, keep), {"num_experts": E, "capacity": 8, "drop": "weight"})
    token_ids, offsets, inverse = (g.call_function(operator.getitem, (pft, i)) for i in (0, 2, 3))
    names = (
        "experts.gate_up_proj",
        "experts.gate_up_proj_bias",
        "experts.down_proj",
        "experts.down_proj_bias",
    )
    up, up_bias, down, down_bias = ([g.get_attr(name)] for name in names)
    act = ("mul.Tensor", ("add.Tensor", ("clamp", "a1", -7.0, 7.0), 1), ("silu", ("clamp", "a0", None, 7.0)))
    body = ExpertBody((Gemm(1, False, True),), ((0, 0, None, 2), (0, 1, None, 2)), act, Gemm(1, False, True))
    y = g.call_function(
        ops.expert_mlp.default,
        (hidden, token_ids, offsets, inverse, None, up, up_bias, down, down_bias),
        {"body": body.to_json(), "keep": "x"},
    )
    rows = g.call_function(operator.getitem, (y, 0))
    kept = g.call_function(operator.getitem, (y, 1))
    kept.name, kept.meta["save"] = "kept", True
    out = g.call_function(ops.combine.default, (rows, None, token_ids, offsets, inverse))
    shared = g.call_module("experts.0", (hidden,))
    total = g.call_function(aten.add.Tensor, (out, shared))
    half = g.call_function(aten._to_copy.default, (total,), {"dtype": torch.bfloat16})
    flat = g.call_function(aten.view.default, (half, [1, size, D]))
    g.call_function(aten.copy_.default, (g.get_attr("counter"), ids))
    g.output((flat, {"ids": ids}, kept))
    golden.check("printer_stacked.txt", str(BlockGraph("model.layers.0.mlp", g)))


@pytest.mark.parametrize(
    ("parts", "act", "out", "text"),
    [
        (1, ("relu", "a0"), "y", "relu(h)"),
        (2, ("mul.Tensor", ("silu", "a0"), "a1"), "y", "silu(g)*u"),
        (2, ("mul.Tensor", "a0", ("silu", "a1")), "y", "u*silu(g)"),
        (2, ("mul.Tensor", ("gelu", "a0", {"approximate": "tanh"}), "a1"), ("mul.Tensor", "y", "w"),
         "gelu(g, approximate=tanh)*u | y*w"),
        (3, ("add.Tensor", "a0", ("mul.Tensor", "a1", "a2")), "y", "a0 + a1*a2"),
    ],
)  # fmt: skip
def test_bodies_print_as_formulas(parts, act, out, text):
    gemm = Gemm(1, True)
    body = ExpertBody((gemm,) * parts, tuple((i, None, None, 1) for i in range(parts)), act, gemm, out)
    assert format_body(body.to_json()) == text
    json.loads(body.to_json())


def test_names_that_clash_are_numbered():
    g = Graph()
    x = g.placeholder("mul")
    once = g.call_function(aten.mul.Tensor, (x, 2))
    twice = g.call_function(aten.mul.Tensor, (once, 0.5))
    g.output(g.call_function(torch.relu, (twice,)))
    text = str(BlockGraph("", g))
    assert text.splitlines()[0] == "# model"
    assert [line.split("=")[0].strip() for line in text.splitlines()[1:-1]] == [
        "mul",
        "mul_1",
        "mul_2",
        "relu",
    ]


def test_plain_torch():
    """Print the ops of the user's code around the experts."""
    g = Graph()
    x = g.placeholder("x")
    weight = g.get_attr("gate.0.weight")
    logits = g.call_function(aten.mm.default, (x, g.call_function(aten.t.default, (weight,))))
    scores = g.call_function(aten._softmax.default, (logits, -1, False))
    first = g.call_function(operator.getitem, (scores, (..., slice(None, 3), slice(0, None, 2), None)))
    size = g.call_function(aten.sym_size.int, (x, 0))
    double = g.call_function(operator.mul, (size, 2))
    shown = g.call_function(aten.view.default, (first, [double, -1]))
    stacked = g.call_function(torch.stack, ([g.get_attr(f"experts.{e}.w") for e in range(9)],), {"dim": 0})
    scaled = g.call_function(aten.mul.Tensor, (shown, 2.5))
    low = g.call_function(aten.clamp.default, (scaled, None, float("inf")))
    masked = g.call_method("masked_fill", (low, x), {"value": False})
    mixed = g.call_function(torch.cat, ([weight, g.get_attr("shared.w"), g.get_attr("bias_1"), g.get_attr("bias_3")],))
    split = g.call_function(aten.split.Tensor, (mixed, 4))
    parts = [g.call_function(operator.getitem, (split, i)) for i in (0, 2)]
    mean, biased = (g.call_function(aten.sub.Tensor, (p, 1), {"alpha": 2}) for p in parts)
    g.output([masked, {"mean": mean}, (biased,), stacked])
    golden.check("printer_plain.txt", str(BlockGraph("mlp", g)))
