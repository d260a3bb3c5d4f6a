"""Which node supplies a value: weights and input rows are recognised by what they are, not by where they came from."""

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
    """Finds the node whose elements are given terms: weights and input rows are recognised by what they are."""

    def __init__(
        self, S: Semantics, nodes: list[fx.Node], tokens: tuple[int, ...], slots: int, experts: int,
        inside: set[fx.Node], like: CanonicalForm | None, by_slots: bool, is_last: bool, sequences: int = 0,
    ):  # fmt: skip
        """`nodes`: to look among. `inside`: those that are a submodule's own, to be taken only where no other fits.
        `like`: the form of another capture of the block. `by_slots`: not what a token has for each expert. `is_last`:
        of nodes that fit the last is found, whatever `like` has, else the first. `sequences`: how many there are, if
        one value may be for all tokens of a sequence."""
        self.S, self.tokens, self.slots, self.experts = S, tokens, slots, experts
        self.T, self.sequences = math.prod(tokens), sequences
        self.positions = list(itertools.product(*map(range, tokens)))
        self.counted: list[tuple[int, int, int]] = []  # places where a slot counts, and where it does not
        self.dropped: list[tuple[int, int, int]] = []
        self.doubtful: list[tuple[int, int, int]] = []  # where a weight that is zero at some of them is the likelier
        self.readings: list[tuple[tuple[bool, bool, int], int, NodeRef]] = []
        self.before = {  # at a single token several readings fit: as in the other capture is best
            ref.position
            for group in (like.groups if like is not None and not is_last else ())
            for value in group.values
            for ref in (value.columns or (value,))
        }
        for n in nodes:
            for rank, axes in self._enumerate_axes(tuple(n.meta["val"].shape)):
                if by_slots and "e" in axes and {"t", "s"} & set(axes):
                    continue
                ref, index = NodeRef(n, axes), n.meta["index"]
                at = -index if is_last else index
                self.readings.append(((ref.position not in self.before, n in inside, rank), at, ref))
        self.readings.sort(key=lambda r: r[:2])
        self.readings = self._drop_repeated()
        self.before_knew = like is not None and not like.kept_slots.all()  # which slots are dropped
        self._tables: dict[tuple, dict[Term, list[NodeRef]]] = {}

    def _drop_repeated(self) -> list[tuple[tuple[bool, bool, int], int, NodeRef]]:
        """The first of the readings that are the same: each turn of a loop may compute `weights[..., None]` again."""
        first: dict[tuple, tuple[tuple[bool, bool, int], int, NodeRef]] = {}
        for reading in self.readings:
            ref = reading[-1]
            first.setdefault((self.S.term(ref.node), ref.axes, line(ref.node)), reading)
        return list(first.values())

    def _enumerate_axes(self, shape: tuple[int, ...]) -> list[tuple[int, tuple[str, ...]]]:
        T, K, out = self.T, self.slots, []
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
        if ref.columns:
            ref = ref.columns[k]
        term = self.S.term(ref.node)
        position = self.positions[t]
        where: dict[int, int] = {}
        seen = 0
        many = ref.axes.count("t") > 1
        for axis, kind in enumerate(ref.axes):
            i = {"k": k, "e": e, "tk": t * self.slots + k, "kt": k * self.T + t}.get(kind)
            i = t // (self.T // term.shape[axis]) if kind == "s" else i
            if i is None:
                i = position[seen] if many else t
                seen += 1
            if not 0 <= i < term.shape[axis]:
                return None
            where[axis] = i
        return self.S.T.resolve(self.S.T.pick_axes(term, where))

    def _get_value(self, ref: NodeRef, place: tuple[int, int, int]) -> Term | None:
        found = self.get_element(ref, *place)
        return found and self._as_scalar(found)

    def _as_scalar(self, t: Term) -> Term:
        """A weight is a scalar, whatever axes of size one a node has for it, as `max(-1, keepdim=True)` does."""
        return self.S.T.reshape(t, ()) if math.prod(t.shape) == 1 else t

    def rows(self) -> set[Term]:
        """The rows, one per token, of all readings that have one."""
        out = set()
        for _, _, ref in self.readings:
            if set(ref.axes) in ({"t"}, {"s"}) and len(ref.node.meta["val"].shape) > len(ref.axes):
                out |= {r for t in range(self.T) if (r := self.get_element(ref, t, 0, 0)) is not None}
        return out

    def zero_rows(self) -> list[NodeRef]:
        """Readings of one row per token whose rows are zero, all of them."""
        return [
            ref
            for _, _, ref in self.readings
            if set(ref.axes) == {"t"}
            and all((r := self.get_element(ref, t, 0, 0)) is not None and is_const(r, 0) for t in range(self.T))
        ]

    def find(
        self, where: list[tuple[int, int, int]], terms: list[Term], slots: bool = True, wide: bool = False
    ) -> NodeRef | None:
        """The node (and reading) whose element at every place is the given term. A value that is not a scalar must
        be one per token, unless `wide`."""
        at = where[0]
        if (at, slots) not in self._tables:
            table: dict[Term, list[NodeRef]] = defaultdict(list)
            for _, _, ref in self.readings:
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
            and all(self._get_value(ref, place) is term for place, term in zip(where, terms, strict=True))
        )
        first = self._find_likeliest(fits, range(self.slots)) if scalar else next(fits, None)
        if first is None and scalar and slots and self.slots > 1:
            return self._find_columns(where, terms)
        return first

    def find_rows(
        self, t: int, term: Term, rest: list[list[Term]], lines: Collection[tuple[Any, Any]] | None
    ) -> tuple[NodeRef, list[Term]] | None:
        """The node whose row `t` is `term`, and whose other rows are among what is left of the sums, or zero; one of
        some lines, if these are given."""
        for _, _, ref in self.readings:
            if set(ref.axes) != {"t"} or self.get_element(ref, t, 0, 0) is not term:
                continue
            if lines is not None and line(ref.node) not in lines:
                continue
            column = [self.get_element(ref, i, 0, 0) for i in range(self.T)]
            if all(r is not None and (is_const(r, 0) or r in parts) for r, parts in zip(column, rest, strict=True)):
                return ref, column  # type: ignore[return-value]
        return None

    def _find_likeliest(self, fits: Iterator[NodeRef], slots: Collection[int]) -> NodeRef | None:
        """The first, or a weight that says itself which slots count: zero wherever one is dropped, nowhere else (one
        expert's mask is), and most often where one may be."""
        dropped, doubtful, counted = (
            [at for at in found if at[1] in slots] for found in (self.dropped, self.doubtful, self.counted)
        )
        first, best, most = next(fits, None), None, -1
        if first is None or not (dropped or doubtful) or (self.before_knew and first.position in self.before):
            return first
        for ref in itertools.chain([first], fits):
            says = len(self._find_zeros(ref, dropped)) == len(dropped) and not (
                dropped and self._find_zeros(ref, counted)
            )
            if says and (zeros := len(self._find_zeros(ref, doubtful))) > most:
                best, most = ref, zeros
            if best and not doubtful:
                break
        return best or first

    def _find_zeros(self, ref: NodeRef, where: list[tuple[int, int, int]]) -> list[tuple[int, int, int]]:
        return [at for at in where if (found := self.get_element(ref, *at)) is None or is_const(found, 0)]

    def _find_columns(self, where: list[tuple[int, int, int]], terms: list[Term]) -> NodeRef | None:
        """One node for each slot."""
        columns = []
        for k in range(self.slots):
            mine = [(place, term) for place, term in zip(where, terms, strict=True) if place[1] == k]
            if not mine or len(mine) == len(where):
                return None
            first, wanted = mine[0]
            fits = (
                ref
                for _, _, ref in self.readings
                if not {"k", "tk", "kt"} & set(ref.axes)
                and {"t", "s"} & set(ref.axes)
                and self._get_value(ref, first) is wanted
                if all(self._get_value(ref, place) is term for place, term in mine)
            )
            found = self._find_likeliest(fits, (k,))
            if found is None:
                return None
            columns.append(found)
        return NodeRef(columns[0].node, ("t", "k"), tuple(columns))

    def find_holders(self, term: Term) -> list[NodeRef]:
        """Readings that have this term somewhere (looked for at the first places only)."""
        return [ref for table in self._tables.values() for ref in table.get(self._as_scalar(term), ())]

    def has_value_at(self, t: int, k: int, e: int, term: Term) -> bool:
        return any(
            self.get_element(ref, t, k, e) is term for _, _, ref in self.readings if "k" in ref.axes or "e" in ref.axes
        )
