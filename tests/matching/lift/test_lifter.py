"""Lift of one capture: its canonical form, or the candidates for the routed sum."""

from __future__ import annotations

import pytest

from moefx.errors import Refused

from .small_blocks import TOKENS, E, K, Small, lift


def test_a_loop_has_the_canonical_form():
    form = lift(Small())
    assert (form.tokens, form.slots, form.shared, form.unrouted_value) == ((TOKENS,), K, [], None)
    assert form.cut is form.capture.out and form.kept_slots.all()
    (group,) = form.groups
    assert group.ids == [*range(E)] and [ref.axes for ref in group.values] == [("t",), ("t", "k")]


def test_ops_behind_the_routed_sum_are_not_replaced():
    class Scaled(Small):
        def forward(self, x):
            return super().forward(x).tanh()

    form = lift(Scaled())
    assert form.cut in form.capture.out.all_input_nodes and form.capture.out not in form.replaced_nodes


def test_a_refusal_lists_the_nodes_that_were_tried():
    class Mixing(Small):
        def forward(self, x):
            _, ids = self.choose(x)
            return sum(expert(x).cumsum(0) * (ids == e).any(-1, keepdim=True) for e, expert in enumerate(self.experts))

    with pytest.raises(Refused) as raised:
        lift(Mixing())
    cuts = raised.value.trace.cuts
    assert cuts and all(cut.reason for cut in cuts)
