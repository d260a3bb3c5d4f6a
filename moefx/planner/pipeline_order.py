"""Order the events of a pipeline, and compute their start and end.

GPipe: all forwards, then all backwards. 1F1B (PipeDream, Piper section III.A.3) and its interleaved form with several
chunks of the model on a stage: Megatron-LM, arXiv 2104.04473 section 2.2. Zero bubble H1 and H2 delay the gradients of
weights: arXiv 2401.10241 section 2.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

from ..errors import InvalidPlan
from .layout import Schedule


class Op(NamedTuple):
    """An event of a stage: forward (F), backward (B; under zero bubble only gradients of inputs), or weight gradients
    (W)."""

    kind: Literal["F", "B", "W"]
    microbatch: int
    chunk: int = 0


def list_stage_ops(schedule: Schedule, stages: int, stage: int, microbatches: int, chunks: int = 1) -> list[Op]:
    """List a stage's events in their order.

    Raises:
        InvalidPlan: the schedule is interleaved and the stages do not divide the micro-batches (as in Megatron-LM).
    """
    behind, most = stages - stage, microbatches
    if schedule == "interleaved":
        if most % stages:
            raise InvalidPlan(f"interleaved takes a multiple of {stages} micro-batches on {stages} stages, not {most}")
        units = [(k // (stages * chunks) * stages + k % stages, k // stages % chunks) for k in range(most * chunks)]
        forwards = [Op("F", *unit) for unit in units]
        backwards = [Op("B", microbatch, chunks - 1 - chunk) for microbatch, chunk in units]
        return _alternate(forwards, backwards, 2 * (behind - 1) + (chunks - 1) * stages + 1)
    forwards, backwards = ([Op(kind, i) for i in range(most)] for kind in ("F", "B"))
    if schedule == "gpipe":
        return forwards + backwards
    if schedule == "1f1b":
        return _alternate(forwards, backwards, behind)
    first, late = (behind, stage) if schedule == "zb-h1" else (2 * behind - 1, 2 * stage)
    ops = []
    for op in _alternate(forwards, backwards, first):
        ops.append(op)
        if op.kind == "B" and op.microbatch >= late:
            ops.append(Op("W", op.microbatch - late))
    return ops + [Op("W", i) for i in range(max(most - late, 0), most)]


def _alternate(forwards: list[Op], backwards: list[Op], first: int) -> list[Op]:
    """Return `first` forwards, then a backward and a forward in turns, then the remaining backwards."""
    ops = forwards[:first]
    for i, backward in enumerate(backwards):
        ops += [backward, *forwards[first + i : first + i + 1]]
    return ops


def run_events(
    schedule: Schedule, stages: int, microbatches: int, seconds: Callable[[int, Op], Any], *, zero: Any,
    latest: Callable[[Any, Any], Any], chunks: int = 1, transfer: float = 0.0,
) -> tuple[list[list[Op]], list[list[Any]], list[list[Any]]]:  # fmt: skip
    """Run every event as soon as its stage is free and its input has arrived.

    Args:
        seconds: duration of an event of a stage, a number or a tensor.
        zero, latest: the time at the start, and the maximum of two times.
        transfer: seconds of a transfer to the next stage; both stages go on meanwhile.

    Returns:
        (ops, starts, ends), each a list for each stage.
    """
    ops = [list_stage_ops(schedule, stages, stage, microbatches, chunks) for stage in range(stages)]
    end_times: dict[tuple[int, Op], Any] = {}
    start: list[list[Any]] = [[] for _ in ops]
    free = [zero for _ in ops]
    left = sum(map(len, ops))
    while left:
        before = left
        for stage, todo in enumerate(ops):
            while len(start[stage]) < len(todo):
                op = todo[len(start[stage])]
                dependency = _find_dependency(stage, op, stages, chunks)
                if dependency is not None and dependency not in end_times:
                    break
                begin = free[stage]
                if dependency is not None:
                    delay = 0.0 if dependency[0] == stage else transfer
                    begin = latest(begin, end_times[dependency] + delay)
                start[stage].append(begin)
                free[stage] = end_times[stage, op] = begin + seconds(stage, op)
                left -= 1
        if left == before:
            raise AssertionError(f"{schedule} of {stages} stages and {microbatches} micro-batches stands still")
    return ops, start, [[end_times[stage, op] for op in todo] for stage, todo in enumerate(ops)]


def compute_waiting_share(schedule: Schedule, stages: int, microbatches: int, forward: float, weights: float) -> float:
    """Compute how much each other stage adds to a step, as a share of a micro-batch's time, from the order of events.

    All stages are alike. Beyond twice as many micro-batches as stages the share stays the same.

    Args:
        forward, weights: shares of a micro-batch's time that are the forward, and gradients of weights.
    """
    if stages == 1:
        return 0.0
    weight_time = round(weights, 2) if schedule.startswith("zb") else 0.0  # part of the backward in other schedules
    return _compute_waiting_share(schedule, stages, min(microbatches, 2 * stages), round(forward, 2), weight_time)


@functools.lru_cache(maxsize=1 << 14)
def _compute_waiting_share(schedule: Schedule, stages: int, microbatches: int, forward: float, weights: float) -> float:
    seconds = {"F": forward, "B": 1.0 - forward - weights, "W": weights}
    *_, end = run_events(schedule, stages, microbatches, lambda _, op: seconds[op.kind], zero=0.0, latest=max)
    return (max(times[-1] for times in end) - microbatches) / (stages - 1)


def _find_dependency(stage: int, op: Op, stages: int, chunks: int) -> tuple[int, Op] | None:
    """Return the (stage, event) that must end before: chunk by chunk over all stages, and back. None if there is
    none."""
    if op.kind == "F":
        if stage:
            return stage - 1, op
        return (stages - 1, op._replace(chunk=op.chunk - 1)) if op.chunk else None
    if op.kind == "W":
        return stage, op._replace(kind="B")
    if stage < stages - 1:
        return stage + 1, op
    return (0, op._replace(chunk=op.chunk + 1)) if op.chunk < chunks - 1 else (stage, op._replace(kind="F"))
