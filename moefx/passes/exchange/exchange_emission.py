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
        place: destinations of the slots, modulo those of all ranks of the hop. num_slots: destinations of one rank.
        label: suffix of its nodes' names.
        tokens, choices: the values that it sends. packed: the rows, if packed before the host knows their number.
        splits: numbers of rows, once they are emitted. sent: the rows in transit, and the ticket.
    """

    level: TopologyLevel
    place: fx.Node
    num_slots: int
    label: str
    plan: SendPlan
    tokens: list[fx.Node] = dataclasses.field(default_factory=list)
    choices: list[fx.Node] = dataclasses.field(default_factory=list)
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
        self._call, self._parts = routed.call, routed.unpack
        self.hops: list[Hop] = []  # level by level
        self.near: Hop | None = None
        self.received = ReceivedRows({}, {})

    def insert_plans(self, place: fx.Node) -> None:
        """Emit the plans of the exchanges that start with this rank's own tokens."""
        routes, near = self.routes, None
        if routes.splits_intra_node:
            kwargs = {"num_places": routes.sizes[-1] * self.placement.experts_per_rank}
            begin = routes.position // routes.sizes[-1] * kwargs["num_places"]
            parted = self._call(ops.near_and_far.default, (place,), {"begin": begin, **kwargs})
            near, place = self._parts(parted, (("S", "K"), ("S", "K")), ("near", "far"))
        self.hops.append(self._plan(0, place, routes.label(0)))
        if near is not None:
            self.near = self._plan(len(routes.levels) - 1, near, "near")

    def insert_packs(self, tokens: list[fx.Node], choices: list[fx.Node]) -> None:
        """Emit the packed rows for the same exchanges."""
        for hop in filter(None, (self.hops[0], self.near)):
            kwargs = {"num_slots": hop.num_slots, "dedup": self.routes.dedup}
            plan = hop.plan
            args = (tokens, choices, hop.place, plan.token_ids, plan.slot_ids, plan.rank_offsets)
            name = add_label("packed", hop.label)
            hop.packed = self._call(ops.pack_rows.default, args, kwargs, ("N", "bytes"), name)

    def insert_rows(self, tokens: list[fx.Node], choices: list[fx.Node], splits: Iterator[fx.Node]) -> None:
        """Emit the exchange, and a `build_pft` of the received rows."""
        routes, weights = self.routes, get_argument(self.pft, "topk_weights")
        splits_by_level = [next(splits) for _ in routes.levels]
        hop_tokens, hop_choices = tokens, choices
        for index, level_splits in enumerate(splits_by_level):
            self._start(self.hops[index], hop_tokens, hop_choices, level_splits)
            if self.near is not None and not index:  # the exchange between nodes takes longest and starts first
                self._start(self.near, tokens, choices, next(splits))
            if index + 1 < len(splits_by_level):
                hop_tokens, place, hop_choices = self._wait([self.hops[index]], ("pilots", "places", "pilot_weights"))
                self.hops.append(self._plan(index + 1, place, routes.label(index + 1)))
        arrived, local, scales = self._wait(self._last_hops(), ("rows", "slots", "weights"))
        values = dict(zip([*tokens, *choices], [*arrived, *scales], strict=True))
        own_weights = values[weights] if self.routed.has_weights else None
        kwargs = {"num_experts": self.placement.experts_per_rank, "num_rows": next(splits)}
        here = self._call(ops.build_pft.default, (local, own_weights, None), kwargs)
        parts = self._parts(here, (("B",), ("B",), ("E+1",), ("R", "J"), ("B",)))
        self.received = ReceivedRows(values, {self.results[i]: parts[i] for i in self.results})

    # ------------------------------------------------------------------ hops
    def _plan(self, index: int, place: fx.Node, label: str) -> Hop:
        """Emit the plan of the hop at one level."""
        level = self.routes.levels[index]
        num_slots = self.routes.ranks_within(index) * self.placement.experts_per_rank
        kwargs = {"num_ranks": level.size, "num_slots": num_slots, "dedup": self.routes.dedup}
        send = self._call(ops.plan_dispatch.default, (place,), kwargs, name=add_label("send", label))
        plan = self._parts(send, (("B",), ("B",), ("W+1",), place.meta["letters"]))
        return Hop(level, place, num_slots, label, SendPlan(*plan))

    def _start(self, hop: Hop, tokens: list[fx.Node], choices: list[fx.Node], splits: fx.Node) -> None:
        """Emit the start of a hop."""
        hop.tokens, hop.choices, hop.splits = tokens, choices, splits
        sent = self._call(
            ops.all_to_all_rows.default,
            (tokens, choices, hop.place, hop.packed, *hop.plan, splits),
            {"num_slots": hop.num_slots, "dedup": self.routes.dedup, "group": hop.level.group},
            name=add_label("sent", hop.label),
            axis=hop.level.axis,
        )
        hop.sent = self._parts(sent, ((), ()))

    def _wait(self, hops: list[Hop], names: tuple[str, str, str]) -> tuple[list[fx.Node], fx.Node, list[fx.Node]]:
        """Emit a wait. Return received values of tokens, destinations, and values of slots."""
        first = hops[0]
        node = self._call(
            ops.wait_rows.default,
            (
                [h.sent[0] for h in hops],
                [h.ticket for h in hops],
                [h.splits for h in hops],
                first.tokens,
                first.choices,
                first.place,
            ),
            {"num_slots": first.num_slots, "dedup": self.routes.dedup, "groups": [h.level.group for h in hops]},
        )
        node.meta["save"] = True
        letters = [("R", *t.meta.get("letters", ("S", "D"))[1:]) for t in first.tokens]
        all_names = (*(names[0] for _ in first.tokens), names[1], *(names[2] for _ in first.choices))
        arrived = self._parts(node, (*letters, ("R", "J"), *(("R", "J") for _ in first.choices)), all_names)
        num = len(first.tokens)
        return arrived[:num], arrived[num], arrived[num + 1 :]

    def _last_hops(self) -> list[Hop]:
        return [self.hops[-1], self.near] if self.near else [self.hops[-1]]

    def insert_back(self, rows: fx.Node) -> fx.Node:
        """Emit the return of the received rows' sums, and their sum by token."""
        *hops, last = self.hops
        in_transit = self._back(rows, self._last_hops())
        out = self._sums(in_transit[0], last)
        for hop in reversed(hops):
            (sent,) = self._back(out, [hop])
            if self.near and hop is hops[0]:
                near = self._sums(in_transit[1], self.near)
                return self._call(aten.add.Tensor, (near, self._sums(sent, hop)), {}, ("S", "D"), "out")
            out = self._sums(sent, hop)
        return out

    def _back(self, rows: fx.Node, hops: list[Hop]) -> list[tuple[fx.Node, fx.Node]]:
        node = self._call(
            ops.all_to_all_back.default,
            (rows, [h.splits for h in hops], [h.ticket for h in hops]),
            {"groups": [h.level.group for h in hops]},
            name=add_label("back", hops[0].label),
            axis=hops[0].level.axis,
        )
        parts = self._parts(node, ((),) * 2 * len(hops))
        return list(zip(parts[: len(hops)], parts[len(hops) :], strict=True))

    def _sums(self, sent: tuple[fx.Node, fx.Node], hop: Hop) -> fx.Node:
        rows = hop.plan.inverse.meta["letters"][0]
        kwargs = {"group": hop.level.group}
        name = add_label("sums", hop.label) if hop.label else ""
        return self._call(ops.wait_sums.default, (*sent, *hop.plan, hop.splits), kwargs, (rows, "D"), name)


def add_label(name: str, label: str) -> str:
    return f"{name}_{label}" if label else name
