"""Drop rules: find the capacity of the experts, and the order in which they take slots (X-MoE section 4.1, GShard).

Captures in which experts overflow show which slots are dropped. If one order and one capacity explain them in every
capture, this rule replaces the program's own code: `cumsum` over one-hots, sorting, slices. Otherwise a mask of the
program must tell which slots count.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections import defaultdict
from collections.abc import Sequence

import torch

from ...capture.environment.code_locations import Source, suppress_program_errors
from ...capture.sizes.symbolic_sizes import unwrap_numbers
from ...capture.tracing.concrete_routing import Routing
from ...errors import MoefxError, Refused
from ..facts.graph_nodes import collect_numbers
from ..facts.host_comparisons import find_comparison
from ..lift.canonical_form import CanonicalForm, walk_body
from .capacity_formulas import Formula, find_formula
from .drop_masks import TieBreak, find_keep_masks
from .match_result import DropRule, Match
from .size_samples import Capturer, SizeSamples

Slot = tuple[int, int]
_ORDERS = ("position_token", "position_slot", "weight")
_LIMITS = {f"aten.{op}" for op in ("slice.Tensor", "lt.Scalar", "le.Scalar", "gt.Scalar", "ge.Scalar")}
_LARGEST_BELOW = {"gt": 0, "le": 0, "ge": -1, "lt": -1}  # from a limit to the largest number of rows that passes it
_MIN_POINTS = 8  # captured values that a formula needs; with fewer it would be a guess


def explain_drops(match: Match, samples: SizeSamples) -> Match:
    """Explain dropped slots that have a weight and an expert's id, if there are any.

    Args:
        samples: captures of the match at more sizes.

    Returns:
        The match with its `drop_rule` or `keep_masks`.

    Raises:
        Refused: neither a rule nor a mask of the program explains which slots count.
    """
    owned = {e for group in match.groups for e in group.ids}
    if all(torch.equal(torch.isin(form.ids, torch.tensor([*owned])), form.kept_slots) for form in match.forms):
        return match
    _check_limits(match)

    @functools.cache  # needs another capture
    def find_tie_break() -> TieBreak | None:
        return _find_tie_break(match, samples.capturer, owned)

    rule = _find_rule(match, samples, owned)
    if rule is not None and (rule.order != "weight" or find_tie_break() == "exact"):
        return dataclasses.replace(match, drop_rule=rule)
    try:
        return dataclasses.replace(match, keep_masks=find_keep_masks(match, find_tie_break))
    except Refused:
        if rule is None or find_tie_break() is not None:
            raise
        return dataclasses.replace(match, drop_rule=rule)


def refuse_unexplained(match: Match) -> None:
    """Check the first captures of a proof, before the others are made.

    Raises:
        Refused: neither an order nor a mask explains the drops of some capture. More captures would not help.
    """
    owned = {e for group in match.groups for e in group.ids}
    if all(torch.equal(torch.isin(form.ids, torch.tensor([*owned])), form.kept_slots) for form in match.forms):
        return
    for order in _ORDERS:
        ranks = [_rank_slots(form, order, owned) for form in match.forms]
        if all(
            r is not None and _bound_capacity(form, r) is not None for form, r in zip(match.forms, ranks, strict=True)
        ):
            return
    _check_limits(match)
    find_keep_masks(match, lambda: None)


def _check_limits(match: Match) -> None:
    """Check that experts keep as many rows as the limit above which Python code drops some.

    Raises:
        Refused: experts with more rows than a limit keep fewer rows than it, and others keep all. An expert with as
            many rows as the limit would keep more than the capacity that the crowded ones show.
    """
    crowded: dict[Source, tuple[int, int]] = {}
    cut_below: set[Source] = set()
    for form in match.forms:
        loads = {e: (int((form.ids == e).sum()), int(form.kept_slots[form.ids == e].sum())) for e in form.ids.unique()}
        for read in form.capture.reads:
            comparison = find_comparison(read)
            if comparison is None or not comparison.depends_on_routing or comparison.op not in _LARGEST_BELOW:
                continue
            limit = unwrap_numbers(comparison.other)
            if type(limit) is not int:
                continue
            limit += _LARGEST_BELOW[comparison.op]
            kept_above = {kept for rows, kept in loads.values() if rows > limit}
            if form.forced_read is None and any(kept < rows <= limit for rows, kept in loads.values()):
                cut_below.add(read.source)
            if len(kept_above) == 1 and 0 < max(kept_above) < limit:
                crowded.setdefault(read.source, (limit, max(kept_above)))
    for source, (limit, kept) in crowded.items():
        if source not in cut_below:
            raise Refused(
                f"an expert with more than {limit} rows keeps {kept} of them, and one with {limit} rows keeps all: "
                f"{source.text}; moefx supports capacities, up to which an expert keeps all rows",
                source=str(source),
                remedy="compare the number of rows with the number that is kept, as in rows[:capacity]",
            )


def _find_rule(match: Match, samples: SizeSamples, owned: set[int]) -> DropRule | None:
    """Return the rule that explains the drops of all captures, or None unless there is exactly one."""
    rules = []
    for order in _ORDERS:
        ranks = [_rank_slots(form, order, owned) for form in match.forms]
        if any(r is None for r in ranks):
            continue
        bounds = [_bound_capacity(form, r) for form, r in zip(match.forms, ranks, strict=True)]  # type: ignore[arg-type]
        if any(b is None for b in bounds):
            continue
        capacity = _find_capacity(match, samples, bounds)  # type: ignore[arg-type]
        if capacity is not None:
            rules.append(DropRule(order, capacity))
    return rules[0] if len(rules) == 1 or (rules and match.slots == 1) else None


def _find_tie_break(match: Match, capturer: Capturer, owned: set[int]) -> TieBreak | None:
    """Find out how an expert treats slots with equal weights, by a capture with ties.

    Returns:
        "exact" if it keeps as many as its capacity, as `topk(n).indices` does; "unstable" if these are not the
        first ones although it sorts stably; "all_or_none" if it keeps all or none of them, as
        `weights >= topk(n).values[-1]` does; None if the order of weights does not explain the drops, or no capture
        has a tie at the capacity.
    """
    bounds = []
    for form in match.forms:
        ranks = _rank_slots(form, "weight", owned)
        if ranks is None or (capacity_range := _bound_capacity(form, ranks)) is None:
            return None
        bounds.append(capacity_range)
    for form, (fewest, most) in zip(match.forms, bounds, strict=True):
        if most is None or form.optional_guard:
            continue
        capture, tied = form.capture, None
        routing = Routing("tied", capture.routing.seed)
        with suppress_program_errors(MoefxError):
            tied = capturer.capture_and_lift(routing, form.sizes, capture.interventions)
        if tied is None:
            continue
        ranks = _rank_slots(tied, "weight", owned, is_tied=True)
        if ranks is None or not _has_ties_at(tied, ranks, fewest, most):
            continue
        if not _are_within(_bound_capacity(tied, ranks), fewest, most):
            return "all_or_none"
        first = _rank_slots(tied, "weight", owned)
        is_stable = any(
            n.kwargs.get("stable") is True and n.all_input_nodes[0].meta["val"].is_floating_point()
            for n in tied.capture.nodes
        )
        if is_stable and first is not None and not _are_within(_bound_capacity(tied, first), fewest, most):
            return "unstable"
        return "exact"
    return None


def _are_within(bounds: tuple[int, int | None] | None, fewest: int, most: int) -> bool:
    """Return whether some capacity within `bounds` is also between `fewest` and `most`."""
    return bounds is not None and bounds[0] <= most and (bounds[1] is None or bounds[1] >= fewest)


def _has_ties_at(form: CanonicalForm, ranks: dict[Slot, int], fewest: int, most: int) -> bool:
    """Return whether slots with equal weights are on both sides of a capacity between `fewest` and `most`."""
    weights = _find_weights(form)
    assert weights is not None
    groups: dict[tuple[int, float], list[int]] = defaultdict(list)
    for slot, rank in ranks.items():
        groups[int(form.ids[slot]), float(weights[slot])].append(rank)
    return any(min(group) < fewest and max(group) >= most for group in groups.values())


def _rank_slots(form: CanonicalForm, order: str, owned: set[int], is_tied: bool = False) -> dict[Slot, int] | None:
    """Return the position of each slot in the queue of its expert; None if the order is by unknown weights.

    Args:
        owned: the experts with parameters. Slots of other ids have no rank.
        is_tied: among equal weights, put the kept slots first.
    """
    ids = form.ids.tolist()
    flat = [(t, k) for t, row in enumerate(ids) for k in range(len(row))]
    if order == "position_slot":
        flat.sort(key=lambda s: (s[1], s[0]))
    elif order == "weight":
        weights = _find_weights(form)
        if weights is None:
            return None
        flat.sort(key=lambda s: (-float(weights[s]), is_tied and not bool(form.kept_slots[s])))
    lengths: dict[int, int] = defaultdict(int)
    ranks = {}
    for t, k in flat:
        expert = ids[t][k]
        if expert in owned:
            ranks[t, k] = lengths[expert]
            lengths[expert] += 1
    return ranks


def _find_weights(form: CanonicalForm) -> torch.Tensor | None:
    """Return the routing weights [T, K] of this capture, or None if no scalar per slot is known."""
    for group in form.groups:
        for i, ref in enumerate(group.values):
            wide = any(b.op == "value" and b.args[0] == i and math.prod(b.shape) > 1 for b in walk_body(group.body))
            is_per_slot = ref.axes[-1:] in (("k",), ("tk",)) or (form.slots == 1 and ref.is_per_token)
            if not wide and not ref.columns and is_per_slot and not ref.has_experts and "s" not in ref.axes:
                return form.capture.concrete_value(ref.node).reshape(form.ids.shape)
    return None


def _bound_capacity(form: CanonicalForm, ranks: dict[Slot, int]) -> tuple[int, int | None] | None:
    """Return the bounds (fewest, most) of the capacity that explain one capture.

    Returns:
        None if no capacity explains the drops; `most` is None if nothing is dropped.
    """
    kept = [r for s, r in ranks.items() if form.kept_slots[s]]
    dropped = [r for s, r in ranks.items() if not form.kept_slots[s]]
    fewest, most = max(kept, default=-1) + 1, min(dropped, default=None)
    return None if most is not None and most < fewest else (fewest, most)


def _find_capacity(match: Match, samples: SizeSamples, bounds: Sequence[tuple[int, int | None]]) -> Formula | None:
    """Find the capacity at any size: a number in the arguments of an op that explains every capture.

    A formula is fitted to its values in more captures.

    Args:
        bounds: the bounds of each capture.
    """
    overflow = next((i for i, (_, most) in enumerate(bounds) if most is not None), None)
    if overflow is None:
        return None
    captured_numbers = [collect_numbers(form.capture.nodes) for form in match.forms]
    # if one expert has nearly all tokens, the program runs its code that drops
    sampled_numbers = [(sizes, collect_numbers(capture.nodes)) for sizes, capture in samples.sample("overloaded")]
    constant: Formula | None = None
    for argument_key, value in captured_numbers[overflow].items():
        if type(value) is not int or not all(
            _fits(n.get(argument_key), p) for n, p in zip(captured_numbers, bounds, strict=True)
        ):
            continue
        points = [
            (dims, number)
            for dims, n in [*zip(match.sizes, captured_numbers, strict=True), *sampled_numbers]
            if type(number := n.get(argument_key)) is int
        ]
        formula = find_formula(points, match.expressions) if len(points) >= _MIN_POINTS else None
        if formula is not None and all(_fits(formula(d), p) for d, p in zip(match.sizes, bounds, strict=True)):
            return formula
        if len(points) >= _MIN_POINTS and {n for _, n in points} == {value} and argument_key[1] in _LIMITS:
            constant = Formula(str(value))
    return constant


def _fits(value: float | None, bounds: tuple[int, int | None]) -> bool:
    """Return whether a capacity explains a capture; a capture without drops need not have the number."""
    fewest, most = bounds
    if value is None:
        return most is None
    return value >= fewest and (most is None or value <= most)


__all__ = ["explain_drops", "refuse_unexplained"]
