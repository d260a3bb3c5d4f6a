"""Expert parallelism: the rows travel to the ranks that hold their experts, and their sums come back.

    place = place_choices(topk_ids)                   which rank and slot each choice is for
    send  = plan_dispatch(place)                      which rows go to which rank
    sent  = all_to_all_rows(x, topk_weights, send)    on their way, with the slots of their experts there
    rows  = wait_rows(sent)
    pft   = build_pft(slots, weights)                 as if the rows were this rank's own tokens
    y     = expert_mlp(rows, pft, own weights)
    back  = all_to_all_back(y)
    out   = wait_sums(back, send)                     sums by token

Since experts gather by index, a token travels once to each rank that has one of its experts (`dedup`), or once for
each of its experts (`flat`, as X-MoE and others do). Drops by capacity or mask are decided where the tokens are.

Over several levels of a topology there is a hop at each: a pilot of the token goes to each node, to the rank at the
sender's own place there, which sends it on to the node's ranks; the sums take the same way back, so that those of a
node are added up before they leave it (X-MoE section 4.2, RBD). With `near_apart` what stays in the node does not
wait for what comes from others (Piper section V, HALO: phase I is the exchange in the node, II the one between nodes,
III that in the node of what has come).
"""

# fx types an argument as anything that a program can hold: the code knows better.
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportOptionalMemberAccess=false
# pyright: reportIndexIssue=false, reportOptionalSubscript=false, reportCallIssue=false
# pyright: reportAssignmentType=false, reportUnhashable=false, reportReturnType=false

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Collection
from typing import Any

import torch
from torch import fx

from ..errors import Refused
from ..ir import dialect  # registers the ops
from ..ir.block import BlockGraph
from ..ir.body import ExpertBody
from ..ir.display import attribute_name
from ..ir.placement import Level, Placement, Ways
from ..ir.spec import eliminate_dead_code
from .manager import graph_pass
from .routed import Routed

aten = torch.ops.aten
ops = torch.ops.moefx
_ = dialect


@graph_pass(level="distributed")
def collectives(
    block: BlockGraph,
    plan: Any,
    *,
    placement: Placement,
    ways: Ways,
    stacked: Collection[str],
    trained: Collection[str] = (),
) -> BlockGraph:
    """The routed sum over the ranks of the expert axis.

    Args:
        trained: parameters of the block that have gradients.
        stacked: parameters of all experts in one tensor each, which are DTensors then; of the others only this rank's
            are there.
    """
    block = block.copy()
    routed = Routed.of(block)
    if shared := routed.shared(trained):
        names = (attribute_name(n) if n.op == "get_attr" else n.name for n in shared)
        raise Refused(
            "the experts share a value: its gradient would be of the tokens that came from other ranks",
            culprits=tuple(dict.fromkeys(names))[:3],
            source=str(shared[0].meta.get("source", "")),
            remedy="apply it before the experts, or after their sum",
        )
    _Exchange(routed, placement, ways).insert(stacked)
    return eliminate_dead_code(block)


@dataclasses.dataclass
class _Hop:
    """An exchange that was started: what it sends, and how it is awaited and gone back."""

    level: Level
    tokens: list[fx.Node]
    choices: list[fx.Node]
    place: fx.Node
    num_slots: int
    label: str  # behind the names of its nodes
    plan: list[fx.Node]  # token_ids, slot_ids, rank_offsets, inverse, splits
    sent: list[fx.Node]  # the rows, and the ticket

    @property
    def splits(self) -> fx.Node:
        return self.plan[4]

    @property
    def ticket(self) -> fx.Node:
        return self.sent[1]


class _Exchange:
    def __init__(self, routed: Routed, placement: Placement, ways: Ways):
        self.routed, self.placement, self.ways = routed, placement, ways
        self.graph, self.pft, self.results = routed.graph, routed.pft, routed.results
        self._call, self._parts = routed.call, routed.parts
        self.hops: list[_Hop] = []  # level by level
        self.near: _Hop | None = None
        self.counts: fx.Node

    def insert(self, stacked: Collection[str]) -> None:
        region, sums = self.routed.region, self.routed.sums
        tokens, choices = (
            list(dict.fromkeys(n.args[0] for n in at)) for at in (self.routed.gathers, self.routed.picks)
        )
        with self.graph.inserting_before(region[0]):
            received, results = self._insert_rows(tokens, choices)
        for node in region:
            if node in self.routed.gathers or node in self.routed.picks:
                node.args = (received[node.args[0]], *node.args[1:])
            for before, after in results.items():
                node.replace_input_with(before, after)
            self._own_parameters(node)
            _now_of_received(node)
        for node in sums:
            users = list(node.users)
            with self.graph.inserting_before(node.next):
                back = self._insert_back(node)
            for user in users:
                user.replace_input_with(node, back)
        self._read_local_parts(stacked)
        self.counts.update_kwarg("fingerprint", self._fingerprint([*tokens, *choices]))

    def _fingerprint(self, sent: list[fx.Node]) -> int:
        """Of what must be alike on all ranks, since each computes on rows of the others: what travels, where to, and
        what becomes of it there, the parameters' names and values aside."""
        numbers: dict[fx.Node, int] = {}

        def told(value: Any) -> str:
            if value.op == "get_attr":
                return "parameter"
            return f"%{numbers.setdefault(value, len(numbers))}"

        lines = [
            f"{self.placement.places} {self.ways.sizes} {self.ways.order} {self.ways.dedup} {self.ways.near_apart}"
        ]
        for node in sent:
            value = node.meta.get("val")
            lines.append(f"{told(node)} {getattr(value, 'dtype', None)} {node.meta.get('letters')} {_width(value)}")
        for node in self.routed.region:
            lines.append(f"{told(node)} = {node.target} {fx.map_arg((node.args, node.kwargs), told)}")
        return int.from_bytes(hashlib.sha256("\n".join(lines).encode()).digest()[:7], "big")

    # ------------------------------------------------------------------ what is new
    def _insert_places(self) -> tuple[fx.Node, list[fx.Node]]:
        """Where each choice goes, and how many rows each hop has."""
        topk_ids, _, keep = self.pft.args[:3]
        if self.pft.kwargs.get("capacity") is not None:
            keep = self.routed.kept()  # what was dropped here does not travel
        here, ways, slots = self.placement, self.ways, self.placement.num_slots
        positions = [ways.position_of(p // slots) * slots + p % slots for p in here.places]
        place = self._call(
            ops.place_choices.default, (topk_ids, keep), {"places": positions}, topk_ids.meta.get("letters", ("S", "K"))
        )
        self.counts = self._call(
            ops.exchange_counts.default,
            (place,),
            {
                "levels": ways.sizes,
                "num_slots": slots,
                "dedup": ways.dedup,
                "near": ways.near_apart,
                "timeout": ways.timeout,
                "group": here.group,
            },
            axis=here.axis,
        )
        labels = [self._label(index) for index in range(len(ways.levels))] + ["near"] * ways.near_apart
        names = tuple(_named("splits", label) for label in labels)
        return place, self._parts(self.counts, (("2", "W"),) * len(labels), names)

    def _label(self, index: int) -> str:
        return self.ways.levels[index].axis.rpartition("/")[2] if len(self.ways.levels) > 1 else ""

    def _start(
        self, index: int, tokens: list[fx.Node], choices: list[fx.Node], place: fx.Node, splits: fx.Node, label: str
    ) -> _Hop:
        """Send rows over the level of that number."""
        ways, level = self.ways, self.ways.levels[index]
        num_slots = ways.ranks_within(index) * self.placement.num_slots
        kwargs = {"num_slots": num_slots, "dedup": ways.dedup}
        send = self._call(
            ops.plan_dispatch.default, (place,), {"num_ranks": level.size, **kwargs}, name=_named("send", label)
        )
        rows, width = place.meta["letters"]
        plan = [*self._parts(send, (("B",), ("B",), ("W+1",), (rows, width))), splits]
        sent = self._call(
            ops.all_to_all_rows.default,
            (tokens, choices, place, *plan),
            {**kwargs, "group": level.group},
            name=_named("sent", label),
            axis=level.axis,
        )
        return _Hop(level, tokens, choices, place, num_slots, label, plan, self._parts(sent, ((), ())))

    def _wait(self, hops: list[_Hop], names: tuple[str, str, str]) -> tuple[list[fx.Node], fx.Node, list[fx.Node]]:
        """What arrives of tokens, their places there, and of choices."""
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
            {"num_slots": first.num_slots, "dedup": self.ways.dedup, "groups": [h.level.group for h in hops]},
        )
        node.meta["save"] = True
        letters = [("R", *t.meta.get("letters", ("S", "D"))[1:]) for t in first.tokens]
        names = (*(names[0] for _ in first.tokens), names[1], *(names[2] for _ in first.choices))
        arrived = self._parts(node, (*letters, ("R", "J"), *(("R", "J") for _ in first.choices)), names)
        num = len(first.tokens)
        return arrived[:num], arrived[num], arrived[num + 1 :]

    def _insert_rows(
        self, tokens: list[fx.Node], choices: list[fx.Node]
    ) -> tuple[dict[fx.Node, fx.Node], dict[fx.Node, fx.Node]]:
        """The exchange: what arrives of tokens and choices, and the results of `build_pft` for those here."""
        ways, slots, weights = self.ways, self.placement.num_slots, self.pft.args[1]
        if 4 in self.results and weights not in choices:
            choices = [*choices, weights]
        place, splits = self._insert_places()
        near = None
        if ways.near_apart:
            kwargs = {"num_places": ways.sizes[-1] * slots}
            begin = ways.position // ways.sizes[-1] * kwargs["num_places"]
            parted = self._call(ops.near_and_far.default, (place,), {"begin": begin, **kwargs})
            near, place = self._parts(parted, (("S", "K"), ("S", "K")), ("near", "far"))
        moved, values, last = tokens, choices, len(ways.levels) - 1
        for index in range(last + 1):
            self.hops.append(self._start(index, moved, values, place, splits[index], self._label(index)))
            if near is not None and not index:  # the way between nodes is the longest: it has been started
                self.near = self._start(last, tokens, choices, near, splits[-1], "near")
            if index < last:
                moved, place, values = self._wait([self.hops[-1]], ("pilots", "places", "pilot_weights"))
        arrived, local, scales = self._wait(self._last_hops(), ("rows", "slots", "weights"))
        received = dict(zip([*tokens, *choices], [*arrived, *scales], strict=True))
        here = self._call(
            ops.build_pft.default,
            (local, received[weights] if 4 in self.results else None, None),
            {"num_experts": slots},
        )
        parts = self._parts(here, (("B",), ("B",), ("E+1",), ("R", "J"), ("B",)))
        return received, {self.results[i]: parts[i] for i in self.results}

    def _last_hops(self) -> list[_Hop]:
        return [self.hops[-1], self.near] if self.near else [self.hops[-1]]

    def _insert_back(self, rows: fx.Node) -> fx.Node:
        """The sums of the rows received, on their way back and added up by token."""
        *hops, last = self.hops
        on_their_way = self._back(rows, self._last_hops())
        out = self._sums(on_their_way[0], last)
        for hop in reversed(hops):
            (sent,) = self._back(out, [hop])
            if self.near and hop is hops[0]:
                near = self._sums(on_their_way[1], self.near)
                return self._call(aten.add.Tensor, (near, self._sums(sent, hop)), {}, ("S", "D"), "out")
            out = self._sums(sent, hop)
        return out

    def _back(self, rows: fx.Node, hops: list[_Hop]) -> list[tuple[fx.Node, fx.Node]]:
        node = self._call(
            ops.all_to_all_back.default,
            (rows, [h.splits for h in hops], [h.ticket for h in hops]),
            {"groups": [h.level.group for h in hops]},
            name=_named("back", hops[0].label),
            axis=hops[0].level.axis,
        )
        parts = self._parts(node, ((),) * 2 * len(hops))
        return list(zip(parts[: len(hops)], parts[len(hops) :], strict=True))

    def _sums(self, sent: tuple[fx.Node, fx.Node], hop: _Hop) -> fx.Node:
        rows = hop.plan[3].meta["letters"][0]
        kwargs = {"group": hop.level.group}
        name = _named("sums", hop.label) if hop.label else ""
        return self._call(ops.wait_sums.default, (*sent, *hop.plan), kwargs, (rows, "D"), name)

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
            if group and group[0].target is aten.reshape.default:
                raise Refused("experts that have a number each cannot be spread over a mesh yet",
                              source=str(group[0].meta.get("source", "")))  # fmt: skip
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


def _named(name: str, label: str) -> str:
    return f"{name}_{label}" if label else name


def _width(value: Any) -> int | None:
    """Of a tensor with rows, if it is a number."""
    return value.shape[-1] if getattr(value, "ndim", 0) > 1 and isinstance(value.shape[-1], int) else None


def _now_of_received(node: fx.Node) -> None:
    """What was known of its shape was of this rank's own rows."""
    node.meta.pop("val", None)
    letters = node.meta.get("letters")
    if isinstance(letters, tuple) and all(isinstance(a, str) for a in letters):
        node.meta["letters"] = tuple("R" if a in ("S", "s") else a for a in letters)


__all__ = ["collectives"]
