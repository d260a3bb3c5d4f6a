"""Evidence of a proof: its forms with their sizes, their order, and their replacement."""

from __future__ import annotations

import pytest

from moefx.errors import Refused

from .lift.small_blocks import Small
from .small_proofs import GUARD, lift, new_proof


def test_evidence_keeps_its_order_and_sizes():
    proof = new_proof()
    proof.evidence.postpone_comparison()
    forms = [lift(proof, seed, tokens) for seed, tokens in enumerate((12, 9))]
    for form in forms:
        proof.evidence.add(form)
    assert [len(form.ids) for form in proof.evidence.forms] == [12, 9] and proof.evidence.sizes == ({"S": 12}, {"S": 9})
    assert proof.evidence.reference.capture is forms[0].capture and proof.evidence.seen_experts == {0, 1, 2}
    proof.evidence.set_reference(1)
    assert proof.evidence.reference.capture is forms[1].capture and proof.evidence.sizes[0] == {"S": 9}


def test_evidence_that_is_dropped_leaves_its_guard():
    proof = new_proof()
    form = lift(proof)
    proof.evidence.add(form)
    proof.evidence.add(form, optional=GUARD)
    assert form.optional_guard is None  # the form itself is unchanged
    assert proof.evidence.drop(1) == GUARD
    assert len(proof.evidence.forms) == len(proof.evidence.sizes) == 1


def test_forms_are_compared_from_their_alignment_on():
    proof, other = new_proof(), lift(new_proof(Small(k=1)))
    proof.evidence.postpone_comparison()
    proof.evidence.add(lift(proof))
    proof.evidence.add(other)
    with pytest.raises(Refused, match="the number of slots per token"):
        proof.aligner.align_evidence()
    proof = new_proof()
    proof.evidence.add(lift(proof))
    assert proof.evidence.add(lift(proof, seed=1)) is proof.evidence.forms[1]
    with pytest.raises(Refused, match="the number of slots per token"):
        proof.evidence.add(other)
    with pytest.raises(AssertionError):
        proof.evidence.set_reference(1)
    assert len(proof.evidence.forms) == 2


def test_a_target_is_settled_once():
    proof = new_proof()
    assert not proof.evidence.is_settled("target")
    proof.evidence.settle("target")
    assert proof.evidence.is_settled("target") and not proof.evidence.is_settled("another")


def test_the_form_of_each_capture_is_replaced():
    proof = new_proof()
    proof.evidence.add(lift(proof))
    form = lift(proof, seed=1)
    proof.evidence.replace_forms([form])
    assert proof.evidence.forms == (form,) and proof.evidence.sizes == ({"S": 12},)
    with pytest.raises(AssertionError):
        proof.evidence.replace_forms([form, form])
