"""What is proven of a block: one canonical form, and the captures that all agree on it."""

from __future__ import annotations

import bisect
import contextlib
import dataclasses
import functools
import itertools
import math
import re
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from torch import fx, nn
from torch.utils import _pytree as pytree

from ..capture.captured import Capture
from ..capture.inputs import Arguments
from ..capture.routing import Routing
from ..capture.sizes import SizeGuard, evaluate
from ..inspection.proof_trace import ProbeRun
from .capacity_formulas import Formula, find_formula
from .guarded_sizes import find_sequence, find_sizes
from .lift.canonical_form import Body, CanonicalForm, NodeRef, max_capture_tokens
from .terms.parameter_places import ParameterSlice

# some are small, some multiples of what capacities are rounded to; with the last ones slopes that are alike differ
_PROBES = (2, 3, 6, 7, 10, 13, 20, 33, 40, 64, 65, 100, 127, 128, 200, 320, 333, 512, 1031, 4096, 4099)
_TIMES = (24, 40)  # that many tokens for each expert: no capacity is rounded there
_FROM = (7, 60, 300)  # where such sizes are looked for: floors and ceilings may hide some
_MIN_PROBES = 12
_MOST_DELICATE, _MOST_TEXTS = 1100, 32


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


@dataclasses.dataclass
class ExpertGroup:
    """One group of experts in the final form.

    Attributes:
        ids: the expert ids that belong to it, ascending.
        body: what one expert computes; `expert` leaves index `tables`, `value` leaves index `Match.values`.
        tables: for each expert leaf, the place of the parameter of each id, in the order of `ids`.
    """

    ids: list[int]
    body: Body
    tables: list[list[ParameterSlice]]
    values: list[list[NodeRef]]  # by value, then by capture


@dataclasses.dataclass
class Match:
    """The proof: one canonical form, and the captures that all agree on it (the first one is shown to users).

    Which slots count where some do not: by `drop`, a rule, or `keep`, the nodes that say so (see `drops`).

    With `without_tokens` the form is for calls without tokens too, whatever way the block goes there, as long as all
    that it returns is empty then: a rank that has none takes part in what the others do.
    """

    block: nn.Module
    arguments: Arguments
    evidence: list[CanonicalForm]
    sizes: list[dict[str, int]]
    groups: list[ExpertGroup]
    num_experts: int
    extra_guards: list[SizeGuard]
    modes_read: set[str]
    capture_at: Callable[..., Capture]
    lift_at: Callable[..., CanonicalForm]
    drop_rule: DropRule | None = None
    keep_masks: list[NodeRef] | None = None
    within: tuple[SizeGuard, ...] = ()  # the way the program goes for the example, where it has two
    without_tokens: bool = False
    probe_runs: tuple[ProbeRun, ...] = ()  # of the proof
    size_samples: dict[str, list[tuple[dict[str, int], Capture]]] = dataclasses.field(default_factory=dict)

    def sample_sizes(self, kind: str = "diverse") -> list[tuple[dict[str, int], Capture]]:
        """Captures at more sizes under this kind of routing, for numbers that depend on them."""
        if kind not in self.size_samples:
            probes = self.size_samples[kind] = []
            nodes = 4 * max(len(lifted.capture.nodes) for lifted in self.evidence)
            most = max_capture_tokens(self.evidence, times=2)
            guards = [*self.within, *self.guards]
            counts = itertools.takewhile(lambda tokens: tokens <= most, sorted({*_PROBES, *self._delicate_sizes}))
            sequences = [find_sequence(self.arguments, guards, tokens) for tokens in counts]
            several = [s for i, s in enumerate(sequences) if all(g.holds(s) for g in guards) and s not in sequences[:i]]
            if len(several) < _MIN_PROBES:  # the sizes are all multiples of a number, say
                several += [s for s in find_sizes(self.arguments, guards, 64) if s not in several][:_MIN_PROBES]
            for sizes in several:
                is_long = self.arguments.each * math.prod(sizes.values()) > 512
                with contextlib.suppress(Exception):  # sizes that the program does not take
                    probes.append((sizes, self.capture_at(Routing(kind, 0), sizes, most=nodes if is_long else 0)))
        return self.size_samples[kind]

    @functools.cached_property
    def _delicate_sizes(self) -> set[int]:
        """Sizes by which formulas are told apart that are alike elsewhere: those at which nothing is rounded, and those
        on both sides of a comparison."""
        whole = {times * self.num_experts for times in _TIMES if times * self.num_experts < _PROBES[-1]}
        tokens = range(2, _MOST_DELICATE)
        for text in sorted(self.expressions, key=lambda e: (len(e), e))[:_MOST_TEXTS]:
            with contextlib.suppress(ArithmeticError, ValueError, TypeError):
                values = [evaluate(text, self.arguments.sequence(n)) for n in tokens]
                exact = [n for n, v in zip(tokens, values, strict=True) if v == int(v)]
                if len(exact) < len(values):
                    whole |= {n for least in _FROM for n in exact[bisect.bisect(exact, least) :][:1]}
        for guard in dict.fromkeys(g for lifted in self.evidence for g in lifted.capture.sizes.guards):
            with contextlib.suppress(ArithmeticError, ValueError, TypeError):
                sides = [guard.holds(self.arguments.sequence(n)) for n in tokens]
                turns = [n for n, (a, b) in zip(tokens, itertools.pairwise(sides), strict=False) if a is not b]
                whole |= {n for turn in turns[:1] for n in (turn, turn + 1)}
        return whole

    def exclude_optional(self) -> bool:
        """Leave out the captures at sizes at which the program may go another way; the form then holds for the other
        sizes only. False if there are none."""
        left = [i for i, lifted in enumerate(self.evidence) if not lifted.optional_guard]
        if len(left) == len(self.evidence) or len(left) < 2:
            return False
        gone = [
            (self.sizes[i], lifted.optional_guard) for i, lifted in enumerate(self.evidence) if lifted.optional_guard
        ]
        values = [refs for group in self.groups for refs in group.values]
        for column in [self.evidence, self.sizes, *values, *([self.keep_masks] if self.keep_masks else [])]:
            column[:] = [column[i] for i in left]  # type: ignore[index]
        for sizes, guard in gone:
            if all(g.holds(sizes) for g in self.guards):  # the program was not seen to compare
                self.extra_guards.append(guard)
        return True

    @property
    def guards(self) -> list[SizeGuard]:
        """Comparisons of sizes that came out the same in every capture. Where captures went both ways and still agree
        on the form, the comparison does not matter."""
        several = [lifted.capture.sizes.guards for lifted in self.evidence]
        asked: list[dict[Any, list[SizeGuard]]] = [defaultdict(list) for _ in several]
        for by_expression, guards in zip(asked, several, strict=True):
            for g in guards:
                by_expression[_without_number(g)].append(g)
        found = dict.fromkeys(self._generalize_bound(g, asked) for guards in several for g in guards)
        alike = [*(g for g in found if all(g.holds(sizes) for sizes in self.sizes)), *self.extra_guards]
        return [g for seen in alike for g in self._restrict_to_tokens(seen)] if self.without_tokens else alike

    def _restrict_to_tokens(self, guard: SizeGuard) -> list[SizeGuard]:
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
        return [dataclasses.replace(guard, unless=f"{guard.unless}*{tokens}" if guard.unless else tokens)]

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

    def _generalize_bound(self, guard: SizeGuard, asked: list[dict[Any, list[SizeGuard]]]) -> SizeGuard:
        """What a size is compared with may be another number at each size: `min(S, int(1.25 * S / E))`. `asked`: by
        capture, the comparisons of one expression."""
        points = []
        for sizes, by_expression in zip(self.sizes, asked, strict=True):
            alike = by_expression.get(_without_number(guard), [])
            if len(alike) == 1 and alike[0].right.isdigit():
                points.append((sizes, int(alike[0].right)))
        formula = find_formula(points, self.expressions, laws=False) if len({n for _, n in points}) > 2 else None
        own = formula is not None and any(n == formula(dims) and str(n) == guard.right for dims, n in points)
        return dataclasses.replace(guard, right=formula.text) if formula and own else guard

    @property
    def expressions(self) -> set[str]:
        """What the program computed from sizes."""
        logs = [lifted.capture.sizes for lifted in self.evidence]
        return set().union(*[log.used | log.leaks for log in logs])

    @property
    def slots(self) -> int:
        return self.evidence[0].slots


def _without_number(guard: SizeGuard) -> tuple[str, str, bool]:
    """A comparison without the number that it compares with."""
    return guard.left, guard.op, guard.value
