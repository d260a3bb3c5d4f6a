"""Expert parallelism: the rows travel to the ranks that hold their experts, and their sums come back.

    send  = plan_dispatch(topk_ids)                  which rows go to which rank
    rows  = all_to_all_rows(x, topk_weights, send)   with the slots of their experts there
    pft   = build_pft(slots, weights)                as if the rows were this rank's own tokens
    y     = expert_mlp(rows, pft, own weights)
    out   = all_to_all_back(y, send)                 sums by token

Since experts gather by index, a token travels once to each rank that has one of its experts (`dedup`), or once for
each of its experts (`flat`, as X-MoE and others do). Drops by capacity or mask are decided where the tokens are.
"""

# fx types an argument as anything that a program can hold: the code knows better.
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportOptionalMemberAccess=false
# pyright: reportIndexIssue=false, reportOptionalSubscript=false, reportCallIssue=false
# pyright: reportAssignmentType=false, reportUnhashable=false, reportReturnType=false

from __future__ import annotations

import operator
from collections.abc import Collection
from typing import Any

import torch
from torch import fx

from ..errors import Refused
from ..ir import dialect  # registers the ops
from ..ir.block import BlockGraph
from ..ir.body import ExpertBody
from ..ir.placement import Placement
from ..ir.spec import eliminate_dead_code
from .manager import graph_pass

aten = torch.ops.aten
ops = torch.ops.moefx
_ = dialect


@graph_pass(level="distributed")
def collectives(block: BlockGraph, plan: Any, *, placement: Placement, stacked: Collection[str]) -> BlockGraph:
    """The routed sum over the ranks of the expert axis.

    Args:
        stacked: parameters of all experts in one tensor each, which are DTensors then; of the others only this rank's
            are there.
    """
    block = block.copy()
    built = block.find(ops.build_pft.default)
    if len(built) != 1:
        raise Refused("experts of several kinds in one block cannot be spread over a mesh yet")
    _Exchange(block.graph, built[0], placement, dedup=plan.dispatch != "flat").insert(stacked)
    return eliminate_dead_code(block)


class _Exchange:
    def __init__(self, graph: fx.Graph, pft: fx.Node, placement: Placement, dedup: bool):
        self.graph, self.pft, self.placement, self.dedup = graph, pft, placement, dedup
        self.results = {u.args[1]: u for u in pft.users}
        self.plan: list[fx.Node] = []

    def insert(self, stacked: Collection[str]) -> None:
        region = self._region()
        tokens = list(dict.fromkeys(n.args[0] for n in region if n.target in _GATHERS))
        choices = list(dict.fromkeys(n.args[0] for n in region if self._is_of_choices(n)))
        with self.graph.inserting_before(region[0]):
            self._insert_plan()
            received, results = self._insert_rows(tokens, choices)
        for node in region:
            if node.target in _GATHERS or self._is_of_choices(node):
                node.args = (received[node.args[0]], *node.args[1:])
            for before, after in results.items():
                node.replace_input_with(before, after)
            self._own_parameters(node)
            _now_of_received(node)
        for node in filter(_is_sum, region):
            with self.graph.inserting_after(node):
                back = self._call(ops.all_to_all_back.default, (node, *self.plan), self._group(), ("S", "D"))
            node.replace_all_uses_with(back, delete_user_cb=lambda user, back=back: user is not back)
        self._read_local_parts(stacked)

    # ------------------------------------------------------------------ what is there
    def _region(self) -> list[fx.Node]:
        """The nodes on routed rows, up to the sums by token."""
        found: dict[fx.Node, None] = {}
        seeds = [self.results[i] for i in (0, 1, 2, 4) if i in self.results]
        stack = [u for seed in seeds for u in seed.users]
        while stack:
            node = stack.pop()
            if node not in found:
                found[node] = None
                if not _is_sum(node):
                    stack.extend(node.users)
        return [n for n in self.graph.nodes if n in found]

    def _is_of_choices(self, node: fx.Node) -> bool:
        """A value of each choice, by row."""
        if node.target is not aten.index.Tensor or node.args[1] != [self.results.get(0), self.results.get(1)]:
            return False
        if len(node.args[0].meta["letters"]) != 2:
            raise Refused(
                "the experts take more than one number for each choice, which do not travel between ranks yet",
                source=str(node.meta.get("source", "")),
            )
        return True

    def _group(self) -> dict[str, str]:
        return {"group": self.placement.group}

    # ------------------------------------------------------------------ what is new
    def _call(self, target: Any, args: tuple, kwargs: dict[str, Any], letters: Any = None, name: str = "") -> fx.Node:
        node = self.graph.create_node("call_function", target, args, kwargs, name or None)
        if letters is not None:
            node.meta["letters"] = letters
        node.meta["source"] = self.pft.meta.get("source", "")
        if "group" in kwargs:
            node.meta["axis"] = self.placement.axis
        return node

    def _parts(self, node: fx.Node, letters: tuple, names: tuple[str, ...] = ()) -> list[fx.Node]:
        node.meta["letters"] = letters
        names = names or ("",) * len(letters)
        found = enumerate(zip(letters, names, strict=True))
        return [self._call(operator.getitem, (node, i), {}, part, name) for i, (part, name) in found]

    def _insert_plan(self) -> None:
        topk_ids, _, keep = self.pft.args[:3]
        if keep is not None or self.pft.kwargs.get("capacity") is not None:
            inverse = self.results.get(3) or self.graph.call_function(operator.getitem, (self.pft, 3))
            keep = self._call(aten.ge.Scalar, (inverse, 0), {}, ("S", "K"))  # what was dropped here does not travel
        place = self.placement
        kwargs = {"places": list(place.places), "num_ranks": place.num_ranks, "num_slots": place.num_slots}
        send = self._call(ops.plan_dispatch.default, (topk_ids, keep), {**kwargs, "dedup": self.dedup})
        parts = self._parts(send, (("S", "K"), ("B",), ("B",), ("W+1",), ("S", "K")))
        splits = self._call(ops.exchange_counts.default, (parts[3],), self._group(), ("2", "W"))
        self.plan = [*parts, splits]

    def _insert_rows(
        self, tokens: list[fx.Node], choices: list[fx.Node]
    ) -> tuple[dict[fx.Node, fx.Node], dict[fx.Node, fx.Node]]:
        """The exchange: what arrives of tokens and choices, and the results of `build_pft` for those here."""
        place, weights = self.placement, self.pft.args[1]
        if 4 in self.results and weights not in choices:
            choices = [*choices, weights]
        rows = self._call(
            ops.all_to_all_rows.default,
            (tokens, choices, *self.plan),
            {"num_slots": place.num_slots, "dedup": self.dedup, **self._group()},
        )
        rows.meta["save"] = True
        letters = [("R", *t.meta.get("letters", ("S", "D"))[1:]) for t in tokens]
        names = (*("rows" for _ in tokens), "slots", *("weights" for _ in choices))
        arrived = self._parts(rows, (*letters, ("R", "J"), *(("R", "J") for _ in choices)), names)
        local = arrived[len(tokens)]
        received = dict(zip([*tokens, *choices], [*arrived[: len(tokens)], *arrived[len(tokens) + 1 :]], strict=True))
        here = self._call(
            ops.build_pft.default,
            (local, received[weights] if 4 in self.results else None, None),
            {"num_experts": place.num_slots},
        )
        parts = self._parts(here, (("B",), ("B",), ("E+1",), ("R", "J"), ("B",)))
        return received, {self.results[i]: parts[i] for i in self.results}

    # ------------------------------------------------------------------ parameters
    def _own_parameters(self, node: fx.Node) -> None:
        """Those of this rank's experts, in the order of their slots."""
        if node.target is ops.expert_mlp.default:
            body = ExpertBody.from_json(node.kwargs["body"])
            biased = [g for g in body.up if g.bias]
            gemms = (body.up, biased, [body.down], [body.down] if body.down.bias else [])
            lists = [self._own(args, [g.num for g in of]) for args, of in zip(node.args[5:9], gemms, strict=True)]
            node.args = (*node.args[:5], *lists)
            node.update_kwarg("body", body.with_experts(self.placement.num_slots).to_json())
        elif node.target is ops.grouped_mm.default:
            node.args = (node.args[0], self._own(node.args[1], [len(node.args[1])]), *node.args[2:])
        elif node.target is ops.expert_rows.default:
            node.args = (self._own(node.args[0], [len(node.args[0])]), *node.args[1:])

    def _own(self, parameters: list[fx.Node], sizes: list[int]) -> list[fx.Node]:
        """Of a flat list, in groups of these sizes: one stack of all experts', or E separate ones."""
        found: list[fx.Node] = []
        for size in sizes:
            group, parameters = parameters[:size], parameters[size:]
            if size == 1:
                found += group
                if group[0].target is aten.stack.default:
                    group[0].args = ([group[0].args[0][e] for e in self.placement.own],)
                continue
            own = [group[e] for e in self.placement.own]
            if size > 1 and group[0].target is aten.select.int and len({n.args[0] for n in group}) == 1:
                for slot, node in enumerate(own):  # one by one from a stack, of which only this rank's part is here
                    node.args = (node.args[0], 0, slot)
            found += own
        return found

    def _read_local_parts(self, stacked: Collection[str]) -> None:
        for root in [n for n in self.graph.nodes if n.op == "get_attr" and n.target in stacked]:
            with self.graph.inserting_after(root):
                local = self.graph.call_method("to_local", (root,))
            local.meta["source"] = root.meta.get("source", "")
            root.replace_all_uses_with(local, delete_user_cb=lambda user, local=local: user is not local)
            if "val" in root.meta:
                every = root.meta["val"]
                local.meta["val"] = every.new_empty((self.placement.num_slots, *every.shape[1:]))
            later = list(local.users)
            for node in later:  # what is made of it has fewer experts now
                node.meta.pop("val", None)
                later += [user for user in node.users if user not in later]


_GATHERS = (ops.expert_mlp.default, ops.dispatch.default)  # of tokens, their first argument


def _now_of_received(node: fx.Node) -> None:
    """What was known of its shape was of this rank's own rows."""
    node.meta.pop("val", None)
    letters = node.meta.get("letters")
    if isinstance(letters, tuple) and all(isinstance(a, str) for a in letters):
        node.meta["letters"] = tuple("R" if a == "S" else a for a in letters)


def _is_reduced(node: fx.Node) -> bool:
    """The sums that an `expert_mlp` returns."""
    return (
        node.target is operator.getitem
        and node.args[1] == 0
        and node.args[0].target is ops.expert_mlp.default
        and bool(node.args[0].kwargs.get("reduce"))
    )


def _is_sum(node: fx.Node) -> bool:
    return node.target is ops.combine.default or _is_reduced(node)


__all__ = ["collectives"]
