"""Slots that always hold different experts, and slots that may hold the same one."""

from __future__ import annotations

import itertools
import random
import types

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from moefx.capture.concolic import capture_block
from moefx.capture.tracing.concrete_routing import Routing
from moefx.errors import Refused
from moefx.matching.lift.canonical_form import NodeRef
from moefx.matching.lift.distinct_choices import has_distinct_slots

from ...blocks import rewritten
from ..probes.test_repeated_experts import Choosing, E, check, scatter


def experts(number):
    """Weights and experts [T, K] of probabilities [T, E]."""

    def choose(m, p):
        i = number(p)
        return p.gather(-1, i.long()), i

    return choose


def of_groups(p, size, k):
    """The best of each group of experts."""
    groups = p.view(-1, E // size, size).topk(k).indices
    return (groups + torch.arange(0, E, size)[:, None]).flatten(1)


def beside(expert, of, by):
    def number(p):
        best = p[:, of].topk(2).indices + by
        return torch.cat([torch.full_like(best[:, :1], expert), best], -1)

    return number


def best(p, k=2):
    return p.topk(k).indices


def split(p):
    a, b, c = best(p, 3).split([1, 1, 1], -1)
    return torch.cat([c, a, b], -1)


def with_sizes(other):
    """The best one, and another that follows from it and from how many tokens there are."""
    return lambda p: torch.stack([p.argmax(-1), other(p.argmax(-1))], -1)


DIFFERENT = {
    "groups": lambda p: of_groups(p, 3, 2),
    "groups of one": lambda p: of_groups(p, 3, 1),
    "argmax of groups": lambda p: p.view(-1, 2, 3).argmax(-1) + torch.tensor([0, 3]),
    "a fixed one": beside(0, slice(1, E), 1),
    "a padded one": lambda p: F.pad(best(p[:, 1:]) + 1, (1, 0)),
    "best of the best": lambda p: best(p, 4).gather(-1, p.topk(4).values.topk(2).indices),
    "sorted": lambda p: (best(p, 3) + 1).sort(-1).values - 1,
    "columns": lambda p: (-p).argsort(-1)[:, [3, 0]],
    "split": split,
    "unbound": lambda p: torch.stack(best(p).unbind(-1)[::-1], 1),
    "turned": lambda p: (best(p) + 1) % E,
    "partner": lambda p: torch.cat([best(p, 1), best(p, 1) ^ 1], -1),
    "one or the other": lambda p: torch.where(best(p) > 2, best(p), best(p) * 1),
}

MAYBE_ONE = {
    "groups that overlap": lambda p: p.view(-1, 2, 3).argmax(-1) + torch.tensor([0, 2]),
    "a fixed one of all": beside(0, slice(None), 0),
    "a fixed one at the end": beside(E - 1, slice(1, E), 1),
    "best of others": lambda p: torch.cat([best(p, 1), best(p.roll(1, -1), 1)], -1),
    "halves": lambda p: best(p) // 2 * 2 + p[:, :2].topk(2).indices,
    "next": lambda p: best(p) + torch.tensor([1, 0]) - 1 + (best(p)[:, :1] == 0),
    "turned apart": lambda p: (best(p) + torch.tensor([0, 1])) % E,
    "drawn again": lambda p: p.multinomial(2, replacement=True),
    "some turned": lambda p: torch.where(p.topk(2).values > 0.2, best(p), (best(p) + 1) % E),
    "as many tokens on": with_sizes(lambda a: (a + len(a)) % E),
    "as many elements on": with_sizes(lambda a: (a + a.numel()) % E),
    "filled with the tokens": with_sizes(lambda a: (a + torch.full_like(a, len(a))) % E),
    "at the last token": with_sizes(lambda a: (a + torch.arange(len(a) + 1)[1:] + 1) % E),
    "a literal of tokens": with_sizes(lambda a: (a + torch.tensor(len(a))) % E),
    "a plain number of tokens": with_sizes(lambda a: (a + int(len(a) * 1.0)) % E),
    "many tokens": with_sizes(lambda a: torch.where((a + len(a)) // 1100 > 0, a, (a + 1) % E)),
    "filled with one": lambda p: (best(p) + 1).masked_fill(p.topk(2).values < 0.1, E) - 1,
}


@pytest.mark.sampled(4)
@pytest.mark.parametrize("number", DIFFERENT.values(), ids=DIFFERENT)
def test_slots_with_provably_different_experts(number):
    """What has one place for each expert then needs no look at experts chosen twice."""
    check(experts(number), scatter)


@pytest.mark.sampled(5)
@pytest.mark.parametrize("number", MAYBE_ONE.values(), ids=MAYBE_ONE)
def test_slots_that_may_hold_the_same_expert(number):
    with pytest.raises(Refused):
        rewritten(Choosing(experts(number), scatter))


def test_draws_without_replacement_are_distinct():
    drawn = experts(lambda p: p.multinomial(2))
    assert rewritten(Choosing(drawn, scatter)).match.num_experts == E


# ---------------------------------------------------------------------- against all orders of the scores
STEPS = [  # of integers, a number, a column and the scores
    lambda i, n, k, p: i + n,
    lambda i, n, k, p: i * n,
    lambda i, n, k, p: (i + n) % 4,
    lambda i, n, k, p: i // n,
    lambda i, n, k, p: 3 - i,
    lambda i, n, k, p: i ^ n,
    lambda i, n, k, p: i.clamp(max=n),
    lambda i, n, k, p: i.flip(-1),
    lambda i, n, k, p: i.roll(1, -1),
    lambda i, n, k, p: i[:, k:],
    lambda i, n, k, p: i[:, [k, 0]],
    lambda i, n, k, p: i.unbind(-1)[k][:, None],
    lambda i, n, k, p: i.t().reshape(-1, len(p)).t(),
    lambda i, n, k, p: torch.cat([i, i.flip(-1)[:, :k]], -1),
    lambda i, n, k, p: F.pad(i, (0, 1), value=n),
    lambda i, n, k, p: i + torch.arange(i.shape[1]) * n,
    lambda i, n, k, p: i.masked_fill(i == n, 9),
    lambda i, n, k, p: torch.where(i > n, i, i + 1),
    lambda i, n, k, p: i.masked_fill(p.amax(-1, keepdim=True) > 2, n),
    lambda i, n, k, p: i.sort(-1).values,
    lambda i, n, k, p: i.gather(-1, p[:, : i.shape[1]].argsort(-1)),
    lambda i, n, k, p: torch.cat([i, p.topk(n).indices], -1),
]


class Program(nn.Module):
    """Integers made of the best of four scores by random steps."""

    def __init__(self, seed: int):
        super().__init__()
        self.seed = seed

    def forward(self, p):
        draw = random.Random(self.seed)
        made = [p.topk(draw.randint(1, 3)).indices, p[:, 1:].argmax(-1, keepdim=True) + draw.randint(0, 1)]
        for _ in range(draw.randint(1, 4)):
            i = draw.choice(made)
            made.append(draw.choice(STEPS)(i, draw.randint(1, 3), draw.randrange(i.shape[1]), p))
        return torch.cat(made[-draw.randint(1, 2) :], -1)


def is_said_to_be_different(program, scores):
    taken = capture_block(program, (scores,), {}, Routing("diverse", 0), dims={})
    slots, index = taken.out.meta["val"].shape[1], NodeRef(taken.out, ("t", "k"))
    lifted = types.SimpleNamespace(capture=taken, tokens=(len(scores),), slots=slots, expert_index=index)
    return has_distinct_slots(lifted, set(range(4)))


def has_one_twice(chosen):
    rows = [[e for e in row if 0 <= e < 4] for row in chosen.tolist()]
    return any(len(set(row)) < len(row) for row in rows)


@pytest.mark.parametrize("seeds", [range(120), pytest.param(range(120, 400), marks=pytest.mark.exhaustive)])
def test_no_random_program_that_repeats_an_expert_passes(seeds):
    orders = torch.tensor([*itertools.permutations([0.0, 1.0, 2.0, 3.0])])
    scores = torch.cat([orders + shift for shift in (0.0, -5.0)])
    programs = [Program(seed) for seed in seeds]
    said = [(is_said_to_be_different(program, scores), has_one_twice(program(scores))) for program in programs]
    assert (True, True) not in said
    assert said.count((True, False)) > len(seeds) / 4 and said.count((False, True)) > len(seeds) / 4
    assert said.count((False, False)) < len(seeds) / 20
