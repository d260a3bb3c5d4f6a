"""The stash: device memory in which the experts of all layers keep activations for the backward.

With `dispatch="gather"` and `"pull"` only the device knows how many rows a rank's experts get, and a tensor for the
worst case would be W times too large on W ranks. So each forward appends its rows to a ring that all layers share. The
device numbers all rows of the process: a forward reserves the next numbers, and its ticket stores the first one. When
the ring is full, new rows overwrite the oldest. A backward reads its rows from the ring, or recomputes them from its
inputs if they were overwritten. The results are equal bit by bit: the stash is a cache, and its size affects the time
only. Tickets need no release, so backwards may run in any order, twice, or never.

One stream at a time writes and reads: a call on another stream waits for the last one. Replays of CUDA graphs are not
ordered with calls on other streams, or with each other: run them on one stream.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..errors import InvalidInput
from ..util.gpu_streams import LastStream, is_capturing

MISSED = -(1 << 62)  # the first row of a ticket whose rows are not in the ring
TICKET_SIZE = 3  # first row, number of rows, counter
_MAX_COUNTERS = 4096
_GENERATION = 1 << 40  # more rows than a process reserves: separates the row numbers of successive rings


def make_missed_ticket(device: torch.device) -> Tensor:
    """Make the ticket of a forward that put no rows into a stash."""
    return torch.full((TICKET_SIZE,), MISSED, dtype=torch.int64, device=device)


class Stash:
    """A ring of rows on one device.

    Attributes:
        rows: [number of rows, width].
        cursor: int64 [1], the number of rows that were reserved so far.
        misses: int64 [_MAX_COUNTERS], for each counter the number of backwards that did not find their rows. Blocks in
            compiled graphs share counter 0, and so do blocks beyond the last counter.
    """

    def __init__(self, num_rows: int, width: int, dtype: torch.dtype, misses: Tensor, generation: int):
        self.rows = torch.empty((num_rows, width), dtype=dtype, device=misses.device)
        # Row numbers of different rings lie in different ranges, so that a ticket of another ring is a miss.
        self.cursor = torch.full((1,), generation * _GENERATION, dtype=torch.int64, device=misses.device)
        self.misses = misses
        self._last_stream = LastStream()

    @property
    def num_rows(self) -> int:
        return self.rows.shape[0]

    @property
    def tensors(self) -> list[Tensor]:
        return [self.rows, self.cursor, self.misses]

    def wait_for_last_call(self) -> None:
        """Let the current stream wait for the last one that used the ring."""
        if (stream := self._last_stream.follow(self.rows.device)) is not None:
            for tensor in self.tensors:  # a larger ring may take this one's place while the stream uses it
                tensor.record_stream(stream)


_lock = threading.Lock()
_stashes: dict[tuple[torch.device, torch.dtype, int], Stash] = {}
_misses: dict[torch.device, Tensor] = {}
# Keeps rings alive whose addresses a CUDA graph may hold, until the process ends.
_stashes_in_graphs: set[Stash] = set()
_generations = itertools.count(1)
_free_counters = list(range(_MAX_COUNTERS - 1, 0, -1))
_live_counters: set[object] = set()


def find_stash(num_rows: int, widths: Sequence[int], dtype: torch.dtype, device: torch.device) -> Stash:
    """Find the stash for rows of several tensors side by side. Make one if there is none of at least `num_rows`.

    Raises:
        InvalidInput: a CUDA graph is being captured, and the stash is missing or too small.
    """
    key = (device, dtype, sum(widths))
    stash, is_captured = _stashes.get(key), is_capturing(device)
    if stash is None or stash.num_rows < num_rows:
        if is_captured:
            raise InvalidInput(
                'the memory in which `dispatch="gather"` and `"pull"` keep activations cannot be allocated while a '
                "CUDA graph is captured: run the step once, with the same number of tokens, before the capture "
                "(moefx.capture_step does)"
            )
        stash = _make_stash(key, num_rows)
    if is_captured:
        _stashes_in_graphs.add(stash)
    elif device.type == "cuda":
        stash.wait_for_last_call()
    return stash


def _make_stash(key: tuple[torch.device, torch.dtype, int], num_rows: int) -> Stash:
    device, dtype, width = key
    with _lock:
        if device not in _misses:
            _misses[device] = torch.zeros(_MAX_COUNTERS, dtype=torch.int64, device=device)
        _stashes[key] = Stash(num_rows, width, dtype, _misses[device], next(_generations))
        return _stashes[key]


class MissCounter:
    """Counts the backwards of one block that did not find their rows. A copy has its own count.

    When the last counter of a process is freed, so are the stashes, except those in CUDA graphs.
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
