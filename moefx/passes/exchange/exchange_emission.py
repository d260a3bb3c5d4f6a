"""Emit the exchange of a routed region among ranks, hop by hop. `collectives` describes it.

`UnevenExchange` emits the plans, the rows that travel to their experts, and the sums that return.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import fx

from ...ir.expert_placement import ExchangeRoutes, Placement, TopologyLevel
from ...ir.node_values import get_argument
from .local_experts import ReceivedRows
from .routed_region import RoutedRegion

aten = torch.ops.aten
ops = torch.ops.moefx


class SendPlan(NamedTuple):
    """The index arrays of the rows that a rank sends in a hop: the results of `plan_dispatch`."""

    token_ids: fx.Node
    slot_ids: fx.Node
    rank_offsets: fx.Node
    inverse: fx.Node


@dataclasses.dataclass
class Hop:
    """An exchange among the ranks that differ at one level.

    Attributes:
        destinations: of the slots, modulo those of all ranks of the hop.
        destinations_per_rank: behind one rank of the hop.
        label: suffix of its nodes' names.
        token_values, slot_values: the values that it sends.
        packed: the rows, if packed before the host knows their number.
        splits: numbers of rows. sent: the rows in transit, and the ticket.
    """

    level: TopologyLevel
    destinations: fx.Node
    destinations_per_rank: int
    label: str
    plan: SendPlan
    token_values: list[fx.Node] = dataclasses.field(default_factory=list)
    slot_values: list[fx.Node] = dataclasses.field(default_factory=list)
    packed: fx.Node | None = None
    splits: fx.Node | None = None
    sent: list[fx.Node] = dataclasses.field(default_factory=list)

    @property
    def ticket(self) -> fx.Node:
        return self.sent[1]


class UnevenExchange:
    """The exchange of a routed region, or of one chunk of its tokens, in both directions."""

    def __init__(self, routed: RoutedRegion, placement: Placement, routes: ExchangeRoutes):
        self.routed, self.placement, self.routes = routed, placement, routes
        self.pft, self.results = routed.pft, routed.results
        self._call, self._unpack = routed.call, routed.unpack
        self.hops: list[Hop] = []  # level by level
        self.intra_node: Hop | None = None
        self.received = ReceivedRows({}, {})

    def insert_plans(self, destinations: fx.Node) -> None:
        """Emit the plans of the first hop, and of the exchange in the node, for this rank's own tokens."""
        routes, intra_node = self.routes, None
        if routes.splits_intra_node:
            kwargs = {"num_places": routes.sizes[-1] * self.placement.experts_per_rank}
            begin = routes.position // routes.sizes[-1] * kwargs["num_places"]
            split_node = self._call(ops.near_and_far.default, (destinations,), {"begin": begin, **kwargs})
            intra_node, destinations = self._unpack(split_node, (("S", "K"), ("S", "K")), ("near", "far"))
        self.hops.append(self._plan(0, destinations, routes.label(0)))
        if intra_node is not None:
            self.intra_node = self._plan(len(routes.levels) - 1, intra_node, "near")

    def insert_packs(self, token_values: list[fx.Node], slot_values: list[fx.Node]) -> None:
        """Emit the packed rows for the same exchanges."""
        for hop in filter(None, (self.hops[0], self.intra_node)):
            kwargs = {"num_slots": hop.destinations_per_rank, "dedup": self.routes.dedup}
            plan = hop.plan
            args = (token_values, slot_values, hop.destinations, plan.token_ids, plan.slot_ids, plan.rank_offsets)
            name = add_label("packed", hop.label)
            hop.packed = self._call(ops.pack_rows.default, args, kwargs, ("N", "bytes"), name)

    def insert_rows(self, token_values: list[fx.Node], slot_values: list[fx.Node], splits: Iterator[fx.Node]) -> None:
        """Emit the exchange, and a `build_pft` of the received rows."""
        routes, weights = self.routes, get_argument(self.pft, "topk_weights")
        splits_by_level = [next(splits) for _ in routes.levels]
        hop_token_values, hop_slot_values = token_values, slot_values
        for index, level_splits in enumerate(splits_by_level):
            self._start(self.hops[index], hop_token_values, hop_slot_values, level_splits)
            if self.intra_node is not None and not index:  # the exchange between nodes takes longest and starts first
                self._start(self.intra_node, token_values, slot_values, next(splits))
            if index + 1 < len(splits_by_level):
                hop_token_values, destinations, hop_slot_values = self._wait(
                    [self.hops[index]], ("pilots", "pilot_destinations", "pilot_weights")
                )
                self.hops.append(self._plan(index + 1, destinations, routes.label(index + 1)))
        received_token_values, local_ids, received_slot_values = self._wait(
            self._last_hops(), ("rows", "local_ids", "weights")
        )
        values = dict(zip([*token_values, *slot_values], [*received_token_values, *received_slot_values], strict=True))
        own_weights = values[weights] if self.routed.has_weights else None
        kwargs = {"num_experts": self.placement.experts_per_rank, "num_rows": next(splits)}
        local_pft = self._call(ops.build_pft.default, (local_ids, own_weights, None), kwargs)
        parts = self._unpack(local_pft, (("B",), ("B",), ("E+1",), ("R", "J"), ("B",)))
        self.received = ReceivedRows(values, {self.results[i]: parts[i] for i in self.results})

    # ------------------------------------------------------------------ hops
    def _plan(self, index: int, destinations: fx.Node, label: str) -> Hop:
        """Emit the plan of the hop at one level."""
        level = self.routes.levels[index]
        destinations_per_rank = self.routes.ranks_within(index) * self.placement.experts_per_rank
        kwargs = {"num_ranks": level.size, "num_slots": destinations_per_rank, "dedup": self.routes.dedup}
        send = self._call(ops.plan_dispatch.default, (destinations,), kwargs, name=add_label("send", label))
        plan = self._unpack(send, (("B",), ("B",), ("W+1",), destinations.meta["letters"]))
        return Hop(level, destinations, destinations_per_rank, label, SendPlan(*plan))

    def _start(self, hop: Hop, token_values: list[fx.Node], slot_values: list[fx.Node], splits: fx.Node) -> None:
        """Emit the start of a hop."""
        hop.token_values, hop.slot_values, hop.splits = token_values, slot_values, splits
        sent = self._call(
            ops.all_to_all_rows.default,
            (token_values, slot_values, hop.destinations, hop.packed, *hop.plan, splits),
            {"num_slots": hop.destinations_per_rank, "dedup": self.routes.dedup, "group": hop.level.group},
            name=add_label("sent", hop.label),
            axis=hop.level.axis,
        )
        hop.sent = self._unpack(sent, ((), ()))

    def _wait(self, hops: list[Hop], names: tuple[str, str, str]) -> tuple[list[fx.Node], fx.Node, list[fx.Node]]:
        """Emit a wait. Return the received values of tokens, destinations (local ids after the last hop), and values of
        slots."""
        first_hop = hops[0]
        node = self._call(
            ops.wait_rows.default,
            (
                [hop.sent[0] for hop in hops],
                [hop.ticket for hop in hops],
                [hop.splits for hop in hops],
                first_hop.token_values,
                first_hop.slot_values,
                first_hop.destinations,
            ),
            {
                "num_slots": first_hop.destinations_per_rank,
                "dedup": self.routes.dedup,
                "groups": [hop.level.group for hop in hops],
            },
        )
        node.meta["save"] = True
        letters = [("R", *t.meta.get("letters", ("S", "D"))[1:]) for t in first_hop.token_values]
        all_names = (*(names[0] for _ in first_hop.token_values), names[1], *(names[2] for _ in first_hop.slot_values))
        received = self._unpack(node, (*letters, ("R", "J"), *(("R", "J") for _ in first_hop.slot_values)), all_names)
        num_token_values = len(first_hop.token_values)
        return received[:num_token_values], received[num_token_values], received[num_token_values + 1 :]

    def _last_hops(self) -> list[Hop]:
        return [self.hops[-1], self.intra_node] if self.intra_node else [self.hops[-1]]

    def insert_return(self, rows: fx.Node) -> fx.Node:
        """Emit the return of the received rows' sums, and their sum by token."""
        *hops, last = self.hops
        in_transit = self._start_return(rows, self._last_hops())
        out = self._wait_for_sums(in_transit[0], last)
        for hop in reversed(hops):
            (sent,) = self._start_return(out, [hop])
            if self.intra_node and hop is hops[0]:
                intra_node = self._wait_for_sums(in_transit[1], self.intra_node)
                return self._call(aten.add.Tensor, (intra_node, self._wait_for_sums(sent, hop)), {}, ("S", "D"), "out")
            out = self._wait_for_sums(sent, hop)
        return out

    def _start_return(self, rows: fx.Node, hops: list[Hop]) -> list[tuple[fx.Node, fx.Node]]:
        node = self._call(
            ops.all_to_all_back.default,
            (rows, [h.splits for h in hops], [h.ticket for h in hops]),
            {"groups": [h.level.group for h in hops]},
            name=add_label("back", hops[0].label),
            axis=hops[0].level.axis,
        )
        parts = self._unpack(node, ((),) * 2 * len(hops))
        return list(zip(parts[: len(hops)], parts[len(hops) :], strict=True))

    def _wait_for_sums(self, sent: tuple[fx.Node, fx.Node], hop: Hop) -> fx.Node:
        rows = hop.plan.inverse.meta["letters"][0]
        kwargs = {"group": hop.level.group}
        name = add_label("sums", hop.label) if hop.label else ""
        return self._call(ops.wait_sums.default, (*sent, *hop.plan, hop.splits), kwargs, (rows, "D"), name)


def add_label(name: str, label: str) -> str:
    return f"{name}_{label}" if label else name
