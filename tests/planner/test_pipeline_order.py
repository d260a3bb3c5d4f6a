"""Order of a pipeline's events, and the share of time that stages wait."""

from __future__ import annotations

import pytest

from moefx.planner.pipeline_order import compute_waiting_share


@pytest.mark.parametrize("forward, weights", [(1 / 3, 1 / 3), (0.4, 0.2), (0.25, 0.25), (0.5, 0.0)])
@pytest.mark.parametrize("stages", [2, 5, 8])
def test_shares_of_many_micro_batches(forward, weights, stages):
    """Wait for F + B in 1F1B and F + B - W in H1 (arXiv 2401.10241 section 2.1), except for rounding."""
    backward = 1 - forward - weights
    assert compute_waiting_share("1f1b", stages, 64, forward, weights) == pytest.approx(1, abs=0.02)
    h1 = compute_waiting_share("zb-h1", stages, 64, forward, weights)
    assert h1 == pytest.approx(forward + backward - weights, abs=0.03)
    assert forward - 0.02 <= compute_waiting_share("zb-h2", stages, 64, forward, weights) <= h1 + 1e-9


def test_one_micro_batch_fills_and_drains_the_pipeline():
    for schedule in ("zb-h1", "zb-h2"):
        assert compute_waiting_share(schedule, 8, 1, 0.25, 0.25) == pytest.approx(
            0.75
        )  # all but the gradients of weights
    assert compute_waiting_share("zb-h1", 1, 4, 0.25, 0.25) == 0


def test_more_micro_batches_never_wait_longer():
    found = [round(compute_waiting_share("zb-h2", 6, microbatches, 0.3, 0.3), 9) for microbatches in range(1, 20)]
    assert found == sorted(found, reverse=True)
