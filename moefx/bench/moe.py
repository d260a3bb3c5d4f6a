"""Time expert MLPs, forward, and forward with backward: moefx beside its peers, on the same tensors and routing.

    python -m moefx bench moe [--shapes qwen3_30b,olmoe@512] [--peers moefx] [--routing uniform,zipf,hot] [--out FILE]
    python -m moefx bench moe --ablation --shapes 524288x256x256x128x4    # MoEBlaze's tables 4 and 5

Each peer runs in a process of its own. Outputs and gradients are checked against float32 first. Saved bytes are the
tensors that autograd keeps between forward and backward, without the weights. The peak is a step's, above the memory
before it.
"""

from __future__ import annotations

import itertools
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from ..ir import op_providers
from ..lowering.triton.timing import measure_milliseconds, settle_clock
from . import CEILING
from .peers import ABLATION, PEERS, TUNED_IN, Inputs, Work, compile_share
from .results import add_routings, add_shapes, add_workers, append_row, build_parser, compile_in_parallel
from .shapes import Shape, activation, draw_tensors, random_routing

_REPEATS = 15


def build_inputs(shape: Shape, routing: str) -> Inputs:
    x, w1, w2, grad = draw_tensors(shape)
    ids, weights = random_routing(shape, kind=routing)
    return Inputs(shape, x, w1, w2, grad, ids, weights)


def compute_weight_gradients(inputs: Inputs, expert: int) -> tuple[Tensor, ...]:
    """Compute the gradients of one expert's two weights in float32, from the same bfloat16 inputs."""
    token, slot = (inputs.ids == expert).nonzero(as_tuple=True)
    x, grad = inputs.x[token].float(), inputs.grad[token].float() * inputs.weights[token, slot, None]
    w1, w2 = (w[expert].float().requires_grad_() for w in (inputs.w1, inputs.w2))
    out = activation(inputs.shape, x @ w1.t()) @ w2.t()
    return torch.autograd.grad(out, (w1, w2), grad)


def compute_result_errors(inputs: Inputs, results: tuple[Tensor, ...]) -> dict[str, float]:
    """Compute the relative errors (in norm) of the output and the gradient of x on some tokens, and of one expert's
    weight gradients."""
    expert = int(torch.bincount(inputs.ids.reshape(-1)).argmax())
    out, grad_x, grad_weights, grad_w1, grad_w2 = results
    sample = torch.arange(0, inputs.shape.T, max(1, inputs.shape.T // 64), device=out.device)
    x, weights = inputs.x[sample].float().requires_grad_(), inputs.weights[sample].detach().requires_grad_()
    total = torch.zeros_like(x)
    for k in range(inputs.shape.K):
        for row, e in enumerate(inputs.ids[sample, k].tolist()):
            y = inputs.w2[e].float() @ activation(inputs.shape, inputs.w1[e].float() @ x[row])
            total = total.index_add(0, torch.tensor([row], device=x.device), (y * weights[row, k])[None])
    want_x, want_weights = torch.autograd.grad(total, (x, weights), inputs.grad[sample].float())
    want_w1, want_w2 = compute_weight_gradients(inputs, expert)
    pairs = {
        "out": (out[sample].detach(), total),
        "grad_x": (grad_x[sample], want_x),
        "grad_weights": (grad_weights[sample], want_weights),
        "grad_w1": (grad_w1[expert], want_w1),
        "grad_w2": (grad_w2[expert], want_w2),
    }
    exact = {name: expected.detach() for name, (_, expected) in pairs.items()}
    return {
        name: float((pairs[name][0].float() - expected).norm() / expected.norm()) for name, expected in exact.items()
    }


def saved_bytes(inputs: Inputs, work: Work) -> int:
    """Count the bytes that autograd keeps for a step's backward. Tensors that a function hides from autograd do not
    count."""
    saved: list[Tensor] = []  # keeps the tensors alive, so that addresses stay unique

    def pack(tensor: Tensor) -> Tensor:
        saved.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        work.step()
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in saved}
    weights = {t.untyped_storage().data_ptr() for t in (inputs.w1, inputs.w2)}
    return sum(size for at, size in storages.items() if at not in weights)


def measure(shape: Shape, peer: str, routing: str) -> dict[str, Any]:
    inputs = build_inputs(shape, routing)
    work = (PEERS | ABLATION)[peer](inputs)
    row: dict[str, Any] = dict(shape=shape.name, peer=peer, routing=routing)
    results = work.step()
    if len(results) == 5:
        row["errors"] = compute_result_errors(inputs, results)
    del results
    row["saved_bytes_per_token"] = saved_bytes(inputs, work) / shape.T
    settle_clock(work.step)
    row["forward_ms"] = measure_milliseconds(work.forward, _REPEATS)
    row["step_ms"] = measure_milliseconds(work.step, _REPEATS)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    work.step()
    torch.cuda.synchronize()
    row["peak_mib"] = (torch.cuda.max_memory_allocated() - before) / 2**20
    if op_providers.counters():
        row["providers"] = sorted({f"{op}: {provider}" for op, provider in op_providers.counters()})
    row["tflops"] = 3 * shape.matrices * shape.flops / row["step_ms"] / 1e9
    return row


def main(argv: Sequence[str] | None = None) -> None:
    parser = build_parser("moe", __doc__)
    add_shapes(parser)
    add_routings(parser)
    parser.add_argument("--peers", default=",".join(PEERS), help=", ".join(PEERS))
    parser.add_argument(
        "--ablation", dest="peers", action="store_const", const=",".join(ABLATION), help="; ".join(ABLATION)
    )
    parser.add_argument("--rounds", type=int, default=1, metavar="N", help="times to go through the peers")
    parser.add_argument("--here", action="store_true", help="in this process")
    add_workers(parser)
    options = parser.parse_args(argv)
    if unknown_peers := set(options.peers.split(",")) - (PEERS | ABLATION).keys():
        parser.error(f"no peer {', '.join(sorted(unknown_peers))}; there is {', '.join(PEERS | ABLATION)}")
    peers = options.peers.split(",")
    if options.share is not None:
        for peer, shape in itertools.product(peers, options.shapes):
            if shape.gated:  # peers with Triton's autotuner support no others
                compile_share(peer, build_inputs(shape.small, "uniform"), options.share, options.workers)
    elif options.here:
        for peer, shape in itertools.product(peers, options.shapes):
            for routing in options.routing[:1] if peer == CEILING else options.routing:
                _report(shape, peer, routing, options.out)
    else:
        shapes = ["--shapes", ",".join(shape.name for shape in options.shapes)]
        for peer in peers:
            if peer in TUNED_IN and find_spec(TUNED_IN[peer].partition(".")[0]):
                seconds = compile_in_parallel(__spec__.name, ["--peers", peer, *shapes], options.workers)
                print(f"{peer}: compiled its candidates in {seconds:.0f} s", flush=True)
        for peer in peers * options.rounds:
            command = [sys.executable, "-m", __spec__.name, "--peers", peer, "--here", *shapes]
            command += ["--routing", ",".join(options.routing), *(["--out", options.out] if options.out else [])]
            subprocess.run(command, check=False)


def _report(shape: Shape, peer: str, routing: str, out: str | None) -> None:
    """Measure, print, and write."""
    begin = time.time()
    torch.compiler.reset()  # what is compiled for one shape must not serve the next
    row: dict[str, Any]
    try:
        row = measure(shape, peer, routing)
    except Exception as error:  # a peer that is not installed, or of another version
        row = dict(shape=shape.name, peer=peer, routing=routing, error=f"{type(error).__name__}: {error}"[:300])
    if out:
        append_row(row, out)
    print(f"{shape.name:10} {routing:8} {peer:24} {_text(row)}  ({time.time() - begin:.0f} s)", flush=True)
    torch.cuda.empty_cache()  # raises where a peer's kernel has broken the GPU's context, and nothing can follow


def _text(row: Mapping[str, Any]) -> str:
    if "error" in row:
        return str(row["error"])
    worst = max(row["errors"].values()) if "errors" in row else float("nan")
    return (
        f"forward {row['forward_ms']:8.3f} ms  step {row['step_ms']:8.3f} ms  {row['tflops']:5.0f} TFLOP/s  saved "
        f"{row['saved_bytes_per_token']:.0f} bytes a token  peak {row['peak_mib']:8.0f} MiB  worst error {worst:.1e}"
    )


if __name__ == "__main__":
    main()
