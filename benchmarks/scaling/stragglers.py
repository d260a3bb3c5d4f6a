"""The distribution of many exchanges between ranks by size (X-MoE figures 18 and 19).

torchrun --nproc-per-node 8 -m benchmarks.scaling.stragglers [--repeats 1000] [--out FILE]

All-to-alls of all ranks, and sends to the next rank. The time of an exchange is its slowest rank's. Reported for each
size: percentiles 0 to 100 of the repetitions in ms, percentile 99.9, and the share beyond twice the median.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from moefx.bench import link_times
from moefx.bench.link_times import RepeatedExchange
from moefx.bench.rank_device import start_ranks
from moefx.bench.results import append_row


def describe_distribution(exchange: RepeatedExchange) -> dict[str, Any]:
    """Return the figures of one size."""
    ascending = sorted(1e3 * seconds for seconds in exchange.seconds)
    median = statistics.median(ascending)
    return dict(
        kind=exchange.kind,
        ranks=exchange.ranks,
        num_bytes=exchange.num_bytes,
        repeats=len(ascending),
        ms=median,
        percentiles_ms=[compute_percentile(ascending, i / 100) for i in range(101)],
        p999_ms=compute_percentile(ascending, 0.999),
        late_share=sum(ms > 2 * median for ms in ascending) / len(ascending),
    )


def compute_percentile(ascending: Sequence[float], share: float) -> float:
    """Return the smallest value that at least this share of all values does not exceed."""
    return ascending[max(0, -(-round(share * len(ascending) * 1000) // 1000) - 1)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=1000, help="of each size")
    parser.add_argument("--seconds", type=float, default=40.0, help="that one size may take; else fewer repetitions")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"), help="cpu only tests the benchmark")
    parser.add_argument("--out", default=None)
    options = parser.parse_args()
    device = torch.device(start_ranks("stragglers", options.device).type)
    world = dist.get_world_size()
    ((level, unit),) = link_times.list_levels(device, world, ())
    for exchange in link_times.measure_level(level, unit, world, device, options.repeats, options.seconds):
        if dist.get_rank() == 0:
            print(exchange, flush=True)
            if options.out:
                append_row(describe_distribution(exchange), options.out)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
