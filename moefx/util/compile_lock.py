"""Let one thread at a time compile: a proof forces providers, draws random numbers and watches classes, all of which
belong to the whole process."""

from __future__ import annotations

import contextlib
import contextvars
import threading
from collections.abc import Iterator

_lock = threading.Lock()
_is_held_here = contextvars.ContextVar("compile_lock", default=False)  # threads that the holder starts inherit it
_MAX_WAIT = 600.0  # seconds: a thread that the holder itself waits for must not wait forever


@contextlib.contextmanager
def compile_lock() -> Iterator[None]:
    """Wait until no other thread compiles. The holder may enter it again."""
    if holds_compile_lock():
        yield
        return
    is_locked = _lock.acquire(timeout=_MAX_WAIT)
    token = _is_held_here.set(True)
    try:
        yield
    finally:
        _is_held_here.reset(token)
        if is_locked:
            _lock.release()


def holds_compile_lock() -> bool:
    """Whether this thread compiles, or was started by the one that does."""
    return _is_held_here.get()
