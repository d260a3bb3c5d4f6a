"""Time a MoE layer over several GPUs, forward and backward, beside one GPU with all experts and the same tokens.

    torchrun --nproc-per-node 4 -m moefx bench ep [--shapes ...] [--variants "one flat dedup,chunks=2 ..."] [--out FILE]
    ... --variants "one gather gather,max_tokens=8192 gather,max_tokens=8192+graph"      the last one as a CUDA graph
    python -m moefx bench ep --mirror 4 ...       one of 4 ranks, on one GPU, the others being its copies

Weak scaling: every rank has as many tokens as the one GPU. Reported for the slowest rank: ms of a step (median), and
from one profiled step the time of exchanges, of all other kernels, and of both at once (hidden exchanges). With
`--mirror` an exchange takes `--latency` + bytes that leave the rank / `--bandwidth` (by default as NCCL's all-to-all on
four H200s of one host), and its kernel occupies 16 multiprocessors.

`--routing` skews the tokens' choices as in the other benchmarks. `imbalance` is the number of rows of the busiest rank
divided by the mean: a step that follows the work takes as many times as long as one with equal ranks.

With `--bytes` also the mean bytes that a rank sends in a step: as counted, by the formula for the tokens' experts, and
by the planner's formula for uniform routing. With `--slow-rank` a step of rank 0 begins some milliseconds late.

The variant `all_to_all` is a peer in plain torch: all-to-all of rows, and `grouped_mm`.

`efficiency` compares with one GPU in eager mode, `strict_efficiency` with the faster one of "one" and "one+graph". A
variant that cannot run here is reported with the reason, the others go on.

`--device cpu` runs everything over gloo to test the benchmark itself. Its figures mean nothing: "pull" is emulated by
files, and "+graph" steps run without a graph.
"""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import moefx

from ..distribution.expert_layouts import find_expert_layouts
from ..ir.expert_placement import ExchangeRoutes
from . import mirror_group
from .ep_layers import WEIGHT_BYTES, Layer
from .ep_steps import GraphStep, Step
from .ep_variants import DISPATCHES, PEERS, build_peer
from .external_peers import PeerMissing
from .file_memory import memory_of_files
from .kernel_overlap import compute_overlap, plot_timeline
from .rank_device import RankDevice, share_failures, start_ranks, take_largest
from .results import add_shapes, append_row, build_parser
from .sent_bytes import estimate_sent_bytes, predict_sent_bytes
from .shapes import ROUTINGS, Shape

ONE, CAPTURED = "one", "+graph"
_WARM_UP, _ROUNDS = 3, 5


class VariantSet:
    """The variants of a layer that run here, and the reasons why others do not.

    Attributes:
        steps: the step of each variant.
        failures: the reason of each variant that cannot run. missing: the peers among them that are not installed.
        routes: how rows travel, of each variant that moefx spreads.
    """

    def __init__(self, shape: Shape, mesh: DeviceMesh, layer: Layer, node_size: int, device: RankDevice):
        self.shape, self.mesh, self.layer, self.node_size, self.device = shape, mesh, layer, node_size, device
        self.steps: dict[str, Step] = {}
        self.failures: dict[str, str] = {}
        self.missing: set[str] = set()
        self.routes: dict[str, ExchangeRoutes] = {}

    def add(self, variant: str) -> None:
        """Build the step of a variant, and run it once. Collective.

        Args:
            variant: "one", one GPU with all experts; a peer such as "all_to_all" (see `ep_variants`); or a dispatch,
                followed by fields of the plan: "dedup,chunks=2,disable=overlap". "+graph" captures the step as a CUDA
                graph.
        """
        begin, error = time.perf_counter(), ""
        try:
            step = self._build_step(variant)
            step.prepare(1)
            step()
            self.device.synchronize()
        except Exception as found:
            error = f"{type(found).__name__}: {str(found).strip() or 'no message'}"
            if isinstance(found, PeerMissing):
                self.missing.add(variant)
        if failure := share_failures(error):
            self.failures[variant] = failure
            self.device.free_memory()
        else:
            self.steps[variant] = step
        if dist.get_rank() == 0:
            result = f"fails on {failure}" if failure else f"ready after {time.perf_counter() - begin:.1f} s"
            print(f"{self.shape.name} {variant}: {result}", file=sys.stderr, flush=True)

    def _build_step(self, variant: str) -> Step:
        name, _, captured = variant.partition("+")
        if name in PEERS:
            built = build_peer(name, self.layer, self.shape)
        else:
            built = self._compile(name)
            if layout := find_expert_layouts(built).get(""):
                self.routes[variant] = layout.routes
        # A CPU has no graphs: it runs the eager step.
        kind = GraphStep if captured == "graph" and self.device.is_gpu else Step
        return kind(built, self.shape, self.device)

    def _compile(self, name: str) -> nn.Module:
        fields_of_plan: dict[str, Any] = {}
        if name != ONE:
            dispatch, *fields = name.split(",")
            fields_of_plan = dict(dispatch=dispatch, node_size=self.node_size)
            for key, _, value in (field.partition("=") for field in fields):
                fields_of_plan[key] = _parse_field(value)
        plan = moefx.Plan(validation="symbolic", **fields_of_plan)
        example = (torch.zeros(64, self.shape.d, device=self.device.type, dtype=torch.bfloat16),)
        mesh = self.mesh if fields_of_plan else None
        compiled = moefx.compile(self.layer, mesh=mesh, plan=plan, example_inputs=example)
        if fields_of_plan.get("dispatch") == "pull" and not _pulls(compiled):
            raise RuntimeError(f"{name} runs another dispatch here:\n{moefx.explain(compiled)}")
        return compiled

    def count_bytes(self) -> dict[str, dict[str, float]]:
        """Count and predict the bytes that each spread variant sends in a step, as means over the ranks. Collective."""
        if not self.routes:
            return {}
        x = next(iter(self.steps.values())).draw_rows()
        choices, shape, ranks = self.layer.gather_choices(x), self.shape, dist.get_world_size()
        found = {}
        for variant, routes in self.routes.items():
            if variant not in self.steps:
                continue
            dispatch, limit = name_dispatch(routes), routes.max_tokens or 0
            predicted = predict_sent_bytes(
                choices, dist.get_rank(), shape.E, routes.sizes, dispatch, shape.d, limit, WEIGHT_BYTES
            )
            both = torch.tensor(
                [self.steps[variant].count_sent_bytes(x), predicted], device=self.device.type, dtype=torch.float64
            )
            dist.all_reduce(both)
            sent, formula = (both / ranks).tolist()
            uniform = estimate_sent_bytes(shape.T, shape.E, shape.K, routes.sizes, dispatch, shape.d, limit)
            found[variant] = dict(sent_bytes=sent, formula_bytes=formula, uniform_bytes=uniform)
        return found


def name_dispatch(routes: ExchangeRoutes) -> str:
    """Return the dispatch that travels by these routes, as `Plan` names it."""
    if routes.gathers:
        return "pull" if routes.pulls else "gather"
    if len(routes.levels) > 1:
        return "halo" if routes.splits_intra_node else "rbd"
    return "dedup" if routes.dedup else "flat"


def _pulls(compiled: nn.Module) -> bool:
    return all(block.graph.find(torch.ops.moefx.pull_tokens.default) for block in moefx.blocks(compiled))


def _parse_field(text: str) -> Any:
    """Parse a number or None. Any other text is the name of a pass, in a tuple."""
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return (text,)


def compute_output_errors(steps: dict[str, Step]) -> dict[str, float]:
    """Compute the relative difference of each variant's output to the first one's, on the same tokens."""
    first, *_ = steps.values()
    x = first.draw_rows()
    want = first.compute_output(x)
    return {variant: float((step.compute_output(x) - want).norm() / want.norm()) for variant, step in steps.items()}


def measure(variants: VariantSet, rounds: int = _ROUNDS, delay: float = 0.0) -> dict[str, dict[str, Any]]:
    """Measure all variants in turns. Returns the figures of each, the ms and the peak of the slowest rank. Collective.

    Args:
        delay: seconds by which rank 0 is late in each step; 0 leaves this measurement out.
    """
    steps, device = variants.steps, variants.device
    if not steps:
        return {}
    wrong = compute_output_errors(steps)
    times: dict[str, list[float]] = {variant: [] for variant in steps}
    delayed_times: dict[str, list[float]] = {variant: [] for variant in steps}
    for i in range(_WARM_UP + rounds):  # in turns
        for variant, step in steps.items():
            for found, seconds in ((times, 0.0), *([(delayed_times, delay)] if delay else [])):
                step.delay = 0.0 if dist.get_rank() else seconds
                ms = step.measure_milliseconds()
                if i >= _WARM_UP:
                    found[variant].append(ms)
            step.delay = 0.0
    rows = {}
    for variant, step in steps.items():
        device.reset_peak_memory()
        kernels = step.profile_kernels()
        medians = [statistics.median(found[variant]) for found in (times, *([delayed_times] if delay else []))]
        ms, peak, *delayed = take_largest([medians[0], device.read_peak_gib(), *medians[1:]], device.type)
        extra = dict(error=wrong[variant], peak_gib=peak, is_captured=step.is_captured)
        extra |= dict(delay_ms=1e3 * delay, delayed_ms=delayed[0]) if delay else {}
        rows[variant] = {"ms": ms, **compute_overlap(kernels), **extra, "kernels": kernels}
    return rows


def add_efficiencies(rows: dict[str, dict[str, Any]]) -> None:
    """Add the efficiencies against one GPU with all experts and the tokens of a rank, where that was measured."""
    ones = {name: rows[name]["ms"] for name in (ONE, ONE + CAPTURED) if name in rows}
    for row in rows.values():
        if ONE in ones:
            row["efficiency"] = ones[ONE] / row["ms"]
        if len(ones) == 2:
            row["strict_efficiency"] = min(ones.values()) / row["ms"]


def main(argv: Sequence[str] | None = None) -> None:
    made = build_parser("ep", __doc__)
    add_shapes(made)
    peers = ", ".join(map(repr, PEERS))
    made.add_argument(
        "--variants",
        "--ways",  # its earlier name
        default=" ".join((ONE, *(name for name in DISPATCHES if name != "pull"))),  # some machines cannot run it
        help=f"'one', peers ({peers}) and dispatches, with plan fields behind",
    )
    made.add_argument("--routing", default="uniform", choices=ROUTINGS, help="uniform, zipf or hot")
    made.add_argument("--tokens", type=int, default=8192, help="of a rank")
    made.add_argument("--node-size", type=int, default=2, help="ranks of a (virtual) node")
    made.add_argument("--shared", action="store_true", help="with a shared expert beside the routed ones")
    made.add_argument("--mirror", type=int, default=0, metavar="RANKS", help="on one GPU, see above")
    made.add_argument("--latency", type=float, default=31e-6, help="seconds")
    made.add_argument("--bandwidth", type=float, default=322e9, help="bytes a second that leave a rank")
    made.add_argument("--plot", default=None, metavar="FILE", help="a picture of the profiled steps of each shape")
    made.add_argument("--bytes", action="store_true", help="count sent bytes beside the formulas")
    made.add_argument("--slow-rank", type=float, default=0.0, metavar="MS", help="also steps in which rank 0 is late")
    made.add_argument("--rounds", type=int, default=_ROUNDS)
    made.add_argument("--device", default="cuda", choices=("cuda", "cpu"), help="cpu only tests the benchmark")
    options = made.parse_args(argv)
    if options.mirror:
        mirror_group.init_mirror_group(options.mirror, lambda leaving: options.latency + leaving / options.bandwidth)
        device = RankDevice("cuda")
    else:
        device = start_ranks("bench ep, without --mirror", options.device)
    failed = False
    with contextlib.ExitStack() as stack:
        if not device.is_gpu:
            stack.enter_context(memory_of_files())
        for shape in options.shapes:
            failed |= _run_shape(dataclasses.replace(shape, T=options.tokens), options, device)
    dist.destroy_process_group()
    if failed:
        raise SystemExit("bench ep: some variants cannot run here, see above")


def _run_shape(shape: Shape, options: Any, device: RankDevice) -> bool:
    """Measure all variants of a shape, and report them. Returns whether some that are installed cannot run."""
    world = dist.get_world_size()
    mesh = init_device_mesh(device.type, (world,), mesh_dim_names=("ep",))
    torch.manual_seed(0)
    layer = Layer(shape, options.shared, options.routing, device.type)
    variants = VariantSet(shape, mesh, layer, options.node_size, device)
    for variant in options.variants.split():
        variants.add(variant)
    rows = measure(variants, options.rounds, options.slow_rank / 1e3)
    sent = variants.count_bytes() if options.bytes and not options.mirror else {}
    has_failed = bool(variants.failures.keys() - variants.missing)
    imbalance = layer.compute_imbalance(Step(layer, shape, device).draw_rows())
    variants.steps.clear()  # a captured graph keeps its communicator: the process group could not end
    if dist.get_rank():
        return has_failed
    kernels = {variant: row.pop("kernels") for variant, row in rows.items()}
    add_efficiencies(rows)
    how = dict(shared=options.shared, tokens=shape.T, ranks=world, mirror=bool(options.mirror))
    how |= dict(routing=options.routing, imbalance=imbalance)
    reports: dict[str, dict[str, Any]] = {variant: row | sent.get(variant, {}) for variant, row in rows.items()}
    for variant, routes in variants.routes.items():
        if variant in reports:
            reports[variant]["dispatch"] = name_dispatch(routes)
    reports |= {variant: {"failure": reason} for variant, reason in variants.failures.items()}
    for variant, report in reports.items():
        row = dict(
            shape=shape.name,
            way=variant,  # the key in earlier files of results
            **how,
            **report,
        )
        numbers = "  ".join(f"{name} {value:.3f}" for name, value in row.items() if isinstance(value, float))
        print(f"{shape.name:12} {variant:28} {report.get('failure', numbers)}", flush=True)
        if options.out:
            append_row(row, options.out)
    if options.plot and kernels:
        path = Path(options.plot)
        if len(options.shapes) > 1:
            path = path.with_stem(f"{path.stem}_{shape.name}")
        plot_timeline(kernels, path)
        print(f"wrote {path}", flush=True)
    return has_failed


if __name__ == "__main__":
    main()
