"""From a block to a proven canonical form: several captures under unlike routings must lift to one template."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Iterable, Iterator
from typing import Any

from torch import nn

from ..capture.captured import Capture
from ..capture.concolic import capture
from ..capture.idle_tests import Questions, refuse_remembered
from ..capture.inputs import Arguments
from ..capture.routing import Routing
from ..capture.sizes import SizeGuard, SizeLog
from ..capture.source import Source
from ..capture.tracer import Flips
from ..errors import Refused
from .drop_rules import refuse_unexplained
from .graph_nodes import Line, line
from .guarded_sizes import find_sequence, find_sizes
from .lift.canonical_form import Lifted, with_all_experts
from .lift.distinct_choices import are_different
from .lift.form_agreement import same_form
from .lift.lifter import ONE_EXPERT, Late, Lifter, NothingRouted
from .lift.repeated_choices import NotTwice
from .lift.routed_nodes import chooses_for_sequences, has_rows_of_padding, padded
from .match_result import Expert, Match
from .probes import (
    branch_outcomes,
    call_integers,
    coinciding_choices,
    crowded_experts,
    expert_counts,
    expert_coverage,
    idle_experts,
    leaked_sizes,
    load_comparisons,
    repeated_experts,
    token_numbers,
)
from .probes.plain_integers import refuse_plain_integers
from .probes.turning_integers import counting, with_turns
from .terms.node_semantics import conditions
from .terms.parameter_places import Place, sibling_names
from .unsupported_effects import refuse_records

NO_SIZES = "no sizes were found at which all that is compared with them comes out as for the example"
_MOST_EXTRA = 8
_LENGTHS = (1, 2, 3, 7, 29, 131, 517)  # of single sequences
_Places = tuple[tuple[Any, ...] | None, ...]  # of the choice, and by the kinds of experts


class Prover:
    """Args:
    within: sizes of which these do not hold are left alone: the program may do something else there.
    symbolic: comparisons of floats are part of activations (see `Semantics`).
    whole: lines of nodes that are taken as they are.
    late: the routed sum is complete only behind the last write to it, or the last node at all (see `Lifter`).
    """

    def __init__(
        self,
        block: nn.Module,
        arguments: Arguments,
        num_experts_hint: int = 8,
        within: tuple[SizeGuard, ...] = (),
        symbolic: bool = False,
        whole: frozenset[Line] = frozenset(),
        late: Late = "",
    ):
        self.block, self.arguments, self.hint, self.within = block, arguments, num_experts_hint, within
        self.tokens = max(29, num_experts_hint // 4)  # of the first capture
        self.late: Late = late
        self.symbolic, self.compares = symbolic, False  # and whether there are such comparisons
        self.by_slots = False
        self.whole = whole
        self.first: Capture | None = None
        self.asked: dict[SizeGuard, list[dict[str, int]]] = {}  # comparisons, and the sizes at which they were made
        self.children = sibling_names(block)
        self.lifted: list[Lifted] = []
        self.sizes: list[dict[str, int]] = []
        self.experts: set[str] | None = None
        self.extra_guards: list[SizeGuard] = []
        self.num_experts = 0
        self.settled: set[Any] = set()  # what `doubts` has looked into
        self.sequences: dict[tuple[int, int], dict[str, int]] = {}  # by the numbers of tokens and of captures
        self.held: dict[int, list[SizeGuard]] = {}  # by the number of captures
        self.questions = Questions()  # of all captures
        self.lengths: set[tuple[Source, ...]] = set()  # reads of how many rows there are that were not forced

    def capture(
        self,
        routing: Routing,
        sizes: dict[str, int],
        flips: Flips | None = None,
        most: int = 0,
    ) -> Capture:
        try:
            return self._captured(routing, sizes, flips, most)
        except IndexError:
            if (places := self.arguments.in_places()) is None:
                raise
            self.arguments = places
            return self._captured(routing, sizes, flips, most)

    def _captured(self, routing: Routing, sizes: dict[str, int], flips: Flips | None, most: int) -> Capture:
        args, kwargs = self.arguments.at(sizes, seed=routing.seed)
        if flips and self.lifted:  # a number that is not the program's own may be how often a loop runs
            most = 20 * len(self.lifted[0].capture.nodes)
        held = self.arguments.held
        fixed = tuple(self.arguments.fixed.values())
        log = SizeLog(sizes, fixed)
        try:
            taken = capture(self.block, args, kwargs, routing, flips=flips, sizes=log, most_nodes=most, held=held)
        finally:  # an assertion on a size tells which sizes the program takes
            log.rename(self.asked)
            for guard in log.guards:
                self.asked.setdefault(guard, []).append(sizes)
        if taken.tracer.refusals:
            raise taken.tracer.refusals[0]
        self.compares = self.compares or bool(conditions(taken.nodes))
        self.questions.add(taken.tracer.questions)
        return taken

    def side(self) -> tuple[SizeGuard, ...]:
        """Comparisons of sizes that came out otherwise than they do at the example's size, as they do there."""
        example = self.arguments.sizes
        sides = dict.fromkeys(g if g.holds(example) else dataclasses.replace(g, value=not g.value) for g in self.asked)
        tried = [sizes for several in self.asked.values() for sizes in several]
        return tuple(g for g in sides if not all(g.holds(sizes) for sizes in tried))

    def choose(self, tokens: int, variant: int) -> dict[str, int]:
        """Sizes with about so many tokens. If the program goes the example's way only elsewhere, with more or fewer,
        and others than the captures have: a program of one size would take sizes for constants."""
        sizes = self.arguments.choose(tokens, variant)
        known = {math.prod(one.values()) for one in self.sizes}
        if not self.within or (self.is_within(sizes) and math.prod(sizes.values()) not in known):
            return sizes
        # the first three differ, if they are chosen for the same number of tokens
        if found := find_sizes(self.arguments, self.within, self.tokens if variant < 3 else tokens):
            sizes = found[variant % (3 if variant < 3 else len(found))]
            if variant < 3 and math.prod(sizes.values()) in known:  # 7 * 11 and 11 * 7: numbers made of 77 are equal
                return next((one for one in found if math.prod(one.values()) not in known), sizes)
            return sizes
        for n in (tokens, *(tokens * 2**i for i in range(1, 7)), *(tokens >> i for i in range(1, 5))):
            sizes = self.arguments.choose(n, variant)
            if self.is_within(sizes):
                return sizes
        raise Refused(NO_SIZES)

    def sequence(self, tokens: int) -> dict[str, int]:
        """Sizes of one sequence with so many tokens; where the program goes the example's way only elsewhere, or for
        single sequences of no length the captures' way, of as few sequences as it takes, with so many tokens or a few
        more. Compare with `is_within`: there may be none."""
        key = tokens, len(self.lifted)
        if key not in self.sequences:
            one = [*map(self.arguments.sequence, _LENGTHS)]
            guards = [g for g in self._held() if not any(g.holds(sizes) for sizes in one)]
            self.sequences[key] = find_sequence(self.arguments, (*self.within, *guards), tokens)
        return self.sequences[key]

    def as_captured(self, tokens: int) -> dict[str, int]:
        """Sizes with so many tokens, or a few more, at which all comparisons come out as in the captures."""
        return find_sequence(self.arguments, (*self.within, *self._held()), tokens)

    def is_as_captured(self, sizes: dict[str, int]) -> bool:
        """Whether all comparisons come out as in the captures."""
        return all(g.holds(sizes) for g in self._held())

    def _held(self) -> list[SizeGuard]:
        """Comparisons that came out one way in all captures."""
        if len(self.lifted) not in self.held:
            guards = dict.fromkeys(self.seen_guards())
            self.held[len(self.lifted)] = [g for g in guards if all(g.holds(sizes) for sizes in self.sizes)]
        return self.held[len(self.lifted)]

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
        return self.lift_captured(self.capture(routing, sizes, flips))

    def lift_captured(self, taken: Capture) -> Lifted:
        """Lift a capture in the way of those that were lifted before."""
        return self.lift_as(taken, with_all_experts(self.lifted) if self.lifted else None)

    def _lifted_first(self, taken: Capture) -> Lifted:
        """Where a token chooses several times, with weights read off what has one for each choice, if there is such: a
        gate for each expert is there once where two choices are one expert."""
        lifted, refusal = None, None
        try:
            lifted = self.lift_as(taken, None)
        except NotTwice as why:
            refusal = why
        experts = {e for g in lifted.groups for e in g.ids} if lifted is not None else set[int]()
        if lifted is not None and are_different(lifted, experts, follows_masks=False):
            return lifted
        self.by_slots = True
        try:
            return self.lift_as(taken, None)
        except Refused:
            self.by_slots = False
        if lifted is None:
            raise refusal or AssertionError
        return lifted

    def _weigh_masks(self, sizes: dict[str, int]) -> None:
        """Integers that were 0 and 1 so far may be factors, as a 1 of them does not show, or may choose as a comparison
        with them does. If with other numbers the form is another one, or another node chooses, take that, and these
        numbers from here on."""
        if (counted := counting(self, sizes)) is None:
            return
        arguments, taken = counted
        try:
            lifted = self.lift_as(taken, None)
        except Refused:  # masks only, as it seems
            return
        with contextlib.suppress(Refused):
            same_form(self.lifted[0], lifted)
            if lifted.index.place == self.lifted[0].index.place:
                return
        self.arguments, self.lifted = arguments, [lifted]

    def _lifted_next(self, kind: str, seed: int, sizes: dict[str, int]) -> Lifted:
        """Where all second choices are dropped, which an expert with too few places does by chance, none says what its
        weight would be; nor where a buffer has values with which all are: under another routing of this kind some are
        kept."""
        found: Lifted | NothingRouted | None = None
        as_they_are = kind == "skewed"
        # a program may leave out experts that all tokens choose, or that nobody does: a crowd leaves it some others
        for name, more in ((kind, 0), (kind, 3), (kind, 6), *([("flooded", 0)] if as_they_are else [])):
            try:
                found = self.lift(Routing(name, seed + more, as_they_are=as_they_are), sizes)
            except NothingRouted as why:
                found = found or why
                continue
            if kind != "contested" or bool(found.kept.any(0).all()):
                break
        if isinstance(found, Lifted):
            return found
        assert found is not None
        raise found

    def lift_as(self, taken: Capture, like: Lifted | None, is_last: bool = False) -> Lifted:
        lifter = Lifter(self.block, taken, like, self.symbolic, self.by_slots, is_last, self.whole, self.late)
        lifted = lifter.lift(self.experts)
        self.experts = self.experts or lifter.experts
        lifted.groups.sort(key=lambda g: g.ids[0])
        return lifted

    def prove(self) -> Match:
        tokens = self.tokens
        self.arguments, first = with_turns(self, self.choose(tokens, 0))
        plans = [("diverse", tokens), ("skewed", max(25, tokens * 3 // 4)), ("flooded", 13)]
        for variant, (kind, n) in enumerate(plans):
            if kind == "flooded" and self.lifted[0].slots > 1:
                kind = "contested"  # who of several slots comes first
            sizes = self.choose(n, variant)
            if variant == 0:
                self.first = first or self.capture(Routing(kind, variant), sizes)
                try:
                    lifted = self._lifted_first(self.first)
                except Refused:
                    sizes = self.arguments.choose_sequences()
                    if not chooses_for_sequences(self.first) or not self.is_within(sizes):
                        raise
                    lifted = self._lifted_first(self.capture(Routing(kind, variant), sizes))
                self.add(lifted, sizes)
                self._weigh_masks(sizes)
            else:
                self.add(self._lifted_next(kind, variant, sizes), sizes)
        token_numbers.more_slots(self)
        expert_coverage.every_expert(self)
        if self.num_experts < 2:
            if any(_has_others(lifted) for lifted in self.lifted):
                raise Refused(ONE_EXPERT, source=str(self.lifted[0].cut.meta["source"]))
            raise Refused("there is one expert only, for all tokens: nothing is chosen")
        self._agree()
        self._refuse_early()
        idle_experts.leave_idle(self)
        branch_outcomes.flip_branches(self)
        branch_outcomes.mix_decisions(self)
        coinciding_choices.tell_apart(self)
        call_integers.settle(self)
        crowded_experts.spread_numbers(self)
        crowded_experts.overflow(self)
        branch_outcomes.carry_over(self)
        repeated_experts.fall_together(self)
        token_numbers.other_sizes(self)
        expert_counts.vary_counts(self)
        load_comparisons.vary_loads(self)
        crowded_experts.overflow(self)  # limits that more tokens have, `min(T, 64)`
        branch_outcomes.flip_branches(self)  # that only crowds, few tokens or many came to
        branch_outcomes.mix_decisions(self)
        crowded_experts.spread_numbers(self)  # what has other values in the captures since
        crowded_experts.overflow(self)
        leaked_sizes.leaked_sizes(self)
        leaked_sizes.round_sizes(self)
        leaked_sizes.same_by_chance(self)
        refuse_remembered(self.questions)
        refuse_plain_integers(self)
        idle_experts.concentrate(self)
        self._align()
        self._merged()  # raises before more captures are made
        self.lifted, self.sizes = self._complete()
        return self._match(self.lifted, self.sizes)

    def _match(self, several: list[Lifted], sizes: list[dict[str, int]]) -> Match:
        """What captures of these sizes have in common, with the parameters that any capture has shown."""
        groups = self._merged()
        for group, merged in enumerate(groups):
            merged.values = [
                list(refs) for refs in zip(*[lifted.groups[group].values for lifted in several], strict=True)
            ]
        compared = {g for g in self.seen_guards() if all(g.holds(one) for one in sizes)}
        return Match(
            self.block,
            self.arguments,
            several,
            sizes,
            groups,
            self.num_experts,
            [g for g in dict.fromkeys((*self.within, *self.extra_guards)) if g not in compared],
            set().union(*[lifted.capture.modes_read for lifted in several]),
            self.capture,
            self.lift,
            within=self.within,
        )

    def _refuse_early(self) -> None:
        """Raise what the proof would end in, as far as the first captures show it.

        Raises:
            Refused: parameters, what the block writes, or slots that are dropped for no reason.
        """
        self._merged()
        for lifted in self.lifted:
            refuse_records(lifted.capture)
        full = [i for i, lifted in enumerate(self.lifted) if all(g.ids for g in lifted.groups)]
        if not full:
            return
        first, sizes = [self.lifted[i] for i in full], [self.sizes[i] for i in full]
        try:
            refuse_unexplained(self._match(first, sizes))
        except Refused as refusal:
            if not are_different(self.lifted[0], self.seen):  # `twice` tells more of a choice of one expert twice
                return
            try:  # `_align` may read weights off other nodes, those behind a mask
                again = [self._read_as(one, self.lifted[0], self.lifted[0], True) for one in first]
                refuse_unexplained(self._match(again, sizes))
            except Refused:
                raise refusal from None

    def other_ways(self) -> Iterator[dict[str, Any]]:
        """Arguments for provers that read the program otherwise, for when this one's reading is refused: comparisons as
        parts of activations; the sum behind all writes to it; hidden states of which some are padding as they are."""
        if self.compares and not self.symbolic:
            yield {"symbolic": True}
        if self.lifted and any(not lifted.kept.all() for lifted in self.lifted):
            yield from ({"late": "write"}, {"late": "any"})
        is_masked = any(leaf.example is not None and not leaf.is_single for leaf in self.arguments.tensors)
        if self.first is None or not (is_masked or has_rows_of_padding(self.first, self.arguments.width)):
            return
        if lines := padded(self.block, self.first, self.arguments.width):
            yield {"whole": lines}

    def add(self, lifted: Lifted, sizes: dict[str, int]) -> None:
        self.lifted.append(lifted)
        self.sizes.append(sizes)

    def _agree(self) -> None:
        """All captures have the form of the one that met the most slots, kinds of experts and parts that all tokens
        get, which comes first."""

        def met(i: int) -> tuple[int, ...]:
            return self.lifted[i].slots, len(self.lifted[i].groups), len(self.lifted[i].shared), -i

        best = self.lifted[richest := max(range(len(self.lifted)), key=met)]
        for i, lifted in enumerate(self.lifted):
            # all second choices were dropped, or nobody chose an identity, or everybody did
            if lifted.slots < best.slots or len(lifted.shared) != len(best.shared):
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
            if len(full) >= 3 and self._vary(full):
                return [self.lifted[i] for i in full], [self.sizes[i] for i in full]
            sizes = self.choose(max(21, self.hint // 4), seed)
            self.add(self.lift(Routing(("diverse", "flooded")[seed % 2], seed), sizes), sizes)
            self.agree(self.lifted[-1])
        raise Refused("no routing was found under which all kinds of experts are used")

    def _vary(self, captures: list[int]) -> bool:
        """Whether these differ in their sizes, and in each axis in which any do: a number that depends on one that they
        have in common would look like a constant."""

        def count(axes: tuple[str, ...], among: Iterable[int]) -> int:
            return len({tuple(self.sizes[i][dim] for dim in axes) for i in among})

        every, dims = range(len(self.sizes)), self.arguments.dims
        return count(dims, captures) >= min(3, count(dims, every)) and all(
            count((dim,), captures) >= min(2, count((dim,), every)) for dim in dims
        )

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

    @property
    def seen(self) -> set[int]:
        """Experts that were at work in some capture."""
        return {e for lifted in self.lifted for g in lifted.groups for e in g.ids}

    def seen_guards(self) -> list[SizeGuard]:
        return [g for lifted in self.lifted for g in lifted.capture.sizes.guards]


def _has_others(lifted: Lifted) -> bool:
    """Whether some tokens have another choice than the expert, or are none of the rows that it is given."""
    return len(lifted.ids.unique()) > 1 or len(lifted.ids) < lifted.capture.sizes.tokens


def _places(lifted: Lifted) -> _Places:
    """Where the program computes who the experts are, and what they take, of each kind that the capture met."""
    chosen = tuple(map(line, lifted.index.nodes))
    return chosen, *(tuple(line(n) for ref in g.values for n in ref.nodes) if g.ids else None for g in lifted.groups)


def _are_same(places: _Places, others: _Places) -> bool:
    """Of the choice, and of the kinds of experts that both captures met."""
    return all(p == q for p, q in zip(places, others, strict=True) if p is not None and q is not None)
