"""Experts without a matrix next to others: identities, constants, zeros, and mixtures of these."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import moefx

from ..blocks import D, Mlp

T, K = 23, 2


class Zero(nn.Module):
    def forward(self, x):
        return torch.zeros_like(x)


class Constant(nn.Module):
    def __init__(self):
        super().__init__()
        self.value = nn.Parameter(torch.randn(D))

    def forward(self, x):
        return self.value.expand_as(x)


class Blend(nn.Module):
    """Mix the input with a constant by two weights per row, as in MoE++."""

    def __init__(self):
        super().__init__()
        self.value, self.mix = nn.Parameter(torch.randn(D)), nn.Linear(D, 2)

    def shares(self, x):
        return self.mix(x).softmax(-1)

    def forward(self, x):
        share = self.shares(x)
        return share[..., 0:1] * x + share[..., 1:] * self.value


class Rows(nn.Module):
    """Loop that gathers the rows of each expert and adds its results."""

    def __init__(self, *experts):
        super().__init__()
        self.experts = nn.ModuleList(make() for make in experts)
        self.gate = nn.Linear(D, len(self.experts), bias=False)

    def forward(self, x):
        w, ids = self.gate(x).softmax(-1).topk(K)
        return self.sums(x, w / w.sum(-1, keepdim=True), ids)

    def sums(self, x, w, ids):
        out = torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            token, slot = torch.where(ids == e)
            if token.numel():
                out.index_add_(0, token, expert(x[token]) * w[token, slot, None])
        return out


class Masks(Rows):
    def sums(self, x, w, ids):
        out = torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            out = out + expert(x) * (w * (ids == e)).sum(-1, keepdim=True)
        return out


class Stacked(Rows):
    def sums(self, x, w, ids):
        outputs = torch.stack([expert(x) for expert in self.experts], 1)
        return (outputs.gather(1, ids[..., None].expand(-1, -1, D)) * w[..., None]).sum(1)


class OneHot(Rows):
    def sums(self, x, w, ids):
        out = torch.zeros_like(x)
        for expert, mask in zip(self.experts, F.one_hot(ids, len(self.experts)).permute(2, 1, 0), strict=True):
            slot, token = torch.where(mask)
            out.index_add_(0, token, expert(x[None, token].reshape(-1, D)) * w[token, slot, None])
        return out


KINDS = {
    "an_identity": (Mlp, nn.Identity, Mlp, Mlp),
    "the_first_is_one": (nn.Identity, Mlp, Mlp, Mlp),
    "the_last_is_one": (Mlp, Mlp, Mlp, nn.Identity),
    "several": (Mlp, Mlp, Mlp, nn.Identity, nn.Identity),
    "one_of_many": (*[Mlp] * 7, nn.Identity),
    "a_zero": (Mlp, Mlp, Zero, Mlp),
    "a_constant": (Mlp, Constant, Mlp, Mlp),
    "a_zero_and_a_constant": (Mlp, Mlp, Zero, Constant),
    "a_blend": (Mlp, Mlp, Blend, Mlp),
    "all": (Mlp, Mlp, Zero, nn.Identity, Blend, Constant),
}


@pytest.mark.sampled(15)
@pytest.mark.parametrize("style", [Rows, Masks, Stacked, OneHot])
@pytest.mark.parametrize("kind", KINDS)
def test_experts_without_matrices_among_others(kind, style):
    torch.manual_seed(0)
    block = style(*KINDS[kind]).double()
    compiled = moefx.compile(
        block, plan=moefx.Plan(validation="symbolic"), example_inputs=(torch.randn(T, D, dtype=torch.float64),)
    )
    assert len(moefx.blocks(compiled)) == 1
    for tokens in (T, 6, 1):
        moefx.verify(compiled, block, (torch.randn(tokens, D, dtype=torch.float64),), routings=False).raise_if_failed()
    assert not moefx.blocks(compiled)[0].fallbacks


class OfTheFirstRow(Blend):
    """Mix all rows by the two weights of the first row."""

    def shares(self, x):
        return super().shares(x)[:1]


def test_a_number_of_another_row_is_no_number_of_the_own():
    with pytest.raises(moefx.errors.NoMoEBlockFound, match="own input row"):
        moefx.compile(Rows(Mlp, Mlp, OfTheFirstRow, Mlp), example_inputs=(torch.randn(T, D),))


def test_the_first_of_all_tokens_is_one_for_all():
    torch.manual_seed(0)
    block = Stacked(Mlp, Mlp, OfTheFirstRow, Mlp).double()
    x = torch.randn(T, D, dtype=torch.float64)
    compiled = moefx.compile(block, plan=moefx.Plan(validation="symbolic"), example_inputs=(x,))
    for tokens in (T, 6):
        moefx.verify(compiled, block, (x[:tokens],), routings=False).raise_if_failed()
