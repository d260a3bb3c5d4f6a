"""Measure this machine for the planner, and write a platform file.

    python -m moefx bench platform --out here.json                               one device
    torchrun --nproc-per-node 8 -m moefx bench platform --out here.json          a node, and exchanges within it
    torchrun --nnodes 4 ... -m moefx bench platform --levels 32 --out here.json  nodes, and units of 32 ranks above

GEMMs, attention, copies and experts in many shapes give the rates of the device. All-to-all and sends of growing sizes,
at each level of the topology, give latency, bandwidth, and the spread of repetitions. Use the file with
`python -m moefx plan MODEL --platform here.json --gpus N`. `--base` provides figures that cannot be measured: the data
sheet's peak, networks of more devices, and with `--only exchanges` the device. It takes minutes, about three on one
thread of a CPU, and prints its progress.
"""

from __future__ import annotations

import importlib.util
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ..planner.platforms import PLATFORMS, find_platform
from ..runtime.ranks.link_costs import measure_handling
from ..runtime.ranks.topology import resolve_node_size
from . import link_times
from .device_times import Machine
from .link_times import RepeatedExchange
from .platform_results import DeviceResults, PlatformResults, format_report
from .rate_fit import ExpertTime
from .results import append_row, build_parser


def main(argv: Sequence[str] | None = None) -> None:
    parser = build_parser("platform", __doc__, out="write the platform to this file (default: platform.json)")
    parser.set_defaults(out="platform.json")
    text = "device: no exchanges; exchanges: the device is --base's"
    parser.add_argument("--only", choices=["device", "exchanges"], help=text)
    parser.add_argument("--raw", metavar="FILE", help="every measurement too, a JSON line each, to this new file")
    parser.add_argument("--read", metavar="FILE", help="compute the platform from a file of --raw, and measure nothing")
    parser.add_argument("--plot", metavar="FILE", help="a picture of all repetitions; needs matplotlib")
    parser.add_argument("--name", default="here", help="of the platform (default: here)")
    parser.add_argument(
        "--base", metavar="P", help=f"{', '.join(PLATFORMS)} or a file, for what cannot be measured here"
    )
    parser.add_argument("--device", choices=["cuda", "cpu"], help="default: cuda, where there is one")
    parser.add_argument(
        "--dtype", choices=["bfloat16", "float16", "float32"], help="default: bfloat16; on the CPU float32"
    )
    parser.add_argument("--node-size", type=int, metavar="N", help="ranks of a node (default: LOCAL_WORLD_SIZE)")
    parser.add_argument("--levels", type=int, nargs="*", default=[], metavar="N", help="ranks of units above a node")
    parser.add_argument("--repeats", type=int, default=100, help="of each size of exchange (default: 100)")
    parser.add_argument("--seconds", type=float, default=10.0, help="that one size may take (default: 10)")
    options = parser.parse_args(argv)
    if options.only == "exchanges" and not options.base:
        parser.error("--only exchanges measures no device: say whose it is with --base")
    if options.raw and Path(options.raw).exists():
        parser.error(f"--raw {options.raw} is there already, and a file holds one run")
    base = find_platform(options.base) if options.base else None  # before minutes of work
    if options.plot and importlib.util.find_spec("matplotlib") is None:
        parser.error("--plot needs matplotlib: pip install 'moefx[plot]'")
    if options.read:
        results = PlatformResults.read(options.read)
    else:
        device = _join(options.device)
        try:
            results = _measure(options, device)
            dist.barrier()  # an exit right behind gloo's last collective may abort in torch 2.13 (pytorch issue 190489)
            if dist.get_rank():
                return
        finally:
            dist.destroy_process_group()
        for row in results.rows() if options.raw else ():
            append_row(row, options.raw)
    platform = results.platform(options.name, base)
    print(format_report(results, platform))
    Path(options.out).write_text(platform.to_json() + "\n")
    if options.plot:
        plot(results.exchanges, options.plot)
    print(f"wrote {', '.join(filter(None, (options.out, options.raw, options.plot)))}")


def _measure(options: Any, device: torch.device) -> PlatformResults:
    """Measure the device and the exchanges. Collective."""
    os.environ.setdefault("MOEFX_AUTOTUNE", "600")  # enough to tune the kernels of all shapes
    world = dist.get_world_size()
    machine = Machine(device, getattr(torch, options.dtype or ("bfloat16" if device.type == "cuda" else "float32")))
    description = f"{machine.name}, {machine.dtype}, torch {torch.__version__}, {dist.get_backend()} over {world} ranks"
    nodes, world_group = resolve_node_size(options.node_size, world), dist.group.WORLD
    is_device, is_network = options.only != "exchanges", options.only != "device"
    levels = link_times.list_levels(device, nodes, options.levels) if is_network and world > 1 else []
    steps = Steps(dist.get_rank() == 0)
    if is_device:
        steps.tell("a copy and a large GEMM, which say what sizes suit this device")
    shapes = machine.shapes if is_device else []
    steps.total = len(levels) + is_network + (3 + len(shapes) if is_device else 0)
    device_results = _measure_device(machine, steps) if is_device else None
    if not is_network:
        return PlatformResults(description, device_results)
    exchanges: list[RepeatedExchange] = []
    for level, unit in levels:
        steps.tell(f"exchanges between {level.size} {'ranks of a node' if unit <= nodes else 'units'}")
        exchanges += link_times.measure_level(level, unit, nodes, device, options.repeats, options.seconds)
    steps.tell("packing rows")
    assert world_group is not None
    return PlatformResults(description, device_results, measure_handling(world_group.group_name, device), exchanges)


class Steps:
    """Prints the current step, its number, and the time so far."""

    def __init__(self, is_told: bool, total: int = 0):
        self.is_told, self.total, self.number, self._begin = is_told, total, 0, time.perf_counter()

    def tell(self, text: str) -> None:
        self.number += 1
        of_total, seconds = f" of {self.total}" if self.total else "", time.perf_counter() - self._begin
        if self.is_told:
            print(
                f"bench platform: {seconds:4.0f} s, step {self.number}{of_total}: {text}", file=sys.stderr, flush=True
            )


def _measure_device(machine: Machine, steps: Steps) -> DeviceResults:
    steps.tell("GEMMs")
    gemms = list(machine.time_gemms())
    steps.tell("attention")
    attention = list(machine.time_attention())
    experts: list[ExpertTime] = []
    for shape in machine.shapes:
        steps.tell(f"experts {shape.name}")
        experts += machine.time_expert(shape)
    return DeviceResults(
        machine.name, machine.copy, machine.memory_bytes, machine.overhead(), gemms, attention, experts
    )


def _join(kind: str | None) -> torch.device:
    """Join torchrun's process group, or a group of this process alone. Returns the device of this rank."""
    cuda = kind == "cuda" or (kind is None and torch.cuda.is_available())
    local = int(os.environ.get("LOCAL_RANK", "0"))
    if cuda:
        torch.cuda.set_device(local)
    backend = "nccl" if cuda else "gloo"
    device = torch.device("cuda", local) if cuda else torch.device("cpu")
    options: dict[str, Any] = {"device_id": device} if cuda else {}
    if "RANK" not in os.environ:
        store = dist.HashStore()  # pyright: ignore[reportPrivateImportUsage]
        options |= dict(store=store, rank=0, world_size=1)
    dist.init_process_group(backend, **options)
    return device


def plot(exchanges: Sequence[RepeatedExchange], path: str) -> None:
    """Plot every repetition by size, for each level and kind of exchange (as X-MoE figure 18)."""
    from matplotlib.figure import Figure  # in the extra `plot`

    kinds = list(dict.fromkeys((r.level, r.kind) for r in exchanges))
    figure = Figure(figsize=(5 * len(kinds), 3.6), layout="constrained")
    for axes, kind in zip(figure.subplots(1, len(kinds), squeeze=False)[0], kinds, strict=True):
        of_kind = [r for r in exchanges if (r.level, r.kind) == kind]
        for exchange in of_kind:
            milliseconds = [1e3 * s for s in exchange.seconds]
            axes.plot(
                [exchange.num_bytes] * len(milliseconds), milliseconds, ".", color="tab:blue", alpha=0.3, markersize=4
            )
        axes.plot([r.num_bytes for r in of_kind], [1e3 * r.median for r in of_kind], color="tab:orange", label="median")
        axes.set(xscale="log", yscale="log", xlabel="bytes that leave a rank", ylabel="ms, slowest rank")
        axes.set_title(f"{kind[1]}, {kind[0]}, {of_kind[0].ranks} ranks, {len(of_kind[0].seconds)} times", fontsize=9)
        axes.legend()
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    main()
