"""Order hosts for a launcher so that hosts that share experts are close to each other (Piper section V.C).

Schedulers assign hosts from several switch groups, often in an unrelated order.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from itertools import chain

from ...errors import InvalidPlan


@dataclasses.dataclass(frozen=True)
class HostOrder:
    """Hosts, group by group.

    Attributes:
        hosts: all hosts, each once.
        group: number of consecutive hosts that share experts.
        inside: for each level, fine to coarse, the number of groups that lie within one unit of the level but not
            within a finer unit. The last number counts groups that lie within no unit.
    """

    hosts: tuple[str, ...]
    group: int
    inside: tuple[int, ...]

    def __str__(self) -> str:
        return ",".join(self.hosts)


def order_hosts(hosts: Mapping[str, str | Sequence[str]], group: int) -> HostOrder:
    """Order hosts so that as many expert groups as possible lie within one switch group, then within one rack, ...

    Args:
        hosts: the units of each host, fine to coarse: `{"n17": ("switch3", "rack1")}`, or `{"n17": "switch3"}`.
        group: number of hosts that share experts: ranks of the expert axis / ranks of a host.

    Returns:
        The order; `str()` formats it for launchers. With this order the expert axis must be the last of the mesh
        (`Plan(placement="ep_first")`).

    Raises:
        InvalidPlan: the hosts do not form whole groups, or have different numbers of levels.
    """
    units_of = {host: (units,) if isinstance(units, str) else tuple(units) for host, units in hosts.items()}
    num_levels = {len(units) for units in units_of.values()}
    if len(num_levels) > 1:
        raise InvalidPlan(f"hosts have {min(num_levels)} to {max(num_levels)} levels; name the same number for each")
    if group < 1 or len(units_of) % group:
        raise InvalidPlan(f"{len(units_of)} hosts are not whole groups of {group}")
    ordered: list[str] = []
    inside: list[int] = []
    remaining = {
        units: [host for host in units_of if units_of[host] == units] for units in sorted(set(units_of.values()))
    }
    for _ in range(max(num_levels, default=0) + 1):
        num_whole = 0
        leftover: dict[tuple[str, ...], list[list[str]]] = {}
        for units, names_here in remaining.items():
            whole = len(names_here) // group
            ordered += names_here[: whole * group]
            num_whole += whole
            leftover.setdefault(units[1:], []).append(names_here[whole * group :])
        inside.append(num_whole)
        # Large parts first, so that a group spans few parts.
        remaining = {units: list(chain(*sorted(parts, key=len, reverse=True))) for units, parts in leftover.items()}
    return HostOrder(tuple(ordered), group, tuple(inside))
