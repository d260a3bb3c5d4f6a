"""Autograd functions whose `apply` was looked up before the capture: at import, or when the module was made."""

from __future__ import annotations

import pytest
import torch

import moefx

from ..models.case import gradients
from ..passes.blocks import D, Loop, Mlp


class Doubled(torch.autograd.Function):
    """The identity, with twice the gradient."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return 2 * gradient


double_gradient = Doubled.apply


class OfTheModule(Loop):
    def __init__(self):
        super().__init__(Mlp)
        self.scale = Doubled.apply

    def forward(self, x):
        return self.scale(super().forward(x))


class OfTheFile(Loop):
    """Before the router, and behind the experts."""

    def __init__(self):
        super().__init__(Mlp)

    def forward(self, x):
        x = double_gradient(x)
        return x + double_gradient(super().forward(x))


@pytest.mark.parametrize("kind", [OfTheModule, OfTheFile])
def test_gradients(kind):
    torch.manual_seed(0)
    model, x = kind().double(), torch.randn(9, D, dtype=torch.float64)
    compiled = moefx.compile(model, plan=moefx.Plan(validation="symbolic"), example_inputs=(x,))
    torch.testing.assert_close(*(gradients(m, m, x) for m in (compiled, model)))
