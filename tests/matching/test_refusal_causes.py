"""Refusals name their cause in the program, and their remedies work."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import moefx
from moefx.compiler import proof_attempts

from ..blocks import Block, D, E


def keep_random_tokens(b, x):
    w, ids = b.route(x)
    out = torch.zeros_like(x)
    for e in range(E):
        t, k = torch.where(ids == e)
        kept = torch.randperm(len(t))[:6]
        out = out.index_add(0, t[kept], b.expert(e, x[t[kept]], w[t[kept], k[kept], None]))
    return out


def drop_by_random_mask(b, x):
    w, ids = b.route(x)
    return b.mixed(x, w * (torch.rand_like(w) >= 0.25), ids)


def skip_few(b, x):
    w, ids = b.route(x)
    out = torch.zeros_like(x)
    for e in range(E):
        t, k = torch.where(ids == e)
        if len(t) < 3:
            continue
        out = out.index_add(0, t, b.expert(e, x[t], w[t, k, None]))
    return out


@pytest.mark.parametrize(
    ("refused", "reason", "line", "remedied"),
    [
        (keep_random_tokens, "in a random order", "torch.randperm", drop_by_random_mask),
        (skip_few, "tokens than a limit|number of tokens that chose an expert", "if len(t) < 3", None),
    ],
    ids=["random order", "few tokens"],
)
def test_the_cause_and_its_remedy(refused, reason, line, remedied):
    x = torch.randn(40, D)
    with pytest.raises(moefx.NoMoEBlockFound, match=reason) as raised:
        moefx.compile(Block(refused), example_inputs=(x,))
    assert line in str(raised.value)
    if remedied is not None:
        moefx.compile(Block(remedied), example_inputs=(x,))


class Series(nn.Module):
    """Each sample of [B, L, C] selects experts for its whole series."""

    def __init__(self, expert, call, gate=4):
        super().__init__()
        self.gate, self.call = nn.Linear(gate, E), call
        self.experts = nn.ModuleList(expert() for _ in range(E))

    def forward(self, x):
        w, ids = self.gate(x.mean(-1 if self.gate.in_features == 12 else 1)).softmax(-1).topk(1)
        out = torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            b = torch.where(ids[:, 0] == e)[0]
            out = out.index_add(0, b, self.call(expert, x[b]) * w[b, :, None])
        return out


SERIES = {
    "linear": lambda: Series(lambda: nn.Linear(12, 12), lambda e, x: e(x.transpose(1, 2)).transpose(1, 2), 12),
    "convolution": lambda: Series(
        lambda: nn.Conv1d(4, 4, 3, padding=1), lambda e, x: e(x.transpose(1, 2)).transpose(1, 2)
    ),
    "gru": lambda: Series(lambda: nn.GRU(4, 4, batch_first=True), lambda e, x: e(x)[0]),
}


@pytest.mark.parametrize("make", SERIES.values(), ids=SERIES)
def test_experts_that_mix_positions(make):
    with pytest.raises(moefx.NoMoEBlockFound, match="experts compute with several positions at once"):
        moefx.compile(make(), example_inputs=(torch.randn(9, 12, 4),))


class Pixels(nn.Module):
    """Each pixel of an image selects convolutions."""

    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(4, E)
        self.experts = nn.ModuleList(nn.Conv2d(4, 4, 3, padding=1) for _ in range(E))

    def forward(self, x):
        w, ids = self.gate(x.movedim(1, -1)).softmax(-1).topk(2)
        gates = torch.zeros(*ids.shape[:-1], E).scatter(-1, ids, w).movedim(-1, 1)
        return sum(gates[:, e, None] * expert(x) for e, expert in enumerate(self.experts))


class RowsOfPixels(nn.Module):
    """Mix neighbours before the experts, as the refusal recommends."""

    def __init__(self):
        super().__init__()
        self.before, self.gate = nn.Conv2d(4, 4, 3, padding=1), nn.Linear(4, E)
        self.experts = nn.ModuleList(nn.Linear(4, 4) for _ in range(E))

    def forward(self, x):
        rows = self.before(x).movedim(1, -1).flatten(0, -2)
        w, ids = self.gate(rows).softmax(-1).topk(2)
        out = torch.zeros_like(rows)
        for e, expert in enumerate(self.experts):
            t, k = torch.where(ids == e)
            out = out.index_add(0, t, expert(rows[t]) * w[t, k, None])
        return out.unflatten(0, (x.shape[0], *x.shape[2:])).movedim(-1, 1)


def test_experts_that_convolve_neighbours(monkeypatch):
    tried, x = [], torch.randn(2, 4, 32, 32)
    vary_options = proof_attempts._vary_options
    monkeypatch.setattr(proof_attempts, "_vary_options", lambda attempt: tried.append(attempt) or vary_options(attempt))
    with pytest.raises(moefx.NoMoEBlockFound, match=r"from its neighbours \(3x3\).*convolve before the experts"):
        moefx.compile(Pixels(), example_inputs=(x,))
    assert len(tried) == 2  # does not fix image sizes one by one, which takes a minute
    model, x = RowsOfPixels(), x[..., :5, :6]
    torch.testing.assert_close(moefx.compile(model, example_inputs=(x,))(x), model(x))


class Channels(nn.Module):
    """Use one row per channel, as the refusal recommends."""

    def __init__(self):
        super().__init__()
        self.gate, self.experts = nn.Linear(12, E), nn.ModuleList(nn.Linear(12, 12) for _ in range(E))

    def forward(self, x):
        w, ids = self.gate(x.mean(-1)).softmax(-1).topk(1)
        rows = x.transpose(1, 2).flatten(0, 1)
        w, ids = w.repeat_interleave(4, 0), ids.repeat_interleave(4, 0)
        out = torch.zeros_like(rows)
        for e, expert in enumerate(self.experts):
            t, k = torch.where(ids == e)
            out = out.index_add(0, t, expert(rows[t]) * w[t, k, None])
        return out.unflatten(0, (-1, 4)).transpose(1, 2)


def test_rows_of_channels_are_accepted():
    compiled = moefx.compile(Channels(), example_inputs=(torch.randn(9, 12, 4),))
    assert len(moefx.blocks(compiled)) == 1


VIEWS = {
    "view": lambda x: x.view(-1, 8, D),
    "first": lambda x: x.view(8, -1, D),
    "division": lambda x: x.view(x.shape[0] // 8, 8, D),
    "unflatten": lambda x: x.unflatten(0, (-1, 8)),
}


@pytest.mark.sampled(4)
@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS)
def test_a_view_of_a_multiple_of_the_tokens(view):
    block = Block(lambda b, x: b.mixed(x, *b.route(view(x).reshape(-1, D))) + view(x).flip(1).reshape(-1, D)).double()
    x = torch.randn(48, D, dtype=torch.float64)
    compiled = moefx.compile(block, example_inputs=(x,))
    for n in (48, 16, 104):
        x = torch.randn(n, D, dtype=torch.float64)
        torch.testing.assert_close(compiled(x), block(x))
    assert moefx.blocks(compiled)[0].fallbacks == 0
    with pytest.raises(RuntimeError):  # as the original
        compiled(x[:9])


def mask_second(b, x):
    scores = b.gate(x)
    first = scores.argmax(-1)
    second = scores.masked_fill(F.one_hot(first, E).bool(), float("-inf")).argmax(-1)
    return torch.stack([first, second], -1), scores


def scatter_second(b, x):
    scores = b.gate(x)
    first = scores.topk(1).indices
    return torch.cat([first, scores.scatter(1, first, -1e9).softmax(-1).topk(1).indices], -1), scores


def put_second(b, x):
    scores = b.gate(x)
    first, rest = scores.argmax(-1), scores.clone()
    rest[torch.arange(len(x)), first] = float("-inf")
    return torch.stack([first, rest.argmax(-1)], -1), scores


def mask_too_little(b, x):
    scores = b.gate(x)
    first = scores.topk(1).indices
    return torch.cat([first, scores.scatter(1, first, -5.0).argmax(-1, keepdim=True)], -1), scores


def mask_second_alone(b, x):
    scores = b.gate(x)
    first = scores.argmax(-1, keepdim=True)
    second = scores.scatter(1, first, float("-inf")).argmax(-1, keepdim=True)
    return torch.cat([first, second, scores.scatter(1, second, float("-inf")).argmax(-1, keepdim=True)], -1), scores


def mask_others_too(b, x):
    scores = b.gate(x).masked_fill(x[:, :1] > 2, float("-inf"))
    first = scores.argmax(-1, keepdim=True)
    return torch.cat([first, scores.scatter(1, first, float("-inf")).argmax(-1, keepdim=True)], -1), scores


def write_once(b, x, ids, scores):
    """Write once per token, so that two equal slots do not add up."""
    out = torch.zeros_like(x)
    for e in range(E):
        t, _ = torch.where(ids == e)
        out[t] = out[t] + b.expert(e, x[t], scores.softmax(-1)[t, e, None])
    return out


@pytest.mark.sampled(2)
@pytest.mark.parametrize("choose", [mask_second, scatter_second, put_second])
def test_a_second_choice_is_another_expert(choose):
    block, x = Block(lambda b, x: write_once(b, x, *choose(b, x))).double(), torch.randn(40, D, dtype=torch.float64)
    torch.testing.assert_close(moefx.compile(block, example_inputs=(x,))(x), block(x))


@pytest.mark.parametrize("choose", [mask_too_little, mask_second_alone, mask_others_too])
def test_a_second_selection_that_may_equal_the_first(choose):
    with pytest.raises(moefx.NoMoEBlockFound):
        moefx.compile(Block(lambda b, x: write_once(b, x, *choose(b, x))), example_inputs=(torch.randn(40, D),))
