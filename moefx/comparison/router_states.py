"""Inputs that make a router choose otherwise: equivalence on one routing says little about the others."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from ..capture.captured import has_values
from ..util.model_copy import copy_model
from .sandbox import Inputs, leaves, map_tensors

GIVEN, UNRELATED = "the given inputs", "unrelated inputs"
_MAX_ELEMENTS = 1 << 16  # elements of a tensor that is looked at


def router_states(inputs: Inputs, seed: int) -> Iterator[tuple[str, Inputs]]:
    """(name, inputs): the given ones; some that send nearly all tokens to the same experts and starve the
    others; unrelated ones of the same scale. Routing is changed by the hidden states, which needs to know no
    router."""
    floats = [t for _, t in leaves(inputs) if isinstance(t, Tensor) and t.is_floating_point() and t.ndim > 1]
    shape = max((t.shape for t in floats), key=math.prod, default=None)
    generator = torch.Generator().manual_seed(seed)

    def hidden(change: Any) -> Inputs:
        """Change the hidden states: everything shaped like the largest floating-point argument."""
        return map_tensors(inputs, lambda _, t: change(t.detach()).to(t) if t.shape == shape else t.detach().clone())

    def noise(t: Tensor) -> Tensor:
        return torch.randn(t.shape, generator=generator, dtype=torch.float32).to(t.device) * t.float().std().nan_to_num(
            1.0
        )

    def skewed(t: Tensor) -> Tensor:
        rows = t.float().reshape(-1, t.shape[-1])
        return rows[:1].expand_as(rows).reshape(t.shape) + 0.05 * noise(t)

    yield GIVEN, inputs
    if shape is not None and math.prod(shape):
        yield "inputs that starve experts", hidden(skewed)
        yield UNRELATED, hidden(noise)


def vary_constants(block: nn.Module, seed: int) -> nn.Module:
    """A copy in which floats that are all the same have other values, as a bias will after the first step: what hangs
    on them does not show before. Other tensors are shared; the block itself, if there are none."""
    generator = torch.Generator().manual_seed(seed)
    others: dict[int, Tensor] = {}
    for t in (*block.parameters(), *block.buffers()):
        if (
            not (t.is_floating_point() and 0 < t.numel() <= _MAX_ELEMENTS and has_values(t))
            or (t != t.flatten()[0]).any()
        ):
            continue
        if t.numel() > 1 or t.item() == 0:  # a single number may have to be of its kind: an epsilon, say
            noise = torch.rand(t.shape, generator=generator, dtype=torch.float32)  # none is negative: a variance is not
            value = (t.detach().cpu().double() * (0.5 + noise) if t.any() else noise).to(t)
            others[id(t)] = nn.Parameter(value, t.requires_grad) if isinstance(t, nn.Parameter) else value
    if not others:
        return block
    copied, _ = copy_model(block)
    for module in copied.modules():
        for held in (module._parameters, module._buffers):
            held.update({name: others.get(id(t), t) for name, t in held.items()})  # type: ignore[misc]
    return copied
