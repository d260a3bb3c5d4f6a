"""Agreement of two canonical forms built by hand."""

from __future__ import annotations

import dataclasses
import types

import pytest
import torch
from torch import fx

from moefx.errors import Refused
from moefx.matching.lift.canonical_form import Body, CanonicalForm, CapturedGroup, NodeRef
from moefx.matching.lift.same_form import require_same_form

NODE = fx.Graph().placeholder("x")
NODE.meta.update(source="block.py:1", index=0)
INDEX, ROW = NodeRef(NODE, ("t", "k")), NodeRef(NODE, ("t",))


def make_group(op, *ids):
    return CapturedGroup([*ids], Body(op, (), (4,)), [{e: types.SimpleNamespace() for e in ids}], [ROW])


def make_form(*groups, slots=2):
    ids = torch.zeros(3, slots, dtype=torch.int64)
    kept = torch.ones(3, slots, dtype=torch.bool)
    return CanonicalForm(None, NODE, (3,), slots, INDEX, ids, [*groups], [], None, kept, set())  # type: ignore[arg-type]


def test_groups_are_in_the_order_of_the_reference():
    other = make_form(make_group("tanh", 3), make_group("relu", 0))
    aligned = require_same_form(make_form(make_group("relu", 0, 1), make_group("tanh", 2, 3)), other)
    assert [g.body.op for g in aligned.groups] == ["relu", "tanh"] and [g.ids for g in aligned.groups] == [[0], [3]]
    assert [g.body.op for g in other.groups] == ["tanh", "relu"]  # the form itself is unchanged


def test_a_group_that_did_not_run_is_empty():
    reference = make_form(make_group("relu", 0, 1), make_group("tanh", 2, 3))
    aligned = require_same_form(reference, make_form(make_group("tanh", 2)))
    assert [(g.body.op, g.ids, g.tables, g.values) for g in aligned.groups[:1]] == [("relu", [], [{}], [])]
    assert reference.groups[0].ids == [0, 1]


DIFFERENCES = {
    "number of slots": make_form(make_group("relu", 0), slots=1),
    "experts compute different functions": make_form(make_group("exp", 0)),
    "the node that selects the experts": dataclasses.replace(make_form(make_group("relu", 0)), expert_index=ROW),
    "a summand of all tokens": dataclasses.replace(make_form(make_group("relu", 0)), shared=[ROW]),
}


@pytest.mark.parametrize(("reason", "other"), DIFFERENCES.items(), ids=DIFFERENCES)
def test_differences_are_refused(reason, other):
    with pytest.raises(Refused, match=reason):
        require_same_form(make_form(make_group("relu", 0, 1)), other)
