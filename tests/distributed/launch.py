"""Runs cases in several processes with a gloo group: `launch(4, "tests.distributed.exchange_cases")`.

A module of cases has functions named `case_...` that take no argument; each runs on every rank at once. Starting
processes takes longer than most cases: all cases of a module run in one process group, and a `World` runs one module
after the other. All ranks are forks of one server that has imported torch and has proven common blocks (`proofs`). An
error ends its rank, and the output of all ranks is shown.
"""

from __future__ import annotations

import contextlib
import datetime
import faulthandler
import importlib
import multiprocessing
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from multiprocessing.connection import Connection
from pathlib import Path

import torch
import torch.distributed as dist

import moefx.compiler.model_proof
import moefx.compiler.survey

_ROOT = Path(__file__).parents[2]
_PATIENCE = datetime.timedelta(seconds=150)
ALL = "MOEFX_TEST_ALL"  # a variable of the environment


class World:
    """Processes that wait for modules of cases; after an error, or a rank that did not end in time, they are gone."""

    def __init__(self, size: int, environment: dict[str, str] | None = None):
        own = os.environ | {"OMP_NUM_THREADS": "1", "WORLD_SIZE": str(size)} | (environment or {})
        self.folder = tempfile.TemporaryDirectory()
        self.outputs = [Path(self.folder.name) / f"rank{rank}.txt" for rank in range(size)]
        self.workers, self.modules = [], []
        # The server runs no backward, and none of its threads lives on: its forks could not use them.
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["tests.distributed.proofs"])
        for rank, output in enumerate(self.outputs):
            modules, end = context.Pipe(duplex=False)
            worker = context.Process(target=_serve, args=(modules, output, own | {"RANK": str(rank)}), daemon=True)
            worker.start()
            modules.close()
            self.workers.append(worker)
            self.modules.append(end)

    @property
    def is_alive(self) -> bool:
        return all(worker.exitcode is None for worker in self.workers)

    def run(self, module: str, *names: str, timeout: float = 1500) -> str:
        """The output of rank 0. `names`: of cases, all of the module's without.

        Raises:
            AssertionError: a rank failed, or did not end in time; with the ends of their outputs.
        """
        for modules, output in zip(self.modules, self.outputs, strict=True):
            _done(output).unlink(missing_ok=True)
            with contextlib.suppress(BrokenPipeError):  # a rank that could not start
                modules.send([module, *names])
        until = time.monotonic() + timeout
        while None in (codes := self._codes()) and time.monotonic() < until:
            time.sleep(0.02)
        self._check(codes)
        return self.outputs[0].read_text()

    def end(self) -> None:
        """Raises: AssertionError: a rank does not leave in order."""
        for modules in self.modules:
            modules.close()
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
            shown = "\n".join(f"-- rank {rank}: {_shortened(text)}" for rank, text in enumerate(texts))
            raise AssertionError(f"exit codes {codes}, of {len(codes)} ranks\n{shown}")

    def _codes(self) -> list[int | None]:
        """Of each rank: 0 if it is through or left on purpose, None if it is at work."""
        codes = [worker.exitcode for worker in self.workers]  # before the files: one that is through may leave
        return [0 if _done(output).exists() else code for output, code in zip(self.outputs, codes, strict=True)]


def sampled(items: Iterable, n: int) -> list:
    """Each n-th, as the mark of this name does for pytest; all where it is asked for everything."""
    return list(items)[:: 1 if os.environ.get(ALL) else n]


def launch(
    world: int, module: str, *names: str, timeout: float = 1500, environment: dict[str, str] | None = None
) -> str:
    """`World.run` in processes of its own."""
    started = World(world, environment)
    try:
        output = started.run(module, *names, timeout=timeout)
        started.end()
    finally:
        started.kill()
    return output


def torchrun(
    *command: str, ranks: int = 4, timeout: float = 200, environment: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """What users type. It is repeated where torch's own fault ended a process: gloo's thread lets go of the tensors of
    the last collective while the interpreter ends (pytorch issue 190489; one in ten of plain torch programs here)."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), *command]
    own = os.environ | {"PYTHONPATH": str(_ROOT), "OMP_NUM_THREADS": "1"} | (environment or {})
    for _ in range(5):
        done = subprocess.run(launcher, cwd=_ROOT, env=own, capture_output=True, text=True, timeout=timeout)
        if "terminate called without an active exception" not in done.stderr:
            break
    return done


def _done(output: Path) -> Path:
    return output.with_suffix(".done")


def _shortened(text: str) -> str:
    return text if len(text) < 3000 else f"{text[:500]}\n[...]\n{text[-2500:]}"


def _meeting_place(folder: Path, rank: int, world: int) -> dist.Store:
    """The first rank takes a port that is free and says which: one that was free before may be another's by now."""
    said = folder / "port"
    if rank == 0:
        store = dist.TCPStore("127.0.0.1", 0, world, is_master=True, timeout=_PATIENCE, wait_for_workers=False)
        (folder / "port.new").write_text(str(store.port))
        (folder / "port.new").rename(said)
        return store
    until = time.monotonic() + _PATIENCE.total_seconds()
    while not said.exists() and time.monotonic() < until:
        time.sleep(0.02)
    return dist.TCPStore("127.0.0.1", int(said.read_text()), world, is_master=False, timeout=_PATIENCE)


def _serve(modules: Connection, output: Path, environment: dict[str, str]) -> None:
    """Run what comes through `modules` on this rank, until the other end is closed."""
    os.environ.clear()
    os.environ.update(environment)
    with output.open("w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    faulthandler.enable(2)  # a crash shows its stacks, in the error of the test
    from ..proof_memory import check_once, rewrite_once

    moefx.compiler.survey._rewrite_as_called, moefx.compiler.model_proof.check_numerically = rewrite_once, check_once
    torch.set_num_threads(1)
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = _meeting_place(output.parent, rank, world)
    backend = os.environ.get("BACKEND", "gloo")
    dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=_PATIENCE)
    with contextlib.suppress(EOFError):
        while True:
            _run(*modules.recv())
            _done(output).touch()
    dist.destroy_process_group()


def _run(module: str, *names: str) -> None:
    os.ftruncate(1, 0)  # what the modules before have shown
    os.lseek(1, 0, os.SEEK_SET)
    cases = importlib.import_module(module)
    for name in names or [name for name in vars(cases) if name.startswith("case_")]:
        print("running", name, flush=True)
        torch.manual_seed(dist.get_rank())
        getattr(cases, name)()
        dist.barrier()
    sys.stdout.flush()
