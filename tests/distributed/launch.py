"""Run functions of a module on several ranks at once: `launch(4, "tests.distributed.exchange_cases")`.

A module `*_cases.py` has functions `case_...` without arguments. Each runs on all ranks of one gloo group. A
`RankPool` keeps its processes between cases, since starting them takes longer than most cases. All ranks are forks of
one server, which has imported torch and proven common blocks (`proofs`). An error ends its rank; the test fails with
the output of all ranks.
"""

from __future__ import annotations

import contextlib
import datetime
import faulthandler
import importlib
import multiprocessing
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from multiprocessing.connection import Connection
from pathlib import Path

import torch
import torch.distributed as dist

import moefx.compiler.check_policy
import moefx.compiler.equal_modules

_ROOT = Path(__file__).parents[2]
TIMEOUT = datetime.timedelta(seconds=150)
ALL_CASES = "MOEFX_TEST_ALL"  # an environment variable: `sampled` keeps all items


def list_cases(module: str) -> list[str]:
    """Return the names of the cases of a module of this folder, without importing it."""
    return re.findall(
        r"^(?:def )?(case_\w+)(?:\(| = )", (Path(__file__).parent / f"{module}.py").read_text(), re.MULTILINE
    )


class RankPool:
    """Processes that run cases on demand. They are killed after an error or a timeout.

    Args:
        size: number of ranks.
        environment: additional environment variables of the ranks.
    """

    def __init__(self, size: int, environment: dict[str, str] | None = None):
        variables = os.environ | {"OMP_NUM_THREADS": "1", "WORLD_SIZE": str(size)} | (environment or {})
        self.folder = tempfile.TemporaryDirectory()
        self.outputs = [Path(self.folder.name) / f"rank{rank}.txt" for rank in range(size)]
        self.workers, self.requests = [], []
        # The server must run no backward and leave no threads: its forks could not use them.
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["tests.distributed.proofs"])
        for rank, output in enumerate(self.outputs):
            receiver, sender = context.Pipe(duplex=False)
            arguments = (receiver, output, variables | {"RANK": str(rank)})
            worker = context.Process(target=_serve, args=arguments, daemon=True)
            worker.start()
            receiver.close()
            self.workers.append(worker)
            self.requests.append(sender)

    @property
    def is_alive(self) -> bool:
        return all(worker.exitcode is None for worker in self.workers)

    def run(self, module: str, *names: str, timeout: float = 1500) -> str:
        """Run cases on all ranks.

        Args:
            module: the full name of the module.
            names: names of its functions; default: all cases.
            timeout: seconds.

        Returns:
            The output of rank 0.

        Raises:
            AssertionError: a rank failed or exceeded the timeout. Shows the ends of all outputs.
        """
        for sender, output in zip(self.requests, self.outputs, strict=True):
            _done_file(output).unlink(missing_ok=True)
            with contextlib.suppress(BrokenPipeError):  # a rank that could not start
                sender.send([module, *names])
        deadline = time.monotonic() + timeout
        while None in (codes := self._exit_codes()) and time.monotonic() < deadline:
            time.sleep(0.02)
        self._check(codes)
        return self.outputs[0].read_text()

    def end(self) -> None:
        """Raises: AssertionError: a rank fails while it ends its process group."""
        for sender in self.requests:
            sender.close()
        for worker in self.workers:
            worker.join(timeout=60)
        self._check([worker.exitcode for worker in self.workers])

    def kill(self) -> None:
        for worker in self.workers:
            worker.kill()
            worker.join()

    def _check(self, codes: list[int | None]) -> None:
        if codes != [0] * len(codes):
            self.kill()
            texts = [output.read_text() if output.exists() else "did not start" for output in self.outputs]
            text = "\n".join(f"-- rank {rank}: {_shorten(text)}" for rank, text in enumerate(texts))
            raise AssertionError(f"exit codes {codes}, of {len(codes)} ranks\n{text}")

    def _exit_codes(self) -> list[int | None]:
        """Return 0 for each rank that has run the cases or called `os._exit(0)`, None for one that is running them."""
        codes = [worker.exitcode for worker in self.workers]  # read before the files: a rank that is done may exit
        return [0 if _done_file(output).exists() else code for output, code in zip(self.outputs, codes, strict=True)]


def sampled(items: Iterable, n: int) -> list:
    """Return each n-th item, like the pytest mark of this name, or all with `MOEFX_TEST_ALL=1`."""
    return list(items)[:: 1 if os.environ.get(ALL_CASES) else n]


def launch(
    size: int, module: str, *names: str, timeout: float = 1500, environment: dict[str, str] | None = None
) -> str:
    """Run cases in new processes: see `RankPool` and `RankPool.run`."""
    pool = RankPool(size, environment)
    try:
        output = pool.run(module, *names, timeout=timeout)
        pool.end()
    finally:
        pool.kill()
    return output


def torchrun(
    *command: str, ranks: int = 4, timeout: float = 200, environment: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a command as users type it.

    Repeats it if gloo aborts the process: its thread may release the tensors of the last collective while the
    interpreter ends (pytorch issue 190489; about one in ten runs of plain torch programs).
    """
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), *command]
    variables = os.environ | {"PYTHONPATH": str(_ROOT), "OMP_NUM_THREADS": "1"} | (environment or {})
    for _ in range(5):
        result = subprocess.run(launcher, cwd=_ROOT, env=variables, capture_output=True, text=True, timeout=timeout)
        if "terminate called without an active exception" not in result.stderr:
            break
    return result


def _done_file(output: Path) -> Path:
    """Return the file that a rank creates after its cases."""
    return output.with_suffix(".done")


def _shorten(text: str) -> str:
    return text if len(text) < 3000 else f"{text[:500]}\n[...]\n{text[-2500:]}"


def _create_store(folder: Path, rank: int, size: int) -> dist.Store:
    """Create the store of the process group.

    Rank 0 binds port 0 and writes the port that it got to a file. A port chosen in advance may be taken meanwhile.
    """
    port_file = folder / "port"
    if rank == 0:
        store = dist.TCPStore("127.0.0.1", 0, size, is_master=True, timeout=TIMEOUT, wait_for_workers=False)
        (folder / "port.new").write_text(str(store.port))
        (folder / "port.new").rename(port_file)
        return store
    deadline = time.monotonic() + TIMEOUT.total_seconds()
    while not port_file.exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    return dist.TCPStore("127.0.0.1", int(port_file.read_text()), size, is_master=False, timeout=TIMEOUT)


def _serve(requests: Connection, output: Path, environment: dict[str, str]) -> None:
    """Run the requested cases on this rank, until the pool closes its end of `requests`."""
    os.environ.clear()
    os.environ.update(environment)
    with output.open("w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    faulthandler.enable(2)  # a crash shows its stacks in the error of the test
    from ..proof_memory import check_once, rewrite_once

    moefx.compiler.equal_modules._rewrite_as_called = rewrite_once
    moefx.compiler.check_policy.check_numerically = check_once
    torch.set_num_threads(1)
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = _create_store(output.parent, rank, size)
    backend = os.environ.get("BACKEND", "gloo")
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=TIMEOUT)
    with contextlib.suppress(EOFError):
        while True:
            _run_cases(*requests.recv())
            _done_file(output).touch()
    dist.destroy_process_group()


def _run_cases(module: str, *names: str) -> None:
    os.ftruncate(1, 0)  # removes the output of the request before
    os.lseek(1, 0, os.SEEK_SET)
    cases = importlib.import_module(module)
    for name in names or [name for name in vars(cases) if name.startswith("case_")]:
        print(f"running {name} at {time.strftime('%X')}", flush=True)
        torch.manual_seed(dist.get_rank())
        getattr(cases, name)()
        dist.barrier()
    sys.stdout.flush()
