"""Refuse blocks with one expert.

Protects from a layer that selects nothing, which has a canonical form all the same::

    return expert(x) * gate(x).sigmoid()
    return torch.where(gate(x) > 0, expert(x), 0)
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...errors import Refused
from ..lift.lift_refusals import NO_SECOND_EXPERT, ONE_EXPERT

if TYPE_CHECKING:
    from ..lift.canonical_form import CanonicalForm
    from ..proof.proof_view import ProofView


def refuse_single_expert(proof: ProofView) -> None:
    """Require two experts.

    Raises:
        Refused: there is one.
    """
    if proof.num_experts >= 2:
        return
    source = str(proof.evidence.reference.cut.meta["source"])
    if any(_has_other_choice(form) for form in proof.evidence.forms):
        raise Refused(ONE_EXPERT, source=source, remedy=NO_SECOND_EXPERT)
    raise Refused(
        "there is only one expert, and every token uses it: nothing is selected",
        source=source,
        remedy=NO_SECOND_EXPERT,
    )


def _has_other_choice(form: CanonicalForm) -> bool:
    """Return whether some tokens choose another expert, or are not among the rows of this one."""
    return len(form.ids.unique()) > 1 or len(form.ids) < form.capture.sizes.tokens
