"""From a block to a proven canonical form: several captures under unlike routings must lift to one template."""

from __future__ import annotations

import contextlib
import dataclasses
from collections import Counter
from typing import Any

from torch import nn

from ...capture.captured import Capture
from ...capture.concolic import capture
from ...capture.inputs import Arguments
from ...capture.routing import Routing
from ...capture.sizes import SizeGuard
from ...capture.tracer import Flips
from ...errors import Refused
from . import crowds, doubts, given, leaks, twice
from .agree import same_form
from .different import are_different
from .form import Lifted, with_all_experts
from .lift import Lifter
from .matched import Expert, Match
from .nodes import line
from .paths import Place, expert_indices, sibling_names, tensor_at
from .ranges import UNBOUNDED, Ranges
from .semantics import conditions
from .turns import with_turns
from .worth import NotTwice

_MOST_EXTRA = 8
_CHANCE = 1e-3
_Places = tuple[tuple[Any, ...] | None, ...]  # of the choice, and by the kinds of experts


class Prover:
    """Args:
    within: sizes of which these do not hold are left alone: the program may do something else there.
    symbolic: comparisons of floats are part of activations (see `Semantics`).
    """

    def __init__(
        self,
        block: nn.Module,
        arguments: Arguments,
        num_experts_hint: int = 8,
        within: tuple[SizeGuard, ...] = (),
        symbolic: bool = False,
    ):
        self.block, self.arguments, self.hint, self.within = block, arguments, num_experts_hint, within
        self.symbolic, self.compares = symbolic, False  # and whether there are such comparisons
        self.by_slots = False
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
        flips: Flips | None = None,
        most: int = 0,
    ) -> Capture:
        args, kwargs = self.arguments.at(sizes, seed=routing.seed)
        if flips and self.lifted:  # a number that is not the program's own may be how often a loop runs
            most = 20 * len(self.lifted[0].capture.nodes)
        held = self.arguments.held
        taken = capture(self.block, args, kwargs, routing, flips=flips, dims=sizes, most_nodes=most, held=held)
        if taken.tracer.refusals:
            raise taken.tracer.refusals[0]
        self.compares = self.compares or bool(conditions(taken.nodes))
        taken.sizes.rename(self.asked)
        for guard in taken.sizes.guards:
            self.asked.setdefault(guard, []).append(sizes)
        return taken

    def side(self) -> tuple[SizeGuard, ...]:
        """Comparisons of sizes that came out otherwise than they do at the example's size, as they do there."""
        example = self.arguments.sizes
        sides = dict.fromkeys(g if g.holds(example) else dataclasses.replace(g, value=not g.value) for g in self.asked)
        tried = [sizes for several in self.asked.values() for sizes in several]
        return tuple(g for g in sides if not all(g.holds(sizes) for sizes in tried))

    def choose(self, tokens: int, variant: int) -> dict[str, int]:
        """Sizes with about so many tokens; with more, or fewer, where the program goes the example's way only there."""
        for n in (tokens, *(tokens * 2**i for i in range(1, 7)), *(tokens >> i for i in range(1, 5))):
            sizes = self.arguments.choose(n, variant)
            if self.is_within(sizes):
                return sizes
        raise Refused("no sizes were found at which all that is compared with them comes out as for the example")

    def is_within(self, sizes: dict[str, int]) -> bool:
        return all(g.holds(sizes) for g in self.within)

    def _align(self) -> None:
        """What no mask or limit touched in the first captures was found before it, as well as behind it; where a
        later capture was touched it can only be read off behind. Then it is, in all captures; what some have from here
        and others from there, as `where` does, behind both."""
        places = [_places(lifted) for lifted in self.lifted]
        firsts = sorted({of: i for i, of in reversed([*enumerate(places)])}.values())
        ways = [(i, False) for i in firsts]
        for at, is_last in [*ways, (0, True)] if len(firsts) > 1 else ways:
            like = self.lifted[at]
            if not is_last and all(_are_same(of, places[at]) for of in places):
                continue
            again: dict[int, Lifted] = {}
            with contextlib.suppress(Refused):
                for i in sorted(range(len(places)), key=lambda i: i not in firsts):  # to see soon that it cannot be
                    again[i] = self._read_as(self.lifted[i], like, self.lifted[0], is_last)
                    if not _are_same(_places(again[i]), _places(again[firsts[0]]) if is_last else places[at]):
                        break
                else:
                    self.lifted = [again[i] for i in range(len(places))]
                    return

    def agree(self, lifted: Lifted) -> None:
        """All captures have the form of another one. Where that has drops, which they have not, weights may be read off
        other nodes there, those that are zero for what is dropped: then in all captures.

        Raises:
            Refused: they have not.
        """
        try:
            same_form(self.lifted[0], lifted)
        except Refused:
            if lifted.kept.all():
                raise
            self.lifted = [self._read_as(one, lifted, lifted) for one in self.lifted]

    def read_as(self, lifted: Lifted) -> None:
        """Read all captures off the nodes that another one was read off.

        Raises:
            Refused: they cannot be.
        """
        if _are_same(_places(lifted), _places(self.lifted[0])):
            return
        again = [self._read_as(one, lifted, lifted) for one in self.lifted]
        if not all(_are_same(_places(one), _places(lifted)) for one in again):
            raise Refused("which weight a choice has depends on the routing", source=str(lifted.cut.meta["source"]))
        self.lifted = again

    def _read_as(self, old: Lifted, like: Lifted, form: Lifted, is_last: bool = False) -> Lifted:
        """A capture once more, read off the nodes that another one was read off, or off the last ones that fit.

        Raises:
            Refused: it has not this form then.
        """
        new = self.lift_as(old.capture, like, is_last)
        same_form(form, new)
        new.optional = old.optional
        return new

    def lift(self, routing: Routing, sizes: dict[str, int], flips: Flips | None = None) -> Lifted:
        like = with_all_experts(self.lifted) if self.lifted else None
        return self.lift_as(self.capture(routing, sizes, flips), like)

    def _lifted_first(self, taken: Capture) -> Lifted:
        """Where two choices of a token may be one expert, with weights read off what has one for each choice, if there
        is such: a gate for each expert is there once then."""
        lifted, refusal = None, None
        try:
            lifted = self.lift_as(taken, None)
        except NotTwice as why:
            refusal = why
        if lifted is not None and are_different(lifted, {e for g in lifted.groups for e in g.ids}):
            return lifted
        self.by_slots = True
        try:
            return self.lift_as(taken, None)
        except Refused:
            self.by_slots = False
        if lifted is None:
            raise refusal or AssertionError
        return lifted

    def lift_as(self, taken: Capture, like: Lifted | None, is_last: bool = False) -> Lifted:
        lifter = Lifter(self.block, taken, like, self.symbolic, self.by_slots, is_last)
        lifted = lifter.lift(self.experts)
        self.experts = self.experts or lifter.experts
        lifted.groups.sort(key=lambda g: g.ids[0])
        return lifted

    def prove(self) -> Match:
        tokens = max(29, self.hint // 4)
        self.arguments, first = with_turns(self, self.choose(tokens, 0))
        plans = [("diverse", tokens), ("skewed", max(25, tokens * 3 // 4)), ("flooded", 13)]
        for variant, (kind, n) in enumerate(plans):
            if kind == "flooded" and self.lifted[0].slots > 1:
                kind = "contested"  # who of several slots comes first
            sizes = self.choose(n, variant)
            if variant == 0:
                self.add(self._lifted_first(first or self.capture(Routing(kind, variant), sizes)), sizes)
            else:
                self.add(self.lift(Routing(kind, variant, as_they_are=kind == "skewed"), sizes), sizes)
        self._more_slots()
        self._cover()
        if self.num_experts < 2:
            raise Refused("there is one expert only, for all tokens: nothing is chosen")
        self._agree()
        self._merged()  # raises early
        doubts.flip_branches(self)
        doubts.mix_decisions(self)
        given.settle(self)
        crowds.spread_numbers(self)
        crowds.overflow(self)
        doubts.carry_over(self)
        twice.fall_together(self)
        self._other_sizes()
        leaks.leaked_sizes(self)
        leaks.round_sizes(self)
        leaks.same_by_chance(self)
        self._align()
        groups = self._merged()
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

    def add(self, lifted: Lifted, sizes: dict[str, int]) -> None:
        self.lifted.append(lifted)
        self.sizes.append(sizes)

    def _more_slots(self) -> None:
        """Where many choices are dropped, those that come last may be in all captures: a few tokens have places for
        them."""
        if all(bool(lifted.kept.all()) for lifted in self.lifted):
            return
        sizes = self.arguments.sequence(5)
        if self.is_within(sizes):
            with contextlib.suppress(Exception):  # at sizes that the program is not made for
                lifted = self.lift(Routing("diverse", 6), sizes)
                if lifted.slots > self.lifted[0].slots:
                    self.add(lifted, sizes)

    def _agree(self) -> None:
        """All captures have the form of the one that met the most slots and kinds of experts, which comes first."""
        richest = max(range(len(self.lifted)), key=lambda i: (self.lifted[i].slots, len(self.lifted[i].groups), -i))
        best = self.lifted[richest]
        for i, lifted in enumerate(self.lifted):
            if lifted.slots < best.slots:  # all second choices were dropped
                self.lifted[i] = self.lift_as(lifted.capture, best)
        self.lifted.insert(0, self.lifted.pop(richest))
        self.sizes.insert(0, self.sizes.pop(richest))
        for i in range(1, len(self.lifted)):
            self.agree(self.lifted[i])

    def _complete(self) -> tuple[list[Lifted], list[dict[str, int]]]:
        """The captures in which all kinds of experts were at work: the graph is read off these."""
        for seed in range(30, 30 + _MOST_EXTRA):
            full = [i for i, lifted in enumerate(self.lifted) if all(g.ids for g in lifted.groups)]
            if any(self.lifted[i].missed for i in full):
                full = [i for i in full if self.lifted[i].missed]
            if len(full) >= 3:
                return [self.lifted[i] for i in full], [self.sizes[i] for i in full]
            sizes = self.choose(max(21, self.hint // 4), seed)
            self.add(self.lift(Routing(("diverse", "flooded")[seed % 2], seed), sizes), sizes)
            self.agree(self.lifted[-1])
        raise Refused("no routing was found under which all kinds of experts are used")

    # ------------------------------------------------------------------ every expert is seen
    @property
    def seen(self) -> set[int]:
        return {e for lifted in self.lifted for g in lifted.groups for e in g.ids}

    def _zeros(self) -> set[int]:
        """Ids that are chosen now and then and never contribute: experts that do nothing. So often that it is not by
        chance, as it may be where a mask or a capacity drops many slots, or where a buffer allows some experts only:
        it allows others in another capture."""
        chosen = [(one, one.ids.flatten().tolist()) for one in self.lifted]
        slots = [seen for one, ids in chosen for seen in zip(ids, one.kept.flatten().tolist(), strict=True)]
        captures = [(e, bool(one.kept[one.ids == e].any())) for one, ids in chosen for e in set(ids)]
        by_slots, by_captures = _never(slots), _never(captures)
        return {e for e, n in Counter(e for e, _ in captures).items() if e in by_slots & by_captures and n > 1}

    def _total(self) -> int:
        """How many experts there are: as many as the stacks are long, the siblings many, or the ids high."""
        first = self.lifted[0]
        total = max(self.seen) + 1
        for group in first.groups:
            for table in group.tables:
                total = max(total, self._siblings(table), self._stack(table, group.tables))
        for node in first.index.nodes:
            ids = Ranges(first.capture.nodes).of(node)
            if ids is not None and (ids[0] >= 0).all() and ids[1].numel() and ids[1].max() < UNBOUNDED:
                total = max(total, int(ids[1].max()) + 1)
        return total

    def _stack(self, table: dict[int, Place], tables: list[dict[int, Place]]) -> int:
        """How many parts a tensor has, if the experts count them; as many for each of the tables that share it."""
        if any(expert_indices(place, self.children)[:1] != [e] for e, place in table.items()):
            return 0
        tensor, length = self._stack_of(next(iter(table.values())))
        taken = set(table.values())
        others = [set(t.values()) for t in tables if self._stack_of(next(iter(t.values()))) == (tensor, length)]
        apart = [places for places in others if not places & taken]
        return length // (1 + len(apart))

    def _stack_of(self, place: Place) -> tuple[Any, int]:
        """What a place is a part of, and how many parts that has."""
        shape = tensor_at(self.block, place.fqn).shape
        for i, (op, *rest) in enumerate(place.steps):
            if op == "at":
                return (place.fqn, place.steps[:i]), shape[rest[1][0][0]]
            if op == "slice":
                _, dim, start, stop, _ = rest
                return (place.fqn, place.steps[:i]), shape[dim] // (stop - start)
            if op in ("reshape", "permute", "expand"):
                shape = rest[0]
        return place.fqn, 0

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
        while missing := sorted(set(range(self.num_experts)) - self.seen - self._zeros()):
            if extra == _MOST_EXTRA:
                raise Refused(
                    f"{len(missing)} of {self.num_experts} experts were never chosen under any routing tried, "
                    f"the first is expert {missing[0]}"
                )
            extra += 1
            sizes = self.choose(max(17, min(len(missing), 4 * self.hint)), extra)
            before = set(missing)
            prefer = tuple(missing) * max(1, 16 // len(missing))
            self.add(self.lift(Routing("diverse", 10 + extra, prefer=prefer), sizes), sizes)
            if before == set(range(self.num_experts)) - self.seen - self._zeros() and extra > 2:
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

    # ------------------------------------------------------------------ other sizes
    def _other_sizes(self) -> None:
        """One token, and many: sizes at which code often takes another way."""
        one, more_than_one = self.arguments.sequence(1), SizeGuard("*".join(self.arguments.dims), "gt", "1", True)
        many = [self.arguments.choose(3 * max(29, self.hint // 4), 2)] if self.hint <= 64 else []
        self._few()
        for sizes in filter(self.is_within, [one, *many]):
            told_apart = not all(g.holds(sizes) for g in self.seen_guards())
            # whether one token shows the form hangs on what it chooses: experts that do nothing show nothing
            most = max(self.lifted[0].groups, key=lambda g: len(g.ids)).ids
            more = [Routing("diverse", 5, (e,)) for e in most[:3]] + [Routing("diverse", seed) for seed in range(6, 10)]
            for routing in [Routing("diverse", 5), *(more if sizes == one else [])]:
                try:
                    lifted = self.lift(routing, sizes)
                    told_apart |= not all(g.holds(self.sizes[0]) for g in lifted.capture.sizes.guards)
                    same_form(self.lifted[0], lifted)
                except Exception:  # the program's own, at sizes that it is not made for
                    if not told_apart and sizes != one:
                        raise
                    continue
                if told_apart or sizes == one:
                    lifted.optional = more_than_one
                self.add(lifted, sizes)
                break
            else:
                if not told_apart:  # else it is by a comparison that we saw: a guard
                    self.extra_guards.append(more_than_one)

    def _few(self) -> None:
        """A few tokens that spread out, and a few that crowd on some experts and leave the others idle: a program
        that asks who is idle changes what the second ones get. Sizes that it is not made for show nothing."""
        sizes = self.arguments.sequence(3 if self.lifted[0].slots != 3 else 5)
        busy = max(self.lifted[0].groups, key=lambda g: len(g.ids)).ids[0]
        found: list[Lifted] = []
        unclear: list[Refused] = []  # so few may show too little
        differs: list[Refused] = []
        for routing in (Routing("diverse", 5), Routing("flooded", busy)) if self.is_within(sizes) else ():
            try:
                taken = self.capture(routing, sizes)
                is_apart = not all(g.holds(self.sizes[0]) for g in taken.sizes.guards)
                lifted = self.lift_as(taken, with_all_experts(self.lifted))
            except Refused as why:
                unclear.append(why)
                continue
            except Exception:  # the program's own
                continue
            try:
                same_form(self.lifted[0], lifted)
                found.append(lifted)
            except Refused as why:
                (unclear if is_apart else differs).append(why)
        if differs or (unclear and found):
            raise (differs or unclear)[-1]
        for lifted in found if len(found) == 2 else ():
            self.add(lifted, sizes)

    def seen_guards(self) -> list[SizeGuard]:
        return [g for lifted in self.lifted for g in lifted.capture.sizes.guards]


def _never(seen: list[tuple[int, bool]]) -> set[int]:
    """What never came true, and so often not that this is not by chance."""
    tried, came = Counter(e for e, _ in seen), Counter(e for e, is_true in seen if is_true)
    missed = 1 - came.total() / max(1, sum(n for e, n in tried.items() if e in came))
    return {e for e, n in tried.items() if e not in came and missed**n < _CHANCE}


def _places(lifted: Lifted) -> _Places:
    """Where the program computes who the experts are, and what they take, of each kind that the capture met."""
    chosen = tuple(map(line, lifted.index.nodes))
    return chosen, *(tuple(line(n) for ref in g.values for n in ref.nodes) if g.ids else None for g in lifted.groups)


def _are_same(places: _Places, others: _Places) -> bool:
    """Of the choice, and of the kinds of experts that both captures met."""
    return all(p == q for p, q in zip(places, others, strict=True) if p is not None and q is not None)
