"""Integers that may be choices of experts."""

from __future__ import annotations

from torch import nn

from moefx.matching.lift.integer_choices import has_integer_choices, has_sequence_choices

from .small_blocks import Small, capture, find_uses


def test_blocks_that_choose_by_integers_are_recognised():
    assert has_integer_choices(find_uses(Small())) and not has_integer_choices(find_uses(nn.Linear(4, 4)))


def test_a_selection_per_token_is_not_per_sequence():
    assert not has_sequence_choices(capture(Small()))
