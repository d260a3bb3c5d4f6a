"""Slots with equal weights at an expert's capacity: equal tokens, padding of zeros, a softmax of ones."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

import moefx
from moefx.errors import NoMoEBlockFound, Refused

from ..blocks import D, E, K, Loop, Mlp, rewritten

PLACES = 8


class Weighed(Loop):
    """Mask weights by a comparison over all slots before the experts run."""

    def __init__(self, mask: Callable, k: int = K):
        super().__init__(Mlp, k)
        self.mask = mask

    def forward(self, x):
        w, ids = self.route(x)
        weights = torch.zeros(x.shape[0], E, dtype=w.dtype).scatter(1, ids, w)
        return self.mixed(x, w * self.mask(weights, min(PLACES, x.shape[0])).gather(1, ids), ids)


def keep_to_a_value(weights, places):
    return weights >= weights.topk(places, 0).values[-1]


def keep_to_the_least(weights, places):
    return weights >= weights.topk(places, 0).values.amin(0)


def keep_above_a_value(weights, places):
    return weights > weights.sort(0, descending=True).values[places - 1]


def keep_by_kthvalue(weights, places):
    return weights >= weights.kthvalue(weights.shape[0] - places + 1, 0).values


def keep_by_rank(weights, places):
    return (weights[None] > weights[:, None]).sum(1) < places


class PerExpert(Loop):
    """Give each expert a selection of its rows."""

    def __init__(self, first: Callable, k: int = K):
        super().__init__(Mlp, k)
        self.first = first

    def mixed(self, x, w, ids):
        out = torch.zeros_like(x)
        for e in range(E):
            t, k = torch.where(ids == e)
            kept = self.first(w[t, k])
            t, k = t[kept], k[kept]
            out = out.index_add(0, t, self.expert(e, x[t], w[t, k, None]))
        return out


def pick_largest(w):
    return w.argsort(descending=True, stable=True)[:PLACES]


def pick_to_the_last_place(w):
    return w >= w.sort(descending=True).values[min(PLACES, len(w)) - 1] if len(w) else w > 0


def check_ties(block: nn.Module) -> nn.Module:
    """Compare the compiled block for slots with equal weights; return it."""
    model = block.double()
    compiled = moefx.compile(model, example_inputs=(torch.randn(9, D, dtype=torch.float64),))
    one = torch.randn(1, D, dtype=torch.float64)
    some = torch.randn(10, D, dtype=torch.float64)
    for x in (one.repeat(30, 1), torch.zeros(30, D, dtype=torch.float64), some.repeat(3, 1), 3000 * some.repeat(3, 1)):
        torch.testing.assert_close(compiled(x), model(x))
    assert moefx.blocks(compiled)[0].fallbacks == 0
    return compiled


@pytest.mark.sampled(4)
@pytest.mark.parametrize("k", [2, 1])
@pytest.mark.parametrize(
    "mask", [keep_to_a_value, keep_to_the_least, keep_above_a_value, keep_by_kthvalue, keep_by_rank]
)
def test_a_threshold_keeps_or_drops_all_equal_weights(mask, k):
    check_ties(Weighed(mask, k))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("k", [1, 2])
def test_a_capacity_separates_equal_weights(k):
    compiled = check_ties(PerExpert(pick_largest, k))
    assert 'drop="weight"' in str(moefx.graph(compiled, ""))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("k", [1, 2])
def test_a_threshold_per_expert_is_no_capacity(k):
    with pytest.raises(Refused, match="equal weights are kept or dropped together") as refusal:
        rewritten(PerExpert(pick_to_the_last_place, k))
    assert "argsort(descending=True, stable=True)[:capacity]" in refusal.value.remedy  # as `pick_largest` does


@pytest.mark.parametrize(
    ("limit", "kept", "k"),
    [(PLACES, PLACES // 2, 1), (12, PLACES, 1), (PLACES, PLACES // 2, 2)],
)
def test_a_limit_that_differs_from_the_number_kept_is_no_capacity(limit, kept, k):
    def pick(w):
        order = w.argsort(descending=True, stable=True)
        return order[:kept] if w.numel() > limit else order

    text = f"an expert with more than {limit} rows keeps {kept} of them, and one with {limit} rows keeps all"
    with pytest.raises(Refused, match=text):
        rewritten(PerExpert(pick, k))


def test_a_limit_one_above_the_number_kept_is_no_capacity():
    """No capture has an expert with just as many rows as the limit."""
    block = PerExpert(lambda w: w.argsort(descending=True, stable=True)[: 15 if w.numel() > 16 else None], 1).double()
    with pytest.raises(
        NoMoEBlockFound, match="with more than 16 rows keeps 15 of them, and one with 16 rows keeps all"
    ):
        moefx.compile(block, torch.randn(33, D, dtype=torch.float64))


def pick_largest_and_last(w):
    return w.numel() - 1 - w.flip(0).argsort(descending=True, stable=True)[:PLACES]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("k", [1, 2])
def test_the_last_of_equal_choices_are_not_the_first(k):
    with pytest.raises(Refused, match="does not keep the first tokens"):
        rewritten(PerExpert(pick_largest_and_last, k))


class ByThreshold(Loop):
    """Select experts with scores above a threshold: all of them if all scores are equal."""

    def __init__(self, on: Callable):
        super().__init__(Mlp)
        self.on = on

    def forward(self, x):
        p = self.gate(x).softmax(-1)
        g = p * self.on(p)
        return sum(g[:, e, None] * f(x) for e, f in enumerate(self.experts))


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    "on",
    [
        lambda p: p >= p.topk(K).values[..., -1:],
        lambda p: p > p.topk(K + 1).values[..., -1:],
        lambda p: p >= p.kthvalue(E - K + 1, -1, keepdim=True).values,
        lambda p: p == p.amax(-1, keepdim=True),
        lambda p: (p[:, None] > p[..., None]).sum(-1) < K,
    ],
    ids=["topk", "above", "kthvalue", "max", "rank"],
)
def test_experts_of_a_token_above_a_threshold(on):
    check_ties(ByThreshold(on))
