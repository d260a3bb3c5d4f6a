"""The first entry of a ranking takes as long as its simulation, for every schedule."""

from __future__ import annotations

import random

import pytest

from moefx.errors import MoefxError
from moefx.planner.catalogue import MODELS
from moefx.ranking import Ranking, plan

SCHEDULES = ("gpipe", "1f1b", "interleaved", "zb-h1", "zb-h2")
PLATFORMS = ("frontier", "dgx-h100", "h200", "mi300x", "a100-40gb")


def _draw_ranking(seed: int) -> Ranking | None:
    """Return a ranking of random sizes, or None if nothing fits."""
    rng = random.Random(seed)
    schedules = rng.choice([(schedule,) for schedule in SCHEDULES] + [SCHEDULES])
    num_ranks, batch = rng.choice([8, 16, 24, 32, 48, 64, 96, 128, 256, 512, 1024]), rng.choice([64, 256, 512, 1024])
    model, platform = rng.choice(sorted(MODELS)), rng.choice(PLATFORMS)
    try:
        ranking = plan(model, platform, num_ranks, batch=batch, tokens=rng.choice([2048, 4096]), schedules=schedules)
    except MoefxError:
        return None
    return ranking if ranking.entries else None


@pytest.mark.sampled(80)
@pytest.mark.parametrize("seed", range(320))
def test_the_first_entry_of_a_random_ranking(seed):
    if (ranking := _draw_ranking(seed)) is None:
        pytest.skip("nothing fits")
    assert ranking.simulate(0).ratio == pytest.approx(1, abs=0.1)


def test_few_micro_batches_do_not_make_zero_bubble_free():
    ranking = plan("deepseek-v3", "frontier", 1024, schedules=("1f1b", "zb-h1", "zb-h2"))
    best = next(e for e in ranking if e.layout.schedule == "1f1b" and e.layout.pp > 1)
    assert ranking.simulate(0).ratio == pytest.approx(1, abs=0.1)
    assert ranking.simulate(0).seconds < best.seconds * 1.1
