"""Run one row in processes of its own, within a time limit."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from .results_file import DONE, FAILED, ROOT, TIMED_OUT
from .rows import ScalingRow

_GRACE = 20.0  # seconds that torchrun has to end its ranks
_ERROR = re.compile(
    r"^(?:\[rank\d+\]: *)?((?:[\w.]*(?:Error|Exception|Lost|Interrupt)|moefx\.errors\.\w+)\b.*|bench .*)"
)


def run_row(row: ScalingRow, limit: float, log: Path, is_dry: bool) -> tuple[str, str, list[dict[str, Any]]]:
    """Run a row, and write the output of its processes to a file.

    Args:
        limit: seconds.
        is_dry: whether ranks are forks of one process, which starts faster than torchrun.

    Returns:
        The status, the error, and the results, also those before a failure.
    """
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "results.jsonl"
        with log.open("w") as output:
            process = subprocess.Popen(
                build_command(row, out, is_dry),
                cwd=ROOT,
                env=build_environment(is_dry),
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            try:
                code = process.wait(limit)
            except subprocess.TimeoutExpired:
                code = None
            finally:
                end_processes(process)
        results = read_results(out)
    if code == 0 and results:
        return DONE, "", results
    text = log.read_text(errors="replace")
    if code is None:
        return TIMED_OUT, f"not done after {limit:.0f} s. The last lines: {_cut_end(text)}", results
    return FAILED, find_error(text) if code else "no results", results


def build_command(row: ScalingRow, out: Path, is_dry: bool) -> list[str]:
    command = [sys.executable, "-m"]
    if not row.starts_ranks and is_dry:
        command += ["benchmarks.scaling.forked_ranks", str(row.gpus)]
    elif not row.starts_ranks:
        command += ["torch.distributed.run", "--standalone", "--nproc-per-node", str(row.gpus), "-m"]
    return [*command, row.module, *row.arguments, "--out", str(out)]


def build_environment(is_dry: bool) -> dict[str, str]:
    """Return the environment of a row. A dry run sees no GPU: ranks that are forks could not use it."""
    hidden = {"CUDA_VISIBLE_DEVICES": ""} if is_dry else {}
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH", ""))))
    return {"OMP_NUM_THREADS": "1"} | os.environ | {"PYTHONPATH": path, "PYTHONUNBUFFERED": "1"} | hidden


def read_results(out: Path) -> list[dict[str, Any]]:
    """Read what the processes appended, without their environment and without a line that was being written."""
    lines = out.read_text().splitlines(keepends=True) if out.exists() else []
    found = [json.loads(line) for line in lines if line.endswith("\n")]
    return [line for line in found if "environment" not in line]


def find_error(text: str) -> str:
    """Find the errors of the ranks in their output; the last lines if there are none."""
    found = [match[1] for line in text.splitlines() if (match := _ERROR.match(line))]
    found = [line for line in dict.fromkeys(found) if "ChildFailedError" not in line]
    return "; ".join(line[:1000] for line in found[:3]) or _cut_end(text)


def _cut_end(text: str) -> str:
    return text.strip()[-1500:] or "(no output)"


def end_processes(process: subprocess.Popen[Any]) -> None:
    """End a process and its descendants, by their ids, and all of its session, if it has ended itself."""
    if process.poll() is not None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        return
    descendants = list_descendants(process.pid)
    process.send_signal(signal.SIGTERM)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(_GRACE)
    for descendant in filter(is_running, descendants.items()):
        with contextlib.suppress(ProcessLookupError):
            os.kill(descendant[0], signal.SIGKILL)
    process.kill()
    process.wait()


def list_descendants(pid: int) -> dict[int, str]:
    """List the processes below a process, each with the time of its start."""
    children: dict[int, list[int]] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError, IndexError):
            parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            children.setdefault(parent, []).append(int(folder.name))
    found, left = {}, [pid]
    while left:
        below = children.get(left.pop(), [])
        found |= {child: _read_start(child) for child in below}
        left += below
    return found


def is_running(descendant: tuple[int, str]) -> bool:
    """Return whether a process of `list_descendants` runs: another one may have its id by now."""
    pid, started = descendant
    return bool(started) and _read_start(pid) == started


def _read_start(pid: int) -> str:
    """Return the time of a process's start; "" if it has ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if fields[0] == "Z" else fields[19]


def measure_seconds(start: float) -> float:
    return round(time.monotonic() - start, 1)
