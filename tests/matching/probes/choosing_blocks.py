"""Blocks whose tokens may choose an expert twice."""

from __future__ import annotations

import copy

import torch
from torch import nn

import moefx

from ...blocks import D, H

E = 6
INF = float("-inf")


class Choosing(nn.Module):
    """Mixture with the rules `choose` and `combine`.

    Args:
        choose: computes weights and experts, [T, 2] each, from probabilities.
        combine: computes the output from them.
    """

    def __init__(self, choose, combine, ids_are_inputs: bool = False):
        super().__init__()
        torch.manual_seed(0)
        self.choose, self.combine, self.is_given = choose, combine, ids_are_inputs
        self.gate = nn.Linear(D, E)
        self.up, self.down = nn.Parameter(torch.randn(E, D, H)), nn.Parameter(torch.randn(E, H, D))
        self.others = nn.Parameter(torch.randn(2, E))
        self.register_buffer("allowed", torch.ones(E, dtype=torch.bool))
        self.register_buffer("table", torch.tensor([2, 0, 1, 3, 5, 4]))
        self.register_buffer("tables", torch.tensor([[2, 0, 1, 3, 5, 4], [0, 1, 2, 3, 4, 5]]))
        self.register_buffer("pairs", torch.stack([torch.arange(E), torch.arange(E).roll(-1)], -1))
        self.register_buffer("factor", torch.tensor(1))

    def forward(self, x, ids=None):
        p = self.gate(x).masked_fill(~self.allowed, INF).softmax(-1)
        w, i = self.choose(self, p) if ids is None else (p.gather(-1, ids), ids)
        return self.combine(self, x, p, w, i)

    def change(self):
        """Set the buffers so that both slots select the same expert."""
        self.allowed.copy_(torch.arange(E) == 0)
        self.table.copy_(torch.tensor([0, 0, 1, 1, 4, 5]))
        self.tables[0] = self.table
        self.pairs.copy_(torch.tensor([[0, 0], [1, 1], [2, 2], [3, 1], [4, 4], [5, 0]]))
        self.factor.zero_()


def run_experts(m, x):
    return torch.einsum("teh,ehd->ted", torch.einsum("td,edh->teh", x, m.up).relu(), m.down)


def sum_by_scatter(m, x, p, w, i):
    return torch.einsum("ted,te->td", run_experts(m, x), torch.zeros_like(p).scatter(-1, i, w))


def check(choose, combine, *ids):
    module = Choosing(choose, combine).double()
    original, x = copy.deepcopy(module), torch.randn(40, D, dtype=torch.float64)
    compiled = moefx.compile(module, example_inputs=(x, *ids))
    for change in (False, True):
        if change:
            module.change(), original.change()
            ids = tuple(torch.stack([i[:, 0], i[:, 0]], -1) for i in ids)
        torch.testing.assert_close(compiled(x, *ids), original(x, *ids))
    (block,) = moefx.blocks(compiled)
    assert not block.fallbacks
