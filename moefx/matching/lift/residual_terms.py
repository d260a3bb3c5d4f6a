"""Summands that are no expert's: what all tokens get, what those get that no expert took, and identity experts."""

from __future__ import annotations

import math

from ...errors import Refused
from ..graph_nodes import line
from ..terms.term import Term, format_term, is_const
from .canonical_form import CanonicalForm, NodeRef
from .expert_owners import ExpertOwners
from .value_lookup import ValueLookup


def find_shared(
    rest: list[list[Term]], lookup: ValueLookup, owners: ExpertOwners, like: CanonicalForm | None
) -> tuple[list[NodeRef], list[list[Term]]]:
    """Summands that are the rows of a node which is computed without the experts, the same node for all tokens.
    Where its row is zero under this routing (a gated part that is not chosen) there is no summand. A sum that is no
    node's is taken apart. `like`: the form of another capture of the block; where that has identity experts, one that
    all tokens chose here is none of these."""
    refs: list[NodeRef] = []
    lines = None
    if like is not None and any(not group.tables for group in like.groups):
        lines = {line(ref.node) for ref in like.shared}
    while True:
        rest = [list(parts) for parts in rest]
        tried: set[Term] = set()
        for t, parts in enumerate(rest):
            for term in [p for p in parts if p not in tried]:
                tried.add(term)
                column = lookup.find_rows(t, term, rest, lines)
                if column is not None:
                    refs.append(column[0])
                    for mine, found in zip(rest, column[1], strict=True):
                        if not is_const(found, 0):
                            mine.remove(found)
        apart = [[p for part in parts for p in owners.split_operands(part)] for parts in rest]
        if apart == rest:
            return (refs if like is None else _order_like(refs, like.shared, lookup)), rest
        rest = apart


def _order_like(refs: list[NodeRef], there: list[NodeRef], lookup: ValueLookup) -> list[NodeRef]:
    """The summands of another capture, in their order, where those that are not among `refs` are zero for all tokens:
    what a dense mask lets through, of an identity expert that nobody chose."""
    mine = {ref.position: ref for ref in refs}
    if not all(ref.position in mine for ref in there):
        mine = {ref.position: ref for ref in lookup.zero_rows()} | mine
    ordered = [mine[ref.position] for ref in there if ref.position in mine]
    return ordered if len(ordered) == len(there) and set(refs) <= set(ordered) else refs


def find_unrouted_value(
    rest: list[list[Term]], routed: list[list[Term]], lookup: ValueLookup
) -> tuple[NodeRef | None, list[list[Term]]]:
    """What the tokens that no expert took have instead: their own row, say, which the others do not have."""
    alone = [t for t, parts in enumerate(routed) if not parts]
    if not alone or any(len(rest[t]) != 1 for t in alone) or any(rest[t] for t in range(len(rest)) if routed[t]):
        return None, rest
    ref = lookup.find([(t, 0, 0) for t in alone], [rest[t][0] for t in alone], slots=False)
    return (ref, [[] for _ in rest]) if ref is not None else (None, rest)


def assign_identity_slots(
    t: int, parts: list[Term], ids: list[int], placed: list[tuple[int, Term]], lookup: ValueLookup
) -> None:
    """Summands of a token without parameters (identity experts): the slots that are left, told apart by their
    weights."""
    for part in [summand for whole in parts for summand in _split_by_weight(whole, lookup)]:
        free = sorted(set(range(len(ids))) - {k for k, _ in placed})
        scalars = {a for a in part.terms if math.prod(a.shape) == 1}
        fits = [k for k in free if any(lookup.has_value_at(t, k, ids[k], s) for s in scalars)]
        if not fits and len(free) == 1:
            fits = free
        if not fits:
            raise Refused(
                f"a part of the output is neither an expert's nor the same for all tokens: {format_term(part, 3)}"
            )
        placed.append((fits[0], part))


def _split_by_weight(t: Term, lookup: ValueLookup) -> list[Term]:
    """`x * (w1 + w2)` as two summands: one token may choose two experts that do the same."""
    if t.op == "pw" and t.args[0] == "mul":
        a, b = t.args[2:]
        wide, scalar = (a, b) if math.prod(b.shape) == 1 else (b, a)
        if scalar.op == "pw" and scalar.args[0] == "add" and not any(lookup.find_holders(scalar)):
            pw = lookup.S.T.pw
            products = [pw("mul", wide, s) if wide is a else pw("mul", s, wide) for s in scalar.args[2:]]
            return [p for product in products for p in _split_by_weight(product, lookup)]
    return [t]
