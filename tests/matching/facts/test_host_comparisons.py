"""Comparisons whose result Python reads: of Python's own and of ops."""

from __future__ import annotations

import pytest
import torch

from moefx.matching.facts.host_comparisons import find_comparison

from ..lift.small_blocks import Small, capture


class Branching(Small):
    def __init__(self, test):
        super().__init__()
        self.test = test

    def mix(self, x, weights, ids):
        return super().mix(x, weights, ids) + bool(self.test(x, ids))


def read_of(test):
    """Return the only read of a block with this test."""
    (read,) = capture(Branching(test)).reads
    return read


@pytest.mark.parametrize(
    ("test", "op", "by_op"),
    [
        (lambda x, ids: (ids == 1).sum() > 3, "gt", True),
        (lambda x, ids: (ids == 1).sum().item() > 3, "gt", False),
        (lambda x, ids: ids.max() <= 3, "le", True),
    ],
    ids=["op", "number", "of an element"],
)
def test_comparisons_are_found_by_their_operands(test, op, by_op):
    comparison = find_comparison(read_of(test))
    assert (comparison.op, comparison.other, comparison.node is not None) == (op, 3, by_op)
    assert comparison.depends_on_routing


def test_a_reduced_comparison_is_found_on_request():
    read = read_of(lambda x, ids: (ids > 3).any())
    assert find_comparison(read) is None
    assert find_comparison(read, reductions=("any",))[:2] == ("gt", 3)


def test_a_comparison_of_constants_does_not_depend_on_the_routing():
    comparison = find_comparison(read_of(lambda x, ids: torch.arange(4).sum() > 3))
    assert comparison[:2] == ("gt", 3) and not comparison.depends_on_routing
