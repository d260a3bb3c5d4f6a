"""Predict the fastest dispatch from measured bandwidths and expected row counts (X-MoE section 4.2, Piper section V).

The seconds of a layer are those of its exchanges and of the host (`HOST_COSTS`). `"gather"` moves no fewer bytes than
`"dedup"`, and saves the host's wait for the row counts. `"pull"` saves it too, and moves about as many as `"dedup"`.

Letters: E experts, K slots of a token, W ranks, R racks, N nodes of a rack, L ranks of a node.
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

from ...ir.expert_placement import TopologyLevel
from ...ir.ops.row_packing import pack_rows, split_columns
from ...ir.ops.uneven_all_to_all import get_group, start_all_to_all, wait_for_collective

_MESSAGE_BYTES = (1 << 14, 1 << 22)  # sent by each rank
# A GPU needs 264 us for launches alone.
_CPU_ROWS, _GPU_ROWS, _ROW_BYTES = (1 << 8, 1 << 13), (1 << 10, 1 << 15), 1 << 12
_REPEATS = 5
_SLOT_BYTES = (4 + 4) + 4  # of an even exchange: weight and destination, weight's gradient
DEFAULT_TOKENS = 4096  # per rank, if the plan does not set them
EXCHANGES_PER_LAYER = 4  # dispatch and combine, forward and backward
_MIN_GAINS = {"rbd": 0.15, "halo": 0.15, "gather": 0.1}


@dataclasses.dataclass(frozen=True)
class HostCost:
    """The host's seconds for a layer's forward and backward.

    Attributes:
        launches: to run the operations of the layer.
        waits: for the copy of the row counts. The device is idle until the host launches more work.
        agreement: to agree with the hosts of other ranks on the number of tokens.
    """

    launches: float
    waits: float = 0.0
    agreement: float = 0.0

    def seconds(self, max_tokens: int | None = None) -> float:
        """Return the host's seconds per layer. Under `max_tokens` the hosts skip the agreement."""
        return self.launches + self.waits + self.agreement * (max_tokens is None)


# Measured on hosts of two H200s, eager, with layers whose kernels take less than half of the step (qwen3_30b, olmoe).
# A layer on one GPU takes the host 1.9 to 3.4 ms. To change a figure, run `python -m moefx bench ep` on two GPUs.
#   launches: the steps of "gather" with max_tokens (6.60 and 5.99 ms in ep_joined_h200x2.jsonl, 6.26 and 5.72 ms in
#   ep_pull_h200x2.jsonl) and of "pull" (5.91 and 5.83 ms there), less exchanges. With 256 tokens a layer with "dedup"
#   took 6.2 ms, waits included. Steps of "rbd" and "halo" over links of one kind took 2.4 and 3.7 ms more
#   (ep_mirror_h200.jsonl, qwen3_30b).
#   waits: the steps of "dedup" (9.55 and 9.07 ms), less exchanges and launches.
#   agreement: the steps of "gather" (8.82 and 9.72 ms in ep_gather_h200x2.jsonl), less those with max_tokens.
HOST_COSTS = {
    "flat": HostCost(launches=5.2e-3, waits=3.4e-3),
    "dedup": HostCost(launches=5.2e-3, waits=3.4e-3),
    "rbd": HostCost(launches=7.6e-3, waits=3.4e-3),
    "halo": HostCost(launches=8.9e-3, waits=3.4e-3),
    "gather": HostCost(launches=5.4e-3, agreement=1.1e-3),
    "pull": HostCost(launches=5.4e-3, agreement=1.1e-3),
}


@dataclasses.dataclass(frozen=True)
class Link:
    """The cost of an all-to-all over a group: `latency` + bytes that leave a rank * `per_byte`, in seconds."""

    latency: float
    per_byte: float

    def seconds(self, num_bytes: float) -> float:
        return self.latency + num_bytes * self.per_byte


@dataclasses.dataclass(frozen=True)
class Links:
    """The links of an expert axis.

    Attributes:
        whole: an all-to-all over all ranks of the axis.
        levels: coarse to fine, an all-to-all over the ranks that differ at that level only.
        handling: seconds per byte to pack and unpack rows, in each exchange.
    """

    whole: Link
    levels: tuple[Link, ...]
    handling: float = 0.0


def measure_link(level: TopologyLevel, device: torch.device) -> Link:
    """Measure a link by the medians of even exchanges of two sizes. Collective."""
    group, seconds = get_group(level.group), []
    for num_bytes in _MESSAGE_BYTES:
        rows_per_rank = num_bytes // level.size
        rows = torch.zeros(rows_per_rank * level.size, 1, dtype=torch.uint8, device=device)
        durations = []
        for _ in range(_REPEATS + 1):
            dist.barrier(group)
            begin = time.perf_counter()
            arrived = wait_for_collective(
                start_all_to_all(rows, [rows_per_rank] * level.size, [rows_per_rank] * level.size, level.group)
            )
            arrived[-1].item()  # wait for the GPU
            durations.append(time.perf_counter() - begin)
        seconds.append(statistics.median(durations[1:]))
    leaving = [n * (level.size - 1) / level.size for n in _MESSAGE_BYTES]
    per_byte = max(seconds[1] - seconds[0], 0.0) / max(leaving[1] - leaving[0], 1.0)
    return Link(max(seconds[0] - leaving[0] * per_byte, 0.0), per_byte)


def measure_handling(group: str, device: torch.device) -> float:
    """Measure the seconds per byte to pack and unpack rows, excluding launches. Collective.

    All ranks measure at the same time, because they may share processors.
    """
    few, many = _CPU_ROWS if device.type == "cpu" else _GPU_ROWS
    least, most = (_time_handling(group, device, num_rows) for num_rows in (few, many))
    return max(most - least, 0.0) / ((many - few) * _ROW_BYTES)


def _time_handling(group: str, device: torch.device, num_rows: int) -> float:
    """Return the seconds to pack and unpack `num_rows` rows: the minimum of several runs."""
    x = torch.zeros((num_rows, _ROW_BYTES), dtype=torch.uint8, device=device)
    ids = torch.arange(num_rows, dtype=torch.int32, device=device)
    destinations, slot_ids = torch.zeros_like(ids)[:, None], torch.zeros_like(ids)
    offsets = torch.tensor([0, num_rows], dtype=torch.int32, device=device)
    durations = []
    for _ in range(_REPEATS + 1):
        dist.barrier(get_group(group))
        begin = time.perf_counter()
        packed = pack_rows([x], [], destinations, ids, slot_ids, offsets, num_rows=num_rows, num_slots=1, dedup=True)
        (rows,) = split_columns([packed], dtypes=["uint8"], widths=[_ROW_BYTES])
        rows[-1, -1].item()
        durations.append(time.perf_counter() - begin)
    return min(durations[1:])


@functools.lru_cache(maxsize=4096)  # the planner repeats a few arguments many times
def compute_expected_parts(num_experts: int, top_k: int, parts: int) -> float:
    """Return the expected number of parts that hold a token's experts, if experts are split evenly and chosen
    uniformly."""
    if num_experts % parts:
        raise ValueError(f"{num_experts} experts cannot be split into {parts} equal parts")
    rest = num_experts - num_experts // parts
    return parts * (1 - math.comb(rest, top_k) / math.comb(num_experts, top_k))


def predict_seconds(
    links: Links, sizes: Sequence[int], num_experts: int, top_k: int, row_bytes: float, tokens: int = DEFAULT_TOKENS,
    gathered_bytes: float | None = None, pulled_bytes: float | None = None,
) -> dict[str, float]:  # fmt: skip
    """Predict the seconds of one exchange of a rank's tokens, for each dispatch.

    With one level, omits dispatches of several hops. With HALO, rows that stay in the node travel during the hops
    above it.

    Args:
        sizes: units within a unit, coarse to fine: (R, N, L) or (N, L), as in `Topology`.
        row_bytes: bytes of a token and of the values that travel with it.
        tokens: tokens per rank.
        gathered_bytes: bytes that a rank sends to each other rank with `"gather"`, see `count_gathered_bytes`. None
            omits `"gather"`.
        pulled_bytes: bytes that a rank reads from each other rank with `"pull"`, see `count_pulled_bytes`. None omits
            `"pull"`.
    """
    rank_bytes, ranks = tokens * row_bytes, math.prod(sizes)
    above = list(itertools.accumulate(sizes[:-1], operator.mul, initial=1))  # number of units above each level
    levels = list(zip(links.levels, sizes, above, strict=True))
    ranks_per_token, nodes = compute_expected_parts(num_experts, top_k, ranks), above[-1]
    units_per_token = [compute_expected_parts(num_experts, top_k, within * size) for _, size, within in levels]

    def predict_handling(rows: float) -> float:
        return rows * rank_bytes * links.handling

    def predict_whole_axis(rows: float) -> float:
        """Predict one exchange over the whole axis, which uses the links of all levels at the same time."""
        through = [rows / within * (1 - 1 / size) * rank_bytes * link.per_byte for link, size, within in levels]
        at_last = max(*through, rows * (1 - 1 / ranks) * rank_bytes * links.whole.per_byte)
        return links.whole.latency + at_last + predict_handling(rows)

    seconds = {"flat": predict_whole_axis(top_k), "dedup": predict_whole_axis(ranks_per_token)}
    if gathered_bytes is not None:
        seconds["gather"] = predict_whole_axis(ranks * gathered_bytes / rank_bytes)
    if pulled_bytes is not None:
        seconds["pull"] = predict_whole_axis(ranks * pulled_bytes / rank_bytes)
    if len(sizes) == 1:
        return seconds
    sent = zip(levels, units_per_token, strict=True)
    *hops, last = (link.seconds(rows * (1 - 1 / size) * rank_bytes) for (link, size, _), rows in sent)
    inside, num_bytes = links.levels[-1], ranks_per_token * (1 - 1 / sizes[-1]) * rank_bytes
    halo = max(sum(hops), inside.seconds(num_bytes / nodes)) + inside.seconds(num_bytes * (1 - 1 / nodes))
    # With HALO, rows that stay in the node are packed once, for the exchange in the node.
    parallel_handling = sum(units_per_token[:-1]) * (1 - 1 / nodes) + ranks_per_token
    return {
        **seconds,
        "rbd": sum(hops) + last + predict_handling(sum(units_per_token)),
        "halo": halo + predict_handling(parallel_handling),
    }


def count_gathered_bytes(token_bytes: float, top_k: int, tokens: int) -> float:
    """Count the bytes that a rank sends to each other rank in an exchange of `"gather"`: the mean of the layer's four
    exchanges.

    An all-gather brings each token, and for each slot a routing weight and a destination of four bytes each. A
    reduce-scatter returns the token's sum. The backward gathers the sums' gradients, and scatters those of tokens and
    weights. Every other rank gets all tokens, W*T rows; its experts need `compute_expected_parts(E, K, W) / W` of
    them.

    Args:
        token_bytes: bytes of a token's values.
        tokens: tokens of each rank, padding included.
    """
    return tokens * (token_bytes + _SLOT_BYTES * top_k / EXCHANGES_PER_LAYER)


def count_pulled_bytes(
    token_bytes: float, num_experts: int, top_k: int, ranks: int, tokens: int, max_tokens: int | None = None
) -> float:
    """Count the bytes that a rank reads from each other rank in an exchange of `"pull"`: the mean of the layer's four
    exchanges.

    It reads the weights and destinations of all tokens, and for uniform routing `compute_expected_parts(E, K, W) / W`
    of the tokens, whose sums, and the gradients of both, are read as often.

    Args:
        token_bytes: bytes of a token's values.
        tokens: tokens of each rank. max_tokens: the same with padding.
    """
    needed = compute_expected_parts(num_experts, top_k, ranks) / ranks
    return tokens * token_bytes * needed + (max_tokens or tokens) * _SLOT_BYTES * top_k / EXCHANGES_PER_LAYER


def choose_fastest(seconds: dict[str, float]) -> str:
    """Return the fastest dispatch. Within 2 %, prefers the first, which is the simplest.

    Dispatches of several hops must gain 15 %: with one expert per token, a predicted gain of 11 % was a measured loss
    of 6 % (benchmarks/NOTES.md). `"gather"` must gain 10 %: its buffers have room for the tokens of all ranks.
    """
    weighted = {dispatch: s / (1 - _MIN_GAINS.get(dispatch, 0.0)) for dispatch, s in seconds.items()}
    least = min(weighted.values())
    return next(dispatch for dispatch, s in weighted.items() if s <= 1.02 * least)


def choose_dispatch(seconds: dict[str, float], max_tokens: int | None = None) -> str:
    """Return the dispatch with the fastest layer, by exchanges and the host's time.

    Exchanges alone decide between `"flat"` and `"dedup"`, which take the host as long. `"pull"` is predicted, and never
    chosen: nobody has measured it over more than two GPUs, and a lost rank ends other processes by a CUDA error.

    Args:
        seconds: of one exchange, by dispatch; see `predict_seconds`.
        max_tokens: as in `Plan`.
    """
    single = choose_fastest({dispatch: s for dispatch, s in seconds.items() if dispatch in ("flat", "dedup")})
    layer = {
        dispatch: EXCHANGES_PER_LAYER * s + HOST_COSTS[dispatch].seconds(max_tokens) for dispatch, s in seconds.items()
    }
    return choose_fastest(
        {
            dispatch: s
            for dispatch, s in layer.items()
            if dispatch == single or dispatch not in ("flat", "dedup", "pull")
        }
    )
