"""Tokens that ranks of a tensor-parallel axis share: a part of them for each (SSMB), or recomputing what would be kept.

    python -m benchmarks.ssmb [--shape qwen3_30b] [--tensor-parallel 2] [--out FILE]

X-MoE figure 14, of one layer on one GPU: one rank of four, whose exchanges are emulated
(`moefx.bench.mirror_group`). For each way ms of a forward and backward, medians in turns, and
MiB that the forward keeps for the backward beside its input.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import statistics
from typing import Any

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import moefx
from moefx.bench import mirror_group
from moefx.bench.ep_layers import Layer
from moefx.bench.ep_steps import Step
from moefx.bench.results import append_row
from moefx.bench.shapes import SHAPES

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
    """MiB."""
    step.prepare(1)
    x = step.inputs.pop()
    before = torch.cuda.memory_allocated()
    out = step.layer(x)
    torch.cuda.synchronize()
    return (torch.cuda.memory_allocated() - before - out.nbytes) / 2**20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="qwen3_30b")
    parser.add_argument("--tokens", type=int, default=8192, help="of the ranks of a tensor-parallel axis")
    parser.add_argument("--tensor-parallel", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", default=None)
    options = parser.parse_args()
    mirror_group.init_mirror_group(RANKS, lambda leaving: 31e-6 + leaving / 322e9)
    tp = options.tensor_parallel
    mesh = init_device_mesh("cuda", (RANKS // tp, tp), mesh_dim_names=("dp", "tp"))
    shape = next(s for s in SHAPES if s.name == options.shape)
    shape = dataclasses.replace(shape, T=options.tokens)
    torch.manual_seed(0)
    layer, example = Layer(shape), (torch.zeros(64, shape.d, device="cuda", dtype=torch.bfloat16),)
    plan = moefx.Plan(validation="symbolic", dispatch="dedup", expert_axis=("dp", "tp"), node_size=RANKS)
    whole = moefx.compile(layer, mesh=mesh, plan=plan, example_inputs=example)
    parts = moefx.compile(layer, mesh=mesh, plan=plan.replace(sequence_axis="tp"), example_inputs=example)
    layers = {
        "all tokens": whole,
        "all tokens, checkpoint": Recomputed(whole, saves_routing=False),
        "all tokens, save_routing": Recomputed(whole, saves_routing=True),
        "SSMB": parts,
    }
    steps = {way: Step(found, shape) for way, found in layers.items()}
    times: dict[str, list[float]] = {way: [] for way in steps}
    memory = {}
    for way, step in steps.items():
        step.measure_milliseconds()
        memory[way] = kept(step)
    for _ in range(options.rounds):
        for way, step in steps.items():
            times[way].append(step.measure_milliseconds())
    for way, found in times.items():
        row = dict(shape=shape.name, tokens=shape.T, ranks=RANKS, tensor_parallel=tp, way=way, mirror=True)
        row |= dict(ms=statistics.median(found), kept_mib=memory[way])
        print(f"{shape.name} TP={tp}  {way:26} {row['ms']:7.2f} ms  {row['kept_mib']:8.1f} MiB kept", flush=True)
        if options.out:
            append_row(row, options.out)


if __name__ == "__main__":
    main()
