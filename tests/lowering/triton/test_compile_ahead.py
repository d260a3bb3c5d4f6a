"""`op_providers.compile_ahead` on a GPU: the first real call compiles nothing."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import moefx
from moefx.ir import op_providers

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]


class Layer(nn.Module):
    """Layer with sizes that no other test compiles."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(144, 11, bias=False)
        self.up, self.down = nn.Parameter(torch.randn(11, 144, 80) / 12), nn.Parameter(torch.randn(11, 80, 144) / 9)

    def forward(self, x):
        weights, ids = self.gate(x).softmax(-1).topk(3)
        out = torch.zeros_like(x)
        for e in range(11):
            t, k = torch.where(ids == e)
            out.index_add_(0, t, torch.tanh(x[t] @ self.up[e]) @ self.down[e] * weights[t, k, None])
        return out


def test_the_first_call_compiles_nothing():
    from triton import knobs

    compiled_kernels = []
    before = knobs.compilation.listener
    torch.manual_seed(0)
    original = Layer().bfloat16().cuda()
    example = torch.zeros(40, 144, device="cuda").bfloat16()
    compiled = moefx.compile(original, plan=moefx.Plan(validation="symbolic"), example_inputs=(example,))
    x = torch.randn(48, 144, device="cuda").bfloat16().requires_grad_()
    op_providers.reset_counters()

    def step() -> list[torch.Tensor]:
        with torch.autograd.set_multithreading_enabled(False):
            out = compiled(x)
            return [out, *torch.autograd.grad(out.float().square().sum(), [x, *compiled.parameters()])]

    def listener(*, cache_hit, **_):
        compiled_kernels.append(cache_hit)

    knobs.compilation.listener = listener
    try:
        with op_providers.compile_ahead() as is_useful:
            assert is_useful
            reference = step()
        ahead = len(compiled_kernels)
        assert ahead >= 8 and not op_providers.counters()
        results = step()
        assert len(compiled_kernels) == ahead
    finally:
        knobs.compilation.listener = before
    assert set(dict(op_providers.counters())) >= {("expert_mlp", "triton"), ("expert_mlp_backward", "triton")}
    for got, want in zip(results, reference, strict=True):
        assert (got.float() - want.float()).norm() <= 0.02 * want.float().norm()
