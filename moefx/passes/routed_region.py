"""The routed part of a block's graph: from `build_pft` over the experts to the sums by token."""

# fx types an argument as anything that a program can hold: the code knows better.
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportOptionalMemberAccess=false
# pyright: reportUnhashable=false, reportIndexIssue=false, reportCallIssue=false, reportReturnType=false

from __future__ import annotations

import operator
from collections.abc import Collection
from typing import Any

import torch
from torch import fx

from ..errors import Refused
from ..ir.block_graph import BlockGraph
from ..ir.ops import dialect  # registers the ops

aten = torch.ops.aten
ops = torch.ops.moefx
_ = dialect


class RoutedRegion:
    """What passes that bring rows to other ranks look at and change.

    Attributes:
        pft: the `build_pft`; results: its results by number.
        region: the nodes on routed rows, up to the sums, in order.
        gathers: those that gather rows of tokens, their first argument.
        picks: those that pick a value of each choice, of their first argument, for its row.
        sums: those that add up the rows of each token.
    """

    def __init__(self, graph: fx.Graph, pft: fx.Node, region: list[fx.Node] | None = None):
        self.graph, self.pft = graph, pft
        self.results = {u.args[1]: u for u in pft.users}
        self.region = region if region is not None else self._region()
        self.gathers = [n for n in self.region if n.target in (ops.expert_mlp.default, ops.dispatch.default)]
        self.picks = [n for n in self.region if self._picks(n)]
        self.sums = [n for n in self.region if _is_sum(n)]

    @classmethod
    def of(cls, block: BlockGraph) -> RoutedRegion:
        """Of several kinds of experts in a block that which has matrices, and not for one expert only: the others stay
        with the tokens, on every rank.

        Raises:
            Refused: there is no such kind, or several.
        """
        built = [n for n in block.find(ops.build_pft.default) if {u.args[1] for u in n.users} - {3}]  # rows, not drops
        kinds = [cls(block.graph, pft) for pft in built]
        if len(kinds) > 1:
            kinds = [kind for kind in kinds if kind.num_experts > 1 and kind.has_matrices]
        if len(kinds) != 1:
            raise Refused("several kinds of experts with matrices in one block cannot be spread over a mesh yet")
        return kinds[0]

    @property
    def num_experts(self) -> int:
        return self.pft.kwargs["num_experts"]

    @property
    def has_matrices(self) -> bool:
        return any(n.target in (ops.expert_mlp.default, ops.grouped_mm.default) for n in self.region)

    def copy(self) -> RoutedRegion:
        """The region once more, each node behind the one that it is a copy of. Nobody uses its sums yet."""
        copies: dict[fx.Node, fx.Node] = {}
        for node in self.region:
            with self.graph.inserting_after(node):
                copies[node] = self.graph.node_copy(node, lambda n: copies.get(n, n))
        return RoutedRegion(self.graph, self.pft, list(copies.values()))

    def _region(self) -> list[fx.Node]:
        found: dict[fx.Node, None] = {}
        stack = [u for i in (0, 1, 2, 4) if i in self.results for u in self.results[i].users]
        while stack:
            node = stack.pop()
            if node not in found:
                found[node] = None
                if not _is_sum(node):
                    stack.extend(node.users)
        return [n for n in self.graph.nodes if n in found]

    def _picks(self, node: fx.Node) -> bool:
        if node.target is not ops.pick_choices.default:
            return False
        if len(node.args[0].meta["letters"]) != 2:
            raise Refused(
                "the experts take more than one number for each choice, which do not travel between ranks yet",
                source=str(node.meta.get("source", "")),
            )
        return True

    def shared(self, trained: Collection[str]) -> list[fx.Node]:
        """Values that what the experts compute on rows takes the same for all rows: what is made of the block's inputs,
        and its parameters of these names. Constants and buffers do not count."""
        inside = {*self.region, *self.results.values()}
        taken = [
            value
            for node in self.region
            if node not in self.sums and getattr(node.target, "namespace", "") != "moefx"
            for value in node.all_input_nodes
        ]
        return [v for v in taken if v not in inside and not _is_constant(v, trained)]

    # ------------------------------------------------------------------ new nodes, where the graph inserts
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

    def parts(self, node: fx.Node, letters: tuple, names: tuple[str, ...] = ()) -> list[fx.Node]:
        """The results of an op."""
        node.meta["letters"] = letters
        names = names or ("",) * len(letters)
        found = enumerate(zip(letters, names, strict=True))
        return [self.call(operator.getitem, (node, i), {}, part, name) for i, (part, name) in found]

    def kept(self) -> fx.Node:
        """Of each choice, whether the `build_pft` has a row for it."""
        inverse = self.results.get(3) or self.graph.call_function(operator.getitem, (self.pft, 3))
        return self.call(aten.ge.Scalar, (inverse, 0), {}, ("S", "K"))


def _is_constant(node: fx.Node, trained: Collection[str]) -> bool:
    if node.op == "get_attr":
        return str(node.meta.get("fqn") or node.target) not in trained and str(node.target) not in trained
    of_sizes = isinstance(node.meta.get("letters"), str)
    return of_sizes or (node.op == "call_function" and not node.all_input_nodes)


def _is_sum(node: fx.Node) -> bool:
    """The sums that an `expert_mlp` returns, or a `combine`."""
    if node.target is ops.combine.default:
        return True
    return (
        node.target is operator.getitem
        and node.args[1] == 0
        and node.args[0].target is ops.expert_mlp.default
        and bool(node.args[0].kwargs.get("reduce"))
    )
