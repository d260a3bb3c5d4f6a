"""Sequence-sharded MoE blocks (X-MoE section 4.3): of ranks that hold the same tokens, each routes one shard.

    topk_ids, topk_w, x = shard_tokens(...)          this rank's shard of the tokens
    ...                                              routed and exchanged like the tokens of any rank
    out = unshard_tokens(sums)                       the sums of all shards

Router, norms and shared experts still run on all tokens on each rank. Their gradients are equal on all ranks, since the
gradients of the shards are gathered. Only the routed region, with its K rows for each token, is sharded.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from ..ir.expert_placement import SharedTokens
from ..ir.graphs.block_graph import BlockGraph
from ..ir.graphs.graph_levels import eliminate_dead_code
from ..ir.node_values import get_argument, set_argument
from .exchange.routed_region import RoutedRegion
from .pass_manager import graph_pass

aten = torch.ops.aten
ops = torch.ops.moefx


@graph_pass(level="distributed", name="ssmb")
def shard_sequence(block: BlockGraph, plan: Any, *, sequence: SharedTokens) -> BlockGraph:
    """Shard the tokens at the entry of the routed region, and gather its sums."""
    block = block.copy()
    routed = RoutedRegion.of(block)
    _Sharding(routed, sequence).insert()
    return eliminate_dead_code(block)


class _Sharding:
    """Inserts `shard_tokens` at the inputs of a routed region, and `unshard_tokens` at its sums."""

    def __init__(self, routed: RoutedRegion, sequence: SharedTokens):
        self.routed, self.sequence = routed, sequence
        self.kwargs = {"rank": sequence.rank, "size": sequence.size, "group": sequence.group}
        self.shards: dict[fx.Node, fx.Node] = {}

    def insert(self) -> None:
        routed, pft, graph = self.routed, self.routed.pft, self.routed.graph
        names = {"topk_ids": "own_ids", "topk_weights": "own_w", "keep": "own_keep"}
        with graph.inserting_before(pft):
            num_tokens = self.routed.call(aten.sym_size.int, (get_argument(pft, "topk_ids"), 0), {}, "S")
            if pft.kwargs.get("capacity") is not None:  # it holds for all tokens together
                full_pft = graph.node_copy(pft)
                inverse = routed.unpack(full_pft, pft.meta["letters"])[3]
                set_argument(pft, "keep", routed.call(aten.ge.Scalar, (inverse, 0), {}, ("S", "K")))
                pft.kwargs = {"num_experts": pft.kwargs["num_experts"]}
            for argument, name in names.items():
                set_argument(pft, argument, self._shard(get_argument(pft, argument), name))
        with graph.inserting_before(routed.region[0]):
            for node in (*routed.token_gathers, *routed.slot_gathers):
                routed.set_source(node, self._shard(routed.get_source(node), "own_x"))
        for node in routed.sums:
            users = list(node.users)
            with graph.inserting_before(node.next):
                kwargs = {"num_tokens": num_tokens, **self.kwargs, "gradients": self.sequence.gradients}
                out = routed.call(ops.unshard_tokens.default, (node,), kwargs, ("S", "D"), "out", self.sequence.axis)
            for user in users:
                user.replace_input_with(node, out)
        for node in (pft, *routed.results.values(), *routed.region):
            _mark_as_shard(node)

    def _shard(self, node: fx.Node | None, name: str) -> fx.Node | None:
        if node is None or node in self.shards:
            return node if node is None else self.shards[node]
        letters = ("s", *node.meta.get("letters", ("S", "D"))[1:])
        self.shards[node] = self.routed.call(
            ops.shard_tokens.default, (node,), self.kwargs, letters, name, self.sequence.axis
        )
        return self.shards[node]


def _mark_as_shard(node: fx.Node) -> None:
    """Drop the value of a node, and rename letter S of its shape to s."""
    node.meta.pop("val", None)
    letters = node.meta.get("letters")
    if isinstance(letters, tuple):
        node.meta["letters"] = tuple(_rename(a) for a in letters)


def _rename(letters: Any) -> Any:
    if isinstance(letters, tuple):
        return tuple(map(_rename, letters))
    return "s" if letters == "S" else letters
