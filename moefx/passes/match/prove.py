"""From a block to a proven canonical form: several captures under unlike routings must lift to one template."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import re
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import fx, nn
from torch.utils import _pytree as pytree

from ...capture.captured import Capture
from ...capture.concolic import capture
from ...capture.inputs import Arguments
from ...capture.routing import Routing
from ...capture.sizes import SizeGuard
from ...capture.tracer import Flips
from ...errors import Refused
from ..capacity import Formula, find_formula
from . import crowds, doubts, given, leaks
from .agree import same_form
from .form import Body, Lifted, Ref, most_tokens
from .lift import Lifter
from .nodes import line
from .paths import Place, expert_indices, sibling_names, tensor_at
from .ranges import UNBOUNDED, Ranges
from .semantics import conditions
from .turns import with_turns


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
# some are small, some multiples of what capacities are rounded to; with the last ones slopes that are alike differ
_PROBES = (2, 3, 6, 7, 10, 13, 20, 33, 40, 64, 65, 100, 127, 128, 200, 320, 333, 512, 1031, 4096, 4099)
_CHANCE = 1e-3
_Places = tuple[tuple[Any, ...] | None, ...]  # by the kinds of experts


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

    With `without_tokens` the form is for calls without tokens too, whatever way the block goes there, as long as all
    that it returns is empty then: a rank that has none takes part in what the others do.
    """

    block: nn.Module
    arguments: Arguments
    lifted: list[Lifted]
    sizes: list[dict[str, int]]
    groups: list[Expert]
    num_experts: int
    extra_guards: list[SizeGuard]
    modes_read: set[str]
    capture_at: Callable[..., Capture]
    drop: DropRule | None = None
    keep: list[Ref] | None = None
    within: tuple[SizeGuard, ...] = ()  # the way the program goes for the example, where it has two
    without_tokens: bool = False
    probes: dict[str, list[tuple[dict[str, int], Capture]]] = dataclasses.field(default_factory=dict)

    def probe(self, kind: str = "diverse") -> list[tuple[dict[str, int], Capture]]:
        """Captures at more sizes under this kind of routing, for numbers that depend on them."""
        if kind not in self.probes:
            probes = self.probes[kind] = []
            nodes = 4 * max(len(lifted.capture.nodes) for lifted in self.lifted)
            most = most_tokens(self.lifted, times=2)
            for tokens in itertools.takewhile(lambda tokens: tokens <= most, _PROBES):
                sizes = self.arguments.sequence(tokens)
                if all(g.holds(sizes) for g in self.within):
                    with contextlib.suppress(Exception):  # sizes that the program does not take
                        taken = self.capture_at(Routing(kind, 0), sizes, most=nodes if tokens > 512 else 0)
                        probes.append((sizes, taken))
        return self.probes[kind]

    def without_optional(self) -> bool:
        """Leave out the captures at sizes at which the program may go another way; the form then holds for the other
        sizes only. False if there are none."""
        left = [i for i, lifted in enumerate(self.lifted) if not lifted.optional]
        if len(left) == len(self.lifted) or len(left) < 2:
            return False
        gone = [(self.sizes[i], lifted.optional) for i, lifted in enumerate(self.lifted) if lifted.optional]
        values = [refs for group in self.groups for refs in group.values]
        for column in [self.lifted, self.sizes, *values, *([self.keep] if self.keep else [])]:
            column[:] = [column[i] for i in left]  # type: ignore[index]
        for sizes, guard in gone:
            if all(g.holds(sizes) for g in self.guards):  # the program was not seen to compare
                self.extra_guards.append(guard)
        return True

    @property
    def guards(self) -> list[SizeGuard]:
        """Comparisons of sizes that came out the same in every capture. Where captures went both ways and still agree
        on the form, the comparison does not matter."""
        found = dict.fromkeys(self._with_formula(g) for lifted in self.lifted for g in lifted.capture.sizes.guards)
        alike = [*(g for g in found if all(g.holds(sizes) for sizes in self.sizes)), *self.extra_guards]
        return [g for seen in alike for g in self._with_tokens(seen)] if self.without_tokens else alike

    def _with_tokens(self, guard: SizeGuard) -> list[SizeGuard]:
        """The comparison for sizes with tokens only, where nothing hangs on it without; none if it always holds."""
        each, ones = [{**self.sizes[0], dim: 0} for dim in self.arguments.dims], dict.fromkeys(self.arguments.dims, 1)
        tokens = "*".join(self.arguments.dims)
        try:
            if all(guard.holds(sizes) for sizes in each):
                return [guard]
        except ArithmeticError:
            pass
        if not self.is_empty_without_tokens:
            return [guard]
        is_product = {*re.sub(r"[() ]", "", guard.left).split("*")} <= {"1", *self.arguments.dims}
        if is_product and guard.right == ("1" if guard.op in ("ge", "lt") else "0") and guard.holds(ones):
            return []
        return [dataclasses.replace(guard, unless=tokens)]

    @functools.cached_property
    def is_empty_without_tokens(self) -> bool:
        """Whether, for no tokens, nothing that the block returns has an element, and it changes nothing."""
        for dim in self.arguments.dims:
            try:
                taken = self.capture_at(Routing("diverse", 0), {**self.sizes[0], dim: 0})
            except Exception:  # the program's own, which is not made for that
                return False
            values = [leaf.meta.get("val") for leaf in pytree.tree_leaves(taken.out) if isinstance(leaf, fx.Node)]
            if taken.effects or len(values) != len(pytree.tree_leaves(taken.out)):
                return False
            if not all(isinstance(value, torch.Tensor) and value.numel() == 0 for value in values):
                return False
        return True

    def _with_formula(self, guard: SizeGuard) -> SizeGuard:
        """What a size is compared with may be another number at each size: `min(S, int(1.25 * S / E))`."""
        points = []
        for sizes, lifted in zip(self.sizes, self.lifted, strict=True):
            alike = [g for g in lifted.capture.sizes.guards if dataclasses.replace(g, right=guard.right) == guard]
            if len(alike) == 1 and alike[0].right.isdigit():
                points.append((sizes, int(alike[0].right)))
        formula = find_formula(points, self.expressions, laws=False) if len({n for _, n in points}) > 2 else None
        own = formula is not None and any(n == formula(dims) and str(n) == guard.right for dims, n in points)
        return dataclasses.replace(guard, right=formula.text) if formula and own else guard

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
        taken = capture(self.block, args, kwargs, routing, flips=flips, dims=sizes, most_nodes=most)
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

    def _choose(self, tokens: int, variant: int) -> dict[str, int]:
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
        later capture was touched it can only be read off behind. Then it is, in all captures."""
        places = [_places(lifted) for lifted in self.lifted]
        firsts = sorted({of: i for i, of in reversed([*enumerate(places)])}.values())
        order = sorted(range(len(places)), key=lambda i: i not in firsts)  # to see soon that not all can be read so
        for like in firsts:
            if all(_are_same(of, places[like]) for of in places):
                continue
            again: dict[int, Lifted] = {}
            with contextlib.suppress(Refused):
                for i in order:
                    again[i] = self._read_as(self.lifted[i], self.lifted[like], self.lifted[0])
                    if not _are_same(_places(again[i]), places[like]):
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

    def _read_as(self, old: Lifted, like: Lifted, form: Lifted) -> Lifted:
        """A capture once more, read off the nodes that another one was read off.

        Raises:
            Refused: it has not this form then.
        """
        new = self._lifted(old.capture, like)
        same_form(form, new)
        new.optional = old.optional
        return new

    def lift(self, routing: Routing, sizes: dict[str, int], flips: Flips | None = None) -> Lifted:
        return self._lifted(self.capture(routing, sizes, flips), self._first())

    def _first(self) -> Lifted | None:
        return self.lifted[0] if self.lifted else None

    def _lifted(self, taken: Capture, like: Lifted | None) -> Lifted:
        lifter = Lifter(self.block, taken, like, self.symbolic)
        lifted = lifter.lift(self.experts)
        self.experts = self.experts or lifter.experts
        lifted.groups.sort(key=lambda g: g.ids[0])
        return lifted

    def prove(self) -> Match:
        tokens = max(29, self.hint // 4)
        self.arguments, first = with_turns(self, self._choose(tokens, 0))
        plans = [("diverse", tokens), ("skewed", max(25, tokens * 3 // 4)), ("flooded", 13)]
        for variant, (kind, n) in enumerate(plans):
            if kind == "flooded" and self.lifted[0].slots > 1:
                kind = "contested"  # who of several slots comes first
            sizes = self._choose(n, variant)
            taken = first if variant == 0 else None
            self.add(self._lifted(taken or self.capture(Routing(kind, variant), sizes), self._first()), sizes)
        self._cover()
        if self.num_experts < 2:
            raise Refused("there is one expert only, for all tokens: nothing is chosen")
        self._agree()
        groups = self._merged()
        doubts.flip_branches(self)
        doubts.mix_decisions(self)
        given.settle(self)
        crowds.spread_numbers(self)
        crowds.overflow(self)
        doubts.carry_over(self)
        self._other_sizes()
        leaks.leaked_sizes(self)
        leaks.round_sizes(self)
        leaks.same_by_chance(self)
        self._align()
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

    def _agree(self) -> None:
        """All captures have the form of the one that met the most slots and kinds of experts, which comes first."""
        richest = max(range(len(self.lifted)), key=lambda i: (self.lifted[i].slots, len(self.lifted[i].groups), -i))
        best = self.lifted[richest]
        for i, lifted in enumerate(self.lifted):
            if lifted.slots < best.slots:  # all second choices were dropped
                self.lifted[i] = self._lifted(lifted.capture, best)
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
            sizes = self._choose(max(21, self.hint // 4), seed)
            self.add(self.lift(Routing(("diverse", "flooded")[seed % 2], seed), sizes), sizes)
            self.agree(self.lifted[-1])
        raise Refused("no routing was found under which all kinds of experts are used")

    # ------------------------------------------------------------------ every expert is seen
    def _seen(self) -> set[int]:
        return {e for lifted in self.lifted for g in lifted.groups for e in g.ids}

    def _zeros(self) -> set[int]:
        """Ids that are chosen now and then and never contribute: experts that do nothing. So often that it is not by
        chance, as it may be where a mask or a capacity drops many slots."""
        chosen, kept = Counter[int](), Counter[int]()
        for lifted in self.lifted:
            chosen.update(lifted.ids.reshape(-1).tolist())
            kept.update(lifted.ids[lifted.kept].tolist())
        dropped = 1 - kept.total() / max(1, sum(n for e, n in chosen.items() if e in kept))
        return {e for e, n in chosen.items() if e not in kept and n > 2 and dropped**n < _CHANCE}

    def _total(self) -> int:
        """How many experts there are: as many as the stacks are long, the siblings many, or the ids high."""
        first = self.lifted[0]
        total = max(self._seen()) + 1
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
        while missing := sorted(set(range(self.num_experts)) - self._seen() - self._zeros()):
            if extra == _MOST_EXTRA:
                raise Refused(
                    f"{len(missing)} of {self.num_experts} experts were never chosen under any routing tried, "
                    f"the first is expert {missing[0]}"
                )
            extra += 1
            sizes = self._choose(max(17, min(len(missing), 4 * self.hint)), extra)
            before = set(missing)
            prefer = tuple(missing) * max(1, 16 // len(missing))
            self.add(self.lift(Routing("diverse", 10 + extra, prefer=prefer), sizes), sizes)
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
        found, why = [], None
        for routing in (Routing("diverse", 5), Routing("flooded", busy)) if self.is_within(sizes) else ():
            try:
                lifted = self.lift(routing, sizes)
                same_form(self.lifted[0], lifted)
                found.append(lifted)
            except Exception as error:
                why = error
        if len(found) == 1 and isinstance(why, Refused):
            raise why
        for lifted in found if len(found) == 2 else ():
            self.add(lifted, sizes)

    def seen_guards(self) -> list[SizeGuard]:
        return [g for lifted in self.lifted for g in lifted.capture.sizes.guards]


def _places(lifted: Lifted) -> _Places:
    """Where the program computes what the experts take, of each kind of experts that the capture met."""
    return tuple(tuple(line(n) for ref in g.values for n in ref.nodes) if g.ids else None for g in lifted.groups)


def _are_same(places: _Places, others: _Places) -> bool:
    """Of the kinds of experts that both captures met."""
    return all(p == q for p, q in zip(places, others, strict=True) if p is not None and q is not None)
