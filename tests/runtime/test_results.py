"""Blocks that return the user's dataclasses."""

from __future__ import annotations

import dataclasses
import io

import pytest
import torch
from torch import nn

import moefx

D, E = 16, 4


@dataclasses.dataclass
class Output:
    hidden: torch.Tensor
    losses: dict[str, torch.Tensor]
    logits: torch.Tensor | None = None
    count: int = 0


@dataclasses.dataclass(frozen=True)
class Checked:
    hidden: torch.Tensor
    norm: torch.Tensor = dataclasses.field(init=False)

    def __post_init__(self):
        object.__setattr__(self, "norm", self.hidden.norm())


class Block(nn.Module):
    def __init__(self, result):
        super().__init__()
        self.router, self.result = nn.Linear(D, E), result
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(D, 24), nn.ReLU(), nn.Linear(24, D)) for _ in range(E))

    def forward(self, x):
        logits = self.router(x)
        weights, chosen = logits.softmax(-1).topk(2)
        out = torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            token, slot = torch.where(chosen == e)
            out.index_add_(0, token, expert(x[token]) * weights[token, slot, None])
        return self.result(out, logits)


def make_output(hidden, logits):
    return Output(hidden, {"z": logits.logsumexp(-1).mean()}, logits, 3)


def make_checked(hidden, logits):
    return Checked(hidden)


def make_nested(hidden, logits):
    return [make_output(hidden, logits), (Checked(hidden * 2), None)]


class Net(nn.Module):
    def __init__(self, result):
        super().__init__()
        self.first, self.second = Block(result), Block(result)

    def forward(self, x):
        a = self.first(x)
        b = self.second(x + a.hidden)
        return b.hidden, a.losses["z"] + b.losses["z"]


def check_equal(actual, expected):
    if isinstance(expected, torch.Tensor):
        torch.testing.assert_close(actual, expected, rtol=0, atol=1e-13)
    elif isinstance(expected, (list, tuple)):
        assert type(actual) is type(expected) and len(actual) == len(expected)
        for a, b in zip(actual, expected, strict=True):
            check_equal(a, b)
    elif isinstance(expected, dict):
        assert actual.keys() == expected.keys()
        check_equal([*actual.values()], [*expected.values()])
    elif dataclasses.is_dataclass(expected):
        assert type(actual) is type(expected)
        for field in dataclasses.fields(expected):
            check_equal(getattr(actual, field.name), getattr(expected, field.name))
    else:
        assert actual == expected


@pytest.mark.sampled(2)
@pytest.mark.parametrize("result", [make_output, make_checked, make_nested])
def test_a_block_returns_any_kind_of_result(result):
    model, x = Block(result).double(), torch.randn(30, D).double()
    compiled = moefx.compile(model, example_inputs=(x,))
    check_equal(compiled(x), model(x))
    moefx.verify(compiled, model, (x,)).raise_if_failed()
    buffer = io.BytesIO()
    torch.save(compiled, buffer)
    buffer.seek(0)
    check_equal(torch.load(buffer, weights_only=False)(x), model(x))
    assert moefx.explain(compiled).matched[0].calls == (1, 0, 0)


@pytest.mark.parametrize("result", [make_output])
def test_results_of_any_kind_are_traced_as_one_graph(result):
    model, x = Block(result).double(), torch.randn(30, D).double()
    compiled = moefx.compile(model, example_inputs=(x,))
    torch._dynamo.reset()
    check_equal(torch.compile(compiled, fullgraph=True, backend="aot_eager")(x), model(x))


def test_blocks_inside_of_a_model():
    model, x = Net(make_output).double(), torch.randn(30, D).double()
    compiled = moefx.compile(model, example_inputs=(x,))
    check_equal(compiled(x), model(x))
    assert [b.name for b in moefx.blocks(compiled)] == ["first", "second"]
