"""Force branches of Python that took one way in all captures.

Protects from a branch whose other way computes something else::

    for e in range(num_experts):
        token, slot = torch.where(chosen == e)
        y = experts[e](x[token])
        if y.norm() > 5:  # abstract floats: False in all captures
            y = 5 * y / y.norm()
        out[token] += y * weights[token, slot, None]

`flip_branches` captures the program again with the other outcome of each read, and of several reads at once. The
capture must have the canonical form of the others; else the block is refused, or restricted by a guard. A float that
Python reads takes values that change the outcome of the comparisons in the code.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import nn

from ...capture.environment.code_locations import is_internal_error
from ...capture.tracing.capture_result import Capture, HostRead
from ...capture.tracing.host_reads import Interventions
from ...errors import MoefxError, Refused
from ...ir.guards.attribute_reads import find_attributes
from ...ir.guards.code_closure import collect_code, trace_closure
from ..facts import zero_sum_tests
from ..facts.graph_nodes import collect_numbers, find_buffers, line
from ..facts.integer_ranges import IntegerRanges
from ..interventions import idle_branches
from ..interventions.forced_outcome import (
    ForcedStep,
    OutcomeKind,
    find_capture,
    force_outcome,
    refuse_change,
    repeat_outcome,
)
from ..interventions.open_reads import OpenRead, find_open_reads, is_about_rows, is_unbounded

if TYPE_CHECKING:
    from ..proof.proof_view import ProofView

_MAX_NAMED_NUMBER = 1e9
_MAX_PROPOSED_NUMBERS = 80
_MAX_PAIRED_READS = 5  # up to this many reads, force every pair


def flip_branches(proof: ProofView) -> None:
    """Force the other outcome of each branch, then of several branches at once: the form must stay the same.

    Branches that only forced captures reach are forced, too. A float that Python reads takes values that change the
    outcome of each comparison with it.

    Raises:
        Refused: another outcome changes the form.
    """
    known: list[list[float]] = []  # no cache of functools: a new one makes each capture look at all objects

    def named_numbers() -> list[float]:
        if not known:
            known.append(_find_named_numbers(proof.block))
        return known[0]

    flips: list[tuple[HostRead, Any]] = []  # reads of unforced captures, each with another outcome
    is_first_round = True
    while open_reads := find_open_reads(proof):
        for open_read in open_reads:
            values = _choose_values(proof, open_read, named_numbers)
            if values:
                _force_values(proof, open_read, values)
            if values and is_first_round:
                flips.append((open_read.read, values[0]))
            proof.settle(open_read.read.call_stack)
        is_first_round = False
    _flip_together(proof, flips)


def _choose_values(proof: ProofView, open_read: OpenRead, named_numbers: Callable[[], list[float]]) -> list[Any]:
    """Choose the values to force: the other boolean, or numbers that change the outcomes of comparisons.

    Returns:
        The values; none if a capture of few tokens shows the other branch.

    Raises:
        Refused: that capture does more than skip the expert.
    """
    read, outcomes, captured = open_read
    if len(outcomes) == 1 and not is_about_rows(read) and _is_shown(proof, read):
        return []
    kinds = {type(value) for value in outcomes}
    if not kinds & {float, int}:
        return [not value for value in outcomes] if len(outcomes) == 1 or kinds == {bool} else []
    if float in kinds:
        extremes, candidates = [1e30, -1e30, 0.0], named_numbers()
    else:
        extremes, candidates = [10**6, -1, 0], list(dict.fromkeys(map(round, named_numbers())))
    return extremes + _find_boundary_values(proof, read, captured, extremes, candidates)


def _force_values(proof: ProofView, open_read: OpenRead, values: list[Any]) -> None:
    """Force a read to each of some values.

    Raises:
        Refused: a value changes the form.
    """
    read, step = open_read.read, _describe_step(proof, open_read)
    for value in values:
        interventions: Interventions = {read.call_stack: repeat_outcome(open_read.capture, read.call_stack, value)}
        runs = force_outcome(proof, step, interventions, open_read.capture)
        if not runs and read.node is None:
            proof.add_unforced_length(read.call_stack)  # too few rows: the original need not fail


def _describe_step(proof: ProofView, open_read: OpenRead) -> ForcedStep:
    """Describe what decides the outcome of a read."""
    read, is_constant = open_read.read, len(open_read.outcomes) == 1
    if zero_sum_tests.is_zero_test(read):
        return ForcedStep(OutcomeKind.ZERO_SUM, read.source)
    if is_constant and idle_branches.is_token_test(read):
        return ForcedStep(OutcomeKind.COUNT, read.source)
    if _is_limit_test(proof, read):
        return ForcedStep(OutcomeKind.LOAD, read.source)
    if buffers := find_buffers(read):
        kind = OutcomeKind.BUFFER if type(read.value) is bool else OutcomeKind.BUFFER_NUMBER
        return ForcedStep(kind, read.source, ", ".join(buffers))
    return ForcedStep(OutcomeKind.VALUE, read.source)


def _flip_together(proof: ProofView, flips: list[tuple[HostRead, Any]]) -> None:
    """Force all branches at once, and each pair of branches if there are few.

    Raises:
        Refused: outcomes change the form together that do not change it alone.
    """
    pairs = itertools.combinations(flips, 2) if 2 < len(flips) <= _MAX_PAIRED_READS else ()
    captured = proof.evidence.reference.capture
    for together in itertools.chain([flips] if len(flips) > 1 else [], pairs):
        interventions: Interventions = {
            read.call_stack: repeat_outcome(captured, read.call_stack, value) for read, value in together
        }
        force_outcome(proof, ForcedStep(OutcomeKind.VALUE, together[0][0].source), interventions)


def _is_limit_test(proof: ProofView, read: HostRead) -> bool:
    """Return whether a read compares a number that grows with the tokens to a fixed number."""
    if read.comparison is None or type(read.comparison[1]) not in (int, float):
        return False
    captures = (form.capture for form in proof.evidence.forms if any(read is r for r in form.capture.reads))
    return any(is_unbounded(IntegerRanges.with_more_tokens(captured), read) for captured in captures)


class _Behaviour(NamedTuple):
    """The behaviour of the program if a read has some value.

    Attributes:
        value: of the read.
        lines: the lines of its ops, in order.
        numbers: the numbers among the arguments of its ops, as `collect_numbers` returns them.
    """

    value: Any
    lines: list[Any]
    numbers: dict[Any, Any]

    def find_changes(self, other: _Behaviour) -> set[Any]:
        """Return the keys of numbers that differ from those of another value, beside the value itself."""
        pairs = {key: (number, other.numbers.get(key)) for key, number in self.numbers.items()}
        own = self.value, other.value
        return {key for key, pair in pairs.items() if pair[0] != pair[1] and pair != own}


def _find_boundary_values(
    proof: ProofView, read: HostRead, captured: Capture, known: list[Any], values: list[Any]
) -> list[Any]:
    """Find values of a read that change the program: it runs other ops, or other numbers than the value itself change.

    Args:
        known: values whose programs are known.
        values: candidates.
    """
    if (at := find_capture(proof, captured, {read.call_stack: None})) is None:
        return []
    capture = proof.evidence.forms[at].capture

    def run_with(value: Any) -> _Behaviour | None:
        interventions = {**capture.interventions, read.call_stack: value}
        try:
            nodes = proof.capture(capture.routing.restart(), proof.evidence.sizes[at], interventions).nodes
        except MoefxError:
            return _Behaviour(value, [], {})  # a program that no capture follows is like no other one
        except Exception as error:  # the program may check the value
            if is_internal_error(error):
                raise
            return None
        return _Behaviour(value, list(map(line, nodes)), collect_numbers(nodes))

    seen = [behaviour for behaviour in map(run_with, known) if behaviour is not None]
    changing_values = []
    for new in map(run_with, values):
        if new is None:
            continue
        alike = [behaviour for behaviour in seen if behaviour.lines == new.lines]
        if not alike or new.find_changes(alike[0]) - set().union(*[old.find_changes(alike[0]) for old in alike]):
            changing_values.append(new.value)
            seen.append(new)
    return changing_values


def _find_named_numbers(block: nn.Module) -> list[float]:
    """Propose numbers at which a comparison with a step or a temperature may change.

    These are the numbers in the block's code and attributes, their neighbours, midpoints, and products of two.
    """
    known_numbers = set(trace_closure(collect_code(block)).numbers)
    known_numbers |= {v for v in find_attributes(block).values() if type(v) in (int, float) and math.isfinite(v)}
    named_numbers = sorted(n for n in known_numbers if abs(n) < _MAX_NAMED_NUMBER)
    near = [n + d for d in (0, 1, -1) for n in named_numbers]
    between = [(a + b) / 2 for a, b in itertools.pairwise(named_numbers)]
    products = [a * b for a, b in itertools.combinations([n for n in named_numbers if abs(n) > 1], 2)]
    return [*dict.fromkeys([*near, *between, *products])][:_MAX_PROPOSED_NUMBERS]


def _is_shown(proof: ProofView, read: HostRead) -> bool:
    """Return whether a capture of few tokens shows the branch of an expert without tokens.

    Raises:
        Refused: the program does more than skip the expert.
    """
    try:
        return idle_branches.show_idle_expert(proof, read)
    except Refused as why:
        raise refuse_change(ForcedStep(OutcomeKind.VALUE, read.source)) from why
