"""Vary the loads that Python compares, for each expert and on each side of a comparison of sizes.

Protects from a comparison that matters for one expert only::

    for e, expert in enumerate(experts):
        token, slot = torch.where(chosen == e)
        y = expert(x[token])
        if len(token) > 9 and e == num_experts - 1:  # both outcomes of the first part were seen, at other experts
            y = y / 2

The probe adds captures with the most uneven and the most even loads, and captures in which each expert has exactly a
load that Python compares. It forces the outcome of a crowd for all experts, and if that contradicts the loads, captures
enough tokens to crowd each one.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import fx

from ...capture.environment.code_locations import Source, is_program_error, suppress_program_errors
from ...capture.sizes.routed_numbers import RoutedFloat, RoutedInt, is_emptiness_test
from ...capture.sizes.size_guards import SizeGuard
from ...capture.tracing.capture_result import Capture, HostRead
from ...capture.tracing.concrete_routing import Routing
from ...capture.tracing.host_reads import Interventions
from ...errors import MoefxError, Refused
from ...ir.node_values import get_op_name
from ..facts.count_limits import is_made_of_rows
from ..facts.graph_nodes import depends_on_routing
from ..facts.host_comparisons import HostComparison, find_comparison
from ..facts.integer_ranges import IntegerRanges, find_token_sizes
from ..facts.op_classes import ORDERED, TWO_SIDED
from ..facts.range_arithmetic import UNBOUNDED
from ..interventions.forced_outcome import ForcedStep, OutcomeKind, force_outcome, refuse_change, repeat_outcome
from ..interventions.open_reads import is_unbounded
from ..lift.lift_refusals import NothingRouted
from .exact_loads import choose_exact_loads, list_exact_routings
from .unreached_limits import MAX_CROWD_TOKENS, choose_even_sizes

if TYPE_CHECKING:
    from ..proof.proof_view import ProofView

_MAX_TOKENS = 130  # limit of captures with uneven loads
_MAX_SIDES = 4
_Calls = tuple[Source, ...]


class _LoadComparison(NamedTuple):
    """A comparison of a load whose result Python reads.

    Attributes:
        op: name of the comparison, such as "gt".
        other: the number or node that the load is compared with.
    """

    read: HostRead
    op: str
    other: Any

    @property
    def outcome_if_large(self) -> bool:
        """The outcome if the load is large. For an equality: the outcome if both sides are equal."""
        return self.op in ("gt", "ge", "eq")

    @property
    def limit(self) -> int | None:
        """The least load with the outcome of a crowd; None for equalities and if `other` is no finite number."""
        if type(self.other) not in (int, float) or not math.isfinite(self.other) or self.op not in ORDERED:
            return None
        return math.floor(self.other) + 1 if self.op in ("gt", "le") else math.ceil(self.other)


class _Side(NamedTuple):
    """One combination of outcomes of the comparisons of sizes.

    Attributes:
        outcomes: the outcome of each comparison.
        sizes: sizes with these outcomes.
        optional: see `CanonicalForm.optional_guard`.
    """

    outcomes: tuple[bool, ...]
    sizes: dict[str, int]
    optional: SizeGuard | None


def vary_loads(proof: ProofView) -> None:
    """Add captures of uneven and even loads, and captures in which comparisons of loads have the outcome of a crowd
    for each expert, if Python compares loads.

    Raises:
        Refused: a capture has another form.
    """
    if not (comparisons := _find_comparisons(proof)):
        return
    first = proof.evidence.reference.capture
    bases = [first]
    for side in _find_sides(proof):
        captures = [_add_capture(proof, routing, side, comparisons) for routing in _list_routings(proof)]
        made_captures = [captured for captured in captures if captured is not None]
        comparisons = {**_find_comparisons(proof), **comparisons}
        _add_exact_loads(proof, side, comparisons)
        outcomes = _collect_read_values(proof, side)
        for comparison in comparisons.values():
            _force_large_load(proof, comparison, made_captures[-1:] + made_captures[:1], outcomes)
        bases += made_captures[-1:]
    outcomes = _collect_read_values(proof, None)
    for comparison in comparisons.values():
        _force_large_load(proof, comparison, [first], outcomes)
    _force_all_large(proof, [c for c in comparisons.values() if c.limit is not None], bases)


def _add_exact_loads(proof: ProofView, side: _Side, comparisons: dict[_Calls, _LoadComparison]) -> None:
    """Add captures in which each expert has exactly a load that Python compares.

    Raises:
        Refused: a capture has another form.
    """
    reads = [read for form in proof.evidence.forms for read in form.capture.reads if read.call_stack in comparisons]
    compared = {(c.op, c.other) for c in map(find_comparison, reads) if c is not None and type(c.other) is int}
    is_computed = any(c.read.origins for c in comparisons.values())
    slots = proof.evidence.reference.list_choices().shape[1]
    for load in choose_exact_loads(compared, is_computed):
        for routing in list_exact_routings(load, slots, proof.num_experts, math.prod(side.sizes.values())):
            _add_capture(proof, routing, side, comparisons)


def _force_all_large(proof: ProofView, ordered: list[_LoadComparison], bases: list[Capture]) -> None:
    """Force all comparisons to the outcome of a crowd at once: one may matter only together with another.

    Raises:
        Refused: the outcomes change the form together.
    """
    if len(ordered) < 2:
        return
    step = ForcedStep(OutcomeKind.LOAD, ordered[0].read.source)
    for base in bases:
        interventions: Interventions = {
            c.read.call_stack: repeat_outcome(base, c.read.call_stack, c.outcome_if_large) for c in ordered
        }
        force_outcome(proof, step, interventions, base)


def _find_comparisons(proof: ProofView) -> dict[_Calls, _LoadComparison]:
    """Return comparisons of numbers that grow with the tokens, one per call site, except tests for zero tokens."""
    comparisons: dict[_Calls, _LoadComparison] = {}
    for form in proof.evidence.forms:
        for read in form.capture.reads:
            comparison = find_comparison(read, reductions=("any", "all"))
            if comparison is None or read.call_stack in comparisons or comparison.op not in TWO_SIDED:
                continue
            tests_emptiness = is_emptiness_test(comparison.op, comparison.other) and not read.origins  # not `n - 9 > 0`
            if not tests_emptiness and _compares_load(form.capture, read, comparison):
                comparisons[read.call_stack] = _LoadComparison(read, comparison.op, comparison.other)
    return comparisons


def _compares_load(capture: Capture, read: HostRead, comparison: HostComparison) -> bool:
    """Return whether the compared number grows with the tokens of one expert, or of all.

    An equality that no count can fulfil (`n == -1`, `n == 2.5`) does not count.
    """
    ranges = IntegerRanges.with_more_tokens(capture)
    op, other, node = comparison
    if node is None:
        is_never = (
            not read.origins and op not in ORDERED and type(other) in (int, float) and (other < 0 or other % 1 != 0)
        )
        return is_unbounded(ranges, read) and not is_never
    number = node.args[0]
    if not isinstance(number, fx.Node) or not (depends_on_routing(number) or is_made_of_rows(number)):
        return False
    if not find_token_sizes(capture).isdisjoint(number.meta["val"].shape):
        return False  # a number for each token, such as its position
    if (number_range := ranges.get(number)) is None:
        return get_op_name(number) in ("sum", "count_nonzero") and is_made_of_rows(number)  # not ids of experts
    return bool((number_range[1] >= UNBOUNDED // 2).any())


def _list_routings(proof: ProofView) -> list[Routing]:
    """Return the routings to try, in this order.

    The first two crowd the last and the first expert: one other expert has no token, the rest have one each. The third
    sends all tokens to the last expert, the fourth sends equally many to each.
    """
    last = proof.num_experts - 1
    return [
        Routing("concentrated", last, tuple(range(last - 1))),
        Routing("concentrated", 0, tuple(range(last, 1, -1))),
        Routing("concentrated", last),
        Routing("even"),
    ]


def _find_sides(proof: ProofView) -> list[_Side]:
    """Return the sides of comparisons of sizes that captures of several tokens took, those of most tokens first."""
    sides: dict[tuple[bool, ...], _Side] = {}
    for form in proof.evidence.forms:
        sizes, tokens = form.sizes, math.prod(form.tokens)
        outcomes = _compare_sizes(proof, sizes)
        known = sides.get(outcomes)
        best = -1 if known is None else _rank_tokens(math.prod(known.sizes.values()))
        if tokens > 1 and _rank_tokens(math.prod(sizes.values())) > best:
            sides[outcomes] = _Side(outcomes, sizes, form.optional_guard)
    return sorted(sides.values(), key=lambda side: -math.prod(side.sizes.values()))[:_MAX_SIDES]


def _rank_tokens(tokens: int) -> float:
    """Rank token counts: the more the better up to `_MAX_TOKENS`, the fewer the better beyond."""
    return tokens if tokens <= _MAX_TOKENS else 1 / tokens


def _compare_sizes(proof: ProofView, sizes: dict[str, int]) -> tuple[bool, ...]:
    """Return the outcomes at `sizes` of the comparisons of sizes that had both outcomes among the captures."""
    guards = dict.fromkeys(proof.evidence.seen_guards())
    return tuple(
        g.holds(sizes) for g in guards if len({g.holds(captured_sizes) for captured_sizes in proof.evidence.sizes}) == 2
    )


def _collect_read_values(proof: ProofView, side: _Side | None) -> dict[_Calls, set[Any]]:
    """Return the values of Python's reads by call site, on one side or on all."""
    outcomes: dict[_Calls, set[Any]] = {}
    for form in proof.evidence.forms:
        if side is None or _compare_sizes(proof, form.sizes) == side.outcomes:
            for read in form.capture.reads:
                outcomes.setdefault(read.call_stack, set()).add(read.value)
    return outcomes


def _add_capture(
    proof: ProofView, routing: Routing, side: _Side, comparisons: dict[_Calls, _LoadComparison]
) -> Capture | None:
    """Add a capture under a routing as evidence.

    Returns:
        The capture, or None if the program raises an error, routes nothing, or had to be guarded.

    Raises:
        Refused: the form differs, and no guard can keep this side out.
    """
    try:
        captured = proof.capture(routing, side.sizes)
    except Exception as error:
        if not is_program_error(error):
            raise
        return None
    try:
        proof.add_form(proof.lift(captured), optional=side.optional, may_relift=True)
    except NothingRouted:
        return None
    except Refused as refusal:
        if side.optional is None:
            source = _find_new_outcome(proof, captured, comparisons).source
            raise refuse_change(ForcedStep(OutcomeKind.LOAD, source)) from refusal
        proof.add_guard(side.optional)
        return None
    return captured


def _find_new_outcome(proof: ProofView, captured: Capture, comparisons: dict[_Calls, _LoadComparison]) -> HostRead:
    """Return a comparison with an outcome that the first capture does not have; any comparison if all have."""
    first = {(read.call_stack, read.value) for read in proof.evidence.reference.capture.reads}
    new = [r for r in captured.reads if r.call_stack in comparisons and (r.call_stack, r.value) not in first]
    return next(iter(new), next(iter(comparisons.values())).read)


def _force_large_load(
    proof: ProofView, comparison: _LoadComparison, bases: list[Capture], outcomes: dict[_Calls, set[Any]]
) -> None:
    """Force a comparison to the outcome of a crowd for all experts.

    Raises:
        Refused: the outcome changes the form, and no capture with such loads has the form.
    """
    calls = comparison.read.call_stack
    forced_outcomes = _choose_outcomes(comparison, outcomes.get(calls, set()))
    for base in bases:
        for value in forced_outcomes:
            if all(read.value is value for read in base.reads if read.call_stack == calls):
                continue
            try:
                step = ForcedStep(OutcomeKind.LOAD, comparison.read.source)
                is_shown = force_outcome(proof, step, {calls: repeat_outcome(base, calls, value)}, base)
            except Refused:
                if not _load_every_expert(proof, comparison):
                    raise
                return
            limit = comparison.limit
            if (
                not is_shown
                and limit is not None
                and limit > 1
                and not comparison.read.origins
                and not _load_every_expert(proof, comparison)
            ):
                slots = proof.evidence.reference.slots
                proof.add_guard(SizeGuard(f"{proof.arguments.tokens}*{slots}", "lt", str(limit), True))
                return


def _choose_outcomes(comparison: _LoadComparison, seen: set[Any]) -> list[bool]:
    """Return the outcomes to force.

    A comparison of two loads, or an equality with 0, 1 or a non-integer, takes only outcomes not yet seen on this side:
    others would contradict the loads.
    """
    if comparison.op in ORDERED:
        compares_loads = isinstance(comparison.other, (RoutedInt, RoutedFloat, fx.Node))
        return [v for v in (True, False) if v not in seen] if compares_loads else [comparison.outcome_if_large]
    may_contradict = type(comparison.other) is not int or comparison.other in (0, 1)
    return [] if may_contradict and comparison.outcome_if_large in seen else [comparison.outcome_if_large]


def _load_every_expert(proof: ProofView, comparison: _LoadComparison) -> bool:
    """Add a capture in which each expert really has as many tokens as a crowd, up to `MAX_CROWD_TOKENS` in all.

    Returns:
        Whether the comparison had the outcome of a crowd for each expert, and the form agrees with the others.
    """
    slots, experts = proof.evidence.reference.slots, proof.num_experts
    if (limit := comparison.limit) is None:
        return False
    if comparison.read.origins:  # a number computed from the load
        limit = max(limit, MAX_CROWD_TOKENS * slots // (2 * experts))
    if (sizes := choose_even_sizes(proof, limit)) is None:
        return False
    with suppress_program_errors(MoefxError):
        form = proof.capture_and_lift(Routing("even"), sizes)
        outcomes = {read.value for read in form.capture.reads if read.call_stack == comparison.read.call_stack}
        if outcomes == {comparison.outcome_if_large}:
            proof.add_form(form, may_relift=True)
            return True
    return False


__all__ = ["vary_loads"]
