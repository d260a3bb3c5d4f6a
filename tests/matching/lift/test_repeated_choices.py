"""Tokens that select one expert twice get the sum over both slots, or the block is refused."""

from __future__ import annotations

import pytest
import torch

from moefx.matching.lift.repeated_choices import RepeatedChoiceRefused, find_repeated

from .small_blocks import TOKENS, Small, lift

IDS = torch.tensor([[0, 1], [1, 1], [2, 0], [1, 2], [0, 2], [2, 1]])


def test_a_repeated_choice_is_found_by_its_missing_slot():
    ids = torch.tensor([[0, 1], [1, 1], [2, 2]])
    assert find_repeated(ids, [[0, 1], [0], [0]], None) == {1: {1}}  # no other token shows the rows of expert 2


class Given(Small):
    def forward(self, x, ids):
        return self.mix(x, self.router(x).softmax(-1).gather(-1, ids), ids)


class Once(Given):
    """Add a repeated expert once, with the weight of the first slot."""

    def mix(self, x, weights, ids):
        out = torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            t, k = (ids == e).max(-1)
            out = out + expert(x) * (t * weights.gather(-1, k[:, None])[:, 0])[:, None]
        return out


def test_both_slots_are_added():
    form = lift(Given(), IDS)
    assert form.repeated_tokens == {1} and form.kept_slots.all() and len(form.ids) == TOKENS


def test_one_of_two_slots_is_refused():
    with pytest.raises(RepeatedChoiceRefused):
        lift(Once(), IDS)
    assert lift(Once(), IDS[[0, 2, 3, 4, 5, 0]]).slots == 2  # accepted if no token selects an expert twice
