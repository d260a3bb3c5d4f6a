"""Start ranks as forks of one process, which has imported torch and moefx once.

    python -m benchmarks.scaling.forked_ranks RANKS MODULE [ARGUMENT ...]

Dry runs take this instead of torchrun: on two cores, eight imports take longer than most rows. The parent has no
threads and no CUDA context, so its forks may use both.
"""

from __future__ import annotations

import multiprocessing
import os
import runpy
import socket
import sys
import time
from collections.abc import Callable, Sequence
from multiprocessing.process import BaseProcess

# Without it torch asks the driver whether there are GPUs, and forks could use none.
os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")

import moefx.bench.ep
import moefx.bench.train  # noqa: F401


def fork_ranks(ranks: int, run: Callable[[int], None]) -> list[BaseProcess]:
    """Start `run(rank)` in a fork for each rank, with the variables that torchrun sets but for the store's."""
    context = multiprocessing.get_context("fork")

    def run_rank(rank: int) -> None:
        os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        os.environ |= {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
        run(rank)

    sys.stdout.flush()
    processes: list[BaseProcess] = [context.Process(target=run_rank, args=(rank,)) for rank in range(ranks)]
    for process in processes:
        process.start()
    return processes


def run_module(ranks: int, module: str, arguments: Sequence[str]) -> list[int]:
    """Run a module on all ranks of one process group. If a rank fails, end the others, as torchrun does.

    Returns:
        The exit codes of the ranks that ended by themselves and failed.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}

    def run(rank: int) -> None:
        sys.argv = [module, *arguments]
        runpy.run_module(module, run_name="__main__", alter_sys=True)

    processes = fork_ranks(ranks, run)
    while any(process.exitcode is None for process in processes):
        if any(process.exitcode for process in processes):
            time.sleep(0.5)  # the others may have the same error to print
            break
        time.sleep(0.05)
    codes = [process.exitcode for process in processes if process.exitcode]
    for process in processes:
        process.kill()
        process.join()
    return codes


def main() -> None:
    ranks, module, *arguments = sys.argv[1:]
    if codes := run_module(int(ranks), module, arguments):
        raise SystemExit(f"exit codes of ranks: {codes}")


if __name__ == "__main__":
    main()
