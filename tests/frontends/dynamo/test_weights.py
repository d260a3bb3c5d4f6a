"""Weights for which autograd differs from their owner's parameters."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import moefx
from moefx.frontends.dynamo.backend import backend
from tests.models.case import run_and_differentiate

D, E, H = 8, 4, 12


class Mixture(nn.Module):
    def __init__(self, up):
        super().__init__()
        torch.manual_seed(0)
        self.of = up
        self.gate = nn.Linear(D, E, bias=False)
        self.up, self.down = nn.Parameter(torch.randn(E, D, H)), nn.Parameter(torch.randn(E, H, D))
        self.double()

    def forward(self, x):
        w, ids = self.gate(x).softmax(-1).topk(2)
        out = torch.zeros_like(x)
        for e in range(E):
            out = out + (x @ self.of(self.up, e)).relu() @ self.down[e] * (w * (ids == e)).sum(-1, keepdim=True)
        return out


def make_without_grad(up, e):
    with torch.no_grad():
        return up[e] * 1


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "up", [lambda up, e: up.detach()[e], lambda up, e: up[e].detach() if e == 1 else up[e], make_without_grad]
)
def test_without_gradient(up):
    """Leave gradients as None if there is none; `run_and_differentiate` distinguishes None from zeros."""
    compiled_model, x = Mixture(up), torch.randn(2, 9, D, dtype=torch.float64)
    reference = copy.deepcopy(compiled_model)
    call = torch.compile(compiled_model, backend=backend, options={"backend": "aot_eager", "validation": "symbolic"})
    for got, expected in zip(
        run_and_differentiate(compiled_model, call, x), run_and_differentiate(reference, reference, x), strict=True
    ):
        torch.testing.assert_close(got, expected)
    assert len(moefx.blocks(call)) == 1
