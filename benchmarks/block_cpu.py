"""A plain MoE block on the CPU: as written beside `moefx.compile` of it, in one run.

    python benchmarks/block_cpu.py [--tokens 2048 --experts 64 --top-k 8 --dim 256 --hidden 128 --threads 1 2]

The block gathers each expert's tokens and adds its output with `index_add_`; its parameters are a ModuleList of
experts, or stacked. Outputs and all gradients of both are compared with the block in float64 first. Then forward
and backward of both take turns, so that a busy machine disturbs both. Prints medians, minima and their ratios,
and the ratio of CPU times, which on a busy machine is the steadier one (with several threads it also counts those
that spin while they wait).
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import moefx
from moefx.ir import op_providers


class Expert(nn.Module):
    def __init__(self, dim: int, hidden: int):
        super().__init__()
        self.gate_proj = nn.Linear(dim, hidden, bias=False)
        self.up_proj = nn.Linear(dim, hidden, bias=False)
        self.down_proj = nn.Linear(hidden, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class MoE(nn.Module):
    """What users write: for each expert, gather its tokens, run it, add to the output."""

    def __init__(self, num_experts: int, top_k: int, dim: int, hidden: int):
        super().__init__()
        self.router, self.top_k = nn.Linear(dim, num_experts, bias=False), top_k
        self.experts = nn.ModuleList(Expert(dim, hidden) for _ in range(num_experts))

    def expert(self, number: int, x: Tensor) -> Tensor:
        return self.experts[number](x)

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = self.router(x).softmax(-1).topk(self.top_k)
        weights = weights / weights.sum(-1, keepdim=True)
        out = torch.zeros_like(x)
        for number in range(self.router.out_features):
            token, slot = torch.where(chosen == number)
            out.index_add_(0, token, self.expert(number, x[token]) * weights[token, slot, None])
        return out


class StackedMoE(MoE):
    """The same with one parameter for all experts' gate and up projections, and one for the down projections."""

    def __init__(self, num_experts: int, top_k: int, dim: int, hidden: int):
        super().__init__(num_experts, top_k, dim, hidden)
        del self.experts
        self.gate_up = nn.Parameter(torch.randn(num_experts, 2 * hidden, dim) * dim**-0.5)
        self.down = nn.Parameter(torch.randn(num_experts, dim, hidden) * hidden**-0.5)

    def expert(self, number: int, x: Tensor) -> Tensor:
        gate, up = F.linear(x, self.gate_up[number]).chunk(2, -1)
        return F.linear(F.silu(gate) * up, self.down[number])


LAYOUTS = {"ModuleList": MoE, "stacked": StackedMoE}


class Run:
    """Forward and backward of one model."""

    def __init__(self, model: nn.Module, x: Tensor, grad: Tensor):
        self.model, self.x, self.grad = model, x.clone().requires_grad_(), grad

    def __call__(self) -> tuple[float, float]:
        """Milliseconds on the clock, and of all threads' CPU time."""
        for leaf in (self.x, *self.model.parameters()):
            leaf.grad = None
        start, cpu_start = time.perf_counter(), time.process_time()
        self.out = self.model(self.x)
        self.out.backward(self.grad)
        return 1e3 * (time.perf_counter() - start), 1e3 * (time.process_time() - cpu_start)

    def results(self) -> list[Tensor]:
        self()
        gradients = (leaf.grad for leaf in (self.x, *self.model.parameters()))
        return [self.out.detach(), *(g for g in gradients if g is not None)]


def check(original: Run, compiled: Run) -> float:
    """The largest error of the compiled block against float64, as a multiple of the original's own.

    Each of output and gradients by its largest difference; what is below one rounding step does not count.
    """
    dtype = original.x.dtype
    wide = Run(copy.deepcopy(original.model).double(), original.x.detach().double(), original.grad.double())
    worst = 0.0
    for exact, plain, ours in zip(wide.results(), original.results(), compiled.results(), strict=True):
        floor = torch.finfo(dtype).eps * float(exact.abs().max())
        own = float((plain - exact).abs().max())
        worst = max(worst, float((ours - exact).abs().max()) / max(own, floor))
    assert worst < 3, f"compiled is {worst:.1f} times as far from float64 as the original"
    return worst


def measure(layout: str, threads: int, args: argparse.Namespace) -> dict[str, Any]:
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    model = LAYOUTS[layout](args.experts, args.top_k, args.dim, args.hidden)
    x, grad = torch.randn(2, args.tokens, args.dim)
    plan = moefx.Plan(checkpoint=args.keep)
    compiled = moefx.compile(copy.deepcopy(model), example_inputs=(x,), plan=plan)
    runs = {"original": Run(model, x, grad), "compiled": Run(compiled, x, grad)}
    error = check(**runs)
    op_providers.reset_counters()
    times: dict[str, list[float]] = {name: [] for name in runs}
    cpu_times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(args.repeats):
        for name, run in runs.items():
            clock, cpu = run()
            times[name].append(clock)
            cpu_times[name].append(cpu)
    result: dict[str, Any] = {
        "layout": layout, "threads": threads, "error": round(error, 2),
        "weights": op_providers.weight_paths(), "fallbacks": moefx.blocks(compiled)[0].fallbacks,
    }  # fmt: skip
    for label, of, kind in (
        ("median", statistics.median, times),
        ("min", min, times),
        ("cpu_median", statistics.median, cpu_times),
        ("cpu_min", min, cpu_times),
    ):
        found = {name: of(ms) for name, ms in kind.items()}
        result[label] = {n: round(ms, 1) for n, ms in found.items()}
        result[label]["ratio"] = round(found["original"] / found["compiled"], 2)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    for name, default in {"tokens": 2048, "experts": 64, "top-k": 8, "dim": 256, "hidden": 128}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--layouts", choices=LAYOUTS, nargs="+", default=list(LAYOUTS))
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--keep", choices=["h", "x", "all"], default="h")
    parser.add_argument("--json", type=Path, help="write the results here, with the environment")
    args = parser.parse_args()

    shape = f"T={args.tokens} E={args.experts} K={args.top_k} d={args.dim} h={args.hidden} float32"
    print(f"{shape}, keep={args.keep}, torch {torch.__version__}; forward + backward, ms")
    print(f"{'':24}{'original':>18}{'compiled':>18}{'ratio':>15}{'CPU':>14}   error (original = 1)")
    results = []
    for threads in args.threads:
        for layout in args.layouts:
            results.append(r := measure(layout, threads, args))
            cells = [f"{r['median'][k]:8.1f} ({r['min'][k]:6.1f})" for k in ("original", "compiled")]
            cells.append(f"{r['median']['ratio']:5.2f} ({r['min']['ratio']:.2f})")
            cells.append(f"{r['cpu_median']['ratio']:5.2f} ({r['cpu_min']['ratio']:.2f})")
            row = "".join(f"{cell:>{width}}" for cell, width in zip(cells, (18, 18, 15, 14), strict=True))
            print(f"{layout:>12} {threads} thread(s){row}   {r['error']}", flush=True)
    print("median (minimum)")
    if args.json:
        from environment import environment

        found = {"environment": environment(), "shape": shape, "keep": args.keep, "results": results}
        args.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
