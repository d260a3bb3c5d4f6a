"""Autotune kernels for shapes that the tuning table does not cover, and cache the results on disk.

Only if `MOEFX_AUTOTUNE` asks for it, with the seconds that a process may spend: the first step waits for it. A kernel
is timed in the call that needs it, on that call's tensors and routing; each trial writes the correct result. Results
are cached in `MOEFX_CACHE` (~/.cache/moefx), in a file for each kind of GPU, version of Triton and version of the
sources of the kernels.
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
from .tile_configs import GemmConfig
from .timing import measure_milliseconds, settle_clock

_log = logging.getLogger(__name__)
_MIN_FLOPS = 2e9  # smaller GEMMs take less time than their launch
_ROUNDS = 5
_TOO_LARGE = ("too many resources requested", "PassManager::run failed", "out of resource")

tuning_lock = threading.RLock()  # held by the thread that tunes; other threads wait for its result
_spent = 0.0


def seconds_left() -> float:
    return _time_budget(os.environ.get("MOEFX_AUTOTUNE", "")) - _spent


@functools.cache
def _time_budget(setting: str) -> float:
    try:
        seconds = float(setting or 0)
    except ValueError:
        seconds = math.nan
    if math.isnan(seconds):
        raise InvalidPlan(f"MOEFX_AUTOTUNE={setting}: expected seconds, 0 for no tuning")
    return seconds


def can_tune(shape: Sequence[int], num_experts: int) -> bool:
    """Return whether a GEMM is worth tuning, may be timed now, and time is left.

    Args:
        shape: see `tuning.choose_config`.
    """
    columns, inner, rows = shape
    if seconds_left() <= 0 or 2.0 * columns * inner * rows * num_experts < _MIN_FLOPS:
        return False
    return not torch.cuda.is_current_stream_capturing()


def find_fastest(
    name: str, candidates: Sequence[GemmConfig], trial: Callable[[GemmConfig], object]
) -> tuple[GemmConfig | None, bool]:
    """Find the fastest candidate. Tries at least the first one, even without time.

    Returns:
        The fastest candidate, or None if none fits; and whether all were tried in time.
    """
    global _spent
    with tuning_lock, pause_recording():
        if not _spent:  # warn once: the user waits
            message = (
                "timing GPU kernels for shapes that are not in the tuning table, for up to %.0f s (MOEFX_AUTOTUNE)"
            )
            _log.warning(message, seconds_left())
        _log.info("tuning %s: %d configurations, %.0f s left", name, len(candidates), seconds_left())
        begin = time.perf_counter()
        try:
            times, is_complete = time_candidates(candidates, trial, rounds=_ROUNDS, repeats=1, seconds=seconds_left())
        finally:
            took = time.perf_counter() - begin
            _spent += took
        best = min(times, key=lambda tiles: statistics.median(times[tiles]), default=None)
        _log.info("tuning %s: %s in %.1f s", name, best and best.text, took)
    return best, is_complete


def time_candidates(
    candidates: Sequence[GemmConfig],
    trial: Callable[[GemmConfig], object],
    *,
    rounds: int,
    repeats: int,
    seconds: float,
    settle_seconds: float = 0.0,
) -> tuple[dict[GemmConfig, list[float]], bool]:
    """Time each candidate that fits, `rounds` times.

    Args:
        seconds: time limit for trying candidates.
        settle_seconds: seconds of work before each measurement: steady work lowers the clock, for some candidates more.

    Returns:
        Milliseconds of each candidate; and whether all candidates were tried in time.
    """
    deadline, fit, is_complete = time.perf_counter() + seconds, [], True
    for tiles in candidates:
        if fit and time.perf_counter() > deadline:
            is_complete = False
            break
        try:
            trial(tiles)  # compiles it
            fit.append(tiles)
        except Exception as error:
            if not _does_not_fit(error):
                raise
            _log.info("%s does not fit: %s", tiles.text, str(error)[:200])
    times: dict[GemmConfig, list[float]] = {tiles: [] for tiles in fit}
    # Alternate between candidates: a GPU's clock changes under load by more than they differ.
    for tiles in [tiles for _ in range(rounds) for tiles in fit]:
        try:
            settle_clock(functools.partial(trial, tiles), settle_seconds)
            times[tiles].append(measure_milliseconds(functools.partial(trial, tiles), repeats=repeats, warmup=1))
        except torch.cuda.OutOfMemoryError:  # timing needs more memory than the call itself
            times.pop(tiles, None)
            return {tiles: durations for tiles, durations in times.items() if durations}, False
    return times, is_complete


def _does_not_fit(error: Exception) -> bool:
    """Return whether a configuration is too large, for example for shared memory.

    Errors of the driver and of LLVM are plain RuntimeErrors. After most driver errors nothing else would run.
    """
    if isinstance(error, (TritonError, torch.cuda.OutOfMemoryError)):
        return True
    return type(error) is RuntimeError and any(text in str(error) for text in _TOO_LARGE)


# -- on disk


def cache_directory() -> Path | None:
    """Return the directory of the cache, or None if there is none."""
    if home := os.environ.get("MOEFX_CACHE"):
        return Path(home)
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser(), "moefx")
    except RuntimeError:  # a user without a home
        return None


def cache_file(gpu: str) -> Path | None:
    """Return the cache file for a kind of GPU, or None without a directory."""
    directory = cache_directory()
    return directory and directory / f"tuning-{re.sub(r'[^0-9A-Za-z]+', '_', gpu)}-{_source_hash()}.jsonl"


@functools.cache
def _source_hash() -> str:
    """Return a hash of Triton's version and of the sources that make the kernels: `lowering` and `lowering/triton`.

    Times also depend on the driver and on torch, which results may outlive.
    """
    digest, folder = hashlib.sha256(triton.__version__.encode()), Path(__file__).parent
    for file in (*sorted(folder.parent.glob("*.py")), *sorted(folder.glob("*.py"))):
        digest.update(file.read_bytes())
    return digest.hexdigest()[:12]


def read_cached_lines(gpu: str) -> list[str]:
    """Return the lines of the cache file; none if it cannot be read."""
    file = cache_file(gpu)
    try:
        return [line for line in file.read_text(errors="replace").splitlines() if line] if file else []
    except OSError:
        return []


def append_cached_line(gpu: str, line: str) -> None:
    """Append a line to the cache file. Warns if it cannot be written."""
    file = cache_file(gpu)
    if file is None:
        return
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        # A single write in append mode: other processes may write too, and a killed one may have left half a line.
        descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        try:
            os.write(descriptor, f"\n{line}\n".encode())
        finally:
            os.close(descriptor)
    except OSError as error:
        _log.warning(
            "%s: cannot cache the tuning result (%s); set MOEFX_CACHE to a writable directory", file, error.strerror
        )
