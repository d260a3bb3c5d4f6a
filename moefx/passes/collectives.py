"""Expert parallelism: send rows to the ranks that hold their experts, and return their sums.

    place = place_choices(topk_ids)                   destination of each slot
    send  = plan_dispatch(place)                      rows for each rank
    packed = pack_rows(x, topk_weights, send)         while the ranks exchange row counts
    sent  = all_to_all_rows(x, topk_weights, send)    starts the exchange
    rows  = wait_rows(sent)
    pft   = build_pft(slots, weights)                 as for this rank's own tokens
    y     = expert_mlp(rows, pft, own weights)
    back  = all_to_all_back(y)
    out   = wait_sums(back, send)                     sums by token

With `dedup`, a token travels once to each rank that holds one of its experts, since experts gather by index. Without
(`flat`, as in X-MoE), it travels once for each slot. The sender decides drops by capacity or mask.

Over several levels of a topology there is one hop at each level (X-MoE section 4.2, RBD). A pilot of the token goes to
each node, to the rank at the sender's own position there, which forwards it to the node's ranks. The sums return the
same way, and a node adds up its sums before they leave it. With `splits_intra_node`, rows that stay in the node do not
wait for rows from other nodes (Piper section V, HALO: phase I is the exchange in the node, phase II the exchange
between nodes, phase III the exchange in the node of received rows).
"""

# fx types an argument as anything that a program can hold: the code knows better.
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportOptionalMemberAccess=false
# pyright: reportIndexIssue=false, reportOptionalSubscript=false, reportCallIssue=false
# pyright: reportAssignmentType=false, reportUnhashable=false, reportReturnType=false

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Collection, Iterator
from typing import Any

import torch
from torch import fx

from ..errors import Refused
from ..ir.block_graph import BlockGraph
from ..ir.display_names import attribute_name
from ..ir.expert_body import ExpertBody
from ..ir.expert_placement import ExchangeRoutes, Placement, TopologyLevel
from ..ir.graph_levels import eliminate_dead_code
from ..ir.ops import dialect  # registers the ops
from .gathered_experts import GatheredTokens
from .pass_manager import graph_pass
from .routed_region import RoutedRegion

aten = torch.ops.aten
ops = torch.ops.moefx
_ = dialect


@graph_pass(level="distributed")
def collectives(
    block: BlockGraph,
    plan: Any,
    *,
    placement: Placement,
    ways: ExchangeRoutes,
    stacked: Collection[str],
    trained: Collection[str] = (),
    samples: int = 0,
) -> BlockGraph:
    """Distribute the routed sum over the ranks of the expert axis.

    Args:
        stacked: names of parameters that hold all experts in one tensor, a DTensor. Of separate parameters each rank
            has those of its own experts only.
        trained: names of parameters with gradients.
        samples: the sampler number of the block, see `ir.ops.parameter_samples`.
    """
    block = block.copy()
    routed = RoutedRegion.of(block)
    if shared := routed.find_shared_values(trained):
        names = (attribute_name(n) if n.op == "get_attr" else n.name for n in shared)
        raise Refused(
            "the experts share a value: its gradient would include tokens of other ranks",
            culprits=tuple(dict.fromkeys(names))[:3],
            source=str(shared[0].meta.get("source", "")),
            remedy="apply it before the experts, or after their sum",
        )
    _insert(routed, placement, ways, stacked, samples)
    return eliminate_dead_code(block)


def _insert(
    routed: RoutedRegion, placement: Placement, ways: ExchangeRoutes, stacked: Collection[str], samples: int
) -> None:
    graph = routed.graph
    tokens, choices = (list(dict.fromkeys(n.args[0] for n in at)) for at in (routed.gathers, routed.picks))
    weights = routed.pft.args[1]
    if 4 in routed.results and weights not in choices:
        choices = [*choices, weights]
    fingerprint = _fingerprint(routed, [*tokens, *choices], placement, ways)
    if ways.gathers:
        return _insert_gather(routed, placement, ways, tokens, choices, fingerprint, stacked)
    chunks = [_Exchange(part, placement, ways) for part in (*(routed.copy() for _ in range(ways.chunks - 1)), routed)]
    with graph.inserting_before(routed.region[0]):
        place = _insert_places(routed, placement, ways)
        places = [place] if len(chunks) == 1 else _insert_chunks(routed, place, len(chunks))
        for chunk, part in zip(chunks, places, strict=True):
            chunk.insert_plans(part)
        kwargs = {
            "levels": ways.sizes,
            "near": ways.splits_intra_node,
            "fingerprint": fingerprint,
            "group": placement.group,
        }
        counts = _insert_counts(routed, places, placement, ways, {**kwargs, "samples": samples})
        if len(chunks) == 1:  # the buffers of chunks would be mostly empty
            chunks[0].insert_packs(tokens, choices)
        splits = iter(_insert_splits(routed, counts, placement, ways, kwargs, len(chunks)))
        for chunk in chunks:
            chunk.insert_rows(tokens, choices, splits)
    for chunk in chunks:
        chunk.move_experts()
    for number, node in enumerate(routed.sums):
        users = list(node.users)
        with graph.inserting_before(chunks[0].routed.sums[number].next):  # the first copy comes after all others
            out, *more = [chunk.insert_back(chunk.routed.sums[number]) for chunk in chunks]
            for other in more:  # 0 for tokens of other chunks
                out = routed.call(aten.add.Tensor, (out, other), {}, ("S", "D"), "out")
        for user in users:
            user.replace_input_with(node, out)
    _read_local_parts(graph, stacked, placement)


def _insert_gather(
    routed: RoutedRegion,
    placement: Placement,
    ways: ExchangeRoutes,
    tokens: list[fx.Node],
    choices: list[fx.Node],
    fingerprint: int,
    stacked: Collection[str],
) -> None:
    """Let every rank compute on the tokens of all ranks."""
    gathered, moved = GatheredTokens(routed, placement, ways), _Exchange(routed, placement, ways)
    with routed.graph.inserting_before(routed.region[0]):
        gathered.insert_gather(_insert_places(routed, placement, ways), tokens, choices, fingerprint)
    moved.received, moved.routes = gathered.received, gathered.routes
    moved.move_experts()
    for node in routed.sums:
        users = list(node.users)
        with routed.graph.inserting_before(node.next):
            out = gathered.insert_back(node)
        for user in users:
            user.replace_input_with(node, out)
    _read_local_parts(routed.graph, stacked, placement)


def _fingerprint(routed: RoutedRegion, sent: list[fx.Node], placement: Placement, ways: ExchangeRoutes) -> int:
    """Hash the exchanged values, their destinations, and the operations on them, which must be equal on all ranks.
    Names and values of parameters do not count."""
    numbers: dict[fx.Node, int] = {}

    def describe(node: Any) -> str:
        return "parameter" if node.op == "get_attr" else f"%{numbers.setdefault(node, len(numbers))}"

    lines = [f"{placement.places} {dataclasses.replace(ways, levels=(), position=0, timeout=None)} {ways.sizes}"]
    for node in sent:
        value = node.meta.get("val")
        lines.append(f"{describe(node)} {getattr(value, 'dtype', None)} {node.meta.get('letters')} {_width(value)}")
    for node in routed.region:
        lines.append(f"{describe(node)} = {node.target} {fx.map_arg((node.args, node.kwargs), describe)}")
    return int.from_bytes(hashlib.sha256("\n".join(lines).encode()).digest()[:7], "big")


def _insert_places(routed: RoutedRegion, placement: Placement, ways: ExchangeRoutes) -> fx.Node:
    """Emit the destination of each slot."""
    topk_ids, _, keep = routed.pft.args[:3]
    if routed.pft.kwargs.get("capacity") is not None:
        keep = routed.emit_keep_mask()  # dropped slots are not sent
    slots = placement.num_slots
    positions = [ways.position_of(p // slots) * slots + p % slots for p in placement.places]
    letters = topk_ids.meta.get("letters", ("S", "K"))
    return routed.call(ops.place_choices.default, (topk_ids, keep), {"places": positions}, letters)


def _insert_chunks(routed: RoutedRegion, place: fx.Node, chunks: int) -> list[fx.Node]:
    parts = routed.call(ops.chunk_choices.default, (place,), {"chunks": chunks})
    return routed.unpack(parts, (place.meta["letters"],) * chunks)


def _insert_counts(
    routed: RoutedRegion, places: list[fx.Node], placement: Placement, ways: ExchangeRoutes, kwargs: dict[str, Any]
) -> list[fx.Node]:
    """Emit the exchange of row counts of all hops."""
    kwargs = {**kwargs, "num_slots": placement.num_slots, "dedup": ways.dedup}
    counts = routed.call(ops.exchange_counts.default, (places,), kwargs, axis=placement.axis)
    return routed.unpack(counts, ((), ()))


def _insert_splits(
    routed: RoutedRegion,
    counts: list[fx.Node],
    placement: Placement,
    ways: ExchangeRoutes,
    kwargs: dict[str, Any],
    chunks: int,
) -> list[fx.Node]:
    """Emit the numbers of rows of each hop, and of slots that end here, chunk by chunk."""
    splits = routed.call(ops.read_counts.default, tuple(counts), {**kwargs, "timeout": ways.timeout})
    labels = [ways.label(index) for index in range(len(ways.levels))] + ["near"] * ways.splits_intra_node
    names = (*(_named("splits", label) for label in labels), "choices") * chunks
    letters = (*(("2", "W") for _ in labels), ("1",)) * chunks
    return routed.unpack(splits, letters, names)


@dataclasses.dataclass
class _Hop:
    """An exchange among the ranks that differ at one level.

    Attributes:
        place: destinations of the slots, modulo those of all ranks of the hop. num_slots: destinations of one rank.
        label: suffix of its nodes' names.
        plan: token_ids, slot_ids, rank_offsets, inverse, and splits once they are emitted.
        tokens, choices: the values that it sends. packed: the rows, if packed before the host knows their number.
        sent: the rows in transit, and the ticket.
    """

    level: TopologyLevel
    place: fx.Node
    num_slots: int
    label: str
    plan: list[fx.Node]
    tokens: list[fx.Node] = dataclasses.field(default_factory=list)
    choices: list[fx.Node] = dataclasses.field(default_factory=list)
    packed: fx.Node | None = None
    sent: list[fx.Node] = dataclasses.field(default_factory=list)

    @property
    def splits(self) -> fx.Node:
        return self.plan[4]

    @property
    def ticket(self) -> fx.Node:
        return self.sent[1]


class _Exchange:
    """The exchange of a routed region, or of one chunk of its tokens, in both directions."""

    def __init__(self, routed: RoutedRegion, placement: Placement, ways: ExchangeRoutes):
        self.routed, self.placement, self.ways = routed, placement, ways
        self.pft, self.results = routed.pft, routed.results
        self._call, self._parts = routed.call, routed.unpack
        self.hops: list[_Hop] = []  # level by level
        self.near: _Hop | None = None
        self.received: dict[fx.Node, fx.Node] = {}  # sent value -> received value
        self.routes: dict[fx.Node, fx.Node] = {}  # result of the old `build_pft` -> result of the new one

    def insert_plans(self, place: fx.Node) -> None:
        """Emit the plans of the exchanges that start with this rank's own tokens."""
        ways, near = self.ways, None
        if ways.splits_intra_node:
            kwargs = {"num_places": ways.sizes[-1] * self.placement.num_slots}
            begin = ways.position // ways.sizes[-1] * kwargs["num_places"]
            parted = self._call(ops.near_and_far.default, (place,), {"begin": begin, **kwargs})
            near, place = self._parts(parted, (("S", "K"), ("S", "K")), ("near", "far"))
        self.hops.append(self._plan(0, place, ways.label(0)))
        if near is not None:
            self.near = self._plan(len(ways.levels) - 1, near, "near")

    def insert_packs(self, tokens: list[fx.Node], choices: list[fx.Node]) -> None:
        """Emit the packed rows for the same exchanges."""
        for hop in filter(None, (self.hops[0], self.near)):
            kwargs = {"num_slots": hop.num_slots, "dedup": self.ways.dedup}
            args = (tokens, choices, hop.place, *hop.plan[:3])
            name = _named("packed", hop.label)
            hop.packed = self._call(ops.pack_rows.default, args, kwargs, ("N", "bytes"), name)

    def insert_rows(self, tokens: list[fx.Node], choices: list[fx.Node], splits: Iterator[fx.Node]) -> None:
        """Emit the exchange, and a `build_pft` of the received rows."""
        ways, slots, weights = self.ways, self.placement.num_slots, self.pft.args[1]
        of_hops = [next(splits) for _ in ways.levels]
        moved, values = tokens, choices
        for index, own_splits in enumerate(of_hops):
            self._start(self.hops[index], moved, values, own_splits)
            if self.near is not None and not index:  # the exchange between nodes takes longest and starts first
                self._start(self.near, tokens, choices, next(splits))
            if index + 1 < len(of_hops):
                moved, place, values = self._wait([self.hops[index]], ("pilots", "places", "pilot_weights"))
                self.hops.append(self._plan(index + 1, place, ways.label(index + 1)))
        arrived, local, scales = self._wait(self._last_hops(), ("rows", "slots", "weights"))
        self.received = dict(zip([*tokens, *choices], [*arrived, *scales], strict=True))
        own_weights = self.received[weights] if 4 in self.results else None
        kwargs = {"num_experts": slots, "num_rows": next(splits)}
        here = self._call(ops.build_pft.default, (local, own_weights, None), kwargs)
        parts = self._parts(here, (("B",), ("B",), ("E+1",), ("R", "J"), ("B",)))
        self.routes = {self.results[i]: parts[i] for i in self.results}

    def move_experts(self) -> None:
        """Let the experts compute on the received rows, with this rank's parameters."""
        routed = self.routed
        for node in routed.region:
            if node in routed.gathers or node in routed.picks:
                node.args = (self.received[node.args[0]], *node.args[1:])
            for before, after in self.routes.items():
                node.replace_input_with(before, after)
            self._select_parameters(node)
            _mark_as_received(node)

    # ------------------------------------------------------------------ hops
    def _plan(self, index: int, place: fx.Node, label: str) -> _Hop:
        """Emit the plan of the hop at one level."""
        level = self.ways.levels[index]
        num_slots = self.ways.ranks_within(index) * self.placement.num_slots
        kwargs = {"num_ranks": level.size, "num_slots": num_slots, "dedup": self.ways.dedup}
        send = self._call(ops.plan_dispatch.default, (place,), kwargs, name=_named("send", label))
        plan = self._parts(send, (("B",), ("B",), ("W+1",), place.meta["letters"]))
        return _Hop(level, place, num_slots, label, plan)

    def _start(self, hop: _Hop, tokens: list[fx.Node], choices: list[fx.Node], splits: fx.Node) -> None:
        """Emit the start of a hop."""
        hop.tokens, hop.choices = tokens, choices
        hop.plan.append(splits)
        sent = self._call(
            ops.all_to_all_rows.default,
            (tokens, choices, hop.place, hop.packed, *hop.plan),
            {"num_slots": hop.num_slots, "dedup": self.ways.dedup, "group": hop.level.group},
            name=_named("sent", hop.label),
            axis=hop.level.axis,
        )
        hop.sent = self._parts(sent, ((), ()))

    def _wait(self, hops: list[_Hop], names: tuple[str, str, str]) -> tuple[list[fx.Node], fx.Node, list[fx.Node]]:
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
            {"num_slots": first.num_slots, "dedup": self.ways.dedup, "groups": [h.level.group for h in hops]},
        )
        node.meta["save"] = True
        letters = [("R", *t.meta.get("letters", ("S", "D"))[1:]) for t in first.tokens]
        names = (*(names[0] for _ in first.tokens), names[1], *(names[2] for _ in first.choices))
        arrived = self._parts(node, (*letters, ("R", "J"), *(("R", "J") for _ in first.choices)), names)
        num = len(first.tokens)
        return arrived[:num], arrived[num], arrived[num + 1 :]

    def _last_hops(self) -> list[_Hop]:
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
    def _select_parameters(self, node: fx.Node) -> None:
        """Replace the parameters of all experts by those of this rank's experts, in the order of their slots."""
        if node.target is ops.expert_mlp.default:
            body = ExpertBody.from_json(node.kwargs["body"])
            biased = [g for g in body.up if g.bias]
            gemms = (body.up, biased, [body.down], [body.down] if body.down.bias else [])
            lists = [self._select(args, [g.num for g in of]) for args, of in zip(node.args[5:9], gemms, strict=True)]
            node.args = (*node.args[:5], *lists)
            node.update_kwarg("body", body.with_experts(self.placement.num_slots).to_json())
        elif node.target is ops.grouped_mm.default:
            node.args = (node.args[0], self._select(node.args[1], [len(node.args[1])]), *node.args[2:])
        elif node.target is ops.expert_rows.default:
            node.args = (self._select(node.args[0], [len(node.args[0])]), *node.args[1:])

    def _select(self, parameters: list[fx.Node], sizes: list[int]) -> list[fx.Node]:
        """Select this rank's parameters from a flat list of groups: one stack of all experts, or E separate ones."""
        found: list[fx.Node] = []
        for size in sizes:
            group, parameters = parameters[:size], parameters[size:]
            if size == 1:
                found += group
                self._shorten_stacks(group[0])
                continue
            own = [group[e] for e in self.placement.local_experts]
            if size > 1 and group[0].target is aten.select.int and len({n.args[0] for n in group}) == 1:
                for slot, node in enumerate(own):  # selected from a stack, which holds this rank's experts only
                    node.args = (node.args[0], 0, slot)
            found += own
        return found

    def _shorten_stacks(self, node: fx.Node) -> None:
        """Shorten stacks of separate parameters to this rank's experts."""
        left = [node]
        while left:
            node = left.pop()
            if node.target is aten.stack.default and len(node.args[0]) == self.placement.num_experts:
                node.args = ([node.args[0][e] for e in self.placement.local_experts], *node.args[1:])
                node.meta.pop("val", None)
            elif node.op == "call_function":
                left += node.all_input_nodes


def _read_local_parts(graph: fx.Graph, stacked: Collection[str], placement: Placement) -> None:
    for root in [n for n in graph.nodes if n.op == "get_attr" and n.target in stacked]:
        with graph.inserting_after(root):
            local = graph.call_method("to_local", (root,))
        local.meta["source"] = root.meta.get("source", "")
        root.replace_all_uses_with(local, delete_user_cb=lambda user, local=local: user is not local)
        if "val" in root.meta:
            every = root.meta["val"]
            local.meta["val"] = every.new_empty((len(every) // placement.num_ranks, *every.shape[1:]))
        later = list(local.users)
        for node in later:  # derived values now have fewer experts
            node.meta.pop("val", None)
            later += [user for user in node.users if user not in later]


def _named(name: str, label: str) -> str:
    return f"{name}_{label}" if label else name


def _width(value: Any) -> int | None:
    """Return the width of a tensor with rows, if it is a number."""
    return value.shape[-1] if getattr(value, "ndim", 0) > 1 and isinstance(value.shape[-1], int) else None


def _mark_as_received(node: fx.Node) -> None:
    """Drop the node's value, whose shape is that of this rank's rows, and rename letters S and s to R."""
    node.meta.pop("val", None)
    letters = node.meta.get("letters")
    if isinstance(letters, tuple) and all(isinstance(a, str) for a in letters):
        node.meta["letters"] = tuple("R" if a in ("S", "s") else a for a in letters)


__all__ = ["collectives"]
