"""Run scripts one after another on each rank: `torchrun ... -m tests.distributed.run_scripts A.py B.py`.

Each script runs in a fork. Forks share the imports, which take longer than the scripts, but not process groups. Rank 0
prints a separator before each script.
"""

from __future__ import annotations

import os
import runpy
import sys
import traceback

import torch.distributed as dist

import moefx.api
import moefx.distribution.spread_models  # noqa: F401

SEPARATOR = "===== next script =====\n"


def run(file: str) -> int:
    """Run a script in a fork and return its exit status."""
    child = os.fork()
    if child:
        return os.waitpid(child, 0)[1]
    # torchrun's store holds the addresses of earlier scripts.
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = dist.FileStore(f"{file}.store", world)
    start = dist.init_process_group
    dist.init_process_group = lambda backend: start(backend, store=store, rank=rank, world_size=world)
    try:
        runpy.run_path(file, run_name="__main__")
        sys.stdout.flush()
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
    os._exit(0)


if __name__ == "__main__":
    for file in sys.argv[1:]:
        if os.environ["RANK"] == "0":
            print(SEPARATOR, end="", flush=True)
        if run(file):
            sys.exit(f"{file} failed")
