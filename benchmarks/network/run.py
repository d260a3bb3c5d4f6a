"""Ways of rows over a slow network between nodes, emulated on one machine: namespaces, gloo, links of a given rate.

python -m benchmarks.network.run [--json] [--only 2x2] [--sweep]

Needs Linux and root. Bandwidth is emulated, not latency. Dispatch and combine are timed apart, on the slowest rank,
variants in turns; medians. `--sweep` is for other numbers of nodes and sizes of messages, as figure 8 of the Piper
paper.
"""

from __future__ import annotations

import argparse
import dataclasses
import json

from benchmarks.environment import environment
from benchmarks.network import sweep
from benchmarks.network.case import ROOT, Case, measured
from benchmarks.network.links import missing

CASES = (
    Case(2, 2, 512, 1024), Case(2, 2, 1024, 2048), Case(4, 2, 256, 2048), Case(4, 2, 512, 1024),
    Case(2, 2, 512, 1024, "100mbit", top_k=2), Case(4, 2, 128, 1024, "400mbit"),
    Case(4, 2, 512, 1024, racks=2, rack_rate="100mbit"),
    # What "auto" is for: one expert a token, and links between nodes as fast as those within one.
    Case(2, 2, 512, 1024, top_k=1), Case(2, 2, 512, 1024, "20gbit"),
)  # fmt: skip


def table(case: Case, found: dict) -> str:
    lines = [f"{case.name}   a token's experts are on {case.nodes_of_a_token:.2f} nodes (uniform)"]
    variants, tokens = found["ways"], case.tokens * case.nodes * case.ranks
    flat = variants["flat"]
    for variant, r in variants.items():
        speed = " ".join(f"{part} {r[part]:8.1f} ms {flat[part] / r[part]:5.2f}x" for part in ("dispatch", "combine"))
        rows = f"{r['rows'] / tokens:.3f} rows a token leave the node"
        lines.append(f"  {variant:10} {speed}   {rows}   error {r['error']:.1e}")
    return "\n".join([*lines, f"  auto: {found['auto']}"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="write benchmarks/results/network.json, or ..._sweep.json")
    parser.add_argument("--sweep", action="store_true", help="nodes and sizes of messages; each case at least twice")
    parser.add_argument("--only", default="", help="cases whose name begins so")
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    if lack := missing():
        raise SystemExit(f"skipped: {lack}")
    results = []
    for case in [c for c in (sweep.CASES if args.sweep else CASES) if c.name.startswith(args.only)]:
        if args.sweep:
            found: dict = {"runs": sweep.steady(case, args.repeats)}
            print(sweep.line(case, found["runs"]), flush=True)
        else:
            found = measured(case, args.repeats)
            print(table(case, found), flush=True)
        results.append({**dataclasses.asdict(case), **found})
    if args.json:
        path = ROOT / "benchmarks" / "results" / ("network_sweep.json" if args.sweep else "network.json")
        path.write_text(json.dumps({"environment": environment(), "cases": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
