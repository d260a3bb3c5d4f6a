"""Memory that the ranks of a process group read from each other, without a copy to the host.

It is torch's symmetric memory: one buffer on each GPU of a node, mapped into the processes of all ranks, and a barrier
between the devices. All exchanges of a group take turns in one buffer:

    with shared_columns(columns, num_rows, group) as peers:    copies the columns, then waits until all ranks have
        ... read peers[rank][column] ...
                                                               waits until all ranks have read

so that no rank overwrites what another one still reads. The barriers are steps of the stream: the host runs ahead, and
a CUDA graph can hold them. Multicast is not used.
"""

from __future__ import annotations

import contextlib
import math
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ...errors import MoefxError
from .row_packing import Column, Layout
from .uneven_all_to_all import get_group, raise_ranks_lost

_GROWTH = 1.5  # a new buffer is at least this many times as large as the last one
_MAX_VIEWS = 64  # layouts whose views are kept


class SharedBuffers(NamedTuple):
    """One uint8 buffer of each rank, and a barrier of the devices: a rank continues once all have reached it."""

    buffers: Sequence[Tensor]
    barrier: Callable[[], object]


def allocate(group: dist.ProcessGroup, num_bytes: int, device: torch.device) -> SharedBuffers:
    """Allocate a buffer on the GPU of each rank. Collective.

    Raises:
        RuntimeError: a GPU cannot read the memory of another one.
    """
    import torch.distributed._symmetric_memory as symmetric_memory

    own = symmetric_memory.empty(num_bytes, dtype=torch.uint8, device=device)
    handle = symmetric_memory.rendezvous(own, group)
    buffers = [handle.get_buffer(rank, (num_bytes,), torch.uint8) for rank in range(group.size())]
    milliseconds = round(1e3 * _get_timeout(group, device))
    return SharedBuffers(buffers, lambda: handle.barrier(channel=0, timeout_ms=milliseconds))


def _get_timeout(group: dist.ProcessGroup, device: torch.device) -> float:
    """Return the seconds that a rank of the group waits for others."""
    backend = group._get_backend(device)
    options = getattr(backend, "options", None)
    return (options._timeout if options is not None else dist.default_pg_timeout).total_seconds()


class PeerMemory:
    """The buffers of one process group on one kind of device. They grow on demand."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device):
        self._group, self._device = weakref.ref(group), device
        self._shared = SharedBuffers([], lambda: None)
        self._captured: list[SharedBuffers] = []  # their addresses are in CUDA graphs
        self._stream: torch.cuda.Stream | None = None
        self._views: dict[tuple[int, tuple[Column, ...]], list[list[Tensor]]] = {}

    def reserve(self, num_bytes: int) -> None:
        """Make room for as many bytes on each rank. Collective if it grows: all ranks ask for equally many.

        Raises:
            MoefxError: the buffers are too small, and a CUDA graph is being captured.
        """
        room = self._shared.buffers[0].numel() if self._shared.buffers else 0
        capturing = self._is_capturing()
        if num_bytes > room:
            if capturing:
                raise MoefxError(
                    'the memory that ranks share for `dispatch="pull"` cannot be allocated while a CUDA graph is being '
                    "captured: run one step with as many tokens before the capture"
                )
            group = self._group()
            assert group is not None
            self._views.clear()
            self._shared = allocate(group, max(num_bytes, int(_GROWTH * room)), self._device)
        if capturing and self._shared not in self._captured:
            self._captured.append(self._shared)

    def views(self, num_rows: int, layout: Layout) -> list[list[Tensor]]:
        """Return each rank's columns at the begin of the buffers, [num_rows, width] each."""
        key = num_rows, tuple(layout.columns)
        if (found := self._views.get(key)) is None:
            if len(self._views) >= _MAX_VIEWS:
                self._views.clear()
            shape = num_rows, layout.num_bytes
            self.reserve(max(1, math.prod(shape)))
            rows = [buffer[: math.prod(shape)].view(shape) for buffer in self._shared.buffers]
            found = self._views[key] = [layout.views(packed) for packed in rows]
        elif self._device.type == "cuda":
            self.reserve(0)  # notes a capture
        return found

    def wait_for_all(self) -> None:
        """Let the device wait until the devices of all ranks have come this far.

        Raises:
            RanksLost: an earlier wait has exceeded the timeout.
        """
        with raise_ranks_lost():
            self._shared.barrier()

    def use_stream(self) -> None:
        """Let the current stream wait for the exchange before, if that ran in another stream."""
        if self._device.type != "cuda" or self._is_capturing():  # a capture begins when the device has finished
            return
        stream = torch.cuda.current_stream(self._device)
        if self._stream is not None and self._stream != stream:
            stream.wait_stream(self._stream)
        self._stream = stream

    def _is_capturing(self) -> bool:
        return self._device.type == "cuda" and torch.cuda.is_current_stream_capturing()


_memories: dict[str, tuple[weakref.ref[dist.ProcessGroup], PeerMemory]] = {}  # by the name of the group


def open_peer_memory(name: str, device: torch.device) -> PeerMemory:
    """Return the memory of the process group with this name."""
    group = get_group(name)
    known, memory = _memories.get(name, (None, None))
    if memory is None or known is None or known() is not group:  # another group had the name
        memory = PeerMemory(group, device)
        _memories[name] = weakref.ref(group), memory
    return memory


@contextlib.contextmanager
def shared_columns(columns: Sequence[Tensor], num_rows: int, group: str) -> Iterator[list[list[Tensor]]]:
    """Show this rank's columns [rows, width] to all ranks of the group, and theirs to this one.

    Args:
        num_rows: number of rows that all ranks share, at least those of `columns`; rows behind them hold any values in
            columns of floating dtype, and -1 in those of integers.

    Yields:
        For each rank, its columns. They may be read until the end of the context.

    Raises:
        RanksLost: another rank has died, or does not answer within the timeout of the process group.
    """
    memory = open_peer_memory(group, columns[0].device)
    views = memory.views(num_rows, Layout([*map(Column.of, columns)]))
    memory.use_stream()
    for column, own in zip(columns, views[get_group(group).rank()], strict=True):
        own[: column.shape[0]].copy_(column)
        if column.shape[0] < num_rows and not column.dtype.is_floating_point:
            own[column.shape[0] :].fill_(-1)
    memory.wait_for_all()
    yield views
    memory.wait_for_all()


def find_obstacle(name: str, device: torch.device) -> str | None:
    """Return the reason why the ranks of a group cannot read each other's memory, or None if they can. Collective."""
    group, found = get_group(name), None
    if device.type != "cuda":
        found = f"ranks on {device.type} do not share memory"
    else:
        try:
            open_peer_memory(name, device).reserve(1)
        except (RuntimeError, ImportError) as error:
            first_line = str(error).partition("\n")[0]
            found = f"the GPUs cannot read each other's memory ({first_line})"
    everywhere: list[str | None] = [None] * group.size()
    dist.all_gather_object(everywhere, found, group=group)
    return next(filter(None, everywhere), None)
