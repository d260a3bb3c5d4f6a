"""Programs with ops that have no float64 kernel are compared in their own precision, with a note."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn

import moefx
from moefx.comparison.block_check import check_block
from moefx.comparison.float64_ops import grouped_mm
from tests.verification.models import FAULTS, Plain, Rewritten

OFFS = torch.tensor([3, 3, 8], dtype=torch.int32)


@pytest.mark.parametrize(
    "a, b", [((8, 16), (3, 16, 4)), ((4, 8), (8, 16)), ((3, 4, 16), (16, 8)), ((3, 5, 4), (3, 4, 8))]
)
def test_grouped_mm_is_that_of_torch(a, b):
    a, b = torch.randn(a), torch.randn(b)
    offs = OFFS if 2 in (a.dim(), b.dim()) else None
    expected = torch._grouped_mm(a, b.transpose(-1, -2).contiguous().transpose(-1, -2), offs=offs)
    found = grouped_mm(a, b, offs)
    assert found.dtype == torch.float64
    torch.testing.assert_close(found.float(), expected, rtol=1e-5, atol=1e-5)


@torch.library.custom_op("moefx_tests::half_silu", mutates_args=())
def half_silu(x: torch.Tensor) -> torch.Tensor:
    if x.dtype == torch.float64:
        raise RuntimeError("half_silu has no float64 kernel")
    return torch.nn.functional.silu(x) / 2


@half_silu.register_fake
def _(x):
    return torch.empty_like(x)


def _half_silu_backward(ctx, grad):
    (x,) = ctx.saved_tensors
    return grad * (x.sigmoid() * (1 + x * (1 - x.sigmoid()))) / 2


half_silu.register_autograd(
    _half_silu_backward, setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs)
)


@torch.library.custom_op("moefx_tests::fake_only", mutates_args=())
def fake_only(x: torch.Tensor) -> torch.Tensor:
    raise RuntimeError("fake_only has no kernel on this machine")


@fake_only.register_fake
def _(x):
    return torch.empty_like(x)


fake_only.register_autograd(lambda ctx, grad: grad)


def call_half_silu(x):
    return half_silu(x)


def call_fake_only(x):
    return fake_only(x)


class Block(nn.Module):
    """Stacked experts with `torch._grouped_mm` and a shared part."""

    def __init__(self, shared):
        super().__init__()
        self.router = nn.Linear(16, 4, bias=False)
        self.up = nn.Parameter(torch.randn(4, 16, 32) / 4)
        self.down = nn.Parameter(torch.randn(4, 32, 16) / 4)
        self.shared = shared

    def forward(self, x):
        weights, chosen = self.router(x).softmax(-1).topk(2)
        order = chosen.flatten().argsort(stable=True)
        offs = torch.bincount(chosen.flatten(), minlength=4).cumsum(0).int()
        hidden = torch._grouped_mm(x[order // 2], self.up, offs=offs)
        rows = torch._grouped_mm(nn.functional.silu(hidden), self.down, offs=offs)
        rows = rows * weights.flatten()[order, None]
        return torch.zeros_like(x).index_add(0, order // 2, rows) + self.shared(x)


def _compile_and_warn(shared, **plan):
    torch.manual_seed(0)
    model, x = Block(shared), torch.randn(40, 16)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        compiled = moefx.compile(model, example_inputs=(x,), plan=moefx.Plan(**plan))
    (block,) = moefx.explain(compiled).matched
    return compiled, model, x, block, [str(w.message) for w in caught]


@pytest.mark.parametrize("validation", ["auto", "numeric"])
def test_grouped_mm_is_checked_in_float64(validation):
    compiled, model, x, block, caught = _compile_and_warn(nn.Identity(), validation=validation)
    assert block.validation.startswith("agrees in ") and "compared in" not in block.validation
    assert not [text for text in caught if "numeric check" in text]
    report = moefx.verify(compiled, model, (x,))
    assert report.ok and str(report).startswith("moefx.verify: passed\n")


def test_an_op_without_float64_is_compared_in_its_own_precision():
    compiled, model, x, block, caught = _compile_and_warn(call_half_silu)
    assert block.validation.startswith("agrees in ")
    assert "not in float64 (RuntimeError: half_silu has no float64 kernel), compared in its own precision" in (
        block.validation
    )
    assert not [text for text in caught if "numeric check" in text]
    report = moefx.verify(compiled, model, (x,))
    assert report.ok and "without a float64 truth" in str(report).splitlines()[0]


def test_a_check_that_could_not_run_warns():
    *_, block, caught = _compile_and_warn(call_fake_only)
    assert block.validation.startswith("could not run: ")
    (text,) = [text for text in caught if "without a numeric check" in text]
    assert "fake_only has no kernel on this machine" in text and "moefx.verify" in text


class WithoutFloat64(Plain):
    def forward(self, x):
        return super().forward(half_silu(x))


@pytest.mark.sampled(3)
@pytest.mark.parametrize("fault", ["", *FAULTS])
def test_every_mistake_is_seen_without_float64(fault):
    torch.manual_seed(0)

    def program(block, x):
        block.__class__, block.fault = Rewritten, fault
        return block(half_silu(x))

    plain = WithoutFloat64()
    plain.aux_loss = torch.zeros(())
    result = check_block(plain, program, (torch.randn(24, 16, requires_grad=True),))
    assert result.ok == (not fault) and result.rows
    assert any("compared in its own precision" in note for note in result.notes)
