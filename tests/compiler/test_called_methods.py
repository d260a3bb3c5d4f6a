"""Modules whose owner calls a method other than `forward`."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import moefx

from ..blocks import D, E, H
from ..models.case import run_and_differentiate


class Stacked(nn.Module):
    """Stacked experts that run only through `run_experts`."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Parameter(torch.randn(E, D, H) / 3), nn.Parameter(torch.randn(E, H, D) / 3)

    def run_experts(self, x, weights, chosen):
        out = torch.zeros_like(x)
        for e in range(E):
            token, slot = torch.where(chosen == e)
            out[token] += (x[token] @ self.up[e]).relu() @ self.down[e] * weights[token, slot, None]
        return out


class Layer(nn.Module):
    """Layer that does not call the `forward` of its experts."""

    def __init__(self):
        super().__init__()
        self.gate, self.experts = nn.Linear(D, E, bias=False), Stacked()

    def forward(self, x):
        return self.experts.run_experts(x, *self.gate(x).softmax(-1).topk(2))


class LayerByName(Layer):
    """Layer whose own `forward` is not called either."""

    def mix(self, x):
        return super().forward(x)

    def forward(self, x):
        raise AssertionError("forward was called")


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.layer = nn.LayerNorm(D), LayerByName()

    def forward(self, x):
        return x + self.layer.mix(self.norm(x))


@pytest.mark.parametrize(("make", "block"), [(Layer, ""), (Model, "")])
def test_the_caller_of_the_method_is_rewritten(make, block):
    torch.manual_seed(0)
    model, x = make().double(), torch.randn(20, D, dtype=torch.float64)
    compiled = moefx.compile(model, example_inputs=(x,))
    assert [found.name for found in moefx.blocks(compiled)] == [block]
    torch.testing.assert_close(run_and_differentiate(compiled, compiled, x), run_and_differentiate(model, model, x))
    assert moefx.blocks(compiled)[0].forward.counts.rewritten and not moefx.blocks(compiled)[0].fallbacks
    assert model.state_dict().keys() == compiled.state_dict().keys()
