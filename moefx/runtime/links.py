"""Which way of rows is fastest: bandwidths as measured, rows as expected (X-MoE section 4.2, Piper section V).

Letters: E experts, K of a token, W ranks, N nodes, L ranks of a node.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
import time

import torch
import torch.distributed as dist

from ..ir.payload import group_of, start, wait
from ..ir.placement import Level

_SIZES = (1 << 14, 1 << 22)  # bytes that each rank sends
_REPEATS = 5
TOKENS = 4096  # of a rank, where nobody says how many there are


@dataclasses.dataclass(frozen=True)
class Link:
    """Seconds of an all-to-all over a group of ranks: `latency` + bytes that leave a rank * `per_byte`."""

    latency: float
    per_byte: float

    def seconds(self, num_bytes: float) -> float:
        return self.latency + num_bytes * self.per_byte


@dataclasses.dataclass(frozen=True)
class Links:
    """Of an expert axis over nodes: all ranks at once, those of different nodes, those of one node."""

    whole: Link
    inter: Link
    intra: Link


def measured(level: Level, device: torch.device) -> Link:
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


def expected_parts(num_experts: int, top_k: int, parts: int) -> float:
    """On how many of equal parts of the experts a token's are, if all choices are alike."""
    if num_experts % parts:
        raise ValueError(f"{num_experts} experts in {parts} parts")
    rest = num_experts - num_experts // parts
    return parts * (1 - math.comb(rest, top_k) / math.comb(num_experts, top_k))


def predicted(
    links: Links, nodes: int, ranks: int, num_experts: int, top_k: int, row_bytes: float, tokens: int = TOKENS
) -> dict[str, float]:
    """Seconds of one exchange of a rank's tokens, of each way.

    Args:
        nodes: N. ranks: L. row_bytes: of a token and what travels with it.
    """
    each = tokens * row_bytes
    of_ranks = expected_parts(num_experts, top_k, nodes * ranks)
    of_nodes = expected_parts(num_experts, top_k, nodes)
    away, beside = (nodes - 1) / nodes, (ranks - 1) / ranks

    def at_once(rows: float) -> float:
        """Over the whole axis: its links between nodes and within one are used side by side."""
        through = max(rows * away * each * links.inter.per_byte, rows / nodes * beside * each * links.intra.per_byte)
        return links.whole.latency + max(through, rows * (1 - 1 / (nodes * ranks)) * each * links.whole.per_byte)

    def halo(rows_away: float, rows: float) -> float:
        first = max(links.inter.seconds(rows_away * each), links.intra.seconds(rows / nodes * beside * each))
        return first + links.intra.seconds(rows * away * beside * each)

    return {
        "flat": at_once(top_k),
        "dedup": at_once(of_ranks),
        "rbd": links.inter.seconds(of_nodes * away * each) + links.intra.seconds(of_ranks * beside * each),
        "halo": halo(of_nodes * away, of_ranks),
    }


def fastest(seconds: dict[str, float]) -> str:
    """The way of the least time; of those that are alike to 2 % the simplest, in the order given. Ways of several hops
    must gain 15 %: what packing and adding up between hops costs is not in the prediction (benchmarks/NOTES.md)."""
    counted = {way: s / (0.85 if way in ("rbd", "halo") else 1.0) for way, s in seconds.items()}
    least = min(counted.values())
    return next(way for way, s in counted.items() if s <= 1.02 * least)
