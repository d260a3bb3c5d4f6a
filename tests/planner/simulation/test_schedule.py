"""Simulated pipelines: their length and their micro-batches in flight equal the formulas."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moefx.errors import InvalidPlan
from moefx.planner.layout import Layout
from moefx.planner.simulation.schedule import run_schedule

STAGES, MICROBATCHES = (1, 2, 3, 4, 8), (1, 2, 3, 4, 8, 16, 24)
PLAIN = [("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("interleaved", 4)]
ZERO = [("zb-h1", 1), ("zb-h2", 1)]
EVERY = pytest.mark.parametrize(("schedule", "chunks"), PLAIN + ZERO)


def list_sizes(schedule, chunks):
    return [(pp, m) for pp, m in itertools.product(STAGES, MICROBATCHES) if schedule != "interleaved" or m % pp == 0]


def run_even(schedule, chunks, stages, microbatches, transfer=0.0):
    """Simulate with a forward of 1 and a backward of 2. Gradients of weights take half of the backward."""
    forward = torch.ones(stages, microbatches, dtype=torch.float64)
    weights = forward if schedule.startswith("zb") else None
    return run_schedule(schedule, forward, 2 * forward, weights, chunks=chunks, transfer=transfer)


@pytest.mark.parametrize(("schedule", "chunks"), PLAIN)
def test_bubbles_are_those_of_the_formula(schedule, chunks):
    """A step takes M + (PP - 1) / chunks micro-batches: Megatron-LM section 2.2, `planner.step_formulas`."""
    for stages, microbatches in list_sizes(schedule, chunks):
        found = run_even(schedule, chunks, stages, microbatches).makespan.item()
        assert found == pytest.approx(3 * (microbatches + (stages - 1) / chunks)), (stages, microbatches)


def test_zero_bubble_h1_has_a_third_of_it():
    """The bubble is a third of 1F1B's for M >= PP. Each missing micro-batch adds a forward."""
    for stages, microbatches in list_sizes("zb-h1", 1):
        found = run_even("zb-h1", 1, stages, microbatches).makespan.item()
        assert found == pytest.approx(3 * microbatches + (stages - 1) + max(stages - microbatches, 0))


def test_zero_bubble_h2_has_none_within_a_stage():
    """No stage waits with 2 PP - 1 micro-batches.

    Each stage starts a forward after the previous one, which adds PP - 1 forwards to a step, unless the next step
    starts on a stage before the others are done (an optimizer without a barrier: arXiv 2401.10241 section 4). The
    formula assumes the latter.
    """
    for stages, microbatches in list_sizes("zb-h2", 1):
        found = run_even("zb-h2", 1, stages, microbatches)
        assert found.makespan.item() >= 3 * microbatches + stages - 1
        if microbatches >= 2 * stages - 1:
            spans = [(end[-1] - start[0]).item() for start, end in zip(found.start, found.end, strict=True)]
            assert spans == pytest.approx([3 * microbatches] * stages)
            assert found.makespan.item() == pytest.approx(3 * microbatches + stages - 1)


@EVERY
def test_in_flight_are_those_that_memory_counts(schedule, chunks):
    for stages, microbatches in list_sizes(schedule, chunks):
        layout = Layout(pp=stages, microbatches=microbatches, schedule=schedule, chunks=chunks)
        found = run_even(schedule, chunks, stages, microbatches)
        for stage in range(stages):
            assert found.in_flight(stage) / chunks == layout.in_flight(stage), (stages, microbatches, stage)


@EVERY
def test_transfers_take_as_long_as_the_formula_says(schedule, chunks):
    """Compare transfers with the formula, which counts two for each of M + PP - 1 micro-batches without overlap.

    Transfers do not occupy a stage. 1F1B waits for 2 (PP - 1) transfers once per PP micro-batches, its limit in flight;
    the other schedules wait once or twice per step. Interleaved stages wait `chunks` times as long, which the formula
    omits.
    """
    transfer = 0.01
    for stages, microbatches in list_sizes(schedule, chunks):
        delay = run_even(schedule, chunks, stages, microbatches, transfer).makespan.item()
        delay = (delay - run_even(schedule, chunks, stages, microbatches).makespan.item()) / transfer
        around, (rounds, rest) = 2 * (stages * chunks - 1), divmod(microbatches - 1, stages)
        if stages == 1:
            assert delay == 0
        elif schedule in ("gpipe", "interleaved"):
            assert delay == pytest.approx(around)
        elif schedule == "1f1b":
            assert delay == pytest.approx(around * (1 + rounds) + 2 * max(rest - 1, 0))
            assert delay <= 2 * (microbatches + stages - 1)
        else:
            assert around / 2 - 1e-6 <= delay <= min(2 * around, 2 * (microbatches + stages - 1)) + 1e-6


@EVERY
def test_nothing_is_done_before_its_time(schedule, chunks):
    """Check drawn durations: stages run one event at a time; forwards go down, backwards up, weights last."""
    generator = torch.Generator().manual_seed(0)
    forward, backward = (torch.rand(4, 8, 3, dtype=torch.float64, generator=generator) + 0.1 for _ in range(2))
    weights = backward / 3 if schedule.startswith("zb") else None
    found = run_schedule(schedule, forward, backward, weights, chunks=chunks, transfer=0.05)
    when = {
        (stage, op): (start, end)
        for stage in range(4)
        for op, start, end in zip(found.ops[stage], found.start[stage], found.end[stage], strict=True)
    }
    assert len(when) == 4 * 8 * chunks * (3 if weights is not None else 2)
    for stage in range(4):
        assert (found.start[stage][1:] >= found.end[stage][:-1]).all()
    for (stage, op), (start, _) in when.items():
        if op.kind == "F" and stage:
            assert (start >= when[stage - 1, op][1] + 0.05 - 1e-12).all()
        if op.kind == "B" and stage < 3:
            assert (start >= when[stage + 1, op][1] + 0.05 - 1e-12).all()
        if op.kind == "B":
            assert (start >= when[stage, op._replace(kind="F")][1]).all()
        if op.kind == "W":
            assert (start >= when[stage, op._replace(kind="B")][1]).all()


@given(st.integers(1, 4), st.integers(1, 6), st.integers(0, 3))
def test_a_slower_stage_sets_the_pace(stages, microbatches, slow):
    """A step takes at least as long as the slowest stage's work, and no less than with equal stages."""
    forward = torch.ones(stages, microbatches, dtype=torch.float64)
    even_ = run_schedule("1f1b", forward, 2 * forward).makespan
    forward[slow % stages] *= 2
    found = run_schedule("1f1b", forward, 2 * forward).makespan
    assert found >= max(6 * microbatches, even_)


def test_interleaved_takes_whole_rounds():
    with pytest.raises(InvalidPlan, match="a multiple of 4 micro-batches on 4 stages, not 6"):
        run_even("interleaved", 2, 4, 6)
