"""What is asked of sizes alone: whether they are even, a square, a multiple of something."""

from __future__ import annotations

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import moefx

D, H, E = 6, 8, 4
SIZES = (1, 2, 3, 16, 17, 25, 64, 65, 100, 128, 130, 256, 300)
SEEN = {
    "parity": lambda n: 1 + n % 2,
    "multiple": lambda n: 1 + (n % 128 == 0),
    "power of two": lambda n: 1 + (n & (n - 1) == 0),
}
UNSEEN = {
    "common divisor": lambda n: math.gcd(n, 64),
    "square": lambda n: 1 + (math.isqrt(n) ** 2 == n),
    "digits": lambda n: 1 + str(n).endswith("00"),
}


class Scaled(nn.Module):
    """Rows without a batch, times something that follows from how many there are."""

    def __init__(self, scale):
        super().__init__()
        self.gate = nn.Linear(D, E, bias=False)
        self.up, self.down = nn.Parameter(torch.randn(E, D, H)), nn.Parameter(torch.randn(E, H, D))
        self.scale = scale

    def forward(self, x):
        w, ids = self.gate(x).softmax(-1).topk(2)
        h = F.silu(torch.einsum("sd,skdh->skh", x, self.up[ids]))
        y = torch.einsum("skh,skhd->skd", h, self.down[ids])
        return (y * w.unsqueeze(-1)).sum(1) * self.scale(x.shape[0])


@pytest.mark.sampled(2)
@pytest.mark.parametrize("scale", SEEN)
def test_what_is_seen_is_a_guard(scale):
    """Captures of rows without a batch are all of odd sizes, none a multiple of 128."""
    block = Scaled(SEEN[scale]).double()
    compiled = moefx.compile(copy.deepcopy(block), example_inputs=(torch.randn(17, D, dtype=torch.float64),))
    for n in SIZES:
        x = torch.randn(n, D, dtype=torch.float64)
        torch.testing.assert_close(compiled(x), block(x))
    (matched,) = moefx.explain(compiled).matched
    assert matched.calls[0] and matched.calls[1], "some sizes run rewritten, others as they were"


@pytest.mark.parametrize("scale", UNSEEN)
def test_what_is_not_seen_is_refused(scale):
    block = Scaled(UNSEEN[scale]).double()
    with pytest.raises(moefx.NoMoEBlockFound, match=r"tokens something else is done than for .* plain numbers"):
        moefx.compile(block, example_inputs=(torch.randn(17, D, dtype=torch.float64),))
