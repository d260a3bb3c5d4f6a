"""Report on standard error what a long call does, so that nobody takes it for dead."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Iterator

QUIET_SECONDS = 5.0
_step = ""


def announce(step: str) -> None:
    """Name the step that begins. `compile_lock` lets one thread at a time compile."""
    global _step
    _step = step


@contextlib.contextmanager
def report_progress(call: str) -> Iterator[None]:
    """Print a line when a call takes longer than 5 seconds, and again whenever its time has doubled. Over several
    ranks, only rank 0 prints.

    Args:
        call: name of the call, such as "moefx.compile".
    """
    announce("")
    finished, started = threading.Event(), time.perf_counter()

    def print_lines() -> None:
        wait = QUIET_SECONDS
        while not finished.wait(wait):
            wait = seconds = time.perf_counter() - started
            if sys.stderr is not None:
                print(f"{call}: {seconds:.0f} s so far, {_step}".rstrip(", "), file=sys.stderr, flush=True)

    printer = threading.Thread(target=print_lines, name="moefx progress", daemon=True)
    if os.environ.get("RANK", "0") == "0":
        printer.start()
    try:
        yield
    finally:
        finished.set()
        if printer.is_alive():
            printer.join()


__all__ = ["announce", "report_progress"]
