"""Blocks that take token ids: embedding, router and experts in one module."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import moefx

from ..blocks import D, E, H, Loop, Mlp
from ..models.case import run_and_differentiate

V = 30


class Embedded(Loop):
    def __init__(self, k=2):
        super().__init__(Mlp, k=k)
        self.embedding, self.norm, self.head = nn.Embedding(V, D), nn.LayerNorm(D), nn.Linear(D, V)

    def mixture(self, h):
        return super().forward(h.reshape(-1, D)).view_as(h)

    def forward(self, ids):
        return self.mixture(self.embedding(ids))


class LanguageModel(Embedded):
    def __init__(self):
        super().__init__()
        self.positions = nn.Embedding(64, D)

    def forward(self, ids):
        h = self.norm(self.embedding(ids) + self.positions(torch.arange(ids.shape[-1])))
        return self.head(h + self.mixture(h))


class Attending(Embedded):
    def forward(self, ids):
        h = self.embedding(ids)
        h = h + F.scaled_dot_product_attention(h, h, h, is_causal=True)
        return F.linear(h + self.mixture(self.norm(h)), self.embedding.weight)


class OneHot(Embedded):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(V, D)

    def forward(self, ids):
        return self.mixture(self.up(F.one_hot(ids, V).to(self.up.weight.dtype)))


class LearnedRoutes(Embedded):
    """Embed scores for each token id."""

    def __init__(self):
        super().__init__()
        self.scores = nn.Embedding(V, E)

    def forward(self, ids):
        h, (w, i) = self.embedding(ids), self.scores(ids).softmax(-1).topk(2, -1)
        return self.mixed(h.view(-1, D), w.view(-1, 2), i.view(-1, 2)).view_as(h)


class Hashed(Embedded):
    def forward(self, ids):
        h, out = self.embedding(ids), torch.zeros(*ids.shape, D, dtype=self.head.weight.dtype)
        for e, expert in enumerate(self.experts):
            out[ids % E == e] = expert(h[ids % E == e])
        return out


class AsManyIdsAsExperts(Embedded):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(E, D)

    def forward(self, ids):
        return super().forward(ids % E)


class Stacked(Embedded):
    """Stacked experts with biases."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Parameter(torch.randn(E, D, H)), nn.Parameter(torch.randn(E, H, D))
        self.up_bias, self.down_bias = nn.Parameter(torch.randn(E, H)), nn.Parameter(torch.randn(E, D))

    def mixture(self, h):
        h = h.reshape(-1, D)
        w, i = self.gate(h).softmax(-1).max(-1)
        a = F.silu(torch.einsum("td,tdh->th", h, self.up[i]) + self.up_bias[i])
        return (torch.einsum("th,thd->td", a, self.down[i]) + self.down_bias[i]) * w[:, None]


class TwoLayers(Embedded):
    """Route the second layer by the results of the first."""

    def __init__(self):
        super().__init__()
        self.second = Embedded(k=1)

    def forward(self, ids):
        h = self.embedding(ids)
        h = h + self.mixture(h)
        w, i = F.linear(h.view(-1, D), self.second.gate.weight).softmax(-1).topk(1, -1)
        return h + Loop.mixed(self.second, h.view(-1, D), w, i).view_as(h)


class InADict(nn.Module):
    """Keep the router and the list of experts in one `ModuleDict`."""

    def __init__(self):
        super().__init__()
        parts = Loop(Mlp)
        self.embedding, self.moe = nn.Embedding(V, D), nn.ModuleDict({"gate": parts.gate, "experts": parts.experts})

    def forward(self, ids):
        h = self.embedding(ids).view(-1, D)
        w, i = self.moe["gate"](h).softmax(-1).topk(2, -1)
        out, chosen = torch.zeros_like(h), F.one_hot(i, E).permute(2, 1, 0)
        for e, expert in enumerate(self.moe["experts"]):
            k, t = torch.where(chosen[e])
            out.index_add_(0, t, expert(h[t]) * w[t, k, None])
        return out.view(*ids.shape, D)


KINDS = [
    Embedded, LanguageModel, Attending, Hashed, LearnedRoutes, OneHot, AsManyIdsAsExperts, Stacked, TwoLayers, InADict
]  # fmt: skip


@pytest.mark.sampled(3)
@pytest.mark.parametrize("kind", KINDS)
def test_blocks_of_token_ids_are_rewritten(kind):
    torch.manual_seed(0)
    model = kind().double()
    compiled = moefx.compile(model, example_inputs=(torch.randint(0, V, (2, 9)),))
    for shape in ((2, 9), (3, 5), (1, 1)):
        ids = torch.randint(0, V, shape)
        x = torch.zeros(())  # its gradient is zero in both
        actual, expected = (
            [*run_and_differentiate(m, lambda _, ids, m=m: m(ids) + 0 * _, x, ids)] for m in (compiled, model)
        )
        torch.testing.assert_close(actual, expected)
    assert moefx.blocks(compiled)[0].fallbacks == 0
