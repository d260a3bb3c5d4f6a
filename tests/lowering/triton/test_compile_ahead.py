"""`op_providers.compile_ahead` on a GPU: the first real call compiles nothing."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest
import torch
from torch import nn

import moefx
from moefx.ir import op_providers

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]


class Layer(nn.Module):
    """Layer with sizes that no other test compiles."""

    def __init__(self, num_experts: int = 11) -> None:
        super().__init__()
        self.gate = nn.Linear(144, num_experts, bias=False)
        self.up = nn.Parameter(torch.randn(num_experts, 144, 80) / 12)
        self.down = nn.Parameter(torch.randn(num_experts, 80, 144) / 9)

    def forward(self, x):
        weights, ids = self.gate(x).softmax(-1).topk(3)
        out = torch.zeros_like(x)
        for e in range(len(self.up)):
            t, k = torch.where(ids == e)
            out.index_add_(0, t, torch.tanh(x[t] @ self.up[e]) @ self.down[e] * weights[t, k, None])
        return out


@contextlib.contextmanager
def log_compilations() -> Iterator[list[bool]]:
    """Yield a list that gets an item for each kernel that Triton compiles or reads from its cache on disk."""
    from triton import knobs

    found: list[bool] = []
    before = knobs.compilation.listener
    knobs.compilation.listener = lambda *, cache_hit, **_: found.append(cache_hit)
    try:
        yield found
    finally:
        knobs.compilation.listener = before


def test_the_first_call_compiles_nothing():
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

    with log_compilations() as compiled_kernels:
        with op_providers.compile_ahead() as is_useful:
            assert is_useful
            reference = step()
        ahead = len(compiled_kernels)
        assert ahead >= 8 and not op_providers.counters()
        results = step()
        assert len(compiled_kernels) == ahead
    assert set(dict(op_providers.counters())) >= {("expert_mlp", "triton"), ("expert_mlp_backward", "triton")}
    for got, want in zip(results, reference, strict=True):
        assert (got.float() - want.float()).norm() <= 0.02 * want.float().norm()


def test_compile_prepares_the_kernels_of_a_training_step():
    torch.manual_seed(0)
    original = Layer(num_experts=13).bfloat16().cuda()
    few = torch.randn(40, 144, device="cuda").bfloat16()
    with log_compilations() as found:
        compiled = moefx.compile(original, example_inputs=(few,))
        assert len(found) >= 8
        found.clear()
        x = torch.randn(8192, 144, device="cuda").bfloat16().requires_grad_()
        compiled(x).float().square().sum().backward()
        assert not found
