"""Blocks that write to an argument in place, called with arguments that share memory."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import moefx
from moefx.ir.shared_memory import share_memory

from ..blocks import D, Gated, Loop


class AddAndRoute(Loop):
    """Add the hidden states to the residual in place, as fused norms do."""

    def __init__(self):
        super().__init__(Gated)
        self.norm = nn.LayerNorm(D)
        self.register_buffer("total", torch.zeros(D, D))

    def forward(self, x, residual):
        residual += x
        return super().forward(self.norm(residual)) + x + self.total.sum()


def make_calls(x):
    """Return arguments by name, each with whether they share memory."""
    both = torch.cat([x, x])
    return {
        "apart": ((x.clone(), x.clone()), False),
        "halves": ((both[:9], both[9:]), False),
        "same": ((both[:9],) * 2, True),
        "view": ((both[9:], both.view(2, 9, D)[1]), True),
    }


@pytest.fixture(scope="module")
def compiled():
    torch.manual_seed(0)
    model = AddAndRoute()
    arguments = (torch.randn(9, D), torch.randn(9, D))
    return model, moefx.compile(model, arguments, plan=moefx.Plan(validation="symbolic"))


@pytest.mark.parametrize("name", make_calls(torch.zeros(9, D)))
def test_calls_with_shared_memory_run_the_original(compiled, name):
    model, rewritten = compiled
    x = torch.randn(9, D)
    wanted_arguments, _ = make_calls(x.double())[name]
    wanted = copy.deepcopy(model).double()(*wanted_arguments)
    arguments, shares = make_calls(x)[name]
    before = moefx.blocks(rewritten)[0].forward.counts.original
    out = rewritten(*arguments)
    torch.testing.assert_close(out.double(), wanted, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(arguments[1].double(), wanted_arguments[1], rtol=1e-5, atol=1e-5)
    assert moefx.blocks(rewritten)[0].forward.counts.original == before + shares
    if shares:
        assert "it writes to residual, which shares memory with x" in str(moefx.explain(rewritten))


def test_a_buffer_as_the_written_argument_runs_the_original(compiled):
    model, rewritten = compiled
    x, wanted = torch.randn(D, D), copy.deepcopy(model).double()
    expected = wanted(x.double(), wanted.total)
    try:
        torch.testing.assert_close(rewritten(x, rewritten.total).double(), expected, rtol=1e-5, atol=1e-5)
    finally:
        rewritten.total.zero_()


def test_a_compiler_runs_the_original(compiled):
    model, rewritten = compiled
    x = torch.randn(9, D)
    traced = torch.compile(lambda x: rewritten(x, x) + 0, backend="aot_eager")
    doubled = copy.deepcopy(model).double()
    torch.testing.assert_close(traced(x.clone()).double(), doubled(*[x.double()] * 2), rtol=1e-5, atol=1e-5)


class Outer(nn.Module):
    def __init__(self):
        super().__init__()
        self.block = AddAndRoute()

    def forward(self, x):
        x = x * 2
        return self.block(x, x.view(x.shape))


def test_the_module_that_shares_the_memory_is_rewritten_in_place_of_the_block():
    torch.manual_seed(0)
    model, x = Outer(), torch.randn(9, D)
    rewritten = moefx.compile(model, (x,), plan=moefx.Plan(validation="symbolic"))
    assert [block.name for block in moefx.blocks(rewritten)] == [""]
    wanted = copy.deepcopy(model).double()(x.double())
    torch.testing.assert_close(rewritten(x).double(), wanted, rtol=1e-5, atol=1e-5)


def test_memory_is_compared_between_first_and_last_elements():
    x = torch.zeros(4, 6)
    assert share_memory(x, x[3]) and share_memory(x.t(), x[1, 2:3])
    assert not share_memory(x[:2], x[2:]) and not share_memory(x, x.clone()) and not share_memory(x[:0], x)
    assert not share_memory(x, 3) and not share_memory(torch.eye(2).to_sparse(), x)
