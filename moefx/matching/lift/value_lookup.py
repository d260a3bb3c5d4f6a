"""Find the node that supplies a value of the experts, such as a routing weight or an input row.

Nodes are compared by their terms, not by the ops between them and the experts: a node fits if its elements are the
given terms. A *candidate* is a `NodeRef`: a node with the meaning of its axes.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Collection, Iterator
from typing import Any

from torch import fx

from ..graph_nodes import line
from ..terms.node_semantics import Semantics
from ..terms.term import Term, is_const
from .canonical_form import CanonicalForm, NodeRef


class ValueLookup:
    """Finds the candidates whose elements are given terms.

    Args:
        nodes: nodes to search.
        tokens: the token axes.
        slots: number of slots, K.
        experts: number of experts.
        inside: nodes that a submodule keeps to itself; they are tried last.
        hint: the form of another capture; its candidates are tried first.
        weights_per_slot: skip nodes with one value per token and expert.
        align_to_last: find the last node that fits, regardless of the hint; by default the first.
        sequences: number of sequences, if one value may hold for all tokens of a sequence; else 0.

    Attributes:
        counted: (token, slot, expert) of the slots that count.
        dropped: the same for slots that do not.
        doubtful: the same for slots that may not. A weight that is zero at some of them is more likely.
    """

    def __init__(
        self, S: Semantics, nodes: list[fx.Node], tokens: tuple[int, ...], slots: int, experts: int,
        inside: set[fx.Node], hint: CanonicalForm | None, weights_per_slot: bool, align_to_last: bool,
        sequences: int = 0,
    ):  # fmt: skip
        self.semantics, self.tokens, self.slots, self.experts = S, tokens, slots, experts
        self.num_tokens, self.sequences = math.prod(tokens), sequences
        self.positions = list(itertools.product(*map(range, tokens)))
        self.counted: list[tuple[int, int, int]] = []
        self.dropped: list[tuple[int, int, int]] = []
        self.doubtful: list[tuple[int, int, int]] = []
        self.candidates: list[tuple[tuple[bool, bool, int], int, NodeRef]] = []
        self.hint_positions = {  # many candidates fit a single token; those of the hint are the likeliest
            ref.position
            for group in (hint.groups if hint is not None and not align_to_last else ())
            for value in group.values
            for ref in (value.columns or (value,))
        }
        for n in nodes:
            for rank, axes in self._enumerate_axes(tuple(n.meta["val"].shape)):
                if weights_per_slot and "e" in axes and {"t", "s"} & set(axes):
                    continue
                ref, index = NodeRef(n, axes), n.meta["index"]
                at = -index if align_to_last else index
                self.candidates.append(((ref.position not in self.hint_positions, n in inside, rank), at, ref))
        self.candidates.sort(key=lambda r: r[:2])
        self.candidates = self._drop_repeated()
        self.hint_drops_slots = hint is not None and not hint.kept_slots.all()
        self._tables: dict[tuple, dict[Term, list[NodeRef]]] = {}
        self._rows: dict[tuple[int, ...], set[Term]] = {}  # by their shape

    def _drop_repeated(self) -> list[tuple[tuple[bool, bool, int], int, NodeRef]]:
        """Keep the first of equal candidates: each run of a loop may compute `weights[..., None]` again."""
        first: dict[tuple, tuple[tuple[bool, bool, int], int, NodeRef]] = {}
        for candidate in self.candidates:
            ref = candidate[-1]
            first.setdefault((self.semantics.term(ref.node), ref.axes, line(ref.node)), candidate)
        return list(first.values())

    def _enumerate_axes(self, shape: tuple[int, ...]) -> list[tuple[int, tuple[str, ...]]]:
        """List the axes by which a tensor of this shape may hold values, each with its rank (0 is the likeliest)."""
        T, K, out = self.num_tokens, self.slots, []
        for lead in dict.fromkeys([(T,), self.tokens]):
            n = len(lead)
            t = ("t",) * n
            extra = 0 if n == 1 else 1
            if shape[:n] == lead:
                out.append((extra, t))
                if shape[n : n + 1] == (K,):
                    out.append((extra, (*t, "k")))
                if len(shape) > n and shape[n] >= self.experts:
                    out.append((4 + extra, (*t, "e")))
            if shape[:1] == (K,) and shape[1 : n + 1] == lead:
                out.append((2 + extra, ("k", *t)))
            if len(shape) > n and shape[0] >= self.experts and shape[1 : n + 1] == lead:
                out.append((6 + extra, ("e", *t)))
        if shape[:1] == (T * K,) and K > 1:
            out += [(3, ("tk",)), (3, ("kt",))]
        if shape and shape[0] >= self.experts and shape[0] != T:
            out.append((8, ("e",)))
        if math.prod(shape) == 1:
            out.append((9, ()))
        if self.sequences and shape[:1] == (self.sequences,) and len(shape) <= 2 and shape != self.tokens:
            out.append((10, ("s",)))
            out += [(10, ("s", "k"))] if shape[1:] == (K,) else []
            out += [(11, ("s", "e"))] if len(shape) > 1 and shape[1] >= self.experts else []
        return out

    def get_element(self, ref: NodeRef, t: int, k: int, e: int) -> Term | None:
        """Return the term of a candidate for a token, slot and expert, or None outside of the tensor."""
        if ref.columns:
            ref = ref.columns[k]
        term = self.semantics.term(ref.node)
        position = self.positions[t]
        index_by_axis: dict[int, int] = {}
        seen = 0
        many = ref.axes.count("t") > 1
        for axis, kind in enumerate(ref.axes):
            i = {"k": k, "e": e, "tk": t * self.slots + k, "kt": k * self.num_tokens + t}.get(kind)
            i = t // (self.num_tokens // term.shape[axis]) if kind == "s" else i
            if i is None:
                i = position[seen] if many else t
                seen += 1
            if not 0 <= i < term.shape[axis]:
                return None
            index_by_axis[axis] = i
        return self.semantics.terms.resolve(self.semantics.terms.pick_axes(term, index_by_axis))

    def _get_value(self, ref: NodeRef, slot: tuple[int, int, int]) -> Term | None:
        found = self.get_element(ref, *slot)
        return found and self._as_scalar(found)

    def _as_scalar(self, t: Term) -> Term:
        """Remove the axes of a term with one element: `max(-1, keepdim=True)` gives weights of shape [1]."""
        return self.semantics.terms.reshape(t, ()) if math.prod(t.shape) == 1 else t

    def rows(self, shape: tuple[int, ...]) -> set[Term]:
        """Return the rows of this shape of all candidates with one row per token.

        Rows of other shapes are left alone: those of a router, such as the scores of groups of experts, may be long
        sums, and experts compute with none of them.
        """
        if shape not in self._rows:
            out = self._rows[shape] = set()
            for _, _, ref in self.candidates if shape else ():
                lead = len(ref.axes)
                if set(ref.axes) in ({"t"}, {"s"}) and tuple(ref.node.meta["val"].shape[lead:]) == shape:
                    out |= {r for t in range(self.num_tokens) if (r := self.get_element(ref, t, 0, 0)) is not None}
        return self._rows[shape]

    def zero_rows(self) -> list[NodeRef]:
        """List the candidates with one row per token whose rows are all zero."""
        return [
            ref
            for _, _, ref in self.candidates
            if set(ref.axes) == {"t"}
            and all(
                (r := self.get_element(ref, t, 0, 0)) is not None and is_const(r, 0) for t in range(self.num_tokens)
            )
        ]

    def find(
        self, positions: list[tuple[int, int, int]], terms: list[Term], slots: bool = True, wide: bool = False
    ) -> NodeRef | None:
        """Find the candidate whose element at every position is the given term.

        Args:
            positions: (token, slot, expert) of each term.
            terms: the wanted elements.
            slots: whether candidates per slot or expert may fit, besides those per token.
            wide: whether a vector may differ by slot. By default a vector must be the token's.
        """
        at = positions[0]
        if (at, slots) not in self._tables:
            table: dict[Term, list[NodeRef]] = defaultdict(list)
            for _, _, ref in self.candidates:
                if slots or set(ref.axes) == {"t"}:
                    found = self._get_value(ref, at)
                    if found is not None:
                        table[found].append(ref)
            self._tables[at, slots] = table
        scalar = math.prod(terms[0].shape) == 1
        terms = [self._as_scalar(t) for t in terms]
        fits = (
            ref
            for ref in self._tables[at, slots].get(terms[0], ())
            if (scalar or wide or set(ref.axes) <= {"t", "s"})
            and all(self._get_value(ref, slot) is term for slot, term in zip(positions, terms, strict=True))
        )
        first = self._find_likeliest(fits, range(self.slots)) if scalar else next(fits, None)
        if first is None and scalar and slots and self.slots > 1:
            return self._find_columns(positions, terms)
        return first

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
        for _, _, ref in self.candidates:
            if set(ref.axes) != {"t"} or self.get_element(ref, t, 0, 0) is not term:
                continue
            if lines is not None and line(ref.node) not in lines:
                continue
            column = [self.get_element(ref, i, 0, 0) for i in range(self.num_tokens)]
            if all(r is not None and (is_const(r, 0) or r in parts) for r, parts in zip(column, rest, strict=True)):
                return ref, column  # type: ignore[return-value]
        return None

    def _find_likeliest(self, fits: Iterator[NodeRef], slots: Collection[int]) -> NodeRef | None:
        """Choose among candidates that fit: the first, unless one is zero exactly at the dropped slots.

        A weight that is zero elsewhere is the mask of one expert. If some slots are doubtful, the candidate that is
        zero at most of these wins.
        """
        dropped, doubtful, counted = (
            [at for at in found if at[1] in slots] for found in (self.dropped, self.doubtful, self.counted)
        )
        first, best, most = next(fits, None), None, -1
        if (
            first is None
            or not (dropped or doubtful)
            or (self.hint_drops_slots and first.position in self.hint_positions)
        ):
            return first
        for ref in itertools.chain([first], fits):
            is_mask = len(self._find_zeros(ref, dropped)) == len(dropped) and not (
                dropped and self._find_zeros(ref, counted)
            )
            if is_mask and (zeros := len(self._find_zeros(ref, doubtful))) > most:
                best, most = ref, zeros
            if best and not doubtful:
                break
        return best or first

    def _find_zeros(self, ref: NodeRef, positions: list[tuple[int, int, int]]) -> list[tuple[int, int, int]]:
        return [at for at in positions if (found := self.get_element(ref, *at)) is None or is_const(found, 0)]

    def _find_columns(self, positions: list[tuple[int, int, int]], terms: list[Term]) -> NodeRef | None:
        """Find one candidate per slot."""
        columns = []
        for k in range(self.slots):
            of_slot = [(at, term) for at, term in zip(positions, terms, strict=True) if at[1] == k]
            if not of_slot or len(of_slot) == len(positions):
                return None
            first, first_term = of_slot[0]
            fits = (
                ref
                for _, _, ref in self.candidates
                if not {"k", "tk", "kt"} & set(ref.axes)
                and {"t", "s"} & set(ref.axes)
                and self._get_value(ref, first) is first_term
                if all(self._get_value(ref, at) is term for at, term in of_slot)
            )
            column = self._find_likeliest(fits, (k,))
            if column is None:
                return None
            columns.append(column)
        return NodeRef(columns[0].node, ("t", "k"), tuple(columns))

    def find_holders(self, term: Term) -> list[NodeRef]:
        """List the candidates that have this term at the first position of some earlier `find`."""
        return [ref for table in self._tables.values() for ref in table.get(self._as_scalar(term), ())]

    def has_value_at(self, t: int, k: int, e: int, term: Term) -> bool:
        return any(
            self.get_element(ref, t, k, e) is term
            for _, _, ref in self.candidates
            if "k" in ref.axes or "e" in ref.axes
        )
