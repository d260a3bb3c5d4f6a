"""Nodes that supply a value per token and slot, found by their terms."""

from __future__ import annotations

from torch import fx

from moefx.ir.node_values import get_op_name
from moefx.matching.lift.canonical_form import NodeRef
from moefx.matching.lift.value_axes import ValueAxes
from moefx.matching.lift.value_lookup import ValueLookup
from moefx.matching.terms.node_semantics import Semantics

from .small_blocks import TOKENS, D, E, K, Small, capture


class Gathered(Small):
    """Route tokens and gather a row per slot."""

    def forward(self, x):
        weights, _ = self.choose(x)
        return weights, x[:, None].expand(-1, K, -1) * weights[..., None]


BLOCK = Gathered()
CAPTURE = capture(BLOCK)
WEIGHTS, ROWS = CAPTURE.out
SLOTS = [(t, k, 0) for t in range(TOKENS) for k in range(K)]


def look_up(*nodes: fx.Node) -> ValueLookup:
    semantics = Semantics(CAPTURE.nodes, CAPTURE.concrete_value)
    return ValueLookup.rank(semantics, nodes, ValueAxes(tokens=(TOKENS,), slots=K, experts=E))


def test_a_weight_per_slot():
    lookup = look_up(CAPTURE.nodes[-1], WEIGHTS)
    ref = NodeRef(WEIGHTS, ("t", "k"))
    assert lookup.find(SLOTS, [lookup.get_element(ref, *slot) for slot in SLOTS]) == ref


def test_a_weight_that_belongs_to_another_slot_is_not_found():
    lookup = look_up(WEIGHTS)
    terms = [lookup.get_element(NodeRef(WEIGHTS, ("t", "k")), t, 1 - k, e) for t, k, e in SLOTS]
    assert lookup.find(SLOTS, terms) is None


def test_a_softmax_is_a_weight_per_expert():
    softmax = next(n for n in CAPTURE.nodes if get_op_name(n) == "_softmax")
    lookup, ref = look_up(softmax), NodeRef(softmax, ("t", "e"))
    slots = [(t, 0, t % E) for t in range(TOKENS)]
    assert lookup.find(slots, [lookup.get_element(ref, *slot) for slot in slots]) == ref


def test_a_vector_must_be_the_tokens_unless_it_may_be_wide():
    lookup, ref = look_up(ROWS), NodeRef(ROWS, ("t", "k"))
    terms = [lookup.get_element(ref, *slot) for slot in SLOTS]
    assert terms[0].shape == (D,)
    assert lookup.find(SLOTS, terms) is None and lookup.find(SLOTS, terms, may_differ_by_slot=True) == ref


def test_an_element_outside_of_the_tensor():
    assert look_up(WEIGHTS).get_element(NodeRef(WEIGHTS, ("t", "k")), 0, K, 0) is None
