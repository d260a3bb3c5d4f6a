"""Rates from fourteen shapes predict ten others, as measured in one run on an H200."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from moefx.bench.rates import Measured, errors, expert_rates, measured, predicted
from moefx.bench.shapes import SHAPES
from moefx.planner.platforms import platform_of

TIMES = measured(Path(__file__).parents[2] / "benchmarks" / "results" / "experts_h200.jsonl")
NAMES = {shape.name for shape in SHAPES}
GRID = [time for time in TIMES if time.shape.name not in NAMES]


def test_ten_shapes_within_15_percent():
    """The worst is 6 %; none of the ten is among those that the rates are from."""
    assert len(GRID) == 28 and len(TIMES) == 48
    platform = dataclasses.replace(platform_of("h200"), **expert_rates(GRID))
    found = errors([time for time in TIMES if time.shape.name in NAMES], platform)
    assert len(found) == 20 and max(map(abs, found.values())) < 0.10


def test_the_shipped_platform_has_these_rates():
    shipped, fitted = platform_of("h200"), expert_rates(GRID)
    assert {name: getattr(shipped, name) for name in fitted} == pytest.approx(fitted, rel=0.005)


def test_rates_come_back():
    """Times that the formulas made."""
    platform = platform_of("mi300x")
    made = []
    for shape, _, is_step in GRID:
        seconds = predicted(shape, platform)["T_experts_step" if is_step else "T_experts"]
        made.append(Measured(shape, seconds + 5e-6 * (3 if is_step else 1), is_step))
    found = expert_rates(made)
    wanted = [platform.peak, platform.memory_bandwidth, platform.memory_bandwidth, 5e-6]
    assert list(found.values()) == pytest.approx(wanted, rel=1e-6)


def test_too_few_times():
    with pytest.raises(ValueError, match="3 times do not tell"):
        expert_rates(GRID[:3])
    with pytest.raises(ValueError, match="8 times do not tell"):
        expert_rates(GRID[:1] * 8)
