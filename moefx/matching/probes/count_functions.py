"""Vary functions of counts, positions or several choices that are constant for few tokens.

Protects from functions that change with many tokens::

    counts = torch.bincount(chosen.flatten(), minlength=num_experts)
    weights = weights / (1 + counts // 300)[chosen]  # 1 in captures of 29 tokens
    position = torch.arange(len(x)) % 700
    weights = weights * (position < 650)[:, None]
    number = chosen[:, 0] * num_experts + chosen[:, 1]
    weights = weights * (number != 7)[:, None]  # True for the tokens of all captures

The results look like constants. The probe captures again with different numbers in their place, and requires the form
of the other captures. Comparisons with a known limit belong to `unreached_limits`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from ...capture.environment.code_locations import Source
from ...capture.tracing.capture_result import FORCE_VARIED, Capture
from ...capture.tracing.node_origins import fold_ancestors
from ...capture.tracing.op_sets import CONTRACTIONS, SHAPE_ONLY
from ...ir.node_values import get_op_name
from ..facts.count_limits import find_limits
from ..facts.graph_nodes import (
    SELECTION_DIMS,
    depends_on_arguments,
    depends_on_routing,
    find_extremes,
    find_lookups,
    follows_from_integers,
    position_axis,
    skip_moves,
)
from ..facts.integer_ranges import IntegerRanges, find_token_sizes
from ..facts.load_statistics import is_load_statistic
from ..facts.op_classes import (
    AXIS_REDUCTIONS,
    COMPARISONS,
    COPIES,
    COUNT_CLAMPS,
    ELEMENT_MOVES,
    LOOKUPS,
    NEW_TENSORS,
    SEARCHES,
    VIEWS,
)
from ..facts.range_arithmetic import UNBOUNDED
from ..interventions.forced_outcome import ForcedStep, OutcomeKind, force_outcome
from ..interventions.idle_branches import is_chosen_test

if TYPE_CHECKING:
    from ..proof.proof_view import ProofView

_LOOKUPS = LOOKUPS | SEARCHES
_SCANS = {"cummax", "cummin", "cumprod"}
_LOGIC = {"all", "any", "bitwise_and", "bitwise_not", "bitwise_or", "logical_and", "logical_not", "logical_or"}


def vary_count_functions(proof: ProofView) -> None:
    """Force different values of numbers that are constant for few tokens.

    Raises:
        Refused: other values change the form.
    """
    for (source, op), description in {**_find_constant_numbers(proof), **_find_unclamped_numbers(proof)}.items():
        force_outcome(proof, ForcedStep(OutcomeKind.OP, source, description), {(source, op, True): FORCE_VARIED})


def _find_constant_numbers(proof: ProofView) -> dict[tuple[Source, str], str]:
    """Find ops on counts, ranks or positions whose result is constant although their operands, or table, vary.

    The result may be a number (`counts // 300`, `relu(counts - 300)`, `table[arange(T) // 300]`), a boolean
    (`isin(ranks, few)`) or a position (`stack([ranks, limits]).argmax(0)`). Comparisons with a fixed limit are left to
    `overflow_limits`.

    Returns:
        A description of the constant, for the refusal, by source line and op.
    """
    outcomes_by_op: dict[tuple[Source, str, Any], set[Any]] = {}
    operand_values: dict[tuple[Source, str, Any], set[float]] = {}
    limited: dict[tuple[Source, str], set[int | None]] = {}
    for form in proof.evidence.forms:
        for site, limit in find_limits(form.capture, proof.evidence.unforced_lengths).items():
            limited.setdefault(site, set()).add(limit)
    for form in proof.evidence.forms:
        ranges = IntegerRanges.with_more_tokens(form.capture)
        sizes = find_token_sizes(form.capture)
        for n in filter(follows_from_integers, form.capture.nodes):
            by = n.args[0] if get_op_name(n) == "getitem" else n
            if n.op != "call_function" or not isinstance(by, fx.Node):
                continue
            site = (by.meta["source"], str(by.target))
            if _orders_slots(n):
                continue
            is_statistic = is_load_statistic(form.capture, n)
            # `overflow_limits` looks beyond a fixed limit, and not beyond one that grows with the tokens
            is_limit = site in limited and not (is_statistic and len(limited[site]) > 1)
            is_count_function = not is_limit and (is_statistic or _has_unbounded_operands(ranges, n, by))
            is_test = _tests_positions(n, sizes) or _tests_choices_together(ranges, n) or _takes_from_scan(n)
            if not (_is_function_of_elements(n) or is_test or is_count_function):
                continue
            if is_chosen_test(n) and _find_outcomes(form.capture, n, by) == {get_op_name(n) in ("gt", "ge", "ne")}:
                continue
            key = (*site, n.args[1] if by is not n else None)
            seen = outcomes_by_op.setdefault(key, set())
            if len(seen) > 1:
                continue
            seen |= _find_outcomes(form.capture, n, by)
            operand_values.setdefault(key, set()).update(
                *[find_extremes(form.capture, a) for a in _find_value_operands(by)]
            )
            if len(seen) == 1 and (depends_on_routing(n) or n.meta["val"].dtype is torch.bool) and ranges.is_decided(n):
                seen |= {0, 1}
    same = {key[:2]: seen for key, seen in outcomes_by_op.items() if len(seen) == 1 and len(operand_values[key]) > 1}
    same = {key: seen for key, seen in same.items() if _is_constant(proof, key)}
    return {key: _describe_outcome(next(iter(seen))) for key, seen in same.items()}


def _is_constant(proof: ProofView, site: tuple[Source, str]) -> bool:
    """Return whether an op has one value in all captures, even those in which it does not depend on crowds."""
    seen: set[Any] = set()
    for form in proof.evidence.forms:
        for n in filter(follows_from_integers, form.capture.nodes):
            if n.op == "call_function" and (n.meta["source"], str(n.target)) == site:
                seen |= _find_outcomes(form.capture, n, n) if isinstance(n.meta.get("val"), torch.Tensor) else set()
    return len(seen) <= 1


def _describe_outcome(seen: Any) -> str:
    if isinstance(seen, bool):
        return f"a comparison that is {str(seen).lower()} for few tokens"
    if isinstance(seen, tuple):
        return "a choice that is the same for few tokens"
    return f"a number that is {seen:g} for few tokens"


def _find_outcomes(capture: Capture, n: fx.Node, by: fx.Node) -> set[Any]:
    """Return two of a node's values, or the only one. For indices (`argsort`), return up to two of its rows."""
    extremes = find_extremes(capture, n)
    if n.meta["val"].dtype is torch.bool:
        return set(map(bool, extremes))
    axis = _find_index_axis(n, by)
    if axis is None or len(extremes) < 2:
        return extremes
    rows = capture.concrete_value(n).movedim(axis, -1).flatten(0, -2).unique(dim=0)
    return set(map(tuple, rows[:2].tolist()))


def _find_index_axis(n: fx.Node, by: fx.Node) -> int | None:
    """Return the axis along which an op returns several indices in each row; None for other ops."""
    if n.meta["val"].dim() < 2 or (n.args[1:2] != (1,) if by is not n else get_op_name(n) != "argsort"):
        return None
    if by is n:
        return position_axis(n)
    return SELECTION_DIMS[get_op_name(by)](by)[0] if get_op_name(by) in SELECTION_DIMS else None


def _find_value_operands(n: fx.Node) -> list[fx.Node]:
    """Find the operands whose elements are in the result: not the positions of a lookup or of an indexed write."""
    positions = [i for i, _, _ in find_lookups(n)]
    return [a for a in n.all_input_nodes if a not in positions]


def _orders_slots(n: fx.Node) -> bool:
    """Return whether a node reorders an expert's slots: `slots[weights.topk(8).indices]`.

    Its values are 0 if experts have one slot each, and no function of counts.
    """
    order = next((i for i, _, _ in find_lookups(n)), None) if get_op_name(n) in _LOOKUPS else None
    while order is not None and get_op_name(order) in ("slice", "getitem"):
        order = order.all_input_nodes[0]
    return order is not None and get_op_name(order) in SELECTION_DIMS and bool(order.meta.get("ragged"))


def _has_unbounded_operands(ranges: IntegerRanges, n: fx.Node, by: fx.Node) -> bool:
    """Return whether an op computes with numbers that grow with the tokens."""
    val: Any = n.meta.get("val")
    if not isinstance(val, torch.Tensor) or not val.numel() or by.target in SHAPE_ONLY:
        return False
    operands = [a for a in by.all_input_nodes if getattr(a.meta.get("val"), "dtype", torch.bool) is not torch.bool]
    if get_op_name(by) == "_to_copy":  # floats that are rounded
        operands = [a for a in operands if a.meta["val"].is_floating_point() or val.dtype is torch.bool]
        return not val.is_floating_point() and any(_is_unbounded(ranges, a) for a in operands)
    return get_op_name(by) not in ELEMENT_MOVES | NEW_TENSORS and any(_is_unbounded(ranges, a) for a in operands)


def _is_unbounded(ranges: IntegerRanges, node: fx.Node) -> bool:
    """Return whether a number is unbounded as the tokens grow."""

    def grows(n: fx.Node, are: list[bool]) -> bool:
        val = n.meta.get("val")
        node_range = ranges.get(n)
        if node_range is not None:
            return not bool((node_range[1] < UNBOUNDED // 2).all() and (node_range[0] > -UNBOUNDED // 2).all())
        if n.op != "call_function" or not follows_from_integers(n) or not isinstance(val, torch.Tensor):
            return n.op == "call_function" and any(are)
        if not n.all_input_nodes:
            return bool(n.meta.get("ragged")) and len(val.unique()) > 1
        is_pointwise = torch.Tag.pointwise in getattr(n.target, "tags", ())
        return any(are) or (
            depends_on_routing(n) and not is_pointwise and get_op_name(n) not in ELEMENT_MOVES | _LOOKUPS
        )

    return fold_ancestors(node, "grows", grows)


def _find_unclamped_numbers(proof: ProofView) -> dict[tuple[Source, str], str]:
    """Find ops with fixed limits that no capture reached: `positions % 700`, `counts.clamp(max=300)`."""
    limits_at: dict[tuple[Source, str], set[str]] = {}
    for form in proof.evidence.forms:
        for n in form.capture.nodes:
            if get_op_name(n) not in COUNT_CLAMPS or not follows_from_integers(n) or n.meta["val"].dtype is torch.bool:
                continue
            if isinstance(before := n.args[0], fx.Node):
                unclamped = follows_from_integers(before) and torch.equal(
                    form.capture.concrete_value(n), form.capture.concrete_value(before)
                )
                limit = str((n.args[1:], n.kwargs)) if unclamped else "reached"
                limits_at.setdefault((n.meta["source"], str(n.target)), set()).add(limit)
    # limits that grow with the sizes are left out
    fixed = [key for key, limits in limits_at.items() if len(limits) == 1 and "reached" not in limits]
    return dict.fromkeys(fixed, "a number that is cut off for many tokens")


def _tests_positions(n: fx.Node, sizes: set[int]) -> bool:
    """Return whether a node tests computed positions of tokens, such as `700 - p < 0`."""
    val: Any = n.meta.get("val")
    if not isinstance(val, torch.Tensor) or val.dtype != torch.bool or depends_on_routing(n) or n.target in SHAPE_ONLY:
        return False
    operands = [(a, v) for a in n.all_input_nodes if isinstance(v := a.meta.get("val"), torch.Tensor)]
    tested = [(a, v) for a, v in operands if not sizes.isdisjoint(v.shape)]
    return bool(tested) and all(v.dtype != torch.bool and a.all_input_nodes for a, v in tested)


def _tests_choices_together(ranges: IntegerRanges, n: fx.Node) -> bool:
    """Return whether a node tests several choices of a token together, or a number made of them::

    (ids[:, 0] == 2) & (ids[:, 1] == 5)
    ids[:, 0] * num_experts + ids[:, 1] == 7
    """
    name, operands = get_op_name(n), n.all_input_nodes
    if depends_on_arguments(n):  # see `integer_inputs`
        return False
    if name in COMPARISONS:
        return _tests_choices(ranges, n) and any(map(_is_computed_choice, operands))
    return name in _LOGIC and _tests_choices(ranges, n)


def _tests_choices(ranges: IntegerRanges, n: fx.Node) -> bool:
    """Return whether a boolean follows from choices of tokens, and from no counts or ranks."""
    n = skip_moves(n, COPIES | VIEWS)
    tested = [a for a in n.all_input_nodes if depends_on_routing(a)]
    if get_op_name(n) in COMPARISONS:
        return bool(tested) and not any(_is_unbounded(ranges, a) for a in n.all_input_nodes)
    return get_op_name(n) in _LOGIC and bool(tested) and all(_tests_choices(ranges, a) for a in tested)


def _takes_from_scan(n: fx.Node) -> bool:
    """Return whether a node takes elements of a scan of a token's choices: `(ids == triple).long().cumprod(-1)[:, -1]`.

    They may be constant although the scan is not.
    """
    source = n.all_input_nodes[0] if get_op_name(n) in ("select", "slice") else None
    source = source.args[0] if source is not None and get_op_name(source) == "getitem" else source
    return isinstance(source, fx.Node) and get_op_name(source) in _SCANS and depends_on_routing(source)


def _is_computed_choice(n: fx.Node) -> bool:
    """Return whether an op computes integers of the routing, rather than selecting or comparing them."""
    n = skip_moves(n, COPIES | VIEWS)
    val: Any = n.meta.get("val")
    if not isinstance(val, torch.Tensor) or val.dtype is torch.bool or not depends_on_routing(n):
        return False
    is_pointwise = torch.Tag.pointwise in getattr(n.target, "tags", ())
    return is_pointwise or get_op_name(n) in AXIS_REDUCTIONS


def _is_function_of_elements(n: fx.Node) -> bool:
    """Return whether an op computes a number from each element, or looks it up in a table, also by a product.

    Some pointwise ops lack the tag: compare shapes.
    """
    val: Any = n.meta.get("val")
    if not isinstance(val, torch.Tensor) or val.dtype == torch.bool or not val.numel() or get_op_name(n) in NEW_TENSORS:
        return False
    return (
        get_op_name(n) in _LOOKUPS
        or n.target in CONTRACTIONS
        or any(isinstance(v := a.meta.get("val"), torch.Tensor) and v.shape == val.shape for a in n.all_input_nodes)
    )
