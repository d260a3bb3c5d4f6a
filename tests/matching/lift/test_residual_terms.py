"""Summands without expert parameters: shared by all tokens, alone in a row, or from an expert without parameters."""

from __future__ import annotations

import types
from typing import Any

import pytest
import torch
from torch import nn

from moefx.errors import Refused
from moefx.matching.lift.residual_terms import assign_identity_slots
from moefx.matching.terms.normal_form import Terms

from .small_blocks import D, E, Small, find_nodes, lift


def test_a_shared_expert_is_in_the_residual():
    class WithShared(Small):
        def __init__(self):
            super().__init__()
            self.common = nn.Linear(D, D, bias=False)

        def forward(self, x):
            weights, ids = self.choose(x)
            out = self.common(x)
            for e, expert in enumerate(self.experts):
                t, k = torch.where(ids == e)
                out = out.index_add(0, t, expert(x[t]) * weights[t, k, None])
            return out

    form = lift(WithShared())
    assert [ref.node for ref in form.shared] == find_nodes(form.capture, "linear")[1:2]


def test_the_output_of_tokens_without_an_expert():
    class Kept(Small):
        def forward(self, x):
            weight, ids = self.router(x).softmax(-1).max(-1)
            out = x.clone()
            for e, expert in enumerate(self.experts):
                (t,) = torch.where((ids == e) & (torch.arange(len(x)) != 2))
                out[t] = expert(x[t]) * weight[t, None]
            return out

    form = lift(Kept())
    assert form.unrouted_value is not None and form.unrouted_value.axes == ("t",)
    assert (~form.kept_slots).nonzero().tolist() == [[2, 0]]


def test_an_identity_expert_has_a_group_without_tables():
    class WithIdentity(Small):
        def __init__(self):
            super().__init__()
            self.experts[E - 1] = nn.Identity()

    assert {tuple(g.ids): len(g.tables) for g in lift(WithIdentity()).groups} == {(0, 1): 1, (2,): 0}


T = Terms()
ROW = T.make("node", ("x",), (D,))
WEIGHTS = [T.make("node", (f"w{k}",), ()) for k in range(2)]


def assign(*summands, placed):
    """Assign summands of a token with experts 4 and 7 and known routing weights to slots."""
    lookup: Any = types.SimpleNamespace(
        has_value_at=lambda t, k, e, term: term is WEIGHTS[k] and e == (4, 7)[k], find_holders=lambda term: []
    )
    lookup.semantics = types.SimpleNamespace(terms=T)
    assign_identity_slots(0, [*summands], [4, 7], placed, lookup)
    return placed


def test_a_summand_belongs_to_the_slot_of_its_weight():
    first, second = (T.pointwise("mul", ROW, w) for w in WEIGHTS)
    assert assign(second, first, placed=[]) == [(1, second), (0, first)]


def test_a_sum_of_weights_is_two_summands():
    both = T.pointwise("mul", ROW, T.pointwise("add", *WEIGHTS))
    assert assign(both, placed=[]) == [(k, T.pointwise("mul", ROW, WEIGHTS[k])) for k in range(2)]


def test_a_summand_without_a_free_slot_is_refused():
    with pytest.raises(Refused, match="neither an expert's nor the same for all tokens"):
        assign(ROW, placed=[(0, ROW), (1, ROW)])
