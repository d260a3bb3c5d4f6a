"""The numbers that ranks send each other before rows: where each stands among the results of `count_rows`."""

from __future__ import annotations

import functools
import itertools
import math
import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def count_units(levels: Sequence[int]) -> list[int]:
    """Return the total number of units at each level, coarse to fine."""
    return list(itertools.accumulate(levels, operator.mul))


def num_row_counts(levels: Sequence[int], node_range: Sequence[int]) -> int:
    """Return the number of results of `count_rows`."""
    return sum(count_units(levels)) + (node_range[1] - node_range[0] if node_range else 0) + math.prod(levels) + 2


class CountsLayout:
    """The results of `count_rows` that ranks exchange, and the splits that follow from them.

    Before the hop at level j, a rank holds rows from all ranks whose coordinates equal its own from level j on. These
    rows go to units inside its own unit of level j-1. So every rank sends it two kinds of counts: its rows for the
    receiver's unit at the first level, and, for each lower level, its rows for the receiver's unit and that unit's
    siblings.

    Attributes:
        counts_node: whether rows within the node are counted separately, one count for each position.
        coordinates: the position's coordinate at each level.
        node_range: [begin, end), the positions of this node.
        near_begin: index of the first count for a position of this node. slots_begin: index of the first count of
            slots. zero: index of a 0; the fingerprint follows.
    """

    def __init__(self, levels: Sequence[int], position: int, counts_node: bool):
        self.levels, self.counts_node, self.position = list(levels), counts_node, position
        self.coordinates = [position // math.prod(levels[j + 1 :]) % n for j, n in enumerate(levels)]
        self.node_range = [position // levels[-1] * levels[-1], (position // levels[-1] + 1) * levels[-1]]
        units = count_units(levels)
        self.begins = [sum(units[:j]) for j in range(len(levels))]  # index of each level's first count
        self.near_begin = sum(units)
        self.slots_begin = self.near_begin + self.levels[-1] * counts_node
        self.zero = self.slots_begin + math.prod(levels)
        self._indices: dict[torch.device, Tensor] = {}

    def sent_indices(self, device: torch.device) -> Tensor:
        """Return the indices of the counts that are sent to each position, [positions, numbers]."""
        if device not in self._indices:
            indices = [self._list_indices_for(p) for p in range(math.prod(self.levels))]
            self._indices[device] = torch.tensor(indices, device=device)
        return self._indices[device]

    def _list_indices_for(self, position: int) -> list[int]:
        indices = [position // math.prod(self.levels[1:])]
        for j, n in enumerate(self.levels[1:], 1):
            begin, parent = self.begins[j], position // math.prod(self.levels[j:])
            indices += range(begin + parent * n, begin + (parent + 1) * n)
        if self.counts_node:
            is_near = self.node_range[0] <= position < self.node_range[1]
            indices.append(self.near_begin + position - self.node_range[0] if is_near else self.zero)
        return [*indices, self.slots_begin + position, self.zero + 1]

    def compute_splits(self, counts: list[int], received: list[list[int]]) -> list[Any]:
        """Return [2,W] for each hop, and [1], the number of slots whose expert is on this rank, from this rank's counts
        and those that each position sent."""
        within, begin = math.prod(self.levels[1:]), 1
        first = [numbers[0] for numbers in received[self.position % within :: within]]
        splits: list[Any] = [[counts[: self.levels[0]], first]]
        for coordinate, n in zip(self.coordinates[1:], self.levels[1:], strict=True):
            within //= n
            peers = received[self.position % within :: within]  # equal coordinates below the level: n of each unit
            rows_to = [sum(numbers[begin + other] for numbers in peers[coordinate::n]) for other in range(n)]
            rows_from = [sum(numbers[begin + coordinate] for numbers in peers[other::n]) for other in range(n)]
            splits.append([rows_to, rows_from])
            begin += n
        if self.counts_node:
            near_from = [numbers[-3] for numbers in received[slice(*self.node_range)]]
            splits.append([counts[self.near_begin : self.slots_begin], near_from])
        return [*splits, [sum(numbers[-2] for numbers in received)]]


@functools.lru_cache(maxsize=64)
def find_counts_layout(levels: tuple[int, ...], position: int, counts_node: bool) -> CountsLayout:
    """Return the layout for a rank, see `CountsLayout`. It is made once for each kind of exchange."""
    return CountsLayout(levels, position, counts_node)
