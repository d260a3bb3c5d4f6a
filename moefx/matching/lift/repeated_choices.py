"""Tokens that select one expert in two slots: check that they receive the sum over both slots.

A program with a mask adds such an expert once, and its form differs. Rows are compared as sums of products, so that
the order of additions, and of weighting and addition, does not matter. For `ids == [[4, 4]]`::

    for k in range(2):                                # w[0, 0] * F(x[0]) + w[0, 1] * F(x[0]): both slots
        out[t] += w[t, k] * experts[ids[t, k]](x[t])

    gates = torch.zeros(T, E).scatter(1, ids, w)      # gates[0, 4] == w[0, 1]: one slot
    out = sum(gates[:, e, None] * experts[e](x) for e in range(E))
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator
from typing import Any

import torch

from ...capture.tracing.capture_result import Capture
from ...errors import Cause, Refused
from ..terms.parameter_slices import ParameterSlice, is_state_slice
from ..terms.term import Term, constant_value, is_const, is_pointwise_term, pointwise_items
from .canonical_form import Body, CanonicalForm, CapturedGroup, NodeRef, SlotPosition
from .value_lookup import ValueLookup

_LinearSum = dict[tuple[Term | None, tuple[Term, ...]], float]  # (row, scalar factors) -> coefficient


class RepeatedChoiceRefused(Refused):
    """A token that selects an expert twice does not receive the sum over both slots."""

    def __init__(self, source: str, culprits: tuple[str, ...] = ()):
        super().__init__(
            "a token may select the same expert twice, and its output is then not the sum over both slots",
            culprits=culprits, source=source, cause=Cause.REPEATED_CHOICE,
            remedy="let one topk choose: its choices are different experts; or mask the first choice before the "
            "second, scores.masked_fill(one_hot(first, num_experts).bool(), -math.inf)",
        )  # fmt: skip


def find_repeated(ids: torch.Tensor, slots: list[list[int]], hint: CanonicalForm | None) -> dict[int, set[int]]:
    """Find the experts that a token selects twice.

    Only experts count that are known from other tokens, or from the hint.

    Args:
        ids: selected experts [T, K].
        slots: the slots with a summand, by token.

    Returns:
        Sets of experts by token.
    """
    selected = ids.tolist()
    repeated = [{e for e in row if row.count(e) > 1} for row in selected]
    known = {selected[t][k] for t, row in enumerate(slots) for k in row if selected[t][k] not in repeated[t]}
    known |= {e for group in (hint.groups if hint is not None else ()) for e in group.ids}
    return {t: experts for t, row in enumerate(repeated) if (experts := row & known)}


class ChoiceSums:
    """Expands the bodies of single slots, to compare their sum with the summands of a token.

    Args:
        expert_summands: the summands with expert parameters, by token.
        hint: the form of another capture, for experts that this one lacks.
    """

    def __init__(
        self,
        lookup: ValueLookup,
        groups: list[CapturedGroup],
        expert_summands: list[list[Term]],
        *,
        capture: Capture,
        hint: CanonicalForm | None,
    ):
        self.terms, self.lookup = lookup.semantics.terms, lookup
        parts = dict.fromkeys(part for row in expert_summands for part in row)
        self.parameters = {ParameterSlice.from_term(x): x for x in _walk_terms(*parts) if is_state_slice(x)}
        self.groups: dict[int, tuple[CapturedGroup, list[dict[int, ParameterSlice]]]] = {}
        hinted = {g.body: g for g in hint.groups} if hint is not None else {}
        bodies = {g.body for g in groups}
        missing = [_move_to_capture(g, capture) for body, g in hinted.items() if body not in bodies]
        for group in (*groups, *filter(None, missing)):
            other = hinted.get(group.body, group)
            tables = [table | hinted_table for table, hinted_table in zip(group.tables, other.tables, strict=True)]
            self.groups |= {e: (group, tables) for e in {*group.ids, *other.ids}}

    def is_sum_of_choices(self, slots: list[SlotPosition], parts: list[Term]) -> bool:
        """Return whether the summands of a token are the sum over its slots.

        Args:
            slots: (token, slot, expert) of each slot of the token.
            parts: all summands of the token.
        """
        expected: _LinearSum = {}
        for slot in slots:
            _add(expected, self._expand_choice(slot))
        actual: _LinearSum = {}
        for part in parts:
            _add(actual, self._expand_row(part))
        return _round(expected) == _round(actual)

    def has_effect(self, slot: SlotPosition) -> bool:
        """Return whether a slot contributes anything."""
        return bool(_round(self._expand_choice(slot)))

    def _expand_choice(self, slot: SlotPosition) -> _LinearSum:
        known = self.groups.get(slot[2])
        return self._expand_row(self._build_summand(known[0].body, slot)) if known is not None else {}

    def _build_summand(self, body: Body, slot: SlotPosition) -> Term:
        """Build the summand of one slot. A value that no token has becomes an opaque term."""
        group, tables = self.groups[slot[2]]
        term: Term | None = None
        match body.op:
            case "value":
                term = self.lookup.get_element(group.values[body.args[0]], *slot)
            case "expert":
                term = self.parameters.get(tables[body.args[0]][slot[2]])
            case "shared":
                term = self.parameters.get(body.args[0])
            case "const":
                return self.terms.const(body.args[0], body.shape)
            case _:
                args = [self._build_summand(a, slot) if isinstance(a, Body) else a for a in body.args]
                return self.terms.make(body.op, tuple(args), body.shape)
        return self.terms.make("node", (body, slot[2]), body.shape) if term is None else term

    def _expand_row(self, t: Term) -> _LinearSum:
        """Expand a row to a sum of rows, each times scalars."""
        if is_const(t, 0):
            return {}
        if t.op == "pointwise":
            name, kwargs, *items = t.args
            wide = [i for i in items if isinstance(i, Term) and math.prod(i.shape) > 1]
            if name in ("add", "sub") and len(wide) == len(items) == 2:
                row_sum = dict(self._expand_row(wide[0]))
                _add(row_sum, self._expand_row(wide[1]), 1 if name == "add" else -1)
                return row_sum
            if name == "mul" and len(wide) == 1 and len(items) == 2:
                return _multiply(
                    self._expand_row(wide[0]), _expand_scalar(items[1] if items[0] is wide[0] else items[0])
                )
            if name in ("cast", "detach") and len(items) == 1:
                rows = self._expand_row(items[0]).items()
                return {(row and self.terms.pointwise(name, row, **dict(kwargs)), by): n for (row, by), n in rows}
        return {(t, ()): 1.0}


def _move_to_capture(group: CapturedGroup, capture: Capture) -> CapturedGroup | None:
    """Replace the nodes of a group by those at the same positions of a capture, or return None if its ops differ."""
    nodes = [n for ref in group.values for n in ref.nodes]
    node_here = {n: capture.nodes[i] for n in nodes if (i := n.meta["index"]) < len(capture.nodes)}
    if any(n not in node_here or node_here[n].target != n.target for n in nodes):
        return None

    def move(ref: NodeRef) -> NodeRef:
        columns = tuple(map(move, ref.columns))
        return dataclasses.replace(ref, node=columns[0].node if columns else node_here[ref.node], columns=columns)

    return dataclasses.replace(group, values=[*map(move, group.values)])


def _expand_scalar(t: Any) -> _LinearSum:
    """Expand a scalar to a sum of products."""
    if not isinstance(t, Term) or t.op == "const":
        return {(None, ()): float(constant_value(t) if isinstance(t, Term) else t)}
    if t.op in ("reshape", "expand"):
        return _expand_scalar(t.args[0])
    if is_pointwise_term(t, "add", "sub", "mul") and len(t.args) == 4:
        a, b = map(_expand_scalar, pointwise_items(t))
        if t.args[0] == "mul":
            return _multiply(a, b)
        scalar_sum = dict(a)
        _add(scalar_sum, b, 1 if t.args[0] == "add" else -1)
        return scalar_sum
    return {(None, (t,)): 1.0}


def _multiply(rows: _LinearSum, scalars: _LinearSum) -> _LinearSum:
    product: _LinearSum = {}
    for ((row, by), n), ((_, factors), m) in itertools.product(rows.items(), scalars.items()):
        _add(product, {(row, tuple(sorted((*by, *factors), key=id))): n * m})
    return product


def _add(to: _LinearSum, addend: _LinearSum, sign: int = 1) -> None:
    for key, n in addend.items():
        to[key] = to.get(key, 0.0) + sign * n


def _round(sum_: _LinearSum) -> _LinearSum:
    return {key: n for key, value in sum_.items() if (n := round(value, 9))}


def _walk_terms(*terms: Term) -> Iterator[Term]:
    stack, seen = [*terms], {*terms}
    while stack:
        yield (x := stack.pop())
        for a in x.operands:
            if a not in seen:
                seen.add(a)
                stack.append(a)
