"""One thread at a time lifts blocks: a proof forces providers, draws random numbers and watches classes, of which there
is one for the whole process."""

from __future__ import annotations

import contextlib
import contextvars
import threading
from collections.abc import Iterator

_lock = threading.Lock()
_is_here = contextvars.ContextVar("lifting", default=False)  # threads that a lift starts take it over
_PATIENCE = 600.0  # seconds; a thread that the lift itself waits for must not wait for ever


@contextlib.contextmanager
def lifting() -> Iterator[None]:
    """Waits until nobody else does; may be nested."""
    if is_here():
        yield
        return
    has_lock = _lock.acquire(timeout=_PATIENCE)
    token = _is_here.set(True)
    try:
        yield
    finally:
        _is_here.reset(token)
        if has_lock:
            _lock.release()


def is_here() -> bool:
    """Whether it is this thread, or the one that started it for this, that lifts."""
    return _is_here.get()
