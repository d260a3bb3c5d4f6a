"""Time a MoE layer over several GPUs, forward and backward, beside one GPU with all experts and the same tokens.

    torchrun --nproc-per-node 4 -m moefx bench ep [--shapes ...] [--ways "one flat dedup,chunks=2 ..."] [--out FILE]
    ... --ways "one gather gather,max_tokens=8192 gather,max_tokens=8192+graph"      the last one as a CUDA graph
    ... --ways "one all_to_all gather"            beside plain torch: all-to-all of rows, and `grouped_mm`
    python -m moefx bench ep --mirror 4 ...       one of 4 ranks, on one GPU, the others being its copies

Weak scaling: every rank has as many tokens as the one GPU. Reported for the slowest rank: ms of a step (median), and
from one profiled step the time of exchanges, of all other kernels, and of both at once (hidden exchanges). With
`--mirror` an exchange takes `--latency` + bytes that leave the rank / `--bandwidth` (by default as NCCL's all-to-all on
four H200s of one host), and its kernel occupies 16 multiprocessors.

`--routing` skews the tokens' choices as in the other benchmarks. `imbalance` is the number of rows of the busiest rank
by the mean: a step that follows the work takes as many times as long as one with equal ranks.
"""

from __future__ import annotations

import ast
import dataclasses
import os
import statistics
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import moefx

from . import mirror_group
from .ep_peers import AllToAllLayer, choose_experts
from .results import add_shapes, append_row, build_parser
from .shapes import ROUTINGS, Shape, activation, draw_tensors, skew_scores

DISPATCHES = ("flat", "dedup", "rbd", "halo", "gather")  # "pull" on request: some machines cannot run it
PEER = "all_to_all"
# Parts of the names of exchange kernels.
_EXCHANGES = ("nccl", "mirrored_exchange", "read_rows_kernel", "add_rows_kernel", "barrier_kernel")
_WARM_UP, _ROUNDS, _STEPS = 3, 5, 4


class Layer(nn.Module):
    """A router and stacked experts as a plain program that runs all experts on all tokens."""

    bias: Tensor | None

    def __init__(self, shape: Shape, shared: bool = False, routing: str = "uniform"):
        super().__init__()
        _, w1, w2, _ = draw_tensors(shape)
        self.shape = shape
        self.up, self.down = nn.Parameter(w1), nn.Parameter(w2)
        self.router = nn.Linear(shape.d, shape.E, bias=False, device="cuda", dtype=torch.bfloat16)
        nn.init.normal_(self.router.weight, std=shape.d**-0.5)  # normal logits
        bias = None if routing == "uniform" else skew_scores(torch.zeros(shape.E, device="cuda"), routing)
        self.register_buffer("bias", bias)
        self.shared = _Mlp(shape) if shared else None

    def choose(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return weights and ids of the experts of each token, [T,K] each."""
        return choose_experts(self.router, self.bias, x, self.shape.K)

    def compute_imbalance(self, x: Tensor) -> float:
        """Compute the rows of the busiest rank by the mean, for these tokens on this rank."""
        rows = torch.bincount(self.choose(x)[1].flatten(), minlength=self.shape.E)
        dist.all_reduce(rows)
        by_rank = rows.view(dist.get_world_size(), -1).sum(1).double()
        return float(by_rank.max() / by_rank.mean())

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = self.choose(x)
        outputs = torch.einsum(
            "esh,edh->sed", activation(self.shape, torch.einsum("sd,ehd->esh", x, self.up)), self.down
        )
        rows = outputs.gather(1, chosen[..., None].expand(*chosen.shape, x.shape[-1]))
        out = (rows * weights[..., None].to(x.dtype)).sum(1)
        return out if self.shared is None else out + self.shared(x)


class _Mlp(nn.Module):
    """A shared expert."""

    def __init__(self, shape: Shape):
        super().__init__()
        self.shape = shape
        self.up = nn.Linear(shape.d, shape.parts * shape.h, bias=False, device="cuda", dtype=torch.bfloat16)
        self.down = nn.Linear(shape.h, shape.d, bias=False, device="cuda", dtype=torch.bfloat16)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(activation(self.shape, self.up(x)))


class Step:
    """Forward and backward of a layer on this rank's tokens. Tokens, and so the numbers of sent rows, differ in each
    step."""

    def __init__(self, layer: nn.Module, shape: Shape):
        self.layer, self.shape = layer, shape
        self.generator = torch.Generator("cuda").manual_seed(17 + dist.get_rank())
        self.grad = self.draw_rows()
        self.inputs: list[Tensor] = []

    def draw_rows(self) -> Tensor:
        """Draw rows [T,d] of a normal distribution."""
        size = self.shape.T, self.shape.d
        return torch.randn(size, device="cuda", dtype=torch.bfloat16, generator=self.generator)

    def prepare(self, steps: int) -> None:
        """Create the inputs of the next `steps` steps."""
        self.inputs = [self.draw_rows().requires_grad_() for _ in range(steps)]

    def __call__(self) -> None:
        self.layer(self.inputs.pop()).backward(self.grad)
        for parameter in self.layer.parameters():
            parameter.grad = None

    def measure_milliseconds(self) -> float:
        """Measure the milliseconds of a step among several."""
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self.prepare(_STEPS)
        dist.barrier()
        begin.record()
        for _ in range(_STEPS):
            self()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) / _STEPS

    def compute_output(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            return self.layer(x).float()

    def profile_kernels(self) -> list[tuple[str, float, float]]:
        """Profile one step. Returns (name, begin, end) of its kernels in ms, by begin."""
        self.prepare(2)
        self()
        torch.cuda.synchronize()
        with torch.profiler.profile() as profile:
            dist.barrier()
            self()
            torch.cuda.synchronize()
        events: Iterable[Any] = profile.events() or ()
        kernels = [e for e in events if e.device_type.name == "CUDA" and not e.is_user_annotation]
        first = min(e.time_range.start for e in kernels)
        spans = [(e.name, (e.time_range.start - first) / 1e3, (e.time_range.end - first) / 1e3) for e in kernels]
        return sorted(spans, key=lambda span: span[1])


class GraphStep(Step):
    """A step as one CUDA graph. Each replay fills its input first."""

    def __init__(self, layer: nn.Module, shape: Shape):
        super().__init__(layer, shape)
        self.input = self.draw_rows().requires_grad_()
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                self._run()
        torch.cuda.current_stream().wait_stream(side)
        torch.cuda.synchronize()
        dist.barrier()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self._run()

    def _run(self) -> None:
        self.input.grad = None
        self.layer(self.input).backward(self.grad)
        for parameter in self.layer.parameters():
            parameter.grad = None

    def __call__(self) -> None:
        with torch.no_grad():
            self.input.copy_(self.inputs.pop())
        self.graph.replay()


def compute_overlap(kernels: Sequence[tuple[str, float, float]]) -> dict[str, float]:
    """Compute the milliseconds of exchanges, of other kernels, and of both at once (the hidden exchanges)."""
    exchanges = _merge_spans([(b, e) for name, b, e in kernels if _is_exchange(name)])
    others = _merge_spans([(b, e) for name, b, e in kernels if not _is_exchange(name)])
    both = sum(max(0.0, min(e, f) - max(b, c)) for b, e in exchanges for c, f in others)
    return {"exchange_ms": _sum_lengths(exchanges), "compute_ms": _sum_lengths(others), "hidden_ms": both}


def _is_exchange(name: str) -> bool:
    return any(part in name.lower() for part in _EXCHANGES)


def _merge_spans(spans: list[tuple[float, float]]) -> list[tuple[float, float]]:
    merged: list[tuple[float, float]] = []
    for begin, end in sorted(spans):
        if merged and begin <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((begin, end))
    return merged


def _sum_lengths(spans: list[tuple[float, float]]) -> float:
    return sum(end - begin for begin, end in spans)


def plot_timeline(kernels: dict[str, Sequence[tuple[str, float, float]]], path: Path) -> None:
    """Plot one step of each variant on one time axis, exchanges above all other kernels."""
    from matplotlib.figure import Figure  # in the extra `bench`

    figure = Figure(figsize=(11, 1.4 * len(kernels) + 0.8), layout="constrained")
    rows = figure.subplots(len(kernels), sharex=True, squeeze=False)[:, 0]
    for axes, (variant, spans) in zip(rows, kernels.items(), strict=True):
        parts: dict[str, list[tuple[float, float]]] = {"other kernels": [], "exchanges": []}
        for name, begin, end in spans:
            parts["exchanges" if _is_exchange(name) else "other kernels"].append((begin, end - begin))
        for lane, color in enumerate(("tab:blue", "tab:orange")):
            axes.broken_barh(list(parts.values())[lane], (lane + 0.1, 0.8), color=color)
        axes.set_yticks([0.5, 1.5], list(parts))
        hidden = compute_overlap(spans)
        axes.set_title(
            f"{variant}: exchanges {hidden['exchange_ms']:.2f} ms, {hidden['hidden_ms']:.2f} ms of them beside others "
            f"({hidden['compute_ms']:.2f} ms)",
            fontsize=9,
            loc="left",
        )
    rows[-1].set_xlabel("ms")
    figure.savefig(path, dpi=110)


def build_steps(
    shape: Shape, mesh: DeviceMesh, variants: Sequence[str], layer: Layer, node_size: int
) -> dict[str, Step]:
    """Build the step of each variant.

    Args:
        variants: "one", one GPU with all experts; "all_to_all", the peer in plain torch; or a dispatch, followed by
            fields of the plan: "dedup,chunks=2,disable=overlap". "+graph" captures the step as a CUDA graph.
    """
    steps = {}
    for variant in variants:
        begin = time.perf_counter()
        name, _, captured = variant.partition("+")
        if name == PEER:
            built = AllToAllLayer(shape, layer.router, layer.bias, layer.up, layer.down)
        else:
            built = _compile_layer(layer, shape, mesh, name, node_size)
        steps[variant] = (GraphStep if captured == "graph" else Step)(built, shape)
        steps[variant].prepare(1)
        steps[variant]()
        torch.cuda.synchronize()
        if dist.get_rank() == 0:
            print(
                f"{shape.name} {variant}: ready after {time.perf_counter() - begin:.1f} s", file=sys.stderr, flush=True
            )
    return steps


def _compile_layer(layer: Layer, shape: Shape, mesh: DeviceMesh, name: str, node_size: int) -> nn.Module:
    fields_of_plan: dict[str, Any] = {}
    if name != "one":
        dispatch, *fields = name.split(",")
        fields_of_plan = dict(dispatch=dispatch, node_size=node_size)
        for key, _, value in (field.partition("=") for field in fields):
            fields_of_plan[key] = _parse_field(value)
    plan = moefx.Plan(validation="symbolic", **fields_of_plan)
    example = (torch.zeros(64, shape.d, device="cuda", dtype=torch.bfloat16),)
    compiled = moefx.compile(layer, mesh=mesh if fields_of_plan else None, plan=plan, example_inputs=example)
    if fields_of_plan.get("dispatch") == "pull" and not _pulls(compiled):
        raise SystemExit(f"bench ep: {name} runs another dispatch here:\n{moefx.explain(compiled)}")
    return compiled


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


def measure(steps: dict[str, Step]) -> dict[str, dict[str, Any]]:
    wrong = compute_output_errors(steps)
    times: dict[str, list[float]] = {variant: [] for variant in steps}
    for i in range(_WARM_UP + _ROUNDS):  # in turns
        for variant, step in steps.items():
            ms = step.measure_milliseconds()
            if i >= _WARM_UP:
                times[variant].append(ms)
    rows = {}
    for variant, step in steps.items():
        torch.cuda.reset_peak_memory_stats()
        kernels = step.profile_kernels()
        extra = {"error": wrong[variant], "peak_gib": torch.cuda.max_memory_allocated() / 2**30}
        rows[variant] = {
            "ms": statistics.median(times[variant]),
            **compute_overlap(kernels),
            **extra,
            "kernels": kernels,
        }
    return rows


def main(argv: Sequence[str] | None = None) -> None:
    made = build_parser("ep", __doc__)
    add_shapes(made)
    made.add_argument(
        "--ways",
        default=" ".join(("one", *DISPATCHES)),
        help=f"'one', '{PEER}' and dispatches, with plan fields behind",
    )
    made.add_argument("--routing", default="uniform", choices=ROUTINGS, help="uniform, zipf or hot")
    made.add_argument("--tokens", type=int, default=8192, help="of a rank")
    made.add_argument("--node-size", type=int, default=2, help="ranks of a (virtual) node")
    made.add_argument("--shared", action="store_true", help="with a shared expert beside the routed ones")
    made.add_argument("--mirror", type=int, default=0, metavar="RANKS", help="on one GPU, see above")
    made.add_argument("--latency", type=float, default=31e-6, help="seconds")
    made.add_argument("--bandwidth", type=float, default=322e9, help="bytes a second that leave a rank")
    made.add_argument("--plot", default=None, metavar="FILE", help="a picture of the profiled steps of each shape")
    options = made.parse_args(argv)
    if options.mirror:
        mirror_group.init_mirror_group(options.mirror, lambda leaving: options.latency + leaving / options.bandwidth)
    elif "LOCAL_RANK" not in os.environ:
        raise SystemExit("bench ep: run it with torchrun, a process for each GPU, or with --mirror RANKS on one")
    else:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        os.environ.setdefault("TORCH_NCCL_HIGH_PRIORITY", "1")  # otherwise other kernels may delay an exchange
        dist.init_process_group("nccl")
    world = dist.get_world_size()
    mesh = init_device_mesh("cuda", (world,), mesh_dim_names=("ep",))
    for shape in options.shapes:
        shape = dataclasses.replace(shape, T=options.tokens)
        torch.manual_seed(0)
        layer = Layer(shape, options.shared, options.routing)
        steps = build_steps(shape, mesh, options.ways.split(), layer, options.node_size)
        rows = measure(steps)
        imbalance = layer.compute_imbalance(next(iter(steps.values())).draw_rows())
        steps.clear()  # a captured graph keeps its communicator: the process group could not end
        slowest = torch.tensor([row["ms"] for row in rows.values()], device="cuda")
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        if dist.get_rank():
            continue
        kernels = {variant: row.pop("kernels") for variant, row in rows.items()}
        for (variant, row), ms in zip(rows.items(), slowest.tolist(), strict=True):
            row["ms"] = ms
            how = dict(shared=options.shared, tokens=shape.T, ranks=world, way=variant, mirror=bool(options.mirror))
            how |= dict(routing=options.routing, imbalance=imbalance)
            row = dict(shape=shape.name, **how, **row)
            if "one" in rows:
                row["efficiency"] = rows["one"]["ms"] / ms
            numbers = "  ".join(f"{name} {value:.3f}" for name, value in row.items() if isinstance(value, float))
            print(f"{shape.name:12} {variant:28} {numbers}", flush=True)
            if options.out:
                append_row(row, options.out)
        if options.plot:
            path = Path(options.plot)
            if len(options.shapes) > 1:
                path = path.with_stem(f"{path.stem}_{shape.name}")
            plot_timeline(kernels, path)
            print(f"wrote {path}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
