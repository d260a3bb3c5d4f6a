"""Time limits of tests, on a machine of any speed."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

USUAL = 0.06  # seconds that a usual core takes for the loop


@contextlib.contextmanager
def within(seconds: float) -> Iterator[None]:
    """So many seconds of a usual core are enough for the block: of one that is slower now, accordingly more."""
    before, begin = _loop(), time.process_time()
    yield
    taken = time.process_time() - begin
    slower = max(1.0, before / USUAL, _loop() / USUAL)
    assert taken < seconds * slower, (
        f"took {taken:.1f} s, expected {seconds} s times {slower:.1f}, as slow a core is this"
    )


def _loop() -> float:
    begin = time.process_time()
    sum(i * i % 7 for i in range(1_000_000))
    return time.process_time() - begin
