"""Vary the number of tokens of one expert: none, one or two, while other experts have more.

Protects from a rule for experts with few tokens that leaves no read to force::

    count = int((chosen == e).sum())  # a plain number
    if count <= 1:
        continue
    rows = x[token]
    second = rows[1] if len(rows) > 1 else rows[0]

With few experts, each of them has several tokens in all other captures. If Python reads something made of floats, a
single token also scores all experts nearly alike, for branches such as `if weights.max() < 0.4`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import TYPE_CHECKING

from ...capture.environment.code_locations import is_internal_error
from ...capture.tracing.capture_result import HostRead
from ...capture.tracing.concrete_routing import Routing, RoutingKind
from ...capture.tracing.node_origins import find_float_decisions, is_abstract
from ...errors import MoefxError
from ..lift.canonical_form import CanonicalForm

if TYPE_CHECKING:
    from ..proof.proof_view import ProofView

_COUNTS = (0, 1, 2)
_CONTROLS = (3, 2)  # tokens of a control capture; if neither count can be captured, give up
_MAX_EXPERTS = 3  # experts to try


def vary_expert_counts(proof: ProofView) -> None:
    """Add captures in which one expert has few tokens, if no capture shows that.

    If Python reads values computed from floats, add captures in which its only token scores all experts nearly alike.

    Raises:
        Refused: an expert without tokens, or with one or two, changes the form.
    """
    seen = _find_seen_counts(proof)
    routings: list[tuple[RoutingKind, int, int]] = []
    routings.extend(("spared", 0, count) for count in _COUNTS if count not in seen)
    if any(_reads_floats(read) for form in proof.evidence.forms for read in form.capture.reads):
        routings.extend([("unsure", 0, 1), ("unsure", proof.num_experts, 1)])
    experts = max(proof.evidence.reference.groups, key=lambda g: len(g.ids)).ids[:_MAX_EXPERTS]
    for sizes, expert in itertools.product(_choose_few_sizes(proof) if routings else (), experts):
        controls = (Routing("spared", expert, (expert,) * count) for count in _CONTROLS)
        compare, add = proof.evidence.require_same_form, proof.add_form
        if not any(
            isinstance(_lift_count(proof, expert, routing, sizes, compare), CanonicalForm) for routing in controls
        ):
            continue
        for kind, offset, count in routings:
            result = _lift_count(proof, expert, Routing(kind, expert + offset, (expert,) * count), sizes, add)
            if isinstance(result, MoefxError):
                raise result
        return


def _reads_floats(read: HostRead) -> bool:
    """Return whether Python reads abstract floats, or a value that they decide."""
    return read.node is not None and (is_abstract(read.node) or bool(find_float_decisions(read.node)))


def _find_seen_counts(proof: ProofView) -> set[int]:
    """Return the numbers of tokens per expert in captures of several tokens without forced outcomes."""
    seen: set[int] = set()
    for form in proof.evidence.forms:
        if form.optional_guard is None and len(form.ids) > 1 and not form.capture.interventions:
            experts = [e for group in proof.evidence.reference.groups for e in group.ids]
            seen |= {int((form.ids == e).sum()) for e in experts}
    return seen


def _choose_few_sizes(proof: ProofView) -> list[dict[str, int]]:
    """Return small sizes that allow an expert two tokens, on the captures' side of comparisons; empty if none exist."""
    slots, experts = proof.evidence.reference.slots, proof.num_experts
    if experts <= slots:
        return []
    sizes = proof.size_choice.choose_as_captured(proof.arguments.choose_tokens_near(7, avoid=(slots,)))
    return [sizes] if proof.size_choice.satisfies_restrictions(sizes) else []


def _lift_count(
    proof: ProofView,
    expert: int,
    routing: Routing,
    sizes: dict[str, int],
    accept: Callable[[CanonicalForm], CanonicalForm],
) -> CanonicalForm | MoefxError | None:
    """Lift a capture in which only the tokens that prefer an expert choose it.

    Args:
        accept: compares the form with the evidence, or also adds it.

    Returns:
        The form; the refusal if there is none, or it differs; None if other tokens choose the expert, or the program
        raises an error.
    """
    try:
        form = proof.capture_and_lift(routing, sizes)
        if int((form.ids == expert).sum()) != len(routing.prefer):
            return None
        return accept(form)
    except MoefxError as refusal:
        return refusal
    except Exception as error:
        if is_internal_error(error):
            raise
        return None


__all__ = ["vary_expert_counts"]
