"""The result of a match: the proven form of a block, the captures that agree on it, and its guards."""

from __future__ import annotations

import bisect
import contextlib
import dataclasses
import functools
import itertools
import math
import re
from collections import defaultdict
from typing import Any, Protocol

import torch
from torch import fx, nn
from torch.utils import _pytree as pytree

from ..capture.arguments.block_arguments import Arguments
from ..capture.capture_result import Capture
from ..capture.code_locations import suppress_program_errors
from ..capture.sizes.size_guards import SizeGuard, evaluate_size
from ..capture.tracing.concrete_routing import Routing, RoutingKind
from ..capture.tracing.host_reads import Interventions
from ..errors import MoefxError
from ..inspection.proof_trace import ProbeRun
from .capacity_formulas import Formula, find_formula
from .facts.guarded_sizes import find_sequence, find_sizes
from .lift.canonical_form import Body, CanonicalForm, NodeRef, max_capture_tokens
from .terms.parameter_slices import ParameterSlice

# numbers of tokens: small ones, multiples to which capacities are rounded, and large ones that tell slopes apart
_SAMPLED_TOKENS = (2, 3, 6, 7, 10, 13, 20, 33, 40, 64, 65, 100, 127, 128, 200, 320, 333, 512, 1031, 4096, 4099)
_TOKENS_PER_EXPERT = (24, 40)  # capacities are not rounded at these
_MIN_EXACT = (7, 60, 300)  # sizes without rounding are searched from these on; clamps may hide some
_MIN_SAMPLES = 12
_MAX_DELICATE, _MAX_EXPRESSIONS = 1100, 32


@dataclasses.dataclass(frozen=True)
class DropRule:
    """Capacity: an expert takes the first `capacity(dims)` of the slots that chose it.

    Attributes:
        order: `position_token` (token by token), `position_slot` (all first slots first) or `weight` (largest first).
        capacity: rows that an expert takes, as a function of the sizes.
    """

    order: str
    capacity: Formula

    def __str__(self) -> str:
        first = {
            "position_token": "earlier tokens first",
            "position_slot": "first choices first, then earlier tokens",
            "weight": "larger weights first",
        }
        return f"capacity of {self.capacity} rows per expert, {first[self.order]}"


@dataclasses.dataclass
class ProvenGroup:
    """The experts of the proven form that share a body.

    Attributes:
        ids: expert ids, ascending.
        body: the function of one expert; `expert` leaves index `tables`, `value` leaves index `values`.
        tables: for each `expert` leaf, the parameter slice of each expert, in the order of `ids`.
        values: for each `value` leaf, the node that supplies it in each capture.
    """

    ids: list[int]
    body: Body
    tables: list[list[ParameterSlice]]
    values: list[list[NodeRef]]


class Capturer(Protocol):
    """Captures a block under a routing, and lifts a capture like those of its proof; `ProofState` is one."""

    def capture(
        self, routing: Routing, sizes: dict[str, int], interventions: Interventions | None = None, max_nodes: int = 0
    ) -> Capture: ...

    def capture_and_lift(
        self, routing: Routing, sizes: dict[str, int], interventions: Interventions | None = None
    ) -> CanonicalForm: ...


@dataclasses.dataclass(frozen=True)
class Match:
    """The proof of a block: one canonical form, and the captures that agree on it.

    Attributes:
        forms: the forms of the captures; users see the first.
        groups: the experts, with complete tables.
        extra_guards: size guards besides the comparisons of the captures.
        modes_read: modes that the block reads, such as `training`.
        capturer: makes more captures of the block.
        drop_rule: the capacity by which slots are dropped, if there is one (see `drop_rules`).
        keep_masks: otherwise, for each capture, the program's mask of the slots that count, if slots are dropped.
        size_restrictions: the restrictions of the attempt, whose outcome all captures have.
        without_tokens: the form also holds for calls without tokens, if all that the block returns is empty then.
            Ranks without tokens must take part in the exchanges of the others.
        size_samples: cache of `sample_sizes`.
    """

    block: nn.Module
    arguments: Arguments
    forms: list[CanonicalForm]
    groups: list[ProvenGroup]
    num_experts: int
    extra_guards: list[SizeGuard]
    modes_read: set[str]
    capturer: Capturer
    drop_rule: DropRule | None = None
    keep_masks: list[NodeRef] | None = None
    size_restrictions: tuple[SizeGuard, ...] = ()
    without_tokens: bool = False
    probe_runs: tuple[ProbeRun, ...] = ()  # of the proof
    size_samples: dict[RoutingKind, list[tuple[dict[str, int], Capture]]] = dataclasses.field(default_factory=dict)

    def sample_sizes(self, kind: RoutingKind = "diverse") -> list[tuple[dict[str, int], Capture]]:
        """Return captures at more sizes under this kind of routing, to find formulas for numbers.

        Returns:
            (sizes, capture) pairs, without sizes at which the block fails. Cached.
        """
        if kind not in self.size_samples:
            samples = self.size_samples[kind] = []
            max_nodes = 4 * max(len(form.capture.nodes) for form in self.forms)
            most = max_capture_tokens(self.forms, times=2)
            guards = [*self.size_restrictions, *self.guards]
            counts = itertools.takewhile(
                lambda tokens: tokens <= most, sorted({*_SAMPLED_TOKENS, *self._delicate_sizes})
            )
            sequences = [find_sequence(self.arguments, guards, tokens) for tokens in counts]
            several = [s for i, s in enumerate(sequences) if all(g.holds(s) for g in guards) and s not in sequences[:i]]
            if len(several) < _MIN_SAMPLES:  # guards may allow multiples of a number only
                several += [s for s in find_sizes(self.arguments, guards, 64) if s not in several][:_MIN_SAMPLES]
            for sizes in several:
                is_long = self.arguments.tokens_per_unit * math.prod(sizes.values()) > 512
                with suppress_program_errors(MoefxError):
                    samples.append(
                        (sizes, self.capturer.capture(Routing(kind, 0), sizes, max_nodes=max_nodes if is_long else 0))
                    )
        return self.size_samples[kind]

    @functools.cached_property
    def _delicate_sizes(self) -> set[int]:
        """Return numbers of tokens that tell formulas apart: without rounding, and on both sides of a comparison."""
        found = {
            times * self.num_experts for times in _TOKENS_PER_EXPERT if times * self.num_experts < _SAMPLED_TOKENS[-1]
        }
        tokens = range(2, _MAX_DELICATE)
        for text in sorted(self.expressions, key=lambda e: (len(e), e))[:_MAX_EXPRESSIONS]:
            with contextlib.suppress(ArithmeticError, ValueError, TypeError):
                values = [evaluate_size(text, self.arguments.choose_sequence(n)) for n in tokens]
                exact = [n for n, v in zip(tokens, values, strict=True) if v == int(v)]
                if len(exact) < len(values):
                    found |= {n for least in _MIN_EXACT for n in exact[bisect.bisect(exact, least) :][:1]}
        for guard in dict.fromkeys(g for form in self.forms for g in form.capture.sizes.guards):
            with contextlib.suppress(ArithmeticError, ValueError, TypeError):
                sides = [guard.holds(self.arguments.choose_sequence(n)) for n in tokens]
                changes = [n for n, (a, b) in zip(tokens, itertools.pairwise(sides), strict=False) if a is not b]
                found |= {n for change in changes[:1] for n in (change, change + 1)}
        return found

    def without_optional(self) -> Match | None:
        """Return the match without captures that have an `optional_guard`: its form holds for the guarded sizes only.

        Returns:
            None if no capture has one, or too few remain.
        """
        remaining = [i for i, form in enumerate(self.forms) if not form.optional_guard]
        if len(remaining) == len(self.forms) or len(remaining) < 2:
            return None

        def select(by_capture: list[Any]) -> list[Any]:
            return [by_capture[i] for i in remaining]

        narrower = dataclasses.replace(
            self,
            forms=select(self.forms),
            groups=[dataclasses.replace(g, values=[select(refs) for refs in g.values]) for g in self.groups],
            keep_masks=select(self.keep_masks) if self.keep_masks else self.keep_masks,
        )
        excluded = [(form.sizes, form.optional_guard) for form in self.forms if form.optional_guard]
        more = list[SizeGuard]()
        for sizes, guard in excluded:
            if all(g.holds(sizes) for g in [*narrower.guards, *more]):  # no comparison of the program excludes them
                more.append(guard)
        return dataclasses.replace(narrower, extra_guards=[*self.extra_guards, *more])

    @property
    def sizes(self) -> list[dict[str, int]]:
        """The sizes of each capture."""
        return [form.sizes for form in self.forms]

    @property
    def guards(self) -> list[SizeGuard]:
        """Comparisons of sizes with the same result in every capture.

        A comparison with both results does not matter, since the captures agree on the form.
        """
        several = [form.capture.sizes.guards for form in self.forms]
        comparisons: list[dict[Any, list[SizeGuard]]] = [defaultdict(list) for _ in several]
        for by_expression, guards in zip(comparisons, several, strict=True):
            for g in guards:
                by_expression[_without_number(g)].append(g)
        found = dict.fromkeys(self._generalize_bound(g, comparisons) for guards in several for g in guards)
        consistent = [*(g for g in found if all(g.holds(sizes) for sizes in self.sizes)), *self.extra_guards]
        return (
            [g for guard in consistent for g in self._restrict_to_tokens(guard)] if self.without_tokens else consistent
        )

    def _restrict_to_tokens(self, guard: SizeGuard) -> list[SizeGuard]:
        """Restrict a guard to sizes with tokens, if the block returns nothing without; drop it if it always holds."""
        empty, ones = [{**self.sizes[0], dim: 0} for dim in self.arguments.dims], dict.fromkeys(self.arguments.dims, 1)
        tokens = "*".join(self.arguments.dims)
        try:
            if all(guard.holds(sizes) for sizes in empty):
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
        """Whether a call without tokens returns only empty tensors, and has no side effects."""
        for dim in self.arguments.dims:
            capture = None
            with suppress_program_errors(MoefxError):
                capture = self.capturer.capture(Routing("diverse", 0), {**self.sizes[0], dim: 0})
            if capture is None:
                return False
            values = [leaf.meta.get("val") for leaf in pytree.tree_leaves(capture.out) if isinstance(leaf, fx.Node)]
            if capture.effects or len(values) != len(pytree.tree_leaves(capture.out)):
                return False
            if not all(isinstance(value, torch.Tensor) and value.numel() == 0 for value in values):
                return False
        return True

    def _generalize_bound(self, guard: SizeGuard, comparisons: list[dict[Any, list[SizeGuard]]]) -> SizeGuard:
        """Replace the bound of a guard by a formula, if it depends on the sizes: `min(S, int(1.25 * S / E))`.

        Args:
            comparisons: for each capture, its comparisons by expression.
        """
        points = []
        for sizes, by_expression in zip(self.sizes, comparisons, strict=True):
            same_comparisons = by_expression.get(_without_number(guard), [])
            if len(same_comparisons) == 1 and same_comparisons[0].right.isdigit():
                points.append((sizes, int(same_comparisons[0].right)))
        formula = find_formula(points, self.expressions, try_linear=False) if len({n for _, n in points}) > 2 else None
        is_exact = formula is not None and any(n == formula(dims) and str(n) == guard.right for dims, n in points)
        return dataclasses.replace(guard, right=formula.text) if formula and is_exact else guard

    @property
    def expressions(self) -> set[str]:
        """Expressions over sizes that the program computed."""
        logs = [form.capture.sizes for form in self.forms]
        return set().union(*[log.used | log.leaks for log in logs])

    @property
    def slots(self) -> int:
        """Slots per token, K."""
        return self.forms[0].slots


def _without_number(guard: SizeGuard) -> tuple[str, str, bool]:
    """Return a guard's key without the number on its right."""
    return guard.left, guard.op, guard.value
