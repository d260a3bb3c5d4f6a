"""The routed region of a block's graph: from `build_pft` over the experts to the sums by token."""

from __future__ import annotations

import operator
from collections.abc import Collection
from typing import Any

import torch
from torch import fx

from ...errors import Refused
from ...ir.graphs.block_graph import BlockGraph
from ...ir.node_values import get_argument, read_item, set_argument
from ...ir.ops.token_routing import PftResult

aten = torch.ops.aten
ops = torch.ops.moefx
# the argument whose rows an op gathers
_SOURCES: dict[Any, str] = {
    ops.expert_mlp.default: "x",
    ops.dispatch.default: "x",
    ops.pick_choices.default: "values",
}


class RoutedRegion:
    """The nodes of a routed region, for passes that move rows between ranks.

    Attributes:
        pft: the `build_pft` node. results: its results by number.
        region: the nodes on routed rows, up to the sums, in order.
        token_gathers: nodes that gather rows of tokens, see `get_source`.
        slot_gathers: nodes that gather values of slots.
        sums: nodes that sum the rows of each token.
    """

    def __init__(self, graph: fx.Graph, pft: fx.Node, region: list[fx.Node] | None = None):
        self.graph, self.pft = graph, pft
        self.results = {read_item(user)[1]: user for user in pft.users}
        self.region = region if region is not None else self._find_region()
        self.token_gathers = [n for n in self.region if n.target in (ops.expert_mlp.default, ops.dispatch.default)]
        self.slot_gathers = [n for n in self.region if self._is_slot_gather(n)]
        self.sums = [n for n in self.region if _is_sum(n)]

    @classmethod
    def of(cls, block: BlockGraph) -> RoutedRegion:
        """Find the routed region of a block. Of several groups of experts, take the only one that has several experts
        with matrices; the other groups run on every rank.

        Raises:
            Refused: not exactly one group has several experts with matrices.
        """
        # A PFT whose only used result is `inverse` decides drops and has no rows.
        pfts = [
            n for n in block.find(ops.build_pft.default) if {read_item(u)[1] for u in n.users} - {PftResult.INVERSE}
        ]
        regions = [cls(block.graph, pft) for pft in pfts]
        if len(regions) > 1:
            regions = [region for region in regions if region.num_experts > 1 and region.has_matrices]
        if len(regions) != 1:
            raise Refused(
                "several kinds of experts with matrices in one block cannot be spread over a mesh yet",
                remedy="give each kind a module of its own, with its own router",
            )
        return regions[0]

    @property
    def num_experts(self) -> int:
        return get_argument(self.pft, "num_experts")

    @property
    def has_weights(self) -> bool:
        """Whether the region uses the routing weights by row."""
        return PftResult.COMBINE_WEIGHTS in self.results

    @property
    def has_matrices(self) -> bool:
        return any(n.target in (ops.expert_mlp.default, ops.grouped_mm.default) for n in self.region)

    def copy(self) -> RoutedRegion:
        """Copy the region, with each copy right after its original. The copied sums have no users."""
        copies: dict[fx.Node, fx.Node] = {}
        for node in self.region:
            with self.graph.inserting_after(node):
                copies[node] = self.graph.node_copy(node, lambda n: copies.get(n, n))
        return RoutedRegion(self.graph, self.pft, list(copies.values()))

    def _find_region(self) -> list[fx.Node]:
        region: dict[fx.Node, None] = {}
        stack = [u for i in set(self.results) - {PftResult.INVERSE} for u in self.results[i].users]
        while stack:
            node = stack.pop()
            if node not in region:
                region[node] = None
                if not _is_sum(node):
                    stack.extend(node.users)
        return [n for n in self.graph.nodes if n in region]

    def _is_slot_gather(self, node: fx.Node) -> bool:
        if node.target is not ops.pick_choices.default:
            return False
        if len(get_argument(node, "values").meta["letters"]) != 2:
            raise Refused(
                "the experts take more than one number for each slot, which cannot be sent to other ranks yet",
                source=str(node.meta.get("source", "")),
                remedy="multiply by one number for each slot, and compute the other ones from the token's row",
            )
        return True

    def find_shared_values(self, trained: Collection[str]) -> list[fx.Node]:
        """Find values that the experts share between all rows: values computed from the block's inputs, and the
        parameters named `trained`, but no constants or buffers."""
        inside = {*self.region, *self.results.values()}
        inputs = [
            value
            for node in self.region
            if node not in self.sums and getattr(node.target, "namespace", "") != "moefx"
            for value in node.all_input_nodes
        ]
        return [v for v in inputs if v not in inside and not _is_constant(v, trained)]

    @staticmethod
    def get_source(node: fx.Node) -> fx.Node:
        """Return the values of tokens, or of slots, from which a node of `token_gathers` or `slot_gathers` gathers."""
        return get_argument(node, _SOURCES[node.target])

    @staticmethod
    def set_source(node: fx.Node, source: fx.Node | None) -> None:
        """Replace the values from which a node of `token_gathers` or `slot_gathers` gathers."""
        set_argument(node, _SOURCES[node.target], source)

    # ------------------------------------------------------------------ new nodes at the graph's insertion point
    def call(
        self, target: Any, args: tuple, kwargs: dict[str, Any], letters: Any = None, name: str = "", axis: str = ""
    ) -> fx.Node:
        node = self.graph.create_node("call_function", target, args, kwargs, name or None)
        if letters is not None:
            node.meta["letters"] = letters
        node.meta["source"] = self.pft.meta.get("source", "")
        if axis:
            node.meta["axis"] = axis
        return node

    def unpack(self, node: fx.Node, letters: tuple, names: tuple[str, ...] = ()) -> list[fx.Node]:
        """Emit nodes for the results of an op."""
        node.meta["letters"] = letters
        names = names or ("",) * len(letters)
        numbered_parts = enumerate(zip(letters, names, strict=True))
        return [
            self.call(operator.getitem, (node, i), {}, part_letters, name) for i, (part_letters, name) in numbered_parts
        ]

    def emit_keep_mask(self) -> fx.Node:
        """Emit the mask [S,K] of the slots that have a row in the `build_pft`."""
        inverse = self.results.get(PftResult.INVERSE) or self.graph.call_function(
            operator.getitem, (self.pft, int(PftResult.INVERSE))
        )
        return self.call(aten.ge.Scalar, (inverse, 0), {}, ("S", "K"))


def _is_constant(node: fx.Node, trained: Collection[str]) -> bool:
    if node.op == "get_attr":
        return str(node.meta.get("fqn") or node.target) not in trained and str(node.target) not in trained
    of_sizes = isinstance(node.meta.get("letters"), str)
    return of_sizes or (node.op == "call_function" and len(node.all_input_nodes) == 0)


def _is_sum(node: fx.Node) -> bool:
    """Return whether a node is a `combine`, or the sums of an `expert_mlp`."""
    if node.target is ops.combine.default:
        return True
    if node.target is not operator.getitem:
        return False
    source, number = read_item(node)
    return number == 0 and source.target is ops.expert_mlp.default and get_argument(source, "reduce")
