"""Node that holds the selected experts: all slots, a column per slot, or a mask."""

from __future__ import annotations

import pytest
import torch

from moefx.errors import Cause, Refused
from moefx.ir.node_values import get_op_name
from moefx.matching.lift.expert_index import enumerate_slot_views

from .small_blocks import Small, lift


def test_an_index_is_found_in_each_order_of_its_axes():
    ids = torch.tensor([[0, 2], [1, 0], [2, 1]])  # [T, K]
    spellings = {("t", "k"): ids, ("k", "t"): ids.t(), ("tk",): ids.flatten(), ("kt",): ids.t().flatten()}
    for axes, spelling in spellings.items():
        assert any(
            found_axes == axes and torch.equal(found_ids, ids)
            for found_axes, found_ids in enumerate_slot_views(spelling, (3,))
        )


def test_slot_views_of_a_sequence():
    views = dict(enumerate_slot_views(torch.tensor([[5], [7]]), (2, 3), sequences=2))
    assert views["s", "k"].flatten().tolist() == [5, 5, 5, 7, 7, 7]


def test_one_node_with_all_slots():
    index = lift(Small()).expert_index
    assert get_op_name(index.node) == "getitem" and index.axes == ("t", "k") and not index.columns


def test_a_column_per_slot():
    class TwoArgmax(Small):
        def forward(self, x):
            scores = self.router(x).softmax(-1)
            first = scores.argmax(-1)
            second = scores.scatter(-1, first[:, None], -1.0).argmax(-1)
            out = self.mix(x, scores.gather(-1, first[:, None]), first[:, None])
            return out + self.mix(x, scores.gather(-1, second[:, None]), second[:, None])

    index = lift(TwoArgmax()).expert_index
    assert [get_op_name(column.node) for column in index.columns] == ["argmax", "argmax"]


def test_a_mask_of_experts():
    class Threshold(Small):
        def forward(self, x):
            scores = self.router(x)
            chosen = scores > 0
            return sum(e(x) * (scores * chosen)[:, i, None] for i, e in enumerate(self.experts))

    index = lift(Threshold()).expert_index
    assert index.axes == ("t", "m") and get_op_name(index.node) == "gt"


def test_experts_without_an_index_are_refused():
    class ByLine(Small):
        """Select an expert by the position of the token, which no tensor of integers holds."""

        def forward(self, x):
            return torch.stack([self.experts[t % 3](x[t]) for t in range(len(x))])

    with pytest.raises(Refused) as raised:
        lift(ByLine())
    assert raised.value.cause is Cause.UNEXPLAINED_INDEX
