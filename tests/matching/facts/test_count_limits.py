"""The limits of a capture: numbers that ranks and counts are compared with, and the ends of slices."""

from __future__ import annotations

import torch
from torch import nn

from moefx.capture.tracing.concrete_routing import Routing
from moefx.matching.facts.count_limits import REACHED, UNKNOWN, Limit, find_limits, find_unreached

from ..lift.small_blocks import D, E
from ..small_proofs import new_proof


class Limited(nn.Module):
    """Scale rows by a condition on the ranks of their choices, and on the numbers of the experts."""

    def __init__(self, condition):
        super().__init__()
        self.condition = condition
        self.router = nn.Linear(D, E, bias=False)

    def forward(self, x):
        weights, chosen = self.router(x).softmax(-1).topk(1)
        rank = nn.functional.one_hot(chosen[:, 0], E).cumsum(0).gather(1, chosen)
        return x * (weights * self.condition(rank, chosen))


def capture(condition, tokens=29):
    return new_proof(Limited(condition)).capture(Routing("diverse"), {"S": tokens})


def limits_of(condition):
    """Return the limits of the condition, in order."""
    return list(find_limits(capture(condition)).values())


def test_a_limit_that_no_rank_reaches():
    assert limits_of(lambda rank, chosen: rank <= 64) == [Limit.of_count(64, is_reached=False)]


def test_a_limit_that_a_rank_exceeds():
    assert limits_of(lambda rank, chosen: rank <= 3) == [REACHED]


def test_numbers_of_experts_have_no_limit():
    assert limits_of(lambda rank, chosen: chosen < 64) == []


def test_a_scaled_rank_is_no_plain_count():
    assert limits_of(lambda rank, chosen: rank * 3 <= 500) == [UNKNOWN]


def test_the_end_of_a_slice_of_an_experts_rows():
    def kept(rank, chosen):
        rows = torch.where(chosen[:, 0] == 0)[0][:64]
        return torch.zeros_like(rank).index_fill(0, rows, 1) > 0

    assert Limit.of_count(64, is_reached=False) in limits_of(kept)


def test_a_limit_is_unreached_if_no_capture_reaches_it():
    low, high = (find_limits(capture(lambda rank, chosen: (rank <= 12) & (rank <= 64), tokens)) for tokens in (8, 60))
    (first,) = (site for site, limit in low.items() if limit.number == 12)
    assert {limit.number for limit in low.values()} == {12, 64}
    unreached = find_unreached([low, high])
    assert first not in unreached and {limit.number for limit in set().union(*unreached.values())} == {64}
