"""Find the reads of Python whose other outcome no capture has shown.

A read is not open if its outcome cannot matter, such as a test whether all weights of an expert are zero, or if more
tokens cannot change it. A comparison of a count with several numbers is open if a larger count has an outcome of its
own.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import fx

from ...capture.environment.code_locations import Source
from ...capture.sizes.routed_numbers import ROW_COUNT, is_emptiness_test
from ...capture.tracing.capture_result import Capture, HostRead
from ...capture.tracing.node_origins import find_float_decisions
from ...ir.node_values import get_op_name
from ..facts import zero_sum_tests
from ..facts.host_comparisons import find_comparison
from ..facts.integer_ranges import IntegerRanges
from ..facts.range_arithmetic import UNBOUNDED

if TYPE_CHECKING:
    from ..proof.proof_view import ProofView


class OpenRead(NamedTuple):
    """A read of Python whose other outcomes no capture has shown.

    Attributes:
        outcomes: the outcomes in all captures.
        capture: the first capture that has the read.
    """

    read: HostRead
    outcomes: set[Any]
    capture: Capture


def find_open_reads(proof: ProofView) -> list[OpenRead]:
    """Find the reads of Python with one outcome in all captures that are not settled."""
    outcomes: dict[tuple[Source, ...], set[Any]] = {}
    without_rows: dict[tuple[Source, ...], set[Any]] = {}
    first_reads: dict[tuple[Source, ...], tuple[HostRead, Capture]] = {}
    for form in proof.evidence.forms:
        for read in form.capture.reads:
            seen = outcomes if not is_about_rows(read) or _has_rows(read) else without_rows
            seen.setdefault(read.call_stack, set()).add(read.value)
            first_reads.setdefault(read.call_stack, (read, form.capture))
    outcomes = without_rows | outcomes
    for calls in _find_zero_weight_reads(proof):
        outcomes[calls] = {True, False}
    # an expert without tokens that is skipped says nothing about one with a single token (`if n <= 1: continue`)
    single = {
        calls
        for calls, (read, _) in first_reads.items()
        if _is_single_token_test(read) and outcomes[calls] == {True, False}
    }
    for form in proof.evidence.forms:
        constant = [read for read in form.capture.reads if len(outcomes[read.call_stack]) == 1]
        ranges = IntegerRanges.with_more_tokens(form.capture) if constant else None
        for read in constant:
            if (
                ranges
                and read.node is not None
                and not is_about_rows(read)
                and ranges.is_decided(read.node, read.comparison)
            ):
                outcomes[read.call_stack] = {True, False}
    for calls, read in _find_large_count_reads(proof).items():
        outcomes[calls], first_reads[calls] = {read.value}, (read, first_reads[calls][1])
    # 0 and 1 are equal to the booleans
    integers = {calls for calls, seen in outcomes.items() if int in map(type, seen)}
    shown = {calls for calls, seen in outcomes.items() if seen >= {True, False}} - integers - single
    open_calls = [calls for calls in outcomes if calls not in shown]
    return [
        OpenRead(first_reads[calls][0], outcomes[calls], first_reads[calls][1])
        for calls in open_calls
        if not proof.evidence.is_settled(calls)
    ]


def _find_zero_weight_reads(proof: ProofView) -> set[tuple[Source, ...]]:
    """Find tests whether the weights of an expert are zero, if their outcome cannot matter.

    Both outcomes must have occurred, and an expert that ran must add nothing if its weights are zero.
    """
    outcomes: dict[tuple[Source, ...], set[Any]] = {}
    inert: dict[tuple[Source, ...], set[bool | None]] = {}
    for form in proof.evidence.forms:
        for read in filter(zero_sum_tests.is_zero_test, form.capture.reads):
            outcomes.setdefault(read.call_stack, set()).add(read.value)
            if _has_rows(read):
                inert.setdefault(read.call_stack, set()).add(zero_sum_tests.adds_nothing(read))
    return {calls for calls, seen in inert.items() if False not in seen and True in seen and len(outcomes[calls]) == 2}


def _find_large_count_reads(proof: ProofView) -> dict[tuple[Source, ...], HostRead]:
    """Find comparisons of a count with several numbers at one call site (`n in range(300)`, a loop over limits).

    Larger counts would have an outcome that no capture has: equal to none of the numbers, or beyond all limits.

    Returns:
        One read per call site whose outcome would change.
    """
    equal: dict[tuple[Source, ...], list[HostRead | None]] = {}  # for each capture a read of equal numbers
    limits_at: dict[tuple[Source, ...], dict[float, list[HostRead]]] = {}
    for form in proof.evidence.forms:
        ranges = IntegerRanges.with_more_tokens(form.capture)
        equal_here: dict[tuple[Source, ...], HostRead | None] = {}
        for read in form.capture.reads:
            op, number = read.comparison or ("", math.nan)
            if type(number) not in (int, float) or is_emptiness_test(op, number) or not is_unbounded(ranges, read):
                continue
            if op in ("eq", "ne"):
                is_equal = read.value is (op == "eq")
                equal_here[read.call_stack] = read if is_equal else equal_here.get(read.call_stack)
            else:
                limits_at.setdefault(read.call_stack, {}).setdefault(number, []).append(read)
        for calls, equal_read in equal_here.items():
            equal.setdefault(calls, []).append(equal_read)
    large_reads = {calls: reads[0] for calls, reads in equal.items() if reads[0] is not None and None not in reads}
    for calls, by_number in limits_at.items():
        last = by_number[max(by_number)]
        if len(by_number) > 1 and len({read.value for read in last}) == 1:
            large_reads[calls] = last[0]
    return large_reads


def is_unbounded(ranges: IntegerRanges, read: HostRead) -> bool:
    """Return whether the compared number grows with the tokens."""
    origins = read.origins if read.node is None else {read.node}
    if not origins:  # a number of rows
        return True
    origin_ranges = [ranges.get(n) if isinstance(n, fx.Node) else None for n in origins]
    return ROW_COUNT in origins or any(f is not None and bool((f[1] >= UNBOUNDED // 2).any()) for f in origin_ranges)


def _is_single_token_test(read: HostRead) -> bool:
    """Return whether a comparison tells one token from more, with the same outcome for none: `n <= 1`."""
    comparison = find_comparison(read)
    return (
        comparison is not None
        and comparison.depends_on_routing
        and type(comparison.other) is int
        and comparison[:2] in (("le", 1), ("lt", 2), ("gt", 1), ("ge", 2))
    )


def is_about_rows(read: HostRead) -> bool:
    """Return whether a boolean tests floats of an expert's rows, and only Python reads it.

    An example is `if not (weights[token, slot] > 0.4).any()`. Its outcome without rows tells nothing about rows.
    """
    if read.node is None or read.comparison is not None or read.node.meta["val"].dtype is not torch.bool:
        return False
    if zero_sum_tests.is_zero_test(read):
        return True
    weighed = [n for n in find_float_decisions(read.node) if n.meta["ragged"]]
    if all(get_op_name(n) in ("eq", "ne") and n.args[1] == 0 for n in weighed):
        return False
    return all(_is_only_read(n) for n in weighed)


def _is_only_read(node: fx.Node) -> bool:
    """Return whether all users of a boolean are booleans without axes, which Python reads."""
    users = [*node.users]
    while users:
        val = (user := users.pop()).meta.get("val")
        if not isinstance(val, torch.Tensor) or val.dim() or val.dtype is not torch.bool:
            return False
        users += user.users
    return True


def _has_rows(read: HostRead) -> bool:
    """Return whether the tensors that a boolean was reduced from have rows."""
    stack = [read.node] if read.node is not None else []
    while stack:
        val = (node := stack.pop()).meta.get("val")
        if not isinstance(val, torch.Tensor) or not val.dim():
            stack += node.all_input_nodes
        elif val.shape[0] == 0:
            return False
    return True


__all__ = ["OpenRead", "find_open_reads", "is_about_rows", "is_unbounded"]
