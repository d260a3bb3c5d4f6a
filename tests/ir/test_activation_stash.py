"""Rings of rows and counters of misses: see `moefx.ir.activation_stash`."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch

from moefx.errors import InvalidInput
from moefx.ir import activation_stash
from moefx.ir.activation_stash import MissCounter, find_stash

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def own_stashes(monkeypatch):
    for name in ("_stashes", "_misses"):
        monkeypatch.setattr(activation_stash, name, {})


def test_rows_of_equal_width_and_dtype_share_a_ring():
    stash = find_stash(8, [3, 3], torch.float32, CPU)
    assert find_stash(5, [6], torch.float32, CPU) is stash and stash.rows.shape == (8, 6)
    assert find_stash(5, [7], torch.float32, CPU) is not stash
    assert find_stash(5, [6], torch.float64, CPU) is not stash


def test_a_larger_ring_replaces_a_small_one_and_counts_from_another_row():
    small = find_stash(8, [4], torch.float32, CPU)
    large = find_stash(9, [4], torch.float32, CPU)
    assert large.num_rows == 9 and large.misses is small.misses
    assert int(large.cursor) - int(small.cursor) > 1 << 39
    assert find_stash(8, [4], torch.float32, CPU) is large


def test_a_capture_needs_a_ring_made_before(monkeypatch):
    stash = find_stash(8, [4], torch.float32, CPU)
    monkeypatch.setattr(activation_stash, "is_capturing", lambda device: True)
    monkeypatch.setattr(activation_stash, "_stashes_in_graphs", set())
    assert find_stash(8, [4], torch.float32, CPU) is stash
    assert activation_stash._stashes_in_graphs == {stash}  # its address is in the graph
    with pytest.raises(InvalidInput, match=r'`"pull"` keep.*: run the step once, with the same number'):
        find_stash(9, [4], torch.float32, CPU)


def test_copies_count_for_themselves():
    counter = MissCounter()
    copies = [copy.deepcopy(counter), pickle.loads(pickle.dumps(counter))]
    assert len({counter.number, *(c.number for c in copies)}) == 3
    misses = find_stash(8, [4], torch.float32, CPU).misses
    misses[counter.number] += 2
    assert [c.read() for c in (counter, *copies)] == [2, 0, 0]


def test_a_number_that_is_used_again_starts_at_zero(monkeypatch):
    monkeypatch.setattr(activation_stash, "_free_counters", [1])
    find_stash(8, [4], torch.float32, CPU).misses[1] = 5
    keep_stashes, first = MissCounter(), MissCounter()
    assert (keep_stashes.number, keep_stashes.read(), first.number) == (1, 0, 0)  # the last number is shared
