"""Runs cases in several processes with a gloo group: `launch(4, "tests.distributed.exchange_cases")`.

A module of cases has functions named `case_...` that take no argument; each runs on every rank at once, in one
process group for all of them, for starting processes takes longer than most cases. An error ends its rank, and
`launch` shows the output of all ranks.
"""

from __future__ import annotations

import datetime
import importlib
import os
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist

_ROOT = Path(__file__).parents[2]


def launch(
    world: int, module: str, *names: str, timeout: float = 500, environment: dict[str, str] | None = None
) -> str:
    """The output of rank 0. `names`: of cases, all of the module's without.

    Raises:
        AssertionError: a rank failed, or did not end in time; with the ends of their outputs.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(world), "OMP_NUM_THREADS": "1"}
    workers = []
    with tempfile.TemporaryDirectory() as folder:
        outputs = [Path(folder) / f"rank{rank}.txt" for rank in range(world)]
        for rank, output in enumerate(outputs):
            with output.open("w") as file:
                command = [sys.executable, "-m", "tests.distributed.launch", module, *names]
                own = os.environ | common | {"RANK": str(rank), "PYTHONPATH": str(_ROOT)} | (environment or {})
                workers.append(subprocess.Popen(command, cwd=_ROOT, env=own, stdout=file, stderr=subprocess.STDOUT))
        ended = []
        try:
            for worker in workers:
                ended.append(worker.wait(timeout=timeout))
        except subprocess.TimeoutExpired:
            pass
        finally:
            for worker in workers:
                worker.kill()
        texts = [output.read_text() for output in outputs]
    if ended != [0] * world:
        shown = "\n".join(f"-- rank {rank}: {_shortened(text)}" for rank, text in enumerate(texts))
        raise AssertionError(f"exit codes {ended}, of {world} ranks\n{shown}")
    return texts[0]


def _shortened(text: str) -> str:
    return text if len(text) < 3000 else f"{text[:500]}\n[...]\n{text[-2500:]}"


def main() -> None:
    module, *names = sys.argv[1:]
    torch.set_num_threads(1)
    dist.init_process_group(os.environ.get("BACKEND", "gloo"), timeout=datetime.timedelta(seconds=150))
    cases = importlib.import_module(module)
    for name in names or [name for name in vars(cases) if name.startswith("case_")]:
        print("running", name, flush=True)
        torch.manual_seed(dist.get_rank())
        getattr(cases, name)()
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
