"""Tests on integer inputs that change only above the captured token counts are guarded or refused."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import moefx

D, E, H = 8, 4, 12


class Weights(nn.Module):
    def __init__(self):
        super().__init__()
        self.router = nn.Linear(D, E, bias=False)
        self.up, self.down = nn.Parameter(torch.randn(E, D, H)), nn.Parameter(torch.randn(E, H, D))


class Ranked(Weights):
    """Keep a token of an expert if a function of its rank says so."""

    def __init__(self, keeps):
        super().__init__()
        self.keeps = keeps

    def forward(self, x, *integers):
        w, i = self.router(x).softmax(-1).topk(1, -1)
        chosen = F.one_hot(i, E).sum(1)
        rank = (chosen.cumsum(0) - 1).gather(1, i)
        w, i = self.keeps(w, i, rank, chosen, *integers)
        gates = torch.zeros(len(x), E, dtype=x.dtype).scatter(1, i, w)
        h = torch.einsum("td,edh->teh", x, self.up).relu()
        return torch.einsum("teh,ehd,te->td", h, self.down, gates)


def check(keeps, calls, is_rewritten):
    torch.manual_seed(0)
    model = Ranked(keeps).double()
    compiled = moefx.compile(copy.deepcopy(model), example_inputs=calls[0], strict=False)
    assert bool(moefx.blocks(compiled)) == is_rewritten
    for call in calls:
        torch.testing.assert_close(compiled(*call), model(*call))


def draw_tokens(n):
    return torch.randn(n, D, dtype=torch.float64)


TURNS = {
    "a square": lambda p, c, i: p * p < 160000,
    "scaled": lambda p, c, i: p.double() * 0.0025 < 1,
    "turned round": lambda p, c, i: (450 - p).sign() > 0,
    "float16": lambda p, c, i: p.half() * 100 < float("inf"),
    "int8": lambda p, c, i: p.to(torch.int8) >= 0,
    "int16": lambda p, c, i: (p * 100).to(torch.int16) >= 0,
    "uint8": lambda p, c, i: p.to(torch.uint8) == p,
    "a sum in int8": lambda p, c, i: c.cumsum(0, dtype=torch.int8).gather(1, i) > 0,
}
REFUSED = ("a square", "scaled", "float16")


@pytest.mark.exhaustive  # `test_counts_that_overflow_a_byte` is similar
@pytest.mark.parametrize("turn", TURNS)
def test_functions_of_ranks_are_rewritten_or_refused(turn):
    keep = TURNS[turn]
    calls = [(draw_tokens(18),), (draw_tokens(2500),)]
    check(lambda w, i, p, c: (w * keep(p, c, i), i), calls, is_rewritten=turn not in REFUSED)


def count_by_index_add(i, c):
    return torch.zeros(E, dtype=torch.uint8).index_add(0, i[:, 0], torch.ones(len(i), dtype=torch.uint8))


@pytest.mark.parametrize("count", [lambda i, c: c.sum(0).to(torch.uint8), count_by_index_add])
def test_counts_that_overflow_a_byte(count):
    """Count 256 tokens of one expert, which a byte counts as none."""
    calls = [(draw_tokens(18),), (draw_tokens(1).expand(256, D),)]
    check(lambda w, i, p, c: (w * (count(i, c) > 0)[i], i), calls, is_rewritten=True)


@pytest.mark.parametrize(
    "keeps",
    [
        lambda w, i, p, c, o: (w, torch.where(o >= 0, 3 - i, i)),
        lambda w, i, p, c, o: (w, torch.where(o >= 0, o, i)),
        lambda w, i, p, c, o: (w, torch.maximum(i, o.clamp(min=0))),
    ],
)
def test_expert_ids_that_the_example_lacks(keeps):
    none, some = torch.full((18, 1), -1), torch.randint(-1, E, (18, 1))
    check(keeps, [(draw_tokens(18), none), (draw_tokens(18), some)], is_rewritten=True)


def test_a_comparison_with_a_step_is_rewritten():
    check(
        lambda w, i, p, c, step: (w, torch.where(step > 5, (i + 1) % E, i)),
        [(draw_tokens(18), torch.tensor(0)), (draw_tokens(18), torch.tensor(9))],
        is_rewritten=True,
    )


ASKED = {
    "truth": lambda w, i, p, c, n: (w * 2 if n else w, i),
    "ids": lambda w, i, p, c, n: (w, E - 1 - i if n else i),
    "a number": lambda w, i, p, c, n: (w * 3 if int(n) == 99 else w, i),
    "of some": lambda w, i, p, c, n: (w * 3 if (n // 10).item() > 8 else w, i),
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("integers", [5, [1]], ids=str)
@pytest.mark.parametrize("name", ASKED)
def test_python_tests_of_integer_inputs_are_refused(name, integers):
    integers = torch.tensor(integers)
    calls = [(draw_tokens(18), n) for n in (integers, torch.zeros_like(integers), torch.full_like(integers, 99))]
    check(ASKED[name], calls, is_rewritten=False)


class Given(Weights):
    """Use an argument that does not belong to a token, or that is equal for all tokens of the example."""

    def __init__(self, use):
        super().__init__()
        self.use, self.wide = use, nn.Linear(D, E * H)

    def forward(self, x, integers):
        logits = self.router(x)
        if self.use == "scores":
            logits = logits.masked_fill(integers, -1e9)
        w, i = logits.softmax(-1).topk(2, -1)
        i = integers[i] if self.use == "experts" else i
        gates = torch.zeros(len(x), E, dtype=x.dtype).scatter_add(1, i, w)
        h = torch.einsum("td,edh->teh", x, self.up[integers] if self.use == "weights" else self.up)
        h = self.wide(x).view(-1, E, H)[:, integers] if self.use == "columns" else h
        y = torch.einsum("teh,ehd->ted", h.relu(), self.down)
        return (y * (gates * integers if self.use == "gates" else gates)[..., None]).sum(1)


FLAGS, ORDER = torch.tensor([True, False, True, True]), torch.tensor([2, 0, 3, 1])


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("use", "integers", "later", "is_rewritten"),
    [
        ("gates", FLAGS, ~FLAGS, True),
        ("gates", FLAGS.expand(9, E).clone(), ~FLAGS.expand(9, E), True),
        ("scores", torch.zeros(9, E, dtype=torch.bool), torch.ones(9, E, dtype=torch.bool), True),
        ("scores", FLAGS, ~FLAGS, True),
        ("experts", torch.arange(E), torch.tensor([0, 0, 1, 2]), True),
        ("experts", torch.tensor([0, 0, 1, 2]), ORDER, False),
        ("columns", ORDER, torch.tensor([1, 2, 3, 0]), False),
        ("weights", ORDER, torch.tensor([1, 2, 3, 0]), False),
    ],
)
def test_expert_ids_without_tokens(use, integers, later, is_rewritten):
    """Call with other values, and with a mask without any token."""
    torch.manual_seed(0)
    model = Given(use).double()
    compiled = moefx.compile(copy.deepcopy(model), example_inputs=(draw_tokens(9), integers), strict=False)
    assert bool(moefx.blocks(compiled)) == is_rewritten
    for flags in (integers, later):
        x = draw_tokens(9)
        torch.testing.assert_close(compiled(x, flags), model(x, flags))


@pytest.mark.parametrize("size", [4, 8])
def test_as_many_experts_as_columns(size):
    """Index weights per expert and token with an axis of one more. The numeric check is off."""

    class Repeated(nn.Module):
        def __init__(self):
            super().__init__()
            self.router = nn.Linear(size, size, bias=False)
            self.up, self.down = (nn.Parameter(torch.randn(size, *s)) for s in ((size, H), (H, size)))

        def forward(self, x):
            w, i = self.router(x).softmax(-1).topk(2, -1)
            gates = torch.zeros(len(x), size, dtype=x.dtype).scatter(1, i, w)
            rows = x[:, :, None].expand(-1, -1, size).reshape(-1, size, size)
            h = torch.einsum("ted,edh->teh", rows, self.up).relu()
            return torch.einsum("te,teh,ehd->td", gates, h, self.down)

    model, x = Repeated().double(), torch.randn(9, size, dtype=torch.float64)
    compiled = moefx.compile(model, example_inputs=(x,), plan=moefx.Plan(validation="symbolic"))
    torch.testing.assert_close(compiled(x), model(x))


class ByScore(Weights):
    """Exclude some experts of a token by its scores, sometimes all of them."""

    def __init__(self, masked):
        super().__init__()
        self.masked = masked

    def forward(self, x):
        w, i = self.masked(self.router(x)).topk(2, -1)
        gates = torch.zeros(len(x), E, dtype=x.dtype).scatter(1, i, w)
        h = torch.einsum("td,edh->teh", x, self.up).relu()
        return torch.einsum("teh,ehd,te->td", h, self.down, gates)


@pytest.mark.sampled(7)
@pytest.mark.parametrize("validation", ["symbolic", "numeric"])
@pytest.mark.parametrize(
    "masked",
    [
        lambda s: s.masked_fill(s < 0, -1e9).softmax(-1),
        lambda s: s.masked_fill(s < 0, -torch.inf).softmax(-1).nan_to_num(),
        lambda s: torch.where(s > 0, s, s.new_full((), -1e30)).softmax(-1),
        lambda s: (s * (s > 0)).softmax(-1),
        lambda s: s.relu() / s.relu().sum(-1, keepdim=True).clamp(min=1e-9),
        lambda s: s.softmax(-1) * (s > 0),
        lambda s: s.sigmoid() * (s > s.mean(-1, keepdim=True)),
        lambda s: s.masked_fill(s < 2, -1e9).softmax(-1),
        lambda s: s.masked_fill(s < -3, -1e9).softmax(-1),
        lambda s: s.masked_fill(s < -9, -1e9).softmax(-1),
        lambda s: s.masked_fill(s.sigmoid() < 0.01, -1e9).softmax(-1),
    ],
    ids=["masked", "infinite", "where", "zeros", "relu", "after", "mean", "above", "below", "far below", "likely"],
)
def test_scores_that_select_no_expert(masked, validation):
    torch.manual_seed(0)
    model = ByScore(masked).double()
    x = torch.cat([draw_tokens(40), draw_tokens(1).expand(3, D)])
    with torch.no_grad():  # all scores of the last three rows are below 0
        model.router.weight.copy_(
            model.router.weight - x[-1:] * (1 + model.router(x[-1:]).max()) / x[-1].square().sum()
        )
    assert (model.router(x)[-3:] < 0).all() and (model.router(x) > 0).any()
    compiled = moefx.compile(copy.deepcopy(model), example_inputs=(x[:9],), plan=moefx.Plan(validation=validation))
    torch.testing.assert_close(compiled(x), model(x))
