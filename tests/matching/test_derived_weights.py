"""Weights that an expert computes from its parameters: normalized, quantized, masked, adapted."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations

import moefx

from ..blocks import D, E, H, Loop, Mlp


class Rounded(torch.autograd.Function):
    @staticmethod
    def forward(ctx, w):
        return (w * 8).round() / 8

    @staticmethod
    def backward(ctx, grad):
        return grad * 2


class Derived(Mlp):
    def weight(self, w):
        raise NotImplementedError

    def forward(self, x):
        up = F.linear(x, self.weight(self.up.weight), self.up.bias)
        return F.linear(F.gelu(up), self.weight(self.down.weight), self.down.bias)


class Normalised(Derived):
    def weight(self, w):
        return F.normalize(w, dim=-1)


class Ternary(Derived):
    """BitNet: round weights and activations with straight-through gradients."""

    def weight(self, w):
        scale = w.abs().mean().clamp(min=1e-5)
        return w + ((w / scale).round().clamp(-1, 1) * scale - w).detach()

    def forward(self, x):
        scale = 127 / x.abs().max(-1, keepdim=True).values.clamp(min=1e-5)
        return super().forward(x + ((x * scale).round().clamp(-128, 127) / scale - x).detach())


class Custom(Derived):
    def weight(self, w):
        return Rounded.apply(w)


class Masked(Mlp):
    def __init__(self):
        super().__init__()
        self.register_buffer("mask", (torch.rand(H, D) > 0.5).double())
        self.register_buffer("gain", torch.rand(H))

    def forward(self, x):
        return self.down(F.gelu(F.linear(x, self.up.weight * self.mask, self.up.bias) * self.gain))


def make_weight_norm():
    expert = Mlp(F.gelu)
    parametrizations.weight_norm(expert.up)
    return expert


class Adapted(Loop):
    """LoRA: W + B A, with one A for all experts."""

    def __init__(self):
        super().__init__(Mlp)
        self.a = nn.Parameter(torch.randn(2, D))
        self.b = nn.ParameterList(nn.Parameter(torch.randn(H, 2)) for _ in range(E))

    def expert(self, e, x, w):
        up, down = self.experts[e].up, self.experts[e].down
        return down(F.relu(F.linear(x, up.weight + 0.5 * self.b[e] @ self.a, up.bias))) * w


class StackedWithBiases(Loop):
    """Stacked weights with a mask and a scale, and a list of biases."""

    def __init__(self):
        super().__init__(nn.Identity)
        self.up, self.down = nn.Parameter(torch.randn(E, D, H)), nn.Parameter(torch.randn(E, H, D))
        self.scale = nn.Parameter(torch.rand(E, 1, H))
        self.bias = nn.ParameterList(nn.Parameter(torch.randn(H)) for _ in range(E))
        self.register_buffer("mask", (torch.rand(E, D, H) > 0.5).double())

    def expert(self, e, x, w):
        return F.silu(x @ (self.up * self.mask)[e] * self.scale[e] + self.bias[e]) @ self.down[e] * w


class Gains(Loop):
    """Buffer that is indexed next to the expert's number, by two experts each."""

    def __init__(self):
        super().__init__(Mlp)
        self.register_buffer("gain", torch.rand(E + 1, H))

    def expert(self, e, x, w):
        up, down = self.experts[e].up, self.experts[e].down
        return down(up(x) * self.gain[e + 1] * self.gain[e // 2]) * w


MODELS = {
    "normalised": lambda: Loop(Normalised),
    "ternary": lambda: Loop(Ternary),
    "custom": lambda: Loop(Custom),
    "masked": lambda: Loop(Masked),
    "weight_norm": lambda: Loop(make_weight_norm),
    "adapted": Adapted,
    "stacked": StackedWithBiases,
    "gains": Gains,
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("build", MODELS.values(), ids=MODELS)
def test_equal_with_every_gradient(build):
    torch.manual_seed(0)
    original = build().double()
    compiled = moefx.compile(copy.deepcopy(original), example_inputs=(torch.randn(5, D).double(),))
    for tokens in (1, 7, 60):
        results = []
        for model in (original, compiled):
            torch.manual_seed(tokens)
            x = torch.randn(tokens, D, dtype=torch.float64, requires_grad=True)
            model.zero_grad()
            y = model(x)
            y.pow(2).sum().backward()
            grads = [torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in model.parameters()]
            results.append([y.detach(), x.grad, *grads])
        torch.testing.assert_close(results[1], results[0], rtol=1e-10, atol=1e-10)
    assert moefx.explain(compiled).matched[0].calls == (3, 0, 0)  # never the original


def test_every_expert_is_named_once():
    compiled = moefx.compile(Loop(Normalised).double(), example_inputs=(torch.randn(5, D).double(),))
    printed = " ".join(str(moefx.graph(compiled, "")).split())
    assert "div[0..3] = experts[0..3].up.weight / expand[0..3]" in printed
    assert "up=div[0..3]" in printed


class Dropped(Derived):
    def weight(self, w):
        return F.dropout(w, 0.5)


class Positions(Loop):
    """Index a table by position, which looks like a gain per expert while experts have one token."""

    def __init__(self):
        super().__init__(Mlp)
        self.register_buffer("table", torch.rand(64, D))

    def forward(self, x):
        w, ids = self.route(x)
        out = torch.zeros_like(x)
        for e in range(E):
            t, k = torch.where(ids == e)
            out = out.index_add(0, t, self.expert(e, x[t] * self.table[: len(t)], w[t, k, None]))
        return out


@pytest.mark.parametrize(
    ("build", "reason"), [(lambda: Loop(Dropped), "bernoulli"), (Positions, "uses table.* for one token")]
)
def test_other_functions_of_parameters_are_refused(build, reason):
    with pytest.raises(moefx.NoMoEBlockFound, match=reason):
        moefx.compile(build().double(), example_inputs=(torch.randn(5, D).double(),))
