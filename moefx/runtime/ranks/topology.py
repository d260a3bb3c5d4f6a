"""The network topology of an expert axis: nodes, and levels above them (Piper sections V.A and V.C)."""

from __future__ import annotations

import dataclasses
import datetime
import functools
import itertools
import os
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from ...errors import InvalidPlan
from ...ir.expert_placement import ExchangeRoutes, SharedTokens, TopologyLevel
from ...ir.ops.peer_memory import find_access_obstacle
from ...ir.ops.uneven_all_to_all import format_ranks, get_group
from ...util.host_group import make_host_group, takes_cpu_tensors
from .link_costs import Link, Links, measure_handling, measure_link

_LOWEST_LEVELS = ("inter", "intra")  # names of the two lowest levels; levels above are numbered


@dataclasses.dataclass(frozen=True)
class Topology:
    """The ranks of an expert axis by level.

    Attributes:
        sizes: units within a unit, coarse to fine: (2, 4) is two nodes of four ranks. Omits levels with one unit, so
            (W,) is one node or a flat network.
        order: for each position, the rank's number on the axis. Positions count nodes first, then ranks within a node,
            in the order of process groups. Ranks with the same number in their nodes share the links between nodes
            (the GPUs of one NIC, or rail).
    """

    sizes: tuple[int, ...]
    order: tuple[int, ...]

    @classmethod
    def from_ranks(cls, ranks: Sequence[int], units: Sequence[int], axis: str = "ep") -> Topology:
        """Return the topology of ranks that launchers numbered node by node.

        Args:
            ranks: global ranks, in the order of the axis.
            units: number of ranks in a unit of each level, fine to coarse: [node size, ...].

        Raises:
            InvalidPlan: a unit does not consist of whole units of the level below, or the units of a level hold
                different numbers of ranks of the axis.
        """
        for small, large in itertools.pairwise(units):
            if large % small or large <= small:
                raise InvalidPlan(
                    f"Plan(topology_levels=...): units of {large} ranks do not consist of several whole units of "
                    f"{small}, the level below{' (a node)' if small == units[0] else ''}"
                )
        coarse = [size for size in reversed(units)]
        paths = [(*(rank // size for size in coarse), rank) for rank in ranks]
        sizes = []
        for depth in range(len(coarse) + 1):
            inside: dict[tuple[int, ...], set[int]] = {}
            for path in paths:
                inside.setdefault(path[:depth], set()).add(path[depth])
            counts = {len(members) for members in inside.values()}
            if len(counts) > 1:
                unit = coarse[depth - 1] if depth else len(ranks)
                raise InvalidPlan(
                    f"mesh axis {axis!r} ({format_ranks(ranks)}) has {min(counts)} to {max(counts)} parts in units of "
                    f"{unit} ranks; all units need the same number"
                )
            sizes.append(counts.pop())
        order = sorted(range(len(ranks)), key=paths.__getitem__)
        return cls(tuple(size for size in sizes if size > 1) or (1,), tuple(order))

    @property
    def num_ranks(self) -> int:
        return len(self.order)

    @property
    def names(self) -> list[str]:
        """The names of the levels, coarse to fine."""
        above = [f"level{i}" for i in range(len(self.sizes) - 2, 0, -1)]
        return [*above, *_LOWEST_LEVELS[-len(self.sizes) :]] if len(self.sizes) > 1 else [""]


def resolve_node_size(wanted: int | None, world: int) -> int:
    """Return the number of ranks of a node: `wanted`, otherwise LOCAL_WORLD_SIZE of the launcher, otherwise all ranks.

    Raises:
        InvalidPlan: the world does not consist of whole nodes.
    """
    local = os.environ.get("LOCAL_WORLD_SIZE", "")
    size = wanted if wanted is not None else int(local) if local.isdigit() and int(local) else world
    if world % size:
        source = "Plan(node_size=...)" if wanted is not None else "LOCAL_WORLD_SIZE"
        raise InvalidPlan(f"{source} is {size}, but the {world} ranks are not whole nodes of that size")
    return size


class ExpertAxis:
    """One axis of a mesh: its ranks, their topology, and the process groups of its levels.

    Args:
        axis_mesh: the axis, a submesh of `mesh`.
        node_size: number of ranks of a node, see `resolve_node_size`.
        levels_above: number of ranks in the units above a node, fine to coarse.
        timeout: seconds that an exchange may take; None for the default of process groups.
    """

    def __init__(
        self,
        mesh: DeviceMesh,
        axis_mesh: DeviceMesh,
        node_size: int | None = None,
        levels_above: Sequence[int] = (),
        timeout: float | None = None,
    ):
        self.mesh, self.axis_mesh, self._node, self._above, self.timeout = (
            mesh,
            axis_mesh,
            node_size,
            levels_above,
            timeout,
        )
        (self.name,) = axis_mesh.mesh_dim_names or ("",)
        self.rank = (axis_mesh.get_coordinate() or [0])[0]  # `get_local_rank` counts in the process group instead
        self.size = self.axis_mesh.size()
        self.sharded_parameters: dict[torch.Tensor, Any] = {}  # the sharded parameter of each stack
        group: dist.ProcessGroup = self.axis_mesh.get_group()
        self.group = group.group_name

    @functools.cached_property
    def topology(self) -> Topology:
        units = [resolve_node_size(self._node, dist.get_world_size()), *self._above]
        return Topology.from_ranks(self.axis_mesh.mesh.tolist(), units, self.name)

    def find_shared_tokens(self, name: str, gradients: str) -> SharedTokens:
        """Return the axis `name` of the mesh, whose ranks have the same tokens.

        Raises:
            InvalidPlan: its ranks are not ranks of this axis, so their parts of the tokens would reach different
                experts.
        """
        sequence_mesh = self.mesh[name]
        ranks, experts = sequence_mesh.mesh.tolist(), self.axis_mesh.mesh.tolist()
        if not set(ranks) <= set(experts):
            raise InvalidPlan(
                f"Plan(sequence_axis={name!r}): each of its ranks ({format_ranks(ranks)}) routes a part of the "
                f"tokens, so they must be among the ranks of the expert axis {self.name!r} ({format_ranks(experts)}), "
                f"else experts that are replicated over {name!r} would have different gradients. Take "
                f"Plan(expert_axis=(..., {name!r}))"
            )
        group = sequence_mesh.get_group()
        return SharedTokens(name, group.group_name, sequence_mesh.size(), dist.get_rank(group), gradients)

    def build_routes(self, *, by_level: bool, dedup: bool, splits_intra_node: bool = False) -> ExchangeRoutes:
        """Route rows in one exchange, or in one per level (`by_level`). The latter is collective: it makes groups."""
        if not by_level or len(self.topology.sizes) == 1:
            levels, splits_intra_node = (TopologyLevel(self.name, self.size, self.exchange_group),), False
            order = Topology.from_ranks(self.axis_mesh.mesh.tolist(), ()).order
        else:
            levels, order = self.levels, self.topology.order
        return ExchangeRoutes(levels, order.index(self.rank), order, dedup, splits_intra_node, self.timeout)

    @functools.cached_property
    def exchange_group(self) -> str:
        """The process group of the axis, or a group of the same ranks with its own timeout."""
        if self.timeout is None:
            return self.group
        group: Any = dist.new_group(
            self.axis_mesh.mesh.tolist(),
            timeout=datetime.timedelta(seconds=self.timeout),
            use_local_synchronization=True,
            group_desc=self.name,
        )
        return group.group_name

    @functools.cached_property
    def host_group(self) -> str:
        """The name of a process group of these ranks that works on the CPU. Collective: made on first use.

        Raises:
            InvalidPlan: this torch has no gloo.
        """
        if takes_cpu_tensors(get_group(self.exchange_group)):
            return self.exchange_group
        if not dist.is_gloo_available():
            raise InvalidPlan(
                "Plan(dispatch='gather') agrees on the number of tokens between hosts, and this torch has no gloo: use "
                "Plan(max_tokens=...)"
            )
        return make_host_group(self.axis_mesh.mesh.tolist(), f"{self.name}/hosts", self.timeout).group_name

    @functools.cached_property
    def pull_obstacle(self) -> str | None:
        """The reason why ranks cannot pull rows from each other, or None if they can. Collective."""
        if len(self.topology.sizes) > 1:
            return "the ranks are on several nodes"
        return find_access_obstacle(self.exchange_group, self.mesh.device_type)

    @functools.cached_property
    def links(self) -> Links:
        """The measured links. Collective."""
        device = torch.device(self.mesh.device_type)
        whole_axis = TopologyLevel(self.name, self.size, self.group)
        several = self.levels if len(self.topology.sizes) > 1 else ()
        links = [measure_link(level, device) for level in (whole_axis, *several)]
        numbers = [[link.latency, link.per_byte] for link in links] + [[measure_handling(self.group, device), 0.0]]
        slowest = torch.tensor(numbers, dtype=torch.float64, device=device)
        dist.all_reduce(slowest, dist.ReduceOp.MAX, group=get_group(self.group))  # all ranks decide alike
        whole, *levels, (handling, _) = slowest.tolist()
        return Links(Link(*whole), tuple(Link(*level) for level in levels or [whole]), handling)

    @functools.cached_property
    def levels(self) -> tuple[TopologyLevel, ...]:
        """The levels, each with the process group of the ranks that differ from this one at that level only."""
        sizes, order = self.topology.sizes, self.topology.order
        ranks = self.axis_mesh.mesh[list(order)].view(sizes)
        coordinate = (ranks == dist.get_rank()).nonzero()[0].tolist()
        levels = []
        for i, (name, size) in enumerate(zip(self.topology.names, sizes, strict=True)):
            peers = ranks[(*coordinate[:i], slice(None), *coordinate[i + 1 :])].tolist()
            # Only members synchronise: other groups of the axis may belong to other models, or be made later.
            group: Any = dist.new_group(
                peers,
                timeout=None if self.timeout is None else datetime.timedelta(seconds=self.timeout),
                use_local_synchronization=True,
                group_desc=f"{self.name}/{name}",
            )
            levels.append(TopologyLevel(f"{self.name}/{name}", size, group.group_name))
        return tuple(levels)
