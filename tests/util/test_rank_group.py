"""Ranks that do one thing together raise together, also the ranks on which nothing failed."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from moefx.errors import InvalidInput, MoefxError
from moefx.util.rank_group import RankGroup
from moefx.util.rank_values import gather_or_raise


class ThreadRank(RankGroup):
    """A rank that is a thread of this process. It has no process group."""

    def __init__(self, position: int, ranks: list[int], answers: list[Any], barrier: threading.Barrier):
        self.group, self.ranks, self.rank, self.is_first = None, ranks, ranks[position], position == 0
        self._position, self._answers, self._barrier = position, answers, barrier

    def gather(self, value: Any) -> list[Any]:
        self._answers[self._position] = value
        self._barrier.wait(30)
        answers = list(self._answers)
        self._barrier.wait(30)
        return answers


def run_on_ranks(ranks: list[int], errors: dict[int, Exception]) -> dict[int, Exception | None]:
    """Run a block on all ranks, and return the error of each rank or None."""
    answers: list[Any] = [None] * len(ranks)
    barrier, found = threading.Barrier(len(ranks)), dict[int, Exception | None]()

    def run(position: int) -> None:
        rank = ThreadRank(position, ranks, answers, barrier)
        try:
            with rank.raise_together():
                if rank.rank in errors:
                    raise errors[rank.rank]
            found[rank.rank] = None
        except Exception as error:
            found[rank.rank] = error

    threads = [threading.Thread(target=run, args=(position,)) for position in range(len(ranks))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return found


def test_a_process_without_a_group_is_first_and_alone():
    alone = RankGroup(None)
    assert (alone.rank, alone.ranks, alone.is_first) == (0, [0], True)
    assert alone.gather("value") == ["value"]


def test_a_process_without_a_group_raises_its_own_error():
    with pytest.raises(ValueError, match=r"^no room$"), RankGroup(None).raise_together():
        raise ValueError("no room")


def test_ranks_without_an_error_name_the_rank_that_failed():
    error = OSError("no space")
    found = run_on_ranks([2, 5, 7], {5: error})
    assert found[5] is error
    for rank in (2, 7):
        assert type(found[rank]) is MoefxError and str(found[rank]) == "rank 5 failed: OSError: no space"


def test_each_rank_raises_its_own_error():
    errors: dict[int, Exception] = {0: OSError("a"), 1: KeyError("b")}
    assert run_on_ranks([0, 1], errors) == errors


def test_no_rank_raises_without_an_error():
    assert run_on_ranks([0, 1], {}) == {0: None, 1: None}


def test_values_are_returned_unless_a_rank_has_an_error():
    names = ["rank 0", "rank 1"]
    other: list[Any] = [None, "blocks"]
    assert gather_or_raise("mine", None, lambda mine: [mine, other], names) == ["mine", "blocks"]
    other[0] = "KeyError: 'b'"
    with pytest.raises(InvalidInput, match=r"^rank 1 failed: KeyError: 'b'$"):
        gather_or_raise("mine", None, lambda mine: [mine, other], names, InvalidInput)
    with pytest.raises(ZeroDivisionError):
        gather_or_raise("mine", ZeroDivisionError(), lambda mine: [mine, other], names)
