"""Ranges of integers under every routing."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from moefx.capture.concolic import capture_block
from moefx.capture.tracing.concrete_routing import Routing
from moefx.matching.facts.integer_ranges import IntegerRanges
from moefx.matching.facts.range_arithmetic import FAR, UNBOUNDED

E = 4


class Fn(nn.Module):
    def __init__(self, fn):
        super().__init__()
        self.fn, self.w = fn, nn.Parameter(torch.randn(3, E))

    def forward(self, x):
        return self.fn(x @ self.w)


def find_range(fn):
    """Return the range of the result, and whether it is decided."""
    captured = capture_block(Fn(fn), (torch.empty(5, 3, device="meta"),), {}, Routing())
    all_ranges = IntegerRanges(captured.nodes)
    bounds = all_ranges.get(captured.out)
    return (None if bounds is None else (int(bounds[0].min()), int(bounds[1].max()))), all_ranges.is_decided(
        captured.out
    )


@pytest.mark.parametrize(
    ("fn", "bounds"),
    [
        (lambda s: s.topk(2).indices, (0, E - 1)),
        (lambda s: s.argmax(-1), (0, E - 1)),
        (lambda s: s.argmax(), (0, 5 * E - 1)),
        (lambda s: s.sort(-1).indices[:, :2], (0, E - 1)),
        (lambda s: s.topk(2).indices.reshape(-1).sort()[0], (0, E - 1)),
        (lambda s: s.topk(2).indices + 3, (3, E + 2)),
        (lambda s: s.topk(2).indices.clamp(max=1), (0, 1)),
        (lambda s: torch.bincount(s.argmax(-1), minlength=E), (0, UNBOUNDED)),  # the number of tokens is unbounded
        (lambda s: (s.argmax(-1) == 1).sum(), (0, UNBOUNDED)),
        (lambda s: torch.arange(3), (0, 2)),
        (lambda s: F.one_hot(s.argmax(-1), E).cumsum(-2), (0, UNBOUNDED)),
        (lambda s: F.one_hot(s.argmax(-1, keepdim=True), E).cumsum(-2), (0, 1)),  # along an axis of size one
        (lambda s: (F.one_hot(s.argmax(-1), E).cumsum(-2) - 1).clamp(max=6), (-1, 6)),
        (lambda s: s.topk(2).indices - s.argmax(-1, keepdim=True), (1 - E, E - 1)),
        (lambda s: (s.topk(2).indices - 1) * (s.argmax(-1, keepdim=True) - 1), (2 - E, (E - 2) ** 2)),
        (lambda s: (s.argmax(-1) == 1).sum() * (s.argmax(-1) == 2).sum(), (0, FAR)),
        (lambda s: (s.argmax(-1) == 1).sum() * E - 1, (-1, UNBOUNDED)),
        (lambda s: s.argmax(-1) * 2**50, (0, (E - 1) * 2**50)),
        (lambda s: s.argmax(-1) * 2**59 // 2**50 + 1, (1, (E - 1) * 2**9 + 1)),
        (lambda s: s.argmax(-1) * 2**62, (-FAR, FAR)),  # wraps around
        (lambda s: s.argmax(-1) * 2**40 * 2**40 // 2**10, (-(2**53), 2**53 - 1)),
        (lambda s: s.argmax(-1) * 2**62 % E, (0, E - 1)),
        (lambda s: s.argmax(-1).int() * 2**30, (-(2**31), 2**31 - 1)),
        (lambda s: (s.argmax(-1) * 2**30).sum(), (0, FAR)),
        (lambda s: (s.argmax(-1) * 2**50).sum(), (-FAR, FAR)),
        (lambda s: (s.argmax(-1) - 1).sum(), (-UNBOUNDED, UNBOUNDED)),
        (lambda s: s.topk(2).indices & 2, (0, 2)),
        (lambda s: (s.topk(2).indices + 1) & 3, (0, 3)),  # though 4 & 3 is 0
        (lambda s: s.argmax(-1) | 2, (2, E + 1)),
        (lambda s: (s.argmax(-1) == 1) & (s.argmax(-1) == 2), (0, 1)),
        (lambda s: (s.argmax(-1) - 1).bool(), (0, 1)),
        (lambda s: F.one_hot(s.argmax(-1), E).cumsum(-2).to(torch.uint8), (0, 255)),
        (lambda s: F.one_hot(s.argmax(-1), E).cumsum(-2, dtype=torch.int8), (-128, 127)),
        (lambda s: (i := s.argmax(-1)).masked_fill(i == E - 1, 0), (0, E - 2)),
        (lambda s: (i := s.argmax(-1)).masked_fill(i == 1, 9), (0, 9)),
        (lambda s: (i := s.argmax(-1) - 1).masked_fill(i < 0, 7), (0, 7)),
        (lambda s: torch.where((i := s.argmax(-1)) >= 2, -5, i), (-5, 1)),
        (lambda s: s.argmax(-1).masked_fill(s.argmax(-1) == E - 1, 0), (0, E - 1)),  # compares another node
        (lambda s: torch.arange(E).flip(0)[s.argmax(-1)], (0, E - 1)),
        (lambda s: torch.arange(E).flip(0).index_select(0, s.argmax(-1)), (0, E - 1)),
        (lambda s: torch.arange(E).flip(0).take(s.argmax(-1)), (0, E - 1)),
        (lambda s: s.topk(2).indices * torch.tensor([5, 1]), (0, 5 * (E - 1))),
        (lambda s: torch.zeros(E, dtype=torch.long).scatter(0, s.argmax(-1), 1), (0, 1)),
        (lambda s: torch.zeros(E, dtype=torch.long).scatter(0, s.argmax(-1), 1, reduce="add"), None),  # counts
        (lambda s: torch.ones(E, dtype=torch.long).scatter(0, s.argmax(-1), 2, reduce="multiply"), None),
        (lambda s: s, None),
    ],
)
def test_ranges_have_the_bounds_of_the_program(fn, bounds):
    assert find_range(fn)[0] == bounds


@pytest.mark.parametrize(
    ("fn", "decided"),
    [
        (lambda s: (s.topk(2).indices < E).all(), False),
        (lambda s: (s.topk(2).indices == E).any(), True),
        (lambda s: (s.topk(2).indices == -1).any(), True),
        (lambda s: (s.topk(2).indices == E - 1).any(), False),
        (lambda s: s.amax() > 50.0, False),
        (lambda s: (s > 0).any(), False),
        (lambda s: s.argmax(-1).max() >= E, True),
        (lambda s: ((s.topk(2).indices + 1) & 3).any(), False),
        (lambda s: (s.argmax(-1) - 5).any(), True),
        (lambda s: (s.argmax(-1) - 1).any(), False),
    ],
)
def test_comparisons_with_one_outcome_are_decided(fn, decided):
    is_decided = find_range(fn)[1]
    assert is_decided == decided or not is_decided  # undecided is always safe
    if decided:
        assert is_decided


class Looked(Fn):
    """Apply `fn` to scores and to integers from a buffer."""

    def __init__(self, fn):
        super().__init__(fn)
        self.register_buffer("ids", torch.tensor([[0], [1], [2], [0], [1]]))

    def forward(self, x):
        return self.fn(x @ self.w, self.ids + 0)


@pytest.mark.parametrize(
    ("fn", "decided"),
    [
        (lambda s, i: (s.gather(1, i), (i == E).any())[1], True),
        (lambda s, i: ((i == E).any(), s.gather(1, i))[0], False),  # compared before the lookup
        (lambda s, i: (s[i[:, 0]], (i >= 5).any())[1], False),  # the number of tokens is unbounded
        (lambda s, i: (s.take(i), (i >= 5 * E).any())[1], False),
    ],
)
def test_lookups_bound_their_indices(fn, decided):
    captured = capture_block(Looked(fn), (torch.empty(5, 3, device="meta"),), {}, Routing())
    assert IntegerRanges(captured.nodes, of_call=True).is_decided(captured.out) == decided


def test_ranges_do_not_depend_on_the_order_of_queries():
    block = Looked(lambda s, i: ((i == E).any(), s.gather(1, i), (i == E).any()))
    nodes = capture_block(block, (torch.empty(5, 3, device="meta"),), {}, Routing()).nodes

    def read_bounds(order):
        all_ranges = IntegerRanges(nodes, of_call=True)
        bounds = {n: all_ranges.get(n) for n in order}
        return [None if bounds[n] is None else [(int(b.min()), int(b.max())) for b in bounds[n]] for n in nodes]

    assert read_bounds(nodes) == read_bounds(nodes[::-1])
    ids = next(i for i, n in enumerate(nodes) if "add" in str(n.target))
    assert read_bounds(nodes)[ids] == [(0, 0), (E - 1, E - 1)]  # bounded by the later lookup


def test_a_query_reads_the_capture_up_to_its_node():
    block = Fn(lambda s: [s.topk(2).indices == e for e in range(E)])
    captured = capture_block(block, (torch.empty(5, 3, device="meta"),), {}, Routing())
    find_range = IntegerRanges(captured.nodes)
    first = next(n for n in captured.nodes if "eq" in str(n.target))
    find_range.get(first.args[0])
    assert find_range._read <= first.meta["index"]


def test_a_one_hot_tensor_is_between_zero_and_one():
    bounds, _ = find_range(lambda s: F.one_hot(s.argmax(-1), E + 2))
    assert bounds is None or bounds == (0, 1)
