"""A network, the exchanges over it, and their times: one process for each rank, in the namespace of its node."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import random
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.network.links import address, nodes

ROOT = Path(__file__).parents[2]
VARIANTS = ("flat", "dedup", "rbd", "halo", "halo,flat")


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


def measured(case: Case, repeats: int, variants: Sequence[str] = VARIANTS, links: float = 0) -> dict:
    """What `exchange.py` prints. `links`: seconds, at most, for one size of message while it measures the network."""
    port = random.randint(20000, 29000)
    world = case.nodes * case.ranks
    arguments = ["--tokens", case.tokens, "--dim", case.dim, "--experts", case.experts, "--top-k", case.top_k,
                 "--node-size", case.ranks, "--repeats", repeats, "--links", links,
                 "--variants", *variants]  # fmt: skip
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
