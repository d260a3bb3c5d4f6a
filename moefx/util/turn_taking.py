"""Run two functions in turns, in two threads. Only one of them runs at any time.

A pipeline schedule runs the forward of one micro-batch beside the backward of another one. While one waits for other
ranks, the other one computes::

    forward    | compute, start exchange |                         | wait, compute, start |
    backward   |                         | compute, start exchange |                      | wait, compute, ...

The waits of exchanges call `offer_turn`: after an exchange has started, before its result is needed. On a GPU both use
one stream. The exchange runs on a stream of its own meanwhile.

All ranks start their exchanges in one order: a turn passes at `offer_turn` and at the end of one function alone, so the
two sequences of these calls determine the sequence of turns. No clock, tensor or arrival decides, and ranks that share
exchanges run the same two programs.
"""

from __future__ import annotations

import contextlib
import contextvars
import sys
import threading
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch.profiler import record_function

from ..errors import InvalidInput, MoefxError

_FIRST, _SECOND = 0, 1
_PATIENCE = 1.0  # seconds between two checks for a deadlock
_ENGINE = "_engine_run_backward"  # the function of torch that runs a backward and waits for autograd's threads
ThreadContext = Callable[[], contextlib.AbstractContextManager[None]]


class WaitCounts(NamedTuple):
    """Waits for exchanges of one step on this rank.

    Attributes:
        covered: waits during which another micro-batch computed.
        total: all waits.
    """

    covered: int = 0
    total: int = 0


class _Stopped(BaseException):
    """Ends a function whose other one has failed."""


class TurnTaking:
    """Runs pairs of functions in turns, and counts their waits. Made by `take_turns`."""

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._threads: list[int | None] = [threading.get_ident(), None]
        self._labels = ["", ""]
        self._has_ended = [True, True]
        self._holder = _FIRST
        self._error: BaseException | None = None
        self._covered = self._total = 0

    @property
    def counts(self) -> WaitCounts:
        return WaitCounts(self._covered, self._total)

    def run(
        self,
        first: Callable[[], object],
        second: Callable[[], object],
        labels: tuple[str, str] = ("first", "second"),
        thread_context: ThreadContext = contextlib.nullcontext,
    ) -> None:
        """Run `first` in this thread and `second` in a new one, in turns. `first` begins.

        Args:
            labels: names of both in a profile.
            thread_context: entered in the new thread.

        Raises:
            BaseException: the first error of either function, or an interrupt. The other function is stopped at its
                next turn. No thread is left, unless a second interrupt ends the wait for it.
        """
        self._labels, self._has_ended, self._holder = list(labels), [False, False], _FIRST
        target = contextvars.copy_context().run
        thread = threading.Thread(target=target, args=(self._run_second, second, thread_context), daemon=True)
        try:
            thread.start()
            with record_function(labels[_FIRST]):
                first()
            self._end(_FIRST)
            self._wait_for_second()
        except BaseException as error:
            self._fail(error)
            if thread.is_alive():
                self._wait_for_second()
        if thread.ident is not None:  # it has started
            thread.join()
        self._has_ended, self._threads[_SECOND] = [True, True], None
        error, self._error = self._error, None
        if error is not None:
            raise error

    def offer(self, in_backward: bool) -> None:
        side = self._find_side()
        if side is None:
            return
        self._total += 1
        if self._error is not None and not self._has_ended[side]:
            raise _Stopped
        # A recomputation may have changed the random state and other settings of the process.
        if self._has_ended[1 - side] or (side == _SECOND and not in_backward):
            return
        self._covered += 1
        with record_function(f"exchange of {self._labels[side]} in transit"):
            self._pass_turn(side)

    def _find_side(self) -> int | None:
        """Return which function calls: the first one has a thread of its own, the second one may use autograd's
        threads. None for other threads, except those in a backward, which nothing tells from the second one."""
        thread = threading.get_ident()
        if thread == self._threads[_FIRST]:
            return _FIRST
        is_second = thread == self._threads[_SECOND] or torch._C._current_graph_task_id() != -1
        return _SECOND if is_second else None

    def _pass_turn(self, side: int) -> None:
        with self._condition:
            self._holder = 1 - side
            self._condition.notify_all()
            while self._holder != side and self._error is None:
                is_notified = self._condition.wait(_PATIENCE)
                if not is_notified and threading.get_ident() not in self._threads:
                    _check_for_deadlock(self._threads[_FIRST])
            if self._error is not None:
                raise _Stopped

    def _run_second(self, second: Callable[[], object], thread_context: ThreadContext) -> None:
        self._threads[_SECOND] = threading.get_ident()
        try:
            with self._condition:
                while self._holder != _SECOND and self._error is None:
                    self._condition.wait()
            if self._error is None:
                with thread_context(), record_function(self._labels[_SECOND]):
                    second()
        except BaseException as error:
            self._fail(error)
        finally:
            self._end(_SECOND)

    def _wait_for_second(self) -> None:
        with self._condition:  # after an interrupt, `join` returns at once in Python 3.11
            while not self._has_ended[_SECOND]:
                self._condition.wait()

    def _fail(self, error: BaseException) -> None:
        """Note the first error, and stop the other function."""
        with self._condition:
            if self._error is None:
                self._error = error
            self._condition.notify_all()

    def _end(self, side: int) -> None:
        with self._condition:
            self._has_ended[side], self._holder = True, 1 - side
            self._condition.notify_all()


def _check_for_deadlock(first_thread: int | None) -> None:
    """Raise if the first function waits for the thread of autograd that this is called in.

    Raises:
        InvalidInput: it does.
    """
    frame = sys._current_frames().get(first_thread or 0)
    if frame is not None and frame.f_code.co_name == _ENGINE:
        raise InvalidInput(
            "the forward of the model runs a backward (torch.autograd.grad), which waits for autograd's thread, and "
            "the backward of another micro-batch holds this thread until its exchange has arrived: set "
            "pipe.overlaps_exchanges = False on all ranks, or use another schedule"
        )


_current: TurnTaking | None = None


def offer_turn(in_backward: bool = False) -> None:
    """Let the other of two functions that take turns run, and return when it offers the turn or has ended. Without
    such functions nothing happens.

    Args:
        in_backward: whether the caller is a backward. A forward that runs in the second function is a recomputation,
            which keeps the turn.
    """
    if _current is not None:
        _current.offer(in_backward)


def find_turns() -> TurnTaking | None:
    """Return the object of the `take_turns` around the call, or None."""
    return _current


@contextlib.contextmanager
def take_turns() -> Iterator[TurnTaking]:
    """Let functions take turns in this context.

    Raises:
        MoefxError: another thread of the process is in such a context.
    """
    global _current
    if _current is not None:
        raise MoefxError(
            "two threads of one process run a step of a pipeline with schedule='dualpipev': run one step after the "
            "other, or set pipe.overlaps_exchanges = False on all ranks"
        )
    turns = TurnTaking()
    try:
        _current = turns  # inside, because an interrupt may come before any line
        yield turns
    finally:
        _current = None
