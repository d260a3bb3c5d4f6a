"""Launches every GEMM kernel, and those around them, at small odd sizes: a program to run under compute-sanitizer.

PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool memcheck python -m tests.lowering.triton.sanitize
"""

from __future__ import annotations

import dataclasses
import sys

import torch

from moefx.ir import op_providers
from moefx.lowering.triton import expert_mlp_call as run_module
from moefx.lowering.triton import launch_replay
from moefx.lowering.triton.tile_configs import KERNELS, Config, list_candidates, portable_config

from ...ir.routings import Layer, random_routing
from .test_expert_mlp_call import LINEAR, apart, on, outputs_and_gradients
from .test_warp_specialized import equally_spaced, halves


def far_apart(layer: Layer) -> Layer:
    """Experts that are read through a table of their addresses."""
    return dataclasses.replace(layer, up=apart(layer.up), down=apart(layer.down))


LAYERS = {
    "parts of a stack": (halves, equally_spaced),
    "pairs of columns, biases": (LINEAR["interleaved_clamped"], equally_spaced),
    "separate": (LINEAR["swiglu_list"], equally_spaced),
    "at addresses": (LINEAR["swiglu_list"], far_apart),
}
TOKENS, D, H, E = 333, 264, 136, 5


def steps(name: str) -> None:
    """Forward and backward with every candidate, each kernel's beside those of the others."""
    make, arrange = LAYERS[name]
    dtype = torch.bfloat16
    layer, routing = arrange(on("cuda", make(E, D, H), dtype)), random_routing(TOKENS, 2, E)
    keep = (torch.rand(TOKENS, 2) < 0.9).cuda()
    routing = dataclasses.replace(routing, topk_ids=routing.topk_ids.cuda(), keep=keep)
    x, grad = torch.randn(2, TOKENS, D, device="cuda").to(dtype)
    every = {kernel: _candidates(kernel, dtype) for kernel in KERNELS}
    for i in range(max(map(len, every.values()))):
        cuts = {kernel: some[i % len(some)] for kernel, some in every.items()}
        run_module.config = lambda kernel, *_, cuts=cuts: cuts[kernel]
        launch_replay._tapes.clear()  # the last configurations' launches
        with op_providers.force("expert_mlp", "triton"), op_providers.force("expert_mlp_backward", "triton"):
            arguments = (layer, routing, x, routing.topk_weights.to(x), grad)
            results = outputs_and_gradients(*arguments, keep="h", reduce=i % 2 == 0)
        assert all(bool(result.isfinite().all()) for result in results), (name, cuts)
        print(name, i, flush=True)


def _candidates(kernel: str, dtype: torch.dtype) -> list[Config]:
    return [*list_candidates(kernel, torch.device("cuda"), dtype), portable_config(kernel)]


if __name__ == "__main__":
    torch.manual_seed(0)
    for name in sys.argv[1:] or LAYERS:
        steps(name)
