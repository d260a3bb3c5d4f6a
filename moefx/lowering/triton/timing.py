"""Time work on a GPU: with events, a flushed L2 cache before each repetition, and the median."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch

_FLUSH_BYTES = 256 * 2**20


def measure_milliseconds(work: Callable[[], object], repeats: int = 9, warmup: int = 2) -> float:
    """Median milliseconds of `work` on the current device and stream."""
    flush = torch.empty(_FLUSH_BYTES, dtype=torch.int8, device="cuda")
    for _ in range(warmup):
        work()
    torch.cuda.synchronize()
    events = []
    for _ in range(repeats):
        flush.zero_()
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        work()
        end.record()
        events.append((begin, end))
    torch.cuda.synchronize()
    return statistics.median(begin.elapsed_time(end) for begin, end in events)


def settle_clock(work: Callable[[], object], seconds: float = 0.3) -> None:
    """Repeat `work` for some seconds, until the GPU has the clock of steady work."""
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        work()
        torch.cuda.synchronize()
