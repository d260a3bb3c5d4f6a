"""A worker thread with a deep stack for captures and proofs.

An interrupt (Ctrl-C, or an exception of a signal handler) reaches the waiting caller, never the worker while it
restores the user's state. The caller asks the worker to stop, waits for it, and raises.
"""

from __future__ import annotations

import contextlib
import contextvars
import ctypes
import functools
import gc
import math
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from ...util.compile_lock import compile_lock
from ...util.default_device import neutral_device
from ...util.gpu_streams import find_accelerator_stream
from . import device_autocast

R = TypeVar("R")
_PATIENCE = 10.0  # seconds until an interrupted worker that reaches no op or proof step is forced to stop
_PULSE = 0.05  # seconds
_DEPTH = 200_000  # nested calls
_OBJECTS = 200_000  # new objects between two garbage collections


class Interrupted(BaseException):
    """Raised in the worker when its caller was interrupted."""


def run_in_worker(fn: Callable[[], R]) -> R:
    """Run `fn` in a worker thread and return its result.

    The worker has the autocast, accelerator stream and context variables of the caller, gradients enabled, and no
    default device (`torch.set_default_device`). A call inside the worker runs `fn` directly.
    """
    if _current.get() is not None:
        return fn()
    _make_device_guard()
    return _Work(fn).result()


def run_proof(fn: Callable[[], R], device: str, autocast: torch.dtype | None = None) -> R:
    """Run a proof in a worker: one at a time in the process, without the user's default device and autocast.

    Args:
        device: the device type of the block.
        autocast: the dtype of the autocast on `device` under which the block is captured; None: off.
    """
    with (
        compile_lock(),
        neutral_device(),
        device_autocast.use_device_autocast(device, autocast),
        torch.enable_grad(),
    ):
        return run_in_worker(fn)


@functools.cache
def _make_device_guard() -> None:
    """Make torch create its device guard in the caller's thread, not in a worker.

    Builds for CUDA on a machine without a GPU keep the guard of the first thread that enters a fake mode. In torch 2.11
    the next fake mode crashes the process if that thread has ended.
    """
    with FakeTensorMode():
        pass


def check_interrupt() -> None:
    """Raise `Interrupted` in a worker whose caller was interrupted. Call this often, between consistent states."""
    work = _current.get()
    if work is not None and work.is_cancelled:
        raise Interrupted


class _Work:
    def __init__(self, fn: Callable[[], Any]):
        self.fn = fn
        self.outcome: tuple[bool, Any] = False, None
        self.gate, self.running = threading.Lock(), threading.Lock()
        self.has_begun = self.has_ended = self.is_cancelled = False
        self.thread = threading.Thread(target=contextvars.copy_context().run, args=(self._run,), name="moefx")
        self.state = device_autocast.get_device_state(), find_accelerator_stream()

    def result(self) -> Any:
        self.running.acquire()  # after an interrupt `join` reports that the thread has ended
        try:
            _start_with_deep_stack(self.thread)
            self._wait()
            self.thread.join(_PATIENCE)  # its frames keep the worker's objects alive
        except BaseException:
            self._stop()
            raise
        (succeeded, value), self.outcome = self.outcome, (False, None)
        if not succeeded:
            raise value
        return value

    def _run(self) -> None:
        with self.gate:
            if self.is_cancelled:
                return
            self.has_begun = True
        _current.set(self)
        casting, stream = self.state
        try:
            if stream is not None:
                torch.accelerator.set_stream(stream)
            with _ProcessLimits.raised(), device_autocast.use_device_autocast(*casting), torch.enable_grad():
                self.outcome = True, self.fn()
        except BaseException as error:
            self.outcome = False, error
        finally:
            del self.fn  # the context of a thread is a cycle, and would keep the model until Python collects it
            self.has_ended = True
            self.running.release()

    def _wait(self, seconds: float = math.inf) -> bool:
        """Return whether it ends within this time. Poll, as an interrupt from another thread does not end a wait."""
        deadline = time.monotonic() + seconds
        while not self.has_ended and time.monotonic() < deadline:
            self.running.acquire(timeout=_PULSE)
        return self.has_ended

    def _stop(self) -> None:
        """Ask the worker to stop, and wait for it. A second interrupt forces it, a third one abandons it."""
        interrupts = 0
        while interrupts < 2:
            try:
                with self.gate:
                    self.is_cancelled = True
                while self.has_begun and self.thread.is_alive() and not self._wait(_PATIENCE):
                    self._force()
                return
            except BaseException:
                interrupts += 1
                self._force()

    def _force(self) -> None:
        ident = ctypes.c_ulong(self.thread.ident or 0)
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ident, ctypes.py_object(Interrupted))


_current: contextvars.ContextVar[_Work | None] = contextvars.ContextVar("worker", default=None)


def _start_with_deep_stack(thread: threading.Thread) -> None:
    with _ProcessLimits.lock:  # the stack size applies to all threads that start now
        before = threading.stack_size()
        try:
            threading.stack_size(512 << 20)
            thread.start()
        finally:
            threading.stack_size(before)


class _ProcessLimits:
    """Limits of the process while any worker runs; the last one restores them.

    Proofs recurse deeply. They keep millions of small objects, which the garbage collector need not visit often.
    """

    lock = threading.Lock()
    users = 0
    before: tuple[int, tuple[int, int, int]] = 0, (0, 0, 0)

    @classmethod
    @contextlib.contextmanager
    def raised(cls) -> Iterator[None]:
        with cls.lock:
            if not cls.users:
                depth, (first, *others) = cls.before = sys.getrecursionlimit(), gc.get_threshold()
                sys.setrecursionlimit(max(depth, _DEPTH))
                if first:  # unless the program has switched the collector off
                    gc.set_threshold(max(first, _OBJECTS), *others)
            cls.users += 1
        try:
            yield
        finally:
            with cls.lock:
                cls.users -= 1
                if not cls.users:
                    sys.setrecursionlimit(cls.before[0])
                    gc.set_threshold(*cls.before[1])


__all__ = ["Interrupted", "check_interrupt", "run_in_worker"]
