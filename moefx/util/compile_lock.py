"""Let one thread at a time compile: a proof changes providers, random state and classes of the whole process."""

from __future__ import annotations

import contextlib
import contextvars
import logging
import threading
from collections.abc import Iterator

_log = logging.getLogger(__name__)
_lock = threading.Lock()
_is_held_here = contextvars.ContextVar("compile_lock", default=False)  # inherited by threads of the holder
_MAX_WAIT = 600.0  # seconds; bounds a deadlock with a thread that the holder waits for


@contextlib.contextmanager
def compile_lock() -> Iterator[None]:
    """Wait until no other thread compiles, at most ten minutes. Reentrant."""
    if holds_compile_lock():
        yield
        return
    is_locked = _lock.acquire(timeout=_MAX_WAIT)
    if not is_locked:
        _log.warning("another thread has compiled for %.0f s: going on beside it", _MAX_WAIT)
    token = _is_held_here.set(True)
    try:
        yield
    finally:
        _is_held_here.reset(token)
        if is_locked:
            _lock.release()


def holds_compile_lock() -> bool:
    """Return whether this thread, or the thread that started it, compiles."""
    return _is_held_here.get()
