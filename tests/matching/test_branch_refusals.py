"""Refusals name the deciding value in the branch of the example, and their remedies work."""

from __future__ import annotations

import copy
import re

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import moefx
from moefx.matching import prove
from moefx.matching.probes.probe import Probe

from ..blocks import D, E, Loop, Mlp
from ..models.case import run_and_differentiate

BETWEEN_ROWS = r"compute each output row of an expert from one input row"


class Block(Loop):
    def __init__(self, fn, **attributes):
        super().__init__(Mlp)
        self.fn, self.is_warming_up = fn, False
        self.register_buffer("step", torch.zeros((), dtype=torch.long))
        for name, value in attributes.items():
            setattr(self, name, value)

    def forward(self, x, *rest):
        return self.fn(self, x, *rest)

    def moe(self, x):
        return super().forward(x)

    def dense(self, x):
        weights = self.gate(x).softmax(-1)
        return sum(expert(x) * weights[:, e, None] for e, expert in enumerate(self.experts))


def read_refusal(model, *inputs):
    with pytest.raises(moefx.NoMoEBlockFound) as refused:
        moefx.compile(model, example_inputs=inputs)
    return " ".join(str(refused.value).split())


# ---------------------------------------------------------------------- the branch of the example
def mix_rows(block, x):
    weights, ids = block.route(x)
    out = torch.zeros_like(x)
    for e in range(E):
        t, k = torch.where(ids == e)
        rows = x[t] - x[t].mean(0)
        out = out.index_add(0, t, block.expert(e, rows, weights[t, k, None]))
    return out


@pytest.mark.parametrize(("tokens", "other"), [(3, Block.dense), (400, lambda block, x: block.experts[0](x))])
def test_names_the_branch_of_the_example(other, tokens):
    """Name the branch of the example, although the captures of the first proof, 13 to 77 tokens, take the other."""
    block = Block(lambda block, x: other(block, x) if 8 < x.shape[0] < 300 else mix_rows(block, x))
    assert BETWEEN_ROWS in read_refusal(block, torch.randn(tokens, D))


# ---------------------------------------------------------------------- buffers in conditions
def warm_up_by_step(block, x):
    block.step += 1
    return block.dense(x) if block.step < 100 else block.moe(x)


def warm_up_by_attribute(block, x):
    block.step += 1
    return block.dense(x) if block.is_warming_up else block.moe(x)


@pytest.mark.parametrize("step", [0, 500])
def test_names_the_buffer_that_decides(step):
    block = Block(warm_up_by_step)
    block.step.fill_(step)
    reason = read_refusal(block, torch.randn(40, D))
    assert re.search("the buffer step(:| decides)", reason) and "if block.step < 100" in reason
    assert "an attribute that is set outside of forward, such as `if self.is_warming_up`" in reason


def test_an_attribute_may_decide():
    torch.manual_seed(0)
    model, x = Block(warm_up_by_attribute).double(), torch.randn(40, D, dtype=torch.float64)
    compiled = moefx.compile(copy.deepcopy(model), example_inputs=(x,))
    for model.is_warming_up in (False, True):
        compiled.is_warming_up = model.is_warming_up
        torch.testing.assert_close(run_and_differentiate(compiled, compiled, x), run_and_differentiate(model, model, x))
    assert moefx.explain(compiled).matched[0].calls[:2] == (1, 1)


def test_an_attribute_that_turns_routing_off():
    assert "after a warm-up, compile it in that state" in read_refusal(
        Block(warm_up_by_attribute, is_warming_up=True), torch.randn(40, D)
    )


# ---------------------------------------------------------------------- stored selections
def keep_choice(block, x):
    if block.choice is None:
        block.choice = tuple(t.detach() for t in block.route(x))
    return block.mixed(x, *block.choice)


def keep_ids(block, x):
    if block.choice is None:
        block.choice = block.route(x)[1]
    return block.mixed(x, block.gate(x).softmax(-1).gather(1, block.choice), block.choice)


@pytest.mark.parametrize("fn", [keep_choice, keep_ids])
def test_names_the_attribute_that_keeps_a_choice(fn):
    reason = read_refusal(Block(fn, choice=None), torch.randn(40, D))
    assert "the block reads an attribute that its previous call has set [choice]" in reason
    assert "return it and pass it on as an argument" in reason


class Layers(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = Block(lambda block, x: (block.mixed(x, *block.route(x)), *block.route(x)))
        self.second = Block(lambda block, x, weights, ids: block.mixed(x, weights, ids))

    def forward(self, x):
        y, weights, ids = self.first(x)
        return self.second(y, weights, ids)


def test_a_choice_may_be_passed_on():
    compiled = moefx.compile(Layers(), example_inputs=(torch.randn(40, D),), plan=moefx.Plan(validation="symbolic"))
    assert [block.name for block in moefx.blocks(compiled)] == ["first", "second"]


# ---------------------------------------------------------------------- single experts
class TakeOrLeave(nn.Module):
    """Select one of two indices. Only the first has an expert."""

    def __init__(self):
        super().__init__()
        self.gate, self.experts = nn.Linear(D, 2), nn.ModuleList([Mlp()])

    def forward(self, x):
        weights, ids = self.gate(x).softmax(-1).topk(1)
        t, k = torch.where(ids == 0)
        return torch.zeros_like(x).index_add(0, t, self.experts[0](x[t]) * weights[t, k, None])


def test_a_single_expert_that_tokens_may_skip():
    assert "there is a single expert" in read_refusal(TakeOrLeave(), torch.randn(40, D))


class WriteTwice(nn.Module):
    """Select expert 0 besides the token's own expert, which may write the same row twice."""

    def __init__(self):
        super().__init__()
        self.gate, self.experts = nn.Linear(D, 2), nn.ModuleList([Mlp(), Mlp()])

    def forward(self, x):
        weights, ids = (F.pad(part, (0, 1)) for part in self.gate(x).softmax(-1).topk(1))
        out = torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            t, k = torch.where(ids == e)
            out[t] += expert(x[t]) * (weights[t, k, None] + 0.1)
        return out


def test_rows_that_are_written_twice():
    assert "one op writes several values to the same row" in read_refusal(WriteTwice(), torch.randn(40, D))


# ---------------------------------------------------------------------- refusals by the first captures
def take_top_p(block, x):
    """Select the best experts with 0.6 of the weight: no mask has one entry per token and slot."""
    weights, ids = block.gate(x).softmax(-1).sort(-1, descending=True)
    number = (weights.cumsum(-1) < 0.6).sum(-1) + 1
    out = torch.zeros_like(x)
    for k in range(int(number.max())):
        for e in range(E):
            t = torch.where((ids[:, k] == e) & (number > k))[0]
            out = out.index_add(0, t, block.expert(e, x[t], weights[t, k, None]))
    return out


def test_refuses_unexplained_drops_before_it_looks_further(monkeypatch):
    goes_on = Probe(lambda proof: pytest.fail("the proof went on"), "")
    monkeypatch.setattr(prove, "INTERVENTIONS", (goes_on,))
    assert "no mask [tokens, slots] of the kept ones" in read_refusal(Block(take_top_p), torch.randn(40, D))
