"""Run the events of several pipelines at once, with given durations."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from ..layout import Schedule
from ..pipeline_order import Op, run_events


@dataclasses.dataclass(frozen=True)
class Timeline:
    """The events of each stage with their times.

    Attributes:
        ops: the events of each stage in their order.
        start, end: for each stage, [ops, *P] seconds; P as in the durations.
    """

    ops: list[list[Op]]
    start: list[Tensor]
    end: list[Tensor]

    @property
    def makespan(self) -> Tensor:
        """[*P] seconds."""
        return torch.stack([end[-1] for end in self.end]).amax(0)

    def in_flight(self, stage: int) -> int:
        """Count the most chunks whose forward is done and whose backward is not: the stage keeps their
        activations."""
        last_kind, num_kept, most = "W" if any(op.kind == "W" for op in self.ops[stage]) else "B", 0, 0
        for op in self.ops[stage]:
            num_kept += (op.kind == "F") - (op.kind == last_kind)
            most = max(most, num_kept)
        return most


def run_schedule(
    schedule: Schedule, forward: Tensor, backward: Tensor, weights: Tensor | None = None, *, chunks: int = 1,
    transfer: float = 0.0,
) -> Timeline:  # fmt: skip
    """Run a schedule with given durations.

    Args:
        forward, backward: [PP, M, *P] seconds of a micro-batch on a stage with all its chunks, for each pipeline of P.
        weights: under zero bubble, the part of `backward` for gradients of weights, which runs later.
        chunks: chunks of a stage, each with an equal part of the seconds.
        transfer: seconds of a transfer to the next stage; both stages go on meanwhile.
    """
    stages, most = forward.shape[:2]
    parts = torch.zeros_like(backward) if weights is None else weights
    durations = {"F": forward / chunks, "B": (backward - parts) / chunks, "W": parts / chunks}
    ops, start, end = run_events(
        schedule, stages, most, lambda stage, op: durations[op.kind][stage, op.microbatch],
        zero=torch.zeros(forward.shape[2:], dtype=forward.dtype), latest=torch.maximum,
        chunks=chunks, transfer=transfer,
    )  # fmt: skip
    return Timeline(ops, [torch.stack(times) for times in start], [torch.stack(times) for times in end])
