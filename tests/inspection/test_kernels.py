"""`explain` names the ops that the fused GPU kernels do not support."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import moefx

pytest.importorskip("triton")


class Experts(nn.Module):
    def __init__(self, activation):
        super().__init__()
        self.router = nn.Linear(16, 4)
        self.up = nn.ModuleList(nn.Linear(16, 24) for _ in range(4))
        self.down = nn.ModuleList(nn.Linear(24, 16) for _ in range(4))
        self.activation = activation

    def forward(self, x):
        weights, chosen = self.router(x).softmax(-1).topk(2, -1)
        out = torch.zeros_like(x)
        for e, (up, down) in enumerate(zip(self.up, self.down, strict=True)):
            token, slot = torch.where(chosen == e)
            out = out.index_add(0, token, down(self.activation(up(x[token]))) * weights[token, slot, None])
        return out


def test_supported_experts_have_no_note():
    found = moefx.explain(moefx.compile(Experts(F.silu), example_inputs=(torch.randn(24, 16),)))
    assert found.matched[0].bodies and not found.matched[0].no_kernels
    assert "GPU kernels" not in str(found)


def test_ops_without_derivative_are_named():
    model = Experts(lambda x: torch.round(x) + x)
    found = moefx.explain(moefx.compile(model, example_inputs=(torch.randn(24, 16),)))
    assert "GPU kernels  the fused kernels do not run: round" in str(found)
    assert "round" in found.to_json()
