"""Exchanges over the emulated network beside what the planner's formulas say, once `bench platform` measured its links.

python -m benchmarks.network.predicted [--json] [--only 2x2]

Bytes must be equal (a rank fails otherwise). Seconds: by the closed form, for uniform routing, and by the rows that
these tokens sent over the busiest link, as the simulation of a step counts them.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import math
import operator

import torch

from benchmarks.environment import environment
from benchmarks.network.case import ROOT, Case, measured
from benchmarks.network.links import missing
from moefx.bench.link_times import RepeatedExchange
from moefx.bench.platform_results import PlatformResults
from moefx.planner.communication import build_exchange_sheet, collect_level_values, combine_links
from moefx.planner.platforms import Platform, find_platform
from moefx.planner.simulation.network import build_fabric

CASES = (
    Case(2, 2, 512, 1024), Case(2, 2, 1024, 2048), Case(4, 2, 256, 2048), Case(4, 2, 512, 1024),
    Case(2, 2, 2048, 1024, "100mbit", top_k=2), Case(4, 2, 256, 1024, "400mbit"), Case(2, 2, 4096, 1024, top_k=1),
)  # fmt: skip
VARIANTS = ("flat", "dedup", "rbd", "halo")
PARTS = {"dispatch": "there", "combine": "back"}


def platform(links: dict) -> Platform:
    found = PlatformResults(
        "the emulated network", None, links["handling"], [RepeatedExchange(**r) for r in links["exchanges"]]
    )
    *finer, last = found.networks()
    networks = (*finer, dataclasses.replace(last, ranks=0))
    return dataclasses.replace(find_platform("dgx-h100"), networks=networks, handling=found.handling)


def closed(case: Case, here: Platform, variant: str, width: int) -> float:
    """Seconds of one direction, rows of so many bytes."""
    sizes, networks = here.list_levels(case.nodes * case.ranks)
    links = tuple((n.latency, 1 / n.bandwidth) for n in networks)
    level = collect_level_values(sizes, links, combine_links(sizes, links), here.handling)
    return build_exchange_sheet(len(sizes))(
        E=case.experts, k=case.top_k, t=case.tokens, w=width, w1=width, w_all=width, **level
    )[f"T_{variant}"]


def of_rows(here: Platform, traffic: dict, width: int) -> float:
    """Seconds of one direction, of the rows that were sent."""
    hops = torch.tensor(traffic["hops"]).double()
    ranks, by_level = hops.shape[-1], len(hops) > 1
    links = build_fabric(here, range(ranks))
    behind = [ranks // units for units in itertools.accumulate(traffic["sizes"], operator.mul, initial=1)]
    latencies = [next(n.latency for n in here.networks if not n.ranks or unit <= n.ranks) for unit in behind[:-1]]
    if not by_level:
        latencies = [max(n.latency for n in here.networks)]
    took = [
        float(links.compute_busiest_link_seconds(hop * width)) + alpha
        for hop, alpha in zip(hops, latencies, strict=True)
    ]
    *before, last = took
    first, moved = sum(before), hops
    if traffic["beside"] is not None:
        beside = torch.tensor(traffic["beside"]).double()
        first, moved = (
            max(first, float(links.compute_busiest_link_seconds(beside * width)) + latencies[-1]),
            torch.cat([hops, beside[None]]),
        )
    handled = float((moved.sum(1) + moved.sum(2)).sum(0).max()) / 2
    return first + last + handled * width * here.handling


def compared(case: Case, found: dict) -> list[dict]:
    here, rows = platform(found["links"]), []
    for (variant, result), (part, width) in itertools.product(found["ways"].items(), PARTS.items()):
        traffic = found["traffic"][variant]
        seconds = result[part] / 1e3
        errors = [p / seconds - 1 for p in (closed(case, here, variant, traffic[width]),
                                            of_rows(here, traffic, traffic[width]))]  # fmt: skip
        rows.append({"way": variant, "part": part, "ms": result[part], "bytes": traffic["bytes"], "closed": errors[0],
                     "of_rows": errors[1]})  # fmt: skip
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="write benchmarks/results/network_predicted.json")
    parser.add_argument("--only", default="", help="cases whose name begins so")
    parser.add_argument("--repeats", type=int, default=15)
    args = parser.parse_args()
    if lack := missing():
        raise SystemExit(f"skipped: {lack}")
    results = []
    for case in [c for c in CASES if c.name.startswith(args.only)]:
        found = measured(case, args.repeats, VARIANTS, links=4)
        here, rows = platform(found["links"]), compared(case, found)
        print(case.name)
        for network in here.networks:
            print(f"  {network.name:8} {network.bandwidth / 1e6:8.1f} MB/s of a rank, {1e3 * network.latency:.2f} ms")
        for row in rows:
            print(f"  {row['way']:6} {row['part']:9} {row['ms']:8.1f} ms   closed form {row['closed']:+.1%}   "
                  f"of the rows sent {row['of_rows']:+.1%}", flush=True)  # fmt: skip
        results.append({**dataclasses.asdict(case), "rows": rows, "networks": [
            {k: v for k, v in dataclasses.asdict(n).items() if k != "source"} for n in here.networks]})  # fmt: skip
    every = [abs(row[how]) for result in results for row in result["rows"] for how in ("closed", "of_rows")]
    print(f"worst {max(every):.1%}, mean {math.fsum(every) / len(every):.1%}")
    if args.json:
        path = ROOT / "benchmarks" / "results" / "network_predicted.json"
        path.write_text(json.dumps({"environment": environment(), "cases": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
