"""Inputs for several routings, because equivalence under one routing does not imply the others."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from ..util.model_copy import copy_model
from ..util.tensor_trees import has_values
from .sandbox import Inputs, change_tensors, leaves

GIVEN, UNRELATED = "the given inputs", "unrelated inputs"
_MAX_ELEMENTS = 1 << 16  # largest tensor that may be varied


def router_states(inputs: Inputs, seed: int) -> Iterator[tuple[str, Inputs]]:
    """(name, inputs) of several routings.

    Yields the given inputs, inputs that send nearly all tokens to the same experts and starve the others, and
    unrelated inputs of the same scale. Changes only the hidden states, so it works for any router.
    """
    candidates = [t for _, t in leaves(inputs) if isinstance(t, Tensor) and t.is_floating_point() and t.ndim > 1]
    shape = max((t.shape for t in candidates), key=math.prod, default=None)
    generator = torch.Generator().manual_seed(seed)

    def change_hidden_states(change: Any) -> Inputs:
        """Apply `change` to the hidden states: every tensor with the shape of the largest floating-point argument."""
        return change_tensors(inputs, lambda _, t: change(t.detach()).to(t) if t.shape == shape else t.detach().clone())

    def make_noise(t: Tensor) -> Tensor:
        return torch.randn(t.shape, generator=generator, dtype=torch.float32).to(t.device) * t.float().std().nan_to_num(
            1.0
        )

    def make_skewed(t: Tensor) -> Tensor:
        rows = t.float().reshape(-1, t.shape[-1])
        return rows[:1].expand_as(rows).reshape(t.shape) + 0.05 * make_noise(t)

    yield GIVEN, inputs
    if shape is not None and math.prod(shape):
        yield "inputs that starve experts", change_hidden_states(make_skewed)
        yield UNRELATED, change_hidden_states(make_noise)


def vary_constants(block: nn.Module, seed: int) -> nn.Module:
    """Return a copy whose constant floating-point tensors, such as a bias before training, have varied values.

    Constant values could hide errors in terms that depend on them. Other tensors are shared. Returns the block itself
    if no tensor is constant.
    """
    generator = torch.Generator().manual_seed(seed)
    others: dict[int, Tensor] = {}
    for t in (*block.parameters(), *block.buffers()):
        if (
            not (t.is_floating_point() and 0 < t.numel() <= _MAX_ELEMENTS and has_values(t))
            or (t != t.flatten()[0]).any()
        ):
            continue
        if t.numel() > 1 or t.item() == 0:  # keep a single nonzero number, which may be an epsilon
            noise = torch.rand(t.shape, generator=generator, dtype=torch.float32)  # nonnegative, as a variance must be
            value = (t.detach().cpu().double() * (0.5 + noise) if t.any() else noise).to(t)
            others[id(t)] = nn.Parameter(value, t.requires_grad) if isinstance(t, nn.Parameter) else value
    if not others:
        return block
    copied, _ = copy_model(block)
    for module in copied.modules():
        for held in (module._parameters, module._buffers):
            held.update({name: others.get(id(t), t) for name, t in held.items()})  # type: ignore[misc]
    return copied
