"""Seconds of exchanges on a hierarchical network with shared links.

A rank has a port to its node and a NIC to everything else, both in and out. The ranks of a larger unit (a switch, a
rack) share its links up and down. `Network.bandwidth` is a rank's share of them if all ranks send at once, so a group
has as many shares as it has ranks in the unit.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from ..platforms import Network, Platform


@dataclasses.dataclass(frozen=True)
class Fabric:
    """The links between n ranks of a group.

    Attributes:
        bandwidths: [L] bytes a second of each link.
        units: int64 [levels, n], the unit of each rank, fine to coarse. The last level has one unit.
        ports: int64 [levels, 2, n], the links out and in that a rank uses at each level.
    """

    bandwidths: Tensor
    units: Tensor
    ports: Tensor

    def compute_busiest_link_seconds(self, traffic: Tensor) -> Tensor:
        """Compute the seconds until the busiest link has carried its bytes, if all transfers run at the same time.

        Args:
            traffic: [..., n, n] bytes, senders first.
        """
        return self.compute_busiest_link_seconds_of_flows(*_pairs(traffic), traffic.flatten(-2))

    def compute_busiest_link_seconds_of_flows(self, sources: Tensor, targets: Tensor, flows: Tensor) -> Tensor:
        """Compute the seconds until the busiest link has carried `flows` [..., F] bytes from `sources` [F] to `targets`
        [F]."""
        loads = torch.zeros(*flows.shape[:-1], len(self.bandwidths) + 1, dtype=torch.float64)
        for path in self._paths(sources, targets):
            loads.index_add_(-1, path, flows.double())
        return (loads[..., :-1] / self.bandwidths).amax(-1)

    def simulate_fair_shares(self, traffic: Tensor) -> float:
        """Simulate an exchange whose flows share links fairly (max-min) at any moment. Returns its seconds.

        Never less than `compute_busiest_link_seconds`.

        Args:
            traffic: [n, n] bytes.
        """
        left, paths, seconds = traffic.flatten().double(), self._paths(*_pairs(traffic)), 0.0
        is_open = (left > 0) & (paths < len(self.bandwidths)).any(0)
        while is_open.any():
            left, paths = left[is_open], paths[:, is_open]
            rates = self._shares(paths)
            first = (left / rates).min()
            seconds, remaining = seconds + float(first), left - rates * first
            left, is_open = remaining, remaining > 1e-9 * left
        return seconds

    def _paths(self, sources: Tensor, targets: Tensor) -> Tensor:
        """Find the links on each path, int64 [2 * levels, F]; L if a level is not used."""
        level = (self.units[:, sources] != self.units[:, targets]).sum(0)  # 0: within a node
        none, links = torch.full_like(sources, len(self.bandwidths)), []
        for i, (out_ports, in_ports) in enumerate(self.ports):
            is_used = level >= i if i else (level == 0) & (sources != targets)
            links += [torch.where(is_used, out_ports[sources], none), torch.where(is_used, in_ports[targets], none)]
        return torch.stack(links)

    def _shares(self, paths: Tensor) -> Tensor:
        """Compute max-min fair rates by progressive filling: the link with the smallest share for each flow fills
        first."""
        rates = torch.zeros(paths.shape[1], dtype=torch.float64)
        free, is_open = self.bandwidths.clone(), torch.ones(paths.shape[1], dtype=torch.bool)
        while is_open.any():
            users = torch.bincount(paths[:, is_open].flatten(), minlength=len(free) + 1)[:-1]
            share = torch.where(users > 0, free / users, math.inf)
            min_share = share.min()
            is_full = torch.cat([share <= min_share * (1 + 1e-12), torch.tensor([False])])
            is_fixed = is_open & is_full[paths].any(0)
            rates[is_fixed] = min_share
            free -= min_share * torch.bincount(paths[:, is_fixed].flatten(), minlength=len(free) + 1)[:-1]
            is_open &= ~is_fixed
        return rates


def _pairs(traffic: Tensor) -> tuple[Tensor, Tensor]:
    ranks = torch.arange(traffic.shape[-1])
    return ranks.repeat_interleave(len(ranks)), ranks.repeat(len(ranks))


def build_fabric(platform: Platform, ranks: Sequence[int]) -> Fabric:
    """Build the links between `ranks`, which are numbered node by node."""
    at = torch.tensor(ranks)
    units = torch.stack([at // network.ranks if network.ranks else 0 * at for network in platform.networks])
    units[-1] = 0
    capacity, ports, begin = [], [], 0
    for i, network in enumerate(platform.networks):
        # a port and a NIC for each rank; at coarser levels the unit's shared links
        port = torch.unique(units[i - 1], return_inverse=True)[1] if i > 1 else torch.arange(len(at))
        bandwidths = torch.bincount(port).double() * network.bandwidth
        ports.append(torch.stack([begin + port, begin + len(bandwidths) + port]))
        capacity += [bandwidths, bandwidths]
        begin += 2 * len(bandwidths)
    return Fabric(torch.cat(capacity), units, torch.stack(ports))


def estimate_ring(platform: Platform, ranks: Sequence[int]) -> float:
    """Estimate the seconds per byte that a rank sends in a ring of `ranks` (an all-reduce, an all-gather).

    As in NCCL and RCCL, there are as many rings as a node has ranks of the group. Each ring has a part of the bytes and
    leaves the node by another rank's NIC.
    """
    if len(ranks) == 1:
        return 0.0
    links = build_fabric(platform, ranks)
    nodes: dict[int, list[int]] = {}
    for rank, node in enumerate(links.units[0].tolist()):
        nodes.setdefault(node, []).append(rank)
    number = min(map(len, nodes.values())) if len(nodes) > 1 else 1
    orders = [[rank for node in nodes.values() for rank in node[i:] + node[:i]] for i in range(number)]
    sources = torch.tensor(orders)
    flows = torch.full((sources.numel(),), 1 / number, dtype=torch.float32)
    return float(links.compute_busiest_link_seconds_of_flows(sources.flatten(), sources.roll(-1, 1).flatten(), flows))


def draw_slowdowns(network: Network, shape: Sequence[int], generator: torch.Generator) -> Tensor:
    """Draw the times of exchanges over their median (`Network.spread`)."""
    if not network.spread:
        return torch.ones(*shape, dtype=torch.float64)
    spread = torch.tensor(network.spread, dtype=torch.float64)
    return spread[torch.randint(len(spread), tuple(shape), generator=generator)]
