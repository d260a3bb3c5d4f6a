"""Find the node that supplies a value of the experts, such as a routing weight or an input row.

Nodes are compared by their terms, not by the ops between them and the experts::

    scores = x @ router.T
    weights = scores.softmax(-1).gather(1, ids)  # [T, K]
    for e, expert in enumerate(experts):
        token, slot = torch.where(ids == e)
        out[token] += expert(x[token]) * weights[token, slot, None]

The summand of token 3 in slot 1 has the factor `at(softmax(scores), (3, 5))`, since it selected expert 5. `weights`
fits with the axes (token, slot): its element (3, 1) is that term. `scores.softmax(-1)` fits with the axes (token,
expert). A *candidate* is a `NodeRef`: a node with the meaning of its axes.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from torch import fx

from ..facts.graph_nodes import line
from ..terms.node_semantics import Semantics
from ..terms.term import Term, is_const
from .canonical_form import CanonicalForm, NodeRef, SlotPosition
from .lift_options import LiftOptions
from .value_axes import SlotEffects, ValueAxes


class _Candidate(NamedTuple):
    """A candidate with its rank; lower ranks are tried first.

    Attributes:
        rank: whether the hint lacks it, whether a submodule keeps it to itself, and how unusual its axes are.
        order: its position in program order, or the opposite number if the last node is preferred.
    """

    rank: tuple[bool, bool, int]
    order: int
    ref: NodeRef


@dataclasses.dataclass(frozen=True, kw_only=True)
class ValueLookup:
    """Finds the candidates whose elements are given terms. `rank` makes one.

    Attributes:
        semantics: the terms of the nodes.
        axes: the axes of values.
        candidates: the nodes to search, the likeliest first, without the repeated ones of a loop.
        with_repeated: all candidates, also the repeated nodes of a loop.
        hint_positions: positions of the candidates that another capture uses: many candidates fit a single token.
        hint_columns: the positions of its values that have a node for each slot.
        hint_drops_slots: that capture drops slots.
        find_behind: returns the nodes behind the masks of a node, see `NodesBehindMasks`.
        effects: what slots add to their token.
    """

    semantics: Semantics
    axes: ValueAxes
    candidates: list[NodeRef]
    with_repeated: list[NodeRef]
    hint_positions: Collection[tuple]
    hint_columns: Collection[tuple]
    hint_drops_slots: bool
    find_behind: Callable[[fx.Node], Collection[fx.Node]] = lambda _: ()
    effects: SlotEffects = dataclasses.field(default_factory=SlotEffects)
    _tables: dict[tuple, dict[Term, list[NodeRef]]] = dataclasses.field(default_factory=dict)
    _rows: dict[tuple[int, ...], set[Term]] = dataclasses.field(default_factory=dict)  # by their shape

    @staticmethod
    def rank(
        semantics: Semantics,
        nodes: Iterable[fx.Node],
        axes: ValueAxes,
        *,
        call_internals: Collection[fx.Node] = (),
        hint: CanonicalForm | None = None,
        options: LiftOptions = LiftOptions(),  # noqa: B008
        find_behind: Callable[[fx.Node], Collection[fx.Node]] = lambda _: (),
    ) -> ValueLookup:
        """Rank nodes as candidates.

        Args:
            call_internals: nodes that a submodule keeps to itself; they are tried last.
            hint: the form of another capture; its candidates are tried first, unless `align_to_last`.
            find_behind: see the attribute.
        """
        groups = hint.groups if hint is not None and not options.align_to_last else ()
        hint_positions = {
            ref.position for group in groups for value in group.values for ref in (value.columns or (value,))
        }
        values = [value for group in groups for value in group.values]
        ranked = _rank_candidates(nodes, axes, call_internals, hint_positions, options)
        return ValueLookup(
            semantics=semantics,
            axes=axes,
            candidates=_keep_first_of_equals(semantics, ranked),
            with_repeated=ranked,
            hint_positions=hint_positions,
            hint_columns=[tuple(ref.position for ref in value.columns) for value in values if value.columns],
            hint_drops_slots=hint is not None and not hint.kept_slots.all(),
            find_behind=find_behind,
        )

    def with_effects(self, effects: SlotEffects) -> ValueLookup:
        """Return the same lookup, which knows what slots add."""
        return dataclasses.replace(self, effects=effects)

    def get_element(self, ref: NodeRef, t: int, k: int, e: int) -> Term | None:
        """Return the term of a candidate for a token, slot and expert, or None outside of the tensor."""
        if ref.columns:
            ref = ref.columns[k]
        term = self.semantics.get_term(ref.node)
        position = self.axes.positions[t]
        index_by_axis: dict[int, int] = {}
        seen = 0
        many = ref.axes.count("t") > 1
        for axis, kind in enumerate(ref.axes):
            i = {"k": k, "e": e, "tk": t * self.axes.slots + k, "kt": k * self.axes.num_tokens + t}.get(kind)
            i = t // (self.axes.num_tokens // term.shape[axis]) if kind == "s" else i
            if i is None:
                i = position[seen] if many else t
                seen += 1
            if not 0 <= i < term.shape[axis]:
                return None
            index_by_axis[axis] = i
        return self.semantics.terms.resolve(self.semantics.terms.pick_axes(term, index_by_axis))

    def _get_value(self, ref: NodeRef, slot: SlotPosition) -> Term | None:
        element = self.get_element(ref, *slot)
        return element and self._as_scalar(element)

    def _as_scalar(self, t: Term) -> Term:
        """Remove the axes of a term with one element: `max(-1, keepdim=True)` gives weights of shape [1]."""
        return self.semantics.terms.reshape(t, ()) if math.prod(t.shape) == 1 else t

    def list_rows(self, shape: tuple[int, ...]) -> set[Term]:
        """Return the rows of this shape of all candidates with one row per token.

        Rows of other shapes are left alone: those of a router, such as the scores of groups of experts, may be long
        sums, and experts compute with none of them.
        """
        if shape not in self._rows:
            out = self._rows[shape] = set()
            for ref in self.candidates if shape else ():
                lead = len(ref.axes)
                if (
                    len(set(ref.axes)) == 1
                    and ref.is_same_for_slots
                    and tuple(ref.node.meta["val"].shape[lead:]) == shape
                ):
                    out |= {r for t in range(self.axes.num_tokens) if (r := self.get_element(ref, t, 0, 0)) is not None}
        return self._rows[shape]

    def find_zero_rows(self) -> list[NodeRef]:
        """List the nodes with one row per token whose rows are all zero, also the repeated ones of a loop."""

        def is_zero(ref: NodeRef) -> bool:
            rows = (self.get_element(ref, t, 0, 0) for t in range(self.axes.num_tokens))
            return all(row is not None and is_const(row, 0) for row in rows)

        return [ref for ref in self.with_repeated if ref.is_per_token and is_zero(ref)]

    def find(
        self,
        positions: list[SlotPosition],
        terms: list[Term],
        per_slot: bool = True,
        may_differ_by_slot: bool = False,
    ) -> NodeRef | None:
        """Find the candidate whose element at every position is the given term.

        Args:
            positions: (token, slot, expert) of each term.
            terms: the wanted elements.
            per_slot: whether candidates with one value per slot or expert may fit, besides those with one per token.
            may_differ_by_slot: whether a vector may differ by slot. By default a vector must be the token's.
        """
        at = positions[0]
        if (at, per_slot) not in self._tables:
            table: dict[Term, list[NodeRef]] = defaultdict(list)
            for ref in self.candidates:
                if per_slot or ref.is_per_token:
                    value = self._get_value(ref, at)
                    if value is not None:
                        table[value].append(ref)
            self._tables[at, per_slot] = table
        scalar = math.prod(terms[0].shape) == 1
        terms = [self._as_scalar(t) for t in terms]
        fits = (
            ref
            for ref in self._tables[at, per_slot].get(terms[0], ())
            if (scalar or may_differ_by_slot or ref.is_same_for_slots)
            and all(self._get_value(ref, slot) is term for slot, term in zip(positions, terms, strict=True))
        )
        first = self._find_likeliest(fits, range(self.axes.slots)) if scalar else next(fits, None)
        if first is None and scalar and per_slot and self.axes.slots > 1:
            return self._find_columns(positions, terms)
        if first is not None and scalar:
            first = self._move_behind_masks(first, positions, terms)
        return self._add_hinted_columns(first, positions) if first is not None and scalar and per_slot else first

    def _move_behind_masks(self, ref: NodeRef, positions: list[SlotPosition], terms: list[Term]) -> NodeRef:
        """Return the last candidate behind the masks of a candidate that has the same elements, or the candidate."""
        behind = self.find_behind(ref.node)
        for other in sorted(self.with_repeated, key=lambda other: -other.node.meta["index"]) if behind else ():
            if (
                other.node in behind
                and (other.axes == ref.axes or {*other.axes} == {"t", "e"} or "tk" in other.axes)
                and all(self._get_value(other, at) is term for at, term in zip(positions, terms, strict=True))
                and self._count_zeros(other, self.effects.dropped) >= self._count_zeros(ref, self.effects.dropped)
                and self._count_zeros(other, self.effects.doubtful) >= self._count_zeros(ref, self.effects.doubtful)
            ):
                return other
        return ref

    def _add_hinted_columns(self, ref: NodeRef, positions: list[SlotPosition]) -> NodeRef:
        """Return the columns of the hint's value if one of them is this node, and the others are zero: this capture may
        drop all other slots, and shows no value for them."""
        slot = positions[0][1]
        if any(k != slot for _, k, _ in positions):
            return ref
        matching = [hinted for hinted in self.hint_columns if hinted[slot : slot + 1] == (ref.position,)]
        by_position = {candidate.position: candidate for candidate in self.with_repeated} if matching else {}
        dropped = [at for at in self.effects.dropped if at[1] != slot]
        for hinted in matching:
            columns = tuple(by_position[position] for position in hinted if position in by_position)
            if len(columns) == len(hinted) and all(self._count_zeros(columns[at[1]], [at]) for at in dropped):
                return NodeRef(columns[0].node, ("t", "k"), columns)
        return ref

    def find_rows(
        self, t: int, term: Term, rest: list[list[Term]], lines: Collection[tuple[Any, Any]] | None
    ) -> tuple[NodeRef, list[Term]] | None:
        """Find the candidate whose row `t` is `term` and whose other rows are summands of their tokens, or zero.

        Args:
            rest: the summands that are left, by token.
            lines: lines that may hold the node; None for all.

        Returns:
            The candidate and its rows.
        """
        for ref in self.candidates:
            if not ref.is_per_token or self.get_element(ref, t, 0, 0) is not term:
                continue
            if lines is not None and line(ref.node) not in lines:
                continue
            column = [self.get_element(ref, i, 0, 0) for i in range(self.axes.num_tokens)]
            if all(r is not None and (is_const(r, 0) or r in parts) for r, parts in zip(column, rest, strict=True)):
                return ref, column  # type: ignore[return-value]
        return None

    def _find_likeliest(self, fits: Iterator[NodeRef], slots: Collection[int]) -> NodeRef | None:
        """Choose among candidates that fit: the first, unless one is zero exactly at the dropped slots.

        A weight that is zero elsewhere is the mask of one expert. If some slots are doubtful, the candidate that is
        zero at most of these wins.
        """
        dropped, doubtful, counted = (
            [at for at in positions if at[1] in slots]
            for positions in (self.effects.dropped, self.effects.doubtful, self.effects.counted)
        )
        first = next(fits, None)
        if first is None or not (dropped or doubtful):
            return first
        if self.hint_drops_slots and first.position in self.hint_positions:
            return first
        masks = (
            ref
            for ref in itertools.chain([first], fits)
            if self._count_zeros(ref, dropped) == len(dropped) and not (dropped and self._count_zeros(ref, counted))
        )
        if not doubtful:
            return next(masks, first)
        return max(masks, key=lambda ref: self._count_zeros(ref, doubtful), default=first)

    def _count_zeros(self, ref: NodeRef, positions: Sequence[SlotPosition]) -> int:
        elements = (self.get_element(ref, *at) for at in positions)
        return sum(element is None or is_const(element, 0) for element in elements)

    def _find_columns(self, positions: list[SlotPosition], terms: list[Term]) -> NodeRef | None:
        """Find one candidate per slot."""
        columns = []
        for k in range(self.axes.slots):
            of_slot = [(at, term) for at, term in zip(positions, terms, strict=True) if at[1] == k]
            if not of_slot or len(of_slot) == len(positions):
                return None
            first, first_term = of_slot[0]
            fits = (
                ref
                for ref in self.candidates
                if not ref.has_slots
                and ("t" in ref.axes or "s" in ref.axes)
                and self._get_value(ref, first) is first_term
                if all(self._get_value(ref, at) is term for at, term in of_slot)
            )
            column = self._find_likeliest(fits, (k,))
            if column is None:
                return None
            columns.append(self._move_behind_masks(column, [at for at, _ in of_slot], [term for _, term in of_slot]))
        return NodeRef(columns[0].node, ("t", "k"), tuple(columns))

    def find_holders(self, term: Term) -> list[NodeRef]:
        """List the candidates that have this term at the first position of some earlier `find`."""
        return [ref for table in self._tables.values() for ref in table.get(self._as_scalar(term), ())]

    def has_value_at(self, t: int, k: int, e: int, term: Term) -> bool:
        return any(
            self.get_element(ref, t, k, e) is term for ref in self.candidates if "k" in ref.axes or ref.has_experts
        )


def _rank_candidates(
    nodes: Iterable[fx.Node],
    axes: ValueAxes,
    call_internals: Collection[fx.Node],
    hint_positions: Collection[tuple],
    options: LiftOptions,
) -> list[NodeRef]:
    """List the candidates, the likeliest first."""
    candidates: list[_Candidate] = []
    for n in nodes:
        for unusual, kinds in axes.list_axes(tuple(n.meta["val"].shape)):
            if options.weights_per_slot and "e" in kinds and {"t", "s"} & set(kinds):
                continue
            ref, index = NodeRef(n, kinds), n.meta["index"]
            rank = (ref.position not in hint_positions, n in call_internals, unusual)
            candidates.append(_Candidate(rank, -index if options.align_to_last else index, ref))
    return [ref for _, _, ref in sorted(candidates, key=lambda candidate: candidate[:2])]


def _keep_first_of_equals(semantics: Semantics, refs: list[NodeRef]) -> list[NodeRef]:
    """Keep the first of equal candidates: each run of a loop may compute `weights[..., None]` again."""
    first: dict[tuple, NodeRef] = {}
    for ref in refs:
        first.setdefault((semantics.get_term(ref.node), ref.axes, line(ref.node)), ref)
    return list(first.values())


__all__ = ["ValueLookup"]
