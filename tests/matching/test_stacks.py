"""Experts in one tensor: selections by a threshold, and products that are split into the parts of experts."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import moefx
from tests.models.case import run_and_differentiate

from ..blocks import D, E, H, K


class Threshold(nn.Module):
    """Run all experts on all tokens and multiply by gates that are zero below the K-th score.

    Ties select more than K.
    """

    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(D, E, bias=False)
        self.up, self.down = nn.Parameter(torch.randn(E, D, H)), nn.Parameter(torch.randn(E, H, D))

    def gates(self, x):
        p = self.gate(x).softmax(-1)
        return p * (p >= p.topk(K, -1).values[..., -1:])

    def forward(self, x):
        h = torch.einsum("td,edh->teh", x, self.up).relu()
        return torch.einsum("teh,ehd,te->td", h, self.down, self.gates(x))


class Where(Threshold):
    def gates(self, x):
        p = self.gate(x).softmax(-1)
        return torch.where(p < p.topk(K, -1)[0][..., -1, None], 0.0, p)


class Scores(Threshold):
    def gates(self, x):
        scores = self.gate(x)
        return scores.masked_fill(scores < scores.topk(K, -1)[0][..., -1, None], float("-inf")).softmax(-1)


class Kth(Threshold):
    def gates(self, x):
        p = self.gate(x).softmax(-1)
        return p * (p >= p.kthvalue(E - K + 1, -1, keepdim=True).values).to(p.dtype)


class Largest(Threshold):
    def gates(self, x):
        p = self.gate(x).softmax(-1)
        return p * (p == p.max(-1, keepdim=True).values)


class Fixed(Threshold):
    def gates(self, x):
        p = self.gate(x).softmax(-1)
        return p * (p >= 0.2)


class Wide(nn.Module):
    """Compute one product for all experts: first all gate units, then all up units."""

    def __init__(self):
        super().__init__()
        self.gate, self.up = nn.Linear(D, E, bias=False), nn.Linear(D, 2 * E * H)
        self.down = nn.Parameter(torch.randn(E, H, D))

    def hidden(self, x):
        parts = self.up(x).chunk(2 * E, -1)
        return torch.stack([F.silu(g) * u for g, u in zip(parts[:E], parts[E:], strict=True)], 1)

    def forward(self, x):
        w, ids = self.gate(x).softmax(-1).topk(K, -1)
        gates = x.new_zeros(x.shape[0], E).scatter(1, ids, w)
        return torch.einsum("teh,ehd,te->td", self.hidden(x), self.down, gates)


class Viewed(Wide):
    def hidden(self, x):
        g, u = self.up(x).view(-1, 2, E, H).unbind(1)
        return F.silu(g) * u


class ExpertByExpert(Wide):
    def hidden(self, x):
        g, u = torch.stack(self.up(x).chunk(E, -1), 1).chunk(2, -1)
        return F.silu(g) * u


class InTurn(Wide):
    def forward(self, x):
        w, ids = self.gate(x).softmax(-1).topk(K, -1)
        out = torch.zeros_like(x)
        for e, h in enumerate(self.up(x).split(2 * H, -1)):
            g, u = h.chunk(2, -1)
            out = out + (F.silu(g) * u) @ self.down[e] * (w * (ids == e)).sum(-1, keepdim=True)
        return out


def check(model: nn.Module) -> moefx.Block:
    torch.manual_seed(0)
    compiled = moefx.compile(model, example_inputs=(torch.randn(9, D, dtype=torch.float64),))
    for tokens in (1, 2, 9, 80):
        x = torch.randn(tokens, D, dtype=torch.float64)
        x[tokens // 2 :: 4] = 0  # all scores tie
        torch.testing.assert_close(run_and_differentiate(compiled, compiled, x), run_and_differentiate(model, model, x))
    (block,) = moefx.blocks(compiled)
    assert not block.fallbacks and block.graph.find("moefx::expert_mlp")
    return block


@pytest.mark.sampled(2)
@pytest.mark.parametrize("kind", [Threshold, Where, Scores, Kth, Largest, Fixed])
def test_selections_by_a_threshold_are_rewritten(kind):
    torch.manual_seed(0)
    model = kind().double()
    with torch.no_grad():
        model.gate.weight[1] = model.gate.weight[2]  # these tie for all tokens
    check(model)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("kind", [Wide, Viewed, ExpertByExpert, InTurn])
def test_one_product_for_all(kind):
    """Read the weights as one stack without a copy."""
    torch.manual_seed(0)
    block = check(kind().double())
    (mlp,) = block.graph.find("moefx::expert_mlp")
    assert len(mlp.args[5]) == (1 if kind in (ExpertByExpert, InTurn) else 2)
    assert not block.graph.find("aten::index_select")
