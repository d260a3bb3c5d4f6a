"""Launch every GEMM kernel and the kernels around them at small odd sizes: a program to run under compute-sanitizer.

PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool memcheck python -m tests.lowering.triton.sanitize
"""

from __future__ import annotations

import dataclasses
import sys

import torch

from moefx.ir import op_providers
from moefx.lowering.triton import expert_mlp_call as run_module
from moefx.lowering.triton import launch_replay
from moefx.lowering.triton.tile_configs import KERNELS, GemmConfig, list_candidates, portable_config

from ...ir.routings import Layer, draw_routing
from .layers import LINEAR, move_layer, run_and_differentiate, separate
from .wide_layers import make_halves, stack_parameters


def spread_experts(layer: Layer) -> Layer:
    """Spread the experts, so that kernels read them through a table of addresses."""
    return dataclasses.replace(layer, up=separate(layer.up), down=separate(layer.down))


LAYERS = {
    "parts of a stack": (make_halves, stack_parameters),
    "pairs of columns, biases": (LINEAR["interleaved_clamped"], stack_parameters),
    "separate": (LINEAR["swiglu_list"], stack_parameters),
    "at addresses": (LINEAR["swiglu_list"], spread_experts),
}
TOKENS, D, H, E = 333, 264, 136, 5


def run_steps(name: str) -> None:
    """Run forward and backward with every candidate; kernels with fewer candidates repeat them."""
    make, arrange = LAYERS[name]
    dtype = torch.bfloat16
    layer, routing = arrange(move_layer("cuda", make(E, D, H), dtype)), draw_routing(TOKENS, 2, E)
    keep = (torch.rand(TOKENS, 2) < 0.9).cuda()
    routing = dataclasses.replace(routing, topk_ids=routing.topk_ids.cuda(), keep=keep)
    x, grad = torch.randn(2, TOKENS, D, device="cuda").to(dtype)
    candidates = {kernel: _candidates(kernel, dtype) for kernel in KERNELS}
    for i in range(max(map(len, candidates.values()))):
        configs = {kernel: some[i % len(some)] for kernel, some in candidates.items()}
        run_module.choose_config = lambda kernel, *_, configs=configs: configs[kernel]
        launch_replay._tapes.clear()  # the launches of other configurations
        with op_providers.force("expert_mlp", "triton"), op_providers.force("expert_mlp_backward", "triton"):
            arguments = (layer, routing, x, routing.topk_weights.to(x), grad)
            results = run_and_differentiate(*arguments, keep="h", reduce=i % 2 == 0)
        assert all(bool(result.isfinite().all()) for result in results), (name, configs)
        print(name, i, flush=True)


def _candidates(kernel: str, dtype: torch.dtype) -> list[GemmConfig]:
    return [*list_candidates(kernel, torch.device("cuda"), dtype), portable_config(kernel)]


if __name__ == "__main__":
    torch.manual_seed(0)
    for name in sys.argv[1:] or LAYERS:
        run_steps(name)
