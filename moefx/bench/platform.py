"""What the planner needs to know of this machine, measured: a platform file.

    python -m moefx bench platform --out here.json                               one device
    torchrun --nproc-per-node 8 -m moefx bench platform --out here.json          a node, and exchanges within it
    torchrun --nnodes 4 ... -m moefx bench platform --levels 32 --out here.json  nodes, and units of 32 ranks above

GEMMs over the shapes of experts and attention, attention, copies and experts give rates; all-to-all and sends of
growing sizes, at each level of the topology, give latency, bandwidth, and how much repeated ones differ. Then
`python -m moefx plan MODEL --platform here.json --gpus N`. What cannot be measured, the data sheet's peak and networks
of more devices than there are, is taken from `--base`; with `--only exchanges` the device too.
"""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ..errors import UnknownPlatform
from ..planner.platforms import PLATFORMS, Network, Platform, platform_of
from ..runtime.links import measured_handling
from ..runtime.topology import node_size
from . import collectives
from .collectives import Repeated
from .machine import Attention, Machine
from .rates import Gemm, Measured, dense_rates, errors, expert_rates, gemm_errors
from .results import parser, write

_NAMES = ("node", "nodes", "units of nodes", "units above")  # of levels, where no base names them


@dataclasses.dataclass(frozen=True)
class Alone:
    """What was measured of one device: bytes a second of a copy, bytes of its memory and those taken of it."""

    gemms: list[Gemm]
    attention: list[Attention]
    experts: list[Measured]
    copy: float
    capacity: float
    overhead: float


def alone(machine: Machine, tell: Callable[[str], None]) -> Alone:
    tell("a copy and GEMMs")
    copy, gemms = machine.copy, list(machine.gemms())
    tell("attention")
    attention = list(machine.attention())
    experts = list(machine.experts(lambda shape: tell(f"experts {shape}")))
    return Alone(gemms, attention, experts, copy, machine.capacity, machine.overhead())


def figures(found: Alone, base: Platform | None) -> dict[str, float]:
    """Of a `Platform`. The peak is the base's, else the most that any product reached."""
    peak = base.peak if base else max(g.flop / g.seconds for g in found.gemms)
    shares = [3 * a.flop / a.seconds / peak for a in found.attention]
    return {
        "capacity": found.capacity, "peak": peak, "memory_bandwidth": found.copy, "overhead": found.overhead,
        "attention_efficiency": sum(shares) / len(shares),
        **dense_rates(found.gemms, peak), **expert_rates(found.experts),
    }  # fmt: skip


def network(name: str, ranks: int, found: Sequence[Repeated], how: str) -> Network:
    exchanges, sends = ([r for r in found if r.what == what] for what in ("all_to_all", "p2p"))
    latency, bandwidth = collectives.fitted(exchanges)
    _, p2p = collectives.fitted(sends)
    return Network(name, ranks, bandwidth, latency, p2p, f"measured: {how}", collectives.spread(exchanges))


def joined(measured: Sequence[Network], base: Platform | None, copy: float) -> tuple[Network, ...]:
    """Those that were measured, fine to coarse: in place of the finest ones of a base, of as many ranks as it says; the
    coarsest without an end if nothing says where it has one.

    Args:
        copy: bytes a second, for one rank without a base.

    Raises:
        UnknownPlatform: the base has fewer levels.
    """
    if base is None and not measured:
        return (Network("node", 1, copy / 2, source="not measured, there was one rank: half of a copy's bandwidth"),)
    if base is None:
        *finer, last = measured
        return (*finer, dataclasses.replace(last, ranks=0)) if finer else (last,)
    if len(measured) > len(base.networks):
        raise UnknownPlatform(
            f"platform {base.name} has {len(base.networks)} levels and {len(measured)} were measured: leave --base out"
        )
    own = [
        dataclasses.replace(new, name=old.name, ranks=old.ranks)
        for new, old in zip(measured, base.networks[: len(measured)], strict=True)
    ]
    return (*own, *base.networks[len(own) :])


def made_of(
    name: str, machine: Machine, found: Alone | None, networks: Sequence[Network], handling: float,
    base: Platform | None, how: str,
) -> Platform:  # fmt: skip
    """The platform, with a source of each figure. Without `found` the device is the base's."""
    numbers: dict[str, Any] = dict(figures(found, base)) if found else {}
    numbers |= {"handling": handling} if handling else {}
    sources = {figure: f"measured: {how}" for figure, value in numbers.items() if value}
    if found:
        numbers["device"] = machine.name
        sources["peak"] = base.sources.get("peak", base.name) if base else f"{sources['peak']}; the fastest GEMM"
    made = joined(networks, base, found.copy if found else 0.0)
    if base is None:
        return Platform(name=name, networks=made, sources=sources, **numbers)
    return dataclasses.replace(base, name=name, networks=made, sources=base.sources | sources, **numbers)


def report(found: Alone | None, exchanges: Sequence[Repeated], made: Platform) -> str:
    """What was measured, and how well the rates say it again."""
    return "\n".join([*(_device(found, made) if found else []), *map(str, exchanges)])


def _device(found: Alone, made: Platform) -> list[str]:
    lines = [f"{made.device}: {made.capacity / 2**30:.1f} GiB, of which {made.overhead / 2**30:.2f} are taken"]
    lines.append(f"copy        {found.copy / 1e9:9.1f} GB/s, read and written together")
    for what, choose in (("fastest", max), ("slowest", min)):
        gemm = choose(found.gemms, key=lambda g: g.flop / g.seconds)
        shape = f"{what} of {len(found.gemms)}: [{gemm.rows}, {gemm.inner}] x [{gemm.inner}, {gemm.columns}]"
        lines.append(f"GEMM        {gemm.flop / gemm.seconds / 1e12:9.3f} TFLOP/s, {shape}")
    for a in found.attention:
        shape = f"{a.sequences} x {a.tokens} tokens, {a.heads} heads of {a.head_size}, forward and backward"
        lines.append(f"attention   {3 * a.flop / a.seconds / 1e12:9.3f} TFLOP/s, {shape}")
    for shape, seconds, is_step in found.experts:
        speed = (3 if is_step else 1) * shape.matrices * shape.flops / seconds / 1e12
        lines.append(f"experts     {speed:9.3f} TFLOP/s, {shape.name}, {'and backward' if is_step else 'forward'}")
    again = {"GEMMs": gemm_errors(found.gemms, made), "experts": list(errors(found.experts, made).values())}
    for what, wrong in again.items():
        lines.append(f"rates of {what} say these times again to {min(wrong):+.1%} .. {max(wrong):+.1%}")
    return lines


def rows_of(found: Alone | None, exchanges: Sequence[Repeated]) -> list[Mapping[str, Any]]:
    """As JSON lines have them: seconds of each, of exchanges every repetition's."""
    rows: list[Mapping[str, Any]] = []
    if found:
        rows += [{"copy": found.copy, "capacity": found.capacity, "overhead": found.overhead}]
        rows += [{"gemm": gemm._asdict()} for gemm in found.gemms]
        rows += [{"attention": each._asdict()} for each in found.attention]
        rows += [{"experts": shape.name, "is_step": step, "seconds": seconds} for shape, seconds, step in found.experts]
    return [*rows, *({"exchange": dataclasses.asdict(each)} for each in exchanges)]


def main(argv: Sequence[str] | None = None) -> None:
    made = parser("platform", __doc__, out="write the platform to this file (default: platform.json)")
    made.set_defaults(out="platform.json")
    text = "device: no exchanges; exchanges: the device is --base's"
    made.add_argument("--only", choices=["device", "exchanges"], help=text)
    made.add_argument("--raw", metavar="FILE", help="append every measurement to this file, a JSON line each")
    made.add_argument("--plot", metavar="FILE", help="a picture of all repetitions; needs matplotlib")
    made.add_argument("--name", default="here", help="of the platform (default: here)")
    made.add_argument("--base", metavar="P", help=f"{', '.join(PLATFORMS)} or a file, for what cannot be measured here")
    made.add_argument("--device", default=None, help="cuda (default, where there is one) or cpu")
    made.add_argument("--dtype", default=None, help="default: bfloat16; on the CPU float32")
    made.add_argument("--node-size", type=int, metavar="N", help="ranks of a node (default: LOCAL_WORLD_SIZE)")
    made.add_argument("--levels", type=int, nargs="*", default=[], metavar="N", help="ranks of units above a node")
    made.add_argument("--repeats", type=int, default=100, help="of each size of exchange (default: 100)")
    made.add_argument("--seconds", type=float, default=10.0, help="that one size may take (default: 10)")
    options = made.parse_args(argv)
    if options.only == "exchanges" and not options.base:
        made.error("--only exchanges measures no device: say whose it is with --base")
    device = _join(options.device)
    try:
        _measure(options, device)
    finally:
        dist.destroy_process_group()


def _measure(options: Any, device: torch.device) -> None:
    rank, world = dist.get_rank(), dist.get_world_size()

    def tell(text: str) -> None:
        if rank == 0:
            print(f"bench platform: {text}", file=sys.stderr, flush=True)

    base = platform_of(options.base) if options.base else None
    dtype = getattr(torch, options.dtype or ("bfloat16" if device.type == "cuda" else "float32"))
    machine = Machine(device, dtype)
    found = None if options.only == "exchanges" else alone(machine, tell)
    how = f"{machine.name}, {dtype}, torch {torch.__version__}, {dist.get_backend()} over {world} ranks"
    exchanges: list[Repeated] = []
    networks = []
    if world > 1 and options.only != "device":
        nodes = node_size(options.node_size, world)
        for i, (level, ranks) in enumerate(collectives.levels(device, nodes, options.levels)):
            tell(f"exchanges between {level.size} {'ranks of a node' if ranks <= nodes else 'units'}")
            each = list(collectives.measured(level, device, options.repeats, options.seconds))
            networks.append(network(_NAMES[i if ranks <= nodes else max(i, 1)], ranks, each, how))
            exchanges += each
    whole: Any = dist.group.WORLD
    handling = 0.0 if options.only == "device" else measured_handling(whole.group_name, device)
    if rank:
        return
    platform = made_of(options.name, machine, found, networks, handling, base, how)
    print(report(found, exchanges, platform))
    Path(options.out).write_text(platform.to_json() + "\n")
    print(f"wrote {options.out}")
    if options.raw:
        for row in rows_of(found, exchanges):
            write(row, options.raw)
        print(f"wrote {options.raw}")
    if options.plot:
        plot(exchanges, options.plot)
        print(f"wrote {options.plot}")


def _join(kind: str | None) -> torch.device:
    """The device of this rank, and the process group: torchrun's, else one of this process alone."""
    cuda = kind == "cuda" or (kind is None and torch.cuda.is_available())
    local = int(os.environ.get("LOCAL_RANK", "0"))
    if cuda:
        torch.cuda.set_device(local)
    backend = "nccl" if cuda else "gloo"
    if "RANK" in os.environ:
        dist.init_process_group(backend)
    else:
        alone = dist.HashStore()  # pyright: ignore[reportPrivateImportUsage]
        dist.init_process_group(backend, store=alone, rank=0, world_size=1)
    return torch.device("cuda", local) if cuda else torch.device("cpu")


def plot(exchanges: Sequence[Repeated], path: str) -> None:
    """Every repetition by size, a picture for each level and kind of exchange (as X-MoE figure 18)."""
    from matplotlib.figure import Figure  # in the extra `plot`

    kinds = list(dict.fromkeys((r.level, r.what) for r in exchanges))
    figure = Figure(figsize=(5 * len(kinds), 3.6), layout="constrained")
    for axes, kind in zip(figure.subplots(1, len(kinds), squeeze=False)[0], kinds, strict=True):
        mine = [r for r in exchanges if (r.level, r.what) == kind]
        for each in mine:
            every = [1e3 * s for s in each.seconds]
            axes.plot([each.num_bytes] * len(every), every, ".", color="tab:blue", alpha=0.3, markersize=4)
        axes.plot([r.num_bytes for r in mine], [1e3 * r.median for r in mine], color="tab:orange", label="median")
        axes.set(xscale="log", yscale="log", xlabel="bytes that leave a rank", ylabel="ms, slowest rank")
        axes.set_title(f"{kind[1]}, {kind[0]}, {mine[0].ranks} ranks, {len(mine[0].seconds)} times", fontsize=9)
        axes.legend()
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    main()
