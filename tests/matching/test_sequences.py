"""One selection, or one condition, for all tokens of a sequence."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import moefx
from moefx.errors import NoMoEBlockFound

from ..blocks import D, E, H, Loop, Mlp
from ..models.case import run_and_differentiate

C = 5


class Block(Loop):
    """Block `fn(block, x, c)`, where `c` [B, C] is a condition of each sequence."""

    def __init__(self, fn):
        super().__init__(Mlp)
        self.fn, self.condition, self.bias = fn, nn.Linear(C, D), nn.Parameter(0.5 * torch.randn(E))
        self.up, self.down = nn.Parameter(torch.randn(E, D, H)), nn.Parameter(torch.randn(E, H, D))

    def forward(self, x, c):
        return self.fn(self, x, c)

    def scores(self, x):
        return self.gate(x.mean(1)).softmax(-1)


def select_by_mask(b, x, i, w, change=lambda y, m: y, asks=lambda m: True):
    out = torch.zeros_like(x)
    for e, expert in enumerate(b.experts):
        m = i == e
        if asks(m):
            out[m] = change(expert(x[m]), m) * w[m][:, None, None]
    return out


def select_by_index(b, x, w, i):
    out = torch.zeros_like(x)
    for e, expert in enumerate(b.experts):
        s, k = torch.where(i == e)
        out.index_add_(0, s, expert(x[s]) * w[s, k, None, None])
    return out


def loop_over_sequences(b, x, c):
    w, i = b.scores(x).max(-1)
    return torch.stack([w[n] * b.experts[int(i[n])](x[n]) for n in range(len(x))])


def multiply_batches(b, x, c):
    w, i = b.scores(x).max(-1)
    return torch.bmm(torch.bmm(x, b.up[i]).relu(), b.down[i]) * w[:, None, None]


def run_all_experts(b, x, c):
    scores = b.scores(x)
    gates = torch.zeros_like(scores).scatter(1, scores.topk(2).indices, 1.0) * scores
    return sum(gates[:, e, None, None] * expert(x) for e, expert in enumerate(b.experts))


def gather_weights(b, x, c):
    w, i = b.scores(x).max(-1)
    return torch.stack([expert(x) for expert in b.experts], 1)[torch.arange(len(x)), i] * w[:, None, None]


def modulate(b, x, c):
    scale = b.condition(c)
    w, i = b.gate(x).softmax(-1).max(-1)
    out = torch.zeros_like(x)
    for e, expert in enumerate(b.experts):
        s, t = torch.where(i == e)
        out[s, t] = expert(x[s, t] + scale[s]) * w[s, t, None]
    return out


def modulate_flat(b, x, c):
    flat, scale, sequence_of = x.reshape(-1, D), b.condition(c), torch.arange(len(x)).repeat_interleave(x.shape[1])
    w, i = b.route(flat)
    out = torch.zeros_like(flat)
    for e, expert in enumerate(b.experts):
        t, k = torch.where(i == e)
        out.index_add_(0, t, expert(flat[t]) * (1 + scale[sequence_of[t]]) * w[t, k, None])
    return out.view_as(x)


RIGHT = {
    "by index": lambda b, x, c: select_by_index(b, x, *b.scores(x).topk(2, -1)),
    "by mask": lambda b, x, c: select_by_mask(b, x, *reversed(b.scores(x).max(-1))),
    "any": lambda b, x, c: select_by_mask(b, x, *reversed(b.scores(x).max(-1)), asks=torch.any),
    "a biased choice": lambda b, x, c: select_by_index(
        b, x, b.scores(x).gather(1, i := (b.scores(x) + b.bias).topk(1).indices), i
    ),
    "by the condition": lambda b, x, c: select_by_mask(b, x, *reversed(b.gate(b.condition(c)).softmax(-1).max(-1))),
    "one by one": loop_over_sequences,
    "bmm": multiply_batches,
    "dense": run_all_experts,
    "gathered": gather_weights,
    "weights of other sequences": lambda b, x, c: select_by_mask(
        b, x, b.scores(x).argmax(-1), b.scores(x).amax(-1).roll(1)
    ),
    "modulated": modulate,
    "modulated, flat": modulate_flat,
    "modulated behind": lambda b, x, c: select_by_mask(
        b, x, *reversed(b.scores(x).max(-1)), lambda y, m: y * b.condition(c)[m][:, None]
    ),
}
REFUSED = {
    "a mean over sequences": lambda y, m: y - y.mean(0),
    "how many sequences": lambda y, m: y / len(y),
    "a position": lambda y, m: y * torch.arange(y.shape[1])[:, None],
    "more than one": None,
}


def make_example(sequences, tokens):
    return torch.randn(sequences, tokens, D, dtype=torch.float64), torch.randn(sequences, C, dtype=torch.float64)


def check(fn):
    torch.manual_seed(0)
    model = Block(fn).double()
    compiled = moefx.compile(model, example_inputs=make_example(6, 9))
    for shape in ((3, 5), (1, 4), (5, 1), (20, 2)):
        x, c = make_example(*shape)
        actual, expected = (run_and_differentiate(m, m, x, c) for m in (compiled, model))
        torch.testing.assert_close(actual, expected)
    return moefx.blocks(compiled)[0]


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", RIGHT)
def test_one_choice_for_a_sequence(name):
    block = check(RIGHT[name])
    assert block.fallbacks == 0


@pytest.mark.parametrize("name", REFUSED)
def test_dependence_between_sequences_is_refused(name):
    change = REFUSED[name] or (lambda y, m: y)
    asks = (lambda m: True) if REFUSED[name] else (lambda m: m.sum() > 1)
    with pytest.raises(NoMoEBlockFound):
        check(lambda b, x, c: select_by_mask(b, x, *reversed(b.scores(x).max(-1)), change, asks))


def test_a_selection_input_per_sequence():
    torch.manual_seed(0)

    class Timed(Block):
        def forward(self, x, t):
            return x + select_by_mask(self, x, t * E // 1000, torch.ones_like(x[:, 0, 0]), asks=torch.any)

    model = Timed(None).double()
    compiled = moefx.compile(model, example_inputs=(make_example(6, 9)[0], torch.randint(0, 1000, (6,))))
    for shape in ((3, 5), (1, 4), (5, 1)):
        x, t = make_example(*shape)[0], torch.randint(0, 1000, shape[:1])
        actual, expected = (run_and_differentiate(m, m, x, t) for m in (compiled, model))
        torch.testing.assert_close(actual, expected)
    assert moefx.blocks(compiled)[0].fallbacks == 0


def test_no_refusal_without_a_reason():
    """Name the block although all sequences may select the same experts."""
    torch.manual_seed(0)

    class Tasks(Block):
        def __init__(self):
            super().__init__(None)
            self.tasks = nn.Embedding(2, E)

        def forward(self, x, task):
            return select_by_index(self, x, *F.softmax(self.tasks(task) * 0 + self.bias, -1).topk(2, -1))

    model = Tasks().double()
    compiled = moefx.compile(
        model, example_inputs=(make_example(6, 9)[0], torch.zeros(6, dtype=torch.int64)), strict=False
    )
    report = moefx.explain(compiled)
    assert report.matched or report.refused


class Positions(Block):
    """Add a table that fixes the length of all sequences, but not their number."""

    def __init__(self, shape):
        super().__init__(None)
        self.positions = nn.Parameter(torch.randn(shape))

    def forward(self, x):
        x = x + self.positions
        return select_by_index(self, x, *self.gate(x[:, -1]).softmax(-1).topk(2, -1))


@pytest.mark.parametrize("shape", [(7, D), (1, 7, 1)])
def test_sequences_of_a_fixed_length(shape):
    torch.manual_seed(0)
    model = Positions(shape).double()
    compiled = moefx.compile(model, example_inputs=(make_example(4, 7)[0],))
    for batch in (1, 4, 20):
        x = make_example(batch, 7)[0]
        torch.testing.assert_close(*(run_and_differentiate(m, m, x) for m in (compiled, model)))
    assert moefx.blocks(compiled)[0].fallbacks == 0
