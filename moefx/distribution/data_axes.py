"""Choose the mesh axes over which `parallelize` shards and replicates parameters, and build FSDP2's meshes of them."""

from __future__ import annotations

import dataclasses
import math

from torch.distributed.device_mesh import DeviceMesh

from ..errors import InvalidPlan
from ..runtime.ranks.sharding import PIPELINE_AXIS, format_mesh, is_replica_axis, select_mesh_axis

LAYOUTS = ("fsdp", "ddp", "hsdp")


@dataclasses.dataclass(frozen=True)
class DataAxes:
    """The data axes of a mesh, in its order: their ranks have different tokens.

    Attributes:
        shard: axes over which parameters are sharded.
        replicate: axes over which they are replicated, and only their gradients are summed.
    """

    shard: tuple[str, ...]
    replicate: tuple[str, ...]

    def restrict(self, axes: tuple[str, ...]) -> DataAxes:
        """Leave out all axes but these."""
        return DataAxes(
            tuple(name for name in self.shard if name in axes), tuple(name for name in self.replicate if name in axes)
        )

    def count_shards(self, mesh: DeviceMesh) -> int:
        return math.prod(mesh[name].size() for name in self.shard)

    def __str__(self) -> str:
        parts = [("sharded", self.shard), ("replicated", self.replicate)]
        uses = [f"{verb} over {' and '.join(map(repr, names))}" for verb, names in parts if names]
        return ", ".join(uses) or "not sharded"


def choose_data_axes(
    mesh: DeviceMesh,
    data_axes: tuple[str, ...],
    layout: str,
    shard: str | tuple[str, ...] | None,
    replicate: str | tuple[str, ...] | None,
) -> DataAxes:
    """Return how `parallelize(data=layout, shard_axes=shard, replicate_axes=replicate)` uses the axes of a mesh.

    Args:
        data_axes: the axes of more than one rank whose ranks have different tokens.

    Raises:
        InvalidPlan: the arguments do not use each data axis once, or contradict each other.
    """
    sizes = dict(zip(mesh.mesh_dim_names or (), mesh.shape, strict=True))
    if layout not in LAYOUTS:
        raise InvalidPlan(f"parallelize(data={layout!r}): expected one of {', '.join(map(repr, LAYOUTS))}")
    if sizes.get(PIPELINE_AXIS, 1) > 1:
        stage_axes = ", ".join(repr(name) for name in sizes if name != PIPELINE_AXIS)
        raise InvalidPlan(
            f"the mesh ({format_mesh(mesh)}) has a pipeline axis, whose ranks hold other stages: call moefx.pipeline, "
            f"or compile and parallelize the model of a stage over the ranks of the stage, mesh[{stage_axes}]"
        )
    if layout == "fsdp" and replicate:
        raise InvalidPlan(f"parallelize(data='fsdp', replicate_axes={replicate!r}): use data='hsdp' to replicate")
    if layout == "ddp" and shard:
        raise InvalidPlan(f"parallelize(data='ddp', shard_axes={shard!r}): use data='fsdp' or 'hsdp' to shard")
    sharded = _check_names("shard_axes", shard, data_axes, mesh)
    replicated = _check_names("replicate_axes", replicate, data_axes, mesh)
    if layout == "fsdp":
        sharded, replicated = data_axes if sharded is None else sharded, ()
    elif layout == "ddp":
        sharded, replicated = (), data_axes if replicated is None else replicated
    else:
        if sharded is None and replicated is None:
            replicated = _find_replica_axes(mesh, data_axes)
        if replicated is None:
            replicated = tuple(name for name in data_axes if name not in (sharded or ()))
        if sharded is None:
            sharded = tuple(name for name in data_axes if name not in replicated)
    for name in data_axes:
        if (name in sharded) == (name in replicated):
            conflict = "both sharded and replicated" if name in sharded else "neither sharded nor replicated"
            raise InvalidPlan(
                f"parallelize: axis {name!r} of the mesh is {conflict}. Its ranks have tokens of their own, so "
                "gradients are reduced over it: name it in shard_axes or in replicate_axes"
            )
    return DataAxes(sharded, replicated)


def _find_replica_axes(mesh: DeviceMesh, data_axes: tuple[str, ...]) -> tuple[str, ...]:
    if not any(map(is_replica_axis, mesh.mesh_dim_names or ())):
        raise InvalidPlan(
            f"parallelize(data='hsdp'): which axes of the mesh ({format_mesh(mesh)}) hold replicas? Pass "
            "replicate_axes=..."
        )
    return tuple(name for name in data_axes if is_replica_axis(name))


def _check_names(
    field: str, named: str | tuple[str, ...] | None, data_axes: tuple[str, ...], mesh: DeviceMesh
) -> tuple[str, ...] | None:
    """Return the data axes that the user named, in the mesh's order; None if nothing was named."""
    if named is None:
        return None
    named = (named,) if isinstance(named, str) else tuple(named)
    sizes = dict(zip(mesh.mesh_dim_names or (), mesh.shape, strict=True))
    for name in named:
        if name not in sizes:
            raise InvalidPlan(f"parallelize({field}={name!r}): the mesh has no such axis; it has {format_mesh(mesh)}")
        if name not in data_axes and sizes[name] > 1:
            raise InvalidPlan(
                f"parallelize({field}={name!r}): ranks along this axis have the same tokens, so nothing is sharded or "
                f"averaged over it. The data axes are {', '.join(map(repr, data_axes)) or 'none'}"
            )
    return tuple(name for name in data_axes if name in named)


class DataMeshes:
    """Builds the meshes that `fully_shard` takes: [shard], or [replicate, shard]. Collective over the whole mesh."""

    def __init__(self, mesh: DeviceMesh):
        self.mesh = mesh
        self._whole: DeviceMesh | None = None

    def build(self, axes: DataAxes) -> DeviceMesh:
        shard = self._flatten(axes.shard) if axes.shard else self._one_rank()
        return DeviceMesh._concatenate([self._flatten(axes.replicate), shard]) if axes.replicate else shard

    def _flatten(self, names: tuple[str, ...]) -> DeviceMesh:
        return select_mesh_axis(self.mesh, "", names)

    def _one_rank(self) -> DeviceMesh:
        """Return an axis of one rank. A parameter that is sharded over it stays whole."""
        if self._whole is None:
            name = (self.mesh.mesh_dim_names or ("",))[-1]
            self._whole = self.mesh[name]._unflatten(0, (self.mesh[name].size(), 1), (name, "whole"))["whole"]
        return self._whole
