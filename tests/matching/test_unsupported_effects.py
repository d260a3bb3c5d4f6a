"""Blocks with effects that a graph cannot repeat are refused as soon as moefx finds their routing."""

import torch
from torch import nn

import moefx
from moefx.matching import prove
from moefx.matching.probes.probe import Probe

D, E = 12, 4


class Counting(nn.Module):
    """Count the tokens of each expert in a tensor that is no buffer."""

    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(D, E, bias=False)
        self.experts = nn.ModuleList(nn.Linear(D, D) for _ in range(E))
        self.usage = torch.zeros(E)

    def forward(self, x):
        weights, chosen = self.gate(x).softmax(-1).topk(2)
        out = torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            token, slot = torch.where(chosen == e)
            out[token] += expert(x[token]) * weights[token, slot, None]
            self.usage[e] += len(token)
        return out


def test_a_record_is_refused_before_branches_are_tried(monkeypatch):
    tried = []
    monkeypatch.setattr(prove, "INTERVENTIONS", (Probe(tried.append, ""),))
    (block,) = moefx.explain(Counting(), example_inputs=(torch.randn(16, D),)).refused
    assert "the block writes to usage when it is called" in block.reason
    assert not tried
