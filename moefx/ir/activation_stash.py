"""The stash: device memory in which the experts of all layers keep activations for the backward.

With `dispatch="gather"` only the device knows how many rows a rank's experts get, and a tensor for the worst case would
be as many times too large as there are ranks. So the rows of a forward go, one behind the other, into a ring that all
layers share. The device counts rows from the start of the process: a forward reserves the next ones, and its entry
stores where they begin. When the ring is full, new rows overwrite the oldest. A backward finds its rows in the ring if
fewer than `capacity` rows were reserved since; otherwise it computes them again from its inputs. The results are equal
bit by bit: the stash is a cache, and its size changes the time only. Entries need no release, so backwards may come in
any order, twice, or never.

One stream at a time writes and reads: a call on another stream waits for the last one. Two CUDA graphs that share a
stash must not run at the same time.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..errors import MoefxError

MISSED = -(1 << 62)  # the start of an entry whose rows are not in the ring
ENTRY_SIZE = 3  # first row, number of rows, counter
_MAX_COUNTERS = 4096
_GENERATION = 1 << 40  # rows that no ring reserves in a process's life


def missed_entry(device: torch.device) -> Tensor:
    """Make the entry of a forward that put no rows into a stash."""
    return torch.full((ENTRY_SIZE,), MISSED, dtype=torch.int64, device=device)


class Stash:
    """A ring of rows on one device.

    Attributes:
        rows: [capacity, width].
        cursor: int64 [1], the rows that were reserved so far.
        misses: int64 [_MAX_COUNTERS], by counter the backwards that did not find their rows. Counter 0 is that of
            blocks inside of compiled graphs.
    """

    def __init__(self, capacity: int, width: int, dtype: torch.dtype, misses: Tensor, generation: int):
        self.rows = torch.empty((capacity, width), dtype=dtype, device=misses.device)
        # Entries of an older ring are far behind, those of a newer one ahead.
        self.cursor = torch.full((1,), generation * _GENERATION, dtype=torch.int64, device=misses.device)
        self.misses = misses
        self._stream: Any = None

    @property
    def tensors(self) -> list[Tensor]:
        return [self.rows, self.cursor, self.misses]

    def wait_for_last_call(self) -> None:
        """Let the current stream wait for the last one that used the ring."""
        if self.rows.device.type != "cuda" or torch.cuda.is_current_stream_capturing():
            return
        stream = torch.cuda.current_stream(self.rows.device)
        if self._stream is not None and self._stream != stream:
            stream.wait_stream(self._stream)
        self._stream = stream


_lock = threading.Lock()
_stashes: dict[tuple[torch.device, torch.dtype, int], Stash] = {}
_misses: dict[torch.device, Tensor] = {}
_captured: list[Stash] = []  # CUDA graphs have their addresses
_generations = itertools.count(1)
_free_counters = list(range(_MAX_COUNTERS - 1, 0, -1))
_live_counters: set[object] = set()


def find_stash(num_rows: int, widths: Sequence[int], dtype: torch.dtype, device: torch.device) -> Stash:
    """Find the stash for rows of several tensors side by side. Make one with room for `num_rows` if there is none.

    Raises:
        MoefxError: a CUDA graph is being captured, and the stash is missing or too small.
    """
    key = (device, dtype, sum(widths))
    stash, is_captured = _stashes.get(key), _is_capturing(device)
    if stash is None or stash.rows.shape[0] < num_rows:
        if is_captured:
            raise MoefxError(
                'the memory that `dispatch="gather"` keeps activations in cannot be allocated while a CUDA graph is '
                "captured: run the step once before the capture, with as many tokens (moefx.capture_step does)"
            )
        stash = _make_stash(key, num_rows)
    if is_captured and stash not in _captured:
        _captured.append(stash)
    stash.wait_for_last_call()
    return stash


def _make_stash(key: tuple[torch.device, torch.dtype, int], num_rows: int) -> Stash:
    device, dtype, width = key
    with _lock:
        if device not in _misses:
            _misses[device] = torch.zeros(_MAX_COUNTERS, dtype=torch.int64, device=device)
        _stashes[key] = Stash(num_rows, width, dtype, _misses[device], next(_generations))
        return _stashes[key]


def _is_capturing(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


class MissCounter:
    """Counts the backwards of one block that did not find their rows. A copy is a counter of its own.

    With the last counter of a process go its stashes, except those in CUDA graphs.
    """

    def __init__(self) -> None:
        token = object()
        _live_counters.add(token)
        with _lock:
            self.number = _free_counters.pop() if _free_counters else 0
            for counts in _misses.values() if self.number else ():
                counts[self.number] = 0
        weakref.finalize(self, _release_counter, self.number, token)

    def __deepcopy__(self, memo: dict[int, Any]) -> MissCounter:
        return MissCounter()

    def __reduce__(self) -> Any:
        return MissCounter, ()

    def read(self) -> int:
        """Return the count on all devices. Waits for them."""
        return sum(int(counts[self.number]) for counts in _misses.values())


def _release_counter(number: int, token: object) -> None:
    # Without the lock: this may interrupt its holder.
    if number:
        _free_counters.append(number)
    _live_counters.discard(token)
    if not _live_counters:
        _stashes.clear()
