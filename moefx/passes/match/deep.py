"""A thread with room for deep recursion."""

from __future__ import annotations

import contextlib
import contextvars
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch

from ...capture import autocast

R = TypeVar("R")


def deep(fn: Callable[[], R]) -> R:
    """Run `fn` with room for the recursion that a chain of hundreds of experts needs."""
    result: list[Any] = []
    here = autocast.state()  # of the thread; a proof is always about the differentiable code

    def run() -> None:
        try:
            with autocast.under(*here), torch.enable_grad():
                result.append((True, fn()))
        except BaseException as error:
            result.append((False, error))

    with _Limit.raised():
        _started(threading.Thread(target=contextvars.copy_context().run, args=(run,))).join()
    ok, value = result[0]
    if not ok:
        raise value
    return value


def _started(thread: threading.Thread) -> threading.Thread:
    with _Limit.lock:  # the size is that of all threads started now
        before = threading.stack_size(512 << 20)
        try:
            thread.start()
        finally:
            threading.stack_size(before)
    return thread


class _Limit:
    """Of recursion, which is one for all threads: it is lowered again when nobody needs it any more."""

    lock = threading.Lock()
    users, before = 0, 0

    @classmethod
    @contextlib.contextmanager
    def raised(cls) -> Iterator[None]:
        with cls.lock:
            if not cls.users:
                cls.before = sys.getrecursionlimit()
                sys.setrecursionlimit(max(cls.before, 200_000))
            cls.users += 1
        try:
            yield
        finally:
            with cls.lock:
                cls.users -= 1
                if not cls.users:
                    sys.setrecursionlimit(cls.before)
