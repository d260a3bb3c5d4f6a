"""The result of a match: the proven form of a block, the captures that agree on it, and its guards."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import re
from collections import defaultdict
from typing import Any

from torch import nn

from ...capture.arguments.block_arguments import Arguments
from ...capture.sizes.size_guards import SizeGuard, evaluate_size
from ...inspection.proof_trace import ProbeRun
from ..lift.canonical_form import Body, CanonicalForm, NodeRef
from ..terms.parameter_slices import ParameterSlice
from .capacity_formulas import Formula, find_formula


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


@dataclasses.dataclass(frozen=True)
class Match:
    """The proof of a block: one canonical form, and the captures that agree on it.

    Attributes:
        forms: the forms of the captures; users see the first.
        groups: the experts, with complete tables.
        extra_guards: size guards besides the comparisons of the captures.
        modes_read: modes that the block reads, such as `training`.
        drop_rule: the capacity by which slots are dropped, if there is one (see `drop_rules`).
        keep_masks: otherwise, for each capture, the program's mask of the slots that count, if slots are dropped.
        size_restrictions: the restrictions of the attempt, whose outcome all captures have.
        without_tokens: the guards must admit calls without tokens, if such a call returns only empty tensors. Ranks
            without tokens must take part in the exchanges of the others.
        probe_runs: the probes of the proof.
        is_empty_without_tokens: whether a call without tokens returns only empty tensors, and has no side effects;
            False also if no guard excludes such calls.
    """

    block: nn.Module
    arguments: Arguments
    forms: list[CanonicalForm]
    groups: list[ProvenGroup]
    num_experts: int
    extra_guards: list[SizeGuard]
    modes_read: set[str]
    drop_rule: DropRule | None = None
    keep_masks: list[NodeRef] | None = None
    size_restrictions: tuple[SizeGuard, ...] = ()
    without_tokens: bool = False
    probe_runs: tuple[ProbeRun, ...] = ()
    is_empty_without_tokens: bool = False

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
        added_guards = list[SizeGuard]()
        for sizes, guard in excluded:
            # no comparison of the program excludes the sizes
            if all(g.holds(sizes) for g in [*narrower.guards, *added_guards]):
                added_guards.append(guard)
        return dataclasses.replace(narrower, extra_guards=[*self.extra_guards, *added_guards])

    @property
    def sizes(self) -> list[dict[str, int]]:
        """The sizes of each capture."""
        return [form.sizes for form in self.forms]

    @functools.cached_property
    def guards(self) -> list[SizeGuard]:
        """Comparisons of sizes with the same result in every capture.

        A comparison with both results does not matter, since the captures agree on the form. Calls without tokens are
        excluded if their result was shown at one size only.
        """
        guards_by_capture = [form.capture.sizes.guards for form in self.forms]
        comparisons: list[dict[Any, list[SizeGuard]]] = [defaultdict(list) for _ in guards_by_capture]
        for by_expression, guards in zip(comparisons, guards_by_capture, strict=True):
            for g in guards:
                by_expression[_without_number(g)].append(g)
        generalized = dict.fromkeys(
            self._generalize_bound(g, comparisons) for guards in guards_by_capture for g in guards
        )
        consistent = [*(g for g in generalized if all(g.holds(sizes) for sizes in self.sizes)), *self.extra_guards]
        if unsure := next((g for g in generalized if self._is_coincidence_without_tokens(g)), None):
            consistent.append(SizeGuard("*".join(self.arguments.dims), "ge", "1", True, source=unsure.source))
        return (
            [g for guard in consistent for g in self._restrict_to_tokens(guard)] if self.without_tokens else consistent
        )

    def _is_coincidence_without_tokens(self, guard: SizeGuard) -> bool:
        """Return whether a call without tokens has the result of a comparison that captures show at one size only.

        A number that the program computes then fits several formulas: `max(1, n)` is 1 for one token, as `n` is.
        """
        with contextlib.suppress(ArithmeticError):
            outcomes = {guard.holds(sizes) for sizes in self.sizes_without_tokens}
            for outcome in outcomes if len({guard.holds(sizes) for sizes in self.sizes}) > 1 else ():
                shown = {evaluate_size(guard.left, s) for s in self.sizes if guard.holds(s) is outcome}
                if len(shown) == 1:
                    return True
        return False

    def _restrict_to_tokens(self, guard: SizeGuard) -> list[SizeGuard]:
        """Restrict a guard to sizes with tokens, if the block returns nothing without; drop it if it always holds."""
        if self._admits_no_tokens(guard) or not self.is_empty_without_tokens:
            return [guard]
        ones, tokens = dict.fromkeys(self.arguments.dims, 1), "*".join(self.arguments.dims)
        is_product = {*re.sub(r"[() ]", "", guard.left).split("*")} <= {"1", *self.arguments.dims}
        if is_product and guard.right == ("1" if guard.op in ("ge", "lt") else "0") and guard.holds(ones):
            return []
        return [dataclasses.replace(guard, unless=f"{guard.unless}*{tokens}" if guard.unless else tokens)]

    def _admits_no_tokens(self, guard: SizeGuard) -> bool:
        with contextlib.suppress(ArithmeticError):
            return all(guard.holds(sizes) for sizes in self.sizes_without_tokens)
        return False

    @property
    def excludes_calls_without_tokens(self) -> bool:
        """Whether a guard excludes calls without tokens."""
        return not all(self._admits_no_tokens(guard) for guard in self.guards)

    @property
    def sizes_without_tokens(self) -> list[dict[str, int]]:
        """The sizes of the first capture, each with another token axis of 0."""
        return [{**self.sizes[0], dim: 0} for dim in self.arguments.dims]

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
