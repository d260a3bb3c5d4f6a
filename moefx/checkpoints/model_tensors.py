"""The tensors of a model on this rank: their names in the original state dict, and the regions that the rank holds."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from ..distribution.expert_layouts import find_expert_layouts
from ..distribution.training_wiring import SPREAD_MESH
from ..errors import InvalidCheckpoint, MoefxError
from ..pipelines.pipeline_model import Pipeline
from ..runtime.ranks.staged_models import find_stages
from ..runtime.ranks.state_dicts import iterate_names, join_name
from .tensor_regions import Region

_EXTRA_STATE = "_extra_state"


@dataclasses.dataclass(frozen=True)
class LocalPart:
    """The part of a tensor that this rank holds.

    Attributes:
        shape: of the whole tensor.
        region: of the part.
        tensor: the part, which shares its memory with the model.
    """

    shape: tuple[int, ...]
    region: Region
    tensor: Tensor


@dataclasses.dataclass(frozen=True)
class ModelTensors:
    """The state dict of a model that may be spread, sharded or cut into stages.

    Attributes:
        names: the names of the original's state dict, in the same order on all ranks.
        parts: what this rank holds, by name.
        tied: for names whose parameter or buffer has another name too, the first of its names.
    """

    names: tuple[str, ...]
    parts: dict[str, LocalPart]
    tied: dict[str, str]


def list_models(root: nn.Module) -> list[nn.Module]:
    """Return the models of this rank's stages, or the model itself."""
    return list(root.stages.values()) if isinstance(root, Pipeline) else [root]


def collect_tensors(root: nn.Module) -> ModelTensors:
    """Find the names of a model's state dict and this rank's parts. Not collective.

    Raises:
        InvalidCheckpoint: the state dict has something other than tensors.
        MoefxError: a tensor is sharded in a way that has no region.
    """
    state = root.state_dict(keep_vars=True)
    for name, value in state.items():
        if not isinstance(value, Tensor):
            raise InvalidCheckpoint(f"{name} of the state dict is {type(value).__name__}, and files hold tensors only")
    held = set(state)
    for block, layout in find_expert_layouts(root).items():
        held |= {join_name(block, name) for expert_names in layout.parameters.separate for name in expert_names}
    stages = find_stages(root)
    if stages is not None:
        names = [name for name in stages.names if name.rpartition(".")[2] != _EXTRA_STATE]
    else:  # in the same order on all ranks
        names = [name for name in dict.fromkeys(iterate_names(root)) if name in held]
    first: dict[int, str] = {}
    tied = {name: other for name, value in state.items() if (other := first.setdefault(id(value), name)) != name}
    return ModelTensors(tuple(names), {name: find_part(name, value) for name, value in state.items()}, tied)


def find_part(name: str, value: Tensor) -> LocalPart:
    """Return the part of a tensor that this rank holds: all of it unless it is a DTensor."""
    if not isinstance(value, DTensor):
        return LocalPart(tuple(value.shape), tuple((0, size) for size in value.shape), value.detach())
    local = value.to_local().detach()
    (chunk,) = value.__create_chunk_list__()  # as torch.distributed.checkpoint reads it
    if tuple(chunk.sizes) != tuple(local.shape) and local.numel():
        raise MoefxError(
            f"{name} is sharded as {value.placements}, and a rank's part {list(local.shape)} is not one region of it: "
            "use torch.distributed.checkpoint"
        )
    region = tuple((offset, offset + size) for offset, size in zip(chunk.offsets, chunk.sizes, strict=True))
    return LocalPart(tuple(value.shape), region, local)


def find_group(root: nn.Module) -> tuple[dist.ProcessGroup | None, torch.device]:
    """Return the process group of the ranks that hold a model, and the device of its collectives.

    The group is None if this process holds the whole model. A model that only FSDP has sharded is held by all ranks.
    Collective if the mesh does not have all ranks.
    """
    mesh = _find_mesh(root)
    if mesh is None:
        return None, torch.device("cpu")
    is_spread = find_stages(root) is not None or SPREAD_MESH in vars(root)
    if not is_spread or mesh.size() == dist.get_world_size():
        return dist.group.WORLD, torch.device(mesh.device_type)
    return (mesh if mesh.ndim == 1 else mesh._flatten()).get_group(), torch.device(mesh.device_type)


def choose_device(root: nn.Module) -> torch.device:
    """Return the device for tensors that are on the meta device: that of the mesh, or of the model's other tensors."""
    mesh = _find_mesh(root)
    if mesh is None:
        tensors = [*root.parameters(), *root.buffers()]
        return next((tensor.device for tensor in tensors if not tensor.is_meta), torch.device("cpu"))
    index = torch.cuda.current_device() if mesh.device_type == "cuda" else None
    return torch.device(mesh.device_type, index) if index is not None else torch.device(mesh.device_type)


def _find_mesh(root: nn.Module) -> DeviceMesh | None:
    """Return the mesh that a model is spread over, or that of its first DTensor."""
    stages, spread = find_stages(root), vars(root).get(SPREAD_MESH)
    if stages is not None:
        return stages.mesh
    if spread is not None:
        return spread.mesh
    return next((value.device_mesh for value in root.parameters() if isinstance(value, DTensor)), None)


def materialize(root: nn.Module, device: torch.device) -> None:
    """Allocate the tensors of a model that are on the meta device. Parameters with several names stay one parameter."""
    slots: dict[int, list[tuple[nn.Module, str]]] = {}
    modules = _iterate_modules(root)
    tensors = {}
    for module in modules:
        for name, parameter in module._parameters.items():
            if parameter is not None and parameter.is_meta:
                slots.setdefault(id(parameter), []).append((module, name))
                tensors[id(parameter)] = parameter
    shared_buffers: dict[int, Tensor] = {}

    def allocate(tensor: Tensor) -> Tensor:
        if not tensor.is_meta:
            return tensor
        if isinstance(tensor, nn.Parameter):
            return torch.empty_like(tensor, device=device)
        if id(tensor) not in shared_buffers:
            tensors[id(tensor)] = tensor  # keeps its id
            shared_buffers[id(tensor)] = torch.empty_like(tensor, device=device)
        return shared_buffers[id(tensor)]

    root._apply(allocate)
    for (module, name), *others in slots.values():
        for other, other_name in others:
            other._parameters[other_name] = module._parameters[name]


def _iterate_modules(root: nn.Module) -> Iterator[nn.Module]:
    yield from dict.fromkeys(module for model in list_models(root) for module in model.modules())
