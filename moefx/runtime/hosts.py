"""In which order to name hosts to a launcher, so that those that share experts are near each other (Piper section V.C).

Schedulers give out hosts of several switch groups, seldom in an order that follows them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from itertools import chain

from ..errors import InvalidPlan


@dataclasses.dataclass(frozen=True)
class HostOrder:
    """Hosts, group by group.

    Attributes:
        hosts: all of them, each once. group: how many share experts: the first so many, the next, and so on.
        inside: how many groups lie within one unit of each level, fine to coarse, that do not in a finer one; at last,
            how many lie within none.
    """

    hosts: tuple[str, ...]
    group: int
    inside: tuple[int, ...]

    def __str__(self) -> str:
        return ",".join(self.hosts)


def order_hosts(hosts: Mapping[str, str | Sequence[str]], group: int) -> HostOrder:
    """A host list with as many expert groups as there can be in one switch group each, of the others as many as there
    can be in one rack, and so on.

    Args:
        hosts: where each host is, fine to coarse: `{"n17": ("switch3", "rack1"), ...}`, or `{"n17": "switch3", ...}`.
        group: hosts that share experts: ranks of the expert axis / ranks of a host.

    Returns:
        The order; `str` of it is what launchers take. Numbered so, the expert axis is the last one of the mesh
        (`Plan(placement="ep_first")`).

    Raises:
        InvalidPlan: the hosts are not whole groups, or are told of with unlike numbers of levels.
    """
    places = {host: (place,) if isinstance(place, str) else tuple(place) for host, place in hosts.items()}
    depths = {len(place) for place in places.values()}
    if len(depths) > 1:
        raise InvalidPlan(f"hosts are in {min(depths)} to {max(depths)} units; say as many of each")
    if group < 1 or len(places) % group:
        raise InvalidPlan(f"{len(places)} hosts are not whole groups of {group}")
    ordered: list[str] = []
    inside: list[int] = []
    left = {place: [host for host in places if places[host] == place] for place in sorted(set(places.values()))}
    for _ in range(max(depths, default=0) + 1):
        found = 0
        rest: dict[tuple[str, ...], list[list[str]]] = {}
        for place, these in left.items():
            whole = len(these) // group
            ordered += these[: whole * group]
            found += whole
            rest.setdefault(place[1:], []).append(these[whole * group :])
        inside.append(found)
        # Large parts first: a group is of few of them.
        left = {place: list(chain(*sorted(parts, key=len, reverse=True))) for place, parts in rest.items()}
    return HostOrder(tuple(ordered), group, tuple(inside))
