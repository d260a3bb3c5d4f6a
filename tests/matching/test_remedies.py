"""Remedies of refusals, followed literally: the changed block is rewritten."""

from __future__ import annotations

import random

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import moefx

from .. import blocks
from ..blocks import D, Loop, Mlp
from ..models.case import run_and_differentiate


class Block(blocks.Block):
    def moe(self, x):
        return Loop.forward(self, x)

    @classmethod
    def of_moe(cls):
        return cls(cls.moe)


def read_count(block, x):
    count = (block.route(x)[1] == 0).sum().item()
    return block.moe(x) * (1 + count)


def keep_count(block, x):
    return block.moe(x) * (1 + (block.route(x)[1] == 0).sum())


def count_calls(block, x):
    block.calls += 1
    return block.moe(x)


def draw_in_python(block, x):
    return block.moe(x * random.random())


def draw_as_tensor(block, x):
    return block.moe(x * torch.rand((), dtype=x.dtype))


def normalize_in_place(block, x):
    with torch.no_grad():
        block.gate.weight.copy_(F.normalize(block.gate.weight))
    return block.moe(x)


def normalize_a_copy(block, x):
    scores = F.linear(x, F.normalize(block.gate.weight))
    return block.mixed(x, *scores.softmax(-1).topk(block.k, -1))


def cut_gradient(block, x):
    return torch.cat([block.moe(part) for part in x.chunk(3)])


def write_behind_autograd(block, x):
    h = x * 2
    h.data.clamp_(-1, 1)
    return block.moe(h)


def write_to_a_copy(block, x):
    h = x * 2
    return block.moe(h + (h.clamp(-1, 1) - h).detach())


def run_uncrowded(block, x):
    w, ids = block.route(x)
    out = torch.zeros_like(x)
    for e, expert in enumerate(block.experts):
        t, k = torch.where(ids == e)
        if len(t) <= 20:
            out = out.index_add(0, t, expert(x[t]) * w[t, k, None])
    return out


def weigh_by_a_limit(block, x):
    w, ids = block.route(x)
    counts, limit = torch.bincount(ids.flatten(), minlength=len(block.experts)), 20
    return block.mixed(x, w * (counts <= limit)[ids], ids)


def gather_choices(block, x):
    w, ids = block.route(x)
    rows = torch.arange(len(x)).repeat_interleave(block.k)
    outputs = torch.stack([f(x) for f in block.experts], 1)
    return rows, outputs[rows, ids.flatten()] * w.flatten()[:, None]


def write_rows_at_once(block, x):
    rows, y = gather_choices(block, x)
    out = torch.zeros_like(x)
    out[rows] += y
    return out


def add_rows_up(block, x):
    rows, y = gather_choices(block, x)
    return torch.zeros_like(x).index_add_(0, rows, y)


def divide_by_a_tensor(block, x):
    w, ids = block.route(x)
    return block.mixed(x, w / torch.tensor(x.shape[0] ** 0.5), ids)


def divide_by_a_number(block, x):
    w, ids = block.route(x)
    return block.mixed(x, w / x.shape[0] ** 0.5, ids)


def write_rows(new):
    """Select an expert, or none, and write the rows of the experts into a new tensor."""

    def forward(block, x):
        w, ids = block.gate(x).softmax(-1).topk(1)
        out = new(x)
        for e, expert in enumerate(block.experts[:-1]):
            t, k = torch.where(ids == e)
            out[t] = expert(x[t]) * w[t, k, None]
        return out

    return forward


def warm_up_by_a_branch(block, x):
    w, ids = block.route(x)
    if block.is_warm:
        w = w / 2
    return block.mixed(x, w, ids)


def warm_up_by_where(block, x):
    w, ids = block.route(x)
    return block.mixed(x, torch.where(block.is_warm, w / 2, w), ids)


def skip_few(block, x):
    w, ids = block.route(x)
    out = torch.zeros_like(x)
    for e, expert in enumerate(block.experts):
        t, k = torch.where(ids == e)
        if len(t) >= 3:
            out = out.index_add(0, t, expert(x[t]) * w[t, k, None])
    return out


def take_the_largest(block, x):
    w, ids = block.route(x)
    out = torch.zeros_like(x)
    for e, expert in enumerate(block.experts):
        t, k = torch.where(ids == e)
        out[t] = torch.maximum(out[t], expert(x[t]) * w[t, k, None])
    return out


def add_masked(mask_result):
    """Apply all experts to all tokens, with a mask of the tokens that selected them."""

    def forward(block, x):
        w, ids = block.route(x)
        gates = torch.zeros_like(block.gate(x)).scatter(1, ids, w)
        masks = [(gates[:, e, None] > 0).to(x.dtype) for e in range(len(block.experts))]
        pairs = zip(block.experts, masks, strict=True)
        return sum(f(x) * mask if mask_result else f(x * mask) for f, mask in pairs)

    return forward


def balance(block, x, are_balanced):
    """Select one expert per token after balancing the scores in turns, as Sinkhorn's algorithm does."""
    scores, turn = block.gate(x).exp(), 0
    while not are_balanced(scores, turn):
        scores = scores / scores.sum(0) / scores.sum(1, keepdim=True)
        turn += 1
    w, ids = scores.topk(1)
    return block.mixed(x, w, ids)


def balance_until_still(block, x):
    """Select experts after Sinkhorn's algorithm, as Megatron-LM does."""
    scores = block.gate(x).exp()
    before, columns, change = scores.new_ones(scores.shape[1]), scores.new_ones(scores.shape[1]), 1e9
    while change > 1e-4:
        rows = 1 / len(x) / ((columns * scores).sum(1) + 1e-8)
        columns = 1 / scores.shape[1] / ((rows[:, None] * scores).sum(0) + 1e-8)
        before, change = columns, (before - columns).abs().mean()
    return block.mixed(x, *(columns * scores * rows[:, None]).topk(2))


def stop_when_even(block, x):
    scores = block.gate(x).exp()
    for _ in range(6):
        scores = scores / scores.sum(0) / scores.sum(1, keepdim=True)
        if (scores.sum(0) - 1).abs().max() < 0.1:
            break
    return block.mixed(x, *scores.topk(2))


def append_loss(block, x):
    w, ids = block.route(x)
    block.losses.append(w.square().mean())
    return block.mixed(x, w, ids)


def set_loss(block, x):
    w, ids = block.route(x)
    block.losses = [w.square().mean()]
    return block.mixed(x, w, ids)


class AppendsToArgument(nn.Module):
    """Model that collects the losses of its blocks in a list."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Block(self.route_and_append) for _ in range(2))

    @staticmethod
    def route_and_append(block, x, losses):
        w, ids = block.route(x)
        losses.append(w.square().mean())
        return block.mixed(x, w, ids)

    def forward(self, x):
        losses = []
        for layer in self.layers:
            x = x + layer(x, losses)
        return x + sum(losses)


class ReturnsLoss(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Block(self.route_and_return) for _ in range(2))

    @staticmethod
    def route_and_return(block, x):
        w, ids = block.route(x)
        return block.mixed(x, w, ids), w.square().mean()

    def forward(self, x):
        losses = []
        for layer in self.layers:
            y, loss = layer(x)
            losses.append(loss)
            x = x + y
        return x + sum(losses)


def run_by_a_table(block, x):
    w, ids = block.route(x)
    out = torch.zeros_like(x)
    for e in range(len(block.experts)):
        t, k = torch.where(ids == e)
        out = out.index_add(0, t, block.experts[int(block.table[e])](x[t]) * w[t, k, None])
    return out


def run_by_a_list(block, x):
    w, ids = block.route(x)
    out = torch.zeros_like(x)
    for e, number in enumerate(block.table.tolist()):
        t, k = torch.where(ids == e)
        out = out.index_add(0, t, block.experts[number](x[t]) * w[t, k, None])
    return out


def map_by_a_table(block, x):
    w, ids = block.route(x)
    return block.mixed(x, w, block.table[ids])


class Tied(Block):
    """The experts 2 and 3 are the modules 0 and 1."""

    def __init__(self):
        super().__init__(Block.moe)
        self.experts = nn.ModuleList([*self.experts[:2], *self.experts[:2]])


class TiedByTable(Block):
    def __init__(self):
        super().__init__(map_by_a_table, table=nn.Buffer(torch.tensor([0, 1, 0, 1])))
        self.experts = self.experts[:2]


def count_busy(block, x):
    w, ids = block.route(x)
    out = torch.zeros_like(x)
    for e, expert in enumerate(block.experts):
        t, k = torch.where(ids == e)
        if len(t) == 0:
            continue
        block.counts[e] += len(t)
        out = out.index_add(0, t, expert(x[t]) * w[t, k, None])
    return out


def count_all(block, x):
    w, ids = block.route(x)
    block.counts += torch.bincount(ids.flatten(), minlength=len(block.experts))
    return block.mixed(x, w, ids)


def select_in_halves(block, x):
    """Select one of the first two experts, and one of the others."""
    first, second = (scores.softmax(-1).topk(1) for scores in block.gate(x).chunk(2, -1))
    return x[:, :1] > 0, first, (second.values, second.indices + 2)


def choose_results(block, x):
    is_image, *selections = select_in_halves(block, x)
    results = []
    for half, (w, ids) in zip((0, 2), selections, strict=True):
        out = torch.zeros_like(x)
        for e in (half, half + 1):
            t, k = torch.where(ids == e)
            out = out.index_add(0, t, block.experts[e](x[t]) * w[t, k, None])
        results.append(out)
    return torch.where(is_image, *results)


def choose_selections(block, x):
    is_image, first, second = select_in_halves(block, x)
    return block.mixed(x, *(torch.where(is_image, a, b) for a, b in zip(first, second, strict=True)))


def relu_by_columns(block, x):
    w = block.gate(x).relu()
    out = torch.zeros_like(x)
    for e, expert in enumerate(block.experts):
        t = torch.nonzero(w[:, e] > 0).squeeze(-1)
        out = out.index_add(0, t, expert(x[t]) * w[t, e, None])
    return out


def relu_by_a_mask(block, x):
    w = block.gate(x).relu()
    out, mask = torch.zeros_like(x), w > 0
    for e, expert in enumerate(block.experts):
        t = torch.nonzero(mask[:, e]).squeeze(-1)
        out = out.index_add(0, t, expert(x[t]) * w[t, e, None])
    return out


def draw_if_chosen(block, x):
    w, ids = block.route(x)
    if (ids == 0).any():
        x = x + torch.rand_like(x)
    return block.mixed(x, w, ids)


def draw_always(block, x):
    w, ids = block.route(x)
    return block.mixed(x + torch.where((ids == 0).any(), torch.rand_like(x), 0), w, ids)


def count_if_chosen(block, x):
    w, ids = block.route(x)
    if (ids == 0).any():
        block.count += 1
    return block.mixed(x, w, ids)


def count_by_where(block, x):
    w, ids = block.route(x)
    block.count.copy_(torch.where((ids == 0).any(), block.count + 1, block.count))
    return block.mixed(x, w, ids)


def return_if_chosen(block, x):
    w, ids = block.route(x)
    return block.mixed(x, w, ids), w.sum() if (ids == 0).any() else None


def return_always(block, x):
    w, ids = block.route(x)
    return block.mixed(x, w, ids), torch.where((ids == 0).any(), w.sum(), 0)


def map_rows(function, after=lambda out: out):
    """Apply `function(expert, rows)` for each expert, and another function to the sum."""

    def forward(block, x):
        w, ids = block.route(x)
        out = 0
        for e, expert in enumerate(block.experts):
            t, k = torch.where(ids == e)
            rows = function(expert, x[t]) * w[t, k, None]
            out = out + torch.zeros(len(x), rows.shape[1], dtype=x.dtype).index_add(0, t, rows)
        return after(out)

    return forward


def multiply_three(expert, rows):
    return torch.einsum("td,hd,dh->td", rows, expert.up.weight, expert.down.weight)


def multiply_two_at_a_time(expert, rows):
    return rows * torch.einsum("hd,dh->d", expert.up.weight, expert.down.weight)


class SpectrallyNormed(nn.Sequential):
    def __init__(self):
        super().__init__(nn.utils.parametrizations.spectral_norm(nn.Linear(D, D)))


class Biased(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(D, D), nn.ReLU(), nn.Linear(D, D))


class BatchNormed(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(D, D), nn.BatchNorm1d(D))


class LayerNormed(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(D, D), nn.LayerNorm(D))


class Chunks(nn.Module):
    """Module for one chunk of the tokens."""

    def __init__(self):
        super().__init__()
        self.moe = Loop(Mlp)

    def forward(self, x):
        return torch.cat([self.moe(part) for part in x.chunk(3)])


def add_two_sums(block, x):
    w, ids = block.route(x)
    return block.mixed(x, w, ids) + block.mixed(x, w * w, ids)


def add_weights(block, x):
    w, ids = block.route(x)
    return block.mixed(x, w + w * w, ids)


OUTSIDE = nn.Linear(D, D).double()
IS_WARM = torch.tensor(False)
PAIRS = {
    r"never written.*start from torch.zeros_like": (
        lambda: Block(write_rows(torch.empty_like)),
        lambda: Block(write_rows(torch.zeros_like)),
    ),
    r"choose between their results by torch.where": (
        lambda: Block(warm_up_by_a_branch, is_warm=nn.Buffer(IS_WARM)),
        lambda: Block(warm_up_by_where, is_warm=nn.Buffer(IS_WARM)),
    ),
    r"applied to it 2 times, for 2 sums.*add up the routing weights": (
        lambda: Block(add_two_sums),
        lambda: Block(add_weights),
    ),
    r"compute with dense tensors": (lambda: Block(lambda block, x: block.moe(x.to_sparse().to_dense())), Block.of_moe),
    r"decides whether it runs.*run every expert that has tokens$": (lambda: Block(skip_few), Block.of_moe),
    r"its attribute calls.*keep it in a buffer": (
        lambda: Block(count_calls, calls=0),
        lambda: Block(count_calls, calls=nn.Buffer(torch.zeros((), dtype=torch.int64))),
    ),
    r"compute with the tensor itself": (lambda: Block(read_count), lambda: Block(keep_count)),
    r"draw them with torch, as a tensor": (lambda: Block(draw_in_python), lambda: Block(draw_as_tensor)),
    r"compute with a changed copy": (lambda: Block(normalize_in_place), lambda: Block(normalize_a_copy)),
    r"split into 3 chunks.*move the code of one chunk into a module": (lambda: Block(cut_gradient), Chunks),
    r"write to a copy, or out of place": (lambda: Block(write_behind_autograd), lambda: Block(write_to_a_copy)),
    r"make the module that owns it a submodule": (
        lambda: Block(lambda block, x: OUTSIDE(block.moe(x))),
        lambda: Block(lambda block, x: block.out(block.moe(x)), out=nn.Linear(D, D)),
    ),
    r"weights \* \(counts <= limit\)\[ids\]": (lambda: Block(run_uncrowded), lambda: Block(weigh_by_a_limit)),
    r"several values to the same row.*out.index_add_": (
        lambda: Block(write_rows_at_once),
        lambda: Block(add_rows_up),
    ),
    r"compute with the numbers themselves": (lambda: Block(divide_by_a_tensor), lambda: Block(divide_by_a_number)),
    r"combined by something else than a sum.*add up the results": (lambda: Block(take_the_largest), Block.of_moe),
    r"never chosen.*remove the experts that it cannot choose": (
        lambda: Block(lambda block, x: block.mixed(x, *block.gate(x)[:, :-1].softmax(-1).topk(2))),
        Block.of_moe,
    ),
    r"nor the same for all tokens.*multiply its result, not its input": (
        lambda: Block(add_masked(mask_result=False), Biased),
        lambda: Block(add_masked(mask_result=True), Biased),
    ),
    r"compares activations: while.*run a loop a fixed number of times": (
        lambda: Block(
            lambda block, x: balance(block, x, lambda scores, n: n > 9 or (scores.sum(0) - 1).abs().max() < 1)
        ),
        lambda: Block(lambda block, x: balance(block, x, lambda scores, n: n > 3)),
    ),
    r"has not ended after.*run the loop a fixed number of times": (
        lambda: Block(balance_until_still),
        lambda: Block(lambda block, x: balance(block, x, lambda scores, n: n > 3)),
    ),
    r"a value that Python reads from a tensor: if .scores": (
        lambda: Block(stop_when_even),
        lambda: Block(lambda block, x: balance(block, x, lambda scores, n: n > 5)),
    ),
    r"writes to losses.*this line computes.*set the attribute anew": (
        lambda: Block(append_loss, losses=[]),
        lambda: Block(set_loss, losses=[]),
    ),
    r"writes to an argument.*this line computes.*let the caller append it": (AppendsToArgument, ReturnsLoss),
    r"reads a buffer to choose which module runs.*int.self.table": (
        lambda: Block(run_by_a_table, table=nn.Buffer(torch.tensor([2, 0, 3, 1]))),
        lambda: Block(map_by_a_table, table=nn.Buffer(torch.tensor([2, 0, 3, 1]))),
    ),
    r"holds 2 modules as 4 experts.*tensor..0, 1, 0, 1": (Tied, TiedByTable),
    r"decide whether the block writes to counts.*torch.bincount": (
        lambda: Block(count_busy, counts=nn.Buffer(torch.zeros(4, dtype=torch.int64))),
        lambda: Block(count_all, counts=nn.Buffer(torch.zeros(4, dtype=torch.int64))),
    ),
    r"follow from 2 separate selections": (
        lambda: Block(choose_results),
        lambda: Block(choose_selections),
    ),
    r"a comparison of its own.*compare the scores of all experts at once": (
        lambda: Block(relu_by_columns),
        lambda: Block(relu_by_a_mask),
    ),
    r"change buffers in their forward.*compile in eval mode": (
        lambda: Block(Block.moe, SpectrallyNormed),
        lambda: Block(Block.moe, SpectrallyNormed).eval(),
    ),
    r"random numbers are drawn depends on the routing.*draw them in every call": (
        lambda: Block(draw_if_chosen),
        lambda: Block(draw_always),
    ),
    r"block changes depends on the routing .count.*choose between the values by torch.where": (
        lambda: Block(count_if_chosen, count=nn.Buffer(torch.zeros(()))),
        lambda: Block(count_by_where, count=nn.Buffer(torch.zeros(()))),
    ),
    r"returns a tensor depends on the routing.*return a tensor in every call": (
        lambda: Block(return_if_chosen),
        lambda: Block(return_always),
    ),
    r"a product of 3 tensors.*multiply two at a time": (
        lambda: Block(map_rows(multiply_three)),
        lambda: Block(map_rows(multiply_two_at_a_time)),
    ),
    r"each row by itself.*no batch norm": (
        lambda: Block(Block.moe, BatchNormed),
        lambda: Block(Block.moe, LayerNormed),
    ),
}


@pytest.mark.parametrize("read", [lambda table: [int(table[0]), int(table[1])], torch.Tensor.tolist])
@pytest.mark.parametrize("name", ["perm", "p"])  # captures permute the values of a buffer by its name
def test_a_short_table_of_modules_is_not_baked_in(name, read):
    def forward(block, x):
        w, ids = block.gate(x)[:, :2].softmax(-1).topk(1)
        out = torch.zeros_like(x)
        for e, number in enumerate(read(getattr(block, name))):
            t, k = torch.where(ids == e)
            out = out.index_add(0, t, block.experts[number](x[t]) * w[t, k, None])
        return out

    block = Block(forward, **{name: nn.Buffer(torch.tensor([0, 1]))})
    block.experts = block.experts[:2]
    (refused,) = moefx.explain(block, example_inputs=(torch.randn(12, D),)).refused
    assert "reads a buffer to choose which module runs" in refused.reason


@pytest.mark.sampled(3)
@pytest.mark.parametrize("why", PAIRS)
def test_following_the_remedy_rewrites_the_block(why):
    torch.manual_seed(0)
    refused, remedied = PAIRS[why]
    x = torch.randn(12, D, dtype=torch.float64)
    with pytest.raises(moefx.NoMoEBlockFound, match=why):
        moefx.compile(refused().double(), example_inputs=(x,))
    model = remedied().double()
    compiled = moefx.compile(model, example_inputs=(x,))
    results = []
    for m in (compiled, model):
        torch.manual_seed(1)
        results.append(run_and_differentiate(m, m, x))
    torch.testing.assert_close(*results)


class Scaled(nn.Module):
    """An expert with a scale of its own, a plain attribute or a buffer."""

    def __init__(self, is_buffer):
        super().__init__()
        self.up, self.down = nn.Linear(D, 4), nn.Linear(4, D)
        scale = torch.randn(4, dtype=torch.float64)
        if is_buffer:
            self.register_buffer("scale", scale)
        else:
            self.scale = scale

    def forward(self, x):
        return self.down(self.up(x).tanh() * self.scale)


class ScaledExperts(nn.Module):
    def __init__(self, is_buffer):
        super().__init__()
        self.gate = nn.Linear(D, 3, bias=False)
        self.experts = nn.ModuleList(Scaled(is_buffer) for _ in range(3))

    def forward(self, x):
        w, ids = self.gate(x).softmax(-1).topk(2)
        out = torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            t, k = torch.where(ids == e)
            out = out.index_add(0, t, expert(x[t]) * w[t, k, None])
        return out


def test_a_plain_tensor_of_an_expert_is_refused_by_name():
    torch.manual_seed(0)
    x = torch.randn(12, D, dtype=torch.float64)
    with pytest.raises(moefx.NoMoEBlockFound, match=r"attribute experts\.\d\.scale(.|\n)*register_buffer"):
        moefx.compile(ScaledExperts(is_buffer=False).double(), example_inputs=x)
    model = ScaledExperts(is_buffer=True).double()
    torch.testing.assert_close(moefx.compile(model, example_inputs=x)(x), model(x))
