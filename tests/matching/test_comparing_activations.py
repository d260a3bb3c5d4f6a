"""Activations with comparisons are one formula, regardless of the branch that the example takes."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import moefx

from ..blocks import D, E, Loop

ROWS, H = 33, 24


def assign_positive(h):
    h = h.clone()
    h[h < 0] = 0
    return h


ACTIVATIONS = {
    "leaky": lambda h: torch.where(h > 0, h, 0.1 * h),
    "numbers": lambda h: torch.where(h > 0, 1.1, 0.3) * h,
    "times_mask": lambda h: h * (h > 0),
    "times_cast_mask": lambda h: h * (h > 0).to(h.dtype),
    "masked_fill": lambda h: h.masked_fill(h < 0, 0.0),
    "assigned": assign_positive,
    "two_bounds": lambda h: torch.where((h > 0) & (h < 1), h * h, h.abs()),
    "inverted": lambda h: torch.where(~(h > 0), h.exp(), h + 1),
    "never_crossed": lambda h: torch.where(h > 20, h, torch.log1p(h.clamp(max=20).exp())),
    "cut": lambda h: torch.where(h > 20, torch.full_like(h, 20.0), h),
    "finite": lambda h: torch.where(torch.isfinite(h), h, torch.zeros_like(h)),
    "one_minus_mask": lambda h: h * (1 - (h < 0).to(h.dtype) * 0.9),
    "literal": lambda h: F.prelu(h, torch.tensor(0.3, dtype=h.dtype)),
    "larger_than_zeros": lambda h: torch.maximum(h, torch.zeros_like(h)),
    "log_of_sum": lambda h: torch.logaddexp(torch.full_like(h, 0.5), h),
    "hardswish": F.hardswish,
    "logsigmoid": F.logsigmoid,
    "floored": lambda h: h + torch.div(h, 2, rounding_mode="floor"),
    "truncated": lambda h: h - torch.div(h, h.abs() + 1, rounding_mode="trunc"),
}


class Expert(nn.Module):
    def __init__(self, act):
        super().__init__()
        self.up, self.down, self.act = nn.Linear(D, H), nn.Linear(H, D), act

    def forward(self, x):
        return self.down(self.act(self.up(x)))


class Larger(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(D, H), nn.Linear(D, H), nn.Linear(H, D)

    def forward(self, x):
        a, b = self.gate(x), self.up(x)
        return self.down(torch.where(a > b, a, b) * b)


def compile_block(model: nn.Module) -> tuple[nn.Module, nn.Module]:
    model = model.double()
    return copy.deepcopy(model), moefx.compile(model, example_inputs=(torch.randn(ROWS, D).double(),))


def check(original: nn.Module, compiled: nn.Module) -> None:
    """Compare outputs and gradients, beyond the range of the example too."""
    for scale in (1.0, 10.0, 100.0):
        x = (scale * torch.randn(ROWS, D)).double().requires_grad_()
        results = []
        for model in (original, compiled):
            out = model(x)
            results.append([out, *torch.autograd.grad(out.square().sum(), [x, *model.parameters()])])
        for got, expected in zip(*results[::-1], strict=True):
            torch.testing.assert_close(got, expected)


@pytest.mark.sampled(15)
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_an_activation_that_compares(name):
    torch.manual_seed(0)
    original, compiled = compile_block(Loop(lambda: Expert(ACTIVATIONS[name])))
    (block,) = moefx.explain(compiled).matched
    assert block.bodies and not block.unfused
    check(original, compiled)


def test_the_larger_of_two_projections():
    torch.manual_seed(0)
    check(*compile_block(Loop(Larger)))


class Padded(Loop):
    """Skip rows of zeros by a comparison, which therefore selects rows."""

    def forward(self, x):
        w, ids = self.route(x)
        real, out = (x != 0).any(-1), torch.zeros_like(x)
        for e in range(E):
            t, k = torch.where((ids == e) & real[:, None])
            out = out.index_add(0, t, self.expert(e, x[t], w[t, k, None]))
        return out


def test_an_activation_that_compares_with_padding():
    torch.manual_seed(0)
    original, compiled = compile_block(Padded(lambda: Expert(ACTIVATIONS["leaky"])))
    x = torch.randn(ROWS, D).double()
    x[::3] = 0
    torch.testing.assert_close(compiled(x), original(x))
    check(original, compiled)


def test_reductions_over_a_row_that_decide_are_refused():
    with pytest.raises(moefx.NoMoEBlockFound):
        compile_block(Loop(lambda: Expert(lambda h: h * (h > 1).any(-1, keepdim=True))))


@pytest.mark.parametrize(
    "name, act",
    {
        "roll": lambda h: h.roll(1, -1),
        "topk": lambda h: torch.zeros_like(h).scatter(-1, *reversed(h.topk(4, -1))),
        "sort": lambda h: h.sort(-1).values,
    }.items(),
)
def test_ops_that_move_elements_within_a_row_are_named(name, act):
    with pytest.raises(
        moefx.NoMoEBlockFound, match=f"elements within a row: {name} along the last axis.*test_comparing_activations"
    ):
        compile_block(Loop(lambda: Expert(act)))
