"""Scaling reports name the cause of lost efficiency."""

from __future__ import annotations

import dataclasses

import pytest

from moefx.planner.breakdown import compute_time_parts
from moefx.planner.scaling import ScalingPoint, explain_above_ideal, search_scaling
from moefx.planner.step_formulas import evaluate_memory
from moefx.ranking import plan
from moefx.util.unit_text import amount


@pytest.fixture(scope="module")
def ranking():
    """Plan Mixtral 8x22B on H100s: the fastest layout for 128 does not fit on 32."""
    return plan("mixtral-8x22b", "dgx-h100", 128)


@pytest.fixture(scope="module")
def weak(ranking):
    return search_scaling(ranking, is_weak=True)


def test_the_cause_of_more_than_ideal(ranking, weak):
    first, top = weak[0], max(weak, key=lambda point: point.of_ideal(weak[0]))
    x = explain_above_ideal(ranking, weak)
    assert top.of_ideal(first) == first.best.seconds / top.best.seconds > 1.1
    assert f"{top.of_ideal(first):.0%} on {top.num_ranks} GPUs" in x
    for best in (first.best, top.best):
        assert best.short_label in x
    there = dataclasses.replace(top.best.layout, dp=top.best.layout.dp * first.num_ranks // top.num_ranks)
    needs = evaluate_memory(ranking.model, there, ranking.platform)["M_gpu"]
    assert f"would need {amount(needs, 'B')} of a GPU's 80 GiB on 32 GPUs (optimizer states " in x
    experts = [
        compute_time_parts(ranking.model, ranking.platform, point.best.layout)["T_experts"]
        * point.num_ranks
        / point.batch
        for point in (first, top)
    ]
    assert f"experts ({experts[0]:.3g} instead of {experts[1]:.3g})" in x


def test_the_cause_is_a_size_that_does_not_divide(ranking):
    strong = search_scaling(ranking, is_weak=False)
    assert "would leave 4 of 32 GPUs to share experts among, which EP = 8 does not divide" in explain_above_ideal(
        ranking, strong
    )


def test_no_cause_without_loss(ranking, weak):
    alike = [dataclasses.replace(weak[0], num_ranks=n, batch=8 * n) for n in (32, 64)]
    slower = ScalingPoint(64, 512, weak[-1].best)
    assert explain_above_ideal(ranking, alike) == explain_above_ideal(ranking, []) == ""
    assert explain_above_ideal(ranking, [slower, dataclasses.replace(weak[0], num_ranks=128, batch=1024)]) == ""
    assert explain_above_ideal(ranking, [ScalingPoint(32, 256, None)]) == ""
