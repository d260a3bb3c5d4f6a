"""Expert parallelism by even collectives: every rank gathers the tokens of all ranks, and returns their sums.

    destinations = place_choices(topk_ids)
    length = agree_length(destinations)                        the hosts agree; left out with Plan(max_tokens=...)
    sent   = gather_tokens([x], [topk_weights], destinations)  starts an all-gather
    rows, local_ids, weights = wait_gathered(sent)             ids outside of [0, experts_per_rank) are on other ranks
    pft    = build_pft(local_ids, weights)                     drops them
    y      = expert_mlp(rows, pft, own weights)                sums by token, for the tokens of all ranks
    back   = scatter_sums(y)                                   starts a reduce-scatter
    out    = wait_scattered(back)

See `ir.ops.token_gather`. If ranks read each other's memory (`ExchangeRoutes.pulls`), one step replaces each collective
and its wait (see `ir.ops.peer_rows`):

    rows, local_ids, weights = pull_tokens([x], [topk_weights], destinations)
    out    = pull_sums(y, local_ids, destinations)

The host reads no result of the routing.
"""

from __future__ import annotations

import torch
from torch import fx

from ...ir.expert_placement import ExchangeRoutes, Placement
from ...ir.node_values import get_argument
from .local_experts import ReceivedRows
from .routed_region import RoutedRegion

ops = torch.ops.moefx


class GatheredTokens:
    """The exchange of a routed region.

    Attributes:
        received: the gathered values.
    """

    def __init__(self, routed: RoutedRegion, placement: Placement, routes: ExchangeRoutes):
        self.routed, self.placement, self.routes = routed, placement, routes
        (level,) = routes.levels
        self.group_arguments = {"size": level.size, "group": level.group}
        self.axis = level.axis
        self.received = ReceivedRows({}, {})
        self.destinations: fx.Node | None = None
        self.local_ids: fx.Node | None = None
        self.token_letter = "S"

    def insert_gather(
        self, destinations: fx.Node, token_values: list[fx.Node], slot_values: list[fx.Node], fingerprint: int
    ) -> None:
        """Gather the tokens and slots of all ranks, and route them to the experts of this rank."""
        call, unpack, pft = self.routed.call, self.routed.unpack, self.routed.pft
        self.destinations, self.token_letter = destinations, str(destinations.meta["letters"][0])
        length = None
        if not self.routes.max_tokens:
            kwargs = {"fingerprint": fingerprint, "host_group": self.routes.host_group}
            length = call(ops.agree_length.default, (destinations,), kwargs, ("1",), axis=self.axis)
        insert = self._insert_pull if self.routes.pulls else self._insert_collective
        gather_node = insert(destinations, token_values, slot_values, length)
        gather_node.meta["save"] = True
        token_letters = tuple(("A", *t.meta.get("letters", ("S", "D"))[1:]) for t in token_values)
        letters = (*token_letters, ("A", "K"), *(("A", "K") for _ in slot_values))
        gathered = unpack(
            gather_node, letters, (*("rows" for _ in token_values), "local_ids", *("weights" for _ in slot_values))
        )
        self.local_ids = gathered.pop(len(token_values))
        values = dict(zip([*token_values, *slot_values], gathered, strict=True))
        weights = values[get_argument(pft, "topk_weights")] if self.routed.has_weights else None
        local_pft = call(
            ops.build_pft.default, (self.local_ids, weights, None), {"num_experts": self.placement.experts_per_rank}
        )
        results = unpack(local_pft, (("B",), ("B",), ("E+1",), ("A", "K"), ("B",)))
        self.received = ReceivedRows(values, {self.routed.results[i]: results[i] for i in self.routed.results})

    def _insert_collective(
        self, destinations: fx.Node, token_values: list[fx.Node], slot_values: list[fx.Node], length: fx.Node | None
    ) -> fx.Node:
        """Emit the start of an all-gather and the wait for it. Returns the wait."""
        call, num_token_values = self.routed.call, len(token_values)
        sizes = {"max_tokens": self.routes.max_tokens or 0, **self.group_arguments}
        sent = call(
            ops.gather_tokens.default,
            (token_values, slot_values, destinations, length),
            sizes,
            name="sent",
            axis=self.axis,
        )
        buffers = self.routed.unpack(sent, ((),) * (2 * num_token_values + 1 + len(slot_values)))
        arguments = buffers[: num_token_values + 1], buffers[num_token_values + 1 :], slot_values, destinations
        return call(
            ops.wait_gathered.default, arguments, {"first_place": self._first_destination, **self.group_arguments}
        )

    def _insert_pull(
        self, destinations: fx.Node, token_values: list[fx.Node], slot_values: list[fx.Node], length: fx.Node | None
    ) -> fx.Node:
        """Emit the step that reads the other ranks' memory."""
        sizes = {"max_tokens": self.routes.max_tokens or 0, "first_place": self._first_destination}
        arguments = token_values, slot_values, destinations, length
        kwargs = {**sizes, "experts_per_rank": self.placement.experts_per_rank, **self.group_arguments}
        return self.routed.call(ops.pull_tokens.default, arguments, kwargs, axis=self.axis)

    @property
    def _first_destination(self) -> int:
        """This rank's first destination."""
        return self.routes.position * self.placement.experts_per_rank

    def keep_rows_in_stash(self) -> None:
        """Let the experts keep activations in the stash, if the routes have one."""
        stash_layers, pft = self.routes.stash_layers, self.routed.pft
        if stash_layers is None:
            return
        top_k = get_argument(pft, "topk_ids").meta["val"].shape[-1]
        rows_per_token = top_k * self.placement.experts_per_rank / self.placement.num_experts
        for node in self.routed.region:
            if node.target is not ops.expert_mlp.default or node.kwargs.get("keep", "h") not in ("h", "all"):
                continue
            if stash_layers:
                node.update_kwarg("stash_rows", stash_layers * rows_per_token)
            else:  # no room: keep the inputs only
                node.update_kwarg("keep", "x")

    def insert_return(self, sums: fx.Node) -> fx.Node:
        """Return the sums of all ranks' tokens to the ranks of the tokens."""
        call, unpack, letters = self.routed.call, self.routed.unpack, (self.token_letter, "D")
        if self.routes.pulls:
            kwargs = {"experts_per_rank": self.placement.experts_per_rank, **self.group_arguments}
            return call(
                ops.pull_sums.default, (sums, self.local_ids, self.destinations), kwargs, letters, axis=self.axis
            )
        back = call(ops.scatter_sums.default, (sums,), self.group_arguments, name="back", axis=self.axis)
        sent, ticket = unpack(back, ((), ()))
        return call(ops.wait_scattered.default, (sent, ticket, self.destinations), self.group_arguments, letters)


__all__ = ["GatheredTokens"]
