"""Play the steps of a tape (see `launch_replay`) with little work on the host.

Small buffers that only launches use share one allocation, the workspace. Consecutive launches form a batch. A launch
takes the host 9 to 24 us, the replay of a CUDA graph 3 us. So a batch that runs at the same addresses a second time is
captured, and replayed whenever these addresses recur. In training they recur, because the caching allocator returns the
same memory in each step. A graph cannot be stale: the addresses determine the kernels and their arguments.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import launch as launching

# Bytes of a buffer that moves to the workspace. Larger ones are freed as soon as possible.
_MAX_WORKSPACE_BUFFER = 8 << 20
_ALIGNMENT = 512  # as of the caching allocator
_MAX_GRAPHS = 1024  # of the process
_MAX_SEEN = 64  # addresses of a batch that wait for their second call
_GRAPHS_VARIABLE = "MOEFX_LAUNCH_GRAPHS"
_log = logging.getLogger(__name__)


class Allocate(NamedTuple):
    """Create a tensor."""

    register: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def __call__(self, tensors: list[Any]) -> None:
        tensors[self.register] = torch.empty(self.shape, dtype=self.dtype, device=self.device)


class Free(NamedTuple):
    """Drop a tensor."""

    register: int

    def __call__(self, tensors: list[Any]) -> None:
        tensors[self.register] = None


class Apply(NamedTuple):
    """Call a function that returns a new tensor.

    Args:
        sources: registers, each with a view: shape, strides and distance in elements, or None for the whole tensor.
    """

    register: int
    function: Callable[..., Tensor]
    sources: Sequence[Any]

    def __call__(self, tensors: list[Any]) -> None:
        tensors[self.register] = self.function(*(_view(tensors[source], view) for source, view in self.sources))


class Launch(NamedTuple):
    """Launch a kernel.

    Args:
        template: the arguments, with None for each pointer or descriptor of a register.
        pointers: (index of the argument, register, offset in bytes).
        descriptors: the same, and a tensor descriptor; a call changes its address only.
    """

    run: Callable[..., Any]
    template: list[Any]
    pointers: Sequence[tuple[int, int, int]]
    descriptors: Sequence[tuple[int, int, int, Any]]

    def __call__(self, tensors: list[Any]) -> None:
        args = self.template.copy()
        for i, register, offset in self.pointers:
            args[i] = offset_pointer(tensors[register], offset)
        for i, register, offset, recorded_descriptor in self.descriptors:
            args[i] = replace_base(recorded_descriptor, offset_base(tensors[register], offset, recorded_descriptor))
        self.run(*args)

    @property
    def registers(self) -> set[int]:
        return {register for _, register, *_ in (*self.pointers, *self.descriptors)}

    def with_registers(self, moved_registers: dict[int, tuple[int, int]]) -> Launch:
        """Return the launch with some registers replaced by other registers and offsets."""

        def move(pointers: Iterable[Any]) -> tuple[Any, ...]:
            return tuple(
                (i, moved_registers[register][0], offset + moved_registers[register][1], *rest)
                if register in moved_registers
                else (i, register, offset, *rest)
                for i, register, offset, *rest in pointers
            )

        return self._replace(pointers=move(self.pointers), descriptors=move(self.descriptors))


Step = Allocate | Free | Apply | Launch


class Playback:
    """The steps of a tape, ready to play.

    Args:
        results: registers of the results. num_registers: of all tensors; inputs and constants come first.
    """

    def __init__(self, steps: Sequence[Step], results: Sequence[int], num_registers: int):
        self.results, self.num_registers = results, num_registers
        self.actions: list[Callable[[list[Any]], None]] = []
        steps, self.num_registers = _use_workspace(steps, results, num_registers)
        launches: list[Launch] = []
        for step in steps:
            if isinstance(step, Launch):
                launches.append(step)
            elif isinstance(step, Allocate):  # may be ahead of launches
                self.actions.append(step)
            else:
                self._finish_batch(launches)
                self.actions.append(step)
        self._finish_batch(launches)

    def _finish_batch(self, launches: list[Launch]) -> None:
        if launches:
            self.actions.append(LaunchBatch(list(launches)) if len(launches) > 1 else launches[0])
            launches.clear()

    def play(self, inputs: Sequence[Tensor | None], constants: Sequence[Tensor]) -> list[Tensor]:
        tensors: list[Any] = [*inputs, *constants]
        tensors += [None] * (self.num_registers - len(tensors))
        for action in self.actions:
            action(tensors)
        return [tensors[register] for register in self.results]


def _use_workspace(steps: Sequence[Step], results: Sequence[int], num_registers: int) -> tuple[list[Step], int]:
    """Move small buffers that only launches use to one allocation. Buffers with disjoint lifetimes may overlap, because
    launches run in order."""
    separate_registers = {*results, *(register for s in steps if isinstance(s, Apply) for register, _ in s.sources)}
    small_allocations = {
        s.register: s
        for s in steps
        if isinstance(s, Allocate) and s.register not in separate_registers and s.num_bytes <= _MAX_WORKSPACE_BUFFER
    }
    if len({s.device for s in small_allocations.values()}) != 1 or launching.INTERPRETED:
        return list(steps), num_registers
    workspace, size, ranges, moved_registers = (
        num_registers,
        0,
        dict[int, tuple[int, int]](),
        dict[int, tuple[int, int]](),
    )
    new_steps: list[Step] = []
    for step in steps:
        if isinstance(step, Allocate) and step.register in small_allocations:
            begin = _find_room(ranges.values(), step.num_bytes)
            ranges[step.register] = begin, begin + step.num_bytes
            moved_registers[step.register] = workspace, begin
            size = max(size, begin + step.num_bytes)
        elif isinstance(step, Free) and step.register in small_allocations:
            ranges.pop(step.register)
        else:
            new_steps.append(step.with_registers(moved_registers) if isinstance(step, Launch) else step)
    device = next(iter(small_allocations.values())).device
    return [Allocate(workspace, (size,), torch.uint8, device), *new_steps], num_registers + 1


def _find_room(occupied: Iterable[tuple[int, int]], size: int) -> int:
    """Return the lowest aligned offset with room for `size` bytes."""
    begin = 0
    for start, end in sorted(occupied):
        if begin + size <= start:
            break
        begin = max(begin, -(-end // _ALIGNMENT) * _ALIGNMENT)
    return begin


class LaunchBatch:
    """Launches that follow each other.

    Threads mutate `used` and `seen` without a lock, because a capture holds it for milliseconds. Each operation on
    these sets is atomic. An entry that a race loses costs one more capture or launch; results do not change.

    Attributes:
        graphs: CUDA graphs by the addresses in `registers`. Written under the lock `_capturing`.
        used: addresses of the graphs that ran since `_make_room` last dropped some.
        seen: addresses that ran once.
    """

    def __init__(self, launches: Sequence[Launch]):
        self.launches = launches
        self.registers = sorted({register for launch in launches for register in launch.registers})
        self.graphs: dict[tuple[int, ...], Any] = {}
        self.used: set[tuple[int, ...]] = set()
        self.seen: set[tuple[int, ...]] = set()
        with _capturing:
            _batches.add(self)

    def __call__(self, tensors: list[Any]) -> None:
        if not _uses_graphs or torch.cuda.is_current_stream_capturing():
            self._launch(tensors)
            return
        addresses = tuple([tensors[register].data_ptr() for register in self.registers])
        graph = self.graphs.get(addresses)
        if graph is None and addresses in self.seen:
            graph = self._capture(tensors, addresses)
        if graph is not None:
            self.used.add(addresses)
            graph.replay()
            return
        if len(self.seen) >= _MAX_SEEN:
            self.seen.clear()
        self.seen.add(addresses)
        self._launch(tensors)

    def _launch(self, tensors: list[Any]) -> None:
        for launch in self.launches:
            launch(tensors)

    def _capture(self, tensors: list[Any], addresses: tuple[int, ...]) -> Any:
        """Capture the launches.

        Returns:
            The graph. None without room, while another thread captures, or after a failed capture.
        """
        global _uses_graphs
        if not _capturing.acquire(blocking=False):
            return None
        try:
            if not _make_room():
                return None
            self.seen.discard(addresses)
            graph = _capture_graph(lambda: self._launch(tensors), tensors[self.registers[0]].device)
            self.graphs[addresses] = graph
            return graph
        except RuntimeError as error:
            _uses_graphs = False
            _log.warning(
                "launches are not captured as CUDA graphs from now on (%s=0 avoids the attempt): %s",
                _GRAPHS_VARIABLE,
                error,
            )
            return None
        finally:
            _capturing.release()


_batches: weakref.WeakSet[LaunchBatch] = weakref.WeakSet()
_capturing = threading.Lock()  # also guards `_batches`, the graphs of each batch, and the names below
_streams: dict[torch.device, Any] = {}
_attempts_to_skip = 0


def _make_room() -> bool:
    """Drop graphs that have not run since the last call, if there are too many. Return whether there is room for one
    more."""
    global _attempts_to_skip
    if _attempts_to_skip:
        _attempts_to_skip -= 1
        return False
    if sum(len(batch.graphs) for batch in _batches) < _MAX_GRAPHS:
        return True
    for batch in list(_batches):
        batch.graphs = {addresses: graph for addresses, graph in batch.graphs.items() if addresses in batch.used}
        batch.used.clear()
    has_room = sum(len(batch.graphs) for batch in _batches) < _MAX_GRAPHS
    _attempts_to_skip = 0 if has_room else _MAX_GRAPHS
    return has_room


def _capture_graph(launch: Callable[[], None], device: torch.device) -> Any:
    """Capture launches on a separate stream: the default stream cannot be captured."""
    if device not in _streams:
        _streams[device] = torch.cuda.Stream(device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(_streams[device]):
        # Other threads may make calls that CUDA forbids in a capture. torch refuses random numbers on this device.
        graph.capture_begin(capture_error_mode="thread_local")
        try:
            launch()
        except BaseException:
            with contextlib.suppress(RuntimeError):  # the error of the launch says more
                graph.capture_end()
            raise
        graph.capture_end()
    return graph


_uses_graphs = (
    not launching.INTERPRETED
    and torch.version.hip is None
    and os.environ.get(_GRAPHS_VARIABLE, "") not in ("0", "false")
)


# -- addresses


class Address:
    """A tensor's address for a descriptor, without keeping the tensor alive."""

    def __init__(self, address: int):
        self.address = address

    @classmethod
    def of(cls, tensor: Tensor) -> Any:
        return tensor if launching.INTERPRETED else cls(tensor.data_ptr())

    def data_ptr(self) -> int:
        return self.address


def replace_base(recorded_descriptor: Any, base: Any) -> Any:
    """Return a copy of a recorded tensor descriptor with another base."""
    descriptor = object.__new__(type(recorded_descriptor))  # skip the checks, which the recorded one passed
    descriptor.__dict__.update(recorded_descriptor.__dict__, base=base)
    return descriptor


def offset_base(tensor: Tensor, offset: int, recorded_descriptor: Any) -> Any:
    """Return the base of a descriptor at an offset of a tensor: an address, or for the interpreter a tensor."""
    if launching.INTERPRETED:
        start = tensor.storage_offset() + offset // tensor.element_size()
        return tensor.as_strided(recorded_descriptor.shape, recorded_descriptor.strides, start)
    return Address(tensor.data_ptr() + offset)


def offset_pointer(tensor: Tensor, offset: int) -> Any:
    """Return the address at an offset, which kernels accept as a tensor. For the interpreter, a tensor that begins
    there."""
    if launching.INTERPRETED and tensor.numel() == 0:
        return tensor
    if launching.INTERPRETED:
        return tensor.as_strided((1,), (1,), tensor.storage_offset() + offset // tensor.element_size())
    return tensor.data_ptr() + offset


def _view(tensor: Tensor, view: Any) -> Tensor:
    if view is None:
        return tensor
    shape, strides, distance = view
    return tensor.as_strided(shape, strides, tensor.storage_offset() + distance)
