"""Ops on rows and results of experts: rewritten blocks equal the original, and most are rewritten."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import moefx

from ..blocks import D, E, Loop, Mlp

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
}


@pytest.mark.sampled(6)
@pytest.mark.parametrize("name", HIDDEN)
def test_numbers_that_are_tensors(name):
    torch.manual_seed(0)
    check_block(Loop(type("Op", (Does,), {"op": staticmethod(HIDDEN[name])})))


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
