"""Which ranks are near each other: nodes, and levels above them (Piper section V.A and V.C)."""

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

from ..errors import InvalidPlan
from ..ir.expert_placement import Level, SharedTokens, Ways
from ..ir.ops.uneven_all_to_all import group_of, shown_ranks
from .links import Link, Links, measure_handling, measure_link

_NODE = ("inter", "intra")  # the two lowest levels; those above have numbers


@dataclasses.dataclass(frozen=True)
class Topology:
    """The ranks of an expert axis by level.

    Attributes:
        sizes: units within a unit, coarse to fine: (2, 4) is two nodes of four ranks. Levels with one unit are left
            out, (W,) is one node or a flat network.
        order: of each position the rank's number on the axis. Positions count nodes first, then ranks within the node,
            as process groups do whatever the order of the axis. Ranks at the same place of their nodes share the
            links between the nodes (the GPUs of one NIC, or rail).
    """

    sizes: tuple[int, ...]
    order: tuple[int, ...]

    @classmethod
    def from_ranks(cls, ranks: Sequence[int], units: Sequence[int], axis: str = "ep") -> Topology:
        """The topology of ranks that are numbered node by node, as launchers do.

        Args:
            ranks: of the whole world, in the order of the axis.
            units: ranks in a unit of each level, fine to coarse: [node size, ...].

        Raises:
            InvalidPlan: a unit does not consist of whole ones of the level below, or the axis has unlike parts of them.
        """
        for small, large in itertools.pairwise(units):
            if large % small or large <= small:
                raise InvalidPlan(
                    f"Plan(topology_levels=...): units of {large} ranks do not consist of several whole ones of "
                    f"{small}, the level below{' (a node)' if small == units[0] else ''}"
                )
        coarse = [size for size in reversed(units)]
        paths = [(*(rank // size for size in coarse), rank) for rank in ranks]
        sizes = []
        for depth in range(len(coarse) + 1):
            inside: dict[tuple[int, ...], set[int]] = {}
            for path in paths:
                inside.setdefault(path[:depth], set()).add(path[depth])
            counts = {len(found) for found in inside.values()}
            if len(counts) > 1:
                unit = coarse[depth - 1] if depth else len(ranks)
                raise InvalidPlan(
                    f"mesh axis {axis!r} ({shown_ranks(ranks)}) has {min(counts)} to {max(counts)} parts in units of "
                    f"{unit} ranks; each unit needs as many"
                )
            sizes.append(counts.pop())
        order = sorted(range(len(ranks)), key=paths.__getitem__)
        return cls(tuple(size for size in sizes if size > 1) or (1,), tuple(order))

    @property
    def num_ranks(self) -> int:
        return len(self.order)

    @property
    def names(self) -> list[str]:
        """Of the levels."""
        above = [f"level{i}" for i in range(len(self.sizes) - 2, 0, -1)]
        return [*above, *_NODE[-len(self.sizes) :]] if len(self.sizes) > 1 else [""]


def resolve_node_size(wanted: int | None, world: int) -> int:
    """Ranks of a node: as planned, else what launchers say (LOCAL_WORLD_SIZE), else all.

    Raises:
        InvalidPlan: the world does not consist of whole nodes.
    """
    told = os.environ.get("LOCAL_WORLD_SIZE", "")
    size = wanted if wanted is not None else int(told) if told.isdigit() and int(told) else world
    if world % size:
        source = "Plan(node_size=...)" if wanted is not None else "LOCAL_WORLD_SIZE"
        raise InvalidPlan(f"{source} is {size}, but the {world} ranks are not whole nodes of that size")
    return size


class ExpertAxis:
    """One axis of a mesh: its ranks, their topology, and the process groups of its levels.

    Args:
        own: the axis, of `mesh`.
        node: ranks of a node, see `node_size`. above: of units above it, fine to coarse.
        timeout: seconds that exchanges may take; None: as long as process groups allow.
    """

    def __init__(
        self,
        mesh: DeviceMesh,
        own: DeviceMesh,
        node: int | None = None,
        above: Sequence[int] = (),
        timeout: float | None = None,
    ):
        self.mesh, self.own, self._node, self._above, self.timeout = mesh, own, node, above, timeout
        (self.name,) = own.mesh_dim_names or ("",)
        self.rank = (own.get_coordinate() or [0])[0]  # not `get_local_rank`, which is the number in the process group
        self.size = self.own.size()
        self.made: dict[torch.Tensor, Any] = {}  # parameters that were cut
        group: dist.ProcessGroup = self.own.get_group()
        self.group = group.group_name

    @functools.cached_property
    def topology(self) -> Topology:
        units = [resolve_node_size(self._node, dist.get_world_size()), *self._above]
        return Topology.from_ranks(self.own.mesh.tolist(), units, self.name)

    def find_shared_tokens(self, name: str, gradients: str) -> SharedTokens:
        """An axis whose ranks have the same tokens.

        Raises:
            InvalidPlan: its ranks are not among those of this one: their parts of the tokens would not meet.
        """
        own = self.mesh[name]
        ranks, experts = own.mesh.tolist(), self.own.mesh.tolist()
        if not set(ranks) <= set(experts):
            raise InvalidPlan(
                f"Plan(sequence_axis={name!r}): each of its ranks ({shown_ranks(ranks)}) routes a part of the "
                f"tokens, so they must be among the ranks of the expert axis {self.name!r} ({shown_ranks(experts)}), "
                f"else experts that are replicated over {name!r} would have different gradients. Take "
                f"Plan(expert_axis=(..., {name!r}))"
            )
        group = own.get_group()
        return SharedTokens(name, group.group_name, own.size(), dist.get_rank(group), gradients)

    def build_ways(self, *, by_level: bool, dedup: bool, near_apart: bool = False) -> Ways:
        """In one exchange, or `by_level`. Collective, if so: the groups are made on first use."""
        if not by_level or len(self.topology.sizes) == 1:
            levels, near_apart = (Level(self.name, self.size, self._own_group),), False
            order = Topology.from_ranks(self.own.mesh.tolist(), ()).order
        else:
            levels, order = self.levels, self.topology.order
        return Ways(levels, order.index(self.rank), order, dedup, near_apart, self.timeout)

    @functools.cached_property
    def _own_group(self) -> str:
        """That of the axis, or another one of the same ranks with its own timeout."""
        if self.timeout is None:
            return self.group
        group: Any = dist.new_group(
            self.own.mesh.tolist(),
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
        if "cpu" in {device.type for device in group_of(self._own_group)._device_types}:
            return self._own_group
        if not dist.is_gloo_available():
            raise InvalidPlan(
                "Plan(dispatch='gather') agrees on the number of tokens between hosts, and this torch has no gloo: use "
                "Plan(max_tokens=...)"
            )
        group: Any = dist.new_group(
            self.own.mesh.tolist(),
            backend="gloo",
            timeout=None if self.timeout is None else datetime.timedelta(seconds=self.timeout),
            use_local_synchronization=True,
            group_desc=f"{self.name}/hosts",
        )
        return group.group_name

    @functools.cached_property
    def links(self) -> Links | None:
        """As measured, once. Collective. None of one level, where nothing depends on them."""
        if len(self.topology.sizes) == 1:
            return None
        device = torch.device(self.mesh.device_type)
        found = [measure_link(level, device) for level in (Level(self.name, self.size, self.group), *self.levels)]
        numbers = [[link.latency, link.per_byte] for link in found] + [[measure_handling(self.group, device), 0.0]]
        slowest = torch.tensor(numbers, dtype=torch.float64, device=device)
        dist.all_reduce(slowest, dist.ReduceOp.MAX, group=group_of(self.group))  # all ranks decide alike
        whole, *levels, (handling, _) = slowest.tolist()
        return Links(Link(*whole), tuple(Link(*level) for level in levels), handling)

    @functools.cached_property
    def levels(self) -> tuple[Level, ...]:
        """With the process group of the ranks that differ from this one at that level only."""
        sizes, order = self.topology.sizes, self.topology.order
        ranks = self.own.mesh[list(order)].view(sizes)
        own = (ranks == dist.get_rank()).nonzero()[0].tolist()
        levels = []
        for i, (name, size) in enumerate(zip(self.topology.names, sizes, strict=True)):
            beside = ranks[(*own[:i], slice(None), *own[i + 1 :])].tolist()
            # Other groups of the axis may be in other models, or come later: only members wait for each other.
            group: Any = dist.new_group(
                beside,
                timeout=None if self.timeout is None else datetime.timedelta(seconds=self.timeout),
                use_local_synchronization=True,
                group_desc=f"{self.name}/{name}",
            )
            levels.append(Level(f"{self.name}/{name}", size, group.group_name))
        return tuple(levels)
