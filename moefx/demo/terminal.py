"""Progress and charts for a terminal, in plain characters, readable in a log file as well."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Sequence


class Progress:
    """One line that is rewritten in place on a terminal; elsewhere (a pipe, CI) about ten lines in all."""

    def __init__(self, label: str, total: int):
        self.label, self.total = label, total
        self.started = time.perf_counter()
        self.live = sys.stdout.isatty()
        self.last_shown = 0

    def update(self, done: int, note: str = "") -> None:
        last = done >= self.total
        if not self.live and not last and done - self.last_shown < max(self.total // 10, 1):
            return
        self.last_shown = done
        bar_length = 20 * done // max(self.total, 1)
        seconds = time.perf_counter() - self.started
        line = f"  {self.label} [{'#' * bar_length:<20}] {done}/{self.total}  {seconds:.0f} s  {note}".rstrip()
        if self.live:  # "\033[K" erases the rest of a longer line
            print(f"\r{line}\033[K", end="\n" if last else "", flush=True)
        else:
            print(line, flush=True)


def heading(number: int, total: int, text: str) -> None:
    print(f"\n[{number}/{total}] {text}\n", flush=True)


def chart(
    first: Sequence[float],
    second: Sequence[float],
    *,
    width: int = 64,
    height: int = 12,
    names=("first", "second"),
) -> str:
    """Draw two curves over the same steps: `1` and `2` where they differ, `o` where they fall on one cell."""
    values = [v for v in (*first, *second) if math.isfinite(v)]
    if not values:
        return "(no finite values)"
    low, high = min(values), max(values)
    span = (high - low) or 1.0
    cells = [[" "] * width for _ in range(height)]
    for mark, curve in (("1", first), ("2", second)):
        for column in range(width):
            value = curve[round(column * (len(curve) - 1) / max(width - 1, 1))]
            if not math.isfinite(value):
                continue
            row = round((high - value) / span * (height - 1))
            cells[row][column] = mark if cells[row][column] in (" ", mark) else "o"
    lines = []
    for number, row in enumerate(cells):
        value = high - span * number / max(height - 1, 1)
        lines.append(f"  {value:8.3f} |{''.join(row).rstrip()}")
    lines.append(f"  {'':8} +{'-' * width}")
    lines.append(f"  {'':8}  step 0{f'step {len(first) - 1}':>{width - 6}}")
    lines.append(f"  o both on the same cell, 1 {names[0]} only, 2 {names[1]} only")
    return "\n".join(lines)


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Format a table with a left-aligned first column and right-aligned numbers."""
    columns = list(zip(header, *rows, strict=True))
    widths = [max(map(len, column)) for column in columns]
    lines = []
    for row in (header, *rows):
        cells = [row[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(row[1:], widths[1:], strict=True))]
        lines.append("  " + "  ".join(cells).rstrip())
    return "\n".join(lines)
