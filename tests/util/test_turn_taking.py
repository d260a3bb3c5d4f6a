"""Two functions in turns: one runs at a time, in an order that no clock decides, and errors of either end both."""

from __future__ import annotations

import contextlib
import inspect
import random
import signal
import sys
import threading
import time
from typing import Any
from unittest import mock

import pytest
import torch
from torch.profiler import record_function

from moefx.errors import InvalidInput, MoefxError
from moefx.util import turn_taking
from moefx.util.turn_taking import WaitCounts, find_turns, offer_turn, take_turns

pytestmark = pytest.mark.timeout(60)


@pytest.fixture(autouse=True)
def no_thread_is_left():
    before = threading.active_count()
    yield
    assert threading.active_count() == before
    assert find_turns() is None


class Log:
    """Records steps of functions that take turns. Fails if two run at the same time."""

    def __init__(self, sleep: Any = lambda: None) -> None:
        self.steps: list[str] = []
        self.sleep, self.running = sleep, threading.Lock()

    def write(self, step: str) -> None:
        assert self.running.acquire(blocking=False), "two functions run at the same time"
        self.sleep()
        self.steps.append(step)
        self.running.release()

    def make(self, name: str, turns: int) -> Any:
        """Make a function that offers the turn several times."""

        def run() -> None:
            for number in range(turns):
                self.write(f"{name}{number}")
                offer_turn(in_backward=name == "b")
            self.write(f"{name}{turns}")

        return run


def test_functions_alternate():
    log = Log()
    with take_turns() as turns:
        turns.run(log.make("f", 2), log.make("b", 4))
    assert log.steps == ["f0", "b0", "f1", "b1", "f2", "b2", "b3", "b4"]
    assert turns.counts == WaitCounts(covered=4, total=6)  # the last two waits of the second had nothing beside them


def test_time_does_not_change_the_order():
    log = Log()
    with take_turns() as turns:
        turns.run(log.make("f", 5), log.make("b", 3))
    for seed in range(3):
        generator = random.Random(seed)
        slow = Log(lambda generator=generator: time.sleep(generator.random() / 100))
        with take_turns() as turns:
            turns.run(slow.make("f", 5), slow.make("b", 3))
        assert slow.steps == log.steps


def test_waits_without_a_pair_are_counted_only():
    offer_turn()
    with take_turns() as turns:
        offer_turn()
        thread = threading.Thread(target=offer_turn)  # of the user's program
        thread.start()
        thread.join()
    assert turns.counts == WaitCounts(covered=0, total=1)


def test_a_function_without_waits_runs_before_the_other():
    log = Log()
    with take_turns() as turns:
        turns.run(log.make("f", 0), log.make("b", 1))
        turns.run(log.make("f", 1), log.make("b", 0))
    assert log.steps == ["f0", "b0", "b1", "f0", "b0", "f1"]


def test_a_recomputation_keeps_the_turn():
    steps: list[str] = []

    def recompute() -> None:
        offer_turn()  # as the wait of a forward does
        steps.append("recomputed")
        offer_turn(in_backward=True)

    def forward() -> None:
        offer_turn()
        steps.append("forward")

    with take_turns() as turns:
        turns.run(forward, recompute)
    assert steps == ["recomputed", "forward"] and turns.counts == WaitCounts(covered=2, total=3)


class WaitInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        offer_turn(in_backward=True)
        return grad


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit])
@pytest.mark.parametrize("side", ["first", "second"])
def test_the_first_error_ends_both(side, error):
    reached: list[str] = []
    x = torch.ones(3, requires_grad=True)

    def fail() -> None:
        offer_turn(in_backward=True)
        raise error("of the user")

    def wait() -> None:  # the engine of autograd is on the stack while this waits
        y = WaitInBackward.apply(WaitInBackward.apply(WaitInBackward.apply(x)))
        try:
            y.sum().backward()
        finally:
            reached.append("end")

    with take_turns() as turns:
        with pytest.raises(error, match="of the user") as found:
            turns.run(*((fail, wait) if side == "first" else (wait, fail)))
        assert reached == ["end"] and "fail" in [entry.name for entry in found.traceback]
        assert x.grad is None
        log = Log()
        turns.run(log.make("f", 1), log.make("b", 1))  # the next pair works
        assert log.steps == ["f0", "b0", "f1", "b1"]


def test_an_interrupt_while_the_other_one_runs_ends_both():
    ended: list[str] = []

    def compute() -> None:
        signal.raise_signal(signal.SIGINT)  # reaches the first thread, which waits
        time.sleep(0.2)
        try:
            offer_turn(in_backward=True)
        finally:
            ended.append("second")

    for first in (offer_turn, lambda: None):  # waits for its turn, or has ended
        ended.clear()
        with take_turns() as turns, pytest.raises(KeyboardInterrupt):
            turns.run(first, compute)
        assert ended == ["second"]


def test_a_backward_inside_of_the_first_raises_instead_of_a_deadlock(monkeypatch):
    """On a GPU the thread of autograd that the first one needs is the one that waits for its turn."""
    monkeypatch.setattr(turn_taking, "_PATIENCE", 0.05)
    is_busy = threading.Lock()  # as autograd's thread; no Python frame waits for it

    def _engine_run_backward() -> None:
        assert is_busy.acquire(timeout=30)

    def forward() -> None:
        offer_turn()
        _engine_run_backward()

    def backward() -> None:
        errors: list[BaseException] = []
        is_busy.acquire()

        def run_node() -> None:
            with mock.patch.object(torch._C, "_current_graph_task_id", lambda: 0):
                try:
                    offer_turn(in_backward=True)
                except BaseException as error:
                    errors.append(error)
                finally:
                    is_busy.release()

        thread = threading.Thread(target=run_node)
        thread.start()
        thread.join()
        if errors:
            raise errors[0]

    with take_turns() as turns, pytest.raises(InvalidInput, match="overlaps_exchanges = False"):
        turns.run(forward, backward)


def test_a_second_step_at_the_same_time_raises():
    with take_turns():
        with pytest.raises(MoefxError, match="one step after the other"), take_turns():
            pass
        assert find_turns() is not None


def test_an_interrupt_at_any_line_leaves_no_turns():
    """Interrupt the first function's thread at each line that it runs in `turn_taking`. The next step runs.

    Leave out the line that ends `take_turns`: Python interrupts at calls and loops, and this line has neither.
    """
    last_line = inspect.getsource(turn_taking).rstrip().count("\n") + 1

    def run_step(line: int) -> bool:
        """Return whether the step ended before this line."""
        counter = iter(range(line, -1, -1))

        def interrupt(frame: Any, event: str, _: Any) -> Any:
            if frame.f_code.co_filename != turn_taking.__file__:
                return None
            if event == "line" and frame.f_lineno != last_line and next(counter, None) == 0:
                raise KeyboardInterrupt
            return interrupt

        sys.settrace(interrupt)
        try:
            with take_turns() as turns:
                turns.run(offer_turn, offer_turn)
        except KeyboardInterrupt:
            return False
        finally:
            sys.settrace(None)
        return True

    line = 0
    while not run_step(line):
        log = Log()
        with take_turns() as turns:
            turns.run(log.make("f", 1), log.make("b", 1))
        assert len(log.steps) == 4 and turns.counts.total == 2
        line += 1
    assert line > 50


def test_the_second_runs_in_its_context():
    seen: list[str] = []

    @contextlib.contextmanager
    def context() -> Any:
        seen.append("enter")
        with record_function("x"):
            yield
        seen.append("exit")

    with take_turns() as turns:
        turns.run(lambda: None, lambda: seen.append("run"), thread_context=context)
    assert seen == ["enter", "run", "exit"]
