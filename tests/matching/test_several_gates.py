"""Several selections over the same experts: one block with all of them is refused, one module per gate is rewritten."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import moefx

from ..blocks import D, E, K, Mlp
from ..models.case import run_and_differentiate


class Gate(nn.Module):
    """One selection with its weighted sum."""

    def __init__(self, experts):
        super().__init__()
        self.score, self.experts = nn.Linear(D, E, bias=False), experts

    def forward(self, x):
        w, ids = self.score(x).softmax(-1).topk(K, -1)
        out = torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            t, k = torch.where(ids == e)
            out = out.index_add(0, t, expert(x[t]) * w[t, k, None])
        return out


class InOne(nn.Module):
    """All gates in one block."""

    def __init__(self, together):
        super().__init__()
        self.experts = nn.ModuleList(Mlp() for _ in range(E))
        self.scores, self.together = nn.ModuleList(nn.Linear(D, E, bias=False) for _ in range(3)), together

    def gate(self, i):
        def mixed(x):
            w, ids = self.scores[i](x).softmax(-1).topk(K, -1)
            out = torch.zeros_like(x)
            for e, expert in enumerate(self.experts):
                t, k = torch.where(ids == e)
                out = out.index_add(0, t, expert(x[t]) * w[t, k, None])
            return out

        return mixed

    def forward(self, x):
        return self.together(self.gate, x)


class Apart(InOne):
    """One module per gate with the same list of experts, as the refusal recommends."""

    def __init__(self, together):
        super().__init__(together)
        self.gates = nn.ModuleList(Gate(self.experts) for _ in range(3))
        del self.scores

    def gate(self, i):
        return self.gates[i]


TOGETHER = {
    "difference": lambda gate, x: gate(0)(x) - 0.5 * gate(1)(x),
    "product": lambda gate, x: gate(0)(x) * gate(1)(x).sigmoid(),
    "in a row": lambda gate, x: gate(2)(gate(1)(gate(0)(x)).tanh()),
    "one gate twice": lambda gate, x: gate(0)(x + gate(0)(x)),
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("together", TOGETHER)
def test_refused_with_a_remedy_that_is_followed(together):
    torch.manual_seed(0)
    x = torch.randn(9, D, dtype=torch.float64)
    why = r"the same experts are applied [23] times, with [23] separate selections.*module of its own"
    with pytest.raises(moefx.NoMoEBlockFound, match=why):
        moefx.compile(InOne(TOGETHER[together]).double(), example_inputs=(x,))
    model = Apart(TOGETHER[together]).double()
    compiled = moefx.compile(model, example_inputs=(x,))
    torch.testing.assert_close(*(run_and_differentiate(m, m, x) for m in (compiled, model)))
    assert all(block.fallbacks == 0 for block in moefx.blocks(compiled))
