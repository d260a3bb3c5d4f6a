"""Sizes of captures differ from all numbers of the model."""

from __future__ import annotations

import random
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import moefx
from moefx.capture.arguments.block_arguments import Arguments
from moefx.capture.arguments.size_collisions import EXACT, ModelNumbers


class Stacked(nn.Module):
    """Eager loop of transformers: stacked weights, and one extra class in the one-hot mask."""

    def __init__(self, num_experts, top_k, dim, hidden):
        super().__init__()
        self.num_experts, self.top_k = num_experts, top_k
        self.gate = nn.Linear(dim, num_experts, bias=False)
        self.up = nn.Parameter(0.1 * torch.randn(num_experts, 2 * hidden, dim))
        self.down = nn.Parameter(0.1 * torch.randn(num_experts, dim, hidden))

    def forward(self, x):
        shape = x.shape
        x = x.reshape(-1, shape[-1])
        weights, ids = self.gate(x).softmax(-1).topk(self.top_k)
        out = torch.zeros_like(x)
        with torch.no_grad():
            mask = F.one_hot(ids, num_classes=self.num_experts + 1).permute(2, 1, 0)
            hit = torch.greater(mask.sum(dim=(-1, -2)), 0).nonzero()
        for e in hit:
            e = e[0]
            if e == self.num_experts:
                continue
            slot, token = torch.where(mask[e])
            gate, up = F.linear(x[token], self.up[e]).chunk(2, dim=-1)
            y = F.linear(F.silu(gate) * up, self.down[e]) * weights[token, slot, None]
            out.index_add_(0, token, y)
        return out.view(shape)


class Listed(nn.Module):
    def __init__(self, num_experts, top_k, dim, hidden):
        super().__init__()
        self.top_k, self.gate = top_k, nn.Linear(dim, num_experts)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(dim, hidden), nn.GELU(), nn.Linear(hidden, dim)) for _ in range(num_experts)
        )

    def forward(self, x):
        flat = x.flatten(0, -2)
        weights, ids = self.gate(flat).softmax(-1).topk(self.top_k)
        out = torch.zeros_like(flat)
        for e, expert in enumerate(self.experts):
            token, slot = torch.where(ids == e)
            out.index_add_(0, token, expert(flat[token]) * weights[token, slot, None])
        return out.view_as(x)


class Sorted(nn.Module):
    def __init__(self, num_experts, top_k, dim, hidden):
        super().__init__()
        self.num_experts, self.top_k = num_experts, top_k
        self.gate = nn.Linear(dim, num_experts)
        self.up = nn.Parameter(0.1 * torch.randn(num_experts, dim, hidden))
        self.down = nn.Parameter(0.1 * torch.randn(num_experts, hidden, dim))

    def forward(self, x):
        flat = x.reshape(-1, x.shape[-1])
        weights, ids = self.gate(flat).softmax(-1).topk(self.top_k)
        order = ids.view(-1).argsort()
        token, rows, start = order // self.top_k, [], 0
        for e, count in enumerate(torch.bincount(ids.view(-1), minlength=self.num_experts).tolist()):
            if count:
                rows.append(F.relu(flat[token[start : start + count]] @ self.up[e]) @ self.down[e])
            start += count
        y = torch.cat(rows) * weights.reshape(-1)[order, None]
        return torch.zeros_like(flat).index_add_(0, token, y).view_as(x)


def assert_runs_rewritten(model, lead, others, dim):
    """Assert that the model compiles without a warning, and that training calls of these shapes run rewritten."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        compiled = moefx.compile(model, example_inputs=(torch.randn(*lead, dim),))
        for shape in (lead, *others):
            compiled(torch.randn(*shape, dim, requires_grad=True)).sum().backward()
    (block,) = moefx.explain(compiled).matched
    assert block.calls == (1 + len(others), 0, 0)


# 32 experts and one extra class equal 3 sequences of 11 tokens.
@pytest.mark.sampled(3)
@pytest.mark.parametrize("form", [Stacked, Listed, Sorted])
@pytest.mark.parametrize(
    "num_experts", [pytest.param(n, marks=[] if n in (2, 32) else pytest.mark.exhaustive) for n in range(2, 161)]
)
def test_any_number_of_experts(form, num_experts):
    model = form(num_experts, min(4, num_experts), 32, 24)
    assert_runs_rewritten(model, (4, 64), [(1, 3), (2, 5), (3, 50)], 32)


def test_three_small_axes():
    """4 samples of 3 tokens equal 11 experts and one extra class."""
    assert_runs_rewritten(Stacked(11, 2, 32, 24), (3, 2, 5), [(2, 2, 2), (7, 7, 7)], 32)


# Seed 314 has 9 experts and one extra class, and three axes whose sizes gave B*S = 10.
@pytest.mark.parametrize(
    "seed", [pytest.param(seed, marks=[] if seed == 314 else pytest.mark.exhaustive) for seed in range(500)]
)
def test_random_sizes_run_rewritten(seed):
    draw = random.Random(seed)
    num_experts = draw.randint(2, draw.choice([12, 160]))
    top_k, dim, hidden = draw.randint(1, min(8, num_experts)), draw.randint(16, 160), draw.randint(16, 160)
    axes = draw.randint(1, 3)
    lead = (*[draw.randint(1, 6) for _ in range(axes - 1)], draw.randint(1, 70))
    others = [tuple(draw.randint(1, 20) for _ in lead) for _ in range(3)]
    form = draw.choice([Stacked, Listed, Sorted])
    assert_runs_rewritten(form(num_experts, top_k, dim, hidden), lead, others, dim)


class TestModelNumbers:
    def test_shapes_attributes_and_code_are_collected(self):
        costs = ModelNumbers.of(Stacked(29, 5, 13, 17)).costs
        assert all(costs[n] == EXACT for n in (29, 5, 13, 34, 17))
        assert 0 < costs[30] < EXACT and 0 < costs[29 * 5] < EXACT and 23 not in costs

    def test_one_class_more_than_eight_experts(self):
        numbers = ModelNumbers.of(Stacked(8, 2, 32, 24))
        assert numbers.cost({"B": 9, "S": 5}) > 0 == numbers.cost({"B": 3, "S": 13})

    @pytest.mark.parametrize("num_experts", [7, 10, 11, 32, 34, 35])
    @pytest.mark.parametrize("axes", [1, 2])  # with three axes, one has to be small
    def test_sizes_differ_from_the_models_numbers(self, num_experts, axes):
        numbers = ModelNumbers.of(Stacked(num_experts, 2, 16, 24))
        arguments = Arguments((torch.randn(*range(2, 2 + axes), 16),), {}, numbers=numbers)
        for variant in range(4):
            assert numbers.cost(arguments.choose_sizes(29, variant)) < EXACT

    @pytest.mark.parametrize("axes", [1, 2, 3])
    @pytest.mark.parametrize("num_experts", [3, 5, 9, 32, 128])
    def test_no_axis_has_one_size_in_the_first_three_captures(self, num_experts, axes):
        """Vary each axis: a constant size would look like a number of the program."""
        numbers = ModelNumbers.of(Stacked(num_experts, 3, 36, 113))
        arguments = Arguments((torch.randn(*(2, 5, 39)[:axes], 36),), {}, numbers=numbers)
        chosen = [arguments.choose_sizes(tokens, variant) for variant, tokens in enumerate((32, 25, 13))]
        assert all(len({sizes[dim] for sizes in chosen}) > 1 for dim in arguments.dims), chosen


class Conditioned(nn.Module):
    """Add a condition per sample, whose width may equal the length of the sequence."""

    def __init__(self, width, dim=16, num_experts=4):
        super().__init__()
        self.condition, self.moe = nn.Linear(width, dim), Listed(num_experts, 2, dim, 12)

    def forward(self, x, c):
        return self.moe(x * (1 + self.condition(c)[:, None]))


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("shape", "condition"),
    [((2, 8, 16), (2, 8)), ((8, 8, 16), (8, 8)), ((4, 3, 16), (4, 12)), ((3, 16, 16), (3, 16)), ((2, 4, 16), (2, 8))],
)
def test_a_condition_as_wide_as_the_example_is_long(shape, condition):
    torch.manual_seed(0)
    model = Conditioned(condition[1])
    compiled = moefx.compile(model, example_inputs=(torch.randn(shape), torch.randn(condition)))
    for batch, length in (shape[:2], (5, 7), (1, 9)):
        inputs = torch.randn(batch, length, 16), torch.randn(batch, condition[1])
        torch.testing.assert_close(compiled(*inputs), model(*inputs))
    (block,) = moefx.explain(compiled).matched
    assert block.calls == (3, 0, 0)


class Capped(Listed):
    """Give each expert at most its first thousand tokens."""

    def forward(self, x):
        weights, ids = self.gate(x).softmax(-1).max(-1)
        out = torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            token = torch.where(ids == e)[0][:1000]
            out[token] = expert(x[token]) * weights[token, None]
        return out


def test_a_proof_that_excludes_the_example_is_refused():
    model = Capped(4, 1, 16, 12)
    with pytest.raises(
        moefx.NoMoEBlockFound, match=r"not hold for the example's own sizes \(S = 2048\): it requires S"
    ):
        moefx.compile(model, example_inputs=(torch.randn(2048, 16),))
    assert moefx.blocks(moefx.compile(model, example_inputs=(torch.randn(64, 16),)))  # the remedy works
