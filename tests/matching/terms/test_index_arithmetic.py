"""Arithmetic on shapes and indices, compared with torch."""

from __future__ import annotations

import pytest
import torch

from moefx.matching.terms.index_arithmetic import broadcast, list_coordinates, reshape_group, unravel


def test_shapes_are_broadcast_as_in_torch():
    assert broadcast([(3, 1), (4,), ()]) == broadcast([(4,), (3, 1)]) == (3, 4)
    with pytest.raises(ValueError, match="do not broadcast"):
        broadcast([(3,), (4,)])


def test_flat_indices_become_coordinates():
    assert [unravel(i, (2, 3)) for i in range(6)] == list_coordinates((2, 3)).flatten(1).t().tolist()
    assert torch.arange(6).view(2, 3)[tuple(unravel(4, (2, 3)))] == 4


GROUPS = {
    "merged": ((2, 3, 4), (6, 4), 0, ([0, 1], [0])),
    "split": ((6, 4), (2, 3, 4), 1, ([0], [0, 1])),
    "as it was": ((2, 3, 4), (6, 4), 1, ([2], [1])),
    "axes of one are left out": ((2, 1, 3), (6, 1), 0, ([0, 2], [0])),
}


@pytest.mark.parametrize(("old", "new", "axis", "expected"), GROUPS.values(), ids=GROUPS)
def test_axes_that_a_reshape_merges_or_splits(old, new, axis, expected):
    assert reshape_group(old, new, axis) == expected
