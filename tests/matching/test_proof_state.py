"""State of a proof: captures of one form, guards, and failed changes."""

from __future__ import annotations

import copy
import dataclasses

import pytest
import torch

from moefx.capture.arguments.argument_interpretations import interpret_arguments
from moefx.capture.arguments.size_collisions import ModelNumbers
from moefx.capture.sizes.size_guards import SizeGuard
from moefx.capture.tracing.concrete_routing import Routing
from moefx.errors import Refused
from moefx.matching.proof.evidence import find_value_lines, have_same_lines
from moefx.matching.proof.proof_state import ProofState

from .lift.small_blocks import D, E, Small

GUARD = SizeGuard("S", "gt", "1", True)


def new_state(block=None) -> ProofState:
    block = block or Small()
    return ProofState(
        block, next(iter(interpret_arguments((torch.zeros(5, D),), {}, ModelNumbers.of(block)))), max_experts=E
    )


def lift(state: ProofState, seed: int = 0, tokens: int = 12):
    return state.capture_and_lift(Routing("diverse", seed), {"S": tokens})


class TwoKinds(Small):
    """Use another function in the last expert."""

    def mix(self, x, weights, ids):
        out = torch.zeros_like(x)
        for e in (2, 1, 0):
            t, k = torch.where(ids == e)
            y = self.experts[e](x[t])
            out = out.index_add(0, t, (y.tanh() if e == 2 else y) * weights[t, k, None])
        return out


def test_agreement_returns_the_groups_in_the_order_of_the_reference():
    state = new_state(TwoKinds())
    state.evidence.add(lift(state))
    other = lift(state, seed=1)
    turned = dataclasses.replace(other, groups=other.groups[::-1])
    agreed = state.align_form(turned)
    assert [g.ids for g in agreed.groups] == [g.ids for g in state.evidence.reference.groups] == [[0, 1], [2]]
    assert [g.ids for g in turned.groups] == [[2], [0, 1]]  # the form itself is unchanged


def test_evidence_is_aligned_in_place():
    state = new_state(TwoKinds())
    first, second = lift(state), lift(state, seed=1)
    state.evidence.postpone_comparison()
    for form in (first, dataclasses.replace(second, groups=second.groups[::-1])):
        state.evidence.add(form)
    state.align_evidence()
    assert [g.body for g in state.evidence.forms[1].groups] == [g.body for g in state.evidence.reference.groups]


def test_a_form_with_other_slots_is_refused_and_changes_nothing():
    state = new_state()
    state.evidence.add(lift(state))
    before = state.evidence.forms
    with pytest.raises(Refused, match="the number of slots per token"):
        state.align_form(lift(new_state(Small(k=1))))
    assert state.evidence.forms == before


class Masked(Small):
    """Drop slots of one expert: their weights are zero after the mask only."""

    def __init__(self):
        super().__init__()
        self.drops = False

    def choose(self, x):
        weights, ids = super().choose(x)
        kept = (ids != 1) | (not self.drops)
        return weights * kept, ids


def test_all_captures_are_lifted_with_a_mask_of_one():
    block = Masked()
    state = new_state(block)
    state.evidence.add(lift(state))
    block.drops = True
    dropping = lift(state, seed=1)
    assert not dropping.kept_slots.all() and not have_same_lines(
        find_value_lines(dropping), find_value_lines(state.evidence.reference)
    )
    state.relift_evidence(dropping)
    assert have_same_lines(find_value_lines(dropping), find_value_lines(state.evidence.reference))


def test_arguments_are_tried_in_a_block_only():
    state = new_state()
    before, other = state.arguments, copy.copy(state.arguments)
    with pytest.raises(ValueError, match="no"), state.trying_arguments(other):
        assert state.arguments is other
        raise ValueError("no")
    assert state.arguments is before


def test_a_probe_is_recorded_with_its_forms_and_guards():
    state = new_state()
    with state.record_probe("first"):
        state.evidence.add(lift(state))
        state.add_guard(GUARD)
    with pytest.raises(Refused), state.record_probe("second"):
        raise Refused("no")
    assert [(run.name, run.refused) for run in state.probe_runs] == [("first", False), ("second", True)]
    assert (state.probe_runs[0].added_forms, state.probe_runs[0].guards) == (1, 1)
