"""Schedules of `pipeline`: the names of the planner, torch's classes, the stages of each rank, the micro-batches."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.pipelining as pipelining
from torch import Tensor, nn
from torch.distributed.pipelining import schedules

from ..errors import InvalidPlan
from .microbatch_overlap import register_overlap
from .stage_modules import StagePort
from .stage_sharding import StageSharding, UnmanagedStage

SIMULATED = "zb-h2"


@dataclasses.dataclass(frozen=True)
class ScheduleKind:
    """How a schedule is built with torch.

    Attributes:
        torch_class: its class in `torch.distributed.pipelining`.
        chunks: stages of a rank by default.
        is_v_shaped: whether a rank has two stages, one from either end: the first rank has the first and the last
            stage. Otherwise rank r has stages r, r + ranks, ...
        takes_several: whether a rank may have any number of stages from `chunks`.
        splits_backward: whether gradients of weights are delayed.
        is_dual: whether forwards of one micro-batch run beside backwards of another one.
    """

    torch_class: str
    chunks: int = 1
    is_v_shaped: bool = False
    takes_several: bool = False
    splits_backward: bool = False
    is_dual: bool = False


KINDS = {
    "gpipe": ScheduleKind("ScheduleGPipe"),
    "1f1b": ScheduleKind("Schedule1F1B"),
    "interleaved": ScheduleKind("ScheduleInterleaved1F1B", chunks=2, takes_several=True),
    "zb-h1": ScheduleKind("ScheduleInterleavedZeroBubble", splits_backward=True),
    "zbv": ScheduleKind("ScheduleZBVZeroBubble", chunks=2, is_v_shaped=True, splits_backward=True),
    "dualpipev": ScheduleKind("ScheduleDualPipeV", chunks=2, is_v_shaped=True, splits_backward=True, is_dual=True),
}


@dataclasses.dataclass(frozen=True, eq=False)
class Stage:
    """A stage of this rank: its number, its model, the port of its placeholders, and how its data ranks share it."""

    number: int
    model: nn.Module
    port: StagePort
    sharding: StageSharding


@dataclasses.dataclass(frozen=True)
class StageOrder:
    """A schedule on a pipeline axis.

    Attributes:
        name: a key of `KINDS`.
        ranks: the ranks of the axis.
        chunks: stages of a rank.
    """

    name: str
    ranks: int
    chunks: int
    microbatches: int

    @property
    def kind(self) -> ScheduleKind:
        return KINDS[self.name]

    @property
    def sizes(self) -> dict[str, int]:
        """The sizes of a planner's layout that a schedule sets."""
        return {"pp": self.ranks, "microbatches": self.microbatches}

    @property
    def num_stages(self) -> int:
        return self.ranks * self.chunks

    @property
    def max_in_flight(self) -> int:
        """An upper bound of the forwards of one stage whose activations a rank keeps at a time."""
        all_forwards = self.microbatches * self.chunks
        return all_forwards if self.name == "gpipe" else min(all_forwards, self.num_stages + self.ranks)

    def list_stages(self, rank: int) -> list[int]:
        """Return the stages of a rank of the axis, from the first to the last."""
        if self.kind.is_v_shaped:
            return [rank, self.num_stages - 1 - rank]
        return list(range(rank, self.num_stages, self.ranks))

    def find_rank(self, stage: int) -> int:
        """Return the rank of the axis that has a stage."""
        return next(rank for rank in range(self.ranks) if stage in self.list_stages(rank))

    def build(self, stages: list[Stage], group: dist.ProcessGroup, device: torch.device) -> Any:
        """Return torch's schedule for the stages of this rank. The last stage returns its loss, scaled."""
        make = getattr(schedules, self.kind.torch_class)
        numbered: list[Any] = [NumberedStage(stage, self, device, group) for stage in stages]
        is_single = issubclass(make, schedules.PipelineScheduleSingle)
        arguments = numbered[0] if is_single else numbered, self.microbatches
        schedule = make(*arguments, loss_fn=_return_loss, scale_grads=False)
        if self.kind.is_dual:
            register_overlap(schedule)
        return schedule


def order_stages(
    name: str, ranks: int, microbatches: int, num_stages: int | None, chunks: int | None = None
) -> StageOrder:
    """Lay a schedule over the ranks of a pipeline axis.

    Args:
        num_stages: the number of stages that the user's split has; None: as many as the schedule needs.
        chunks: the stages of a rank; None: as many as `num_stages` implies.

    Raises:
        InvalidPlan: the schedule is unknown or only simulated, or does not take these stages or micro-batches.
    """
    if name == SIMULATED:
        raise InvalidPlan(
            f"schedule={name!r} is simulated by the planner only: torch has no schedule that delays gradients of "
            "weights beyond a step. Use 'zb-h1' or 'zbv'"
        )
    if name not in KINDS:
        raise InvalidPlan(f"schedule={name!r}: expected one of {', '.join(map(repr, KINDS))}")
    kind = KINDS[name]
    if kind.splits_backward and torch.__version__ < "2.13":
        raise InvalidPlan(
            f"schedule={name!r} delays gradients of weights, which torch {torch.__version__} cannot do for rewritten "
            "blocks: use torch 2.13 or later, or 'interleaved'"
        )
    for argument, number in (("microbatches", microbatches), ("chunks", 1 if chunks is None else chunks)):
        if type(number) is not int or number < 1:
            raise InvalidPlan(f"{argument}={number!r}: expected a whole number > 0")
    request = f"split has {num_stages} stages" if chunks is None else f"chunks={chunks} makes {ranks * chunks} stages"
    if num_stages is None:
        num_stages = ranks * (kind.chunks if chunks is None else chunks)
    elif chunks is not None and num_stages != ranks * chunks:
        raise InvalidPlan(f"split has {num_stages} stages, and {request} on {ranks} ranks: leave out one of them")
    per_rank, rest = divmod(num_stages, ranks)
    if rest or per_rank < kind.chunks or (per_rank > kind.chunks and not kind.takes_several):
        expected = f"a multiple of {ranks} from {ranks * kind.chunks}" if kind.takes_several else ranks * kind.chunks
        raise InvalidPlan(f"{request}, and schedule={name!r} takes {expected} on {ranks} ranks of the pipeline axis")
    order = StageOrder(name, ranks, per_rank, microbatches)
    minimum = order.num_stages if name in ("1f1b", "dualpipev") else 1
    if microbatches < minimum:
        raise InvalidPlan(
            f"microbatches={microbatches}, and schedule={name!r} of {order.num_stages} stages takes {minimum} or more: "
            "pass more, use schedule='gpipe', or build an entry with more micro-batches"
        )
    if name in ("interleaved", "zb-h1") and microbatches % ranks:
        raise InvalidPlan(
            f"microbatches={microbatches}, and schedule={name!r} on {ranks} ranks of the pipeline axis takes a "
            f"multiple of {ranks}"
        )
    return order


def _return_loss(output: Tensor, target: Tensor) -> Tensor:
    return output.sum()  # one number. No view: torch detaches it in place


class NumberedStage(pipelining.PipelineStage):
    """torch's stage, which tells a stage's port the number of the micro-batch."""

    def __init__(self, stage: Stage, order: StageOrder, device: torch.device, group: dist.ProcessGroup):
        hidden = stage.port.make_hidden("meta", requires_grad=True)
        loss = torch.empty(1, dtype=torch.float64, device="meta", requires_grad=True)
        super().__init__(
            UnmanagedStage(stage.model) if stage.sharding.reduces_microbatches else stage.model,
            stage.number,
            order.num_stages,
            device,
            # Without these torch would run a micro-batch to learn the shapes, and count its tokens twice.
            input_args=() if stage.number == 0 else (hidden,),
            output_args=(loss,) if stage.port.is_last else (hidden,),
            group=group,
        )
        self.port = stage.port

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        self.port.microbatch = fwd_chunk_id
        return super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)


def run_forwards(
    stages: list[Stage], order: StageOrder, group: dist.ProcessGroup, device: torch.device
) -> list[Tensor]:
    """Run the forward of all micro-batches, one after the other through all stages.

    Returns:
        The results of the last stage, () on ranks that do not have it.
    """
    ranks, local = dist.get_process_group_ranks(group), {stage.number for stage in stages}
    sends: list[tuple[Any, Tensor]] = []
    results = []
    for microbatch in range(order.microbatches):
        hidden: Tensor | None = None
        for stage in stages:
            stage.port.microbatch = microbatch
            if stage.number and stage.number - 1 not in local:
                hidden = stage.port.make_hidden(device)
                dist.recv(hidden, ranks[order.find_rank(stage.number - 1)], group=group)
            result = stage.model() if hidden is None else stage.model(hidden)
            if stage.port.is_last:
                results.append(result)
            elif stage.number + 1 not in local:
                sends.append((dist.isend(result, ranks[order.find_rank(stage.number + 1)], group=group), result))
            hidden = result
    for work, _ in sends:
        work.wait()
    return results
