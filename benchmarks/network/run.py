"""Ways of rows over a slow network between nodes, emulated on one machine: namespaces, gloo, links of a given rate.

python -m benchmarks.network.run [--json] [--only 2x2]

Needs Linux and root. Bandwidth is emulated, not latency. Dispatch and combine are timed apart, on the slowest rank,
ways in turns; medians.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import os
import random
import subprocess
import sys
from pathlib import Path

from benchmarks.environment import environment
from benchmarks.network.links import address, missing, nodes

ROOT = Path(__file__).parents[2]
WAYS = ("flat", "dedup", "rbd", "halo", "halo,flat")


@dataclasses.dataclass(frozen=True)
class Case:
    nodes: int
    ranks: int  # of a node
    tokens: int
    dim: int
    rate: str = "200mbit"
    experts: int = 256
    top_k: int = 8
    racks: int = 1
    rack_rate: str = ""

    @property
    def name(self) -> str:
        racks = f", {self.racks} racks at {self.rack_rate}" if self.racks > 1 else ""
        return f"{self.nodes}x{self.ranks}, T={self.tokens} H={self.dim} k={self.top_k} {self.rate}{racks}"

    @property
    def nodes_of_a_token(self) -> float:
        """How many nodes a token's experts are on, under uniform routing."""
        n, e, k = self.nodes, self.experts, self.top_k
        return n * (1 - math.comb(e - e // n, k) / math.comb(e, k))


CASES = (
    Case(2, 2, 512, 1024), Case(2, 2, 1024, 2048), Case(4, 2, 256, 2048), Case(4, 2, 512, 1024),
    Case(2, 2, 512, 1024, "100mbit", top_k=2), Case(4, 2, 128, 1024, "400mbit"),
    Case(4, 2, 512, 1024, racks=2, rack_rate="100mbit"),
    # What "auto" is for: one expert a token, and links between nodes as fast as those within one.
    Case(2, 2, 512, 1024, top_k=1), Case(2, 2, 512, 1024, "20gbit"),
)  # fmt: skip


def measured(case: Case, repeats: int) -> dict:
    port = random.randint(20000, 29000)
    world = case.nodes * case.ranks
    arguments = ["--tokens", case.tokens, "--dim", case.dim, "--experts", case.experts, "--top-k", case.top_k,
                 "--node-size", case.ranks, "--repeats", repeats, "--ways", *WAYS]  # fmt: skip
    if case.racks > 1:
        arguments += ["--levels", world // case.racks]
    workers = []
    with nodes(case.nodes, case.rate, case.racks, case.rack_rate) as made:
        for rank in range(world):
            space, interface = made[rank // case.ranks]
            own = {"RANK": str(rank), "WORLD_SIZE": str(world), "GLOO_SOCKET_IFNAME": interface, "OMP_NUM_THREADS": "1",
                   "MASTER_ADDR": address(0), "MASTER_PORT": str(port), "PYTHONPATH": str(ROOT)}  # fmt: skip
            command = ["ip", "netns", "exec", space, sys.executable, "-m", "benchmarks.network.exchange"]
            output = subprocess.PIPE if rank == 0 else subprocess.DEVNULL
            command += map(str, arguments)
            workers.append(subprocess.Popen(command, env=os.environ | own, cwd=ROOT, text=True, stdout=output))
        output, _ = workers[0].communicate(timeout=900)
        for worker in workers:
            if worker.wait(timeout=60):
                raise SystemExit(f"{case.name}: a rank failed")
    return json.loads(output.splitlines()[-1])


def table(case: Case, found: dict) -> str:
    lines = [f"{case.name}   a token's experts are on {case.nodes_of_a_token:.2f} nodes (uniform)"]
    ways, tokens = found["ways"], case.tokens * case.nodes * case.ranks
    flat = ways["flat"]
    for way, r in ways.items():
        speed = " ".join(f"{part} {r[part]:8.1f} ms {flat[part] / r[part]:5.2f}x" for part in ("dispatch", "combine"))
        rows = f"{r['rows'] / tokens:.3f} rows a token leave the node"
        lines.append(f"  {way:10} {speed}   {rows}   error {r['error']:.1e}")
    return "\n".join([*lines, f"  auto: {found['auto']}"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="write benchmarks/results/network.json")
    parser.add_argument("--only", default="", help="cases whose name begins so")
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    if lack := missing():
        raise SystemExit(f"skipped: {lack}")
    results = []
    for case in [c for c in CASES if c.name.startswith(args.only)]:
        found = measured(case, args.repeats)
        print(table(case, found), flush=True)
        results.append({**dataclasses.asdict(case), **found})
    if args.json:
        path = ROOT / "benchmarks" / "results" / "network.json"
        path.write_text(json.dumps({"environment": environment(), "cases": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
