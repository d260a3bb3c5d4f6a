"""Expert layers that fit the warp-specialized kernels, and their tile configurations."""

from __future__ import annotations

import dataclasses

import torch

from moefx.lowering.triton.tile_configs import GemmConfig

from ...ir.routings import Layer
from .aot import swiglu_halves
from .layers import stack_storage

ROLES = GemmConfig(128, 256, 64, warps=8, stages=4, persistent=1, roles=True)
CONFIGS = dict.fromkeys(["down", "grad_x", "grad_up", "grad_down"], ROLES)
CONFIGS |= dict.fromkeys(["up", "act_backward"], dataclasses.replace(ROLES, stages=3))
NARROW = CONFIGS | dict.fromkeys(["up", "act_backward"], dataclasses.replace(ROLES, bn=128, stages=6))
GATHERED = {kernel: dataclasses.replace(tiles, gather_first=True) for kernel, tiles in CONFIGS.items()}


def stack_parameters(layer: Layer) -> Layer:
    """Lay out separate parameters as a stack with strides."""
    e = layer.body.down.num
    up = (
        layer.up
        if len(layer.up) == 1
        else [p for i in range(0, len(layer.up), e) for p in stack_storage(layer.up[i : i + e])]
    )
    return dataclasses.replace(layer, up=up, down=layer.down if len(layer.down) == 1 else stack_storage(layer.down))


def make_halves(num_experts: int, d: int, h: int, dtype: torch.dtype = torch.float64) -> Layer:
    layer = swiglu_halves(num_experts, d, h, dtype)
    for p in layer.parameters:
        torch.nn.init.normal_(p.requires_grad_().data, std=p.shape[-1] ** -0.5)
    return layer
