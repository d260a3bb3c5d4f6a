"""Drawings of graphs: loops over experts are collapsed, boxes do not overlap, data flows down."""

import itertools
import xml.etree.ElementTree as ElementTree

import pytest
from torch.fx import Graph

from moefx.inspection.draw import _arrange, draw_svg
from moefx.inspection.outline import Box, Outline, build_outline
from moefx.ir.graphs.block_graph import BlockGraph

from ..ir.graphs import build_block_graph
from ..pace import limit_time
from .loops import build_loop


def group_by_title(drawn: Outline) -> dict[str, list[Box]]:
    found: dict[str, list[Box]] = {}
    for box in drawn.boxes:
        found.setdefault(box.title, []).append(box)
    return found


def test_experts_of_a_loop_are_collapsed():
    boxes = group_by_title(build_outline(build_loop(64)))
    assert {title: [b.count for b in found] for title, found in boxes.items()} == {
        "x": [1], "gate": [1], "topk": [1], "zeros_like": [1], "eq": [64], "nonzero": [64],
        "select": [64, 64], "index": [64, 64], "linear": [64, 64, 64], "silu": [64], "mul": [64, 64],
        "index_add": [64], "return": [1],
    }  # fmt: skip
    assert {d for b in boxes["linear"] for d in b.details} == {
        "experts[0..63].gate.weight", "experts[0..63].up.weight", "experts[0..63].down.weight",
    }  # fmt: skip
    assert boxes["gate"][0].kind == "kept"


def test_few_equal_experts_are_drawn_separately():
    assert all(box.count == 1 for box in build_outline(build_loop(3)).boxes)


def test_dialect_boxes_show_details():
    boxes = group_by_title(build_outline(build_block_graph(64)))
    (mlp,) = boxes["expert_mlp"]
    assert mlp.kind == "dialect"
    assert mlp.details == [
        "experts[0..63].{gate, up, down}.weight", "silu(g)*u | y*w", "sums the rows of each token",
        'keeps "h" for backward', "f32[S,D]",
    ]  # fmt: skip
    assert boxes["build_pft"][0].details == ["ERI arrays, B = S*K rows"]
    assert "expert_mlp(x, pft" in mlp.tooltip


def test_graphs_without_edges_are_drawn():
    g = Graph()
    g.placeholder("x")
    g.output(None)
    assert [b.title for b in build_outline(BlockGraph("b", g)).boxes] == ["x", "return"]


@pytest.mark.parametrize(
    "graph",
    [build_loop(64), build_loop(3), build_loop(16, chained=False), build_block_graph(), build_block_graph(fused=False)],
)
def test_boxes_do_not_overlap_and_data_flows_down(graph):
    drawn = build_outline(graph)
    places, routes = _arrange(drawn)
    for a, b in itertools.combinations([p for p in places if p.box is not None], 2):
        apart = abs(a.x - b.x) >= (a.width + b.width) / 2 or a.y + a.height <= b.y or b.y + b.height <= a.y
        assert apart, (a.box, b.box)
    assert all(upper.layer < lower.layer for route in routes for upper, lower in itertools.pairwise(route))
    assert {p.box for p in places if p.box is not None} == set(drawn.boxes)


def test_cycles_of_collapsed_steps_are_drawn():
    boxes = [Box(t, [], "op", "") for t in "abc"]
    arrows = {(boxes[0], boxes[1]), (boxes[1], boxes[2]), (boxes[2], boxes[0]), (boxes[1], boxes[0])}
    assert draw_svg(Outline(boxes, arrows)).count('class="arrow"') == 2


def test_the_picture_is_well_formed_and_escaped():
    g = Graph()
    x = g.placeholder("x")
    g.output(g.call_module('a<b>&"c"', (x,)))
    root = ElementTree.fromstring(draw_svg(BlockGraph("b", g), label='<"label">'))
    assert root.get("aria-label") == '<"label">'
    assert 'a<b>&"c"' in [t.text for t in root.iter("text")]


def test_large_captures_are_drawn_quickly():
    graph = build_loop(256)
    with limit_time(5):
        draw_svg(graph)
