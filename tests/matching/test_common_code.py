"""Token choice in the style of public repositories: each block runs rewritten, in training and in eval."""

from __future__ import annotations

import numpy
import pytest
import torch
from torch import nn
from torch.distributions import Normal

import moefx

from ..blocks import D, E, Loop, Mlp


class TouchesIdle(Loop):
    """Add zero times its parameters for each idle expert, so that DDP finds gradients for all."""

    def __init__(self, touch):
        super().__init__(Mlp)
        self.touch = touch

    def mixed(self, x, w, ids):
        out = torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            t, k = torch.where(ids == e)
            if len(t):
                out.index_add_(0, t, expert(x[t]) * w[t, k, None])
            elif self.training:
                out = self.touch(out, expert, x)
        return out


def touch_element(out, expert, x):
    out[0, 0] += 0.0 * sum(p.sum() for p in expert.parameters())
    return out


def touch_row(out, expert, x):
    out[0] += 0.0 * expert(x[:1])[0]
    return out


def touch_rows(out, expert, x):
    out[:2] += expert(x[:2]) * 0
    return out


def touch_by_index(out, expert, x):
    return out.index_add(0, torch.tensor([0]), 0.0 * expert(torch.zeros_like(x[:1])))


def touch_everything(out, expert, x):
    return out + 0.0 * sum(p.sum() for p in expert.parameters())


class CountsInNumpy(Loop):
    """Sort tokens by expert and split them at offsets from NumPy, under `no_grad` like inference code."""

    def __init__(self, ends, is_off=True):
        super().__init__(Mlp)
        self.ends, self.is_off = ends, is_off

    def mixed(self, x, w, ids):
        with torch.set_grad_enabled(not self.is_off):
            out, flat = torch.zeros_like(x), ids.flatten()
            order, start = flat.argsort(stable=True), 0
            for e, end in enumerate(self.ends(flat)):
                at = order[start:end]
                if start < end:
                    rows = self.experts[e](x[at // self.k]) * w.flatten()[at, None]
                    out.scatter_add_(0, (at // self.k)[:, None].expand(-1, D), rows)
                start = end
            return out


def count_in_numpy(flat):
    return flat.bincount(minlength=E).numpy().cumsum(0)


def count_in_an_array(flat):
    return numpy.cumsum(numpy.bincount(numpy.asarray(flat), minlength=E))


class LoadLoss(Loop):
    """Noisy gate of Shazeer et al.: its load uses a normal distribution, which checks its arguments."""

    def __init__(self, load):
        super().__init__(Mlp)
        self.load = load
        self.register_buffer("mean", torch.zeros(1))
        self.register_buffer("std", torch.ones(1))

    def forward(self, x):
        scores = self.gate(x)
        top, ids = scores.topk(self.k + 1, -1)
        out = self.mixed(x, top[:, : self.k].softmax(-1), ids[:, : self.k])
        return out, self.load(self, scores - top[:, self.k :]).sum(0)


def use_buffers(block, margin):
    return Normal(block.mean, block.std).cdf(margin)


def use_numbers(block, margin):
    return Normal(0.0, 1.0).cdf(margin)


def use_noise(block, margin):
    return Normal(block.mean, nn.functional.softplus(margin.mean()) + 1e-2).cdf(margin)


def use_log_probability(block, margin):
    return Normal(block.mean, block.std).log_prob(margin)


class OneMoreAxis(Loop):
    """Give experts a batch axis: `y[mask] = expert(x[mask].unsqueeze(0))`."""

    def __init__(self, call):
        super().__init__(Mlp)
        self.call = call

    def mixed(self, x, w, ids):
        flat, rows = ids.flatten(), x.repeat_interleave(self.k, 0)
        out = torch.empty_like(rows)
        for e, expert in enumerate(self.experts):
            mask = flat == e
            if mask.any():
                out[mask] = self.call(expert, rows[mask])
        return (out.view(*w.shape, -1) * w[..., None]).sum(1)


def call_with_batch_axis(expert, x):
    return expert(x.unsqueeze(0))


def call_with_two_batch_axes(expert, x):
    return expert(x[None, None])


def call_with_batch_and_restore(expert, x):
    return expert(x[None])[0]


def call_with_rows_of_one(expert, x):
    return expert(x[:, None]).squeeze(1)


class SharedInList(Loop):
    """Run the first experts of the list on all tokens."""

    def __init__(self, shared):
        super().__init__(Mlp, num_experts=E + shared)
        self.gate, self.shared = nn.Linear(D, E, bias=False), shared

    def mixed(self, x, w, ids):
        out = torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            if e < self.shared:
                out = out + expert(x)
                continue
            t, k = torch.where(ids == e - self.shared)
            out = out.index_add(0, t, expert(x[t]) * w[t, k, None])
        return out


class SharedLast(SharedInList):
    def mixed(self, x, w, ids):
        out = self.experts[-1](x)
        for e, expert in enumerate(self.experts[:-1]):
            t, k = torch.where(ids == e)
            out = out.index_add(0, t, expert(x[t]) * w[t, k, None])
        return out


class Nested(Loop):
    """Keep experts in nested lists, selected by one number."""

    def __init__(self, order):
        super().__init__(Mlp, num_experts=6)
        self.experts = nn.ModuleList(nn.ModuleList(Mlp() for _ in range(3)) for _ in range(2))
        self.order = order

    def mixed(self, x, w, ids):
        out = torch.zeros_like(x)
        for e, expert in enumerate(self.order(self.experts)):
            t, k = torch.where(ids == e)
            out = out.index_add(0, t, expert(x[t]) * w[t, k, None])
        return out


def order_by_list(lists):
    return [expert for inner in lists for expert in inner]


def order_across_lists(lists):
    return [expert for column in zip(*lists, strict=True) for expert in column]


class PassesThrough(Loop):
    """Keep the rows of tokens over a capacity, as in labml.ai's Switch Transformer."""

    def __init__(self, finish, capacity=1.25):
        super().__init__(Mlp)
        self.finish, self.capacity = finish, capacity

    def forward(self, x):
        w, ids = self.gate(x).softmax(-1).max(-1)
        places = [(ids == e).nonzero(as_tuple=True)[0] for e in range(E)]
        capacity, dropped = int(self.capacity * len(x) / E), []
        for e in range(E):
            if len(places[e]) > capacity:
                dropped.append(places[e][capacity:])
                places[e] = places[e][:capacity]
        out = torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            out[places[e], :] = expert(x[places[e], :])
        return self.finish(out, x, w[:, None], dropped)


def scale_all(out, x, w, dropped):
    if dropped:
        rows = torch.cat(dropped)
        out[rows, :] = x[rows, :]
    return out * w


def scale_experts(out, x, w, dropped):
    out = out * w
    if dropped:
        rows = torch.cat(dropped)
        out[rows] = x[rows]
    return out


def scale_in_lists(out, x, w, dropped):
    for rows in dropped:
        out[rows] = x[rows]
    return out * w


class OneOutput(Loop):
    """Experts that predict one number, as in regression and ranking."""

    def __init__(self, mix, bias=True):
        super().__init__(lambda: nn.Sequential(nn.Linear(D, 8), nn.GELU(), nn.Linear(8, 1, bias)))
        self.mix = mix

    def mixed(self, x, w, ids):
        return self.mix(self, x, w, ids)


def add_outputs(block, x, w, ids):
    out = x.new_zeros(len(x), 1)
    for e, expert in enumerate(block.experts):
        t, k = torch.where(ids == e)
        out.index_add_(0, t, expert(x[t]) * w[t, k, None])
    return out


def squeeze_outputs(block, x, w, ids):
    return add_outputs(block, x, w, ids).squeeze(-1).sigmoid()


def stack_outputs(block, x, w, ids):
    outputs = torch.stack([expert(x) for expert in block.experts], 1)
    return (outputs.gather(1, ids[..., None]) * w[..., None]).sum(1)


def mask_outputs(block, x, w, ids):
    gates = torch.zeros(len(x), E, dtype=x.dtype).scatter(1, ids, w)
    return sum(gates[:, e : e + 1] * expert(x) for e, expert in enumerate(block.experts))


def add_shared_expert(block, x, w, ids):
    return add_outputs(block, x, w, ids) + x.mean(-1, keepdim=True)


class Relu(Loop):
    """ReLU routing: a token has one expert per positive score."""

    def __init__(self, choose):
        super().__init__(Mlp)
        self.choose = choose

    def forward(self, x):
        w, out = self.gate(x).relu(), torch.zeros_like(x)
        for e, (rows, expert) in enumerate(zip(self.choose(w), self.experts, strict=True)):
            out[rows] = out[rows] + expert(x[rows]) * w[rows, e, None]
        return out


def select_at_once(w):
    mask = w > 0
    return [mask[:, e] for e in range(E)]


def select_one_by_one(w):
    return [w[:, e] > 0 for e in range(E)]


def select_nonzero(w):
    return [w[:, e].nonzero()[:, 0] for e in range(E)]


class InChunks(Loop):
    """Call each expert with a part of its rows at a time. `join` gets the expert, its rows and the parts' weights."""

    def __init__(self, join):
        super().__init__(Mlp)
        self.join = join

    def forward(self, x):
        w, ids = self.route(x)
        out = torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            t, k = torch.where(ids == e)
            if len(t):
                out = out.index_add(0, t, self.join(expert, x[t]) * w[t, k, None])
        return out


def split_rows(expert, rows):
    return torch.cat([expert(part) for part in rows.split(8)])


def split_many_rows(expert, rows):
    return torch.cat([expert(part) for part in rows.split(64)])


def chunk_rows(expert, rows):
    return torch.cat([expert(part) for part in rows.chunk(3)])


def halve_later_parts(expert, rows):
    return torch.cat([expert(part) / (1 + (i > 0)) for i, part in enumerate(rows.split(64))])


class Convolutions(Loop):
    """Use convolutions of kernel size one as gates and experts, on [B, C, L] or [B, C, H, W]."""

    def __init__(self, conv, add):
        super().__init__(lambda: nn.Sequential(conv(D, 8, 1), nn.GELU(), conv(8, D, 1)))
        self.gate, self.add = conv(D, E, 1), add

    def forward(self, x):
        return self.add(self, x, self.gate(x).softmax(1))


def move_channels_last(block, x, p):
    w, ids = p.movedim(1, -1).topk(block.k, -1)
    out = torch.zeros_like(x).movedim(1, -1)
    for e, expert in enumerate(block.experts):
        out = out + expert(x).movedim(1, -1) * (w * (ids == e)).sum(-1, keepdim=True)
    return out.movedim(-1, 1)


def keep_channels_second(block, x, p):
    w, ids = p.topk(block.k, 1)
    return sum(expert(x) * (w * (ids == e)).sum(1, keepdim=True) for e, expert in enumerate(block.experts))


def flatten_pixels(block, x, p):
    w, ids = p.topk(block.k, 1)
    flat, w, ids = (t.movedim(1, -1).flatten(0, -2) for t in (x, w, ids))
    out = torch.zeros_like(flat)
    for e, expert in enumerate(block.experts):
        t, k = torch.where(ids == e)
        rows = expert(flat[t].view(-1, D, *[1] * (x.dim() - 2))).flatten(1)
        out = out.index_add(0, t, rows * w[t, k, None])
    return out.view(len(x), *x.shape[2:], D).movedim(-1, 1)


TOUCHES = (touch_element, touch_row, touch_rows, touch_by_index, touch_everything)
BLOCKS = {
    **{f"idle experts, {f.__name__}": (TouchesIdle, f) for f in TOUCHES},
    "counts, in NumPy": (CountsInNumpy, count_in_numpy),
    "counts, through an array": (CountsInNumpy, count_in_an_array),
    "counts, with gradients": (CountsInNumpy, count_in_numpy, False),
    **{f"load loss, {f.__name__}": (LoadLoss, f) for f in (use_buffers, use_numbers, use_noise, use_log_probability)},
    **{
        f.__name__: (OneMoreAxis, f)
        for f in (call_with_batch_axis, call_with_two_batch_axes, call_with_batch_and_restore, call_with_rows_of_one)
    },
    "one shared expert in the list": (SharedInList, 1),
    "two shared experts in the list": (SharedInList, 2),
    "the last expert is shared": (SharedLast, 1),
    **{
        f"one output, {f.__name__}": (OneOutput, f)
        for f in (add_outputs, squeeze_outputs, stack_outputs, mask_outputs, add_shared_expert)
    },
    "one output, no bias": (OneOutput, add_outputs, False),
    **{f"passed through, {f.__name__}": (PassesThrough, f) for f in (scale_all, scale_experts, scale_in_lists)},
    "passed through, few": (PassesThrough, scale_all, 0.5),
    "ReLU routing": (Relu, select_at_once),
    **{f"in chunks, {f.__name__}": (InChunks, f) for f in (split_rows, split_many_rows, chunk_rows)},
    "nested lists": (Nested, order_by_list),
    "nested lists, across": (Nested, order_across_lists),
}


def run_and_differentiate(model, x):
    """Return outputs and gradients of the input and all parameters, with zeros for missing gradients."""
    x = x.clone().requires_grad_()
    out = model(x)
    outs = [out] if isinstance(out, torch.Tensor) else list(out)
    if not outs[0].requires_grad:
        return outs, []
    loss = sum((o * torch.linspace(-1, 1, o.numel(), dtype=o.dtype).view_as(o)).sum() for o in outs)
    inputs = [x, *model.parameters()]
    grads = torch.autograd.grad(loss, inputs, allow_unused=True)
    return outs, [torch.zeros_like(p) if g is None else g for p, g in zip(inputs, grads, strict=True)]


@pytest.mark.sampled(32)
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("name", BLOCKS)
def test_common_blocks_are_rewritten(name, training):
    torch.manual_seed(0)
    kind, *arguments = BLOCKS[name]
    model = nn.Sequential(kind(*arguments)).double().train(training)
    compiled = moefx.compile(model, example_inputs=(torch.randn(9, D, dtype=torch.float64),))
    for tokens in (1, 2, 9, 80):
        x = torch.randn(tokens, D, dtype=torch.float64)
        torch.testing.assert_close(run_and_differentiate(compiled, x), run_and_differentiate(model, x))
    with torch.no_grad():  # all tokens on few experts, the others idle
        model[0].gate.weight[2:] = 0
        x = torch.rand(30, D, dtype=torch.float64)
    torch.testing.assert_close(run_and_differentiate(compiled, x), run_and_differentiate(model, x))
    alone = kind is PassesThrough  # no expert has capacity for a single token: the original runs
    assert moefx.blocks(compiled)[0].fallbacks == alone


class Jitters(Loop):
    """Add noise to a cast for the router. Without a change of dtype it is no copy, and experts get the noise too."""

    def __init__(self, cast):
        super().__init__(Mlp)
        self.cast = cast

    def forward(self, x):
        h = self.cast(x)
        if self.training:
            h *= torch.empty_like(h).uniform_(0.9, 1.1)
        w, ids = self.route(h.to(self.gate.weight.dtype))
        return self.mixed(x, w, ids)


CASTS = {
    "to": lambda x: x.to(torch.float32),
    "by keyword": lambda x: x.to(dtype=torch.float32),
    "float": lambda x: x.float(),
    "type": lambda x: x.type(torch.float32),
    "a copy": lambda x: x.to(torch.float32, copy=True),
}


@pytest.mark.sampled(4)
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("cast", CASTS)
def test_noise_in_place_behind_a_cast(cast, training):
    torch.manual_seed(0)
    model = nn.Sequential(Jitters(CASTS[cast])).train(training)
    compiled = moefx.compile(model, example_inputs=(torch.randn(9, D),))

    def run(m, x):
        torch.manual_seed(1)
        x = x.clone().requires_grad_()
        copied = x * 1
        out = m(copied)
        return out, copied, torch.autograd.grad(out.square().sum(), [x, *m.parameters()])

    for tokens in (2, 9, 80):
        x = torch.randn(tokens, D)
        torch.testing.assert_close(run(compiled, x), run(model, x))
    assert moefx.blocks(compiled)[0].fallbacks == 0
    report = moefx.verify(compiled, model, (torch.randn(30, D),))
    assert report.ok, str(report)


IMAGES = {1: ((2, D, 9), (1, D, 4), (3, D, 17)), 2: ((2, D, 3, 5), (1, D, 2, 2), (3, D, 4, 7))}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("axes", [1, 2])
def test_convolutions_of_one_element(axes):
    torch.manual_seed(0)
    model = nn.Sequential(Convolutions((nn.Conv1d, nn.Conv2d)[axes - 1], flatten_pixels)).double()
    first, *others = (torch.randn(shape, dtype=torch.float64) for shape in IMAGES[axes])
    compiled = moefx.compile(model, example_inputs=(first,))
    for x in (first, *others):
        torch.testing.assert_close(run_and_differentiate(compiled, x), run_and_differentiate(model, x))
    assert moefx.blocks(compiled)[0].fallbacks == 0


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("block", "x", "why"),
    [
        (lambda: Relu(select_one_by_one), (9, D), r"comparison of its own \(4 on this line\).*mask = scores > 0"),
        (lambda: Relu(select_nonzero), (9, D), r"comparison of its own.*mask = scores > 0"),
        (lambda: InChunks(halve_later_parts), (9, D), r"which experts have tokens|different functions"),
        (lambda: Convolutions(nn.Conv2d, move_channels_last), (2, D, 3, 5), r"whole images.*flatten\(0, -2\)"),
        (lambda: Convolutions(nn.Conv1d, keep_channels_second), (2, D, 9), r"whole images.*flatten\(0, -2\)"),
    ],
    ids=["one by one", "nonzero", "chunks", "channels last", "channels second"],
)
def test_refused_with_a_remedy_that_is_followed(block, x, why):
    """Refuse the block with a remedy, which one of the blocks above applies."""
    with pytest.raises(moefx.NoMoEBlockFound, match=why):
        moefx.compile(nn.Sequential(block()), example_inputs=(torch.randn(x),))
