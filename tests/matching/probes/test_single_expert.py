"""Layers with one expert have a canonical form, but select nothing."""

from __future__ import annotations

import torch
from torch import nn

import moefx

D = 6


class Gated(nn.Module):
    """Layer with one expert, which tokens use or skip."""

    def __init__(self):
        super().__init__()
        self.gate, self.experts = nn.Linear(D, 1), nn.ModuleList([nn.Linear(D, D)])

    def forward(self, x):
        weights, ids = self.gate(x).sigmoid().topk(1)
        out = torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            token, slot = torch.where((ids == e) & (weights > 0.5))
            out[token] += expert(x[token]) * weights[token, slot, None]
        return out


def test_a_layer_with_one_expert_is_refused_by_the_probe():
    (refused,) = moefx.explain(Gated(), example_inputs=(torch.randn(20, D),), trace=True).refused
    assert "no selection among several experts" in refused.reason
    assert refused.trace.probes[-1].name == "refuse_single_expert" and refused.trace.probes[-1].refused
