"""Conditions on sizes: parity, squares, multiples."""

from __future__ import annotations

import copy
import functools
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
    "some that the code names": lambda n: 1 + (int(n) in (40, 80)),
    "multiples of a number": lambda n: 1 + (int(n) % 48 == 0),
}


class Scaled(nn.Module):
    """Scale rows without a batch axis by a function of their number."""

    def __init__(self, scale):
        super().__init__()
        self.gate = nn.Linear(D, E, bias=False)
        self.up, self.down = nn.Parameter(torch.randn(E, D, H)), nn.Parameter(torch.randn(E, H, D))
        self.scale = scale

    def routed(self, x):
        """Return the weights, the selected experts and their results."""
        w, ids = self.gate(x).softmax(-1).topk(2)
        h = F.silu(torch.einsum("sd,skdh->skh", x, self.up[ids]))
        return w.unsqueeze(-1), ids, torch.einsum("skh,skhd->skd", h, self.down[ids])

    def forward(self, x):
        w, _, y = self.routed(x)
        return (y * w).sum(1) * self.scale(x.shape[0])


@pytest.mark.sampled(4)
@pytest.mark.parametrize("scale", SEEN)
def test_compared_size_becomes_a_guard(scale):
    """Guard conditions that captures do not show: all sizes without a batch are odd, and no multiple of 128."""
    block = Scaled(SEEN[scale]).double()
    compiled = moefx.compile(copy.deepcopy(block), example_inputs=(torch.randn(17, D, dtype=torch.float64),))
    for n in SIZES:
        x = torch.randn(n, D, dtype=torch.float64)
        torch.testing.assert_close(compiled(x), block(x))
    (matched,) = moefx.explain(compiled).matched
    programs = moefx.blocks(compiled)[0].forward.programs
    assert matched.calls[0] and (matched.calls[1] or len(programs) > 1), "some sizes run as they were, or otherwise"


def test_a_proof_makes_no_functools_cache(monkeypatch):
    """Create no functools cache: captures search all objects for new ones, which takes 0.1 s and more."""
    inputs, calls, make_cache = (torch.randn(17, D),), [], functools.lru_cache
    moefx.explain(Scaled(UNSEEN["digits"]), example_inputs=inputs)  # torch creates caches at its first use
    monkeypatch.setattr(
        functools, "lru_cache", lambda *args, **kwargs: calls.append(args) or make_cache(*args, **kwargs)
    )
    moefx.explain(Scaled(UNSEEN["digits"]), example_inputs=inputs)
    assert not calls


@pytest.mark.parametrize("scale", UNSEEN)
def test_leaked_size_that_decides_is_refused(scale):
    block = Scaled(UNSEEN[scale]).double()
    with pytest.raises(moefx.NoMoEBlockFound, match=r"computes something different for .* plain Python numbers"):
        moefx.compile(block, example_inputs=(torch.randn(17, D, dtype=torch.float64),))


SELDOM = {  # Functions that are constant at most captured sizes, or have two values by chance.
    "a divisor": lambda n: 1 / max(n // 16, 1),
    "a whole number": lambda n: max(n // 24, 1),
    "1 at 29": lambda n: max(n / 29, 1.0),
    "1 at 3": lambda n: n / 3 if n / 3 > 1 else 1.0,
    "half of one": lambda n: 0.5 * max(n // 16, 1),
}


class ScaledInside(Scaled):
    """Scale the results of the experts before they are summed."""

    def forward(self, x):
        w, _, y = self.routed(x)
        return (y * self.scale(x.shape[0]) * w).sum(1)


@pytest.mark.sampled(18)
@pytest.mark.parametrize("example", [13, 40])
@pytest.mark.parametrize("block", [Scaled, ScaledInside])
@pytest.mark.parametrize("scale", SELDOM)
def test_sizes_that_agree_in_all_captures(scale, block, example):
    is_rewritten = block is Scaled or (example == 13 and scale != "1 at 3")
    block = block(SELDOM[scale]).double()
    compiled = moefx.compile(
        copy.deepcopy(block),
        example_inputs=(torch.randn(example, D, dtype=torch.float64),),
        plan=moefx.Plan(validation="symbolic"),
        strict=False,
    )
    assert bool(moefx.blocks(compiled)) == is_rewritten
    for n in (1, 2, 3, 16, 30, 31, 33, 48, 65, 100, 200, 400):
        x = torch.randn(n, D, dtype=torch.float64)
        torch.testing.assert_close(compiled(x), block(x))


def test_a_number_between_ends_is_found():
    block = Scaled(lambda n: max(n / 24, 1.0)).double()
    compiled = moefx.compile(copy.deepcopy(block), example_inputs=(torch.randn(13, D, dtype=torch.float64),))
    for n in (3, 12, 23, 24, 25, 100):
        x = torch.randn(n, D, dtype=torch.float64)
        torch.testing.assert_close(compiled(x), block(x))
    (matched,) = moefx.explain(compiled).matched
    assert matched.calls == (6, 0, 0)


DIVIDED = {
    "between ends": lambda n: max(1 / max(n // 16, 1), 1 / 40),
    "on one side": lambda n: min(1 / (n // 4), 0.5) if n > 4 else 0.25,
    "in a condition": lambda n: 2.0 if n // 8 and 40 / (n // 8) > 10 else 1.0,
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("scale", DIVIDED)
def test_a_comparison_that_fails_at_some_sizes(scale):
    """Compare sizes before a division by a number that is 0 for few tokens."""
    block = Scaled(DIVIDED[scale]).double()
    x = torch.randn(40, D, dtype=torch.float64)
    compiled = moefx.compile(copy.deepcopy(block), example_inputs=(x,), plan=moefx.Plan(validation="symbolic"))
    for n in (1, 2, 3, 4, 7, 8, 15, 16, 40, 100, 639, 640, 700):
        x = torch.randn(n, D, dtype=torch.float64)
        torch.testing.assert_close(compiled(x), block(x))


class OfChoices(Scaled):
    def forward(self, x):
        w, ids, y = self.routed(x)
        return (y * w).sum(1) * self.scale(x, ids)


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    "scale",
    [
        lambda x, ids: 1 + (ids.view(-1).shape[0] % 64 == 0),
        lambda x, ids: 1 + (len(ids.flatten()) > 300),
        lambda x, ids: 1 + (torch.cat([x, x, x]).shape[0] > 500),
    ],
    ids=["a multiple", "many", "beside each other"],
)
def test_as_many_rows_as_choices(scale):
    block = OfChoices(scale).double()
    example = (torch.randn(17, D, dtype=torch.float64),)
    compiled = moefx.compile(copy.deepcopy(block), example_inputs=example, plan=moefx.Plan(validation="symbolic"))
    for n in (*SIZES, 32, 96, 150, 151, 166, 167):
        x = torch.randn(n, D, dtype=torch.float64)
        torch.testing.assert_close(compiled(x), block(x))


class PiecewiseCapacity(Scaled):
    def forward(self, x):
        w, ids = self.gate(x).softmax(-1).topk(1)
        n, hot = x.shape[0], F.one_hot(ids[:, 0], E)
        places = max(4, n // 8) if n < 400 else 16
        kept = ((hot.cumsum(0) - 1) * hot).sum(-1) < places
        h = F.silu(torch.einsum("sd,sdh->sh", x, self.up[ids[:, 0]]))
        return torch.einsum("sh,shd->sd", h, self.down[ids[:, 0]]) * (w * kept[:, None])


def test_a_capacity_with_another_formula_for_more_tokens():
    block = PiecewiseCapacity(None).double()
    example = (torch.randn(17, D, dtype=torch.float64),)
    compiled = moefx.compile(copy.deepcopy(block), example_inputs=example, plan=moefx.Plan(validation="symbolic"))
    for n in (5, 40, 200, 300, 399, 400, 500):
        x = torch.randn(1, D, dtype=torch.float64) + 0.01 * torch.randn(n, D, dtype=torch.float64)
        torch.testing.assert_close(compiled(x), block(x))
