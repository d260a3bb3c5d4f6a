"""Vary functions of counts, positions or several choices that are constant for few tokens.

Protects from functions that change with many tokens::

    counts = torch.bincount(chosen.flatten(), minlength=num_experts)
    weights = weights / (1 + counts // 300)[chosen]  # 1 in captures of 29 tokens
    position = torch.arange(len(x)) % 700
    weights = weights * (position < 650)[:, None]
    number = chosen[:, 0] * num_experts + chosen[:, 1]  # or chosen.double() @ powers
    weights = weights * (number != 7)[:, None]  # True for the tokens of all captures
    is_rare = (counts[chosen[:, 0]] == 2) & (torch.arange(len(x)) == 5)  # both occur, but not for one token

The results look like constants. The probe captures again with different numbers in their place, and requires the form
of the other captures. Comparisons with a known limit belong to `unreached_limits`.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from ...capture.tracing.capture_result import FORCE_VARIED, Capture
from ...capture.tracing.node_origins import is_abstract
from ...capture.tracing.op_sets import CONTRACTIONS, SHAPE_ONLY
from ...ir.ancestors import fold_ancestors
from ...ir.node_values import get_op_name
from ..facts.count_limits import REACHED, Limit, OpSite, find_limits
from ..facts.graph_nodes import (
    SELECTION_DIMS,
    depends_on_arguments,
    depends_on_choices,
    depends_on_routing,
    find_extremes,
    find_lookups,
    follows_from_integers,
    position_axis,
    skip_moves,
)
from ..facts.integer_ranges import MAX_OTHER_SIZE, IntegerRanges, find_token_sizes
from ..facts.load_statistics import is_load_statistic
from ..facts.op_classes import (
    COMPARISONS,
    COUNT_CLAMPS,
    ELEMENT_MOVES,
    LOOKUPS,
    NEW_TENSORS,
    SEARCHES,
    VIEWS,
)
from ..facts.range_arithmetic import UNBOUNDED
from ..facts.token_functions import hash_without_sizes, is_token_function
from ..interventions.forced_outcome import ForcedStep, OutcomeKind, force_outcome
from ..interventions.idle_branches import is_chosen_test

if TYPE_CHECKING:
    from ..proof.proof_view import ProofView

_LOOKUPS = LOOKUPS | SEARCHES
_CONNECTIVES = {"bitwise_and", "bitwise_or", "bitwise_xor", "logical_and", "logical_or", "logical_xor", "mul", "where"}
_BOTH = {0.0, 1.0}


@dataclasses.dataclass(frozen=True)
class _Number:
    """A number that an op computes in all captures.

    Attributes:
        part: the index of the result, if the op has several.
        computation: hash of the computation, if runs of a loop that compute other numbers count as other ops; else 0.
    """

    site: OpSite
    part: Any
    computation: int


@dataclasses.dataclass
class _Observation:
    """What captures show of a number.

    Attributes:
        outcomes: some of its outcomes.
        operands: the extremes of each operand, by its position.
        is_joint: the operands are tests, and each must vary.
    """

    outcomes: set[Any] = dataclasses.field(default_factory=set)
    operands: dict[int, set[float]] = dataclasses.field(default_factory=dict)
    is_joint: bool = False

    @property
    def is_constant(self) -> bool:
        """Whether there is one outcome although the operands vary."""
        if self.is_joint:
            return len(self.outcomes) == 1 and all(len(seen) > 1 for seen in self.operands.values())
        return len(self.outcomes) == 1 and len(set().union(*self.operands.values())) > 1


def vary_count_functions(proof: ProofView) -> None:
    """Force different values of numbers that are constant for few tokens.

    Raises:
        Refused: other values change the form.
    """
    for site, description in {**_find_constant_numbers(proof), **_find_unclamped_numbers(proof)}.items():
        step = ForcedStep(OutcomeKind.OP, site.source, description)
        force_outcome(proof, step, {(site.source, site.op, True): FORCE_VARIED})


def _find_constant_numbers(proof: ProofView) -> dict[OpSite, str]:
    """Find ops on counts, ranks or positions whose result is constant although their operands, or table, vary.

    The result may be a number (`counts // 300`, `relu(counts - 300)`, `table[arange(T) // 300]`), a boolean
    (`isin(ranks, few)`) or a position (`stack([ranks, limits]).argmax(0)`). Comparisons with a fixed limit are left to
    `overflow_limits`.

    Returns:
        A description of the constant, for the refusal, by its place.
    """
    observations: dict[_Number, _Observation] = {}
    limited: dict[OpSite, set[Limit]] = {}
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
            site = OpSite.locate(by)
            if _orders_slots(n):
                continue
            is_statistic = is_load_statistic(form.capture, n)
            # `overflow_limits` looks beyond a fixed limit, and not beyond one that is reached or grows with the tokens
            is_limit = (
                site in limited and REACHED not in limited[site] and not (is_statistic and len(limited[site]) > 1)
            )
            is_count_function = not is_limit and (is_statistic or _has_unbounded_operands(form.capture, n, by))
            is_token_number = _tests_positions(n, sizes) or _is_made_of_choices(form.capture, n, by)
            is_joint = _joins_tests(n)
            if not (_is_function_of_elements(n) or is_token_number or is_count_function or is_joint):
                continue
            if is_chosen_test(n) and _list_possible_outcomes(form.capture, n, by) == {
                get_op_name(n) in ("gt", "ge", "ne")
            }:
                continue
            # runs of a loop that compute other numbers of choices: `for pair in pairs: (ids == pair).all(-1)`
            computation = hash_without_sizes(n) if is_token_number and not _tests_one_choice(n) else 0
            number = _Number(site, n.args[1] if by is not n else None, computation)
            observation = observations.setdefault(number, _Observation())
            if len(observation.outcomes) > 1:
                continue
            observation.outcomes |= _list_possible_outcomes(form.capture, n, by)
            observation.is_joint = is_joint and not is_token_number
            for i, a in enumerate(_find_value_operands(by)):
                seen = find_extremes(form.capture, a)
                observation.operands.setdefault(i, set()).update(_BOTH if is_joint and _joins_tests(a) else seen)
            may_be_decided = depends_on_routing(n) or n.meta["val"].dtype is torch.bool
            if len(observation.outcomes) == 1 and may_be_decided and ranges.is_decided(n):
                observation.outcomes |= {0, 1}
    return {
        number.site: _describe_outcome(next(iter(observation.outcomes)))
        for number, observation in observations.items()
        if observation.is_constant and _is_constant(proof, number)
    }


def _tests_one_choice(n: fx.Node) -> bool:
    """Return whether a node compares a choice, or its entry in a table, as a loop over experts does: `ids == e`."""
    compared = [skip_moves(a, VIEWS | _LOOKUPS) for a in n.all_input_nodes if depends_on_routing(a)]
    return get_op_name(n) in COMPARISONS and all(a.op == "get_attr" or get_op_name(a) == "getitem" for a in compared)


def _is_constant(proof: ProofView, number: _Number) -> bool:
    """Return whether an op has one value in all captures, even those in which it does not depend on crowds."""
    seen: set[Any] = set()
    for form in proof.evidence.forms:
        for n in filter(follows_from_integers, form.capture.nodes):
            if n.op == "call_function" and OpSite.locate(n) == number.site:
                is_other_run = number.computation and hash_without_sizes(n) != number.computation
                is_tensor = isinstance(n.meta.get("val"), torch.Tensor)
                seen |= _list_possible_outcomes(form.capture, n, n) if is_tensor and not is_other_run else set()
    return len(seen) <= 1


def _describe_outcome(seen: Any) -> str:
    if isinstance(seen, bool):
        return f"a comparison that is {str(seen).lower()} for few tokens"
    if isinstance(seen, tuple):
        return "a choice that is the same for few tokens"
    return f"a number that is {seen:g} for few tokens"


def _list_possible_outcomes(capture: Capture, n: fx.Node, by: fx.Node) -> set[Any]:
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


def _has_unbounded_operands(capture: Capture, n: fx.Node, by: fx.Node) -> bool:
    """Return whether an op computes with numbers that grow with the tokens."""
    val: Any = n.meta.get("val")
    if not isinstance(val, torch.Tensor) or not val.numel() or by.target in SHAPE_ONLY:
        return False
    operands = [a for a in by.all_input_nodes if getattr(a.meta.get("val"), "dtype", torch.bool) is not torch.bool]
    if get_op_name(by) == "_to_copy":  # floats that are rounded
        operands = [a for a in operands if a.meta["val"].is_floating_point() or val.dtype is torch.bool]
        return not val.is_floating_point() and any(_is_unbounded(capture, a) for a in operands)
    return get_op_name(by) not in ELEMENT_MOVES | NEW_TENSORS and any(_is_unbounded(capture, a) for a in operands)


def _is_unbounded(capture: Capture, node: fx.Node) -> bool:
    """Return whether a number is unbounded as the tokens grow."""
    ranges = IntegerRanges.with_more_tokens(capture)

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


def _find_unclamped_numbers(proof: ProofView) -> dict[OpSite, str]:
    """Find ops with fixed limits that no capture reached: `positions % 700`, `counts.clamp(max=300)`."""
    limits_at: dict[OpSite, set[str]] = {}
    for form in proof.evidence.forms:
        for n in form.capture.nodes:
            if get_op_name(n) not in COUNT_CLAMPS or not follows_from_integers(n) or n.meta["val"].dtype is torch.bool:
                continue
            if isinstance(before := n.args[0], fx.Node):
                unclamped = follows_from_integers(before) and torch.equal(
                    form.capture.concrete_value(n), form.capture.concrete_value(before)
                )
                limit = str((n.args[1:], n.kwargs)) if unclamped else "reached"
                limits_at.setdefault(OpSite.locate(n), set()).add(limit)
    # limits that grow with the sizes are left out
    fixed = [site for site, limits in limits_at.items() if len(limits) == 1 and "reached" not in limits]
    return dict.fromkeys(fixed, "a number that is cut off for many tokens")


def _tests_positions(n: fx.Node, sizes: set[int]) -> bool:
    """Return whether a node tests computed positions of tokens, such as `700 - p < 0`."""
    val: Any = n.meta.get("val")
    if not isinstance(val, torch.Tensor) or val.dtype != torch.bool or depends_on_routing(n) or n.target in SHAPE_ONLY:
        return False
    operands = [(a, v) for a in n.all_input_nodes if isinstance(v := a.meta.get("val"), torch.Tensor)]
    tested = [(a, v) for a, v in operands if not sizes.isdisjoint(v.shape)]
    return bool(tested) and all(v.dtype != torch.bool and a.all_input_nodes for a, v in tested)


def _joins_tests(n: fx.Node) -> bool:
    """Return whether a node combines tests of the routing into one: `is_full & is_first`."""
    val: Any = n.meta.get("val")
    if get_op_name(n) not in _CONNECTIVES or not isinstance(val, torch.Tensor) or val.dtype is not torch.bool:
        return False
    return depends_on_routing(n) and all(a.meta["val"].dtype is torch.bool for a in n.all_input_nodes)


def _is_made_of_choices(capture: Capture, n: fx.Node, by: fx.Node) -> bool:
    """Return whether a node computes, tests or takes a part of a number that follows from a token's choices::

        (ids[:, 0] == 2) & (ids[:, 1] == 5)
        ids.double() @ powers == 7
        (ids == triple).long().cumprod(-1)[:, -1]

    Selections by floats are left to `float_decisions`, and arguments to `integer_inputs`.
    """
    return (
        capture.sizes.tokens > MAX_OTHER_SIZE
        and isinstance(n.meta.get("val"), torch.Tensor)
        and depends_on_choices(n)
        and not depends_on_arguments(n)
        and not any(map(is_abstract, by.all_input_nodes))
        and is_token_function(capture, n)
    )


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
