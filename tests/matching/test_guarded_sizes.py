"""Examples with special sizes are compiled with a guard, or refused with sizes that work."""

from __future__ import annotations

import copy
import math
import re

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import moefx
from moefx.capture.arguments.argument_interpretations import interpret_arguments
from moefx.capture.arguments.size_collisions import ModelNumbers
from moefx.capture.sizes.size_guards import SizeGuard
from moefx.matching.facts.guarded_sizes import find_sequence, find_sizes

from .. import blocks
from ..blocks import D, Loop, Mlp
from ..models.case import run_and_differentiate


class Block(blocks.Block):
    def moe(self, x):
        return Loop.forward(self, x.reshape(-1, D)).view(x.shape)


def draw_rows(*counts):
    return [torch.randn(n, D, dtype=torch.float64) for n in counts]


def draw_sequences(*sizes):
    return [torch.randn(b, s, D, dtype=torch.float64) for b, s in sizes]


def scale_multiples(block, x):
    return block.moe(x) * (3 if x.shape[0] % 14 == 0 else 1)


def scale_between(block, x):
    return block.moe(x * 2 if 30 < x.shape[0] < 40 else x)


def decode(block, x):
    return block.moe(x) + x if x.shape[1] == 1 else block.moe(x)


def take_multiples_only(block, x):
    assert x.shape[0] % 64 == 0
    return block.moe(x)


def limit_multiples_only(block, x):
    assert x.shape[0] % 64 == 0
    w, ids = block.route(x)
    out, capacity = torch.zeros_like(x), x.shape[0] // 2 + 1
    for e, expert in enumerate(block.experts):
        t, k = (i[:capacity] for i in torch.where(ids == e))
        out = out.index_add(0, t, expert(x[t]) * w[t, k, None])
    return out


def pad_to_8(block, x):
    return block.moe(F.pad(x, (0, 0, 0, -x.shape[0] % 8)))[: x.shape[0]]


def fill_to_8(block, x):
    padded = x.new_zeros(math.ceil(x.shape[0] / 8) * 8, D)
    padded[: x.shape[0]] = x
    return block.moe(padded)[: x.shape[0]]


CASES = {  # the example first, then other calls
    "multiples of 14": (scale_multiples, draw_rows(14, 13, 28, 70)),
    "30 to 40": (scale_between, draw_rows(35, 12, 31, 39, 40)),
    "one token each": (decode, draw_sequences((3, 1), (1, 1), (40, 1), (2, 7))),
    "asserted": (take_multiples_only, draw_rows(64, 128, 320)),
    "asserted, with a capacity": (limit_multiples_only, draw_rows(64, 128, 640)),
    "padded": (pad_to_8, draw_rows(12, 1, 16, 31)),
    "filled": (fill_to_8, draw_rows(12, 1, 16, 31)),
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", CASES)
def test_equals_the_original_on_every_side(name):
    torch.manual_seed(0)
    fn, inputs = CASES[name]
    model = Block(fn).double()
    compiled = moefx.compile(copy.deepcopy(model), example_inputs=inputs[:1])
    for x in inputs:
        torch.testing.assert_close(run_and_differentiate(compiled, compiled, x), run_and_differentiate(model, model, x))
    (matched,) = moefx.explain(compiled).matched
    assert matched.calls[0] and not matched.calls[1]


def test_follows_the_size_that_a_refusal_names():
    torch.manual_seed(0)
    model = Block(lambda block, x: block.moe(x * 2 if x.shape[0] == 16 else x)).double()
    with pytest.raises(moefx.NoMoEBlockFound, match=r"S != 16 \(test_guarded_sizes.py") as refused:
        moefx.compile(model, example_inputs=draw_rows(16))
    size = re.search(r"such as S = (\d+)", " ".join(str(refused.value).split()))
    assert size is not None
    compiled = moefx.compile(copy.deepcopy(model), example_inputs=draw_rows(int(size[1])))
    for x in draw_rows(int(size[1]), 16):
        torch.testing.assert_close(run_and_differentiate(compiled, compiled, x), run_and_differentiate(model, model, x))


def test_refuses_thousands_of_comparisons_at_once():
    model = Block(lambda block, x: block.moe(x * 2 if len(x) in range(400, 3000) else x)).double()
    with pytest.raises(moefx.NoMoEBlockFound, match=r"compares S with more than 256 numbers.*bounds of a range"):
        moefx.compile(model, example_inputs=draw_rows(12))
    bounded = Block(lambda block, x: block.moe(x * 2 if 400 <= len(x) < 3000 else x)).double()
    moefx.compile(bounded, example_inputs=draw_rows(12))


class Batched(Loop):
    """Run one expert for a single sequence, and for batches a mixture that changes for few or many tokens."""

    def __init__(self, change):
        super().__init__(Mlp)
        self.change = change

    def forward(self, x):
        if x.shape[0] == 1:
            return self.experts[0](x)
        rows = x.reshape(-1, D)
        w, ids = self.route(rows)
        return self.mixed(rows, self.change(w, ids), ids).view(x.shape)


def limit_places(w, ids, limit):
    hits = F.one_hot(ids, 4).reshape(-1, 4)
    return w * (((hits.cumsum(0) - 1) * hits).sum(-1).view_as(ids) < limit)


CHANGES = {
    "at most 100 places": lambda w, ids: limit_places(w, ids, min(100, int(w.shape[0] / 2) + 1)),
    "at least 4 places": lambda w, ids: limit_places(w, ids, max(4, int(w.shape[0] / 2))),
    "more with many": lambda w, ids: w * max(1, int(w.shape[0] / 40)),
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", CHANGES)
def test_captures_few_and_many_tokens_on_the_examples_side(name):
    torch.manual_seed(0)
    model = Batched(CHANGES[name]).double()
    compiled = moefx.compile(copy.deepcopy(model), example_inputs=draw_sequences((4, 6)))
    for x in draw_sequences((2, 1), (2, 2), (4, 6), (5, 9), (4, 60), (8, 40)):
        torch.testing.assert_close(run_and_differentiate(compiled, compiled, x), run_and_differentiate(model, model, x))


def halve_single(block, x, t, k, w, ids, e):
    y = block.experts[e](x[t]) * w[t, k, None]
    return y / 2 if int((ids == e).sum()) == 1 else y


def halve_without_second(block, x, t, k, w, ids, e):
    y = block.experts[e](x[t]) * w[t, k, None]
    try:
        assert t[1] is not None
        return y
    except IndexError:
        return y / 2


def double_multiples_of_64(block, x, t, k, w, ids, e):
    return block.experts[e](x[t]) * w[t, k, None] * (2 if math.gcd(len(x), 64) == 64 else 1)


class Odd(Loop):
    """Run one expert for some sizes, and for others a mixture whose experts change with their token counts."""

    def __init__(self, takes, fn):
        super().__init__(Mlp)
        self.takes, self.fn = takes, fn

    def forward(self, x):
        if not self.takes(x):
            return self.experts[0](x)
        rows = x.reshape(-1, D)
        w, ids = self.route(rows)
        out = torch.zeros_like(rows)
        for e in range(len(self.experts)):
            t, k = torch.where(ids == e)
            if t.numel() > 0:
                out = out.index_add(0, t, self.fn(self, rows, t, k, w, ids, e))
        return out.view(x.shape)


@pytest.mark.parametrize(
    ("takes", "fn", "size"),
    [
        (lambda x: x.shape[0] > 1, halve_single, (4, 6)),
        (lambda x: x.shape[0] > 1, halve_without_second, (4, 6)),
        (lambda x: x.shape[0] > 1, double_multiples_of_64, (4, 6)),
    ],
    ids=["single token", "second token", "64 tokens"],
)
def test_refuses_differences_at_sizes_on_the_examples_side(takes, fn, size):
    torch.manual_seed(0)
    with pytest.raises(moefx.NoMoEBlockFound, match=r"different functions under|one function under one|for 64 tokens"):
        moefx.compile(Odd(takes, fn).double(), example_inputs=draw_sequences(size))


class Multiples(Odd):
    """Raise for other sizes, such as non-multiples of 8."""

    def forward(self, x):
        if not self.takes(x):
            raise ValueError("other sizes are not taken")
        return super().forward(x)


def test_explains_failures_at_sizes_that_a_program_accepts():
    torch.manual_seed(0)
    model = Multiples(lambda x: x.shape[0] * x.shape[1] % 8 == 0, halve_single).double()
    with pytest.raises(moefx.NoMoEBlockFound, match=r"different functions under|one function under one"):
        moefx.compile(model, example_inputs=draw_sequences((4, 6)))


def halve_pairs(block, x, t, k, w, ids, e):
    y = block.experts[e](x[t]) * w[t, k, None]
    return y / 2 if int((ids == e).sum()) == 2 else y


def test_refuses_a_special_case_of_two_tokens():
    torch.manual_seed(0)
    model = Multiples(lambda x: x.shape[0] * x.shape[1] >= 16, halve_pairs).double()
    with pytest.raises(moefx.NoMoEBlockFound, match=r"different functions under|one function under one"):
        moefx.compile(model, example_inputs=draw_sequences((4, 6)), plan=moefx.Plan(validation="symbolic"))


class ByCondition(Block):
    """Select experts for each sequence by its condition."""

    def __init__(self):
        super().__init__(None)

    def forward(self, x, c):
        w, ids = self.route(c)
        out = torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            b, k = torch.where(ids == e)
            out = out.index_add(0, b, expert(x[b]) * w[b, k, None, None])
        return out


def test_accepts_a_condition_of_one_sequence():
    torch.manual_seed(0)
    model = ByCondition().double()
    (x, c), others = (
        (draw_sequences((1, 9))[0], draw_rows(1)[0]),
        [(draw_sequences((b, 7))[0], draw_rows(b)[0]) for b in (1, 3)],
    )
    compiled = moefx.compile(copy.deepcopy(model), example_inputs=(x, c))
    for call in [(x, c), *others]:
        torch.testing.assert_close(
            run_and_differentiate(compiled, compiled, *call), run_and_differentiate(model, model, *call)
        )
    (matched,) = moefx.explain(compiled).matched
    assert matched.calls[0] and not matched.calls[1]


class Counting(nn.Module):
    """Skip experts by the number of their tokens."""

    def __init__(self, skips, num_experts, k):
        super().__init__()
        self.gate, self.k, self.skips = nn.Linear(D, num_experts, bias=False), k, skips
        self.experts = nn.ModuleList(Mlp() for _ in range(num_experts))

    def forward(self, x):
        w, ids = self.gate(x).softmax(-1).topk(self.k, -1)
        order, counts = ids.view(-1).argsort(), torch.bincount(ids.view(-1), minlength=len(self.experts))
        ends = counts.cumsum(0).tolist()
        out = torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            start, end = ends[e - 1] if e else 0, ends[e]
            if self.skips(counts[e], start, end, order[start:end]):
                continue
            slots = order[start:end]
            out = out.index_add(0, slots // self.k, expert(x[slots // self.k]) * w.view(-1)[slots, None])
        return out


SKIPS = {
    "start == end": lambda count, start, end, rows: start == end,
    "not end > start": lambda count, start, end, rows: not end > start,
    "count.item() == 0": lambda count, start, end, rows: count.item() == 0,
    "count == 0": lambda count, start, end, rows: count == 0,
    "not count": lambda count, start, end, rows: not count.item(),
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("num_experts", "k"), [(2, 1), (3, 2)])
@pytest.mark.parametrize("name", SKIPS)
def test_skips_idle_experts_among_few(name, num_experts, k):
    torch.manual_seed(0)
    model = Counting(SKIPS[name], num_experts, k).double()
    inputs = draw_rows(12, 1, 2, 50)
    compiled = moefx.compile(copy.deepcopy(model), example_inputs=inputs[:1])
    for x in inputs:
        torch.testing.assert_close(run_and_differentiate(compiled, compiled, x), run_and_differentiate(model, model, x))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", ["start == end", "count == 0"])
def test_follows_the_remedy_for_rows(name):
    """Accept experts that are never idle: every token selects all of them."""
    torch.manual_seed(0)
    with pytest.raises(
        moefx.NoMoEBlockFound, match=r"a token count that Python reads from a tensor.*rows.shape\[0\] == 0"
    ):
        moefx.compile(Counting(SKIPS[name], 2, 2).double(), example_inputs=draw_rows(12))
    model = Counting(lambda count, start, end, rows: rows.shape[0] == 0, 2, 2).double()
    compiled = moefx.compile(copy.deepcopy(model), example_inputs=draw_rows(12))
    x = draw_rows(9)[0]
    torch.testing.assert_close(run_and_differentiate(compiled, compiled, x), run_and_differentiate(model, model, x))


@pytest.mark.parametrize("skips", [lambda count, *_: count.item() <= 1, lambda count, *_: count < 2])
def test_refuses_to_skip_a_single_token(skips):
    """Refuse the skip although idle experts are skipped correctly."""
    torch.manual_seed(0)
    with pytest.raises(moefx.NoMoEBlockFound, match=r"depends on .* that Python reads from a tensor: "):
        moefx.compile(Counting(skips, 4, 2).double(), example_inputs=draw_rows(16))


class RanksInChunks(nn.Module):
    """Count the tokens of an expert separately for every 64 tokens."""

    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(6, 6, bias=False)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(6, 5), nn.SiLU(), nn.Linear(5, 6)) for _ in range(6))

    def forward(self, x):
        w, ids = self.gate(x).softmax(-1).topk(2)
        ranks = torch.cat([self.rank(chunk) for chunk in ids.reshape(-1, 2).split(64)])
        w = w * (ranks.reshape(w.shape) < 9)
        rows, w, ids = x.reshape(-1, 6), w.reshape(-1, 2), ids.reshape(-1, 2)
        out = torch.zeros_like(rows)
        for e, expert in enumerate(self.experts):
            t, k = torch.where(ids == e)
            out = out.index_add(0, t, expert(rows[t]) * w[t, k, None])
        return out.reshape(x.shape)

    def rank(self, ids):
        one_hot = F.one_hot(ids, 6).reshape(-1, 6)
        return (one_hot.cumsum(0) - one_hot).gather(1, ids.reshape(-1, 1)).reshape(ids.shape)


@pytest.mark.exhaustive
def test_the_first_captures_of_a_guarded_program_differ_in_their_tokens():
    model = RanksInChunks().double()
    example = torch.randn(5, 13, 6, dtype=torch.float64)
    compiled = moefx.compile(model, example_inputs=(example,), plan=moefx.Plan(validation="symbolic"))
    for lead in ((5, 13), (7, 11), (10, 10)):
        x = torch.randn(*lead, 6, dtype=torch.float64)
        torch.testing.assert_close(compiled(x), model(x))
    assert moefx.blocks(compiled)[0].fallbacks == 0


@pytest.mark.parametrize("divisor", [lambda n: max(1, n), lambda n: max(n, 1), lambda n: n or 1])
def test_a_mean_over_no_tokens_is_that_of_the_original(divisor):
    """`max(1, n)` equals `n` for one token and for many, but not for none."""

    class Mean(Loop):
        def forward(self, x):
            return super().forward(x), self.route(x)[0].sum(0) / divisor(x.shape[0])

    torch.manual_seed(0)
    model = Mean().double()
    compiled = moefx.compile(model, example_inputs=draw_rows(18)[0])
    for x in draw_rows(0, 1, 2, 31):
        torch.testing.assert_close(compiled(x), model(x), rtol=1e-10, atol=1e-12)


def test_a_guard_that_excludes_all_tokens_has_no_other_sizes():
    x = torch.zeros(2, 7, D)
    arguments = next(iter(interpret_arguments((x,), {}, ModelNumbers.of(Loop()))))
    guards = [SizeGuard("S", "eq", "0", True)]
    assert find_sizes(arguments, guards, 8) == []
    assert find_sequence(arguments, guards, 8) == arguments.choose_sequence(8)


def test_a_view_by_a_batch_that_may_be_empty_raises_torchs_error():
    """`view(b, -1)` cannot infer an axis of no elements: a call with an empty batch fails as the original does."""

    class PerSequence(Loop):
        def forward(self, x):
            b, s, d = x.shape
            w, ids = self.route(x.reshape(-1, d))
            loads = w.new_zeros(b, len(self.experts)).scatter_add(1, ids.view(b, -1), w.view(b, -1))
            return self.mixed(x.reshape(-1, d), w, ids).view(b, s, d), loads.sum() / max(1, s)

    torch.manual_seed(0)
    model = PerSequence().double()
    compiled = moefx.compile(model, example_inputs=draw_rows(18)[0].view(2, 9, 6))
    for shape in ((2, 9, 6), (1, 1, 6), (3, 11, 6)):
        x = torch.randn(shape, dtype=torch.float64)
        torch.testing.assert_close(compiled(x), model(x), rtol=1e-10, atol=1e-12)
    for m in (model, compiled):
        with pytest.raises(RuntimeError, match="cannot reshape tensor of 0 elements"):
            m(torch.zeros(0, 9, 6, dtype=torch.float64))


@pytest.mark.parametrize(
    "scale",
    [
        lambda y, n: y * (1 / n),
        lambda y, n: y / n**2,
        lambda y, n: y * (6000 // n),
        lambda y, n: y * (1000 % n),
        lambda y, n: y * 2 if 4000 // n > 60 else y,
    ],
)
def test_arithmetic_with_the_size_of_merged_axes(scale):
    """The size of merged axes is `B*S`: `1 / n` is `1 / (B*S)`, not `1 / B * S`."""

    class Merged(Loop):
        def forward(self, x):
            h = x.reshape(-1, x.shape[-1])
            return scale(super().forward(h), h.shape[0]).view_as(x)

    torch.manual_seed(0)
    model = Merged().double()
    compiled = moefx.compile(model, example_inputs=torch.randn(2, 10, D, dtype=torch.float64))
    for lead in ((2, 10), (5, 7), (1, 4), (12, 20)):
        x = torch.randn(*lead, D, dtype=torch.float64)
        torch.testing.assert_close(compiled(x), model(x), rtol=1e-10, atol=1e-12)
