"""Check that the ranks of a pipeline hold different stages, because `compile` does not split a model."""

from __future__ import annotations

import hashlib

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from ..errors import InvalidPlan
from ..runtime.ranks.sharding import PIPELINE_AXIS
from ..util.rank_values import gather_values
from ..util.tensor_bytes import view_bytes

_VALUES = 8  # per parameter


def check_stages(model: nn.Module, mesh: DeviceMesh) -> None:
    """Check that the pipeline stages of a mesh hold different models. Collective over the pipeline axis; called before
    anything that one stage alone may raise.

    Raises:
        InvalidPlan: ranks of different stages hold the same model.
    """
    if PIPELINE_AXIS not in (mesh.mesh_dim_names or ()) or mesh[PIPELINE_AXIS].size() == 1:
        return
    digests = gather_values(_digest(model), mesh.get_group(PIPELINE_AXIS))
    equal_stages = [stage for stage, digest in enumerate(digests) if digests.count(digest) > 1]
    if equal_stages:
        other_axes = ", ".join(repr(name) for name in mesh.mesh_dim_names or () if name != PIPELINE_AXIS)
        raise InvalidPlan(
            f"the mesh has a pipeline axis {PIPELINE_AXIS!r}, and stages {', '.join(map(str, equal_stages))} hold "
            "the same model: compile does not split a model, moefx.pipeline(model, mesh, ...) does. Or give compile "
            "the module of this rank's stage (torch.distributed.pipelining), or a mesh of one stage's ranks"
            + (f", mesh[{other_axes}]" if other_axes else "")
        )


def _digest(model: nn.Module) -> str:
    """Hash the names and shapes of the parameters, and a few values, if the model has any."""
    digest = hashlib.sha256()
    for name, parameter in model.named_parameters():
        digest.update(f"{name} {tuple(parameter.shape)} {parameter.dtype}\n".encode())
        if not parameter.is_meta and parameter.numel():
            flat = parameter.detach().reshape(-1)
            digest.update(view_bytes(flat[:: max(1, len(flat) // _VALUES)].double()))
    return digest.hexdigest()
