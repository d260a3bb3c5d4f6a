"""Time exchanges and sends between ranks, by level of the topology and size of the message, with many repetitions.

At each level all groups of ranks that differ only there exchange at the same time, as in an expert layer. The time of
an exchange is its slowest rank's. The spread of repetitions shows stragglers (X-MoE figures 18 and 19).
"""

from __future__ import annotations

import dataclasses
import itertools
import statistics
import time
from collections.abc import Callable, Iterator, Sequence

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from ..ir.expert_placement import TopologyLevel
from ..ir.ops.uneven_all_to_all import get_group, start_all_to_all, wait_for_collective
from ..runtime.ranks.topology import ExpertAxis
from ..util.unit_text import amount
from .rate_fit import fit_link

SIZES = tuple(4**i for i in range(5, 15))  # bytes of a rank's message: 1 KiB to 256 MiB
PARTS = 20
_WARM_UP, _LEAST = 3, 5


@dataclasses.dataclass(frozen=True)
class RepeatedExchange:
    """One size of message at one level.

    Attributes:
        kind: "all_to_all", or "p2p" for sends to the next rank of the level.
        level: name of the level.
        ranks: ranks of a group.
        unit: ranks of a unit of the level.
        is_node: whether a unit is within a node.
        num_bytes: bytes that leave a rank; in an all-to-all (n - 1)/n of its message.
        seconds: seconds of each repetition, on the slowest rank of all groups.
    """

    kind: str
    level: str
    ranks: int
    unit: int
    is_node: bool
    num_bytes: float
    seconds: list[float]

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)

    def __str__(self) -> str:
        ascending = sorted(self.seconds)
        late = sum(s > 2 * self.median for s in ascending) / len(ascending)
        return (
            f"{self.kind:11}{self.level:9}{self.ranks:4} ranks {amount(self.num_bytes, 'B'):>10}  "
            f"{1e3 * self.median:9.3f} ms  {self.num_bytes / self.median / 1e9:8.2f} GB/s  "
            f"max {ascending[-1] / self.median:6.2f}x  {late:5.1%} beyond 2x"
        )


def list_levels(device: torch.device, node_size: int, level_sizes: Sequence[int]) -> list[tuple[TopologyLevel, int]]:
    """List (level, ranks in a unit of the level), fine to coarse. Collective.

    Args:
        level_sizes: numbers of ranks of the units above a node.
    """
    mesh = init_device_mesh(device.type, (dist.get_world_size(),), mesh_dim_names=("ep",))
    axis = ExpertAxis(mesh, mesh, node_size, level_sizes)
    levels, units = [], 1
    for level in reversed(axis.levels):
        units *= level.size
        levels.append((level, units))
    return levels


def measure_level(
    level: TopologyLevel, unit: int, node: int, device: torch.device, repeats: int, longest: float
) -> Iterator[RepeatedExchange]:
    """Time all-to-all and sends of growing sizes at one level. Collective.

    Args:
        unit, node: ranks of a unit of the level, and of a node.
        repeats: repetitions of each size.
        longest: limit of seconds for a size, which reduces repetitions. Larger sizes are skipped if few repetitions
            remain, but at least two sizes are timed, because latency and bandwidth need two.
    """
    for prepare in (_all_to_all, _p2p):
        times = repeats
        for count, num_bytes in enumerate(SIZES, 1):
            size = max(num_bytes // level.size, 1) * level.size
            leaving, work = prepare(level, device, size)
            seconds = _time_repeatedly(work, device, times)
            name = prepare.__name__.strip("_")
            yield RepeatedExchange(name, level.axis, level.size, unit, unit <= node, leaving, seconds)
            times = min(times, int(longest / (4 * statistics.median(seconds))))
            if times < _LEAST and count > 1:
                break
            times = max(times, _LEAST)


def fit_medians(exchanges: Sequence[RepeatedExchange]) -> tuple[float, float]:
    """Fit (latency in seconds, bytes a second) to the medians."""
    return fit_link([r.num_bytes for r in exchanges], [r.median for r in exchanges])


def measure_spread(exchanges: Sequence[RepeatedExchange]) -> tuple[float, ...]:
    """Return the spread of repetitions: seconds over the median of their size, as means of `PARTS` equal parts,
    ascending.

    Sizes whose time is mostly latency count only if there are no others, because rows are larger.
    """
    fastest = min(r.median for r in exchanges)
    large = [r for r in exchanges if r.median > 2 * fastest] or list(exchanges)
    ratios = sorted(s / r.median for r in large for s in r.seconds)
    ends = [round(i * len(ratios) / PARTS) for i in range(PARTS + 1)]
    parts = [ratios[begin:end] for begin, end in itertools.pairwise(ends)]
    return tuple(round(statistics.mean(part), 4) for part in parts if part)


def _all_to_all(level: TopologyLevel, device: torch.device, size: int) -> tuple[float, Callable[[], object]]:
    rows = torch.ones((size, 1), dtype=torch.uint8, device=device)
    counts = [size // level.size] * level.size
    return size * (level.size - 1) / level.size, lambda: wait_for_collective(
        start_all_to_all(rows, counts, counts, level.group)
    )


def _p2p(level: TopologyLevel, device: torch.device, size: int) -> tuple[float, Callable[[], object]]:
    group = get_group(level.group)
    ranks, position = dist.get_process_group_ranks(group), dist.get_rank(group)
    sent, received = (torch.ones(size, dtype=torch.uint8, device=device) for _ in range(2))
    after, before = ranks[(position + 1) % level.size], ranks[position - 1]

    def work() -> None:
        # receives first, as in exchanges of rows
        parts = [dist.P2POp(dist.irecv, received, before, group), dist.P2POp(dist.isend, sent, after, group)]
        for request in dist.batch_isend_irecv(parts):
            request.wait()

    return size, work


def _time_repeatedly(work: Callable[[], object], device: torch.device, repeats: int) -> list[float]:
    """Time repetitions. Returns the seconds of each one on the slowest rank. On GPUs repetitions are queued back to
    back."""
    for _ in range(_WARM_UP):
        work()
    dist.barrier()
    durations = []
    if device.type == "cuda":
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]
        marks[0].record()
        for mark in marks[1:]:
            work()
            mark.record()
        torch.cuda.synchronize()
        durations = [a.elapsed_time(b) / 1e3 for a, b in itertools.pairwise(marks)]
    else:
        for _ in range(repeats):
            dist.barrier()  # as in a step, let the sockets' queues drain between exchanges
            begin = time.perf_counter()
            work()
            durations.append(time.perf_counter() - begin)
    slowest = torch.tensor(durations, dtype=torch.float64, device=device)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return slowest.tolist()
