"""Drawn rows: as many as the formulas expect, and none is lost."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moefx.planner.communication import build_exchange_sheet, collect_level_values
from moefx.planner.simulation.routing_skew import compute_zipf_weights, count_choices, count_traffic, draw_choices

WAYS = ("flat", "dedup", "rbd", "halo")
SIZES = st.lists(st.sampled_from([2, 3, 4]), min_size=1, max_size=3).map(tuple)


def drawn(sizes, num_experts, top_k, tokens, skew=0.0, seed=0):
    """(choices, sources) of so many tokens a rank."""
    ranks = math.prod(sizes)
    generator = torch.Generator().manual_seed(seed)
    weights = compute_zipf_weights(num_experts, skew)[torch.randperm(num_experts, generator=generator)]
    return draw_choices(weights, ranks * tokens, top_k, generator), torch.arange(ranks).repeat_interleave(tokens)


@given(st.integers(1, 9), st.floats(0, 4), st.integers(0, 9))
@settings(max_examples=20, deadline=None)
def test_a_token_takes_an_expert_once(top_k, skew, seed):
    found, _ = drawn((9,), 9, top_k, 20, skew, seed)
    assert found.shape == (top_k, 180) and found.min() >= 0 and found.max() < 9
    assert (found[1:] > found[:-1]).all()


def test_popular_experts_are_chosen_by_their_weight():
    """Select expert n with probability n^-skew / sum, within five standard deviations."""
    tokens, weights = 100_000, compute_zipf_weights(16, 1.0)
    found = draw_choices(weights, tokens, 1, torch.Generator().manual_seed(0))
    counts, wanted = torch.bincount(found[0], minlength=16), weights / weights.sum()
    assert ((counts / tokens - wanted).abs() <= 5 * (wanted * (1 - wanted) / tokens).sqrt()).all()


def test_the_second_choice_excludes_the_first():
    """Weights 4, 2, 1: the pair (0, 1) comes as 0 then 1 or 1 then 0."""
    tokens = 100_000
    first, second = draw_choices(torch.tensor([4, 2, 1]), tokens, 2, torch.Generator().manual_seed(0))
    wanted = 4 / 7 * 2 / 3 + 2 / 7 * 4 / 5
    assert ((first == 0) & (second == 1)).double().mean().item() == pytest.approx(
        wanted, abs=5 * math.sqrt(wanted * (1 - wanted) / tokens)
    )


@pytest.mark.parametrize(("sizes", "num_experts", "top_k"), [((8,), 64, 8), ((4, 8), 256, 8), ((2, 2, 4), 32, 3)])
def test_rows_are_those_of_the_formulas(sizes, num_experts, top_k):
    """Mean rows that leave a rank, by level. Those of a token lie between 0 and K, independent of other tokens': their
    mean is off by at most five times K / (2 sqrt(tokens))."""
    tokens, ranks = 512, math.prod(sizes)
    choices, sources = drawn(sizes, num_experts, top_k, tokens)
    wanted = build_exchange_sheet(len(sizes))(
        E=num_experts, k=top_k, t=1, w=1, w1=1, w_all=1,
        **collect_level_values(sizes, ((0.0, 1e-9),) * len(sizes), (0.0, 1e-9)),
    )  # fmt: skip
    bound, places = 5 * top_k / 2 / math.sqrt(ranks * tokens), torch.arange(ranks)
    for way, name in (("flat", "flat"), ("dedup", "dedup"), ("gather", "all_gather")):
        (rows,) = count_traffic(choices, sources, num_experts, sizes, way).hops
        for i in range(len(sizes)):
            outer, inner = math.prod(sizes[i:]), math.prod(sizes[i + 1 :])
            here = (places[:, None] // outer == places // outer) & (places[:, None] // inner != places // inner)
            found = rows[here].sum().item() / (ranks * tokens)
            assert found == pytest.approx(wanted[f"rows_{name}_{i + 1}"], abs=bound), (way, i)
    if len(sizes) > 1:
        rbd, halo = (count_traffic(choices, sources, num_experts, sizes, way) for way in ("rbd", "halo"))
        for i, rows in enumerate(rbd.hops):
            found = (rows.sum() - rows.diagonal().sum()).item() / (ranks * tokens)
            assert found == pytest.approx(wanted[f"rows_rbd_{i + 1}"], abs=bound)
        assert halo.beside is not None
        inside, nodes = wanted["D"] * (1 - 1 / sizes[-1]), ranks / sizes[-1]
        for rows, part in ((halo.beside, 1 / nodes), (halo.hops[-1], 1 - 1 / nodes)):
            found = (rows.sum() - rows.diagonal().sum()).item() / (ranks * tokens)
            assert found == pytest.approx(inside * part, abs=bound)


@given(SIZES, st.integers(1, 6), st.floats(0, 2), st.integers(0, 9))
@settings(max_examples=30, deadline=None)
def test_no_row_is_lost(sizes, top_k, skew, seed):
    """Every routed row arrives, for each dispatch; hop by hop a rank sends on the rows that it has."""
    ranks, tokens = math.prod(sizes), 17
    num_experts = 6 * ranks
    choices, sources = drawn(sizes, num_experts, top_k, tokens, skew, seed)
    made = {way: count_traffic(choices, sources, num_experts, sizes, way) for way in WAYS}
    flat, dedup = made["flat"].hops[0], made["dedup"].hops[0]
    assert flat.sum() == top_k * ranks * tokens and (flat.sum(1) == top_k * tokens).all()
    assert (flat.sum(0) == count_choices(choices, num_experts, ranks)).all()
    assert (dedup <= flat).all() and (dedup <= tokens).all()
    arrives = dedup.sum(0)
    assert (made["rbd"].hops[-1].sum(0) == arrives).all()
    near = made["halo"].beside
    assert near is not None and (made["halo"].hops[-1].sum(0) + near.sum(0) == arrives).all()
    for before, after in zip(made["rbd"].hops, made["rbd"].hops[1:], strict=False):
        assert (after.sum(1) >= before.sum(0)).all()  # a row that came goes on to one rank or more
    assert made["rbd"].hops[0].sum() <= dedup.sum()


def test_a_seed_determines_the_draw():
    one, again, other = (drawn((4,), 16, 2, 50, 1.0, seed)[0] for seed in (3, 3, 4))
    assert (one == again).all() and (one != other).any()
