"""Kill a rank inside of an exchange, and see what the other ranks do.

    python -m benchmarks.scaling.failures --variant dedup --ranks 4 [--seconds 20] [--out FILE]

Rank 1 trains a layer with the others. Then it kills itself (SIGKILL) in the next step when it should start its part of
an exchange of rows, or of a device-side barrier under "pull": the others have started theirs, and wait. With "+graph"
it dies instead of replaying its graph. "forward" is the first exchange of the step, "backward" the last one. The others
run two more steps: a rank without an exchange with rank 1 in this step notices its death in the next one.

Reported for each other rank: whether it raised `RanksLost`, ended otherwise (a watchdog, a CUDA error), or still waited
at the end; and the seconds from the death of rank 1. The limit of the ranks is `Plan(timeout=...)`.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import datetime
import json
import multiprocessing
import os
import signal
import tempfile
import time
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from moefx.bench.ep import VariantSet
from moefx.bench.ep_layers import Layer
from moefx.bench.file_memory import memory_of_files
from moefx.bench.rank_device import RankDevice
from moefx.bench.results import append_row
from moefx.bench.shapes import Shape, parse_shape
from moefx.ir.ops import peer_memory, row_exchange, token_gather

from .forked_ranks import fork_ranks

VICTIM, STILL_WAITS = 1, "still waits"
_PORT = "port"
_STARTS = 300.0  # seconds that ranks have until the step in which one dies
_WORST = 3.0  # limits that a rank may wait, until it counts as one that still waits


def list_moments(variant: str) -> tuple[str, ...]:
    return ("replay",) if variant.endswith("+graph") else ("forward", "backward")


class Killer:
    """Replaces the functions that start an exchange. Kills this process at a call of one of them.

    Attributes:
        calls: so far. fatal_call: the call to die at; None to count only.
    """

    def __init__(self) -> None:
        self.calls, self.fatal_call = 0, None

    def wrap(self, start: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            self.calls += 1
            if self.fatal_call is not None and self.calls == self.fatal_call:
                die()
            return start(*args, **kwargs)

        return run


def die() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()  # all earlier exchanges are done, and the others are in this one
    os.kill(os.getpid(), signal.SIGKILL)


def run_rank(variant: str, moment: str, seconds: float, device_type: str, report: Path) -> None:
    """Run one rank until rank 1 is dead, and write what happened to this one."""
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if device_type == "cuda":
        torch.cuda.set_device(rank)
    else:
        torch.set_num_threads(1)
    timeout = datetime.timedelta(seconds=_STARTS)
    port = report.with_name(_PORT)
    while not port.exists():
        time.sleep(0.05)
    store = dist.TCPStore("127.0.0.1", int(port.read_text()), is_master=False, timeout=timeout)
    backend = "nccl" if device_type == "cuda" else "gloo"
    dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=timeout)
    killer = Killer()
    places = (
        (row_exchange, "start_all_to_all"),
        (token_gather, "start_gather"),
        (token_gather, "start_scatter"),
        (peer_memory.PeerMemory, "wait_for_all"),
    )
    replaced = contextlib.ExitStack()  # until the end of the process
    if device_type == "cpu":
        replaced.enter_context(memory_of_files())
    for owner, name in places:
        replaced.enter_context(mock.patch.object(owner, name, killer.wrap(getattr(owner, name))))
    shape = parse_shape("qwen3_30b@2048") if device_type == "cuda" else Shape("tiny", 64, 32, 16, 16, 4)
    device = RankDevice(device_type)
    mesh = init_device_mesh(device_type, (world,), mesh_dim_names=("ep",))
    torch.manual_seed(0)
    node_size = world // 2 if variant in ("rbd", "halo") else world
    variants = VariantSet(shape, mesh, Layer(shape, device=device_type), node_size, device)
    name, _, captured = variant.partition("+")
    limit = f",max_tokens={shape.T}" if name in ("gather", "pull") else ""
    variant = f"{name}{limit},timeout={seconds}{'+' * bool(captured)}{captured}"
    variants.add(variant)
    if variants.failures:
        raise SystemExit(variants.failures[variant])
    step = variants.steps[variant]
    for _ in range(2):
        step.prepare(1)
        killer.calls = 0
        step()
    device.synchronize()
    step.prepare(1)
    dist.barrier()
    device.synchronize()
    if rank == VICTIM:
        report.touch()
        killer.fatal_call = {"forward": 1, "backward": killer.calls, "replay": None}[moment]
        killer.calls = 0
        if moment == "replay":
            time.sleep(0.2)
            die()
    found = dict(rank=rank, outcome="went on", message="")
    try:
        step()
        for _ in range(2):  # ranks that had no exchange with the dead one in that step
            step.prepare(1)
            step()
        device.synchronize()
        time.sleep(2 * seconds)  # a watchdog may still end this process
    except Exception as error:
        found |= dict(outcome=type(error).__name__, message=str(error)[:500])
    report.write_text(json.dumps(found))
    os._exit(0)  # the group is broken


def run_moment(variant: str, moment: str, ranks: int, seconds: float, device: str) -> list[dict[str, Any]]:
    """Run all ranks, and return what happened to each but the killed one.

    Raises:
        SystemExit: rank 1 did not die, because the ranks failed earlier.
    """
    with tempfile.TemporaryDirectory() as folder:
        reports = [Path(folder) / f"{rank}.json" for rank in range(ranks)]
        processes = fork_ranks(ranks, lambda rank: run_rank(variant, moment, seconds, device, reports[rank]))
        # In this process, so that it survives every rank. It has threads: after the forks.
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        port = Path(folder) / "port.new"
        port.write_text(str(store.port))
        port.rename(port.with_name(_PORT))
        try:
            died = _wait_for_death(processes[VICTIM], reports[VICTIM])
            ended = _wait_for_others(processes, died + _WORST * seconds + 30)
        finally:
            for process in processes:
                process.kill()
                process.join()
        return [
            _describe_end(rank, process.exitcode or 0, report, ended.get(rank, 0.0) - died, rank in ended)
            for rank, (process, report) in enumerate(zip(processes, reports, strict=True))
            if rank != VICTIM
        ]


def _wait_for_death(process: BaseProcess, report: Path) -> float:
    """Return the time at which the victim died."""
    process.join(_STARTS)
    if (code := process.exitcode) is None:
        raise SystemExit(f"rank {VICTIM} did not come to its exchange in {_STARTS:.0f} s")
    if code != -signal.SIGKILL or not report.exists():
        raise SystemExit(f"rank {VICTIM} ended with {code} before its exchange")
    return time.monotonic()


def _wait_for_others(processes: list[BaseProcess], end: float) -> dict[int, float]:
    """Return the time at which each rank ended, of those that did before `end`."""
    ended: dict[int, float] = {}
    while len(ended) < len(processes) and time.monotonic() < end:
        for rank, process in enumerate(processes):
            if rank not in ended and process.exitcode is not None:
                ended[rank] = time.monotonic()
        time.sleep(0.05)
    return ended


def _describe_end(rank: int, code: int, report: Path, seconds: float, has_ended: bool) -> dict[str, Any]:
    if not has_ended:
        return dict(rank=rank, outcome=STILL_WAITS, message="", seconds=None)
    if report.exists():
        return json.loads(report.read_text()) | dict(seconds=seconds)
    name = signal.Signals(-code).name if code < 0 else f"exit code {code}"
    return dict(rank=rank, outcome=f"ended by {name}", message="see the output of the row", seconds=seconds)


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What happened to the ranks that lived on.

    Attributes:
        is_clean: whether all raised `RanksLost`.
        worst_seconds: from the death to the last end; None if a rank still waits.
    """

    is_clean: bool
    worst_seconds: float | None


def judge(ends: list[dict[str, Any]]) -> Outcome:
    seconds = [end["seconds"] for end in ends]
    return Outcome(all(end["outcome"] == "RanksLost" for end in ends), None if None in seconds else max(seconds))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--variant", required=True, help="a dispatch, with +graph or not")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=20.0, help="the limit of an exchange, Plan(timeout=...)")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"), help="cpu only tests the benchmark")
    parser.add_argument("--out", default=None)
    options = parser.parse_args()
    for moment in list_moments(options.variant):
        # in a process of its own: the store leaves threads, and a process with threads should not fork the next ranks
        process = multiprocessing.get_context("fork").Process(target=report_moment, args=(moment, options))
        process.start()
        process.join()
        if process.exitcode:
            raise SystemExit(1)  # it has printed its error


def report_moment(moment: str, options: argparse.Namespace) -> None:
    """Run one moment, and print and append what happened."""
    ends = run_moment(options.variant, moment, options.ranks, options.seconds, options.device)
    row = dict(way=options.variant, moment=moment, ranks=options.ranks, limit_s=options.seconds, ends=ends)
    row |= dataclasses.asdict(judge(ends))
    outcomes = ", ".join(f"rank {end['rank']} {end['outcome']} ({end['seconds']} s)" for end in ends)
    print(f"{options.variant} {moment}: {outcomes}", flush=True)
    if options.out:
        append_row(row, options.out)


if __name__ == "__main__":
    main()
