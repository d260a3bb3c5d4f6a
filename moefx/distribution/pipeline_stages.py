"""Whether the ranks of a pipeline hold stages: `compile` cuts no model into any."""

from __future__ import annotations

import hashlib
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from ..errors import InvalidPlan

STAGES = "pp"
_VALUES = 8  # of each parameter


def check_stages(model: nn.Module, mesh: DeviceMesh) -> None:
    """Collective over the pipeline axis of a mesh, before anything that one stage alone may raise.

    Raises:
        InvalidPlan: ranks of different stages hold the same model.
    """
    if STAGES not in (mesh.mesh_dim_names or ()) or mesh[STAGES].size() == 1:
        return
    told: list[Any] = [None] * mesh[STAGES].size()
    dist.all_gather_object(told, _digest(model), group=mesh.get_group(STAGES))
    alike = [stage for stage, digest in enumerate(told) if told.count(digest) > 1]
    if alike:
        rest = ", ".join(repr(name) for name in mesh.mesh_dim_names or () if name != STAGES)
        raise InvalidPlan(
            f"the mesh has a pipeline axis {STAGES!r}, and stages {', '.join(map(str, alike))} hold the same model: "
            "compile cuts no model into stages. Give it the module of this rank's stage "
            "(torch.distributed.pipelining), or a mesh of one stage's ranks" + (f", mesh[{rest}]" if rest else "")
        )


def _digest(model: nn.Module) -> str:
    """Of the names and shapes of parameters, and of a few values where there are any."""
    digest = hashlib.sha256()
    for name, parameter in model.named_parameters():
        digest.update(f"{name} {tuple(parameter.shape)} {parameter.dtype}\n".encode())
        if not parameter.is_meta and parameter.numel():
            flat = parameter.detach().reshape(-1)
            digest.update(flat[:: max(1, len(flat) // _VALUES)].double().cpu().numpy().tobytes())
    return digest.hexdigest()
