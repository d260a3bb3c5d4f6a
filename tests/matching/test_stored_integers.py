"""Tests on integers that a block stores between calls, such as steps and counts, which later calls change."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import moefx
from moefx.errors import NoMoEBlockFound

from ..blocks import D, E, Loop, Mlp

HELD = {"steps": torch.tensor(0), "limit": torch.tensor(0), "counts": torch.zeros(E, dtype=torch.int64),
        "place": torch.arange(E), "of_vocabulary": torch.arange(50) % E}  # fmt: skip


class Held(Loop):
    """Change the routing by `use`: (self, weights, experts) -> (weights, experts). `how`: storage of the integers."""

    def __init__(self, use, how):
        super().__init__(Mlp)
        self.use = use
        for name, value in HELD.items():
            if how == "buffer":
                self.register_buffer(name, value.clone())
            elif how == "parameter":
                self.register_parameter(name, nn.Parameter(value.clone(), requires_grad=False))
            else:
                setattr(self, name, value.clone())

    def route(self, x):
        return self.use(self, *super().route(x))

    def change(self, steps, limit, counts, place):
        self.steps.fill_(steps)
        self.limit.fill_(limit)
        self.counts.copy_(torch.tensor(counts))
        self.place.copy_(torch.tensor(place))


STATES = [
    (0, 0, [0, 0, 0, 0], [0, 1, 2, 3]),
    (999, 1, [998, 999, 1000, 1001], [2, 0, 3, 1]),
    (1000, 999, [0, 5000, 0, 5], [0, 1, 2, 3]),
    (10**6, 10**6, [7, 7, 7, 7], [-1, 1, 2, -1]),
]
USES = {
    "a warm-up": lambda b, w, i: (torch.where(b.steps < 1000, w, 2 * w), i),
    "experts change": lambda b, w, i: (w, (i + b.steps // 1000) % E),
    "a ramp": lambda b, w, i: (w / (2 + b.steps / 1000).clamp(max=4), i),
    "worn out": lambda b, w, i: (w * (b.counts[i] < 1000), i),
    "two that are equal": lambda b, w, i: (torch.where(b.steps == b.limit, w, 2 * w), i),
    "the busiest": lambda b, w, i: (torch.where(b.counts.max() - b.counts.min() > 999, 0.5 * w, w), i),
    "any": lambda b, w, i: (torch.where((b.counts > 1000).any(), 0.5 * w, w), i),
    "not here": lambda b, w, i: (w.masked_fill(b.place[i] < 0, 0.0), i),
    "kept apart": lambda b, w, i: (torch.where(b.counts[i] == 7, 3 * w, w), b.place.clamp(min=0)[i]),
}


@pytest.mark.sampled(12)
@pytest.mark.parametrize("how", ["buffer", "parameter", "attribute"])
@pytest.mark.parametrize("name", USES)
def test_tests_of_stored_integers_hold_for_other_values(name, how):
    torch.manual_seed(0)
    model = Held(USES[name], how).double()
    x = torch.randn(20, D, dtype=torch.float64)
    compiled = moefx.compile(copy.deepcopy(model), example_inputs=(x,), plan=moefx.Plan(validation="symbolic"))
    for state in STATES:
        for one in (model, compiled):
            one.change(*state)
        torch.testing.assert_close(compiled(x), model(x))
    assert moefx.blocks(compiled)[0].fallbacks == 0


class WithMask(Held):
    def forward(self, x, mask):
        w, ids = Loop.route(self, x)
        w = torch.where(mask[:, None] & (self.steps < 1000), w, 2 * w)
        return self.mixed(x, w, ids)


def test_stored_integers_with_a_mask_input():
    torch.manual_seed(0)
    model, x = WithMask(None, "buffer").double(), torch.randn(20, D, dtype=torch.float64)
    mask = torch.ones(20, dtype=torch.bool)
    plan = moefx.Plan(validation="symbolic")
    compiled = moefx.compile(copy.deepcopy(model), example_inputs=(x, mask), plan=plan)
    for state in STATES:
        for later_mask in (mask, ~mask, torch.arange(20) % 3 == 0):
            for one in (model, compiled):
                one.change(*state)
            torch.testing.assert_close(compiled(x, later_mask), model(x, later_mask))


def test_compile_restores_stored_integers():
    model = Held(USES["a warm-up"], "attribute")
    before = {name: (value, value.clone()) for name, value in vars(model).items() if isinstance(value, torch.Tensor)}
    moefx.compile(model, example_inputs=(torch.randn(20, D),))
    assert before.keys() == HELD.keys()
    for name, (value, copied) in before.items():
        assert getattr(model, name) is value and torch.equal(value, copied)


REFUSED = {
    "a curve": (
        lambda b, w, i: (torch.where(b.steps**2 == b.limit**3 + 10177, 2 * w, w), i),
        "the same outcome for all values",
    ),
    "all off": (lambda b, w, i: (w * (b.steps == b.limit), i), "turns all experts off is not followed"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_uses_of_stored_integers_that_may_differ_are_refused(name):
    use, why = REFUSED[name]
    with pytest.raises(NoMoEBlockFound, match=why):
        moefx.compile(Held(use, "buffer"), example_inputs=(torch.randn(20, D),))
