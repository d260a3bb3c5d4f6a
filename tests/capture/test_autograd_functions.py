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


class WithContext(torch.autograd.Function):
    """SiLU with half its gradient, in the form with `setup_context`."""

    @staticmethod
    def forward(x, beta=1.0):
        return x * torch.sigmoid(beta * x)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(inputs[0], output * 0.5)

    @staticmethod
    def backward(ctx, gradient):
        x, y = ctx.saved_tensors
        return gradient * (y + torch.sigmoid(x)), None


class Written(torch.autograd.Function):
    """Write to the argument."""

    @staticmethod
    def forward(ctx, x):
        ctx.mark_dirty(x)
        return x.mul_(3)

    @staticmethod
    def backward(ctx, gradient):
        return 5 * gradient


class Passed(torch.autograd.Function):
    """Return the argument and a result without gradients."""

    @staticmethod
    def forward(ctx, x):
        scale = x.square().mean(-1, keepdim=True)
        ctx.mark_non_differentiable(scale)
        return x, scale

    @staticmethod
    def backward(ctx, gradient, _):
        return 7 * gradient


with_context, written, passed = WithContext.apply, Written.apply, Passed.apply


def scale_by_detached(x):
    y, scale = passed(x)
    return y * scale


@pytest.mark.parametrize(
    "function",
    [with_context, lambda h: with_context(h, 0.5), lambda h: written(h * 2), scale_by_detached],
    ids=["setup_context", "two arguments", "written", "passed"],
)
def test_kinds_of_functions(function):
    class Applied(Loop):
        def __init__(self):
            super().__init__(Mlp)

        def forward(self, x):
            return function(super().forward(x))

    torch.manual_seed(0)
    model, x = Applied().double(), torch.randn(9, D, dtype=torch.float64)
    compiled = moefx.compile(model, plan=moefx.Plan(validation="symbolic"), example_inputs=(x,))
    torch.testing.assert_close(*(run_and_differentiate(m, m, x) for m in (compiled, model)))
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), model(x))
    assert moefx.blocks(compiled)[0].fallbacks == 0


@pytest.mark.parametrize("function", [with_context, Doubled.apply, lambda h: passed(h)[0]])
def test_functions_in_experts_are_refused(function):
    why = r"the autograd function (WithContext|Doubled|Passed) computes a part of an expert.* by torch ops"
    with pytest.raises(Refused, match=why):
        rewritten(Loop(lambda: Mlp(act=function)))


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
