"""Expert parallelism by even collectives: every rank gathers the tokens of all ranks, and returns their sums.

    place  = place_choices(topk_ids)                     rank and place of each slot
    length = agree_length(place)                         the hosts agree; left out with Plan(max_tokens=...)
    sent   = gather_tokens([x], [topk_weights], place)   starts an all-gather
    rows, slots, weights = wait_gathered(sent)           slots of other ranks fall outside of [0, num_slots)
    pft    = build_pft(slots, weights)                   drops them
    y      = expert_mlp(rows, pft, own weights)          sums by token, for the tokens of all ranks
    back   = scatter_sums(y)                             starts a reduce-scatter
    out    = wait_scattered(back)

See `ir.ops.token_gather`. If ranks read each other's memory (`ExchangeRoutes.pulls`), one step each replaces the
collectives and their waits (see `ir.ops.peer_rows`):

    rows, slots, weights = pull_tokens([x], [topk_weights], place)
    out    = pull_sums(y, slots, place)

The host reads nothing that the routing decides.
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
        self.to = {"size": level.size, "group": level.group}
        self.axis = level.axis
        self.received = ReceivedRows({}, {})
        self.place: fx.Node | None = None
        self.slots: fx.Node | None = None
        self.letter = "S"

    def insert_gather(self, place: fx.Node, tokens: list[fx.Node], choices: list[fx.Node], fingerprint: int) -> None:
        """Gather tokens and choices of all ranks, and route them to the experts of this rank."""
        call, parts, pft = self.routed.call, self.routed.unpack, self.routed.pft
        self.place, self.letter = place, str(place.meta["letters"][0])
        length = None
        if not self.routes.max_tokens:
            agreed = {"fingerprint": fingerprint, "host_group": self.routes.host_group}
            length = call(ops.agree_length.default, (place,), agreed, ("1",), axis=self.axis)
        insert = self._insert_pull if self.routes.pulls else self._insert_collective
        gather_node = insert(place, tokens, choices, length)
        gather_node.meta["save"] = True
        of_tokens = tuple(("A", *t.meta.get("letters", ("S", "D"))[1:]) for t in tokens)
        letters = (*of_tokens, ("A", "K"), *(("A", "K") for _ in choices))
        gathered = parts(gather_node, letters, (*("rows" for _ in tokens), "slots", *("weights" for _ in choices)))
        self.slots = gathered.pop(len(tokens))
        values = dict(zip([*tokens, *choices], gathered, strict=True))
        weights = values[get_argument(pft, "topk_weights")] if self.routed.has_weights else None
        local_pft = call(
            ops.build_pft.default, (self.slots, weights, None), {"num_experts": self.placement.experts_per_rank}
        )
        results = parts(local_pft, (("B",), ("B",), ("E+1",), ("A", "K"), ("B",)))
        self.received = ReceivedRows(values, {self.routed.results[i]: results[i] for i in self.routed.results})

    def _insert_collective(
        self, place: fx.Node, tokens: list[fx.Node], choices: list[fx.Node], length: fx.Node | None
    ) -> fx.Node:
        """Emit the start of an all-gather and the wait for it. Returns the wait."""
        call, num = self.routed.call, len(tokens)
        sizes = {"max_tokens": self.routes.max_tokens or 0, **self.to}
        sent = call(ops.gather_tokens.default, (tokens, choices, place, length), sizes, name="sent", axis=self.axis)
        buffers = self.routed.unpack(sent, ((),) * (2 * num + 1 + len(choices)))
        arguments = buffers[: num + 1], buffers[num + 1 :], choices, place
        return call(ops.wait_gathered.default, arguments, {"first_place": self._first_place, **self.to})

    def _insert_pull(
        self, place: fx.Node, tokens: list[fx.Node], choices: list[fx.Node], length: fx.Node | None
    ) -> fx.Node:
        """Emit the step that reads the other ranks' memory."""
        sizes = {"max_tokens": self.routes.max_tokens or 0, "first_place": self._first_place}
        arguments = tokens, choices, place, length
        kwargs = {**sizes, "experts_per_rank": self.placement.experts_per_rank, **self.to}
        return self.routed.call(ops.pull_tokens.default, arguments, kwargs, axis=self.axis)

    @property
    def _first_place(self) -> int:
        """This rank's first destination."""
        return self.routes.position * self.placement.experts_per_rank

    def keep_rows_in_stash(self) -> None:
        """Let the experts keep activations in the stash, if the routes have one."""
        stash_layers, pft = self.routes.stash_layers, self.routed.pft
        if stash_layers is None:
            return
        num_slots = get_argument(pft, "topk_ids").meta["val"].shape[-1]
        # Rows for each gathered token.
        balanced = num_slots * self.placement.experts_per_rank / self.placement.num_experts
        for node in self.routed.region:
            if node.target is not ops.expert_mlp.default or node.kwargs.get("keep", "h") not in ("h", "all"):
                continue
            if stash_layers:
                node.update_kwarg("stash_rows", stash_layers * balanced)
            else:  # no room at all: keep the inputs only
                node.update_kwarg("keep", "x")

    def insert_back(self, sums: fx.Node) -> fx.Node:
        """Return the sums of all ranks' tokens to the ranks of the tokens."""
        call, parts, letters = self.routed.call, self.routed.unpack, (self.letter, "D")
        if self.routes.pulls:
            kwargs = {"experts_per_rank": self.placement.experts_per_rank, **self.to}
            return call(ops.pull_sums.default, (sums, self.slots, self.place), kwargs, letters, axis=self.axis)
        back = call(ops.scatter_sums.default, (sums,), self.to, name="back", axis=self.axis)
        sent, ticket = parts(back, ((), ()))
        return call(ops.wait_scattered.default, (sent, ticket, self.place), self.to, letters)


__all__ = ["GatheredTokens"]
