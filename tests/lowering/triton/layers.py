"""Expert layers in several layouts of their weights, run by Triton and by plain torch."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from moefx.ir import op_providers
from moefx.lowering.triton.tile_configs import GemmConfig

from ...ir.routings import LAYERS, Layer, Routing

LINEAR = {name: make for name, make in LAYERS.items() if name != "nonlinear_out"}
SMALL = GemmConfig(32, 32, 16, warps=4, stages=2, group=2, slices=2)
# All kinds of tiles and launches.
CONFIGS = {
    "sliced": SMALL,
    "separate": dataclasses.replace(SMALL, fused=False),
    "gathered": dataclasses.replace(SMALL, fused=False, gather_first=True),
    "quarters": dataclasses.replace(SMALL, bn=64, slices=4, persistent=1),
    "descriptors": dataclasses.replace(SMALL, descriptors=True, store_descriptors=True, persistent=1, slices=1),
    "flattened": dataclasses.replace(SMALL, descriptors=True, persistent=1, flatten=True, slices=1),
}


def move_layer(device: str, layer: Layer, dtype: torch.dtype) -> Layer:
    def move(tensors: list[Tensor]) -> list[Tensor]:
        return [t.detach().to(device, dtype).requires_grad_() for t in tensors]

    lists = {name: move(getattr(layer, name)) for name in ("up", "up_bias", "down", "down_bias")}
    return dataclasses.replace(layer, **lists)


def run_and_differentiate(layer: Layer, routing: Routing, x: Tensor, weights: Tensor, grad: Tensor, **options):
    x, weights = x.detach().requires_grad_(), weights.detach().requires_grad_()
    out = layer.fused(x, routing, weights, **options)
    leaves = [x, weights, *layer.parameters]
    return [out, *torch.autograd.grad(out, leaves, grad.to(out.dtype))]


def check(
    make, device: str, dtype: torch.dtype, routing: Routing, d: int, h: int, arrange=lambda layer: layer, **options
) -> None:
    """Compare outputs and gradients with float64: at most twice the error of the torch provider, plus a small term.

    `arrange` lays out the parameters.
    """
    exact_layer = make(routing.num_experts, d, h)
    exact_layer = move_layer("cpu", move_layer("cpu", exact_layer, dtype), torch.float64)
    layer = arrange(move_layer(device, exact_layer, dtype))
    num_tokens = routing.topk_ids.shape[0]
    x, grad = torch.randn(num_tokens, d).to(dtype), torch.randn(num_tokens, d).to(dtype)
    weights = routing.topk_weights.to(dtype)
    exact = run_and_differentiate(exact_layer, routing, x.double(), weights.double(), grad.double(), **options)
    there = dataclasses.replace(
        routing,
        topk_ids=routing.topk_ids.to(device),
        keep=None if routing.keep is None else routing.keep.to(device),
    )
    arguments = (layer, there, x.to(device), weights.to(device), grad.to(device))
    results = {}
    for provider in ("segments", "triton"):
        with op_providers.force("expert_mlp", provider), op_providers.force("expert_mlp_backward", provider):
            op_providers.reset_counters()
            results[provider] = run_and_differentiate(*arguments, **options)
            counted = op_providers.counters()
            assert counted["expert_mlp", provider] == counted["expert_mlp_backward", provider] == 1
    for i, want in enumerate(exact):
        other, got = (results[p][i].cpu().double() for p in ("segments", "triton"))
        scale = want.norm() + 1e-30
        error, allowed = (got - want).norm() / scale, 2 * (other - want).norm() / scale
        assert error <= allowed + torch.finfo(dtype).eps, (i, float(error), float(allowed))


def stack_storage(tensors: list[Tensor]) -> list[Tensor]:
    """Copy the tensors into one storage."""
    return [t.requires_grad_() for t in torch.stack([t.detach() for t in tensors]).unbind(0)]


def separate(tensors: list[Tensor]) -> list[Tensor]:
    """Copy the tensors to aligned addresses that are not equally spaced."""
    storage = torch.empty(2 * sum(t.numel() + 256 for t in tensors), dtype=tensors[0].dtype, device=tensors[0].device)
    out, start = [], 0
    for i, t in enumerate(tensors):
        out.append(storage[start : start + t.numel()].view(t.shape).copy_(t.detach()).requires_grad_())
        start += t.numel() + 64 * (1 + i)
    return out
