"""Submodules that are called with arguments of any name."""

from __future__ import annotations

import torch
from torch import nn

import moefx

from ..blocks import D, Loop, Mlp


class Named(nn.Module):
    """A layer whose arguments have names that the wrappers of calls use, too."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(D, D)

    def forward(self, *, module, original, args=None):
        return self.linear(module) + original


class CallsByName(Loop):
    def __init__(self):
        super().__init__(Mlp)
        self.named = Named()

    def forward(self, x):
        return super().forward(self.named(module=x, original=x))


def test_arguments_may_have_any_name():
    torch.manual_seed(0)
    model, x = CallsByName().double(), torch.randn(9, D, dtype=torch.float64)
    compiled = moefx.compile(model, example_inputs=(x,))
    torch.testing.assert_close(compiled(x), model(x))
    assert moefx.blocks(compiled)[0].fallbacks == 0
