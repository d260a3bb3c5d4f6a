"""Run the forward of one micro-batch beside the backward of another one, as dual schedules intend.

torch's dual schedule has actions of a forward and a backward that do not depend on each other, and runs them one after
the other unless a function is registered for them. `run_overlapped` runs them in turns (`util.turn_taking`): while one
waits for an exchange between ranks, the other one computes.

Both may use what layers and micro-batches share, because a turn passes only at waits of exchanges, and not inside of
an op that uses such memory:

- Exchanges allocate the rows that they receive, `dispatch="gather"` with `max_tokens` too.
- The ring of `ir.activation_stash` must hold the rows of all micro-batches in flight. When a backward reads its rows,
  the forward beside it has put fewer rows behind them than if it had run first.
- `dispatch="pull"` keeps its buffer between two barriers of the device. It has no wait of the host, so no turn passes,
  and nothing overlaps.
- Tapes and CUDA graphs of launches are played inside of one op.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch.distributed.pipelining import schedules

from ..runtime.surrounding_modes import ThreadModes
from ..util.turn_taking import find_turns


def register_overlap(schedule: Any) -> None:
    """Let a schedule of torch run its overlapped actions by `run_overlapped`."""
    schedule.register_custom_function(schedules.OVERLAP_F_B, run_overlapped)


def run_overlapped(action: Any, context: Any) -> None:
    """Run the two parts of an action in turns; one after the other outside of `take_turns`."""
    parts = [functools.partial(_RUN_BY_TYPE[part.computation_type], part, context) for part in action.sub_actions]
    turns = find_turns()
    if turns is None:
        for part in parts:
            part()
    else:
        forward, backward = (_describe(part) for part in action.sub_actions)
        turns.run(*parts, labels=(forward, backward), thread_context=ThreadModes().applied)


def _describe(action: Any) -> str:
    name = "forward" if action.computation_type == schedules.FORWARD else "backward"
    return f"{name} of micro-batch {action.microbatch_index} in stage {action.stage_index}"


# torch documents that a registered function does all that an action needs: these do what `_step_microbatches` does.


def _run_forward(action: Any, context: Any) -> None:
    schedule, microbatch = context.schedule_ref, action.microbatch_index
    stage, before, after = _find_stages(action, schedule)
    schedule._assert_unsharded(stage)
    if before is None and not stage.is_first:
        _wait_for_neighbour(schedule.fwd_recv_ops, action)
    output = stage.forward_one_chunk(microbatch, context.arg_mbs[microbatch], context.kwarg_mbs[microbatch])
    schedule._maybe_compute_loss(stage, output, context.target_mbs, microbatch)
    if after is not None:
        after.set_local_fwd_input(output, microbatch)


def _run_backward(action: Any, context: Any) -> None:
    schedule, microbatch = context.schedule_ref, action.microbatch_index
    stage, before, after = _find_stages(action, schedule)
    schedule._assert_unsharded(stage)
    if after is None and not stage.is_last:
        _wait_for_neighbour(schedule.bwd_recv_ops, action)
    loss = schedule._maybe_get_loss(stage, microbatch)
    schedule.backward_counter[stage.stage_index] += 1
    is_last = schedule.backward_counter[stage.stage_index] == schedule._n_microbatches
    stage.backward_one_chunk(microbatch, loss=loss, full_backward=True, last_backward=is_last)
    if before is not None:
        before.set_local_bwd_input(stage.get_local_bwd_output(microbatch), microbatch)


_RUN_BY_TYPE: dict[Any, Callable[[Any, Any], None]] = {
    schedules.FORWARD: _run_forward,
    schedules.FULL_BACKWARD: _run_backward,
}


def _find_stages(action: Any, schedule: Any) -> tuple[Any, Any, Any]:
    """Return the stage of an action, and the stages before and after it if this rank has them."""
    by_number = {stage.stage_index: stage for stage in schedule._stages}
    number = action.stage_index
    return by_number[number], by_number.get(number - 1), by_number.get(number + 1)


def _wait_for_neighbour(receives: dict[Any, Any], action: Any) -> None:
    """Wait for what another rank of the pipeline sends for an action."""
    for work in receives.pop((action.stage_index, action.microbatch_index)):
        work.wait()
