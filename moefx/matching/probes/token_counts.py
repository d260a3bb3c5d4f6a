"""Vary the number of tokens: one, a few, and many.

Protects from a special case for few tokens, and from slots that limits drop in all captures::

    if len(x) == 1:
        return experts[chosen[0, 0]](x)
    capacity = len(x) // num_experts
    token = torch.where(chosen == e)[0][:capacity]  # with few experts, the second slots are always behind

`show_all_slots` captures a few tokens, which fit into the capacity with all slots. `vary_token_counts` restricts the
form by a guard if one token, or many, do not have it, and refuses the block if a few do not.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...capture.environment.code_locations import is_internal_error
from ...capture.sizes.size_guards import SizeGuard
from ...capture.tracing.concrete_routing import Routing, RoutingKind
from ...errors import MoefxError, Refused
from ..lift.canonical_form import CanonicalForm
from ..lift.lift_refusals import NothingRouted

if TYPE_CHECKING:
    from ..proof.proof_view import ProofView

_MAX_EXPERTS = 64  # of blocks that are captured with many tokens, which takes long
_MAX_TRIALS = 6
_MAX_TRIALS_ELSEWHERE = 2  # at sizes at which the program may take a branch without experts


def show_all_slots(proof: ProofView) -> None:
    """Capture a few tokens, which fit into the capacity with all slots, if some capture drops slots."""
    if all(bool(form.kept_slots.all()) for form in proof.evidence.forms):
        return
    sizes = proof.size_choice.choose_sequence(proof.arguments.choose_tokens_near(5))
    form = _try_lift(proof, Routing("diverse", 6), sizes) if proof.size_choice.satisfies_restrictions(sizes) else None
    if isinstance(form, CanonicalForm) and form.slots > proof.evidence.reference.slots:
        proof.add_form(form)


def vary_token_counts(proof: ProofView) -> None:
    """Capture a few tokens, one, and many. Guard a form that one token, or many, do not have.

    Raises:
        Refused: a few tokens have another form, or many do and no comparison of sizes tells them apart.
    """
    one_token = proof.arguments.choose_sequence(1)
    many = proof.arguments.choose_sizes(3 * proof.size_choice.first_tokens, 2)
    _vary_few_token_counts(proof)
    if proof.size_choice.satisfies_restrictions(one_token):
        _vary_one_token(proof, one_token)
    if proof.max_experts <= _MAX_EXPERTS and proof.size_choice.satisfies_restrictions(many):
        _vary_many_tokens(proof, many)


def _vary_few_token_counts(proof: ProofView) -> None:
    """Capture about three tokens, also on the captures' side of each comparison of sizes.

    Raises:
        Refused: they have another form.
    """
    near = proof.arguments.choose_tokens_near(3, avoid=(proof.evidence.reference.slots,))
    tried_sizes = [proof.size_choice.choose_sequence(near), proof.arguments.choose_sequence(near)]
    before = len(proof.evidence.forms)
    for sizes in filter(
        proof.size_choice.satisfies_restrictions, tried_sizes if tried_sizes[0] != tried_sizes[1] else tried_sizes[:1]
    ):
        _vary_few_tokens(proof, sizes)
    if len(proof.evidence.forms) > before:
        return
    sizes = proof.size_choice.choose_as_captured(near)
    if proof.size_choice.satisfies_restrictions(sizes) and sizes not in tried_sizes:
        _vary_few_tokens(proof, sizes)


def _vary_one_token(proof: ProofView, sizes: dict[str, int]) -> None:
    """Capture one token, or guard the form to hold for more than one.

    One token shows the form only if it chooses experts that do something: try several choices.
    """
    more_than_one = SizeGuard("*".join(proof.arguments.dims), "gt", "1", True)
    guards = _find_one_sided_guards(proof)
    largest_group = max(proof.evidence.reference.groups, key=lambda g: len(g.ids)).ids
    routings = [Routing("diverse", 5, (e,)) for e in largest_group[:3]]
    routings += [Routing("diverse", seed) for seed in range(6, 10)]
    if not proof.size_choice.is_as_captured(sizes):
        routings = routings[:_MAX_TRIALS_ELSEWHERE]
    for routing in [Routing("diverse", 5), *routings]:
        if isinstance(_try_add(proof, routing, sizes, more_than_one), CanonicalForm):
            return
    if all(g.holds(sizes) for g in guards):
        proof.add_guard(more_than_one)


def _vary_many_tokens(proof: ProofView, sizes: dict[str, int]) -> None:
    """Capture many tokens.

    A limit on counts may drop all tokens except those at uncrowded experts: try several routings until some are kept.

    Raises:
        Refused: they have another form, and no comparison of sizes tells them from the other captures.
    """
    optional = next((g for g in _find_one_sided_guards(proof) if not g.holds(sizes)), None)
    routings = [Routing("diverse", seed) for seed in (5, 8, 9)] + [Routing("overloaded", seed) for seed in (5, 6)]
    form: CanonicalForm | Exception = Refused("no routing was tried")
    for routing in routings:
        form = _try_add(proof, routing, sizes, optional)
        if not isinstance(form, NothingRouted):
            break
    if not isinstance(form, CanonicalForm) and optional is None:
        raise form


def _find_one_sided_guards(proof: ProofView) -> list[SizeGuard]:
    """Find the comparisons of sizes with one outcome in all captures: others do not exclude any sizes."""
    return [g for g in proof.evidence.seen_guards() if all(g.holds(sizes) for sizes in proof.evidence.sizes)]


def _try_add(
    proof: ProofView, routing: Routing, sizes: dict[str, int], optional: SizeGuard | None
) -> CanonicalForm | Exception:
    """Add the form of a capture, and return it, or the reason why there is none that agrees with the others."""
    result = _try_lift(proof, routing, sizes)
    if isinstance(result, CanonicalForm):
        try:
            return proof.add_form(result, optional=optional)
        except Refused as refusal:
            return refusal
    return result


def _vary_few_tokens(proof: ProofView, sizes: dict[str, int]) -> None:
    """Capture a few tokens that spread out, and a few that crowd on some experts.

    The crowd leaves experts idle, which a program may test. Sizes at which the program raises an error are skipped.

    Raises:
        Refused: one of the captures has another form, or only one of them can be lifted.
    """
    first = proof.evidence.reference
    busy = max(first.groups, key=lambda g: len(g.ids)).ids[0]
    forms: list[CanonicalForm] = []
    unclear: list[MoefxError] = []  # a few tokens may show too little
    differs: list[Refused] = []
    routings: list[tuple[RoutingKind, int]] = [("diverse", 5), ("concentrated", busy)]
    for kind, seed in routings:
        may_branch = not forms and not proof.size_choice.is_as_captured(sizes)
        form = _lift_first_routed(proof, kind, seed, sizes, _MAX_TRIALS_ELSEWHERE if may_branch else _MAX_TRIALS)
        if isinstance(form, NothingRouted) and forms:
            form = Refused(
                "no expert's result is used for a few tokens that all choose the same experts, for any of "
                f"{_MAX_TRIALS} choices that were tried",
                source=form.source,
                remedy="run every expert that has tokens, and mask fewer of the choices",
            )
        if isinstance(form, MoefxError):
            unclear.append(form)
        elif isinstance(form, CanonicalForm):
            is_elsewhere = not all(g.holds(proof.evidence.sizes[0]) for g in form.capture.sizes.guards)
            try:
                proof.evidence.require_same_form(form)
                forms.append(form)
            except Refused as refusal:
                (unclear if is_elsewhere else differs).append(refusal)
    if differs or (unclear and forms):
        raise (differs or unclear)[-1]
    for form in forms if len(forms) == 2 else ():
        proof.add_form(form)


def _lift_first_routed(
    proof: ProofView, kind: RoutingKind, seed: int, sizes: dict[str, int], trials: int
) -> CanonicalForm | Exception:
    """Lift the first of several captures in which an expert runs: a few tokens may all be masked."""
    result: CanonicalForm | Exception = Refused("no routing was tried")
    for n in range(trials):
        # numbers of both parities as first and as later choices
        result = _try_lift(proof, Routing(kind, seed + n // 2 + n % 2 * proof.num_experts), sizes)
        if not isinstance(result, NothingRouted):
            break
    return result


def _try_lift(proof: ProofView, routing: Routing, sizes: dict[str, int]) -> CanonicalForm | Exception:
    """Return the form of a capture; else the refusal, or the error that the program raises at these sizes."""
    try:
        captured = proof.capture(routing, sizes)
    except Exception as error:
        if is_internal_error(error):
            raise
        return error
    try:
        return proof.lift(captured)
    except Refused as refusal:
        return refusal
