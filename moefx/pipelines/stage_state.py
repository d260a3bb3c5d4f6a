"""Communication between the stages of a pipeline outside of a step: errors, state dicts, the sum of losses."""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from ..distribution.mesh_agreement import raise_on_all_ranks
from ..runtime.ranks.sharding import PIPELINE_AXIS
from ..util.host_group import make_host_group, takes_cpu_tensors
from ..util.rank_values import gather_values


class StageGroup:
    """The ranks that hold the stages of one model.

    Args:
        mesh: the mesh with the pipeline axis.
        names: the names of the original's state dict, in order.
    """

    def __init__(self, mesh: DeviceMesh, names: list[str]):
        self.mesh, self.names = mesh, names
        self.group: dist.ProcessGroup = mesh.get_group(PIPELINE_AXIS)
        self.ranks = dist.get_process_group_ranks(self.group)

    def gather(self, value: Any) -> list[Any]:
        """Return the values of all stages' ranks. Collective over the pipeline axis."""
        return gather_values(value, self.group)

    def raise_together(self, error: Exception | None, value: Any = None) -> list[Any]:
        """Raise on every rank of the mesh if one of them has an error. Collective over the mesh.

        Returns:
            The values of the ranks of the pipeline axis.
        """
        value_by_rank = raise_on_all_ranks(self.mesh, error, value)
        return [value_by_rank[rank] for rank in self.ranks]

    def is_true_on_any(self, flag: bool) -> bool:
        """Return whether a flag is true on any rank of the mesh. Collective over the mesh."""
        device_type, groups = self._flag_groups
        number = torch.tensor(int(flag), device=device_type)
        for group in groups:
            dist.all_reduce(number, dist.ReduceOp.MAX, group=group)
        return bool(number.item())

    @functools.cached_property
    def _flag_groups(self) -> tuple[str, list[dist.ProcessGroup]]:
        """The device and the groups by which all ranks agree on a flag: the CPU, so that no host waits for its GPU,
        unless this torch has no gloo."""
        groups = [self.mesh.get_group(dim) for dim in range(self.mesh.ndim) if self.mesh.size(dim) > 1]
        if all(map(takes_cpu_tensors, groups)):
            return "cpu", groups
        if not dist.is_gloo_available():
            return self.mesh.device_type, groups
        return "cpu", [make_host_group(sorted(self.mesh.mesh.flatten().tolist()), "pipeline/hosts")]

    def gather_state(self, state: dict[str, Any], *, cpu: bool, rank: int | None) -> dict[str, Any]:
        """Merge the full state dicts of the stages. One broadcast per tensor.

        Args:
            cpu, rank: as for `moefx.full_state_dict`.
        """
        receives_state, device = rank is None or dist.get_rank() == rank, torch.device(self.mesh.device_type)
        tensors = {name: value for name, value in state.items() if isinstance(value, Tensor)}
        layouts = {name: (value.shape, value.dtype) for name, value in tensors.items()}
        states_by_rank = self.gather((layouts, {name: value for name, value in state.items() if name not in tensors}))
        merged_state: dict[str, Any] = {}
        seen: set[str] = set()
        for owner, (shapes, others) in zip(self.ranks, states_by_rank, strict=True):
            for name, (shape, dtype) in shapes.items():
                if name in seen:
                    continue  # a buffer that every stage has
                seen.add(name)
                if owner == dist.get_rank():
                    value = state[name].to(device).contiguous()
                else:
                    value = torch.empty(shape, dtype=dtype, device=device)
                dist.broadcast(value, owner, group=self.group)
                if receives_state:
                    merged_state[name] = value.cpu() if cpu else value
            merged_state |= others if receives_state else {}
        order = [name for name in self.names if name in merged_state]
        return {name: merged_state[name] for name in dict.fromkeys([*order, *merged_state])}

    def average_loss(self, loss: Tensor | None) -> Tensor:
        """Return the mean of a loss over the data ranks, on every rank of the mesh. Collective over the mesh.

        Args:
            loss: the loss on a rank with the last stage, None on others.
        """
        total = torch.zeros((), dtype=torch.float64, device=self.mesh.device_type) if loss is None else loss.double()
        for dim in range(self.mesh.ndim):
            if self.mesh.size(dim) > 1:
                dist.all_reduce(total, group=self.mesh.get_group(dim))
        return total / (self.mesh.size() // len(self.ranks))
