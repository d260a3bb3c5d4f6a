"""Routing by integers of a call, and loops that test whether an expert has tokens."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import moefx
from moefx.errors import NoMoEBlockFound

from ...blocks import D, E, H, Loop, Mlp
from ...models.case import run_and_differentiate

V = 32


class Asking(Loop):
    """Run an expert if `asks` accepts its token mask, and change its output by `body`."""

    def __init__(self, asks, body=lambda y, mask: y, choose=lambda ids: ids % E):
        super().__init__(Mlp)
        self.asks, self.body, self.choose = asks, body, choose

    def forward(self, x, ids):
        chosen, out = self.choose(ids), torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            mask = chosen == e
            if self.asks(mask):
                out[mask] = self.body(expert(x[mask]), mask)
        return out


class Scored(Asking):
    """Weight the experts that integers select by a router."""

    def forward(self, x, ids):
        chosen, out, scores = self.choose(ids), torch.zeros_like(x), self.gate(x).softmax(-1)
        for e, expert in enumerate(self.experts):
            mask = chosen == e
            if mask.any():
                out[mask] = expert(x[mask]) * scores[mask, e, None]
        return out


class Counted(Asking):
    def forward(self, x, ids):
        chosen, out = self.choose(ids), torch.zeros_like(x)
        counts = torch.bincount(chosen.view(-1), minlength=E)
        for e, expert in enumerate(self.experts):
            if counts[e] == 0:
                continue
            out[chosen == e] = expert(x[chosen == e])
        return out


class Unique(Loop):
    """Skip the id that belongs to no expert."""

    def forward(self, x, ids):
        chosen, out = ids % (E + 1), torch.zeros_like(x)
        for e in chosen.unique():
            if e == E:
                continue
            out[chosen == e] = self.experts[e](x[chosen == e])
        return out


class HashTable(nn.Module):
    """Select experts by a table from the checkpoint, and skip the id that belongs to no expert."""

    def __init__(self, filled):
        super().__init__()
        table = torch.stack([torch.randperm(E)[:2] for _ in range(V)])
        self.register_buffer("table", table if filled else torch.zeros_like(table))
        self.gate, self.shared = nn.Linear(D, E, bias=False), Mlp()
        self.up, self.down = nn.Parameter(torch.randn(E, H, D)), nn.Parameter(torch.randn(E, D, H))

    def forward(self, x, ids):
        flat, chosen = x.view(-1, D), self.table[ids.view(-1)]
        w = F.softplus(self.gate(flat)).sqrt().gather(1, chosen)
        w, out = w / (w.sum(-1, keepdim=True) + 1e-20), torch.zeros_like(flat)
        mask = F.one_hot(chosen, E + 1).permute(2, 1, 0)
        for e in torch.greater(mask.sum((-1, -2)), 0).nonzero():
            e = e[0]
            if e == E:
                continue
            k, t = torch.where(mask[e])
            out.index_add_(0, t, F.linear(F.relu(F.linear(flat[t], self.up[e])), self.down[e]) * w[t, k, None])
        return out.view_as(x) + self.shared(x)


KINDS = {
    "any": lambda: Asking(lambda mask: mask.any()),
    "not any": lambda: Asking(lambda mask: not torch.logical_not(mask).all()),
    "sum": lambda: Asking(lambda mask: mask.sum() > 0),
    "count": lambda: Asking(lambda mask: mask.count_nonzero() != 0),
    "a multiplied hash": lambda: Asking(torch.any, choose=lambda ids: ids * 2654435761 % 2**32 % E),
    "buckets of a timestep": lambda: Asking(torch.any, choose=lambda t: (t * E // V).clamp(0, E - 1)),
    "scores": lambda: Scored(torch.any),
    "bincount": lambda: Counted(torch.any),
    "unique": Unique,
    "a table": lambda: HashTable(filled=True),
    "a table of zeros": lambda: HashTable(filled=False),
}


def draw(ids):
    return torch.randn(*ids.shape, D, dtype=torch.float64), ids


def check(model, example, calls):
    compiled = moefx.compile(model, example_inputs=example)
    for x, ids in calls:
        actual, expected = (run_and_differentiate(m, m, x, ids) for m in (compiled, model))
        torch.testing.assert_close(actual, expected)
    assert moefx.blocks(compiled)[0].fallbacks == 0


@pytest.mark.sampled(5)
@pytest.mark.parametrize("name", KINDS)
def test_tests_for_idle_experts(name):
    torch.manual_seed(0)
    spread, one = torch.randint(0, V, (3, 7)), torch.full((2, 5), V - 2)
    check(KINDS[name]().double(), draw(torch.randint(0, V, (2, 9))), [draw(spread), draw(one)])


def test_integers_that_the_example_lacks():
    torch.manual_seed(0)
    calls = [draw(torch.randint(0, V, (3, 7))), draw(torch.full((2, 5), 3))]
    check(KINDS["any"]().double(), draw(E * torch.randint(0, V // E, (2, 9))), calls)
    check(KINDS["buckets of a timestep"]().double(), draw(torch.randint(0, 5, (2, 9))), calls)


LIMITS = {
    "more than three": lambda: Asking(lambda mask: mask.sum() > 3),
    "more than one": lambda: Asking(lambda mask: mask.sum() > 1),
    "few": lambda: Asking(lambda mask: mask.sum() < 500),
    "half of them": lambda: Asking(lambda mask: mask.sum() * 2 <= mask.numel()),
    "not all": lambda: Asking(lambda mask: not mask.all()),
    "the first": lambda: Asking(lambda mask: mask.view(-1)[0]),
    "a mean": lambda: Asking(torch.any, lambda y, mask: y / mask.sum()),
    "alone": lambda: Asking(torch.any, lambda y, mask: y if len(y) > 1 else 0 * y),
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", LIMITS)
def test_limits_are_no_emptiness_tests(name):
    torch.manual_seed(0)
    model, example = LIMITS[name]().double(), draw(torch.randint(0, V, (2, 9)))
    few = draw(torch.tensor([[0, 1, 1, 2, 2, 2, 3, 3, 3, 3]]))
    with pytest.raises(NoMoEBlockFound):
        check(model, example, [few, draw(torch.full((2, 5), 1))])
