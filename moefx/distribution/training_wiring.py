"""Prepare a spread model for training: reductions of gradients, and settings for wrappers."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from .._plan import Plan
from ..runtime.ranks.data_parallel_wrappers import (
    DDP_IGNORED,
    DEEPSPEED_REFUSAL,
    IgnoredByDDP,
    refuse_accelerate,
)
from ..runtime.ranks.expert_layout import ExpertLayout
from ..runtime.ranks.overwrite_detection import AcceptLoadedExperts, OverwritingWatch
from ..runtime.ranks.reductions import GRADIENT_WATCH, GradientWatch, Reduction, build_reductions, format_reductions
from ..runtime.ranks.sharding import resolve_expert_axes
from ..runtime.ranks.state_dicts import RefuseOwnGroups, join_name, refuse_save_pretrained
from ..runtime.ranks.topology import ExpertAxis
from .spread_models import expert_parameter_names, list_own_parameters

SPREAD_MESH = "_moefx_spread_mesh"  # the attribute of a spread model that holds its `SpreadMesh`


@dataclasses.dataclass(frozen=True)
class SpreadMesh:
    """The mesh over which `compile` spread a model, and the reductions that its gradients need.

    Attributes:
        parallelized: lines for `explain` that say how `parallelize` shards parameters; () before it.
    """

    mesh: DeviceMesh
    reductions: dict[str, Reduction]
    parallelized: tuple[str, ...] = ()

    def __deepcopy__(self, memo: dict[int, Any]) -> SpreadMesh:
        return self


def watch_block(block: nn.Module, name: str, layout: ExpertLayout) -> OverwritingWatch:
    """Detect that the experts of a spread block are overwritten. DeepSpeed's engine, which would do so, is refused.

    Args:
        name: the block's name in the model.
    """
    if layout.placement.num_ranks > 1:
        DEEPSPEED_REFUSAL.install(block)
        block.register_load_state_dict_post_hook(AcceptLoadedExperts())
    timeout = layout.routes.timeout
    watch = OverwritingWatch(block, name, layout.parameters, layout.placement, layout.number, timeout)
    watch.has_own_collective = layout.routes.gathers
    return watch


def plan_reductions(axis: ExpertAxis, plan: Plan) -> dict[str, Reduction]:
    """Return the reductions that gradients still need, for the experts' parameters and for all others."""
    return build_reductions(axis.mesh, resolve_expert_axes(axis.mesh, plan.expert_axis), plan.sequence_axis)


def describe_reductions(
    model: nn.Module, layouts: dict[str, ExpertLayout], axis: ExpertAxis, plan: Plan
) -> tuple[str, ...]:
    """Describe the reductions in lines, for `explain`. The model need not be spread yet."""
    of_experts, other_names = set[str](), set[str]()
    for block, layout in layouts.items():
        own_names = layout.parameters.of_experts(layout.placement.local_experts)
        separate = {name for names in layout.parameters.separate for name in names}
        of_experts |= {join_name(block, name) for name in (*layout.parameters.stacked, *own_names)}
        other_names |= {join_name(block, name) for name in separate - own_names}
    own_parameters = {name for name, p in model.named_parameters() if p.requires_grad} - other_names
    counts = {"experts": len(own_parameters & of_experts), "others": len(own_parameters - of_experts)}
    outer_ranks = dist.get_world_size() - axis.mesh.size()
    return tuple(format_reductions(plan_reductions(axis, plan), counts, outer_ranks))


def prepare_training(compiled: nn.Module, axis: ExpertAxis, plan: Plan) -> None:
    """Tell DistributedDataParallel which parameters differ between ranks, refuse accelerate, and watch an optimizer's
    first step."""
    reductions, manual = plan_reductions(axis, plan), plan.gradients == "manual"
    expert_reduction = reductions["experts"]
    advice = (
        "" if manual or expert_reduction.divisor == 1 else
        "DistributedDataParallel leaves the gradients of this model's experts, which differ by rank, to you: "
        f"{expert_reduction}. Plan(gradients='manual') says that you do it"
    )  # fmt: skip
    vars(compiled)[SPREAD_MESH] = SpreadMesh(axis.mesh, reductions)
    refuse_save_pretrained(compiled)
    RefuseOwnGroups(list_own_parameters).install(compiled)
    if not manual:
        refuse_accelerate(compiled, axis.mesh)
    vars(compiled)[DDP_IGNORED] = IgnoredByDDP(compiled, getattr(compiled, DDP_IGNORED, ()), advice)
    watch = GradientWatch(compiled, expert_parameter_names(compiled), reductions, manual)
    names, reason = {id(p): name for name, p in compiled.named_parameters()}, "moefx.compile replaced them"
    for stack, part in axis.sharded_parameters.items():
        watch.replaced.mark(stack, names.get(id(part), ""), f"{reason}. Build the optimizer afterwards")
    vars(compiled)[GRADIENT_WATCH] = watch


def mark_as_spread(model: nn.Module, mesh: DeviceMesh, expert_axes: tuple[str, ...], sequence_axis: str | None) -> None:
    """Let `parallelize` take a model whose experts are not spread, such as a pipeline stage of dense layers.

    Args:
        expert_axes: the axes over which the experts of other stages are spread, () if all ranks hold all experts.
    """
    reductions = build_reductions(mesh, expert_axes, sequence_axis)
    vars(model)[SPREAD_MESH] = SpreadMesh(mesh, reductions)
    vars(model)[GRADIENT_WATCH] = GradientWatch(model, (), reductions, manual=True)
    refuse_save_pretrained(model)
    refuse_accelerate(model, mesh)
