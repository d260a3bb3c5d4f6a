"""Judging a capture with forced outcomes."""

from __future__ import annotations

import pytest
import torch

from moefx.capture.tracing.capture_result import FORCE_MIXED
from moefx.errors import Refused
from moefx.matching.interventions.forced_outcome import ForcedStep, OutcomeKind, force_outcome
from moefx.matching.probes.float_decisions import locate_decision

from ..lift.small_blocks import Small
from ..small_proofs import lift, new_proof


class Comparing(Small):
    """Double large hidden states, after a comparison that the experts do not depend on."""

    def forward(self, x):
        is_large = x > 1
        return self.mix(x, *self.choose(x)) + torch.where(is_large, 2 * x, x)


def test_a_forced_outcome_must_take_effect_in_a_capture_that_has_earlier_ones():
    proof = new_proof(Comparing())
    proof.evidence.add(lift(proof))
    comparison = next(n for n in proof.evidence.reference.capture.nodes if str(n.target) == "aten.gt.Scalar")
    site = locate_decision(comparison)
    step = ForcedStep(OutcomeKind.OP, site[0], "a comparison")
    assert force_outcome(proof, step, {site: FORCE_MIXED}, is_safe=False)
    assert len(proof.evidence.forms) == 2
    forced = proof.evidence.forms[1].capture
    assert {n.meta["forced"] for n in forced.nodes if "forced" in n.meta} == {site}
    for base in (None, forced):  # no op has the key
        with pytest.raises(Refused, match="the formula depends on a comparison"):
            force_outcome(proof, step, {(site[0], "aten.lt.Scalar", False): FORCE_MIXED}, base)
    assert len(proof.evidence.forms) == 2
