"""From a block to a proven canonical form: several captures under unlike routings must lift to one template."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from ...capture.captured import MIXED, Capture, comparisons
from ...capture.concolic import capture
from ...capture.inputs import Arguments
from ...capture.routing import Routing
from ...capture.sizes import SizeGuard
from ...capture.source import Source
from ...errors import CaptureError, Refused
from ..capacity import Formula
from .form import Body, Lifted, Ref
from .lift import Lifter
from .limits import Place as LimitPlace
from .limits import limits, not_reached
from .nodes import asks_for_rows
from .paths import Place, expert_indices, sibling_names, tensor_at
from .ranges import UNBOUNDED, Ranges


@dataclasses.dataclass(frozen=True)
class DropRule:
    """Capacity: an expert takes the first `capacity(dims)` of the slots that chose it.

    Attributes:
        order: `position_token` (token by token), `position_slot` (all first choices first) or `weight` (largest first).
    """

    order: str
    capacity: Formula

    def __str__(self) -> str:
        first = {
            "position_token": "earlier tokens first",
            "position_slot": "first choices first, then earlier tokens",
            "weight": "larger weights first",
        }
        return f"{self.capacity} places per expert, {first[self.order]}"


_MOST_EXTRA = 8
_MOST_TOKENS = 400  # of a capture that overflows a capacity
_LEAK_SIZES = (131, 517, 2053)  # no powers of two: these are often told apart


@dataclasses.dataclass
class Expert:
    """One group of experts in the final form.

    Attributes:
        ids: the expert ids that belong to it, ascending.
        body: what one expert computes; `expert` leaves index `tables`, `value` leaves index `Match.values`.
        tables: for each expert leaf, the place of the parameter of each id, in the order of `ids`.
    """

    ids: list[int]
    body: Body
    tables: list[list[Place]]
    values: list[list[Ref]]  # by value, then by capture


@dataclasses.dataclass
class Match:
    """The proof: one canonical form, and the captures that all agree on it (the first one is shown to users).

    Which slots count where some do not: by `drop`, a rule, or `keep`, the nodes that say so (see `drops`).
    """

    block: nn.Module
    arguments: Arguments
    lifted: list[Lifted]
    sizes: list[dict[str, int]]
    groups: list[Expert]
    num_experts: int
    extra_guards: list[SizeGuard]
    modes_read: set[str]
    capture_at: Callable[[Routing, dict[str, int]], Capture]
    drop: DropRule | None = None
    keep: list[Ref] | None = None
    within: tuple[SizeGuard, ...] = ()  # the way the program goes for the example, where it has two
    probes: dict[str, list[tuple[dict[str, int], Capture]]] = dataclasses.field(default_factory=dict)

    def probe(self, kind: str = "diverse") -> list[tuple[dict[str, int], Capture]]:
        """Captures at more sizes under this kind of routing, for numbers that depend on them."""
        if kind not in self.probes:
            probes = self.probes[kind] = []
            for tokens in (2, 3, 6, 7, 10, 13, 20, 33, 40, 64, 65, 100, 127, 128, 200, 320, 333, 512):
                dims = self.arguments.dims
                sizes = dict.fromkeys(dims, 1) | {dims[-1]: tokens}
                if all(g.holds(sizes) for g in self.within):
                    with contextlib.suppress(Exception):  # sizes that the program does not take
                        probes.append((sizes, self.capture_at(Routing(kind, 0), sizes)))
        return self.probes[kind]

    def without_optional(self) -> bool:
        """Leave out the captures at sizes at which the program may go another way; the form then holds for the other
        sizes only. False if there are none."""
        left = [i for i, lifted in enumerate(self.lifted) if not lifted.optional]
        if len(left) == len(self.lifted) or len(left) < 2:
            return False
        gone = [sizes for i, sizes in enumerate(self.sizes) if i not in left]
        values = [refs for group in self.groups for refs in group.values]
        for column in [self.lifted, self.sizes, *values, *([self.keep] if self.keep else [])]:
            column[:] = [column[i] for i in left]  # type: ignore[index]
        if any(all(g.holds(sizes) for g in self.guards) for sizes in gone):  # one token, and no comparison was seen
            self.extra_guards.append(SizeGuard("*".join(self.arguments.dims), "gt", "1", True))
        return True

    @property
    def guards(self) -> list[SizeGuard]:
        """Comparisons of sizes that came out the same in every capture. Where captures went both ways and still agree
        on the form, the comparison does not matter."""
        found = dict.fromkeys(g for lifted in self.lifted for g in lifted.capture.sizes.guards)
        return [*(g for g in found if all(g.holds(sizes) for sizes in self.sizes)), *self.extra_guards]

    @property
    def expressions(self) -> set[str]:
        """What the program computed from sizes."""
        logs = [lifted.capture.sizes for lifted in self.lifted]
        return set().union(*[log.used | log.leaks for log in logs])

    @property
    def slots(self) -> int:
        return self.lifted[0].slots


class Prover:
    """Args:
    within: sizes of which these do not hold are left alone: the program may do something else there.
    """

    def __init__(
        self,
        block: nn.Module,
        arguments: Arguments,
        num_experts_hint: int = 8,
        within: tuple[SizeGuard, ...] = (),
    ):
        self.block, self.arguments, self.hint, self.within = block, arguments, num_experts_hint, within
        self.asked: dict[SizeGuard, list[dict[str, int]]] = {}  # comparisons, and the sizes at which they were made
        self.children = sibling_names(block)
        self.lifted: list[Lifted] = []
        self.sizes: list[dict[str, int]] = []
        self.experts: set[str] | None = None
        self.extra_guards: list[SizeGuard] = []

    def capture(
        self,
        routing: Routing,
        sizes: dict[str, int],
        flips: Mapping[Source, bool | float | str] | None = None,
        most: int = 0,
    ) -> Capture:
        args, kwargs = self.arguments.at(sizes, seed=routing.seed)
        if flips and self.lifted:  # a number that is not the program's own may be how often a loop runs
            most = 20 * len(self.lifted[0].capture.nodes)
        taken = capture(self.block, args, kwargs, routing, flips=flips, dims=sizes, most_nodes=most)
        for guard in taken.sizes.guards:
            self.asked.setdefault(guard, []).append(sizes)
        return taken

    def side(self) -> tuple[SizeGuard, ...]:
        """Comparisons of sizes that came out otherwise than they do at the example's size, as they do there."""
        example = self.arguments.sizes
        sides = dict.fromkeys(g if g.holds(example) else dataclasses.replace(g, value=not g.value) for g in self.asked)
        tried = [sizes for several in self.asked.values() for sizes in several]
        return tuple(g for g in sides if not all(g.holds(sizes) for sizes in tried))

    def _choose(self, tokens: int, variant: int) -> dict[str, int]:
        """Sizes with about so many tokens; with more, or fewer, where the program goes the example's way only there."""
        for n in (tokens, *(tokens * 2**i for i in range(1, 7)), *(tokens >> i for i in range(1, 5))):
            sizes = self.arguments.choose(n, variant)
            if self._is_within(sizes):
                return sizes
        raise Refused("no sizes were found at which all that is compared with them comes out as for the example")

    def _is_within(self, sizes: dict[str, int]) -> bool:
        return all(g.holds(sizes) for g in self.within)

    def lift(
        self, routing: Routing, sizes: dict[str, int], flips: Mapping[Source, bool | float | str] | None = None
    ) -> Lifted:
        taken = self.capture(routing, sizes, flips)
        lifter = Lifter(self.block, taken, self.lifted[0] if self.lifted else None)
        lifted = lifter.lift(self.experts)
        self.experts = self.experts or lifter.experts
        lifted.groups.sort(key=lambda g: g.ids[0])
        return lifted

    def prove(self) -> Match:
        tokens = max(29, self.hint // 4)
        plans = [("diverse", tokens), ("skewed", max(25, tokens * 3 // 4)), ("flooded", 13)]
        for variant, (kind, n) in enumerate(plans):
            sizes = self._choose(n, variant)
            self._add(self.lift(Routing(kind, variant), sizes), sizes)
        self._cover()
        self._agree()
        groups = self._merged()
        self._flip_branches()
        self._mix_comparisons()
        self._overflow()
        self._carry_over()
        self._other_sizes()
        self._leaked_sizes()
        self.lifted, self.sizes = self._complete()
        for group, merged in enumerate(groups):
            merged.values = [
                list(refs) for refs in zip(*[lifted.groups[group].values for lifted in self.lifted], strict=True)
            ]
        modes = set().union(*[lifted.capture.modes_read for lifted in self.lifted])
        return Match(
            self.block,
            self.arguments,
            self.lifted,
            self.sizes,
            groups,
            self.num_experts,
            list(dict.fromkeys(self.extra_guards)),
            modes,
            self.capture,
            within=self.within,
        )

    def _add(self, lifted: Lifted, sizes: dict[str, int]) -> None:
        self.lifted.append(lifted)
        self.sizes.append(sizes)

    def _agree(self) -> None:
        """All captures have the form of the one that met the most kinds of experts, which comes first."""
        richest = max(range(len(self.lifted)), key=lambda i: (len(self.lifted[i].groups), -i))
        self.lifted.insert(0, self.lifted.pop(richest))
        self.sizes.insert(0, self.sizes.pop(richest))
        for other in self.lifted[1:]:
            _same_form(self.lifted[0], other)

    def _complete(self) -> tuple[list[Lifted], list[dict[str, int]]]:
        """The captures in which all kinds of experts were at work: the graph is read off these."""
        for seed in range(30, 30 + _MOST_EXTRA):
            full = [i for i, lifted in enumerate(self.lifted) if all(g.ids for g in lifted.groups)]
            if any(self.lifted[i].missed for i in full):
                full = [i for i in full if self.lifted[i].missed]
            if len(full) >= 3:
                return [self.lifted[i] for i in full], [self.sizes[i] for i in full]
            sizes = self._choose(max(21, self.hint // 4), seed)
            self._add(self.lift(Routing(("diverse", "flooded")[seed % 2], seed), sizes), sizes)
            _same_form(self.lifted[0], self.lifted[-1])
        raise Refused("no routing was found under which all kinds of experts are used")

    # ------------------------------------------------------------------ every expert is seen
    def _seen(self) -> set[int]:
        return {e for lifted in self.lifted for g in lifted.groups for e in g.ids}

    def _zeros(self) -> set[int]:
        """Ids that are chosen now and then and never contribute: experts that do nothing."""
        chosen: Counter[int] = Counter()
        kept: set[int] = set()
        for lifted in self.lifted:
            chosen.update(lifted.ids.reshape(-1).tolist())
            kept |= set(lifted.ids[lifted.kept].tolist())
        return {e for e, n in chosen.items() if n > 2 and e not in kept}

    def _total(self) -> int:
        """How many experts there are: as many as the stacks are long, the siblings many, or the ids high."""
        first = self.lifted[0]
        total = max(self._seen()) + 1
        for group in first.groups:
            for table in group.tables:
                total = max(total, self._siblings(table), self._stack(table))
        for node in first.index.nodes:
            ids = Ranges(first.capture.nodes).of(node)
            if ids is not None and (ids[0] >= 0).all() and ids[1].numel() and ids[1].max() < UNBOUNDED:
                total = max(total, int(ids[1].max()) + 1)
        return total

    def _stack(self, table: dict[int, Place]) -> int:
        """How many parts a tensor has, if the experts count them."""
        if any(expert_indices(place, self.children)[:1] != [e] for e, place in table.items()):
            return 0
        for place in list(table.values())[:1]:
            for op, *rest in place.steps:
                if op == "at":
                    return tensor_at(self.block, place.fqn).shape[rest[1][0][0]]
                if op == "slice":
                    _, dim, start, stop, _ = rest
                    return tensor_at(self.block, place.fqn).shape[dim] // (stop - start)
        return 0

    def _siblings(self, table: dict[int, Place]) -> int:
        """How many modules stand beside each other where the experts' places differ, if they count the experts."""
        names = {e: place.fqn.split(".") for e, place in table.items()}
        for depth, _ in enumerate(min(names.values(), key=len)):
            siblings = self.children.get(".".join(next(iter(names.values()))[:depth]), [])
            if all(parts[depth] in siblings and siblings.index(parts[depth]) == e for e, parts in names.items()):
                return len(siblings)
        return 0

    def _cover(self) -> None:
        """More captures, until every expert was seen at work: one that differs must not hide."""
        extra = 0
        self.num_experts = self._total()
        while missing := sorted(set(range(self.num_experts)) - self._seen() - self._zeros()):
            if extra == _MOST_EXTRA:
                raise Refused(
                    f"{len(missing)} of {self.num_experts} experts were never chosen under any routing tried, "
                    f"the first is expert {missing[0]}"
                )
            extra += 1
            sizes = self._choose(max(17, min(len(missing), 4 * self.hint)), extra)
            before = set(missing)
            self._add(self.lift(Routing("diverse", 10 + extra, prefer=tuple(missing)), sizes), sizes)
            if before == set(range(self.num_experts)) - self._seen() - self._zeros() and extra > 2:
                extra = _MOST_EXTRA

    def _merged(self) -> list[Expert]:
        """Groups with complete tables."""
        out = []
        for g, first in enumerate(self.lifted[0].groups):
            ids = sorted({e for lifted in self.lifted for e in lifted.groups[g].ids})
            tables = []
            for j in range(len(first.tables)):
                merged: dict[int, Place] = {}
                for lifted in self.lifted:
                    for e, place in lifted.groups[g].tables[j].items():
                        if merged.setdefault(e, place) != place:
                            raise Refused(
                                f"expert {e} uses {place} under one routing and {merged[e]} under another",
                                culprits=(place.fqn,),
                            )
                tables.append([merged[e] for e in ids])
            out.append(Expert(ids, first.body, tables, []))
        owners = [e for group in out for e in group.ids]
        if len(set(owners)) != len(owners):
            raise Refused("an expert computes one function under one routing and another under another")
        return out

    # ------------------------------------------------------------------ branches on data
    def _flip_branches(self) -> None:
        """A branch that went one way in every capture is forced the other way once: it must not matter. A float that
        Python read is given the values that turn any comparison with it."""
        outcomes: dict[Source, set[Any]] = {}
        for lifted in self.lifted:
            for read in lifted.capture.reads:
                outcomes.setdefault(read.source, set()).add(read.value)
        for lifted in self.lifted:
            doubtful = [read for read in lifted.capture.reads if len(outcomes[read.source]) == 1]
            ranges = Ranges(lifted.capture.nodes) if doubtful else None
            for read in doubtful:
                if ranges and read.node is not None and ranges.decided(read.node, read.asked):
                    outcomes[read.source] = {True, False}
        asked = {read.source: read.node for lifted in self.lifted for read in lifted.capture.reads}
        for source, seen in outcomes.items():
            if seen == {True} and asks_for_rows(asked[source]):
                self._without_rows(source)
                continue
            kinds = {type(v) for v in seen}
            others: list[Any] = (
                [1e30, -1e30, 0.0]
                if float in kinds
                else [10**6, 0, -1]
                if int in kinds
                else [not v for v in seen]
                if len(seen) == 1
                else []
            )
            for value in others:
                try:
                    flipped = self.lift(Routing("diverse", 0), self.sizes[0], {source: value})
                    _same_form(self.lifted[0], flipped)
                except Refused as why:
                    raise _changes(source) from why
                except Exception:
                    continue  # the other way ends in an error, as it would in the original
                self._add(flipped, self.sizes[0])  # from here on it is one of the captures that must agree

    def _without_rows(self, source: Source) -> None:
        """Whether an expert has rows came out true everywhere. At a few tokens it may not, and must not matter; where
        it does even then, the program only asks about experts that were chosen (`for e in ids.unique()`)."""
        why: Refused | None = None
        for seed in range(8):
            sizes = dict.fromkeys(self.arguments.dims, 1) | {self.arguments.dims[-1]: 2 + seed % 2}
            kind = ("flooded", "diverse")[seed // 2 % 2]
            try:
                reads = self.capture(Routing(kind, 40 + seed), sizes).reads if self._is_within(sizes) else ()
            except Exception:
                continue  # the program does not run on so few
            if all(read.value for read in reads if read.source == source):
                continue
            try:
                lifted = self.lift(Routing(kind, 40 + seed), sizes)
                _same_form(self.lifted[0], lifted)
            except Refused as refusal:
                why = refusal  # few tokens may not show the form: others will
                continue
            self._add(lifted, sizes)
            return
        if why is not None:
            raise _changes(source) from why

    def _mix_comparisons(self) -> None:
        """A comparison of floats that came out the same for all elements in every capture (`weight > 0.01`), or for all
        tokens' first choices, looks like a constant: once it is made to come out both ways."""
        outcomes: dict[tuple[Source, int], set[bool]] = {}
        asked: dict[Source, set[Source]] = {}  # where the floats were compared
        for lifted in self.lifted:
            for n in filter(comparisons, lifted.capture.nodes):
                val = n.meta["val"]
                asked.setdefault(n.meta["source"], set()).update(a.meta["source"] for a in comparisons(n))
                per_slot = val.shape[-1:] == (lifted.slots,) and val.numel() == lifted.ids.numel()
                for slot, column in enumerate(val.reshape(-1, lifted.slots).t() if per_slot else [val]):
                    outcomes.setdefault((n.meta["source"], slot), set()).update(column.unique().tolist())
        for source in dict.fromkeys(source for (source, _), seen in outcomes.items() if len(seen) == 1):
            try:
                mixed = self.lift(Routing("diverse", 0), self.sizes[0], dict.fromkeys(asked[source], MIXED))
                _same_form(self.lifted[0], mixed)
            except Refused as why:
                raise Refused(
                    f"a comparison that came out the same everywhere changes what is computed: {source.text}",
                    source=str(source),
                    remedy="moefx needs one formula for all tokens",
                ) from why
            except Exception:
                continue  # the other way ends in an error (a check for NaN), as it would in the original
            self._add(mixed, self.sizes[0])

    def _overflow(self) -> None:
        """Limits that the captures did not come to are gone beyond, with as many tokens as that takes; else the form is
        guarded to hold only where there are too few to."""
        slots = self.lifted[0].slots
        for _ in range(3):
            left = not_reached([lifted.capture for lifted in self.lifted])
            # of a capacity that grows with the tokens and has room for all of them there is nothing behind
            left = {place: seen for place, seen in left.items() if len(seen) == 1 or not self._has_room(place, slots)}
            if not left:
                return
            lowest = min(min(seen) for seen in left.values())
            tokens = int(lowest / 0.85) + 10
            sizes = dict.fromkeys(self.arguments.dims, 1) | {self.arguments.dims[-1]: tokens}
            if tokens > _MOST_TOKENS or sizes in self.sizes or not self._is_within(sizes):
                break
            try:
                lifted = self.lift(Routing("flooded", 3), sizes)
                _same_form(self.lifted[0], lifted)
            except Refused:
                break
            self._add(lifted, sizes)
        self.extra_guards.append(SizeGuard("*".join((*self.arguments.dims, str(slots))), "le", str(lowest), True))

    def _has_room(self, place: LimitPlace, slots: int) -> bool:
        found = [(limits(lifted.capture).get(place), math.prod(lifted.tokens)) for lifted in self.lifted]
        return all(limit is None or limit >= tokens * slots for limit, tokens in found)

    def _carry_over(self) -> None:
        """What a call leaves in the block's attributes must not change what the next call computes."""
        first = self.lifted[0].capture
        left = {str(e.target): e.node for e in first.effects if e.kind == "attribute"}
        if not left:
            return
        with contextlib.ExitStack() as stack:
            for path, node in left.items():
                owner, _, key = path.rpartition(".")
                state = vars(self.block.get_submodule(owner))
                stack.callback(state.update, {key: state[key]}) if key in state else stack.callback(state.pop, key)
                val = node.meta["val"]
                state[key] = _random(val) if isinstance(val, FakeTensor) else val.clone()
            again = self.lift(Routing("diverse", 0), self.sizes[0])
        _same_form(self.lifted[0], again)
        names = [[str(n.target) for n in c.nodes if n.op == "call_function"] for c in (first, again.capture)]
        if names[0] != names[1] and any(n.op == "get_attr" and n.meta["fqn"] in left for n in again.capture.nodes):
            raise Refused(
                "what a call leaves in an attribute changes the next call",
                culprits=tuple(left),
                source=str(next(iter(left.values())).meta["source"]),
            )

    def _other_sizes(self) -> None:
        """One token, and many: sizes at which code often takes another way."""
        dims = self.arguments.dims
        one = dict.fromkeys(dims, 1)
        many = [self.arguments.choose(3 * max(29, self.hint // 4), 2)] if self.hint <= 64 else []
        for sizes in filter(self._is_within, [one, *many]):
            told_apart = not all(g.holds(sizes) for g in self._guards())
            # whether one token shows the form hangs on what it chooses: experts that do nothing show nothing
            most = max(self.lifted[0].groups, key=lambda g: len(g.ids)).ids
            more = [Routing("diverse", 5, (e,)) for e in most[:3]] + [Routing("diverse", seed) for seed in range(6, 10)]
            for routing in [Routing("diverse", 5), *(more if sizes == one else [])]:
                try:
                    lifted = self.lift(routing, sizes)
                    told_apart |= not all(g.holds(self.sizes[0]) for g in lifted.capture.sizes.guards)
                    _same_form(self.lifted[0], lifted)
                except Exception:  # the program's own, at sizes that it is not made for
                    if not told_apart and sizes != one:
                        raise
                    continue
                lifted.optional = told_apart or sizes == one
                self._add(lifted, sizes)
                break
            else:
                if not told_apart:  # else it is by a comparison that we saw: a guard
                    self.extra_guards.append(SizeGuard("*".join(dims), "gt", "1", True))

    def _leaked_sizes(self) -> None:
        """A size, or how many tokens an expert got, that became a plain number (`int(n / 2)`) may decide a branch
        unseen. So more sizes are captured, and where one runs other lines than all before, the form is guarded to hold
        below it."""
        routed = any(lifted.capture.sizes.routed for lifted in self.lifted)
        if not routed and not any(lifted.capture.sizes.leaks for lifted in self.lifted):
            return
        crowd = Routing("flooded", 8) if routed else Routing("diverse", 8)
        many = [lifted.capture for lifted in self.lifted if math.prod(lifted.tokens) > 1]
        every = set().union(*map(_lines, many))
        always = set.intersection(*map(_lines, many))
        most = 4 * max(len(c.nodes) for c in many)
        below = max(math.prod(sizes.values()) for sizes in self.sizes)

        def differs(tokens: int) -> bool:
            """Raises `CaptureError` where a loop over the tokens makes a program too long to look at."""
            sizes = dict.fromkeys(self.arguments.dims, 1) | {self.arguments.dims[-1]: tokens}
            if not all(g.holds(sizes) for g in self._guards()):
                return False
            return not (always <= _lines(self.capture(crowd, sizes, most=most)) <= every)

        for tokens in _LEAK_SIZES:
            if tokens <= below:
                continue
            try:
                other = differs(tokens)
            except CaptureError:
                return  # its lines are those of the smaller sizes
            if other:
                high = str(_first(differs, below, tokens))
                self.extra_guards.append(SizeGuard("*".join(self.arguments.dims), "lt", high, True))
                return
            below = tokens

    def _guards(self) -> list[SizeGuard]:
        return [g for lifted in self.lifted for g in lifted.capture.sizes.guards]


def _changes(source: Source) -> Refused:
    return Refused(
        f"a value read from a tensor changes what is computed: {source.text}",
        source=str(source),
        remedy="moefx needs one formula for all tokens",
    )


def _same_form(a: Lifted, b: Lifted) -> None:
    """Raise unless two lifts have one template. `b` may have met fewer kinds of experts and only some of the experts;
    its groups are put into the order of `a`'s."""
    where = str(a.cut.meta["source"])
    if a.slots != b.slots:
        raise Refused(
            f"the number of slots per token depends on routing or size: {a.slots} and {b.slots}", source=where
        )
    if a.index.form != b.index.form or len(a.shared) != len(b.shared):
        raise Refused("which experts are chosen, or what is added for all tokens, depends on the routing", source=where)
    if a.missed and b.missed and a.missed.form != b.missed.form:
        raise Refused("what tokens without an expert get depends on the routing", source=where)
    by_form = {(g.body, tuple(v.form for v in g.values)): g for g in b.groups}
    ordered = [by_form.pop((g.body, tuple(v.form for v in g.values)), None) for g in a.groups]
    if by_form:
        raise Refused("experts compute different functions under different routings", source=where)
    b.groups[:] = [
        h if h is not None else dataclasses.replace(g, ids=[], tables=[{} for _ in g.tables], values=[])
        for g, h in zip(a.groups, ordered, strict=True)
    ]


def _first(differs: Callable[[int], bool], low: int, high: int) -> int:
    """The least size that differs, between one that does not and one that does."""
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if differs(middle) else (middle, high)
    return high


def _random(like: torch.Tensor) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)  # not the user's
    return torch.randn(like.shape, generator=generator).to(like.dtype)


def _lines(taken: Capture) -> set[tuple[str, str]]:
    """Which lines of the user's ran, and which ops they came to."""
    return {(str(n.meta["source"]), str(n.target)) for n in taken.nodes if n.op == "call_function"}


R = TypeVar("R")


def deep(fn: Callable[[], R]) -> R:
    """Run `fn` with room for the recursion that a chain of hundreds of experts needs."""
    result: list[Any] = []
    # autocast is a state of the thread; a proof is always about the differentiable code
    autocast = {
        "device_type": "cpu",
        "dtype": torch.get_autocast_dtype("cpu"),
        "enabled": torch.is_autocast_enabled("cpu"),
    }

    def run() -> None:
        try:
            with torch.autocast(**autocast), torch.enable_grad():
                result.append((True, fn()))
        except BaseException as error:
            result.append((False, error))

    with _limits():
        thread = threading.Thread(target=run)
        thread.start()
        thread.join()
    ok, value = result[0]
    if not ok:
        raise value
    return value


@contextlib.contextmanager
def _limits() -> Iterator[None]:
    recursion, stack = sys.getrecursionlimit(), threading.stack_size(512 << 20)
    sys.setrecursionlimit(max(recursion, 200_000))
    try:
        yield
    finally:
        sys.setrecursionlimit(recursion)
        threading.stack_size(stack)
