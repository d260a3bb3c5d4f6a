"""Loops over tokens that count an expert's tokens in Python."""

from __future__ import annotations

import collections
import copy
import warnings
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from torch import nn

import moefx

D, E = 6, 3
Kept = Iterator[bool]


class Budgets(nn.Module):
    """Loop over tokens. `keep(ids)` yields per token whether its expert accepts it."""

    def __init__(self, keep):
        super().__init__()
        self.keep = keep
        self.router = nn.Linear(D, E, bias=False)
        self.experts = nn.ModuleList(nn.Linear(D, D) for _ in range(E))

    def forward(self, x):
        w, ids = self.router(x).softmax(-1).max(-1)
        kept = self.keep(ids)
        rows = [self.experts[int(ids[t])](x[t]) * w[t] if next(kept) else x[t] * 0 for t in range(len(x))]
        return torch.stack(rows)


def count_in_a_list(cap: int):
    def keep(ids) -> Kept:
        left = [cap] * E
        for t in range(len(ids)):
            left[int(ids[t])] -= 1
            yield left[int(ids[t])] >= 0

    return keep


def count_in_a_dict(cap: int):
    def keep(ids) -> Kept:
        used: dict[int, int] = {}
        for e in ids.tolist():
            used[int(e)] = used.get(int(e), 0) + 1
            yield used[int(e)] <= cap

    return keep


def count_in_a_counter(cap: int):
    def keep(ids) -> Kept:
        used = collections.Counter[str]()
        for t in range(len(ids)):
            used[f"expert {int(ids[t])}"] += 1
            yield used[f"expert {int(ids[t])}"] <= cap

    return keep


def count_in_a_deque(cap: int):
    def keep(ids) -> Kept:
        last = collections.deque[int](maxlen=2 * cap)
        for t in range(len(ids)):
            yield last.count(int(ids[t])) < cap
            last.append(int(ids[t]))

    return keep


def count_in_an_array(cap: int):
    def keep(ids) -> Kept:
        left = np.full(E, cap)
        for t in range(len(ids)):
            left[int(ids[t])] -= 1
            yield bool(left[int(ids[t])] >= 0)

    return keep


def count_in_a_tensor(cap: int):
    def keep(ids) -> Kept:
        used = torch.zeros(E, dtype=torch.long)
        for t in range(len(ids)):
            used[ids[t]] += 1
            yield used[ids[t]].item() <= cap

    return keep


def count_all_tokens(cap: int):
    def keep(ids) -> Kept:
        for t in range(len(ids)):
            yield t < cap or int(ids[t]) > E

    return keep


def count_above_64_tokens(cap: int):
    def keep(ids) -> Kept:
        left = [cap if len(ids) > 64 else 10**6] * E
        for t in range(len(ids)):
            left[int(ids[t])] -= 1
            yield left[int(ids[t])] >= 0

    return keep


def count_used_experts(cap: int):
    def keep(ids) -> Kept:
        used = set[int]()
        for t in range(len(ids)):
            used.add(int(ids[t]))
            yield t < cap or len(used) > 1

    return keep


@pytest.mark.exhaustive
@pytest.mark.parametrize("cap", [90, 40, 120, 250])
@pytest.mark.parametrize(
    "budget",
    [
        count_in_a_list, count_in_a_dict, count_in_a_counter, count_in_a_deque, count_in_an_array, count_in_a_tensor,
        count_all_tokens, count_above_64_tokens, count_used_experts,
    ],
)  # fmt: skip
def test_budgets_are_right_or_refused(budget, cap):
    torch.manual_seed(0)
    model = Budgets(budget(cap)).double()
    x = torch.randn(9, D, dtype=torch.float64)
    compiled = moefx.compile(
        copy.deepcopy(model), example_inputs=(x,), plan=moefx.Plan(validation="symbolic"), strict=False
    )
    for tokens in (9, cap, cap + 1, 2 * cap, 260, 300):
        x = torch.randn(tokens, D, dtype=torch.float64)
        for rows in (x, x[:1].repeat(tokens, 1)):
            with warnings.catch_warnings(action="ignore"):
                torch.testing.assert_close(compiled(rows), model(rows))


def test_a_budget_that_only_many_tokens_exhaust_is_guarded():
    torch.manual_seed(0)
    model = Budgets(count_in_a_list(90)).double()
    x = torch.randn(9, D, dtype=torch.float64)
    compiled = moefx.compile(copy.deepcopy(model), example_inputs=(x,), plan=moefx.Plan(validation="symbolic"))
    x = torch.randn(1, D, dtype=torch.float64).repeat(100, 1)
    torch.testing.assert_close(compiled(x), model(x))
    assert moefx.blocks(compiled)[0].fallbacks == 1
