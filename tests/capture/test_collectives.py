"""Blocks that communicate over a group of one rank."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

import moefx

from ..models.case import gradients
from ..passes.blocks import D, E, Loop, Mlp


@pytest.fixture
def alone(tmp_path):
    if not dist.is_available():
        pytest.skip("no torch.distributed")
    dist.init_process_group("gloo", rank=0, world_size=1, init_method=f"file://{tmp_path}/store")
    yield
    dist.destroy_process_group()


class Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        out = torch.empty_like(x)
        dist.all_to_all_single(out, x.contiguous())
        return out

    @staticmethod
    def backward(ctx, gradient):
        return Exchange.apply(gradient)


class Exchanged(Loop):
    """Rows go to the ranks of their experts and back."""

    def __init__(self):
        super().__init__(Mlp)

    def forward(self, x):
        w, ids = self.route(x)
        order = ids.flatten().argsort(stable=True)
        here = torch.bincount(ids.flatten(), minlength=E)
        counts = torch.empty_like(here)
        dist.all_to_all_single(counts, here)
        rows = Exchange.apply(x[order // 2]).split(counts.tolist())
        y = Exchange.apply(torch.cat([expert(r) for expert, r in zip(self.experts, rows, strict=True)]))
        return torch.zeros_like(x).index_add(0, order // 2, y * w.flatten()[order, None])


class Reduced(Loop):
    def __init__(self):
        super().__init__(Mlp)
        self.register_buffer("load", torch.zeros(E))

    def forward(self, x):
        _, ids = self.route(x)
        counts = torch.bincount(ids.flatten(), minlength=E).to(self.load.dtype)
        dist.all_reduce(counts)
        self.load += counts
        out = super().forward(x)
        dist.all_reduce(out)
        return out


@pytest.mark.parametrize("kind", [Exchanged, Reduced])
def test_one_rank(alone, kind):
    torch.manual_seed(0)
    model = kind().double()
    compiled = moefx.compile(model, example_inputs=(torch.randn(16, D, dtype=torch.float64),))
    for tokens in (1, 7, 40):
        x = torch.randn(tokens, D, dtype=torch.float64)
        torch.testing.assert_close(*(gradients(m, m, x) for m in (compiled, model)))
    assert moefx.blocks(compiled)[0].fallbacks == 0
