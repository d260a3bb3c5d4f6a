"""What turns only at more tokens than are tried: at which number is known of plain counts alone."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import moefx
from moefx.errors import NoMoEBlockFound

D, E, H = 8, 4, 12


class Ranked(nn.Module):
    """An expert's tokens count as long as a function of their rank says so."""

    def __init__(self, keeps):
        super().__init__()
        self.keeps = keeps
        self.router = nn.Linear(D, E, bias=False)
        self.up, self.down = nn.Parameter(torch.randn(E, D, H)), nn.Parameter(torch.randn(E, H, D))

    def forward(self, x, *given):
        w, i = self.router(x).softmax(-1).topk(1, -1)
        chosen = F.one_hot(i, E).sum(1)
        rank = (chosen.cumsum(0) - 1).gather(1, i)
        w, i = self.keeps(w, i, rank, chosen, *given)
        gates = torch.zeros(len(x), E, dtype=x.dtype).scatter(1, i, w)
        h = torch.einsum("td,edh->teh", x, self.up).relu()
        return torch.einsum("teh,ehd,te->td", h, self.down, gates)


def check(keeps, calls):
    """Refused, or right."""
    torch.manual_seed(0)
    model = Ranked(keeps).double()
    try:
        compiled = moefx.compile(copy.deepcopy(model), example_inputs=calls[0])
    except NoMoEBlockFound:
        return
    for call in calls:
        torch.testing.assert_close(compiled(*call), model(*call))


def tokens(n):
    return torch.randn(n, D, dtype=torch.float64)


TURNS = {
    "a square": lambda p, c, i: p * p < 160000,
    "scaled": lambda p, c, i: p.double() * 0.0025 < 1,
    "turned round": lambda p, c, i: (450 - p).sign() > 0,
    "float16": lambda p, c, i: p.half() * 100 < float("inf"),
    "int8": lambda p, c, i: p.to(torch.int8) >= 0,
    "int16": lambda p, c, i: (p * 100).to(torch.int16) >= 0,
    "uint8": lambda p, c, i: p.to(torch.uint8) == p,
    "a sum in int8": lambda p, c, i: c.cumsum(0, dtype=torch.int8).gather(1, i) > 0,
}


@pytest.mark.parametrize("turn", TURNS)
def test_functions_of_ranks(turn):
    keep = TURNS[turn]
    check(lambda w, i, p, c: (w * keep(p, c, i), i), [(tokens(18),), (tokens(2500),)])


def test_a_count_that_begins_again():
    """256 tokens of one expert are none as a byte."""
    check(lambda w, i, p, c: (w * (c.sum(0).to(torch.uint8) > 0)[i], i), [(tokens(18),), (tokens(1).expand(256, D),)])


@pytest.mark.parametrize(
    "keeps",
    [
        lambda w, i, p, c, o: (w, torch.where(o >= 0, 3 - i, i)),
        lambda w, i, p, c, o: (w, torch.where(o >= 0, o, i)),
        lambda w, i, p, c, o: (w, torch.maximum(i, o.clamp(min=0))),
    ],
)
def test_given_experts_of_which_the_example_has_none(keeps):
    none, some = torch.full((18, 1), -1), torch.randint(-1, E, (18, 1))
    check(keeps, [(tokens(18), none), (tokens(18), some)])


def test_a_step():
    check(
        lambda w, i, p, c, step: (w, torch.where(step > 5, (i + 1) % E, i)),
        [(tokens(18), torch.tensor(0)), (tokens(18), torch.tensor(9))],
    )
