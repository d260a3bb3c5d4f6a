"""Memory that the ranks of a process group read from each other, without a copy to the host.

This is torch's symmetric memory: one buffer on each GPU of a node, mapped into the processes of all ranks, and a
barrier between the devices. All exchanges of a group use one buffer, one after the other:

    with shared_columns(columns, num_rows, group) as peers:    copies the columns, then waits until all ranks have
        ... read peers[rank][column] ...
                                                               waits until all ranks have read

So no rank overwrites data that another one still reads. The barriers run on the stream: the host does not wait, and a
CUDA graph can hold them. Multicast is not used.
"""

from __future__ import annotations

import contextlib
import math
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ...errors import MoefxError
from ...util.gpu_streams import LastStream, is_capturing
from ...util.rank_values import gather_values
from .row_packing import Column, RowLayout
from .uneven_all_to_all import describe_lost_ranks, get_group

_MAX_VIEWS = 64  # layouts whose views are kept


class SharedBuffers(NamedTuple):
    """One uint8 buffer of each rank, and a barrier of the devices: a rank continues once all have reached it.

    Attributes:
        owner: keeps the memory alive.
    """

    buffers: Sequence[Tensor]
    barrier: Callable[[], object]
    owner: object = None


def allocate(group: dist.ProcessGroup, num_bytes: int, device: torch.device) -> SharedBuffers:
    """Allocate a buffer on the GPU of each rank. Collective.

    Raises:
        RuntimeError: a GPU cannot read the memory of another one.
    """
    import torch.distributed._symmetric_memory as symmetric_memory

    own_buffer = _allocate_own(num_bytes, device)
    # torch 2.11 clears the signals and copies the table of addresses on the default stream, and waits for neither.
    # Another rank's signal, or a barrier of another stream, could come first.
    torch.cuda.synchronize(device)
    handle = symmetric_memory.rendezvous(own_buffer, group)
    torch.cuda.synchronize(device)
    buffers = [handle.get_buffer(rank, (num_bytes,), torch.uint8) for rank in range(group.size())]
    milliseconds = round(1e3 * _get_timeout(group, device))
    return SharedBuffers(buffers, lambda: handle.barrier(channel=0, timeout_ms=milliseconds), (own_buffer, handle))


def _allocate_own(num_bytes: int, device: torch.device) -> Tensor:
    import torch.distributed._symmetric_memory as symmetric_memory

    return symmetric_memory.empty(num_bytes, dtype=torch.uint8, device=device)


def _get_timeout(group: dist.ProcessGroup, device: torch.device) -> float:
    """Return the seconds that a rank of the group waits for others."""
    return group._get_backend(device).options._timeout.total_seconds()


class _PeerViews(NamedTuple):
    """Views of the buffers for columns of some shapes.

    Attributes:
        peers: for each rank its columns, [num_rows, width] each.
        own: the rows that this rank fills. padding: the rows after them, in columns of integers.
    """

    peers: list[list[Tensor]]
    own: list[Tensor]
    padding: list[Tensor]


class PeerMemory:
    """The buffers of one process group on one kind of device. They grow on demand."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device):
        self._group, self._device, self._rank = weakref.ref(group), device, group.rank()
        self._shared = SharedBuffers([], lambda: None)
        self._captured: list[SharedBuffers] = []  # kept as long as this: their addresses are in CUDA graphs
        self._last_stream = LastStream()
        self._views: dict[tuple[Any, ...], _PeerViews] = {}

    def reserve(self, num_bytes: int) -> None:
        """Grow the buffer of each rank to `num_bytes`. Collective if it grows: all ranks ask for equally many.

        Raises:
            MoefxError: the buffers are too small, and a CUDA graph is being captured.
        """
        room = self._shared.buffers[0].numel() if self._shared.buffers else 0
        if num_bytes <= room:
            return
        if is_capturing(self._device):
            raise MoefxError(
                'the memory that ranks share for `dispatch="pull"` cannot be allocated while a CUDA graph is being '
                "captured: run one step with as many tokens before the capture"
            )
        group = self._group()
        assert group is not None
        self._views.clear()
        self._shared = allocate(group, num_bytes, self._device)

    def publish(self, columns: Sequence[Tensor], num_rows: int, room: int) -> list[list[Tensor]]:
        """Copy this rank's columns to its buffer. Returns each rank's columns, [num_rows, width].

        Args:
            room: number of rows to allocate memory for, equal on all ranks.
        """
        key = (num_rows, columns[0].shape[0], *[(c.dtype, c.shape[1]) for c in columns])
        views = self._views.get(key) or self._build_views(key, columns, num_rows, room)
        if self._device.type == "cuda":
            self._order_streams()
        torch._foreach_copy_(views.own, list(columns))  # pyright: ignore[reportPrivateImportUsage]
        for rows in views.padding:
            rows.fill_(-1)
        return views.peers

    def _build_views(self, key: tuple[Any, ...], columns: Sequence[Tensor], num_rows: int, room: int) -> _PeerViews:
        layout = RowLayout([*map(Column.of, columns)])
        shape = num_rows, layout.num_bytes
        self.reserve(max(1, room * layout.num_bytes))
        num_filled = columns[0].shape[0]
        peers = [layout.views(buffer[: math.prod(shape)].view(shape)) for buffer in self._shared.buffers]
        own_rows = peers[self._rank]
        padding = [rows[num_filled:] for rows in own_rows if num_filled < num_rows and not rows.dtype.is_floating_point]
        if len(self._views) >= _MAX_VIEWS:
            self._views.clear()
        views = self._views[key] = _PeerViews(peers, [rows[:num_filled] for rows in own_rows], padding)
        return views

    def wait_for_all(self) -> None:
        """Let the device wait until the devices of all ranks have come this far.

        Raises:
            RanksLost: an earlier wait has exceeded the timeout.
        """
        try:
            self._shared.barrier()
        except RuntimeError as error:
            raise describe_lost_ranks(error) from error

    def _order_streams(self) -> None:
        """Let the current stream wait for the previous exchange, if that ran on another stream."""
        if not is_capturing(self._device):
            self._last_stream.follow(self._device)
        elif not any(memory is self._shared for memory in self._captured):
            self._captured.append(self._shared)  # a capture begins when the device has finished

    def belongs_to(self, group: dist.ProcessGroup) -> bool:
        """Return whether this is the memory of a group: a later group may have the same name."""
        return self._group() is group


_memories: dict[str, PeerMemory] = {}  # by the name of the group


def open_peer_memory(name: str, device: torch.device) -> PeerMemory:
    """Return the memory of the process group with this name."""
    group = get_group(name)
    memory = _memories.get(name)
    if memory is None or not memory.belongs_to(group):
        memory = _memories[name] = PeerMemory(group, device)
    return memory


@contextlib.contextmanager
def shared_columns(columns: Sequence[Tensor], num_rows: int, group: str, room: int = 0) -> Iterator[list[list[Tensor]]]:
    """Share columns [rows, width] between all ranks of the group.

    Args:
        num_rows: rows that each rank shares, at least as many as `columns` have. The rows after these are -1 in columns
            of integers, and hold any values in columns of floating dtype.
        room: rows to allocate memory for, if later exchanges share more than `num_rows`; equal on all ranks.

    Yields:
        The columns of each rank, which may be read until the end of the context. If it ends with an error, the other
        ranks wait until the timeout.

    Raises:
        RanksLost: another rank has died, or does not answer within the timeout of the process group.
    """
    memory = open_peer_memory(group, columns[0].device)
    peers = memory.publish(columns, num_rows, max(room, num_rows))
    memory.wait_for_all()
    yield peers
    memory.wait_for_all()


def find_access_obstacle(name: str, device_type: str) -> str | None:
    """Return the reason why the ranks of a group cannot read each other's memory, or None if they can. Collective."""
    if device_type != "cuda":
        return f"ranks on {device_type} do not share memory"
    group, device = get_group(name), torch.device("cuda", torch.cuda.current_device())
    # A rank that cannot allocate does not come to the rendezvous: agree first.
    return _try_on_all_ranks(group, lambda: _allocate_own(1, device)) or _try_on_all_ranks(
        group, lambda: open_peer_memory(name, device).reserve(1)
    )


def _try_on_all_ranks(group: dist.ProcessGroup, step: Callable[[], object]) -> str | None:
    """Run a step on all ranks. Return the first error of a rank, or None. Collective."""
    obstacle = None
    try:
        step()
    except (RuntimeError, ImportError) as error:
        first_line = str(error).partition("\n")[0]
        obstacle = f"the GPUs cannot read each other's memory ({first_line})"
    return next(filter(None, gather_values(obstacle, group)), None)
