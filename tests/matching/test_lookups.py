"""Ops that read or write entries by integers: their axes and bounds, and blocks that use `torch.take`."""

from __future__ import annotations

import copy

import pytest
import torch

import moefx
from moefx.capture.concolic import capture_block
from moefx.capture.tracing.concrete_routing import Routing
from moefx.matching.facts.graph_nodes import find_lookups

from ..blocks import Block, D, E, Loop

LOOKUPS = {
    "index": (lambda t, i: t[:, i], [(1, range(-3, 3))]),
    "index_select": (lambda t, i: t.index_select(1, i), [(1, range(-3, 3))]),
    "gather": (lambda t, i: t.gather(1, i[:, None]), [(1, range(3))]),
    "index_add": (lambda t, i: t.index_add(0, i, t[:2]), [(0, range(-4, 4))]),
    "take": (lambda t, i: t.take(i), [(None, range(-12, 12))]),
}


@pytest.mark.parametrize(("lookup", "expected"), LOOKUPS.values(), ids=LOOKUPS)
def test_a_lookup_names_the_axes_that_it_indexes(lookup, expected):
    table = torch.arange(12).view(4, 3)
    captured = capture_block(Block(lambda b, i: lookup(table, i)), (torch.tensor([0, 2]),), {}, Routing())
    axes = {node: [at for _, *at in find_lookups(node)] for node in captured.nodes}
    assert [tuple(at) for at in axes[captured.out]] == expected


class TakenWeights(Loop):
    def route(self, x):
        scores = self.gate(x).softmax(-1)
        ids = scores.topk(self.k, -1).indices
        return torch.take(scores, ids + torch.arange(len(x))[:, None] * E), ids


class TakenExperts(Loop):
    def __init__(self):
        super().__init__()
        self.register_buffer("table", torch.tensor([2, 0, 1, 3]))

    def route(self, x):
        weights, ids = super().route(x)
        return weights, torch.take(self.table, ids)


@pytest.mark.parametrize("kind", [TakenWeights, TakenExperts])
def test_a_block_that_uses_torch_take(kind):
    torch.manual_seed(0)
    model, x = kind().double(), torch.randn(20, D, dtype=torch.float64)
    compiled = moefx.compile(copy.deepcopy(model), example_inputs=(x,))
    for tokens in (1, 7, 20):
        torch.testing.assert_close(compiled(x[:tokens]), model(x[:tokens]))
    (block,) = moefx.blocks(compiled)
    assert not block.fallbacks
