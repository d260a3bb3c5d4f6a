"""Slots that always hold different experts, and slots that may hold equal ones."""

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
from ..probes.choosing_blocks import Choosing, E, check, sum_by_scatter


def pick_experts(number):
    """Return a function of probabilities [T, E] to weights and experts [T, K]."""

    def choose(m, p):
        i = number(p)
        return p.gather(-1, i.long()), i

    return choose


def pick_in_groups(p, size, k):
    """Return the k best experts of each group."""
    groups = p.view(-1, E // size, size).topk(k).indices
    return (groups + torch.arange(0, E, size)[:, None]).flatten(1)


def pick_beside(expert, others, add):
    def number(p):
        best = p[:, others].topk(2).indices + add
        return torch.cat([torch.full_like(best[:, :1], expert), best], -1)

    return number


def pick_best(p, k=2):
    return p.topk(k).indices


def pick_by_split(p):
    a, b, c = pick_best(p, 3).split([1, 1, 1], -1)
    return torch.cat([c, a, b], -1)


def pick_by_size(other):
    """Select the best expert, and a second one computed from it and from the number of tokens."""
    return lambda p: torch.stack([p.argmax(-1), other(p.argmax(-1))], -1)


DIFFERENT = {
    "groups": lambda p: pick_in_groups(p, 3, 2),
    "groups of one": lambda p: pick_in_groups(p, 3, 1),
    "argmax of groups": lambda p: p.view(-1, 2, 3).argmax(-1) + torch.tensor([0, 3]),
    "a fixed one": pick_beside(0, slice(1, E), 1),
    "a padded one": lambda p: F.pad(pick_best(p[:, 1:]) + 1, (1, 0)),
    "best of the best": lambda p: pick_best(p, 4).gather(-1, p.topk(4).values.topk(2).indices),
    "sorted": lambda p: (pick_best(p, 3) + 1).sort(-1).values - 1,
    "columns": lambda p: (-p).argsort(-1)[:, [3, 0]],
    "split": pick_by_split,
    "unbound": lambda p: torch.stack(pick_best(p).unbind(-1)[::-1], 1),
    "partner": lambda p: torch.cat([pick_best(p, 1), pick_best(p, 1) ^ 1], -1),
    "one or the other": lambda p: torch.where(pick_best(p) > 2, pick_best(p), pick_best(p) * 1),
}

MAYBE_ONE = {
    "groups that overlap": lambda p: p.view(-1, 2, 3).argmax(-1) + torch.tensor([0, 2]),
    "a fixed one of all": pick_beside(0, slice(None), 0),
    "a fixed one at the end": pick_beside(E - 1, slice(1, E), 1),
    "best of others": lambda p: torch.cat([pick_best(p, 1), pick_best(p.roll(1, -1), 1)], -1),
    "halves": lambda p: pick_best(p) // 2 * 2 + p[:, :2].topk(2).indices,
    "next": lambda p: pick_best(p) + torch.tensor([1, 0]) - 1 + (pick_best(p)[:, :1] == 0),
    "turned apart": lambda p: (pick_best(p) + torch.tensor([0, 1])) % E,
    "drawn again": lambda p: p.multinomial(2, replacement=True),
    "some turned": lambda p: torch.where(p.topk(2).values > 0.2, pick_best(p), (pick_best(p) + 1) % E),
    "as many tokens on": pick_by_size(lambda a: (a + len(a)) % E),
    "as many elements on": pick_by_size(lambda a: (a + a.numel()) % E),
    "filled with the tokens": pick_by_size(lambda a: (a + torch.full_like(a, len(a))) % E),
    "at the last token": pick_by_size(lambda a: (a + torch.arange(len(a) + 1)[1:] + 1) % E),
    "a literal of tokens": pick_by_size(lambda a: (a + torch.tensor(len(a))) % E),
    "a plain number of tokens": pick_by_size(lambda a: (a + int(len(a) * 1.0)) % E),
    "many tokens": pick_by_size(lambda a: torch.where((a + len(a)) // 1100 > 0, a, (a + 1) % E)),
    "filled with one": lambda p: (pick_best(p) + 1).masked_fill(p.topk(2).values < 0.1, E) - 1,
}


@pytest.mark.sampled(4)
@pytest.mark.parametrize("number", DIFFERENT.values(), ids=DIFFERENT)
def test_slots_with_provably_different_experts(number):
    """Prove distinct experts, so that one entry per expert suffices without a probe for repeated ones."""
    check(pick_experts(number), sum_by_scatter)


@pytest.mark.sampled(5)
@pytest.mark.parametrize("number", MAYBE_ONE.values(), ids=MAYBE_ONE)
def test_slots_that_may_hold_the_same_expert(number):
    with pytest.raises(Refused):
        rewritten(Choosing(pick_experts(number), sum_by_scatter))


def test_draws_without_replacement_are_distinct():
    drawn = pick_experts(lambda p: p.multinomial(2))
    assert rewritten(Choosing(drawn, sum_by_scatter)).match.num_experts == E


# ---------------------------------------------------------------------- all orders of the scores
STEPS = [  # arguments: integers, a number, a column and the scores
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
    """Compute integers from the best of four scores by random steps."""

    def __init__(self, seed: int):
        super().__init__()
        self.seed = seed

    def forward(self, p):
        draw = random.Random(self.seed)
        tensors = [p.topk(draw.randint(1, 3)).indices, p[:, 1:].argmax(-1, keepdim=True) + draw.randint(0, 1)]
        for _ in range(draw.randint(1, 4)):
            i = draw.choice(tensors)
            tensors.append(draw.choice(STEPS)(i, draw.randint(1, 3), draw.randrange(i.shape[1]), p))
        return torch.cat(tensors[-draw.randint(1, 2) :], -1)


def is_proven_distinct(program, scores):
    captured = capture_block(program, (scores,), {}, Routing("diverse", 0), dims={})
    slots, index = captured.out.meta["val"].shape[1], NodeRef(captured.out, ("t", "k"))
    lifted = types.SimpleNamespace(capture=captured, tokens=(len(scores),), slots=slots, expert_index=index)
    return has_distinct_slots(lifted, set(range(4)))


def repeats_an_expert(chosen):
    rows = [[e for e in row if 0 <= e < 4] for row in chosen.tolist()]
    return any(len(set(row)) < len(row) for row in rows)


@pytest.mark.parametrize("seeds", [range(120), pytest.param(range(120, 400), marks=pytest.mark.exhaustive)])
def test_no_random_program_that_repeats_an_expert_passes(seeds):
    orders = torch.tensor([*itertools.permutations([0.0, 1.0, 2.0, 3.0])])
    scores = torch.cat([orders + shift for shift in (0.0, -5.0)])
    programs = [Program(seed) for seed in seeds]
    verdicts = [(is_proven_distinct(program, scores), repeats_an_expert(program(scores))) for program in programs]
    assert (True, True) not in verdicts
    assert verdicts.count((True, False)) > len(seeds) / 4 and verdicts.count((False, True)) > len(seeds) / 4
    assert verdicts.count((False, False)) < len(seeds) / 20
