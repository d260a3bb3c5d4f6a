"""Functions of the experts' loads that are constant under most routings, with and without a guard."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import moefx
from moefx.capture.tracing.concrete_routing import Routing
from moefx.matching.proof.evidence import Evidence

D, E, K = 8, 4, 2
STATISTICS = {
    "two_idle": lambda n: (n == 0).sum() > 1,
    "all_but_one_idle": lambda n: (n == 0).sum() == E - 1,
    "only_top_k_busy": lambda n: (n > 0).sum() == K,
    "idle_pairs": lambda n: ((n == 0) & (n.roll(1) == 0)).any(),
    "idle_halves": lambda n: (n == 0).sum() // 2,
    "half_idle": lambda n: (n == 0).float().mean() >= 0.5,
    "first_is_largest": lambda n: n.argmax() == 0,
    "last_is_smallest": lambda n: n.argmin() == E - 1,
    "all_on_one": lambda n: n.max() * K == n.sum(),
    "even": lambda n: n.max() == n.min(),
    "second_is_idle": lambda n: n.sort(descending=True).values[1] == 0,
    "equal_loads": lambda n: (n[:, None] == n[None]).sum() > E,
    "several_with_one": lambda n: (n == 1).sum() > 1,
}
# Per token its two experts.
LOADS = {
    "none_idle": [(t % E, (t + 1) % E) for t in range(24)],
    "one_idle": [(t % 3, (t + 1) % 3) for t in range(24)],
    "two_idle": [(0, 1)] * 24,
    "two_idle_apart": [(3, 1)] * 24,
    "one_token_apart": [(1, 2)] * 23 + [(0, 3)],
    "crowd": [(2, t % 2) for t in range(20)] + [(2, 3)] * 4,
}


class Weighted(nn.Module):
    """Multiply the weights by 1 plus a statistic of the loads."""

    def __init__(self, statistic, least_tokens: int = 0):
        super().__init__()
        self.statistic, self.least_tokens = statistic, least_tokens
        self.router = nn.Linear(D, E, bias=False)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(D, 5), nn.SiLU(), nn.Linear(5, D)) for _ in range(E))

    def forward(self, x):
        if self.least_tokens and x.shape[0] * x.shape[1] < self.least_tokens:
            return self.experts[0](x)
        flat = x.flatten(0, 1)
        w, ids = self.router(flat).softmax(-1).topk(K)
        w = w * (1 + self.statistic(torch.bincount(ids.flatten(), minlength=E)))
        out = torch.zeros_like(flat)
        for e, expert in enumerate(self.experts):
            t, k = torch.where(ids == e)
            out = out.index_add(0, t, expert(flat[t]) * w[t, k, None])
        return out.view_as(x)


def _compile(name: str, least_tokens: int) -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    model = Weighted(STATISTICS[name], least_tokens).double()
    with torch.no_grad():
        model.router.weight.copy_(torch.eye(E, D))
    x = torch.randn(4, 12, D, dtype=torch.float64)
    plan = moefx.Plan(validation="symbolic")
    return model, moefx.compile(copy.deepcopy(model), example_inputs=(x,), plan=plan)


def _make_tokens(choices: list[tuple[int, int]]) -> torch.Tensor:
    x = torch.randn(len(choices), D, dtype=torch.float64)
    for row, (first, second) in zip(x, choices, strict=True):
        row[:E] = torch.rand(E, dtype=torch.float64)
        row[first], row[second] = 3.0, 2.0
    return x.view(4, -1, D)


@pytest.mark.parametrize("least_tokens", [0, 16])
@pytest.mark.parametrize("name", STATISTICS)
@pytest.mark.sampled(9)
def test_statistics_of_loads_scale_the_weights(name, least_tokens):
    model, compiled = _compile(name, least_tokens)
    assert len(moefx.blocks(compiled)) == 1
    for loads in LOADS.values():
        x = _make_tokens(loads)
        torch.testing.assert_close(compiled(x), model(x))
    assert moefx.blocks(compiled)[0].fallbacks == 0


@pytest.mark.parametrize("name", ["two_idle", "first_is_largest"])
def test_statistics_of_loads_scale_the_weights_behind_a_guard(name):
    model, compiled = _compile(name, 16)
    for loads in LOADS.values():
        x = _make_tokens(loads)
        torch.testing.assert_close(compiled(x), model(x))


class Shifted(Weighted):
    """Shift the input of experts, which no weight can express."""

    def forward(self, x):
        if x.shape[0] * x.shape[1] < self.least_tokens:
            return self.experts[0](x)
        flat = x.flatten(0, 1)
        w, ids = self.router(flat).softmax(-1).topk(K)
        n = torch.bincount(ids.flatten(), minlength=E)
        out = torch.zeros_like(flat)
        for e, expert in enumerate(self.experts):
            t, k = torch.where(ids == e)
            out = out.index_add(0, t, expert(torch.where(self.statistic(n), flat[t] * 0, flat[t])) * w[t, k, None])
        return out.view_as(x)


@pytest.mark.parametrize("least_tokens", [0, 16])
def test_statistics_of_loads_that_change_rows_are_refused(least_tokens):
    model = Shifted(STATISTICS["two_idle"], least_tokens).double()
    x = torch.randn(4, 6, D, dtype=torch.float64)
    with pytest.raises(moefx.NoMoEBlockFound):
        moefx.compile(model, example_inputs=(x,), plan=moefx.Plan(validation="symbolic"))


def _record_captures(monkeypatch: pytest.MonkeyPatch, least_tokens: int) -> list[tuple[int, list[int]]]:
    """Return the token count and the loads of each capture that agreed."""
    captures: list[tuple[int, list[int]]] = []
    add = Evidence.add

    def record(self: Any, form: Any, **options: Any) -> Any:
        added = add(self, form, **options)
        captures.append((len(form.ids), torch.bincount(form.ids.flatten(), minlength=E).tolist()))
        return added

    monkeypatch.setattr(Evidence, "add", record)
    torch.manual_seed(0)
    model = Weighted(lambda n: 0, least_tokens)
    moefx.compile(model, example_inputs=(torch.randn(4, 12, D),), plan=moefx.Plan(validation="symbolic"))
    return captures


@pytest.mark.sampled(2)
@pytest.mark.parametrize("least_tokens", [0, 16, 40])
def test_captures_show_the_same_patterns_of_loads_on_both_sides_of_a_guard(least_tokens, monkeypatch):
    captures = _record_captures(monkeypatch, least_tokens)
    fewest = min(tokens for tokens, _ in captures if tokens > 1)
    patterns = {loads.count(0) for _, loads in captures}
    assert {0, 1, 2} <= patterns
    assert any(sorted(loads) == [0, 0, tokens, tokens] for tokens, loads in captures if tokens <= fewest)
    assert any(loads.count(0) == 2 for tokens, loads in captures if tokens >= 29)
    assert {1, 2} <= {n for _, loads in captures for n in loads}


@pytest.mark.parametrize("n", [4, 8, 16])
def test_crowded_routings_leave_experts_idle(n):
    def loads(kind):
        return torch.bincount(Routing(kind, 1).draw_scores(300, n).topk(2).indices.flatten(), minlength=n)

    assert sorted(loads("concentrated").tolist()) == [0] * (n - 2) + [300, 300]
    assert (loads("skewed") == 0).sum() == n - 2 * n // 3
    assert (loads("contested") == 0).sum() == 1
    assert (loads("diverse") == 0).sum() == 0
