"""The expert part of a MoE layer on the CPU: the plain loop beside the dialect, in one run.

    python benchmarks/block_cpu.py [--tokens 2048 --experts 64 --top-k 8 --dim 256 --hidden 128 --threads 2]

Prints minimum and median milliseconds of forward and backward, and the ratio plain / dialect. Runs alternate,
so that a busy machine disturbs both; results of the first pair are compared, so that what is timed is right.
"""

from __future__ import annotations

import argparse
import platform
import statistics
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moefx.ir import dialect
from moefx.ir.body import ExpertBody, Gemm
from moefx.lowering import select


class Expert(nn.Module):
    def __init__(self, dim: int, hidden: int):
        super().__init__()
        self.gate_proj = nn.Linear(dim, hidden, bias=False)
        self.up_proj = nn.Linear(dim, hidden, bias=False)
        self.down_proj = nn.Linear(hidden, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class PlainExperts(nn.Module):
    """What users write: for each expert, gather its tokens, run it, add to the output."""

    def __init__(self, num_experts: int, dim: int, hidden: int):
        super().__init__()
        self.experts = nn.ModuleList(Expert(dim, hidden) for _ in range(num_experts))

    def forward(self, x: Tensor, topk_ids: Tensor, topk_weights: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        for i, expert in enumerate(self.experts):
            token, slot = torch.where(topk_ids == i)
            out.index_add_(0, token, topk_weights[token, slot, None] * expert(x[token]))
        return out


class DialectExperts(nn.Module):
    """The same parameters, run by the dialect's ops."""

    def __init__(self, plain: PlainExperts, keep: str):
        super().__init__()
        self.experts, self.keep, num = plain.experts, keep, len(plain.experts)
        self.body = ExpertBody(
            up=(Gemm(num, True), Gemm(num, True)),
            parts=((0, None, None, 1), (1, None, None, 1)),
            act=("mul.Tensor", ("silu", "a0"), "a1"),
            down=Gemm(num, True),
            out=("mul.Tensor", "y", "w"),
        ).to_json()

    def forward(self, x: Tensor, topk_ids: Tensor, topk_weights: Tensor) -> Tensor:
        up = [e.gate_proj.weight for e in self.experts] + [e.up_proj.weight for e in self.experts]
        down = [e.down_proj.weight for e in self.experts]
        pft = dialect.build_pft(topk_ids, topk_weights, None, num_experts=len(self.experts))
        token_ids, _, expert_offsets, inverse, weights = pft
        out, *_ = dialect.expert_mlp(
            *(x, token_ids, expert_offsets, inverse, weights, up, [], down, []),
            body=self.body,
            keep=self.keep,
            reduce=True,
        )
        return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    for name, default in {"tokens": 2048, "experts": 64, "top-k": 8, "dim": 256, "hidden": 128}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--keep", choices=["h", "x", "all"], default="h")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    dtype = getattr(torch, args.dtype)

    plain = PlainExperts(args.experts, args.dim, args.hidden).to(dtype)
    ours = DialectExperts(plain, args.keep)
    x = torch.randn(args.tokens, args.dim, dtype=dtype, requires_grad=True)
    weights, ids = torch.topk(torch.randn(args.tokens, args.experts).softmax(-1), args.top_k)
    weights = weights.to(dtype).requires_grad_()
    grad = torch.randn_like(x)
    leaves = [x, weights, *plain.parameters()]

    def step(module: nn.Module) -> tuple[float, list[Tensor]]:
        for leaf in leaves:
            leaf.grad = None
        start = time.perf_counter()
        out = module(x, ids, weights)
        out.backward(grad)
        seconds = time.perf_counter() - start
        return seconds, [out.detach(), *(leaf.grad for leaf in leaves if leaf.grad is not None)]

    error = difference(step(plain)[1], step(ours)[1])
    times: dict[str, list[float]] = {"plain loop": [], "dialect": []}
    select.reset_counters()
    for _ in range(args.repeats):
        for name, module in (("plain loop", plain), ("dialect", ours)):
            times[name].append(1e3 * step(module)[0])

    shape = f"T={args.tokens} E={args.experts} K={args.top_k} d={args.dim} h={args.hidden} {args.dtype}"
    print(
        f"{shape} keep={args.keep}, {args.threads} threads, torch {torch.__version__}, {platform.processor()}"
    )
    print(f"largest difference, relative to the largest value: {error:.1e}")
    print("providers:", ", ".join(f"{op}={p}" for op, p in select.counters()))
    for name, ms in times.items():
        print(f"{name:>10}: min {min(ms):7.1f} ms   median {statistics.median(ms):7.1f} ms")

    def ratio(of: Callable[[list[float]], float]) -> float:
        return of(times["plain loop"]) / of(times["dialect"])

    print(f"     ratio: min {ratio(min):7.2f}      median {ratio(statistics.median):7.2f}")


def difference(expected: list[Tensor], got: list[Tensor]) -> float:
    assert len(expected) == len(got)
    return max(float((a - b).abs().max() / a.abs().max()) for a, b in zip(expected, got, strict=True))


if __name__ == "__main__":
    main()
