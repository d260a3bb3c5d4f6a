"""Tests of counts, positions and choices that meet on an expert's rows or results, and that no capture passes."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import moefx

from ...blocks import D, Loop, Mlp

_EXPERTS = 6
TESTS = {
    "position": lambda ids, counts, place: (torch.arange(len(ids)) == 5) & (ids[:, 0] == 3) & (ids[:, 1] == 1),
    "counts": lambda ids, counts, place: (counts[ids[:, 0]] == 2) & (counts[ids[:, 1]] == 5),
    "idle": lambda ids, counts, place: (counts[2] == 0) & (ids[:, 0] == 4) & (ids[:, 1] == 1),
    "place": lambda ids, counts, place: ((place[:, 0] == 2) & (ids[:, 0] == 3)).logical_and(ids[:, 1] == 0),
}


class ByTest(Loop):
    """Change the rows or the results of tokens that pass a joint test."""

    def __init__(self, test):
        super().__init__(Mlp, 2, _EXPERTS)
        self.test = test

    def find_rare(self, ids):
        hits = F.one_hot(ids, _EXPERTS).sum(1)
        return self.test(ids, hits.sum(0), hits.cumsum(0).gather(1, ids) - 1)


class NegatedRows(ByTest):
    def mixed(self, x, w, ids):
        return super().mixed(torch.where(self.find_rare(ids)[:, None], -x, x), w, ids)


class SwappedResults(ByTest):
    def mixed(self, x, w, ids):
        results = x.new_zeros(len(x), 2, D)
        for e, expert in enumerate(self.experts):
            t, k = torch.where(ids == e)
            results[t, k] = expert(x[t])
        results = torch.where(self.find_rare(ids)[:, None, None], results.flip(1), results)
        return (results * w[..., None]).sum(1)


def _find_rare_input(model):
    """Draw inputs until some token passes the test."""
    for seed in range(500):
        x = 2 * torch.randn(8, D, dtype=torch.double, generator=torch.Generator().manual_seed(seed))
        if model.find_rare(model.route(x)[1]).any():
            return x
    raise AssertionError("no token passes the test")


@pytest.mark.parametrize("test", TESTS.values(), ids=TESTS)
def test_rows_of_tokens_that_no_capture_has(test):
    torch.manual_seed(0)
    model = NegatedRows(test).double()
    plan = moefx.Plan(validation="symbolic")
    compiled = moefx.compile(model, (torch.randn(24, D, dtype=torch.double),), plan=plan)
    x = _find_rare_input(model)
    torch.testing.assert_close(compiled(x), model(x))
    assert moefx.blocks(compiled)[0].fallbacks == 0


@pytest.mark.parametrize("test", TESTS.values(), ids=TESTS)
def test_results_of_tokens_that_no_capture_has(test):
    torch.manual_seed(0)
    with pytest.raises(moefx.NoMoEBlockFound, match="a comparison that is false for few tokens"):
        moefx.compile(SwappedResults(test), (torch.randn(24, D),))
