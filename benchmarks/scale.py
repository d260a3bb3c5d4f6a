"""Measure moefx over 1, 2, 4 and 8 GPUs of one host, row by row.

    python benchmarks/scale.py [--rows 'layer/*' 3 ...] [--gpus 8] [--minutes 30] [--out FILE] [--list]
    python benchmarks/scale.py --dry-run --gpus 4       every row tiny on the CPU, to test this script
    python benchmarks/scale.py --report FILE            tables, targets and a page of plots

| part | rows |
|---|---|
| 1 | one layer, weak scaling: every dispatch, eager and captured: ms, efficiency, bytes sent, hidden ms |
| 2 | SSMB at TP 1, 2 and 4 against recomputation: memory, ms, bytes of the gather |
| 3 | 12 layers of Qwen3-30B-A3B in all layouts: tokens a second, peak, MFU, bubble, prediction; a fixed batch |
| 4 | layers of other libraries |
| 5 | a layer whose tokens choose experts by Zipf's law |
| 6 | 1000 exchanges of each size; a late rank |
| 7 | a rank that is killed inside of an exchange |

A row runs in processes of its own with a limit of 8 minutes, so a dead rank or a lack of memory ends that row only.
Rows in the file of results are skipped: a run that was stopped goes on with the next row. `--retry` runs those again
that failed. Rows for more GPUs than there are do not run, and are named. Run it from any folder; nothing is downloaded.
"""

from __future__ import annotations

import argparse
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).parents[1])  # instead of this folder

from benchmarks.scaling.launcher import measure_seconds, run_row
from benchmarks.scaling.results_file import DONE, ROOT, Record, ResultsFile, read_environment
from benchmarks.scaling.rows import ScalingRow, build_rows

LIMIT = 480.0  # seconds of a row
_LEAST = 30.0  # seconds in which a row can be worth a start


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", nargs="+", default=[], metavar="ROW", help="names with * and ?, or numbers of parts")
    parser.add_argument("--gpus", type=int, default=None, help="the most GPUs (default: all); processes of a dry run")
    parser.add_argument("--exactly", action="store_true", help="rows for this number of GPUs only")
    parser.add_argument("--out", type=Path, default=None, help="file of results, to which rows are added")
    parser.add_argument("--minutes", type=float, default=None, help="end after so long; a row in progress runs again")
    parser.add_argument("--limit", type=float, default=LIMIT, metavar="S", help=f"seconds of a row (default: {LIMIT})")
    parser.add_argument("--retry", action="store_true", help="also run rows that failed before")
    parser.add_argument("--dry-run", action="store_true", help="tiny sizes on the CPU; the figures mean nothing")
    parser.add_argument("--logs", type=Path, default=None, help="folder for the outputs of rows (default: temporary)")
    parser.add_argument("--list", action="store_true", help="print the rows, and run nothing")
    parser.add_argument("--report", type=Path, metavar="FILE", help="report results, and run nothing")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Return 0 if every selected row for the GPUs here is done."""
    options = parse_arguments(argv)
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by SIGTERM"))  # which ends the row's processes, too
    if options.report:
        from benchmarks.scaling.page import write_page

        return write_page(options.report)
    rows = [row for row in build_rows(options.dry_run) if row.is_selected(options.rows)]
    if not rows:
        print(f"no row fits {' '.join(options.rows)}: --list prints them")
        return 2
    if options.list:
        for row in rows:
            print(f"{row.part} {row.gpus} GPUs  {row.name:40} {row.module} {' '.join(row.arguments)}")
        return 0
    gpus = options.gpus or (4 if options.dry_run else count_gpus())
    fits = [row for row in rows if row.gpus == gpus or (row.gpus < gpus and not options.exactly)]
    if absent := [row.name for row in rows if row.gpus > gpus]:
        print(f"skipped, for more than the {gpus} GPUs here: {' '.join(absent)}", flush=True)
    if not fits:
        return 1
    return run_rows(fits, options, options.out or choose_file(gpus, options.dry_run))


def run_rows(rows: Sequence[ScalingRow], options: argparse.Namespace, out: Path) -> int:
    """Run rows that have no results yet, and append theirs to the file after each."""
    file = ResultsFile(out, options.dry_run)
    logs = options.logs or Path(tempfile.mkdtemp(prefix="scale_"))
    logs.mkdir(parents=True, exist_ok=True)
    print(f"results in {out}, outputs of rows in {logs}", flush=True)
    environment = read_environment()
    end = time.monotonic() + 60 * options.minutes if options.minutes else float("inf")
    for number, row in enumerate(rows, 1):
        label, before = f"[{number}/{len(rows)}] {row.name}", file.find(row.name)
        if before and (before.status == DONE or not options.retry):
            print(f"{label}: {before.status} before", flush=True)
            continue
        left = end - time.monotonic()
        if left < _LEAST:
            print(f"{label} and all later rows: no time left", flush=True)
            break
        start = time.monotonic()
        log = logs / f"{row.name.replace('/', '_').replace(':', '_')}.txt"
        status, error, results = run_row(row, min(options.limit, left), log, options.dry_run)
        if status != DONE and time.monotonic() >= end:
            print(f"{label}: no time left, not recorded", flush=True)
            break
        seconds = measure_seconds(start)
        file.append(
            Record(row.name, row.part, row.gpus, options.dry_run, status, seconds, error, tuple(results), environment)
        )
        print(f"{label}: {status} after {seconds} s, {len(results)} results {error[:300]}", flush=True)
    return int(any((record := file.find(row.name)) is None or record.status != DONE for row in rows))


def count_gpus() -> int:
    import torch

    if not torch.cuda.device_count():
        raise SystemExit("no GPU here; --dry-run tests this script on the CPU")
    return torch.cuda.device_count()


def choose_file(gpus: int, is_dry: bool) -> Path:
    if is_dry:
        return Path(tempfile.gettempdir()) / f"scale_dry_{gpus}.jsonl"
    return ROOT / "benchmarks" / "results" / f"scale_x{gpus}.jsonl"


if __name__ == "__main__":
    raise SystemExit(main())
