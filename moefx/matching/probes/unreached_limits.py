"""Go beyond limits that no capture reached, such as a capacity of 64 slots at 29 tokens.

Protects from a capacity that seems to drop nothing::

    rank = F.one_hot(chosen, num_experts).cumsum(0).gather(1, chosen)
    weights = weights * (rank <= 64)  # True in captures of 29 tokens
    token = torch.where(chosen == e)[0][:64]

`facts.count_limits` reads the numbers that counts and ranks are compared with, and the ends of slices.
`overflow_limits` captures enough tokens to go beyond them. If that takes too many tokens, a guard restricts the form to
fewer.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from torch import fx

from ...capture.environment.code_locations import is_internal_error, is_program_error
from ...capture.sizes.size_guards import SizeGuard
from ...capture.tracing.concrete_routing import Routing
from ...errors import Refused
from ...ir.node_values import get_op_name
from ..facts.count_limits import REACHED, UNKNOWN, Limit, OpSite, find_limits, find_unreached, group_by_site
from ..facts.op_classes import RESHAPED_COPIES
from ..lift.canonical_form import CanonicalForm
from ..lift.lift_refusals import NothingRouted

if TYPE_CHECKING:
    from ..proof.proof_view import ProofView

_MAX_CROWDS = 4  # captures that go beyond limits
_CROWD_SHARE = 0.85  # of the tokens choose one expert under "overloaded" and "contested": 0.9 on average
MAX_CROWD_TOKENS = 600  # limit of captures that overflow a capacity, or confirm a number's change


def overflow_limits(proof: ProofView) -> None:
    """Capture as many tokens as it takes to go beyond the limits that no capture reached. If that fails, guard the
    form to hold for fewer tokens.

    Raises:
        Refused: a limited number is no plain count, so the tokens that reach the limit are unknown.
    """
    attempts = iter(range(_MAX_CROWDS))
    while (lowest := _find_lowest_unreached(proof)) is not None:
        attempt = next(attempts, None)
        if attempt is None or not _add_crowd_beyond(proof, lowest, attempt):
            slots = proof.evidence.reference.slots
            proof.add_guard(SizeGuard(f"{proof.arguments.tokens}*{slots}", "le", str(lowest), True))
            return
    _overflow_every_expert(proof)


def _find_lowest_unreached(proof: ProofView) -> int | None:
    """Find the lowest limit that no capture reached, and that more tokens can reach.

    Raises:
        Refused: the limited number is no plain count.
    """
    limits_by_capture = _find_limits_by_capture(proof)
    highest_counts = [_count_most(form) for form in proof.evidence.forms]
    unreached: set[int] = set()
    for site, limits in find_unreached(limits_by_capture).items():
        numbers = {limit.number for limit in limits if limit.number is not None}
        if len(limits) > 1:  # a capacity that grows with the tokens and has room for all of them is never exceeded
            pairs = [
                (by_site.get(site, UNKNOWN).number, n)
                for by_site, n in zip(limits_by_capture, highest_counts, strict=True)
            ]
            numbers = {number for number, count in pairs if number is not None and number < count}
        if UNKNOWN in limits and (numbers or len(limits) == 1):
            raise Refused(
                "a number computed from counts, positions or integer arguments is compared, and the comparison had one "
                "outcome in all captures; it is not a plain count, so moefx cannot tell what changes the outcome",
                source=str(site.source), culprits=(site.op,),
                remedy="compare the count itself, or pass example_inputs with which both outcomes occur",
            )  # fmt: skip
        unreached |= numbers
    return min(unreached, default=None)


def _find_limits_by_capture(proof: ProofView) -> list[dict[OpSite, Limit]]:
    return [find_limits(form.capture, proof.evidence.unforced_lengths) for form in proof.evidence.forms]


def _add_crowd_beyond(proof: ProofView, limit: int, attempt: int) -> bool:
    """Add a capture in which more tokens than a limit choose one expert.

    Some limits hold for all choices, some for first choices only: the kind of the routing changes by `attempt`.

    Returns:
        Whether there is such a capture with the form of the others. It may take too many tokens.
    """
    tokens = proof.arguments.choose_tokens_near(int(limit / _CROWD_SHARE) + 10)
    sizes = proof.size_choice.choose_sequence(tokens)
    if tokens > MAX_CROWD_TOKENS or not proof.size_choice.satisfies_restrictions(sizes):
        return False
    kind = "contested" if proof.evidence.reference.slots > 1 and attempt % 2 == 0 else "overloaded"
    try:
        proof.add_form(proof.capture_and_lift(Routing(kind, 3 + attempt), sizes), may_relift=True)
    except Exception as error:  # an error of the program, too, at sizes that it does not support
        if is_internal_error(error):
            raise
        return False
    return True


def _overflow_every_expert(proof: ProofView) -> None:
    """Add a capture in which each expert exceeds the limits, unless it needs too many tokens. A limit may hold for one
    expert only (`(rank >= 16) & (chosen == 3)`).

    Raises:
        Refused: the form differs, or there is none although some slots are kept.
    """
    by_site = group_by_site(_find_limits_by_capture(proof)).values()
    limits = {limit.number for limits in by_site if REACHED in limits for limit in limits if limit.number is not None}
    candidates = (choose_even_sizes(proof, limit + 1) for limit in sorted(limits, reverse=True))
    if (sizes := next(filter(None, candidates), None)) is None:
        return
    try:
        form = proof.capture_and_lift(Routing("even"), sizes)
    except NothingRouted:  # each expert drops all of its slots: the limit holds for each
        return
    except Exception as error:
        if not is_program_error(error):
            raise
        return
    proof.add_form(form, may_relift=True)


def choose_even_sizes(proof: ProofView, limit: int) -> dict[str, int] | None:
    """Choose sizes at which an even routing gives each expert more choices than `limit`. None if these take more than
    `MAX_CROWD_TOKENS` tokens, or the proof does not cover them."""
    slots, experts = proof.evidence.reference.slots, proof.num_experts
    tokens = proof.arguments.choose_tokens_near(experts * -(-(limit + 1) // slots) + experts)
    sizes = proof.size_choice.choose_sequence(tokens)
    return sizes if tokens <= MAX_CROWD_TOKENS and proof.size_choice.satisfies_restrictions(sizes) else None


def _count_most(form: CanonicalForm) -> int:
    """Return how many choices one expert may get: one of each token's `topk`, otherwise all."""
    tokens, node = math.prod(form.tokens), form.expert_index.node
    while get_op_name(node) in RESHAPED_COPIES and node.args and isinstance(node.args[0], fx.Node):
        node = node.args[0]
    comes_from_topk = get_op_name(node) == "getitem" and get_op_name(node.args[0]) == "topk"  # type: ignore[arg-type]
    return tokens if comes_from_topk and not form.expert_index.columns else form.slots * tokens


__all__ = ["MAX_CROWD_TOKENS", "choose_even_sizes", "overflow_limits"]
