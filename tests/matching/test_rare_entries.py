"""Tables and formulas that differ from a constant, or from the expert index, for rare selections only."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import moefx

E = D = 12
RARE = (3, 7, 5)  # one of 1320 ordered selections: no capture shows it
CODE = 3 * E * E + 7 * E + 5


def _encode(ids):
    return (ids * torch.tensor([E * E, E, 1])).sum(-1)


def _make_float_table(base=1.0, rare=0.5):
    table = torch.full((E**3,), base, dtype=torch.float64)
    table[CODE] = rare
    return table


def _make_last_table():
    table = torch.arange(E).repeat(E * E)
    table[CODE] = 6
    return table


def _replace_last(ids, last):
    return torch.cat([ids[:, :2], last[:, None]], 1)


def _scale_rare_loads(w, ids):
    load = torch.bincount(ids.flatten(), minlength=E)
    level = (load > 4).long() + (load > 8).long()
    table = torch.ones(3, 3, 3, dtype=w.dtype)
    table[2, 0, 2] = 0.5
    return w * table[level[3], level[7], level[5]]


WEIGHTS = {
    "index": lambda w, ids: w * _make_float_table()[_encode(ids)][:, None],
    "three_indices": lambda w, ids: w * _make_float_table().view(E, E, E)[ids[:, 0], ids[:, 1], ids[:, 2]][:, None],
    "gather": lambda w, ids: w * _make_float_table().gather(0, _encode(ids))[:, None],
    "take": lambda w, ids: w * _make_float_table().take(_encode(ids))[:, None],
    "embedding": lambda w, ids: w * F.embedding(_encode(ids), _make_float_table()[:, None]),
    "matmul": lambda w, ids: w * (F.one_hot(_encode(ids), E**3).to(w.dtype) @ _make_float_table())[:, None],
    "sum": lambda w, ids: w * (1 - (F.one_hot(_encode(ids), E**3) * _make_float_table(0.0)).sum(-1, keepdim=True)),
    "added": lambda w, ids: w + _make_float_table(0.0)[_encode(ids)][:, None],
}
INDICES = {
    "table": lambda ids: _replace_last(ids, _make_last_table()[_encode(ids)]),
    "where": lambda ids: _replace_last(ids, torch.where((ids == torch.tensor(RARE)).all(-1), 6, ids[:, 2])),
    "patterns": lambda ids: _replace_last(
        ids, torch.where((ids[:, None] == torch.tensor([RARE, (0, 0, 0)])).all(-1).any(-1), 6, ids[:, 2])
    ),
    "all_slots": lambda ids: torch.where(
        (ids == torch.tensor(RARE)).all(-1, keepdim=True), torch.tensor([3, 7, 6]), ids
    ),
}


class Loop(nn.Module):
    """Token choice of three experts. Token e scores expert e highest, so that inputs can make any selection."""

    def __init__(self, weigh=None, replace=None):
        super().__init__()
        self.gate = nn.Linear(D, E, bias=False)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(D, 8), nn.Tanh(), nn.Linear(8, D)) for _ in range(E))
        self.weigh, self.replace = weigh, replace
        with torch.no_grad():
            self.gate.weight.copy_(torch.eye(E))

    def forward(self, x):
        w, ids = self.gate(x).softmax(-1).topk(3)
        if self.weigh is not None:
            w = self.weigh(w, ids)
        if self.replace is not None:
            ids = self.replace(ids)
        out = torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            t, k = torch.where(ids == e)
            out = out.index_add(0, t, expert(x[t]) * w[t, k, None])
        return out


def _check(model, is_rewritten=True):
    torch.manual_seed(0)
    model = model.double()
    compiled = moefx.compile(copy.deepcopy(model), torch.randn(24, D, dtype=torch.float64), strict=False)
    assert bool(moefx.blocks(compiled)) == is_rewritten
    rare = torch.zeros(1, D, dtype=torch.float64)
    rare[0, list(RARE)] = torch.tensor([3.0, 2.0, 1.0], dtype=torch.float64)
    for x in (rare, torch.cat([rare, torch.randn(20, D, dtype=torch.float64)]), rare.expand(9, D)):
        torch.testing.assert_close(compiled(x), model(x), rtol=0, atol=1e-12)
    return compiled


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", WEIGHTS)
def test_a_factor_that_is_constant_but_for_a_rare_choice(name):
    _check(Loop(weigh=WEIGHTS[name]))


def test_a_table_indexed_by_single_loads_is_refused():
    """Refuse numbers that an index takes out of a tensor: the graph cannot compute them."""
    _check(Loop(weigh=_scale_rare_loads), is_rewritten=False)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", INDICES)
def test_an_index_that_equals_the_choice_but_for_a_rare_one(name):
    _check(Loop(replace=INDICES[name]))


class IdleScale(Loop):
    """Scale by a table, indexed by the number of idle experts."""

    def __init__(self):
        super().__init__()
        self.register_buffer("scales", torch.tensor([1.0] * 10 + [0.5] * 3))
        self.weigh = lambda w, ids: w * self.scales[(torch.bincount(ids.flatten(), minlength=E) == 0).sum()]


@pytest.mark.exhaustive  # `test_load_statistics` has factors by the number of idle experts
def test_a_table_of_the_number_of_idle_experts_is_refused():
    _check(IdleScale(), is_rewritten=False)
