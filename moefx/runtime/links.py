"""Which way of rows is fastest: bandwidths as measured, rows as expected (X-MoE section 4.2, Piper section V).

Letters: E experts, K of a token, W ranks, R racks, N nodes of a rack, L ranks of a node.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import operator
import statistics
import time
from collections.abc import Sequence

import torch
import torch.distributed as dist

from ..ir.expert_placement import Level
from ..ir.ops.row_packing import pack_rows, split_columns
from ..ir.ops.uneven_all_to_all import group_of, start, wait

_SIZES = (1 << 14, 1 << 22)  # bytes that each rank sends
_CPU_ROWS, _GPU_ROWS, _ROW_BYTES = (1 << 8, 1 << 13), (1 << 10, 1 << 15), 1 << 12  # a GPU has 264 us of launches
_REPEATS = 5
DEFAULT_TOKENS = 4096  # of a rank, where nobody says how many there are


@dataclasses.dataclass(frozen=True)
class Link:
    """Seconds of an all-to-all over a group of ranks: `latency` + bytes that leave a rank * `per_byte`."""

    latency: float
    per_byte: float

    def seconds(self, num_bytes: float) -> float:
        return self.latency + num_bytes * self.per_byte


@dataclasses.dataclass(frozen=True)
class Links:
    """Of an expert axis: all ranks at once, and at each level, coarse to fine, those that differ there alone.

    Attributes:
        handling: seconds a byte that a rank takes to pack and unpack rows, once for each exchange.
    """

    whole: Link
    levels: tuple[Link, ...]
    handling: float = 0.0


def measure_link(level: Level, device: torch.device) -> Link:
    """Collective: medians over even exchanges of two sizes."""
    group, seconds = group_of(level.group), []
    for num_bytes in _SIZES:
        each = num_bytes // level.size
        rows = torch.zeros(each * level.size, 1, dtype=torch.uint8, device=device)
        found = []
        for _ in range(_REPEATS + 1):
            dist.barrier(group)
            begin = time.perf_counter()
            arrived = wait(start(rows, [each] * level.size, [each] * level.size, level.group))
            arrived[-1].item()  # on a GPU: when it has arrived
            found.append(time.perf_counter() - begin)
        seconds.append(statistics.median(found[1:]))
    leaving = [n * (level.size - 1) / level.size for n in _SIZES]
    per_byte = max(seconds[1] - seconds[0], 0.0) / max(leaving[1] - leaving[0], 1.0)
    return Link(max(seconds[0] - leaving[0] * per_byte, 0.0), per_byte)


def measure_handling(group: str, device: torch.device) -> float:
    """Seconds a byte to pack rows and to unpack them, where all ranks do so at once: they may share processors. What
    few rows take, launches above all, is no part of it. Collective."""
    few, many = _CPU_ROWS if device.type == "cpu" else _GPU_ROWS
    least, most = (_handled(group, device, num_rows) for num_rows in (few, many))
    return max(most - least, 0.0) / ((many - few) * _ROW_BYTES)


def _handled(group: str, device: torch.device, num_rows: int) -> float:
    """Seconds of so many rows."""
    x = torch.zeros((num_rows, _ROW_BYTES), dtype=torch.uint8, device=device)
    ids = torch.arange(num_rows, dtype=torch.int32, device=device)
    place, slots = torch.zeros_like(ids)[:, None], torch.zeros_like(ids)
    offsets = torch.tensor([0, num_rows], dtype=torch.int32, device=device)
    found = []
    for _ in range(_REPEATS + 1):
        dist.barrier(group_of(group))
        begin = time.perf_counter()
        packed = pack_rows([x], [], place, ids, slots, offsets, num_rows=num_rows, num_slots=1, dedup=True)
        (rows,) = split_columns([packed], dtypes=["uint8"], widths=[_ROW_BYTES])
        rows[-1, -1].item()
        found.append(time.perf_counter() - begin)
    return min(found[1:])


@functools.lru_cache(maxsize=4096)  # a planner asks for the same few many times
def expected_parts(num_experts: int, top_k: int, parts: int) -> float:
    """On how many of equal parts of the experts a token's are, if all choices are alike."""
    if num_experts % parts:
        raise ValueError(f"{num_experts} experts in {parts} parts")
    rest = num_experts - num_experts // parts
    return parts * (1 - math.comb(rest, top_k) / math.comb(num_experts, top_k))


def predict_seconds(
    links: Links, sizes: Sequence[int], num_experts: int, top_k: int, row_bytes: float, tokens: int = DEFAULT_TOKENS
) -> dict[str, float]:
    """Seconds of one exchange of a rank's tokens, of each way; one level has none of several hops. With HALO, what
    stays in the node has as long as the hops above it take.

    Args:
        sizes: units within a unit, coarse to fine: (R, N, L) or (N, L), as of `Topology`.
        row_bytes: of a token and what travels with it.
    """
    each, ranks = tokens * row_bytes, math.prod(sizes)
    above = list(itertools.accumulate(sizes[:-1], operator.mul, initial=1))  # units that a level's are within
    levels = list(zip(links.levels, sizes, above, strict=True))
    of_ranks, nodes = expected_parts(num_experts, top_k, ranks), above[-1]
    of_hops = [expected_parts(num_experts, top_k, within * size) for _, size, within in levels]

    def handled(rows: float) -> float:
        return rows * each * links.handling

    def at_once(rows: float) -> float:
        """Over the whole axis: the links of its levels are used side by side."""
        through = [rows / within * (1 - 1 / size) * each * link.per_byte for link, size, within in levels]
        at_last = max(*through, rows * (1 - 1 / ranks) * each * links.whole.per_byte)
        return links.whole.latency + at_last + handled(rows)

    seconds = {"flat": at_once(top_k), "dedup": at_once(of_ranks)}
    if len(sizes) == 1:
        return seconds
    sent = zip(levels, of_hops, strict=True)
    *hops, last = (link.seconds(rows * (1 - 1 / size) * each) for (link, size, _), rows in sent)
    inside, num_bytes = links.levels[-1], of_ranks * (1 - 1 / sizes[-1]) * each
    halo = max(sum(hops), inside.seconds(num_bytes / nodes)) + inside.seconds(num_bytes * (1 - 1 / nodes))
    # With HALO what stays in the node is handled once, in the exchange beside the others.
    beside = sum(of_hops[:-1]) * (1 - 1 / nodes) + of_ranks
    return {**seconds, "rbd": sum(hops) + last + handled(sum(of_hops)), "halo": halo + handled(beside)}


def choose_fastest(seconds: dict[str, float]) -> str:
    """The way of the least time; of those that are alike to 2 % the simplest, in the order given. Ways of several hops
    must gain 15 %: of one expert a token they are predicted to gain 11 % and lose 6 % (benchmarks/NOTES.md)."""
    counted = {way: s / (0.85 if way in ("rbd", "halo") else 1.0) for way, s in seconds.items()}
    least = min(counted.values())
    return next(way for way, s in counted.items() if s <= 1.02 * least)
