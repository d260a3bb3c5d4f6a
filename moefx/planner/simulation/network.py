"""Seconds of exchanges on a hierarchical network, whose links are shared by those that use them at once.

A rank has a port in and a port out to its node, and a NIC, in and out, to everything else. Beyond that the ranks of a
unit (a switch, a rack) share its links up and down: `Network.bandwidth` is what leaves a rank if all send at once, so
that a group has as much of them as it has ranks there, all other groups doing alike at the same time.
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
        capacity: [L] bytes a second of each link.
        paths: int64 [H, n * n], links that bytes from one rank to another pass; L: none.
    """

    capacity: Tensor
    paths: Tensor

    def busiest(self, traffic: Tensor) -> Tensor:
        """Seconds until the busiest link has carried its bytes, all flows going on side by side.

        Args:
            traffic: [..., n, n] bytes, senders first.
        """
        flows = traffic.flatten(-2).double()
        loads = torch.zeros(*flows.shape[:-1], len(self.capacity) + 1, dtype=torch.float64)
        for path in self.paths:
            loads.index_add_(-1, path, flows)
        return (loads[..., :-1] / self.capacity).amax(-1)

    def fair(self, traffic: Tensor) -> float:
        """The same where at any moment flows share links fairly (max-min): never less than `busiest`, and an event for
        each flow.

        Args:
            traffic: [n, n] bytes.
        """
        left = traffic.flatten().double()
        flows = ((left > 0) & (self.paths < len(self.capacity)).any(0)).nonzero()[:, 0]
        left, paths, seconds = left[flows], self.paths[:, flows], 0.0
        while len(left):
            rates = self._shares(paths)
            first = (left / rates).min()
            seconds, after = seconds + float(first), left - rates * first
            going = after > 1e-9 * left
            left, paths = after[going], paths[:, going]
        return seconds

    def _shares(self, paths: Tensor) -> Tensor:
        """Max-min fair rates by progressive filling: the link with the least for each of its flows fills first."""
        rates = torch.zeros(paths.shape[1], dtype=torch.float64)
        spare, open_ = self.capacity.clone(), torch.ones(paths.shape[1], dtype=torch.bool)
        while open_.any():
            users = torch.bincount(paths[:, open_].flatten(), minlength=len(spare) + 1)[:-1]
            share = torch.where(users > 0, spare / users, math.inf)
            least = share.min()
            is_full = torch.cat([share <= least * (1 + 1e-12), torch.tensor([False])])
            fixed = open_ & is_full[paths].any(0)
            rates[fixed] = least
            spare -= least * torch.bincount(paths[:, fixed].flatten(), minlength=len(spare) + 1)[:-1]
            open_ &= ~fixed
        return rates


def fabric(platform: Platform, ranks: Sequence[int]) -> Fabric:
    """The links between those ranks, which are numbered node by node."""
    n, at = len(ranks), torch.tensor(ranks)
    units = [at // network.ranks if network.ranks else torch.zeros_like(at) for network in platform.networks]
    units[-1] = torch.zeros_like(at)
    level = torch.stack([unit[:, None] != unit[None, :] for unit in units]).sum(0).flatten()  # 0: within a node
    out, into = torch.arange(n).repeat_interleave(n), torch.arange(n).repeat(n)
    is_other = out != into
    capacity: list[Tensor] = []
    paths: list[tuple[Tensor, Tensor]] = []  # link, and whether it is used

    def add(ports: Tensor, bandwidth: Tensor, used: Tensor) -> None:
        begin = sum(map(len, capacity))
        for side in (out, into):
            paths.append((begin + ports[side], used))
            begin += len(bandwidth)
            capacity.append(bandwidth)

    for i, network in enumerate(platform.networks):
        each = torch.full((n,), network.bandwidth, dtype=torch.float64)
        if i == 0:
            add(torch.arange(n), each, is_other & (level == 0))
        elif i == 1:
            add(torch.arange(n), each, level >= 1)
        else:
            _, ports = torch.unique(units[i - 1], return_inverse=True)
            add(ports, torch.bincount(ports) * network.bandwidth, level >= i)
    every = torch.cat(capacity)
    return Fabric(every, torch.stack([torch.where(used, link, len(every)) for link, used in paths]))


def ring(platform: Platform, ranks: Sequence[int]) -> float:
    """Seconds for each byte that a rank sends in a ring of them (an all-reduce, an all-gather).

    There are as many rings as a node has ranks of the group, each with a part of the bytes, and each leaves the node by
    the NIC of another rank, as NCCL and RCCL lay them.
    """
    if len(ranks) == 1:
        return 0.0
    size = platform.networks[0].ranks or 1
    nodes: dict[int, list[int]] = {}
    for place, rank in enumerate(ranks):
        nodes.setdefault(rank // size, []).append(place)
    num_rings = min(map(len, nodes.values()))
    traffic = torch.zeros(len(ranks), len(ranks), dtype=torch.float64)
    for i in range(num_rings):
        order = torch.tensor([place for node in nodes.values() for place in node[i:] + node[:i]])
        traffic[order, order.roll(-1)] += 1 / num_rings
    return float(fabric(platform, ranks).busiest(traffic))


def slowed(network: Network, shape: Sequence[int], generator: torch.Generator) -> Tensor:
    """Of exchanges over that network, how much longer than the median each takes (`Network.spread`)."""
    if not network.spread:
        return torch.ones(*shape, dtype=torch.float64)
    spread = torch.tensor(network.spread, dtype=torch.float64)
    at = torch.rand(*shape, dtype=torch.float64, generator=generator) * (len(spread) - 1)
    below = at.long().clamp(max=max(len(spread) - 2, 0))
    return torch.lerp(spread[below], spread[(below + 1).clamp(max=len(spread) - 1)], at - below)
