"""Count the bytes of element-wise operations: see `moefx.capture.search.memory_traffic`."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from moefx.capture.search.block_search import search_blocks

S, D = 5, 8


class Inner(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + x.sin()  # reads three times, writes twice


class Outer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.weight = Inner(), nn.Parameter(torch.randn(D, D))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.linear(x, self.weight).view(-1).view_as(x)  # a product and views
        scale = x.new_ones(1).expand(D)
        return self.inner(y).half() * scale.half()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_bytes_of_modules(dtype):
    found = search_blocks(Outer().to(dtype), (torch.randn(S, D, dtype=dtype),), {}).traffic
    size = torch.finfo(dtype).bits // 8
    rows = S * D
    assert found["inner"] == 5 * rows * size
    scale = size + (size + 2 * D)  # made with one element in memory, and cast to D elements
    product = 2 * rows + 2 * D + 2 * rows
    assert found[""] == found["inner"] + scale + rows * (size + 2) + product
