"""Comparisons of small models."""

from __future__ import annotations

import torch

from moefx.comparison.compare import Comparison, Subject, compare
from moefx.comparison.sandbox import Casts, RunOptions


def check(original, compiled, *inputs, dtype=None, seed=0, grads=True, loss=None, **kwargs) -> Comparison:
    subject = Subject(original, compiled, Casts(dtype), Casts(torch.float64), block="mlp")
    return compare(subject, (inputs, kwargs), RunOptions(seed, grads, loss), case="case 1")


def tokens(*shape: int, seed: int = 1) -> torch.Tensor:
    return torch.randn(*shape, 16, generator=torch.Generator().manual_seed(seed))
