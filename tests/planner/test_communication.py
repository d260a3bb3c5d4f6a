"""Bytes and seconds of exchanges: as the papers measured, and as `Plan(dispatch="auto")` predicts."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moefx.planner.communication import REDUNDANCY, VOLUMES, build_exchange_sheet, collect_level_values, exchange_symbol
from moefx.planner.platforms import count_nodes
from moefx.runtime.ranks.link_costs import Link, Links, predict_seconds


@pytest.mark.parametrize(("nodes", "percent"), [(2, 75.1), (4, 54.8), (8, 33.8), (16, 18.5), (32, 9.2)])
def test_redundancy_matches_the_paper(nodes, percent):
    """X-MoE figure 4 names 75.1 (EP = 16) and 54.8 (section 5.4.2, EP = 32): 256 experts, 8 of a token, nodes of 8."""
    assert 100 * REDUNDANCY(E=256, k=8, N=nodes)["redundancy"] == pytest.approx(percent, abs=0.05)


SIZES = st.lists(st.sampled_from([2, 4, 8]), min_size=1, max_size=3).map(tuple)
TIMES = st.tuples(st.floats(0, 1e-3), st.floats(1e-12, 1e-7))


@settings(deadline=None)  # the first one prints and compiles formulas
@given(SIZES, st.sampled_from([512, 1024]), st.integers(1, 8), st.lists(TIMES, min_size=4, max_size=4),
       st.floats(0, 1e-9), st.integers(1, 4096))  # fmt: skip
def test_seconds_are_those_that_dispatch_auto_compares(sizes, num_experts, top_k, times, handling, tokens):
    whole, *levels = times
    levels = tuple(levels[: len(sizes)])
    links = Links(Link(*whole), tuple(Link(*level) for level in levels), handling)
    theirs = predict_seconds(links, sizes, num_experts, top_k, 4096.0, tokens, gathered_bytes=4160.0 * tokens)
    widths, level = dict(w=4096.0, w1=4096.0, w_all=4160.0), collect_level_values(sizes, levels, whole, handling)
    found = build_exchange_sheet(len(sizes))(E=num_experts, k=top_k, t=tokens, **widths, **level)
    assert {way: found[exchange_symbol(way)] for way in theirs} == pytest.approx(theirs)


@settings(deadline=None)
@given(SIZES, st.sampled_from([512, 1024]), st.integers(1, 8))
def test_rows_over_levels(sizes, num_experts, top_k):
    """Rows per level sum to all rows that leave a rank, and deduplication never adds rows."""
    level = collect_level_values(sizes, ((0.0, 1e-9),) * len(sizes), (0.0, 1e-9))
    found = build_exchange_sheet(len(sizes))(E=num_experts, k=top_k, t=1, w=1, w1=1, w_all=1, **level)
    ranks, places = math.prod(sizes), range(1, len(sizes) + 1)
    assert found["D"] <= min(top_k, ranks) + 1e-9
    for i in places:
        assert found[f"rows_dedup_{i}"] <= found[f"rows_flat_{i}"] + 1e-9
    if len(sizes) > 1:  # pilots: one row for each unit above
        assert found["rows_rbd_1"] <= found["rows_dedup_1"] + 1e-9


def test_rows_that_leave_the_node():
    """k(N-1)/N of a token in all, D(N-1)/N with duplicates taken out."""
    level = collect_level_values((4, 8), ((0.0, 1e-9),) * 2, (0.0, 1e-9))
    found = build_exchange_sheet(2)(E=256, k=8, t=1, w=1, w1=1, w_all=1, **level)
    assert found["rows_flat_1"] == 8 * 3 / 4
    assert found["rows_rbd_1"] == pytest.approx(8 * (1 - 0.548) * 3 / 4, rel=2e-3)


class TestPlacement:
    """X-MoE appendix C.1: 64 GPUs in nodes of 8, 8 experts, EP = 8."""

    @pytest.mark.parametrize(
        ("group", "stride", "found"),
        [
            (8, 1, (1, 8)),
            (8, 8, (8, 1)),
            (16, 1, (2, 8)),
            (16, 8, (16, 1)),
            (4, 2, (1, 4)),
            (1, 1, (1, 1)),
            (8, 2, (2, 4)),
        ],
    )
    def test_a_group_spans_the_nodes_of_its_ranks(self, group, stride, found):
        assert count_nodes(group, stride, 8) == found

    def test_small_experts_first_large_replicas_first(self):
        """Bytes over a node's links, a layer and step: rows go there and back, forward and backward."""

        def between_nodes(parameters: float, experts_first: bool) -> float:
            nodes, _ = count_nodes(8, 1 if experts_first else 8, 8)
            replicas, _ = count_nodes(8, 8 if experts_first else 1, 8)
            given = dict(b=1, s=8192, d=2048, G=1, TP=1, DP=8, R=8, P_dense=0, P_experts=parameters, n_attn=1)
            gradients = VOLUMES(**given)["V_grad_experts"] if replicas > 1 else 0
            return 4 * 2 * 8192 * 2048 * 2 * (1 - 1 / nodes) + gradients

        small, large = 3 * 2048 * 1408, 3 * 8192 * 28672
        assert between_nodes(small, True) < between_nodes(small, False)
        assert between_nodes(large, True) > between_nodes(large, False)


@settings(deadline=None)
@given(st.integers(1, 64), st.integers(1, 4), st.sampled_from([1024, 4096]))
def test_all_gather_sends_the_tokens(ranks, sequences, tokens):
    """X-MoE C.2: O(BSH) on each device, whatever the number of ranks."""
    found = VOLUMES(b=sequences, s=tokens, d=2048, G=ranks, TP=1, DP=1, R=1, P_dense=0, P_experts=0, n_attn=1)
    whole = 2 * sequences * tokens * 2048
    assert found["V_gather"] + whole / ranks == pytest.approx(whole)
