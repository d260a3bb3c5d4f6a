"""Idioms of MoE blocks: each runs rewritten."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
import torch.nn.utils.prune
from torch import nn
from torch.utils.checkpoint import checkpoint

import moefx

from ..blocks import D, E, H, Loop, Mlp


class EinsumOfRows(Loop):
    """Select weights and rows by boolean masks; an expert may have no row or one."""

    def forward(self, x):
        p = self.gate(x).softmax(-1)
        chosen = torch.zeros_like(p).scatter(1, p.topk(2).indices, 1.0).bool()
        out = torch.zeros_like(x)
        for e in range(E):
            rows = chosen[:, e]
            out[rows] += torch.einsum("b,be->be", p[rows, e], self.experts[e](x[rows]))
        return out


class WrittenInto(Loop):
    def forward(self, x):
        out = torch.empty_like(x)
        out[:] = super().forward(x)
        return out


class MovingAverage(Loop):
    """Replace a buffer by its moving average."""

    def __init__(self):
        super().__init__(Mlp)
        self.register_buffer("load", torch.ones(E) / E)

    def forward(self, x):
        _, ids = self.route(x)
        self.load = 0.9 * self.load + 0.1 * F.one_hot(ids, E).sum((0, 1)).to(self.load) / ids.numel()
        return super().forward(x)


class LowScores(Loop):
    """Run all experts on all tokens; the gates of unselected experts round to zero."""

    def forward(self, x):
        scores = self.gate(x)
        chosen = torch.zeros_like(scores).scatter(-1, scores.topk(2).indices, 1.0)
        gates = scores.masked_fill(chosen == 0, -1e9).softmax(-1)
        return sum(gates[:, e : e + 1] * expert(x) for e, expert in enumerate(self.experts))


class TwoColumns(Loop):
    """Select a first and a second expert by argmax, with separate capacities; most second slots are dropped."""

    def forward(self, x):
        p = self.gate(x).softmax(-1)
        first, a = p.max(-1)
        second, b = (p * (1 - F.one_hot(a, E))).max(-1)
        places = max(2, int(x.shape[0] / E))
        hits = F.one_hot(a, E).cumsum(0) * F.one_hot(a, E)
        kept_a = (hits <= places) & (hits > 0)
        rank_b = F.one_hot(b, E).cumsum(0) * F.one_hot(b, E) + kept_a.sum(0)
        kept_b = (rank_b <= places) & F.one_hot(b, E).bool()
        w = (first * kept_a.any(-1))[:, None] * F.one_hot(a, E) + (second * kept_b.any(-1))[:, None] * F.one_hot(b, E)
        return sum(w[:, e : e + 1] * expert(x) for e, expert in enumerate(self.experts))


class ToItsPlace(Loop):
    """Map experts by a buffer."""

    def __init__(self):
        super().__init__(Mlp)
        self.register_buffer("place", torch.arange(E))

    def route(self, x):
        w, ids = super().route(x)
        return w, self.place[ids]


class RootMeanSquare(nn.Module):
    """Normalize rows by a scale that looks like a routing weight if one expert has all tokens."""

    def __init__(self):
        super().__init__()
        self.mlp = Mlp()

    def forward(self, x):
        return self.mlp(x * x.square().mean(-1, keepdim=True).add(1e-6).rsqrt())


class Skipping(Loop):
    def __init__(self):
        super().__init__(RootMeanSquare)

    def forward(self, x):
        w, ids = self.route(x)
        out = torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            t, k = torch.where(ids == e)
            if t.numel() == 0:
                continue
            out.index_add_(0, t, expert(x[t]) * w[t, k, None])
        return out


class Normalised(Loop):
    """Batch norm in the experts, in eval mode."""

    def __init__(self):
        super().__init__(lambda: nn.Sequential(nn.Linear(D, H), nn.BatchNorm1d(H), nn.ReLU(), nn.Linear(H, D)))
        for expert in self.experts:
            expert[1].running_mean.normal_()
            expert[1].running_var.uniform_(0.5, 2)
        self.eval()

    def forward(self, x):
        w, ids = self.route(x)
        out = torch.zeros_like(x)
        for e in range(E):
            t, k = torch.where(ids == e)
            if len(t):
                out = out.index_add(0, t, self.expert(e, x[t], w[t, k, None]))
        return out


class Chunks(Loop):
    """Route groups of 16 tokens: more tokens run another program."""

    def forward(self, x):
        parts = []
        for chunk in x.split(16):
            w, ids = self.route(chunk)
            out = torch.zeros_like(chunk)
            for e in range(E):
                t, k = torch.where(ids == e)
                out = out.index_add(0, t, self.expert(e, chunk[t], w[t, k, None]))
            parts.append(out / len(chunk))
        return torch.cat(parts)


class ReentrantCheckpoint(Loop):
    def forward(self, x):
        return checkpoint(super().forward, x, use_reentrant=True)


class KeepsLosses(Loop):
    """Store several results in one attribute."""

    def forward(self, x):
        scores = self.gate(x)
        self.losses = {"balance": scores.mean(0).square().sum(), "more": [scores.logsumexp(-1).mean(), "z", None]}
        return super().forward(x)


class PowersInPlace(Loop):
    def route(self, x):
        return super().route(x.clone().pow_(2).mul_(0.5))


class Checks(Loop):
    """Assert conditions."""

    def route(self, x):
        w, ids = super().route(x)
        torch._assert((w >= 0).all(), "negative")
        torch._assert_async(torch.isfinite(w).all())
        torch._assert_async((w.sum(-1) <= 1 + 1e-6).all(), "too large")
        torch._check(len(ids) > 0)
        return w, ids


class Rounds(Loop):
    """Select one expert at a time from the remaining ones, with its weights as a column."""

    def forward(self, x):
        left, out = self.gate(x).softmax(-1), 0
        for _ in range(2):
            w, choice = left.max(-1, keepdim=True)
            rows = torch.zeros_like(x)
            for e in choice.unique().tolist():
                rows[choice[:, 0] == e] = self.experts[e](x[choice[:, 0] == e])
            out = out + w * rows
            left = left.scatter(-1, choice, 0.0)
        return out


KINDS = [
    EinsumOfRows, Rounds, WrittenInto, MovingAverage, LowScores, Normalised, ReentrantCheckpoint, TwoColumns,
    ToItsPlace, Skipping, KeepsLosses, PowersInPlace, Checks,
]  # fmt: skip


@pytest.mark.sampled(6)
@pytest.mark.parametrize("kind", KINDS)
def test_idioms_are_rewritten(kind):
    torch.manual_seed(0)
    model = nn.Sequential(kind()).double()
    model.train(kind is not Normalised)
    compiled = moefx.compile(model, example_inputs=(torch.randn(9, D, dtype=torch.float64),))
    for tokens in (1, 2, 9, 80):
        x = torch.randn(tokens, D, dtype=torch.float64)
        buffers = {n: b.clone() for n, b in model.named_buffers()}
        actual = compiled(x), dict(compiled.named_buffers())
        for n, b in buffers.items():
            model.get_submodule(n.rpartition(".")[0])._buffers[n.rpartition(".")[2]] = b
        torch.testing.assert_close(actual, (model(x), dict(model.named_buffers())))
        if kind is KeepsLosses:
            actual, expected = compiled[0].losses, model[0].losses
            assert actual["more"][1:] == ["z", None]
            torch.testing.assert_close(
                [actual["balance"], actual["more"][0]], [expected["balance"], expected["more"][0]]
            )
    assert moefx.blocks(compiled)[0].fallbacks == 0


class NormedScores(Loop):
    """Apply a functional norm without a weight."""

    def route(self, x):
        return super().route(F.rms_norm(x, (D,)))


EPS_OF_THE_DTYPE = {
    "a module in experts": lambda: Loop(lambda: nn.Sequential(nn.RMSNorm(D), Mlp())),
    "a module without a weight": lambda: Loop(lambda: nn.Sequential(nn.RMSNorm(D, elementwise_affine=False), Mlp())),
    "a function in the router": NormedScores,
}


@pytest.mark.sampled(6)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", EPS_OF_THE_DTYPE)
def test_a_norm_has_the_eps_of_its_dtype(kind, dtype):
    """Use the default eps of each dtype, for inputs small enough that eps matters.

    The numeric check runs in float64.
    """
    torch.manual_seed(0)
    model = nn.Sequential(EPS_OF_THE_DTYPE[kind]()).to(dtype)
    compiled = moefx.compile(model, example_inputs=(torch.randn(9, D, dtype=dtype),))
    for other_dtype in (dtype, torch.float64, torch.float32):
        a, b = copy.deepcopy(compiled).to(other_dtype), copy.deepcopy(model).to(other_dtype)
        x = 1e-4 * torch.randn(20, D, dtype=other_dtype)
        output, original_output = a(x).double(), b(x).double()
        assert (output - original_output).norm() <= 20 * torch.finfo(other_dtype).eps * original_output.norm()
        assert moefx.blocks(a)[0].fallbacks == 0


class Masked(nn.Module):
    """Run all experts on all tokens, and subtract the results of padding."""

    def __init__(self):
        super().__init__()
        self.gate, self.norm = nn.Linear(D, E), nn.LayerNorm(D)
        self.w1, self.w2 = nn.Parameter(torch.randn(E, D, H)), nn.Parameter(torch.randn(E, H, D))

    def forward(self, x, mask):
        scores = self.gate(x)
        best, ids = scores.topk(1, -1)
        w = torch.zeros_like(scores).scatter(-1, ids, best.sigmoid()) * mask[..., None]
        dense = torch.einsum("btd,edh->ebth", self.norm(x), self.w1).relu()
        return x + torch.einsum("ebth,ehd,bte->btd", dense, self.w2, w)


class WithoutPadding(Loop):
    """Select the tokens that are no padding, after a norm."""

    def __init__(self):
        super().__init__(Mlp, k=1)
        self.norm = nn.LayerNorm(D)

    def forward(self, x, mask):
        out = torch.zeros_like(x)
        out[mask] = super().forward(self.norm(x)[mask])
        return out


@pytest.mark.sampled(3)
@pytest.mark.parametrize("kind", [Masked, WithoutPadding])
@pytest.mark.parametrize("left", [0, 1, 5, 30, 63, 64])
def test_masks_that_leave_few_or_nearly_all(kind, left):
    torch.manual_seed(0)
    model = nn.ModuleDict({"moe": kind()}).double()
    model.forward = lambda x, mask: model["moe"](x, mask)
    example = torch.randn(4, 16, D, dtype=torch.float64), (torch.arange(64) < left).view(4, 16)
    compiled = moefx.compile(model, example_inputs=example)
    for part in (0.0, 0.1, 0.9, 1.0):
        x, mask = torch.randn(3, 20, D, dtype=torch.float64), torch.rand(3, 20) < part
        torch.testing.assert_close(compiled["moe"](x, mask), model["moe"](x, mask))
    assert moefx.blocks(compiled)[0].fallbacks == 0


class Given(Loop):
    """Get the routing from the parent, which has one router for all layers."""

    def forward(self, x, w, ids):
        return self.mixed(x, w, ids)


class SharedRouter(nn.Module):
    def __init__(self):
        super().__init__()
        self.router, self.layers = nn.Linear(D, E), nn.ModuleList(Given() for _ in range(2))

    def forward(self, x):
        w, ids = self.router(x).softmax(-1).topk(2, -1)
        for layer in self.layers:
            x = x + layer(x, w, ids)
        return x


def test_a_selection_among_the_arguments():
    model = SharedRouter().double()
    compiled = moefx.compile(model, example_inputs=(torch.randn(40, D, dtype=torch.float64),))
    assert [block.name for block in moefx.blocks(compiled)] == ["layers.0", "layers.1"]
    for tokens in (1, 7, 100):
        x = torch.randn(tokens, D, dtype=torch.float64)
        torch.testing.assert_close(compiled(x), model(x))
    assert all(block.fallbacks == 0 for block in moefx.blocks(compiled))


def test_a_split_by_the_size_is_refused():
    model = nn.Sequential(Chunks()).double()
    for tokens in (12, 40):
        with pytest.raises(moefx.NoMoEBlockFound):
            moefx.compile(model, example_inputs=(torch.randn(tokens, D, dtype=torch.float64),))


class AddsToItsInput(Loop):
    def forward(self, x):
        x.add_(super().forward(x.clone()))
        return x


class WritesACopy(Loop):
    def forward(self, x):
        y = super().forward(x.clone())
        x.copy_(y)
        return y


@pytest.mark.parametrize("kind", [AddsToItsInput, WritesACopy])
def test_returned_inputs_are_the_inputs(kind):
    model = nn.Sequential(kind()).double()
    compiled = moefx.compile(model, example_inputs=(torch.randn(9, D, dtype=torch.float64),))
    for run in (model, compiled):
        x = torch.randn(9, D, dtype=torch.float64)
        with torch.no_grad():
            y = run(x)
        assert (y is x) == (kind is AddsToItsInput)
        torch.testing.assert_close(x, y)


class ByTask(Loop):
    """Index a table by an integer buffer. All rows are equal at compile time."""

    def __init__(self):
        super().__init__(Mlp)
        self.register_buffer("task", torch.tensor(0))
        self.register_buffer("bias", torch.zeros(3, E))

    def route(self, x):
        return (self.gate(x) + self.bias[self.task]).softmax(-1).topk(self.k, -1)


@pytest.mark.exhaustive  # `test_stored_integers` has similar buffers
def test_a_row_by_an_integer_buffer():
    """Use the row of the current buffer, whether or not the block is rewritten."""
    model = nn.Sequential(ByTask()).double()
    compiled = moefx.compile(model, example_inputs=(torch.randn(9, D, dtype=torch.float64),), strict=False)
    model[0].bias.normal_()
    for task in range(3):
        model[0].task.fill_(task)
        x = torch.randn(20, D, dtype=torch.float64)
        torch.testing.assert_close(compiled(x), model(x))


class GivenTask(Loop):
    def __init__(self):
        super().__init__(Mlp)
        self.bias = nn.Embedding(3, E)

    def forward(self, x, task):
        return self.mixed(x, *(self.gate(x) + self.bias(task)).softmax(-1).topk(2))


def test_a_row_by_an_integer_input():
    """Index a table by an input; other numbers have no row."""
    torch.manual_seed(0)
    model = GivenTask().double()
    compiled = moefx.compile(model, example_inputs=(torch.randn(9, D, dtype=torch.float64), torch.tensor(2)))
    for task in range(3):
        x = torch.randn(7, D, dtype=torch.float64)
        torch.testing.assert_close(compiled(x, torch.tensor(task)), model(x, torch.tensor(task)))
    assert moefx.blocks(compiled)[0].fallbacks == 0


class SkipsLoners(Loop):
    def forward(self, x):
        w, ids = self.route(x)
        out = torch.zeros_like(x)
        for e in range(E):
            t, k = torch.where(ids == e)
            if len(t) < 2:
                continue
            out = out.index_add(0, t, self.expert(e, x[t], w[t, k, None]))
        return out


class Images(Loop):
    """Route the pixels of `[B, C, H, W]`, and scale each channel of the result."""

    def __init__(self, channels=D):
        super().__init__(lambda: nn.Sequential(nn.Linear(channels, 8), nn.ReLU(), nn.Linear(8, channels)))
        self.gate = nn.Linear(channels, E, bias=False)
        self.norm, self.scale = nn.BatchNorm2d(channels), nn.Parameter(torch.rand(channels))

    def forward(self, x):
        x = self.norm(x)
        rows = x.movedim(1, -1)
        out = super().forward(rows.flatten(0, -2)).view_as(rows).movedim(-1, 1)
        return x + self.scale[:, None, None] * out


@pytest.mark.sampled(3)
@pytest.mark.parametrize("channels, training", [(D, True), (D, False), (3, False)])
def test_channels_that_have_parameters_are_no_experts(channels, training):
    """Accept images with more channels than pixels: captures may have images wider than the number of channels."""
    torch.manual_seed(0)
    model = nn.Sequential(Images(channels)).double().train(training)
    compiled = moefx.compile(model, example_inputs=(torch.randn(2, channels, 4, 5, dtype=torch.float64),))
    for shape in ((2, 4, 5), (1, 3, 7)):
        x = torch.randn(shape[0], channels, *shape[1:], dtype=torch.float64)
        torch.testing.assert_close(compiled(x), model(x))
    assert moefx.blocks(compiled)[0].fallbacks == 0


class OneHot(Loop):
    """Find the tokens of an expert by a one-hot mask per slot."""

    def mixed(self, x, w, ids):
        out = torch.zeros_like(x)
        for e, mask in enumerate(F.one_hot(ids, E).permute(2, 1, 0)):
            k, t = torch.where(mask)
            out[t] += self.expert(e, F.layer_norm(x[t], (D,)), w[t, k, None])
        return out


class WeightsFirst(Loop):
    def expert(self, e, x, w):
        return self.experts[e](F.rms_norm(x * w, (D,)))


@pytest.mark.parametrize("kind", [OneHot, WeightsFirst])
def test_all_experts_are_chosen(kind):
    """Accept that each expert has the rows of all tokens."""
    torch.manual_seed(0)
    model = nn.Sequential(kind(k=E)).double()
    compiled = moefx.compile(model, example_inputs=(torch.randn(9, D, dtype=torch.float64),))
    for tokens in (1, 3, 40):
        x = torch.randn(tokens, D, dtype=torch.float64)
        torch.testing.assert_close(compiled(x), model(x))
    assert moefx.blocks(compiled)[0].fallbacks == 0


class Quantised(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("q", torch.randint(-127, 128, (D, D), dtype=torch.int8))
        self.scale = nn.Parameter(torch.rand(D, 1) / 100)

    def forward(self, x):
        return F.linear(x, self.q.to(x.dtype) * self.scale)


def prune_experts():
    expert = Mlp()
    torch.nn.utils.prune.l1_unstructured(expert.up, "weight", 0.3)
    return expert


class KeepsWeights(Loop):
    """Store a list of copies of the experts' weights."""

    kept = None

    def expert(self, e, x, w):
        if self.kept is None:
            self.kept = [expert.up.weight.detach().clone() for expert in self.experts]
        return self.experts[e].down(F.linear(x, self.kept[e])) * w


class Counts(Loop):
    calls = 0

    def forward(self, x):
        self.calls += 1
        return super().forward(x)


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        (SkipsLoners, "len"),
        (Counts, "sets its attribute calls"),
        (
            lambda: Loop(lambda: nn.Sequential(Quantised(), nn.ReLU(), Quantised())),
            r"computed from integers .* \[experts.0.",
        ),
        (lambda: Loop(prune_experts), r"set attributes in their forward, .* \[experts.0.up.weight, "),
        (lambda: KeepsWeights(Mlp), r"set attributes in their forward, .* \[kept\]"),
    ],
)
def test_blocks_that_are_no_token_choice_are_refused(kind, why):
    with pytest.raises(moefx.NoMoEBlockFound, match=why):
        moefx.compile(nn.Sequential(kind()), example_inputs=(torch.randn(9, D),))


@pytest.mark.parametrize(
    "make",
    [
        torch.zeros_like,
        lambda x: x.new_zeros(x.shape),
        lambda x: x.new_zeros(len(x), D),
        lambda x: x.new_full(x.shape, 0.0),
        lambda x: x.new_empty(x.shape).zero_(),
        lambda x: torch.zeros(x.shape, dtype=x.dtype),
        lambda x: x * 0,
    ],
)
def test_ways_to_make_the_output(make):
    class Made(Loop):
        def forward(self, x):
            (w, ids), out = self.route(x), make(x)
            for e, expert in enumerate(self.experts):
                t, k = torch.where(ids == e)
                out = out.index_add(0, t, expert(x[t]) * w[t, k, None])
            return out

    model, x = Made(), torch.randn(9, D)
    compiled = moefx.compile(copy.deepcopy(model), example_inputs=(x,))
    torch.testing.assert_close(compiled(x), model(x))


class Positions(Loop):
    """Add positions from a table of 32 rows."""

    def __init__(self):
        super().__init__()
        self.positions = nn.Parameter(torch.randn(32, D))

    def forward(self, x):
        return super().forward(x + self.positions[torch.arange(len(x))])


def test_a_table_that_is_too_short_for_many_tokens_is_named():
    (refused,) = moefx.explain(Positions(), (torch.randn(9, D),)).refused
    assert "an index is out of bounds for axes of the sizes [32]" in refused.reason
    assert "give it rows for more tokens" in refused.remedy


class Heads(nn.Module):
    """Mixture of attention heads, whose biases a reshape splits."""

    def __init__(self):
        super().__init__()
        self.qkv, self.router, self.out = nn.Linear(16, 48), nn.Linear(16, 4, bias=False), nn.Linear(16, 16)

    def forward(self, x):
        batch, length, _ = x.shape
        q, k, v = self.qkv(x).reshape(batch, length, 3, 4, 4).permute(2, 0, 3, 1, 4)
        scores = (q @ k.transpose(-1, -2)).softmax(-1) @ v
        gates = self.router(x).softmax(-1)
        gates = gates * torch.zeros_like(gates).scatter(-1, gates.topk(2).indices, 1.0)
        return self.out(torch.einsum("bhsd,bsh->bshd", scores, gates).reshape(x.shape))


def test_a_mixture_of_heads_is_refused_for_a_reason():
    (refused,) = moefx.explain(Heads(), (torch.randn(2, 6, 16),)).refused
    assert "itself failed" not in refused.reason and "share one selection" in refused.reason
