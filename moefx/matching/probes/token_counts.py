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

from ...capture.code_locations import is_internal_error
from ...capture.concrete_routing import Routing, RoutingKind
from ...capture.size_guards import SizeGuard
from ...errors import MoefxError, Refused
from ..lift.canonical_form import CanonicalForm
from ..lift.lifter import NothingRouted

if TYPE_CHECKING:
    from ..proof_state import ProofState

_MAX_TRIALS = 6
_MAX_TRIALS_ELSEWHERE = 2  # at sizes at which the program may take a branch without experts


def show_all_slots(state: ProofState) -> None:
    """Capture a few tokens, which fit into the capacity with all slots, if some capture drops slots."""
    if all(bool(form.kept_slots.all()) for form in state.forms):
        return
    sizes = state.size_choice.choose_sequence(state.arguments.choose_tokens_near(5))
    form = _try_lift(state, Routing("diverse", 6), sizes) if state.size_choice.satisfies_restrictions(sizes) else None
    if isinstance(form, CanonicalForm) and form.slots > state.reference.slots:
        state.add_evidence(form, sizes)


def vary_token_counts(state: ProofState) -> None:
    """Capture one token, a few, and many. Guard a form that one token, or many, do not have.

    Raises:
        Refused: a few tokens have another form, or many do and no comparison of sizes tells them apart.
    """
    arguments = state.arguments
    one, more_than_one = arguments.choose_sequence(1), SizeGuard("*".join(arguments.dims), "gt", "1", True)
    many = [arguments.choose_sizes(3 * state.size_choice.first_tokens, 2)] if state.max_experts <= 64 else []
    near = arguments.choose_tokens_near(3, avoid=(state.reference.slots,))
    few = [state.size_choice.choose_sequence(near), arguments.choose_sequence(near)]
    before = len(state.forms)
    for sizes in filter(state.size_choice.satisfies_restrictions, few if few[0] != few[1] else few[:1]):
        _vary_few_tokens(state, sizes)
    if (
        len(state.forms) == before
        and state.size_choice.satisfies_restrictions(sizes := state.size_choice.choose_as_captured(near))
        and sizes not in few
    ):
        _vary_few_tokens(state, sizes)  # on the captures' side of each comparison of sizes
    for sizes in filter(state.size_choice.satisfies_restrictions, [one, *many]):
        # comparisons that had both outcomes before do not exclude these sizes
        guards = [g for g in state.seen_guards() if all(g.holds(s) for s in state.sizes)]
        optional = more_than_one if sizes == one else next((g for g in guards if not g.holds(sizes)), None)
        # one token shows the form only if it chooses experts that do something: try several choices
        most = max(state.reference.groups, key=lambda g: len(g.ids)).ids
        more = [Routing("diverse", 5, (e,)) for e in most[:3]] + [Routing("diverse", seed) for seed in range(6, 10)]
        if sizes == one and not state.size_choice.is_as_captured(one):
            more = more[:_MAX_TRIALS_ELSEWHERE]
        if sizes != one:  # a limit on counts may drop all tokens except those at uncrowded experts
            more = [*more[-2:], Routing("overloaded", 5), Routing("overloaded", 6)]
        found: CanonicalForm | Exception = Refused("no routing was tried")
        for routing in [Routing("diverse", 5), *more]:
            found = _lift_with_form(state, routing, sizes)
            if isinstance(found, CanonicalForm) or (sizes != one and not isinstance(found, NothingRouted)):
                break
        if isinstance(found, CanonicalForm):
            state.add_evidence(found, sizes, optional=optional)
        elif optional is None:
            raise found
        elif sizes == one and all(g.holds(one) for g in guards):
            state.add_guard(more_than_one)


def _lift_with_form(state: ProofState, routing: Routing, sizes: dict[str, int]) -> CanonicalForm | Exception:
    """Return a form that agrees with the other captures, or the reason why there is none."""
    found = _try_lift(state, routing, sizes)
    if isinstance(found, CanonicalForm):
        try:
            return state.require_same_form(found)
        except Refused as refusal:
            return refusal
    return found


def _vary_few_tokens(state: ProofState, sizes: dict[str, int]) -> None:
    """Capture a few tokens that spread out, and a few that crowd on some experts.

    The crowd leaves experts idle, which a program may test. Sizes at which the program raises an error are skipped.

    Raises:
        Refused: one of the captures has another form, or only one of them can be lifted.
    """
    first = state.reference
    busy = max(first.groups, key=lambda g: len(g.ids)).ids[0]
    found: list[CanonicalForm] = []
    unclear: list[MoefxError] = []  # a few tokens may show too little
    differs: list[Refused] = []
    routings: list[tuple[RoutingKind, int]] = [("diverse", 5), ("concentrated", busy)]
    for kind, seed in routings:
        form = _lift_first_routed(state, kind, seed, sizes)
        if isinstance(form, NothingRouted) and found:
            form = Refused(
                "no expert runs for a few tokens that all choose the same experts",
                source=form.source,
                remedy="run every expert that has tokens",
            )
        if isinstance(form, MoefxError):
            unclear.append(form)
        elif isinstance(form, CanonicalForm):
            is_apart = not all(g.holds(state.sizes[0]) for g in form.capture.sizes.guards)
            try:
                found.append(state.require_same_form(form))
            except Refused as refusal:
                (unclear if is_apart else differs).append(refusal)
    if differs or (unclear and found):
        raise (differs or unclear)[-1]
    for form in found if len(found) == 2 else ():
        state.add_evidence(form, sizes)


def _lift_first_routed(
    state: ProofState, kind: RoutingKind, seed: int, sizes: dict[str, int]
) -> CanonicalForm | Exception:
    """Lift the first of several captures in which an expert runs: a few tokens may all be masked."""
    found: CanonicalForm | Exception = Refused("no routing was tried")
    for n in range(_MAX_TRIALS if state.size_choice.is_as_captured(sizes) else _MAX_TRIALS_ELSEWHERE):
        found = _try_lift(state, Routing(kind, seed + n * state.num_experts), sizes)
        if not isinstance(found, NothingRouted):
            break
    return found


def _try_lift(state: ProofState, routing: Routing, sizes: dict[str, int]) -> CanonicalForm | Exception:
    """Return the form of a capture; else the refusal, or the error that the program raises at these sizes."""
    try:
        captured = state.capture(routing, sizes)
    except Exception as error:
        if is_internal_error(error):
            raise
        return error
    try:
        return state.lift_captured(captured)
    except Refused as refusal:
        return refusal
