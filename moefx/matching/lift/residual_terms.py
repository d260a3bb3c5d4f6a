"""Summands without expert parameters: shared summands, the output of unrouted tokens, and identity experts.

Each line of this program adds one of them::

    out = shared_expert(x)
    out[~is_routed] = x[~is_routed]
    out[token] += x[token] * w[token, slot, None]  # of an expert that is the identity
"""

from __future__ import annotations

import math

from ...errors import Refused
from ..facts.graph_nodes import line
from ..terms.term import Term, format_term, is_const, is_pointwise_term, pointwise_items
from .canonical_form import CanonicalForm, NodeRef
from .expert_owners import ExpertOwners
from .value_lookup import ValueLookup


def find_shared(
    residual: list[list[Term]], lookup: ValueLookup, owners: ExpertOwners, hint: CanonicalForm | None
) -> tuple[list[NodeRef], list[list[Term]]]:
    """Find the shared summands: nodes without experts whose rows are added for all tokens.

    A token lacks the summand if the row is zero under this routing, such as a gated part. A sum that no node computes
    is split further.

    Args:
        residual: the summands without expert parameters, by token.
        hint: the form of another capture. If it has identity experts, only lines of its shared summands count:
            an identity expert that all tokens select looks like a shared summand.

    Returns:
        The nodes, and the summands that are left.
    """
    refs: list[NodeRef] = []
    lines = None
    if hint is not None and any(not group.tables for group in hint.groups):
        lines = {line(ref.node) for ref in hint.shared}
    while True:
        residual = [list(parts) for parts in residual]
        tried_terms: set[Term] = set()
        for t, parts in enumerate(residual):
            for term in [p for p in parts if p not in tried_terms]:
                tried_terms.add(term)
                column = lookup.find_rows(t, term, residual, lines)
                if column is not None:
                    refs.append(column[0])
                    for summands, shared in zip(residual, column[1], strict=True):
                        if not is_const(shared, 0):
                            summands.remove(shared)
        split = [[p for part in parts for p in owners.split_operands(part)] for parts in residual]
        if split == residual:
            return (refs if hint is None else _order_by_hint(hint.shared, refs, lookup)), residual
        residual = split


def _order_by_hint(hint: list[NodeRef], refs: list[NodeRef], lookup: ValueLookup) -> list[NodeRef]:
    """Sort `refs` in the order of the hint's shared summands, and add those whose rows are all zero in this capture.

    A row is zero for an identity expert behind a dense mask that no token selects. If the two lists differ in another
    summand, `refs` stays as it is.
    """
    by_position = {ref.position: ref for ref in refs}
    if not all(ref.position in by_position for ref in hint):
        by_position = {ref.position: ref for ref in lookup.find_zero_rows()} | by_position
    ordered = [by_position[ref.position] for ref in hint if ref.position in by_position]
    return ordered if len(ordered) == len(hint) and set(refs) <= set(ordered) else refs


def find_unrouted_value(
    residual: list[list[Term]], expert_summands: list[list[Term]], lookup: ValueLookup
) -> tuple[NodeRef | None, list[list[Term]]]:
    """Find the output of tokens without an expert, such as their own row, if no other token has a residual summand.

    Returns:
        The node, or None, and the summands that are left.
    """
    alone = [t for t, parts in enumerate(expert_summands) if not parts]
    if (
        not alone
        or any(len(residual[t]) != 1 for t in alone)
        or any(residual[t] for t in range(len(residual)) if expert_summands[t])
    ):
        return None, residual
    ref = lookup.find([(t, 0, 0) for t in alone], [residual[t][0] for t in alone], per_slot=False)
    return (ref, [[] for _ in residual]) if ref is not None else (None, residual)


def assign_identity_slots(
    t: int, parts: list[Term], ids: list[int], placed: list[tuple[int, Term]], lookup: ValueLookup
) -> None:
    """Append the summands of identity experts, which have no parameters, to `placed`, each in a free slot.

    A summand belongs to the slot whose routing weight it contains.

    Args:
        parts: the summands of token `t` without expert parameters.
        ids: the selected experts of the token.
        placed: (slot, summand) pairs of the token.

    Raises:
        Refused: no slot is left for a summand.
    """
    for part in [summand for whole in parts for summand in _split_by_weight(whole, lookup)]:
        free = sorted(set(range(len(ids))) - {k for k, _ in placed})
        scalars = {a for a in part.operands if math.prod(a.shape) == 1}
        fits = [k for k in free if any(lookup.has_value_at(t, k, ids[k], s) for s in scalars)]
        if not fits and len(free) == 1:
            fits = free
        if not fits:
            raise Refused(
                f"a part of the output is neither an expert's nor the same for all tokens: {format_term(part, 3)}",
                remedy="let an expert add nothing to the tokens that did not select it: multiply its result, not its "
                "input, by the routing weight",
            )
        placed.append((fits[0], part))


def _split_by_weight(t: Term, lookup: ValueLookup) -> list[Term]:
    """Split `x * (w1 + w2)` into two summands: a token may select two experts that compute the same."""
    if is_pointwise_term(t, "mul"):
        a, b = pointwise_items(t)
        wide, scalar = (a, b) if math.prod(b.shape) == 1 else (b, a)
        if is_pointwise_term(scalar, "add") and not any(lookup.find_holders(scalar)):
            pointwise = lookup.semantics.terms.pointwise
            items = pointwise_items(scalar)
            products = [pointwise("mul", wide, s) if wide is a else pointwise("mul", s, wide) for s in items]
            return [p for product in products for p in _split_by_weight(product, lookup)]
    return [t]
