"""Distribute the parameters of experts over the ranks of an expert axis."""

from __future__ import annotations

import contextlib
import dataclasses
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, Shard

from ...errors import InvalidPlan
from ...ir.expert_placement import Placement
from ...util.model_copy import copy_model
from .topology import ExpertAxis

# names of mesh axes; ranks along "tp" have the same tokens, unless experts are spread over it
EXPERT_AXIS, PIPELINE_AXIS, TENSOR_AXIS = "ep", "pp", "tp"


@dataclasses.dataclass(frozen=True)
class ExpertParameters:
    """Names of the experts' parameters, relative to the block.

    Attributes:
        stacked: parameters that hold all experts along their first axis, with the length of one expert's part: 1 for
            [experts, ...].
        separate: for each expert, the names of its own parameters.
    """

    stacked: Mapping[str, int]
    separate: tuple[tuple[str, ...], ...]

    def of_experts(self, experts: Iterable[int]) -> set[str]:
        """Return the names of the separate parameters of some experts."""
        return {name for e in experts for name in self.separate[e]} if self.separate else set()

    def tensors(self, block: nn.Module, experts: Iterable[int]) -> list[torch.Tensor]:
        """Return the parameters and buffers of a block that hold some experts."""
        separate_names = self.of_experts(experts)
        names = [
            *self.stacked,
            *(name for expert_names in self.separate for name in expert_names if name in separate_names),
        ]
        values = [find_owner_and_tensor(block, name)[1] for name in dict.fromkeys(names)]
        return [t for t in values if isinstance(t, torch.Tensor)]


def resolve_expert_axes(mesh: DeviceMesh, wanted: str | tuple[str, ...] | None) -> tuple[str, ...]:
    """Return the names of the mesh axes that experts are spread over.

    Raises:
        InvalidPlan: the mesh has no axis "ep", and its names do not tell which axis to use.
    """
    names: list[str] = list(mesh.mesh_dim_names or ())
    if not names:
        raise InvalidPlan("the axes of the mesh have no names; pass mesh_dim_names to init_device_mesh")
    if wanted is not None:
        return (wanted,) if isinstance(wanted, str) else wanted
    if EXPERT_AXIS not in names and len(names) > 1:
        raise InvalidPlan(f"which axis of the mesh ({format_mesh(mesh)}) holds the experts? Set Plan(expert_axis=...)")
    if EXPERT_AXIS not in names and (names[0] == PIPELINE_AXIS or is_replica_axis(names[0])):
        raise InvalidPlan(
            f"the mesh has no axis for experts: its only one is {names[0]!r}, whose ranks hold "
            f"{'other stages of a pipeline' if names[0] == PIPELINE_AXIS else 'replicas'}. Add an axis 'ep', or set "
            "Plan(expert_axis=...)"
        )
    return (EXPERT_AXIS,) if EXPERT_AXIS in names else (names[0],)


def is_replica_axis(axis: str) -> bool:
    """Return whether a mesh axis has a name for replicas, such as "dp_replicate" of hybrid sharding."""
    return "replica" in axis


def select_mesh_axis(mesh: DeviceMesh, field: str, names: tuple[str, ...]) -> DeviceMesh:
    """Return one axis of a mesh, or several axes flattened to one.

    Args:
        field: name of the plan's field, for messages.

    Raises:
        InvalidPlan: the mesh has no axis of that name.
    """
    known = mesh.mesh_dim_names or ()
    for name in names:
        if name not in known:
            raise InvalidPlan(f"Plan({field}={name!r}): the mesh has no such axis; it has {format_mesh(mesh)}")
    return mesh[names[0]] if len(names) == 1 else mesh[names]._flatten("_".join(names))


def format_mesh(mesh: DeviceMesh) -> str:
    return ", ".join(f"{name}={size}" for name, size in zip(mesh.mesh_dim_names or (), mesh.shape, strict=True))


def place_experts_in_order(axis: ExpertAxis, num_experts: int, of: str) -> Placement:
    """Place the experts in order over one axis of a mesh."""
    return Placement.in_order(num_experts, axis.size, axis.rank, axis=axis.name, group=axis.group, of=of)


def shard_experts(
    block: nn.Module,
    parameters: ExpertParameters,
    placement: Placement,
    axis: DeviceMesh,
    sharded_parameters: dict[torch.Tensor, nn.Parameter],
) -> None:
    """Reduce a block's parameters to the local experts' parameters.

    A stack becomes a DTensor, `Shard(0)` over the axis. Parameters of separate experts on other ranks become None, so
    `state_dict` omits them.

    Args:
        sharded_parameters: the sharded parameter of each stack. Blocks that share a stack share its part.
    """
    for name in parameters.stacked:
        owner, full = find_owner_and_tensor(block, name)
        if full not in sharded_parameters:
            local = placement.select_local(full.detach()).clone()
            shard = DTensor.from_local(local, axis, [Shard(0)], run_check=False)
            sharded_parameters[full] = nn.Parameter(shard, requires_grad=full.requires_grad)
        _set_tensor(owner, name, sharded_parameters[full], full)
    own_names = parameters.of_experts(placement.local_experts)
    for name in _list_unique_names(parameters.separate):
        owner, full = find_owner_and_tensor(block, name)
        if full is not None:  # None if another block shares these experts and was sharded before
            _set_tensor(owner, name, full if name in own_names else None, full)


def copy_with_all_experts(block: nn.Module, parameters: ExpertParameters, placement: Placement) -> nn.Module:
    """Return a copy of a sharded block with meta parameters of all experts, which can be captured."""
    with _as_before_fully_shard(block):
        duplicate, _ = copy_model(block)
    for name in parameters.stacked:
        owner, full = find_owner_and_tensor(duplicate, name)
        owner._parameters[_get_last_name(name)] = _make_abstract(full)
    own_names = parameters.separate[placement.local_experts[0]] if parameters.separate else ()
    for names in parameters.separate:
        for name, other in zip(names, own_names, strict=True):
            owner, _ = find_owner_and_tensor(duplicate, name)
            owner._parameters[_get_last_name(name)] = _make_abstract(find_owner_and_tensor(block, other)[1])
    return duplicate


@contextlib.contextmanager
def _as_before_fully_shard(block: nn.Module) -> Iterator[None]:
    """Give the FSDP modules of a block their own class and hooks back, inside the context: FSDP refuses copies, and the
    copy of a block must gather nothing."""
    sharded = [(m, type(m), dict(vars(m))) for m in block.modules() if isinstance(m, FSDPModule)]
    try:
        for module, cls, attributes in sharded:
            module.__class__ = next(base for base in cls.__mro__ if not issubclass(base, FSDPModule))
            state = fully_shard.state(module)  # type: ignore[attr-defined]
            for name in ("_forward_pre_hooks", "_forward_hooks"):
                hooks = attributes[name].items()
                own_hooks = [(key, hook) for key, hook in hooks if getattr(hook, "__self__", None) is not state]
                vars(module)[name] = OrderedDict(own_hooks)
            for name, value in attributes.items():
                if isinstance(value, dict) and any(v is state for v in value.values()):  # torch keeps the state there
                    del vars(module)[name]
        yield
    finally:
        for module, cls, attributes in sharded:
            module.__class__ = cls
            vars(module).update(attributes)


def _make_abstract(t: torch.Tensor) -> nn.Parameter:
    return nn.Parameter(torch.empty(t.shape, dtype=t.dtype, device="meta"), requires_grad=t.requires_grad)


def _get_last_name(name: str) -> str:
    return name.rpartition(".")[2]


def _list_unique_names(names: Sequence[Iterable[str]]) -> list[str]:
    return list(dict.fromkeys(name for group in names for name in group))


def find_owner_and_tensor(block: nn.Module, name: str) -> tuple[nn.Module, torch.Tensor]:
    """Return the submodule that holds a parameter or buffer, and the tensor."""
    path, _, last = name.rpartition(".")
    owner = block.get_submodule(path)
    return owner, getattr(owner, last)


def _set_tensor(owner: nn.Module, name: str, value: torch.Tensor | None, before: torch.Tensor) -> None:
    values = owner._parameters if isinstance(before, nn.Parameter) else owner._buffers
    values[_get_last_name(name)] = value  # type: ignore[assignment]
