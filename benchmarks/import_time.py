"""What `import moefx` adds to `import torch`: seconds, memory and modules, each time in a new process.

    python benchmarks/import_time.py [--repeats 7] [--json benchmarks/results/...]

The bar is 0.3 seconds. `import moefx` loads almost nothing: the compiler is loaded at the first use of a name, which
is measured as well. A first run that is not counted fills the caches of the file system and of bytecode.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

BAR = 0.3
SCRIPT = """
import json, resource, sys, time
def state():
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return time.perf_counter(), time.process_time(), peak, len(sys.modules)
states = [state()]
import torch
states.append(state())
import moefx
states.append(state())
moefx.compile
states.append(state())
print(json.dumps(states))
"""
STEPS = ("import torch", "import moefx", "first use of moefx")
FIELDS = ("seconds", "cpu_seconds", "mib", "modules")


def once() -> dict[str, list[float]]:
    """By step: what it added, in the order of FIELDS."""
    done = subprocess.run([sys.executable, "-c", SCRIPT], stdout=subprocess.PIPE, check=True)
    states = json.loads(done.stdout)
    return {
        step: [after - before for before, after in zip(*pair, strict=True)]
        for step, pair in zip(STEPS, pairwise(states), strict=True)
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--json", type=Path, help="write the results here, with the environment")
    args = parser.parse_args()
    once()
    runs = [once() for _ in range(args.repeats)]
    results: dict[str, Any] = {}
    for step in STEPS:
        columns = zip(*(run[step] for run in runs), strict=True)
        found = {field: list(column) for field, column in zip(FIELDS, columns, strict=True)}
        results[step] = {
            "median": {field: round(statistics.median(values), 3) for field, values in found.items()},
            "min": {field: round(min(values), 3) for field, values in found.items()},
        }
        median = results[step]["median"]
        print(
            f"{step:18}  {median['seconds']:.2f} s, {median['cpu_seconds']:.2f} s CPU, "
            f"{median['mib']:.0f} MiB, {median['modules']:.0f} modules (medians of {args.repeats})"
        )
    results["ok"] = results["import moefx"]["median"]["seconds"] < BAR
    print(f"bar for import moefx: {BAR} s, {'ok' if results['ok'] else 'OVER'}")
    if args.json:
        from environment import environment

        found = {"environment": environment(), "bar_seconds": BAR, "results": results}
        args.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
