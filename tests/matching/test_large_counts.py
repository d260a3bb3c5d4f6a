"""Python comparisons of a load that change only above the captured token counts."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import moefx
from moefx.errors import Refused

from ..blocks import D, E, Loop, Mlp, rewritten


class Limited(Loop):
    """Run experts if `keeps` accepts their token count; `is_length`: the count is the length of their rows."""

    def __init__(self, keeps, is_length=False):
        super().__init__(Mlp)
        self.keeps, self.is_length = keeps, is_length

    def mixed(self, x, w, ids):
        out = torch.zeros_like(x)
        counts = torch.bincount(ids.flatten(), minlength=E).tolist()
        for e in range(E):
            t, k = torch.where(ids == e)
            y = self.expert(e, x[t], w[t, k, None])
            if self.keeps(len(t) if self.is_length else counts[e]):
                out = out.index_add(0, t, y)
        return out


def equals_some(count):
    for n in range(300):  # noqa: SIM110
        if count == n:
            return True
    return False


def is_below_some(count):
    for limit in (4, 300):  # noqa: SIM110
        if count < limit:
            return True
    return False


REFUSED = {
    "in a range": lambda n: n in range(300),
    "in a list": lambda n: n in [*range(300)],
    "shifted": lambda n: n + 1 in range(1, 302),
    "in none": lambda n: n not in range(300, 400),
    "any": lambda n: any(n == i for i in range(300)),
    "loop": equals_some,
    "limits": is_below_some,
    "sum of limits": lambda n: sum(n >= limit for limit in (4, 300)) < 2,
    "thousands": lambda n: n < 4000,
    "thousands in a range": lambda n: n in range(4000),
    "bits": lambda n: n.bit_length() < 12,
    "shift": lambda n: n >> 12 == 0,
}


@pytest.mark.sampled(8)
@pytest.mark.parametrize("is_length", [False, True])
@pytest.mark.parametrize("keeps", REFUSED.values(), ids=REFUSED)
def test_a_larger_count_changes_the_outcome(keeps, is_length):
    with pytest.raises(Refused, match=r"load of an expert that Python reads|a token count that Python reads") as raised:
        rewritten(Limited(keeps, is_length))
    assert raised.value.source.startswith("test_large_counts.py:")


TAKEN = {
    "always": lambda n: n >= 0,
    "never one": lambda n: n != -1,
}


@pytest.mark.parametrize("keeps", TAKEN.values(), ids=TAKEN)
def test_no_count_changes_the_outcome(keeps):
    block, x = Limited(keeps).double(), torch.randn(40, D, dtype=torch.float64)
    rewrite = rewritten(block, x)
    assert not rewrite.match.guards and rewrite.match.keep_masks is None
    torch.testing.assert_close(rewrite.graph.compile()(block, x), block(x))


class OfNumbers(Loop):
    """Compare expert numbers, which have an upper bound, not counts."""

    def mixed(self, x, w, ids):
        out = torch.zeros_like(x)
        for e in ids.unique().tolist():
            t, k = torch.where(ids == e)
            out = out.index_add(0, t, self.expert(e, x[t], w[t, k, None]) * (2 if e in (0, 2) else 1))
        return out


def test_numbers_of_experts_are_no_counts():
    model, x = OfNumbers(Mlp).double(), torch.randn(40, 6, dtype=torch.float64)
    compiled = moefx.compile(nn.Sequential(model), example_inputs=(x,))
    torch.testing.assert_close(compiled(x), model(x))
