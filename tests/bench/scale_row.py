"""A row for the tests of `benchmarks/scale.py`: appends one result, then "works", "fails" or "hangs"."""

from __future__ import annotations

import sys
import time
from pathlib import Path

from benchmarks.scaling.rows import ScalingRow


def make_row(name: str, how: str, gpus: int = 1) -> ScalingRow:
    return ScalingRow(name, 1, gpus, "tests.bench.scale_row", (how,), starts_ranks=True)


if __name__ == "__main__":
    how, _, out = sys.argv[1:]
    with Path(out).open("a") as lines:
        print('{"environment": {}}\n{"ms": 1.5}', file=lines, flush=True)
    if how == "fails":
        raise ValueError("out of luck")
    if how == "hangs":
        print("waiting", flush=True)
        time.sleep(100)
