"""State of a proof: captures of one form, guards, and failed changes."""

from __future__ import annotations

import copy
import dataclasses

import pytest
import torch

from moefx.capture.tracing.concrete_routing import Routing
from moefx.errors import CaptureError, Refused
from moefx.matching.proof.evidence import find_value_lines, have_same_lines

from .lift.small_blocks import Small
from .small_proofs import GUARD, lift, new_proof


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
    proof = new_proof(TwoKinds())
    proof.evidence.add(lift(proof))
    other = lift(proof, seed=1)
    turned = dataclasses.replace(other, groups=other.groups[::-1])
    agreed = proof.aligner.align_form(turned)
    assert [g.ids for g in agreed.groups] == [g.ids for g in proof.evidence.reference.groups] == [[0, 1], [2]]
    assert [g.ids for g in turned.groups] == [[2], [0, 1]]  # the form itself is unchanged


def test_evidence_is_aligned_in_place():
    proof = new_proof(TwoKinds())
    first, second = lift(proof), lift(proof, seed=1)
    proof.evidence.postpone_comparison()
    for form in (first, dataclasses.replace(second, groups=second.groups[::-1])):
        proof.evidence.add(form)
    proof.aligner.align_evidence()
    assert [g.body for g in proof.evidence.forms[1].groups] == [g.body for g in proof.evidence.reference.groups]


def test_a_form_with_other_slots_is_refused_and_changes_nothing():
    proof = new_proof()
    proof.evidence.add(lift(proof))
    before = proof.evidence.forms
    with pytest.raises(Refused, match="the number of slots per token"):
        proof.aligner.align_form(lift(new_proof(Small(k=1))))
    assert proof.evidence.forms == before


def test_a_smaller_limit_of_nodes_holds_with_interventions():
    proof = new_proof()
    proof.evidence.add(lift(proof))
    routing, sizes, forced = Routing("diverse", 1), {"S": 12}, {10**6: 1}
    proof.capture(routing, sizes, forced)
    for interventions in (None, forced):
        with pytest.raises(CaptureError, match="more than 3 operations"):
            proof.capture(routing, sizes, interventions, max_nodes=3)


class Masked(Small):
    """Drop slots of one expert: their weights are zero after the mask only. Without it they scale all rows, so a
    capture without drops does not show which of the two the experts multiply."""

    def __init__(self):
        super().__init__()
        self.drops = False

    def forward(self, x):
        weights, ids = self.choose(x)
        kept = (ids != 1) | (not self.drops)
        return self.mix(x * weights.sum(-1, keepdim=True), weights * kept, ids)


def test_all_captures_are_lifted_with_a_mask_of_one():
    block = Masked()
    proof = new_proof(block)
    proof.evidence.add(lift(proof))
    block.drops = True
    dropping = lift(proof, seed=1)
    assert not dropping.kept_slots.all() and not have_same_lines(
        find_value_lines(dropping), find_value_lines(proof.evidence.reference)
    )
    proof.relift_evidence(dropping)
    assert have_same_lines(find_value_lines(dropping), find_value_lines(proof.evidence.reference))


def test_arguments_are_tried_in_a_block_only():
    proof = new_proof()
    before, other = proof.arguments, copy.copy(proof.arguments)
    with pytest.raises(ValueError, match="no"), proof.trying_arguments(other):
        assert proof.arguments is other
        raise ValueError("no")
    assert proof.arguments is before


def test_a_probe_is_recorded_with_its_forms_and_guards():
    proof = new_proof()
    with proof.record_probe("first"):
        proof.evidence.add(lift(proof))
        proof.add_guard(GUARD)
    with pytest.raises(Refused), proof.record_probe("second"):
        raise Refused("no")
    assert [(run.name, run.refused) for run in proof.probe_runs] == [("first", False), ("second", True)]
    assert (proof.probe_runs[0].added_forms, proof.probe_runs[0].guards) == (1, 1)
