"""Capture and lift a block under its first routings: the reference of a proof, and two that contrast with it."""

from __future__ import annotations

import contextlib

from ..capture.tracing.concrete_routing import Routing, RoutingKind
from ..errors import Refused
from .lift.canonical_form import CanonicalForm
from .lift.integer_choices import has_sequence_choices
from .lift.lift_refusals import NothingRouted
from .probes.boundary_values import add_boundary_values, add_larger_flags
from .probes.expert_coverage import choose_unseen_experts
from .proof.proof_state import ProofState

# Numbers of tokens of the second and third capture. Those of the first three differ (for few experts 29, 25 and 13,
# which share no factor), so that a number computed from one does not look like a constant.
_MIN_SKEWED_TOKENS = 25  # or three quarters of the tokens of the first capture
_CROWDED_TOKENS = 13  # few, because all of them select the same experts


def capture_first_routings(proof: ProofState) -> None:
    """Capture and lift the block under three routings with different numbers of tokens: tokens that spread out, that
    prefer some experts, and that crowd on a few.

    If the first one leaves out more experts than the second one has tokens, the second one shows them, which saves
    `show_all_experts` a capture.
    """
    tokens = proof.size_choice.first_tokens
    _capture_reference(proof, tokens)
    skewed, unseen = max(_MIN_SKEWED_TOKENS, tokens * 3 // 4), choose_unseen_experts(proof)
    if len(unseen) > skewed:
        _capture_contrast(proof, "skewed", 1, len(unseen) + skewed // 3, unseen)
    else:
        _capture_contrast(proof, "skewed", 1, skewed)
    # a contest of two slots shows which slot of a token comes first
    crowd: RoutingKind = "contested" if proof.evidence.reference.slots > 1 else "overloaded"
    _capture_contrast(proof, crowd, 2, _CROWDED_TOKENS)


def _capture_reference(proof: ProofState, tokens: int) -> None:
    """Capture and lift tokens that spread out, with integers that change the outcomes of tests on them.

    Raises:
        Refused: no such capture can be lifted, also not with several sequences if each selects its experts.
    """
    arguments, first = add_boundary_values(proof, proof.size_choice.choose(tokens, 0))
    proof.use_arguments(arguments)
    sizes = proof.size_choice.choose(tokens, 0)
    first = first or proof.capture(Routing("diverse", 0), sizes)
    proof.evidence.set_diagnosed_capture(first)
    try:
        form = proof.aligner.lift_first(first)
    except Refused:
        sizes = proof.arguments.choose_sequences()
        if not has_sequence_choices(first) or not proof.size_choice.satisfies_restrictions(sizes):
            raise
        form = proof.aligner.lift_first(proof.capture(Routing("diverse", 0), sizes))
    proof.evidence.add(form)
    _try_larger_flags(proof, sizes)


def _capture_contrast(
    proof: ProofState, kind: RoutingKind, variant: int, tokens: int, prefer: tuple[int, ...] = ()
) -> None:
    """Capture and lift about `tokens` tokens under another routing than that of the reference.

    Args:
        prefer: experts that the first tokens choose.
    """
    sizes = proof.size_choice.choose(tokens, variant)
    proof.evidence.add(_lift_routing(proof, kind, variant, sizes, prefer))


def _try_larger_flags(proof: ProofState, sizes: dict[str, int]) -> None:
    """Try larger numbers in integers that were 0 and 1.

    They may be factors, which a 1 hides, or numbers that choose experts. If the form or the expert index changes, keep
    the larger numbers.
    """
    if (counted := add_larger_flags(proof, sizes)) is None:
        return
    arguments, captured = counted
    try:
        form = proof.aligner.lift_with_hint(captured, None)
    except Refused:  # the integers are masks only
        return
    with contextlib.suppress(Refused):
        form = proof.evidence.require_same_form(form)
        if form.expert_index.position == proof.evidence.reference.expert_index.position:
            return
    proof.use_arguments(arguments)
    proof.evidence.replace_forms([form])


def _lift_routing(
    proof: ProofState, kind: RoutingKind, seed: int, sizes: dict[str, int], prefer: tuple[int, ...] = ()
) -> CanonicalForm:
    """Lift a capture under this kind of routing.

    Try other seeds if all second slots are dropped, such as by a small capacity, or all slots, such as by the values
    of a buffer: the capture does not show their weights then.
    """
    keep_values = kind == "skewed"
    attempts: list[tuple[RoutingKind, int]] = [(kind, seed), (kind, seed + 3), (kind, seed + 6)]
    # a program may skip experts that all tokens or none choose: a crowd leaves some other experts
    if keep_values:
        attempts.append(("overloaded", seed))
    forms: list[CanonicalForm] = []
    refusals: list[NothingRouted] = []
    for tried_kind, tried_seed in attempts:
        result = _lift_if_routed(proof, Routing(tried_kind, tried_seed, prefer, keep_values), sizes)
        if isinstance(result, NothingRouted):
            refusals.append(result)
            continue
        forms.append(result)
        if kind != "contested" or bool(result.kept_slots.any(0).all()):
            break
    if not forms:
        raise refusals[0]
    return forms[-1]


def _lift_if_routed(proof: ProofState, routing: Routing, sizes: dict[str, int]) -> CanonicalForm | NothingRouted:
    """Return the form of a capture, or the refusal if no expert contributes to its output.

    Raises:
        Refused: the capture has no canonical form for another reason.
    """
    try:
        return proof.capture_and_lift(routing, sizes)
    except NothingRouted as refusal:
        return refusal


__all__ = ["capture_first_routings"]
