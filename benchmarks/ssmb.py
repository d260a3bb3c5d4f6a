"""Tokens that ranks of a tensor-parallel axis share: a part of them for each (SSMB), or recomputing what would be kept.

    python -m benchmarks.ssmb [--shape qwen3_30b] [--tensor-parallel 2] [--out FILE]
    torchrun --nproc-per-node 4 -m benchmarks.ssmb ...

X-MoE figures 13 and 14, of one layer. Without torchrun: on one GPU, one rank of four, whose exchanges are emulated
(`moefx.bench.mirror_group`). For each variant ms of a forward and backward, medians in turns, of the slowest rank, MiB
that the forward keeps for the backward beside its input, and the peak of a step.

Between ranks also the bytes that gather the shards of the tokens, and their formula: a rank sends its shard to the
others of its axis in the forward, and the gradients of the shard and of its routing weights in the backward (X-MoE
appendix C.2, which leaves out the weights).

`--device cpu` tests this script over gloo. Its figures mean nothing, and no memory is counted.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import os
import statistics
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import moefx
from moefx.bench import mirror_group
from moefx.bench.ep_layers import WEIGHT_BYTES, Layer
from moefx.bench.ep_steps import Step
from moefx.bench.rank_device import RankDevice, start_ranks, take_largest
from moefx.bench.results import append_row
from moefx.bench.sent_bytes import count_shard_bytes
from moefx.bench.shapes import Shape, parse_shape

RANKS = 4


class Recomputed(torch.nn.Module):
    """A layer under `torch.utils.checkpoint`."""

    def __init__(self, layer: torch.nn.Module, saves_routing: bool):
        super().__init__()
        self.layer = layer
        kept = functools.partial(create_selective_checkpoint_contexts, moefx.save_routing)
        self.options: dict[str, Any] = {"use_reentrant": False} | ({"context_fn": kept} if saves_routing else {})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.layer, x, **self.options)


def kept(step: Step) -> float:
    """MiB; 0 on a CPU."""
    step.prepare(1)
    x = step.inputs.pop()
    before = torch.cuda.memory_allocated() if step.device.is_gpu else 0
    out = step.layer(x)
    step.device.synchronize()
    return (torch.cuda.memory_allocated() - before - out.nbytes) / 2**20 if step.device.is_gpu else 0.0


def gathered_bytes(step: Step) -> float:
    """Bytes that gather shards in a step, the mean of the ranks."""
    with count_shard_bytes() as counter:
        step.run_eagerly(step.draw_rows().requires_grad_())
    found = torch.tensor([float(counter.num_bytes)], device=step.device.type)
    dist.all_reduce(found)
    return found.item() / dist.get_world_size()


def build_layers(shape: Shape, mesh: DeviceMesh, device: RankDevice) -> dict[str, torch.nn.Module]:
    """The layer in each variant. An axis of one rank has the tokens for itself: nothing is shared."""
    torch.manual_seed(0)
    layer = Layer(shape, device=device.type)
    example = (torch.zeros(64, shape.d, device=device.type, dtype=torch.bfloat16),)
    plan = moefx.Plan(validation="symbolic", dispatch="dedup", expert_axis=("dp", "tp"), node_size=mesh.size())
    whole = moefx.compile(layer, mesh=mesh, plan=plan, example_inputs=example)
    layers = {
        "all tokens": whole,
        "all tokens, checkpoint": Recomputed(whole, saves_routing=False),
        "all tokens, save_routing": Recomputed(whole, saves_routing=True),
    }
    if mesh["tp"].size() > 1:
        layers["SSMB"] = moefx.compile(layer, mesh=mesh, plan=plan.replace(sequence_axis="tp"), example_inputs=example)
    return layers


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", type=parse_shape, default="qwen3_30b")
    parser.add_argument("--tokens", type=int, default=8192, help="of the ranks of a tensor-parallel axis")
    parser.add_argument("--tensor-parallel", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"), help="cpu only tests this script")
    parser.add_argument("--out", default=None)
    options = parser.parse_args()
    mirrors = "LOCAL_RANK" not in os.environ
    if mirrors:
        mirror_group.init_mirror_group(RANKS, lambda leaving: 31e-6 + leaving / 322e9)
        device = RankDevice("cuda")
    else:
        device = start_ranks("ssmb", options.device)
    tp, ranks = options.tensor_parallel, dist.get_world_size()
    mesh = init_device_mesh(device.type, (ranks // tp, tp), mesh_dim_names=("dp", "tp"))
    shape = dataclasses.replace(options.shape, T=options.tokens)
    steps = {variant: Step(found, shape, device) for variant, found in build_layers(shape, mesh, device).items()}
    for step in steps.values():  # ranks of one axis have the same tokens
        step.generator.manual_seed(17 + dist.get_rank() // tp)
    times: dict[str, list[float]] = {variant: [] for variant in steps}
    figures: dict[str, dict[str, float]] = {}
    for variant, step in steps.items():
        step.measure_milliseconds()
        memory = kept(step)
        device.reset_peak_memory()
        step.measure_milliseconds()
        peak = 1024 * device.read_peak_gib()
        figures[variant] = dict(kept_mib=memory, peak_mib=peak)
        if not mirrors:
            gathered_row = 2 * shape.d * 2 + shape.K * WEIGHT_BYTES  # a token, its gradient, and those of its weights
            formula = float((tp - 1) * -(-shape.T // tp) * gathered_row) if variant == "SSMB" else 0.0
            figures[variant] |= dict(gather_bytes=gathered_bytes(step), gather_formula_bytes=formula)
    for _ in range(options.rounds):
        for variant, step in steps.items():
            times[variant].append(step.measure_milliseconds())
    for variant, found in times.items():
        names = ("kept_mib", "peak_mib")
        ms, *largest = take_largest(
            [statistics.median(found), *(figures[variant][name] for name in names)], device.type
        )
        row: dict[str, Any] = dict(shape=shape.name, tokens=shape.T, ranks=ranks, tensor_parallel=tp, way=variant)
        row |= dict(mirror=mirrors, ms=ms) | figures[variant] | dict(zip(names, largest, strict=True))
        if dist.get_rank() == 0:
            print(f"{shape.name} TP={tp}  {variant:26} {ms:7.2f} ms  {row['kept_mib']:8.1f} MiB kept", flush=True)
            if options.out:
                append_row(row, options.out)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
