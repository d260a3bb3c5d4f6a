"""`EvidenceAligner`: lifts the captures of a proof alike, so that their forms can be compared.

A capture has several canonical forms: a value may be read off several nodes, and groups have no order. The aligner
reads all captures from the same nodes, and returns their groups in the order of the reference.
"""

from __future__ import annotations

import dataclasses

from torch import nn

from ...capture.tracing.capture_result import Capture
from ...errors import Refused
from ..lift.canonical_form import CanonicalForm, merge_experts
from ..lift.distinct_choices import has_distinct_slots
from ..lift.lift_options import LiftOptions
from ..lift.lifter import Lifter
from ..lift.repeated_choices import RepeatedChoiceRefused
from ..lift.same_form import require_same_form
from .evidence import Evidence, find_value_lines, have_same_lines


class EvidenceAligner:
    """Lifts captures of a block, and aligns their forms with the evidence of a proof.

    Args:
        evidence: is read, and replaced if all captures have to be lifted again.
        options: how the first lift reads the program. Later lifts have the options of the first form.
    """

    def __init__(self, block: nn.Module, evidence: Evidence, options: LiftOptions):
        self._block, self._evidence, self._options = block, evidence, options

    # ------------------------------------------------------------------ lift
    def lift(self, captured: Capture, follows_evidence: bool = True) -> CanonicalForm:
        """Lift a capture with the options and expert parameters of the other captures.

        Args:
            follows_evidence: try the nodes of the other captures first.

        Raises:
            Refused: the capture has no canonical form.
        """
        forms = self._evidence.forms if follows_evidence else ()
        return self.lift_with_hint(captured, merge_experts(forms) if forms else None)

    def lift_with_hint(
        self, captured: Capture, hint: CanonicalForm | None, align_to_last: bool = False
    ) -> CanonicalForm:
        """Lift a capture with the options and expert parameters of the evidence, if there is any.

        Args:
            hint: the form of another capture, whose nodes are tried first.
            align_to_last: read values off the last nodes that fit.

        Raises:
            Refused: the capture has no canonical form.
        """
        forms = self._evidence.forms
        options = dataclasses.replace(forms[0].options if forms else self._options, align_to_last=align_to_last)
        return self._lift(captured, hint, options, self._evidence.expert_parameters)

    def _lift(
        self, captured: Capture, hint: CanonicalForm | None, options: LiftOptions, experts: frozenset[str]
    ) -> CanonicalForm:
        """Lift a capture. `experts` are the FQNs of the experts' parameters, empty if the lifter must find them."""
        form = Lifter(self._block, captured, hint, options).lift(experts or None)
        return dataclasses.replace(form, groups=sorted(form.groups, key=lambda g: g.ids[0]))

    def lift_first(self, captured: Capture) -> CanonicalForm:
        """Lift the first capture. The options and expert parameters of its form hold for all later lifts.

        If a token may choose an expert twice, prefer weights from nodes with one value per slot: a gate per expert has
        one value for two slots of one expert.

        Raises:
            Refused: the capture has no canonical form.
        """
        first = self._try_lift(captured, self._options)
        parameters = frozenset[str]()
        if isinstance(first, CanonicalForm):
            parameters, experts = first.expert_parameters, {e for g in first.groups for e in g.ids}
            if has_distinct_slots(first, experts, follows_masks=False):
                return first
        elif not isinstance(first, RepeatedChoiceRefused):
            raise first
        per_slot = self._try_lift(captured, dataclasses.replace(self._options, weights_per_slot=True), parameters)
        if isinstance(per_slot, CanonicalForm):
            return per_slot
        if isinstance(first, Refused):
            raise first
        return first

    def _try_lift(
        self, captured: Capture, options: LiftOptions, experts: frozenset[str] = frozenset()
    ) -> CanonicalForm | Refused:
        """Lift a capture without a hint. Return its form or the refusal."""
        try:
            return self._lift(captured, None, options, experts)
        except Refused as refusal:
            return refusal

    def relift(
        self, old: CanonicalForm, hint: CanonicalForm, reference: CanonicalForm, align_to_last: bool = False
    ) -> CanonicalForm:
        """Lift a capture of the evidence once more, from the nodes of another form, or from the last ones that fit.

        Raises:
            Refused: the new form differs from `reference`.
        """
        new = require_same_form(reference, self.lift_with_hint(old.capture, hint, align_to_last))
        return dataclasses.replace(new, optional_guard=old.optional_guard)

    # ---------------------------------------------------------------- align
    def align_form(self, form: CanonicalForm) -> CanonicalForm:
        """Return a form with its groups in the order of all captures.

        If only the new capture drops slots, weights may have to be read from other nodes, which are zero for a dropped
        slot: then lift all captures from these nodes.

        Raises:
            Refused: the forms differ.
        """
        try:
            return self._evidence.require_same_form(form)
        except Refused:
            if form.kept_slots.all():
                raise
            self._evidence.replace_forms([self.relift(other, form, form) for other in self._evidence.forms])
            return form

    def align_evidence(self) -> None:
        """Require all captures to agree with the first one, and store them with their groups in that order.

        This ends `Evidence.postpone_comparison`: from now on `Evidence.add` compares each new form.

        Raises:
            Refused: the forms differ.
        """
        for index in range(1, len(self._evidence.forms)):
            form = self._evidence.forms[index]
            aligned, forms = self.align_form(form), [*self._evidence.forms]
            if forms[index] is form:  # else all captures were lifted again
                forms[index] = aligned
                self._evidence.replace_forms(forms)
        self._evidence.mark_aligned()

    def relift_evidence(self, form: CanonicalForm) -> None:
        """Lift all evidence from the nodes of another form.

        Raises:
            Refused: some capture cannot be lifted from these nodes.
        """
        if have_same_lines(find_value_lines(form), find_value_lines(self._evidence.reference)):
            return
        relifted = [self.relift(other, form, form) for other in self._evidence.forms]
        if not all(have_same_lines(find_value_lines(other), find_value_lines(form)) for other in relifted):
            raise Refused(
                "the node that supplies a slot's routing weight depends on the routing",
                source=str(form.cut.meta["source"]),
                remedy="compute the weights by the same operations in every call",
            )
        self._evidence.replace_forms(relifted)


__all__ = ["EvidenceAligner"]
