"""What is said of regions that are left as they are."""

from __future__ import annotations

import torch
from torch import nn

import moefx
from moefx.backend import backend

D, E = 8, 4


class Clamp(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.clamp(min=0)

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return grad * (x > 0)


class Mixture(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(D, E, bias=False)
        self.w = nn.Parameter(torch.randn(E, D, D))

    def forward(self, x):
        w, ids = self.gate(x).softmax(-1).topk(2)
        out = torch.zeros_like(x)
        for e in range(E):
            out = out + Clamp.apply(x @ self.w[e]) * (w * (ids == e)).sum(-1, keepdim=True)
        return out


class Given(Mixture):
    """Experts by the ids of the tokens."""

    def forward(self, x, ids):
        out = torch.zeros_like(x)
        for e in range(E):
            h = x @ self.w[e]
            out = out + ((h * (h > 0)) @ self.w[e]) * (ids == e).to(x.dtype)[..., None]
        return out


def refused(module, *args):
    call = torch.compile(module, backend=backend, options={"backend": "eager", "validation": "symbolic"})
    torch.testing.assert_close(call(*args), module(*args))
    return moefx.explain(call).refused


def test_a_function_with_a_backward_of_its_own_is_named():
    (refusal,) = refused(Mixture(), torch.randn(3, 9, D))
    assert "calls the torch.autograd.Function Clamp" in refusal.reason
    assert refusal.source.startswith("test_refusals.py:")


def test_experts_that_are_given():
    """Comparisons inside of the experts are no choice."""
    (refusal,) = refused(Given(), torch.randn(3, 9, D), torch.randint(0, E, (3, 9)))
    assert refusal.reason.startswith("no choice of experts is computed here, and it is given ids: ")
    assert "moefx.compile(model) takes them" in refusal.remedy


class Layers(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Given() for _ in range(3))

    def forward(self, x, ids):
        for layer in self.layers:
            x = x + layer(x, ids)
        return x


def test_a_reason_is_said_once(caplog):
    module, args = Layers(), (torch.randn(3, 9, D), torch.randint(0, E, (3, 9)))
    call = torch.compile(module, backend=backend, options={"backend": "eager", "validation": "symbolic"})
    call(*args)
    report = moefx.explain(call)
    assert len(report.refused) == 3 and str(report).count("no choice of experts") == 1
    assert "refused: layers.0 ... layers.2 (3 blocks)   test_refusals.py:" in str(report)
    (text,) = {r.getMessage() for r in caplog.records if "left a region" in r.getMessage()}
    assert "layers.0 ... layers.2 (3 blocks)" in text
