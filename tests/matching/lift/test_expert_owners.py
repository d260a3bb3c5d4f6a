"""Owners of a summand: the experts whose parameters it depends on."""

from __future__ import annotations

from typing import Any

import pytest

from moefx.matching.lift.expert_owners import ExpertOwners
from moefx.matching.terms.parameter_slices import ParameterSlice

from .small_blocks import EXPERTS, D, Small, find_uses

REACH = find_uses(Small())
OWNERS = ExpertOwners(REACH, EXPERTS)
T = REACH.terms
ROW, SCALE = T.make("node", ("x",), (D,)), T.make("node", ("w",), ())


def make_product(e):
    return T.einsum(("d", "fd"), "f", (ROW, T.make("param", (f"experts.{e}.weight",), (D, D))))


def test_the_owner_is_the_position_in_the_list():
    assert OWNERS.find_experts(make_product(2)) == {2} and OWNERS.find_experts(
        T.pointwise("add", make_product(0), make_product(2))
    ) == {0, 2}
    assert OWNERS.find_experts(ROW) == frozenset()


SUMS: dict[str, Any] = {
    "one expert's sum stays": (T.pointwise("add", make_product(1), T.pointwise("relu.default", make_product(1))), 1),
    "experts part": (T.pointwise("add", make_product(0), make_product(1)), 2),
    "an expert and the rest": (T.pointwise("add", make_product(0), ROW), 2),
    "a sum without experts stays": (T.pointwise("add", ROW, T.pointwise("exp.default", ROW)), 1),
    "zero": (T.const(0, (D,)), 0),
}


@pytest.mark.parametrize(("row", "count"), SUMS.values(), ids=SUMS)
def test_a_row_is_split_into_its_summands(row, count):
    assert len(OWNERS.split_summands(row)) == count


def test_factors_are_distributed():
    row = T.pointwise("mul", T.pointwise("add", make_product(0), make_product(1)), SCALE)
    assert OWNERS.split_summands(row) == [T.pointwise("mul", make_product(e), SCALE) for e in range(2)]


def test_a_difference_has_a_negative_summand():
    row = T.pointwise("sub", make_product(0), make_product(1))
    assert OWNERS.split_summands(row) == [make_product(0), T.pointwise("mul", make_product(1), T.const(-1))]


def test_an_index_in_a_stack_is_a_number():
    stack = T.make("param", ("stack",), (3, D, D))
    place = ParameterSlice.from_term(T.pick(stack, 0, 2))
    assert OWNERS.guess_numbers((place,)) == [2]
    assert ExpertOwners(REACH, EXPERTS, {"stack": 7}).guess_numbers((place,)) == [7]  # if numbers are given


def test_slices_that_no_expert_shares():
    places = tuple(ParameterSlice("w", (("select", (D,), ((0, i),)),)) for i in (1, 2))
    assert OWNERS.guess_numbers(places) == [] and OWNERS.guess_numbers(places, by_slice=True) == [1, 2]
