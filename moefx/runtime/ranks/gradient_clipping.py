"""The norm of gradients that are spread over a mesh."""

from __future__ import annotations

import functools
import math

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ...errors import MoefxError
from ...ir.ops.uneven_all_to_all import get_group
from .replaced_parameters import reshard


@torch.no_grad()
def clip_grad_norm_(
    model: nn.Module,
    own_experts: dict[str, str],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    stages: str = "",
) -> Tensor:
    """See `moefx.clip_grad_norm_`.

    Args:
        own_experts: for parameters of separate experts, the name of the process group whose ranks hold others.
        stages: the name of the process group whose ranks hold the stages of a pipeline, "" without one.
    """
    if not norm_type > 0:
        raise MoefxError(f"norm_type={norm_type!r}: expected a number > 0")
    reshard(model)
    named_parameters = list(model.named_parameters())
    if not named_parameters:
        return torch.zeros(())
    # The dtype must be equal on all ranks, so it also counts parameters without gradients.
    zero = torch.zeros(
        (), dtype=_find_widest([p.dtype for _, p in named_parameters]), device=named_parameters[0][1].device
    )
    groups: dict[tuple[str, ...], list[Tensor]] = {(group,): [] for group in own_experts.values()}
    grads = []
    for name, parameter in named_parameters:
        norms = groups.setdefault(_find_spread_groups(name, parameter, own_experts), [])
        if parameter.grad is not None:
            grads.append(_local_part(parameter.grad))
            norms.append(torch.linalg.vector_norm(grads[-1], norm_type, dtype=zero.dtype).to(zero.device))
    norms = [
        _reduce_norm(_combine_norms(norms, norm_type, zero), group_names, norm_type)
        for group_names, norms in groups.items()
    ]
    total = _combine_norms(norms, norm_type, zero)
    if stages:  # which may have other dtypes
        total = _reduce_norm(total.double(), (stages,), norm_type)
    if error_if_nonfinite and not bool(torch.isfinite(total)):
        raise RuntimeError(f"the total norm of order {norm_type} of the gradients is {total.item()}")
    scale = torch.clamp(max_norm / (total + 1e-6), max=1.0)
    for grad in grads:
        grad.mul_(scale.to(grad.device, grad.dtype))
    return total


def _find_spread_groups(name: str, parameter: Tensor, own_experts: dict[str, str]) -> tuple[str, ...]:
    """Return the groups whose ranks hold other parts of a parameter, or other experts' parameters."""
    group_names = [own_experts[name]] if name in own_experts else []
    if isinstance(parameter, DTensor):
        for axis, placement in enumerate(parameter.placements):
            if placement.is_partial():
                raise MoefxError(f"{name} is a DTensor with a Partial placement: the norm of its gradient is undefined")
            if placement.is_shard() or "Shard" in type(placement).__name__:  # also the strided one of FSDP
                group_names.append(parameter.device_mesh.get_group(axis).group_name)
    return tuple(group_names)


def _local_part(t: Tensor) -> Tensor:
    return t.to_local() if isinstance(t, DTensor) else t


def _find_widest(dtypes: list[torch.dtype]) -> torch.dtype:
    return functools.reduce(torch.promote_types, dtypes, torch.float32)


def _combine_norms(norms: list[Tensor], norm_type: float, zero: Tensor) -> Tensor:
    return torch.linalg.vector_norm(torch.stack(norms), norm_type) if norms else torch.zeros_like(zero)


def _reduce_norm(norm: Tensor, groups: tuple[str, ...], norm_type: float) -> Tensor:
    """Combine the norms of all ranks of these groups. Collective."""
    for name in groups:
        if math.isinf(norm_type):
            dist.all_reduce(norm, dist.ReduceOp.MAX, group=get_group(name))
        else:
            norm = norm.pow(norm_type)
            dist.all_reduce(norm, group=get_group(name))
            norm = norm.pow(1 / norm_type)
    return norm
