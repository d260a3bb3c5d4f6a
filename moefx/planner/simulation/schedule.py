"""The pipeline as events: what each stage does in which order, and when.

GPipe: all forwards, then all backwards. 1F1B (PipeDream, Piper section III.A.3) and its interleaved form with several
chunks of the model on a stage: Megatron-LM, arXiv 2104.04473 section 2.2. Zero bubble H1 and H2, where gradients of
weights wait: arXiv 2401.10241 section 2.
"""

from __future__ import annotations

import dataclasses
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from ...errors import InvalidPlan
from ..layout import Schedule


class Op(NamedTuple):
    """Of a stage: a forward (F), a backward (B; gradients of inputs alone under zero bubble), or gradients of weights
    (W)."""

    kind: Literal["F", "B", "W"]
    microbatch: int
    chunk: int = 0


def order(schedule: Schedule, stages: int, stage: int, microbatches: int, chunks: int = 1) -> list[Op]:
    """What a stage does, one after the other.

    Raises:
        InvalidPlan: interleaved, and micro-batches are no multiple of the stages (as Megatron-LM asks).
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
    """So many forwards, then a backward and a forward in turns, then the other backwards."""
    ops = forwards[:first]
    for i, backward in enumerate(backwards):
        ops += [backward, *forwards[first + i : first + i + 1]]
    return ops


@dataclasses.dataclass(frozen=True)
class Timeline:
    """When stages did what.

    Attributes:
        ops: of each stage, in their order.
        start, end: of each stage [ops, *P] seconds, P being that of the durations.
    """

    ops: list[list[Op]]
    start: list[Tensor]
    end: list[Tensor]

    @property
    def makespan(self) -> Tensor:
        """[*P] seconds."""
        return torch.stack([end[-1] for end in self.end]).amax(0)

    def in_flight(self, stage: int) -> int:
        """Forwards, of chunks, whose backward is not done yet, at the most: that is what a stage keeps."""
        done, kept, most = "W" if any(op.kind == "W" for op in self.ops[stage]) else "B", 0, 0
        for op in self.ops[stage]:
            kept += (op.kind == "F") - (op.kind == done)
            most = max(most, kept)
        return most


def run(
    schedule: Schedule, forward: Tensor, backward: Tensor, weights: Tensor | None = None, *, chunks: int = 1,
    transfer: float = 0.0,
) -> Timeline:  # fmt: skip
    """The schedule with given durations.

    Args:
        forward, backward: [PP, M, *P] seconds of a stage, with all its chunks, and a micro-batch; several pipelines at
            once along P.
        weights: under zero bubble, the part of `backward` that makes gradients of weights: later than the rest.
        chunks: of a stage, each with its part of these seconds.
        transfer: seconds from one stage to the next, in which both go on with something else.
    """
    stages, most = forward.shape[:2]
    ops = [order(schedule, stages, stage, most, chunks) for stage in range(stages)]
    parts = torch.zeros_like(backward) if weights is None else weights
    seconds = {"F": forward / chunks, "B": (backward - parts) / chunks, "W": parts / chunks}
    ended: dict[tuple[int, Op], Tensor] = {}
    start: list[list[Tensor]] = [[] for _ in ops]
    free = [torch.zeros(forward.shape[2:], dtype=forward.dtype) for _ in ops]
    left = sum(map(len, ops))
    while left:
        before = left
        for stage, todo in enumerate(ops):
            while len(start[stage]) < len(todo):
                op = todo[len(start[stage])]
                needed = _needed(stage, op, stages, chunks)
                if needed is not None and needed not in ended:
                    break
                begin = free[stage]
                if needed is not None:
                    wait = 0.0 if needed[0] == stage else transfer
                    begin = torch.maximum(begin, ended[needed] + wait)
                start[stage].append(begin)
                free[stage] = ended[stage, op] = begin + seconds[op.kind][stage, op.microbatch]
                left -= 1
        if left == before:
            raise AssertionError(f"{schedule} of {stages} stages and {most} micro-batches stands still")
    end = [torch.stack([ended[stage, op] for op in todo]) for stage, todo in enumerate(ops)]
    return Timeline(ops, [torch.stack(begins) for begins in start], end)


def _needed(stage: int, op: Op, stages: int, chunks: int) -> tuple[int, Op] | None:
    """What must have ended elsewhere before: chunk by chunk over all stages, and back."""
    if op.kind == "F":
        if stage:
            return stage - 1, op
        return (stages - 1, op._replace(chunk=op.chunk - 1)) if op.chunk else None
    if op.kind == "W":
        return stage, op._replace(kind="B")
    if stage < stages - 1:
        return stage + 1, op
    return (0, op._replace(chunk=op.chunk + 1)) if op.chunk < chunks - 1 else (stage, op._replace(kind="F"))
