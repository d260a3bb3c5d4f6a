"""Public functions on models whose experts are spread over ranks: state dicts, clipping, names of experts."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from ..ir.ops.uneven_all_to_all import get_group
from ..runtime.ranks import gradient_clipping, state_dicts
from ..runtime.ranks.staged_models import find_stages
from ..runtime.ranks.state_dicts import join_name
from ..runtime.saved_routing import save_routing as save_routing
from .expert_layouts import find_expert_layouts


def full_state_dict(model: nn.Module, *, cpu: bool = False, rank: int | None = None) -> dict[str, Any]:
    """Gather the original's state dict, experts of all ranks included. Collective: every rank calls it.

    Args:
        cpu: move each tensor to the CPU as soon as it is whole.
        rank: the global rank that receives the dict; others receive an empty one. None: every rank.

    Returns:
        A dict with the names, order and shapes of the original's `state_dict`, and whole tensors for DTensors.
    """
    layouts = {name: (s.parameters, s.placement, s.routes) for name, s in find_expert_layouts(model).items()}
    stages = find_stages(model)
    if stages is None:
        return state_dicts.full_state_dict(model, layouts, cpu=cpu, rank=rank)
    return stages.gather_state(state_dicts.full_state_dict(model, layouts, cpu=cpu), cpu=cpu, rank=rank)


def clip_grad_norm_(
    model: nn.Module, max_norm: float, norm_type: float = 2.0, *, error_if_nonfinite: bool = False
) -> Tensor:
    """Clip the gradients of a model whose parameters are spread over meshes of any kind (experts over the expert axis,
    FSDP), as `torch.nn.utils.clip_grad_norm_` does on one rank. Collective: every rank calls it.

    Args:
        norm_type: > 0, infinity too.

    Returns:
        The norm before clipping, of the gradients of the whole model: the same on all ranks if the gradients of
        replicated parameters are.

    Raises:
        RuntimeError: `error_if_nonfinite`, and the norm is not finite.
    """
    stages = find_stages(model)
    group = "" if stages is None else stages.group.group_name
    return gradient_clipping.clip_grad_norm_(
        model, map_separate_parameters_to_groups(model), max_norm, norm_type, error_if_nonfinite, group
    )


def expert_parameter_names(model: nn.Module, *, buffers: bool = False) -> list[str]:
    """List the parameters that differ between the ranks of the expert axis: data parallelism over all ranks must leave
    them alone. `buffers`: also the experts' buffers, and every name of a tensor with several names."""
    stacked = [join_name(name, p) for name, s in find_expert_layouts(model).items() for p in s.parameters.stacked]
    differing = {*stacked, *map_separate_parameters_to_groups(model)}
    buffer_names = [name for name, _ in model.named_buffers(remove_duplicate=False)] if buffers else []
    names = [name for name, _ in model.named_parameters(remove_duplicate=not buffers)]
    return [name for name in names + buffer_names if name in differing]


def list_own_parameters(model: nn.Module) -> list[str]:
    """List the parameters of experts that other ranks do not have."""
    groups = map_separate_parameters_to_groups(model)
    return [name for name, group in groups.items() if dist.get_world_size(get_group(group)) > 1]


def map_separate_parameters_to_groups(model: nn.Module) -> dict[str, str]:
    """Map each parameter of separate experts to the process group whose ranks have other experts."""
    return {
        join_name(name, parameter): s.placement.group
        for name, s in find_expert_layouts(model).items()
        for names in s.parameters.separate
        for parameter in names
    }
