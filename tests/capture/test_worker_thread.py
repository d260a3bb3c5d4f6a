"""The worker thread: deep recursion, errors, and the recursion limit."""

from __future__ import annotations

import sys
import threading

import pytest

from moefx.capture.environment.worker_thread import run_in_worker


def test_deep_recursion_and_errors_in_a_worker():
    def down(n: int) -> int:
        return 0 if n == 0 else 1 + down(n - 1)

    assert run_in_worker(lambda: down(20_000)) == 20_000
    with pytest.raises(KeyError):
        run_in_worker(lambda: {}["x"])


def test_the_recursion_limit_holds_until_the_last_thread_ends():
    started, ended, limit = threading.Event(), threading.Event(), sys.getrecursionlimit()

    def first():
        started.set()
        return ended.wait(20)

    def second():
        assert started.wait(20)
        run_in_worker(lambda: None)
        limits.append(sys.getrecursionlimit())
        ended.set()

    limits: list[int] = []
    other = threading.Thread(target=second)
    other.start()
    assert run_in_worker(first)
    other.join()
    assert limits[0] > limit == sys.getrecursionlimit()
