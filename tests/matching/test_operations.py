"""Ops on rows and results of experts: rewritten blocks equal the original, and most are rewritten."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import moefx
from moefx.passes.rewriting.expert_emission import ExpertBodyEmitter

from ..blocks import D, E, Gated, H, K, Loop, Mlp

T = 23


def make_number(n):
    return torch.tensor(n, dtype=torch.double)


class Does(Mlp):
    """Apply `op` to the hidden units."""

    op = staticmethod(F.relu)

    def forward(self, x):
        return self.down(self.op(self.up(x)))


def check_block(block: nn.Module) -> None:
    """Check that the block is rewritten and that values and gradients equal the original."""
    block = block.double()
    x = torch.randn(T, D, dtype=torch.double)
    compiled = moefx.compile(copy.deepcopy(block), plan=moefx.Plan(validation="symbolic"), example_inputs=(x,))
    assert len(moefx.blocks(compiled)) == 1
    moefx.verify(compiled, block, (torch.randn(T, D, dtype=torch.double),), routings=False).raise_if_failed()


HIDDEN = {
    "ldexp": lambda h: torch.ldexp(h, make_number(2.0)),
    "float_power": lambda h: torch.float_power(h.abs() + 1, torch.tensor(1.5)),
    "power_of_two": lambda h: torch.pow(make_number(2.0), h),
    "xlogy": lambda h: torch.xlogy(h, make_number(2.0)),
    "xlogy_of_a_number": lambda h: torch.xlogy(make_number(2.0), h.abs() + 1),
    "xlog1py": lambda h: torch.special.xlog1py(h, make_number(0.5)),
    "clamp_by_tensors": lambda h: h.clamp(-make_number(0.5), make_number(2.0)),
    "clamp_min_of_a_tensor": lambda h: torch.clamp_min(h, make_number(0.0)),
    "maximum": lambda h: torch.maximum(h, make_number(0.0)),
    "copysign": lambda h: torch.copysign(h, -make_number(0.5)),
    "logaddexp": lambda h: torch.logaddexp(h, make_number(0.5)),
    "fmod": lambda h: torch.fmod(h, make_number(0.5)),
    "lerp": lambda h: torch.lerp(h, 2 * h, make_number(0.5)),
    "cumprod": lambda h: h.cumprod(-1),
    "logcumsumexp": lambda h: h.logcumsumexp(-1),
    "padding": lambda h: F.silu(F.pad(h[:, :-3], (1, 2), value=0.5)),
}


@pytest.mark.sampled(6)
@pytest.mark.parametrize("name", HIDDEN)
def test_numbers_that_are_tensors(name):
    torch.manual_seed(0)
    check_block(Loop(type("Op", (Does,), {"op": staticmethod(HIDDEN[name])})))


class Joined(Gated):
    """Join the weights, and the biases, of two layers."""

    def forward(self, x):
        bias = None if self.gate.bias is None else torch.cat([self.gate.bias, self.up.bias])
        gate, up = F.linear(x, torch.cat([self.gate.weight, self.up.weight]), bias).chunk(2, -1)
        return self.down(F.silu(gate) * up)


class JoinedStacks(nn.Module):
    """Join parts of stacked parameters, and a part of all experts or padding."""

    def __init__(self, join, width):
        super().__init__()
        self.router, self.join = nn.Linear(D, E, bias=False), join
        self.gate, self.up = (nn.Parameter(torch.randn(E, H, D) / 3) for _ in range(2))
        self.shared, self.down = nn.Parameter(torch.randn(H, D) / 3), nn.Parameter(torch.randn(E, D, width) / 3)

    def forward(self, x):
        w, ids = self.router(x).softmax(-1).topk(K)
        out = torch.zeros_like(x)
        for e in range(E):
            t, k = torch.where(ids == e)
            y = F.linear(F.silu(F.linear(x[t], self.join(self, e))), self.down[e])
            out = out.index_add(0, t, y * w[t, k, None])
        return out


STACKS = {
    "of_experts": (lambda b, e: torch.cat([b.gate[e], b.up[e]]), 2 * H),
    "and_a_shared_one": (lambda b, e: torch.cat([b.shared, b.up[e]]), 2 * H),
    "and_padding": (lambda b, e: F.pad(b.up[e], (0, 0, 0, 3), value=0.5), H + 3),
}


class JoinedRows(Loop):
    """Join a vector of all experts to the rows, on either side."""

    def __init__(self, first):
        super().__init__(lambda: nn.Sequential(nn.LayerNorm(D + 4), nn.Linear(D + 4, H), nn.SiLU(), nn.Linear(H, D)))
        self.first, self.shared = first, nn.Parameter(torch.randn(4))

    def expert(self, e, x, w):
        pieces = [x, self.shared.expand(len(x), -1)]
        return super().expert(e, torch.cat(pieces[::-1] if self.first else pieces, -1), w)


@pytest.mark.parametrize("bias", [False, True])
def test_joined_weights_of_separate_experts(bias):
    torch.manual_seed(0)
    check_block(Loop(lambda: Joined(bias)))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", STACKS)
def test_joined_weights_of_stacked_experts(name):
    """Join them once for all experts, not once for each row."""
    torch.manual_seed(0)
    check_block(block := JoinedStacks(*STACKS[name]))
    compiled = moefx.compile(
        block, plan=moefx.Plan(validation="symbolic"), example_inputs=(torch.randn(T, D).double(),)
    )
    assert "expert_rows" not in moefx.history(compiled, "").snapshots[0].graph.code


@pytest.mark.sampled(1)
@pytest.mark.parametrize("first", [False, True])
def test_a_shared_vector_joined_to_rows(first):
    torch.manual_seed(0)
    check_block(JoinedRows(first))


class Scaled(Mlp):
    """Scale the result by a number that is computed from a parameter."""

    def __init__(self, shape, reduce):
        super().__init__()
        self.scale, self.reduce = nn.Parameter(torch.randn(shape) + 2), reduce

    def forward(self, x):
        return super().forward(x) * self.reduce(self.scale)


REDUCTIONS = {
    "prod_of_all_axes": ((2, 3), lambda s: s.prod()),
    "mean_of_a_scalar": ((), lambda s: s.mean(-1)),
    "softmax_of_a_scalar": ((), lambda s: s.softmax(0)),
    "cumsum_of_a_scalar": ((), lambda s: s.cumsum(0)),
    "largest_of_a_scalar": ((), lambda s: s.max(0)[0] + s.amax() + s.logsumexp(-1)),
    "moved_scalar": ((), lambda s: s.flip(0) + s.index_select(0, torch.tensor([0]))),
}


@pytest.mark.parametrize("name", REDUCTIONS)
def test_numbers_of_parameters(name):
    torch.manual_seed(0)
    check_block(Loop(lambda: Scaled(*REDUCTIONS[name])))


IN_FLOAT32 = {  # bfloat16 has eight bits, so it would lose the hidden units
    "cumsum": lambda h: F.pad(h, (1, 0), value=4096.0).cumsum(-1, dtype=torch.float32)[:, 1:] - 4096,
    "softmax": lambda h: 1000 * ((h / 1000).softmax(-1, dtype=torch.float32) - 1 / H),
    "prod": lambda h: 1000 * ((1 + h[:, :2].float() / 1000).prod(-1, keepdim=True, dtype=torch.float32) - 1) + h,
}


@pytest.mark.parametrize("name", IN_FLOAT32)
def test_bfloat16_experts_that_compute_in_float32(name):
    torch.manual_seed(0)
    op = IN_FLOAT32[name]
    model = Loop(type("Op", (Does,), {"op": staticmethod(lambda h: op(h).to(h.dtype))})).bfloat16()
    x = torch.randn(T, D, dtype=torch.bfloat16)
    compiled = moefx.compile(copy.deepcopy(model), plan=moefx.Plan(validation="symbolic"), example_inputs=(x,))
    assert len(moefx.blocks(compiled)) == 1
    torch.testing.assert_close(compiled(x), model(x), rtol=0.05, atol=0.05)


class Conv1D(nn.Module):
    """Compute a linear layer by `addmm`, as GPT-2 does, and subtract it in float32."""

    def __init__(self):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(D, D)), nn.Parameter(torch.randn(D))

    def forward(self, x):
        y = torch.addmm(self.bias, x, self.weight)
        return 100 * (y.float() - (x.double() @ self.weight.double() + self.bias).float())


def test_addmm_under_autocast():
    """Round the result as the original does: the experts return the rounding errors."""
    torch.manual_seed(0)
    model, x = Loop(Conv1D), torch.randn(T, D)
    with torch.autocast("cpu", torch.bfloat16):
        compiled = moefx.compile(copy.deepcopy(model), plan=moefx.Plan(validation="symbolic"), example_inputs=(x,))
        assert len(moefx.blocks(compiled)) == 1
        torch.testing.assert_close(compiled(x), model(x), rtol=0.05, atol=0.05)


def test_a_result_of_another_shape_is_refused(monkeypatch):
    """Refuse a mistake in the emission instead of broadcasting a wrong shape."""
    monkeypatch.setattr(ExpertBodyEmitter, "_emit_axis_op", lambda self, term, inner: inner.node)
    block = Loop(type("Op", (Does,), {"op": staticmethod(lambda h: h * h.prod(-1, keepdim=True))}))
    with pytest.raises(moefx.errors.NoMoEBlockFound, match=r"prod with a result of shape \[\].*blocks.py:\d+"):
        moefx.compile(block, plan=moefx.Plan(validation="symbolic"), example_inputs=(torch.randn(T, D),))


def round_down(y):
    return torch.div(y, 0.25, rounding_mode="floor") * 0.25


def round_to_eight_bits(y):
    return y.to(torch.float8_e4m3fn).to(y.dtype)


def round_straight_through(y):
    return y + (round_down(y) - y).detach()


class Rounds(Loop):
    """Round the results of experts before or after their weights: a sum of rounded numbers is no rounded sum."""

    def __init__(self, rounds, behind=False):
        super().__init__(Mlp)
        self.rounds, self.behind = rounds, behind

    def expert(self, e, x, w):
        y = self.experts[e](x)
        return self.rounds(y * w) if self.behind else self.rounds(y) * w


@pytest.mark.sampled(3)
@pytest.mark.parametrize("behind", [False, True])
@pytest.mark.parametrize("rounds", [round_down, round_to_eight_bits, round_straight_through, torch.sign, torch.trunc])
def test_results_that_are_rounded(rounds, behind):
    torch.manual_seed(0)
    check_block(Rounds(rounds, behind))


class Compared(Loop):
    """Use the weight only in comparisons, so that it gets no gradient."""

    def __init__(self, factor):
        super().__init__(Mlp)
        self.factor = factor

    def expert(self, e, x, w):
        return self.experts[e](x) * self.factor(w)


@pytest.mark.parametrize("factor", [lambda w: w > 0.3, lambda w: torch.where(w > 0.3, 1.0, 0.5)])
def test_weights_that_are_only_compared(factor):
    torch.manual_seed(0)
    check_block(Compared(factor))


def test_a_row_of_equal_numbers_is_fused():
    """Broadcast a number that stands for a row, so that the experts remain one op."""
    block = Compared(lambda w: torch.where(w > 0.3, torch.ones(D, dtype=w.dtype), 0.5)).double()
    compiled = moefx.compile(
        block, plan=moefx.Plan(validation="symbolic"), example_inputs=(torch.randn(T, D).double(),)
    )
    assert "expert_mlp" in moefx.history(compiled, "").graph.code


class Embedded(nn.Module):
    """Store the experts' matrices as rows of embeddings."""

    def __init__(self, **options):
        super().__init__()
        self.gate = nn.Linear(D, E, bias=False)
        self.up, self.down = nn.Embedding(E, D * 24, **options), nn.Embedding(E, 24 * D, **options)

    def forward(self, x):
        w, ids = self.gate(x).softmax(-1).topk(2)
        up, down = self.up(ids).view(-1, 2, D, 24), self.down(ids).view(-1, 2, 24, D)
        h = F.silu(torch.einsum("td,tkdh->tkh", x, up))
        return (torch.einsum("tkh,tkhd->tkd", h, down) * w[..., None]).sum(1)


def test_experts_with_embeddings_are_rewritten():
    torch.manual_seed(0)
    check_block(Embedded())


@pytest.mark.parametrize("option", [{"padding_idx": 0}, {"scale_grad_by_freq": True}, {"sparse": True}])
def test_embeddings_with_special_gradients_are_refused(option):
    """Refuse options of embeddings that change the gradient of a row."""
    with pytest.raises(moefx.errors.NoMoEBlockFound):
        moefx.compile(Embedded(**option), plan=moefx.Plan(validation="symbolic"), example_inputs=(torch.randn(T, D),))


def test_a_tensor_of_an_outer_scope():
    """Refuse a tensor that may differ in the next call."""
    other = torch.tensor(2.0)
    with pytest.raises(moefx.errors.NoMoEBlockFound, match="neither a parameter nor a buffer"):
        block = Loop(type("Op", (Does,), {"op": staticmethod(lambda h: torch.ldexp(h, other))}))
        moefx.compile(block, example_inputs=(torch.randn(T, D),))


def test_complex_numbers_are_not_followed():
    def turned(h):
        return torch.view_as_real(torch.view_as_complex(h.unflatten(-1, (-1, 2))) * (1 + 2j)).flatten(-2)

    with pytest.raises(moefx.errors.NoMoEBlockFound, match="view_as_real"):
        moefx.compile(Loop(type("Op", (Does,), {"op": staticmethod(turned)})), example_inputs=(torch.randn(T, D),))


class WithoutTheSmallest(Loop):
    """Ignore the smallest weights of a batch."""

    def forward(self, x):
        w, ids = self.route(x)
        return self.mixed(x, w * (w >= w.detach().flatten().quantile(0.1)), ids)


def test_a_quantile_of_the_weights():
    model = WithoutTheSmallest(Mlp).double()
    compiled = moefx.compile(copy.deepcopy(model), example_inputs=(torch.randn(9, D, dtype=torch.float64),))
    for tokens in (1, 9, 60):
        x = torch.randn(tokens, D, dtype=torch.float64)
        torch.testing.assert_close(compiled(x), model(x))


class PaddedRows(Loop):
    """Pad each expert's rows to a multiple of four, which adds none for zero or four rows."""

    def expert(self, e, x, w):
        n = len(x)
        return super().expert(e, F.pad(x, (0, 0, 0, -n % 4)), F.pad(w, (0, 0, 0, -n % 4)))[:n]


@pytest.mark.exhaustive
def test_rows_that_are_padded_to_a_multiple():
    check_block(PaddedRows(Mlp, 1))


class WeighedBySizes(Loop):
    """Scale by a tensor computed from sizes."""

    def __init__(self, make):
        super().__init__(Mlp)
        self.make = make

    def forward(self, x):
        w, ids = self.route(x)
        return self.mixed(x, w / self.make(len(x)), ids)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "make",
    [torch.tensor, lambda n: torch.asarray(n, dtype=torch.double), lambda n: torch.tensor(2 * min(n, 40) + 1)],
    ids=["tensor", "asarray", "clamped"],
)
def test_a_tensor_of_a_size(make):
    model = WeighedBySizes(make).double()
    compiled = moefx.compile(model, example_inputs=(torch.randn(T, D, dtype=torch.double),))
    for tokens in (1, 2, T, 41, 100):
        x = torch.randn(tokens, D, dtype=torch.double)
        torch.testing.assert_close(compiled(x), model(x))
    assert moefx.blocks(compiled)[0].fallbacks == 0
