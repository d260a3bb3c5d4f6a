"""Time limits of tests that scale with the speed of the machine."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

USUAL = 0.06  # seconds of the loop on a usual core


@contextlib.contextmanager
def limit_time(seconds: float) -> Iterator[None]:
    """Fail if the block takes longer than `seconds` on a usual core; a slower core gets proportionally more time."""
    before, begin = _time_loop(), time.process_time()
    yield
    seconds_used = time.process_time() - begin
    slower = max(1.0, before / USUAL, _time_loop() / USUAL)
    assert seconds_used < seconds * slower, (
        f"took {seconds_used:.1f} s, expected {seconds} s times {slower:.1f}, the slowdown of this core"
    )


def _time_loop() -> float:
    begin = time.process_time()
    sum(i * i % 7 for i in range(1_000_000))
    return time.process_time() - begin
