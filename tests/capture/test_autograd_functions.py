"""Autograd functions whose `apply` was looked up before the capture, at import or in `__init__`."""

from __future__ import annotations

import pytest
import torch

import moefx
from moefx.errors import Refused

from ..blocks import D, Loop, Mlp, rewritten
from ..models.case import run_and_differentiate


class Doubled(torch.autograd.Function):
    """Identity with twice the gradient."""

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
    """Apply the function before the router and after the experts."""

    def __init__(self):
        super().__init__(Mlp)

    def forward(self, x):
        x = double_gradient(x)
        return x + double_gradient(super().forward(x))


@pytest.mark.parametrize("kind", [OfTheModule, OfTheFile])
def test_gradients_equal_the_original(kind):
    torch.manual_seed(0)
    model, x = kind().double(), torch.randn(9, D, dtype=torch.float64)
    compiled = moefx.compile(model, plan=moefx.Plan(validation="symbolic"), example_inputs=(x,))
    torch.testing.assert_close(*(run_and_differentiate(m, m, x) for m in (compiled, model)))


class AsksForState(Loop):
    def __init__(self, is_asked):
        super().__init__(Mlp)
        self.is_asked = is_asked

    def forward(self, x):
        w, ids = self.route(x)
        return self.mixed(x, w.round() if self.is_asked(self, w) else w, ids)


@pytest.mark.parametrize(
    "is_asked",
    [
        lambda block, w: w.grad_fn is None,
        lambda block, w: w.is_leaf,
        lambda block, w: block.gate.weight.grad is not None,
    ],
    ids=["grad_fn", "is_leaf", "grad"],
)
def test_reads_of_the_autograd_graph_are_refused(is_asked):
    with pytest.raises(Refused, match="of a tensor, which differs between calls"):
        rewritten(AsksForState(is_asked))


def test_the_remedy_works():
    torch.manual_seed(0)
    model = AsksForState(lambda block, w: not torch.is_grad_enabled()).double()
    x = torch.randn(9, D, dtype=torch.float64)
    compiled = moefx.compile(model, plan=moefx.Plan(validation="symbolic"), example_inputs=(x,))
    torch.testing.assert_close(compiled(x), model(x))
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), model(x))
