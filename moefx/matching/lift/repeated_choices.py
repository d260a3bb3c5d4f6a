"""What the choices of a token are worth, where two of them are one expert: the sum of what each is worth by itself.

A mask has an expert once that was chosen twice. Rows are compared as sums of products: in which order a program adds up
weights, and whether before or after they are multiplied with what the expert gives, is nothing that must be the same.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator
from typing import Any

import torch

from ...capture.captured import Capture
from ...errors import Refused
from ..terms.normal_form import Terms
from ..terms.parameter_places import ParameterSlice, is_state_slice
from ..terms.term import Term, constant_value, is_const
from .canonical_form import Body, CanonicalForm, Group, NodeRef
from .value_lookup import ValueLookup

_LinearSum = dict[tuple[Term | None, tuple[Term, ...]], float]  # how often rows are added up, and times which scalars


REPEATED_CHOICE = "two choices of a token may be the same expert, and do not add up then as different ones do"


class RepeatedChoiceRefused(Refused):
    """A token that chose an expert twice does not get what both choices are worth."""

    def __init__(self, source: str, culprits: tuple[str, ...] = ()):
        super().__init__(
            REPEATED_CHOICE, culprits=culprits, source=source,
            remedy="let one topk choose: its choices are different experts; or mask the first choice before the "
            "second, scores.masked_fill(one_hot(first, num_experts).bool(), -math.inf)",
        )  # fmt: skip


def find_repeated(ids: torch.Tensor, slots: list[list[int]], like: CanonicalForm | None) -> dict[int, set[int]]:
    """By token the experts that it has chosen twice, of those that are known from tokens which chose them once."""
    chosen = ids.tolist()
    again = [{e for e in row if row.count(e) > 1} for row in chosen]
    known = {chosen[t][k] for t, row in enumerate(slots) for k in row if chosen[t][k] not in again[t]}
    known |= {e for group in (like.groups if like is not None else ()) for e in group.ids}
    return {t: experts for t, row in enumerate(again) if (experts := row & known)}


class ChoiceSums:
    """Whether what a token gets is the sum of what its choices are worth, one by one."""

    def __init__(
        self, capture: Capture, T: Terms, lookup: ValueLookup, groups: list[Group], routed: list[list[Term]],
        like: CanonicalForm | None,
    ):  # fmt: skip
        """`routed`: the summands of all tokens that the experts have a part in."""
        self.T, self.lookup = T, lookup
        parts = dict.fromkeys(part for row in routed for part in row)
        self.places = {ParameterSlice.from_term(x): x for x in _walk_terms(*parts) if is_state_slice(x)}
        self.groups: dict[int, tuple[Group, list[dict[int, ParameterSlice]]]] = {}
        others = {g.body: g for g in like.groups} if like is not None else {}
        met = {g.body for g in groups}
        unmet = [_move_to_capture(g, capture) for body, g in others.items() if body not in met]
        for group in (*groups, *filter(None, unmet)):
            other = others.get(group.body, group)
            tables = [own | more for own, more in zip(group.tables, other.tables, strict=True)]
            self.groups |= {e: (group, tables) for e in {*group.ids, *other.ids}}

    def is_sum_of_choices(self, places: list[tuple[int, int, int]], parts: list[Term]) -> bool:
        """`places`: the token, slot and expert of each choice of a token. `parts`: all that it gets."""
        wanted: _LinearSum = {}
        for place in places:
            _add(wanted, self._expand_choice(place))
        found: _LinearSum = {}
        for part in parts:
            _add(found, self._expand_row(part))
        return _round(wanted) == _round(found)

    def has_effect(self, place: tuple[int, int, int]) -> bool:
        """Whether a choice is worth anything."""
        return bool(_round(self._expand_choice(place)))

    def _expand_choice(self, place: tuple[int, int, int]) -> _LinearSum:
        known = self.groups.get(place[2])
        return self._expand_row(self._build_summand(known[0].body, place)) if known is not None else {}

    def _build_summand(self, body: Body, where: tuple[int, int, int]) -> Term:
        """The summand of one choice. What no token has stands for itself."""
        group, tables = self.groups[where[2]]
        found: Term | None = None
        match body.op:
            case "value":
                found = self.lookup.get_element(group.values[body.args[0]], *where)
            case "expert":
                found = self.places.get(tables[body.args[0]][where[2]])
            case "shared":
                found = self.places.get(body.args[0])
            case "const":
                return self.T.const(body.args[0], body.shape)
            case _:
                args = [self._build_summand(a, where) if isinstance(a, Body) else a for a in body.args]
                return self.T.make(body.op, tuple(args), body.shape)
        return self.T.make("node", (body, where[2]), body.shape) if found is None else found

    def _expand_row(self, t: Term) -> _LinearSum:
        """A row as a sum of rows, each times scalars."""
        if is_const(t, 0):
            return {}
        if t.op == "pw":
            name, kwargs, *items = t.args
            wide = [i for i in items if isinstance(i, Term) and math.prod(i.shape) > 1]
            if name in ("add", "sub") and len(wide) == len(items) == 2:
                found = dict(self._expand_row(wide[0]))
                _add(found, self._expand_row(wide[1]), 1 if name == "add" else -1)
                return found
            if name == "mul" and len(wide) == 1 and len(items) == 2:
                return _multiply(
                    self._expand_row(wide[0]), _expand_scalar(items[1] if items[0] is wide[0] else items[0])
                )
            if name in ("cast", "detach") and len(items) == 1:
                rows = self._expand_row(items[0]).items()
                return {(row and self.T.pw(name, row, **dict(kwargs)), by): n for (row, by), n in rows}
        return {(t, ()): 1.0}


def _move_to_capture(group: Group, capture: Capture) -> Group | None:
    """With the values of another capture, at the same places of it; None where it took another way."""
    several = [n for ref in group.values for n in ref.nodes]
    here = {n: capture.nodes[i] for n in several if (i := n.meta["index"]) < len(capture.nodes)}
    if any(n not in here or here[n].target != n.target for n in several):
        return None

    def twin(ref: NodeRef) -> NodeRef:
        columns = tuple(map(twin, ref.columns))
        return dataclasses.replace(ref, node=columns[0].node if columns else here[ref.node], columns=columns)

    return dataclasses.replace(group, values=[*map(twin, group.values)])


def _expand_scalar(t: Any) -> _LinearSum:
    """A scalar as a sum of products."""
    if not isinstance(t, Term) or t.op == "const":
        return {(None, ()): float(constant_value(t) if isinstance(t, Term) else t)}
    if t.op in ("reshape", "expand"):
        return _expand_scalar(t.args[0])
    if t.op == "pw" and t.args[0] in ("add", "sub", "mul") and len(t.args) == 4:
        a, b = map(_expand_scalar, t.args[2:])
        if t.args[0] == "mul":
            return _multiply(a, b)
        found = dict(a)
        _add(found, b, 1 if t.args[0] == "add" else -1)
        return found
    return {(None, (t,)): 1.0}


def _multiply(rows: _LinearSum, scalars: _LinearSum) -> _LinearSum:
    found: _LinearSum = {}
    for ((row, by), n), ((_, more), m) in itertools.product(rows.items(), scalars.items()):
        _add(found, {(row, tuple(sorted((*by, *more), key=id))): n * m})
    return found


def _add(to: _LinearSum, more: _LinearSum, sign: int = 1) -> None:
    for key, n in more.items():
        to[key] = to.get(key, 0.0) + sign * n


def _round(sum_: _LinearSum) -> _LinearSum:
    return {key: n for key, value in sum_.items() if (n := round(value, 9))}


def _walk_terms(*terms: Term) -> Iterator[Term]:
    stack, seen = [*terms], {*terms}
    while stack:
        yield (x := stack.pop())
        for a in x.terms:
            if a not in seen:
                seen.add(a)
                stack.append(a)
