"""Slices of parameters, and the experts that they may belong to."""

from __future__ import annotations

import pytest
from torch import nn

from moefx.matching.terms.normal_form import Terms
from moefx.matching.terms.parameter_slices import (
    ParameterSlice,
    find_siblings,
    guess_experts,
    is_parameter_slice,
    is_state_slice,
    number_nested_modules,
    strip_moves,
)

T = Terms()
STACK = T.make("param", ("w",), (6, 4))
SLICES = {
    "w": (STACK, []),
    "w[2]": (T.pick(STACK, 0, 2), [2]),
    "w[2:4]": (T.slice(STACK, 0, 2, 4), [1]),  # the second of three blocks
    "w[1:3]": (T.slice(STACK, 0, 1, 3), []),  # no block of two rows
    "w.cast": (T.pointwise("cast", STACK, dtype="bfloat16"), []),
}


@pytest.mark.parametrize("text", SLICES)
def test_a_slice_prints_as_python_and_tells_its_experts(text):
    term, experts = SLICES[text]
    place = ParameterSlice.from_term(term)
    assert str(place) == text and guess_experts(place, {}) == experts


def test_a_slice_is_moved_but_not_computed_with():
    moved = T.reshape(T.permute(STACK, (1, 0)), (24,))
    assert is_parameter_slice(moved) and strip_moves(moved) is STACK
    assert not is_parameter_slice(T.pointwise("exp.default", STACK))
    mask = T.make("buffer", ("mask",), (6,))
    assert is_state_slice(mask) and not is_parameter_slice(mask)


def test_axes_with_one_index():
    assert ParameterSlice.from_term(T.pick(STACK, 1, 3)).axes == {1} and ParameterSlice.from_term(STACK).axes == set()


def make_linears(count):
    return (nn.Linear(2, 2) for _ in range(count))


def test_siblings_differ_in_their_number_only():
    block = nn.ModuleDict({"expert_10": nn.Linear(2, 2), "expert_9": nn.Linear(2, 2), "norm1": nn.Identity()})
    siblings = find_siblings(block)[""]
    assert siblings == ["expert_9", "expert_10"] and siblings.numbers["expert_10"] == 1
    assert guess_experts(ParameterSlice("expert_10.weight", ()), {"": siblings}) == [1]


def test_named_experts_are_siblings_by_their_parameters():
    block = nn.ModuleDict({"router": nn.Linear(2, 5), "left": nn.Linear(2, 2), "right": nn.Linear(2, 2)})
    assert find_siblings(block)[""] == ["left", "right"]


def test_nested_lists_are_counted_through():
    block = nn.Module()
    block.nodes = nn.ModuleList([nn.ModuleList(make_linears(2)), nn.ModuleList(make_linears(2))])
    assert number_nested_modules(block) == {"nodes.0.0": 0, "nodes.0.1": 1, "nodes.1.0": 2, "nodes.1.1": 3}
    assert number_nested_modules(nn.ModuleList(make_linears(2))) == {}
