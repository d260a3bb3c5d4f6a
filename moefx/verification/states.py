"""Inputs that make a router choose otherwise: equivalence on one routing says little about the others."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from .sandbox import Inputs, leaves, mapped

GIVEN = "the given inputs"


def router_states(inputs: Inputs, seed: int) -> Iterator[tuple[str, Inputs]]:
    """(name, inputs): the given ones; some that send nearly all tokens to the same experts and starve the
    others; unrelated ones of the same scale. Routing is changed by the hidden states, which needs to know no
    router."""
    floats = [t for _, t in leaves(inputs) if isinstance(t, Tensor) and t.is_floating_point() and t.ndim > 1]
    shape = max((t.shape for t in floats), key=math.prod, default=None)
    generator = torch.Generator().manual_seed(seed)

    def hidden(change: Any) -> Inputs:
        """Change the hidden states: everything shaped like the largest floating-point argument."""
        return mapped(inputs, lambda _, t: change(t.detach()).to(t) if t.shape == shape else t.detach().clone())

    def noise(t: Tensor) -> Tensor:
        return torch.randn(t.shape, generator=generator).to(t.device) * t.float().std().nan_to_num(1.0)

    def skewed(t: Tensor) -> Tensor:
        rows = t.float().reshape(-1, t.shape[-1])
        return rows[:1].expand_as(rows).reshape(t.shape) + 0.05 * noise(t)

    yield GIVEN, inputs
    if shape is not None and math.prod(shape):
        yield "inputs that starve experts", hidden(skewed)
        yield "unrelated inputs", hidden(noise)
