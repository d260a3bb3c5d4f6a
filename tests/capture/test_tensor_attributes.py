"""Operations on tensors that a rewrite would not repeat: Python attributes, and gradients inside a forward."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import moefx

from ..blocks import D, E, K


class Loop(nn.Module):
    def __init__(self, change):
        super().__init__()
        self.gate = nn.Linear(D, E)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(D, 8), nn.Tanh(), nn.Linear(8, D)) for _ in range(E))
        self.gate.weight.temperature = 2.0
        self.change = change

    def forward(self, x):
        logits = self.change(self, self.gate(x))
        weights, ids = logits.softmax(-1).topk(K)
        out = torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            token, slot = torch.where(ids == e)
            out = out.index_add(0, token, expert(x[token]) * weights[token, slot, None])
        return out


def _read_temperature(tensor):
    return tensor.temperature


READS = {
    "an attribute": lambda b, logits: logits / b.gate.weight.temperature,
    "an attribute that is missing": lambda b, logits: logits / getattr(b.gate.weight, "scale", 1.0),
    "an attribute asked for": lambda b, logits: logits / (2.0 if hasattr(b.gate.weight, "scale") else 1.0),
    "an attribute of a result": lambda b, logits: logits / getattr(logits, "temperature", 1.0),
    "by a function": lambda b, logits: logits / _read_temperature(b.gate.weight),
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", READS)
def test_attributes_of_tensors_are_refused(name):
    with pytest.raises(moefx.NoMoEBlockFound, match=r"reads the attribute `\w+` of a tensor.*test_tensor_attributes"):
        moefx.compile(Loop(READS[name]), torch.randn(24, D))


def test_the_remedy_works():
    block = Loop(lambda b, logits: logits / b.temperature)
    block.temperature = 2.0
    compiled = moefx.compile(block, torch.randn(24, D))
    assert moefx.blocks(compiled)


def test_an_attribute_that_the_forward_sets_itself_is_read():
    def mark(b, logits):
        logits.scale = 2.0
        return logits / logits.scale

    block = Loop(mark).double()
    compiled = moefx.compile(block, torch.randn(24, D, dtype=torch.float64))
    x = torch.randn(9, D, dtype=torch.float64)
    torch.testing.assert_close(compiled(x), block(x), rtol=0, atol=1e-12)


def test_gradients_inside_a_forward_are_refused():
    def differentiate(b, logits):
        at = logits.detach().requires_grad_()
        return logits + torch.autograd.grad(at.square().sum(), at)[0]

    with pytest.raises(moefx.NoMoEBlockFound, match=r"calls grad in its forward"):
        moefx.compile(Loop(differentiate), torch.randn(24, D))
