"""Evidence of a proof: its forms with their sizes, their order, and their replacement."""

from __future__ import annotations

import pytest

from moefx.errors import Refused

from .test_proof_state import GUARD, Small, lift, new_state


def test_evidence_keeps_its_order_and_sizes():
    state = new_state()
    state.evidence.postpone_comparison()
    forms = [lift(state, seed, tokens) for seed, tokens in enumerate((12, 9))]
    for form in forms:
        state.evidence.add(form)
    assert [len(form.ids) for form in state.evidence.forms] == [12, 9] and state.evidence.sizes == ({"S": 12}, {"S": 9})
    assert state.evidence.reference.capture is forms[0].capture and state.evidence.seen_experts == {0, 1, 2}
    state.evidence.set_reference(1)
    assert state.evidence.reference.capture is forms[1].capture and state.evidence.sizes[0] == {"S": 9}


def test_evidence_that_is_dropped_leaves_its_guard():
    state = new_state()
    form = lift(state)
    state.evidence.add(form)
    state.evidence.add(form, optional=GUARD)
    assert form.optional_guard is None  # the form itself is unchanged
    assert state.evidence.drop(1) == GUARD
    assert len(state.evidence.forms) == len(state.evidence.sizes) == 1


def test_forms_are_compared_from_their_alignment_on():
    state, other = new_state(), lift(new_state(Small(k=1)))
    state.evidence.postpone_comparison()
    state.evidence.add(lift(state))
    state.evidence.add(other)
    with pytest.raises(Refused, match="the number of slots per token"):
        state.align_evidence()
    state = new_state()
    state.evidence.add(lift(state))
    assert state.evidence.add(lift(state, seed=1)) is state.evidence.forms[1]
    with pytest.raises(Refused, match="the number of slots per token"):
        state.evidence.add(other)
    with pytest.raises(AssertionError):
        state.evidence.set_reference(1)
    assert len(state.evidence.forms) == 2


def test_a_target_is_settled_once():
    state = new_state()
    assert not state.evidence.is_settled("target")
    state.evidence.settle("target")
    assert state.evidence.is_settled("target") and not state.evidence.is_settled("another")


def test_the_form_of_each_capture_is_replaced():
    state = new_state()
    state.evidence.add(lift(state))
    form = lift(state, seed=1)
    state.evidence.replace_forms([form])
    assert state.evidence.forms == (form,) and state.evidence.sizes == ({"S": 12},)
    with pytest.raises(AssertionError):
        state.evidence.replace_forms([form, form])
