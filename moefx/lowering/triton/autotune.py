"""Configurations found out on this machine, for what no table has: timed once, then kept on disk.

A kernel is timed in the call that needs it, on that call's tensors and routing, and writes what it would write anyway.
`MOEFX_AUTOTUNE` says how many seconds a process may spend on this: 60 if it is not set, none under `CI`. What was
found is kept in `MOEFX_CACHE` (~/.cache/moefx), in one file for each kind of GPU, version of Triton and of the kernels.
"""

from __future__ import annotations

import functools
import hashlib
import logging
import math
import os
import re
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import triton
from triton.errors import TritonError

from ...errors import InvalidPlan
from .launch_replay import pause_recording
from .tile_configs import Config
from .timing import milliseconds, settle

_log = logging.getLogger(__name__)
_SECONDS = 60.0
_MIN_FLOPS = 2e9  # of a GEMM: smaller ones take less time than to launch them
_ROUNDS = 5
_TOO_LARGE = ("too many resources requested", "PassManager::run failed", "out of resource")

tuning_lock = threading.RLock()  # of the thread that tunes; the others wait for what it finds
_spent = 0.0


def seconds_left() -> float:
    return _allowed(os.environ.get("MOEFX_AUTOTUNE", ""), os.environ.get("CI", "")) - _spent


@functools.cache
def _allowed(setting: str, ci: str) -> float:
    if not setting:
        return _SECONDS if ci.lower() in ("", "0", "false") else 0.0
    try:
        seconds = float(setting)
    except ValueError:
        seconds = math.nan
    if math.isnan(seconds):
        raise InvalidPlan(f"MOEFX_AUTOTUNE={setting}: expected seconds, 0 for no tuning")
    return seconds


def can_tune(shape: Sequence[int], num_experts: int) -> bool:
    """Whether there is time left, and a GEMM of this shape (see `tuning.choice`) is worth it and may be timed now."""
    columns, inner, rows = shape
    if seconds_left() <= 0 or 2.0 * columns * inner * rows * num_experts < _MIN_FLOPS:
        return False
    return not torch.cuda.is_current_stream_capturing()


def find_fastest(
    name: str, candidates: Sequence[Config], trial: Callable[[Config], object]
) -> tuple[Config | None, bool]:
    """The fastest candidate, None where none fits; and whether all were tried in the time that is left.

    The first one is tried in any case: to run out of time is no worse than not to tune.
    """
    global _spent
    with tuning_lock, pause_recording():
        if not _spent:  # the user waits for the first time
            what = "timing GPU kernels for shapes that are not in the tuning table, for up to %.0f s (MOEFX_AUTOTUNE)"
            _log.warning(what, seconds_left())
        _log.info("tuning %s: %d configurations, %.0f s left", name, len(candidates), seconds_left())
        begin = time.perf_counter()
        try:
            times, is_complete = time_candidates(candidates, trial, rounds=_ROUNDS, repeats=1, seconds=seconds_left())
        finally:
            took = time.perf_counter() - begin
            _spent += took
        best = min(times, key=lambda cut: statistics.median(times[cut]), default=None)
        _log.info("tuning %s: %s in %.1f s", name, best and best.text, took)
    return best, is_complete


def time_candidates(
    candidates: Sequence[Config],
    trial: Callable[[Config], object],
    *,
    rounds: int,
    repeats: int,
    seconds: float,
    settled: float = 0.0,
) -> tuple[dict[Config, list[float]], bool]:
    """Milliseconds of each candidate that fits, `rounds` times; and whether all were tried in this many seconds.

    Args:
        settled: seconds to work before each measurement: steady work lowers the clock, of some candidates more.
    """
    deadline, fit, is_complete = time.perf_counter() + seconds, [], True
    for cut in candidates:
        if fit and time.perf_counter() > deadline:
            is_complete = False
            break
        try:
            trial(cut)  # compiles it
            fit.append(cut)
        except Exception as error:
            if not _does_not_fit(error):
                raise
            _log.info("%s does not fit: %s", cut.text, str(error)[:200])
    times: dict[Config, list[float]] = {cut: [] for cut in fit}
    # In turns: a GPU under load changes its clock by more than what tells two candidates apart.
    for cut in [cut for _ in range(rounds) for cut in fit]:
        try:
            settle(functools.partial(trial, cut), settled)
            times[cut].append(milliseconds(functools.partial(trial, cut), repeats=repeats, warmup=1))
        except torch.cuda.OutOfMemoryError:  # the call may well have enough; only timing has not
            times.pop(cut, None)
            return {cut: found for cut, found in times.items() if found}, False
    return times, is_complete


def _does_not_fit(error: Exception) -> bool:
    """Whether a configuration fails by its size: too much shared memory, say. Errors of the driver and of LLVM are
    plain RuntimeErrors; after most of those of the driver nothing else runs either."""
    if isinstance(error, (TritonError, torch.cuda.OutOfMemoryError)):
        return True
    return type(error) is RuntimeError and any(text in str(error) for text in _TOO_LARGE)


# -- on disk
# -------------------------------------------------------------------------------------------


def cache_directory() -> Path | None:
    """Where configurations are kept; None where there is no place."""
    if home := os.environ.get("MOEFX_CACHE"):
        return Path(home)
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser(), "moefx")
    except RuntimeError:  # a user without a home
        return None


def cache_file(gpu: str) -> Path | None:
    """Where the configurations found for a kind of GPU are kept."""
    place = cache_directory()
    return place and place / f"tuning-{re.sub(r'[^0-9A-Za-z]+', '_', gpu)}-{_version()}.jsonl"


@functools.cache
def _version() -> str:
    """Of what the times depend on: Triton and this package's sources."""
    digest = hashlib.sha256(triton.__version__.encode())
    for file in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(file.read_bytes())
    return digest.hexdigest()[:12]


def read_cached_lines(gpu: str) -> list[str]:
    """The lines of the file."""
    file = cache_file(gpu)
    try:
        return [line for line in file.read_text(errors="replace").splitlines() if line] if file else []
    except OSError:
        return []


def append_cached_line(gpu: str, line: str) -> None:
    file = cache_file(gpu)
    if file is None:
        return
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        # In one write at the end of the file: other processes may be tuning too, and one may have been stopped.
        descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        try:
            os.write(descriptor, f"\n{line}\n".encode())
        finally:
            os.close(descriptor)
    except OSError as error:
        _log.warning("%s: what was tuned is not kept (%s); MOEFX_CACHE names another directory", file, error.strerror)
