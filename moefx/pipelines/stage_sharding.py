"""Shard the stages of a pipeline over their data ranks, and let their layers run again in the backward."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
from torch.utils.checkpoint import checkpoint

from .._plan import Plan
from ..distribution.data_parallelism import Sharding, plan_sharding
from ..errors import InvalidInput, InvalidPlan
from ..runtime.block_forward import get_rewritten_forward
from ..runtime.ranks.sharding import TENSOR_AXIS

DataLayout = Literal["fsdp", "ddp", "hsdp"]
AxisNames = str | tuple[str, ...] | None


@dataclasses.dataclass(frozen=True)
class StageSharding:
    """How the data ranks of a stage share its parameters.

    Attributes:
        data, shard_axes, replicate_axes, mp_policy: as for `parallelize`.
        zero: the states that they share while a step runs. 0: none. 1: the optimizer's. 2: gradients too, reduced after
            the backward of each micro-batch. 3: parameters too, gathered for each forward and backward.
    """

    data: DataLayout = "fsdp"
    shard_axes: AxisNames = None
    replicate_axes: AxisNames = None
    mp_policy: MixedPrecisionPolicy | None = None
    zero: int = 1

    @property
    def reduces_microbatches(self) -> bool:
        """Whether gradients are reduced after each micro-batch, not once a step."""
        return self.zero > 1

    def check_ranks(self, ranks: int) -> None:
        """Refuse `mp_policy` if a stage has one rank, because it would have no effect (`InvalidPlan`)."""
        if self.mp_policy is not None and ranks == 1:
            raise InvalidPlan(
                "pipeline(mp_policy=...): each stage is on one rank, and nothing shards it: call model.to(dtype), or "
                "use torch.autocast"
            )

    def find_hidden_dtype(self, hidden: Tensor) -> torch.dtype:
        """Return the dtype of hidden states between sharded layers. `hidden` has the dtype of the original's."""
        policy = self.mp_policy
        return hidden.dtype if policy is None else policy.output_dtype or policy.param_dtype or hidden.dtype

    def plan(self, model: nn.Module, mesh: DeviceMesh) -> Sharding:
        """Plan how a stage is sharded over the mesh of its ranks. Makes no process groups.

        Raises:
            InvalidPlan, InvalidInput: see `parallelize`.
        """
        # Parameters stay gathered in a step of ZeRO-1 and ZeRO-2: micro-batches in flight would gather them again and
        # again, and torch finds the delayed gradients of weights by the parameters of the forward.
        return plan_sharding(
            model, mesh, self.data, self.shard_axes, self.replicate_axes, self.mp_policy,
            reshard_after_forward=self.zero == 3,
        )  # fmt: skip

    def apply(self, planned: Sharding) -> None:
        """Shard a stage in place. Collective over its mesh."""
        planned.apply()
        if self.zero == 2:
            sharded: Any = planned.root
            sharded.set_reshard_after_backward(False)


def count_data_ranks(sizes: Mapping[str, int], plan: Plan) -> int:
    """Return the number of ranks of a stage that have tokens of their own.

    Args:
        sizes: the axes beside the pipeline axis.
    """
    experts = (plan.expert_axis,) if isinstance(plan.expert_axis, str) else plan.expert_axis or ()
    shared_axes = {plan.sequence_axis} | ({TENSOR_AXIS} - set(experts))
    return math.prod(size for axis, size in sizes.items() if axis not in shared_axes)


def resolve_zero(data: str, zero: int | None, planned: int | None, data_ranks: int, splits_backward: bool) -> int:
    """Return the stage of ZeRO that `pipeline(data=data, zero=zero)` runs.

    Args:
        planned: the stage that a layout of the planner counts on.
        data_ranks: ranks of a stage with tokens of their own.
        splits_backward: whether the schedule delays gradients of weights.

    Raises:
        InvalidPlan: the arguments contradict each other, the layout or the schedule.
    """
    if zero is not None and (type(zero) is not int or zero not in range(4)):
        raise InvalidPlan(f"pipeline(zero={zero!r}): expected 0, 1, 2, 3 or None")
    if data_ranks == 1:  # nothing to share
        return 0
    default = 0 if data == "ddp" else planned or 1
    stage = default if zero is None else zero
    if (stage == 0) != (data == "ddp"):
        raise InvalidPlan(
            f"pipeline(data={data!r}, zero={zero}): data='ddp' shares nothing (ZeRO-0), data='fsdp' and 'hsdp' share "
            "optimizer states at least (ZeRO-1): change one of them"
        )
    if planned is not None and stage != planned:
        remedy = f"zero={planned}" if planned else "data='ddp'"
        raise InvalidPlan(
            f"the planner's layout has zero={planned}, and pipeline was given data={data!r} and zero={zero}: pass "
            f"{remedy}, or take zero out of the layout"
        )
    if stage > 1 and splits_backward:
        raise InvalidPlan(
            f"ZeRO-{stage} reduces gradients as soon as a micro-batch's backward ends, and this schedule delays those "
            "of weights: use schedule='1f1b' or 'interleaved', or zero=1"
        )
    return stage


def drop_unreduced_gradients(module: FSDPModule) -> None:
    """Drop the gradients of micro-batches that FSDP keeps until it reduces them: those of a step that failed."""
    state: Any = module._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None)  # torch 2.11 has one group
    for group in [state._fsdp_param_group] if groups is None else groups:
        for parameter in () if group is None else group.fsdp_params:
            if "unsharded_accumulated_grad" in vars(parameter):  # before torch 2.15, in the dtype of the reduction
                parameter.unsharded_accumulated_grad = None
            if (unsharded := getattr(parameter, "unsharded_param", None)) is not None:
                unsharded.grad = None


class UnmanagedStage(nn.Module):
    """Hides from torch's pipelining that a stage is sharded, so that FSDP itself gathers and reduces in each
    micro-batch. Otherwise torch leaves gradients unreduced until the last one, and keeps parameters gathered."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model

    def forward(self, *args: Any) -> Any:
        return self.model(*args)


class RecomputedForward:
    """The forward of a layer that keeps only its input, and runs again in the backward."""

    def __init__(self, original: Callable[..., Any]):
        self.original = original

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return checkpoint(self.original, *args, use_reentrant=False, **kwargs)


def recompute_layers(model: nn.Module, layers: list[str]) -> None:
    """Let some layers of a stage run again in the backward, in place.

    Raises:
        InvalidInput: a layer is an MoE block itself.
    """
    for name in layers:
        layer: Any = model.get_submodule(name)
        if get_rewritten_forward(layer) is not None:
            raise InvalidInput(
                f"{name} is an MoE block itself, and pipeline(recompute=True) runs layers around blocks again: put it "
                "into a layer of its own, or use Plan(checkpoint='x')"
            )
        layer.forward = RecomputedForward(layer.forward)
