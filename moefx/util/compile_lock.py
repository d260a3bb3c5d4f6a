"""Let one thread at a time compile: a proof changes providers, random state and classes of the whole process."""

from __future__ import annotations

import contextlib
import contextvars
import threading
from collections.abc import Iterator

from ..errors import CompileTimeout

_lock = threading.Lock()
_is_held_here = contextvars.ContextVar("compile_lock", default=False)  # inherited by threads of the holder
_holder = ""  # name of the thread that holds the lock
_MAX_WAIT = 600.0  # seconds; bounds a deadlock with a thread that the holder waits for


@contextlib.contextmanager
def compile_lock() -> Iterator[None]:
    """Wait until no other thread compiles, at most ten minutes. Reentrant.

    Raises:
        CompileTimeout: another thread still compiles after that time.
    """
    global _holder
    if holds_compile_lock():
        yield
        return
    if not _lock.acquire(timeout=_MAX_WAIT):
        raise CompileTimeout(
            f"moefx compiles in one thread at a time, and the thread {_holder!r} has been at it while "
            f"{threading.current_thread().name!r} waited for {_MAX_WAIT:g} s. If it waits for this thread, compile the "
            "model and call it once before starting other threads; otherwise repeat this call when it is done"
        )
    token = _is_held_here.set(True)
    try:
        _holder = threading.current_thread().name
        yield
    finally:
        _is_held_here.reset(token)
        _lock.release()


def holds_compile_lock() -> bool:
    """Return whether this thread, or the thread that started it, compiles."""
    return _is_held_here.get()
