"""Modules that resemble token choice: refused, or rewritten exactly if a part is token choice."""

from __future__ import annotations

import torch
import torch.nn as nn
import torch.nn.functional as F

from ..case import D, E, H, K
from ..parts import Gated, Mlp, make_stack
from .suite import UNSEEN


@UNSEEN.case("n_attention_heads", "-", "refuse", "attention with a list of heads: no choice", no_candidate=True)
class AttentionHeads(nn.Module):
    def __init__(self):
        super().__init__()
        self.heads = nn.ModuleList([nn.Linear(D, 12) for _ in range(4)])
        self.out = nn.Linear(16, D)

    def forward(self, x):
        qkv = (h(x).chunk(3, -1) for h in self.heads)
        return self.out(torch.cat([F.scaled_dot_product_attention(q, k, v) for q, k, v in qkv], -1))


@UNSEEN.case("n_multi_gate", "I3", "refuse", "MMoE: a dense softmax over the experts for each of two tasks")
class MultiGate(nn.Module):
    def __init__(self):
        super().__init__()
        self.experts = nn.ModuleList([Mlp() for _ in range(E)])
        self.gates = nn.ModuleList([nn.Linear(D, E) for _ in range(2)])
        self.towers = nn.ModuleList([nn.Linear(D, D) for _ in range(2)])

    def forward(self, x):
        outputs = torch.stack([f(x) for f in self.experts], -2)
        views = [(g(x).softmax(-1).unsqueeze(-1) * outputs).sum(-2) for g in self.gates]
        return sum(tower(v) for tower, v in zip(self.towers, views))


@UNSEEN.case("n_sinkhorn_base", "I10", "refuse", "BASE: a balanced assignment of all tokens to experts", bare=False)
class BaseLayer(nn.Module):
    """Each expert takes its best free tokens until none are left: the experts choose."""

    def __init__(self):
        super().__init__()
        self.centroids = nn.Parameter(torch.empty(E, D))
        self.experts = nn.ModuleList([Mlp() for _ in range(E)])

    def forward(self, x):
        t = x.reshape(-1, D)
        scores = t @ self.centroids.t()
        quota, free, out = -(-t.shape[0] // E), torch.ones(t.shape[0], dtype=torch.bool), torch.zeros_like(t)
        for e, f in enumerate(self.experts):
            free_scores = scores[:, e].masked_fill(~free, float("-inf"))
            rows = free_scores.topk(min(quota, int(free.sum()))).indices
            free[rows] = False
            alpha = torch.sigmoid(scores[rows, e]).unsqueeze(-1)
            out = out.index_add(0, rows, alpha * f(t[rows]) + (1 - alpha) * t[rows])
        return out.view_as(x)


@UNSEEN.case("n_product_keys", "I5e", "refuse", "product-key memory: values from a table by two sub-keys")
class ProductKeys(nn.Module):
    def __init__(self, n=8):
        super().__init__()
        self.n = n
        self.query = nn.Linear(D, 32)
        self.keys1, self.keys2 = nn.Parameter(torch.empty(n, 16)), nn.Parameter(torch.empty(n, 16))
        self.values = nn.EmbeddingBag(n * n, D, mode="sum")

    def forward(self, x):
        q1, q2 = self.query(x.reshape(-1, D)).chunk(2, -1)
        s1, i1 = (q1 @ self.keys1.t()).topk(K)
        s2, i2 = (q2 @ self.keys2.t()).topk(K)
        scores = (s1[:, :, None] + s2[:, None, :]).flatten(1)
        ids = (i1[:, :, None] * self.n + i2[:, None, :]).flatten(1)
        best, at = scores.topk(K)
        return self.values(ids.gather(1, at), per_sample_weights=best.softmax(-1)).view_as(x)


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn = nn.RNN(D, D, batch_first=True)

    def forward(self, rows):
        return self.rnn(rows.unsqueeze(0))[0].squeeze(0) if len(rows) else rows


class SelfAttending(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.v = nn.Linear(D, D), nn.Linear(D, D)

    def forward(self, rows):
        q = self.q(rows)
        return torch.softmax(q @ q.t() / D**0.5, -1) @ self.v(rows)


class CumulativeMean(Mlp):
    def forward(self, rows):
        return super().forward(rows.cumsum(0) / torch.arange(1, len(rows) + 1, dtype=rows.dtype)[:, None])


class ColumnNormed(Mlp):
    """Normalize every hidden unit over the rows of the expert, without a norm module."""

    def forward(self, rows):
        h = self.fc_in(rows)
        if len(rows) > 1:
            h = (h - h.mean(0)) / (h.var(0, unbiased=False) + 1e-5).sqrt()
        return self.fc_out(F.relu(h))


class SortedRows(Mlp):
    """Add to every row the next one of the same expert."""

    def forward(self, rows):
        return super().forward(rows + rows.roll(1, 0))


class LoopOf(nn.Module):
    def __init__(self, expert):
        super().__init__()
        self.gate = nn.Linear(D, E, bias=False)
        self.experts = nn.ModuleList([expert() for _ in range(E)])

    def forward(self, x):
        t = x.reshape(-1, D)
        w, idx = self.gate(t).softmax(-1).topk(K, -1)
        out = torch.zeros_like(t)
        for e, f in enumerate(self.experts):
            n, k = torch.where(idx == e)
            if n.numel():
                out.index_add_(0, n, f(t[n]) * w[n, k, None])
        return out.view_as(x)


for name, expert, why in (
    ("n_recurrent_experts", Recurrent, "an RNN runs over the rows of each expert"),
    ("n_attention_experts", SelfAttending, "rows of one expert attend to each other"),
    ("n_cumulative_mean_experts", CumulativeMean, "an expert sees the running mean of its rows"),
    ("n_column_norm_experts", ColumnNormed, "hidden units normalised over the rows of the expert"),
    ("n_neighbour_rows", SortedRows, "every row is added to the next row of the same expert"),
):
    UNSEEN.case(name, "I1", "refuse", why)(lambda expert=expert: LoopOf(expert))


@UNSEEN.case(
    "n_mixture_of_depths",
    "I10",
    "refuse",
    "the best quarter of the tokens goes through the layer: no experts",
    no_candidate=True,
)
class MixtureOfDepths(nn.Module):
    def __init__(self):
        super().__init__()
        self.router = nn.Linear(D, 1)
        self.blocks = nn.ModuleList([Gated() for _ in range(2)])

    def forward(self, x):
        t = x.reshape(-1, D)
        score = self.router(t).squeeze(-1)
        best = score.topk(max(1, t.shape[0] // 4)).indices
        y = t
        for block in self.blocks:
            rows = y[best]
            y = y.index_add(0, best, block(rows) * score[best, None].sigmoid())
        return y.view_as(x)


@UNSEEN.case("n_merged_weights", "I10", "refuse", "SMEAR: the weights of the experts are averaged, then applied once")
class MergedWeights(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(D, E, bias=False)
        self.w1, self.w2 = make_stack(E, D, H), make_stack(E, H, D)

    def forward(self, x):
        p = self.gate(x.mean(1)).softmax(-1)
        w1, w2 = torch.einsum("be,edh->bdh", p, self.w1), torch.einsum("be,ehd->bhd", p, self.w2)
        return F.gelu(x @ w1) @ w2


@UNSEEN.case(
    "n_merged_top_k_weights",
    "I5",
    "refuse",
    "the chosen experts' matrices are averaged before the non-linearity",
)
class MergedTopK(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(D, E, bias=False)
        self.w1, self.w2 = make_stack(E, D, H), make_stack(E, H, D)

    def forward(self, x):
        t = x.reshape(-1, D)
        w, idx = self.gate(t).softmax(-1).topk(K, -1)
        w1 = torch.einsum("nk,nkdh->ndh", w, self.w1[idx])
        w2 = torch.einsum("nk,nkhd->nhd", w, self.w2[idx])
        return torch.einsum("nh,nhd->nd", F.gelu(torch.einsum("nd,ndh->nh", t, w1)), w2).view_as(x)


@UNSEEN.case("n_chain_of_experts", "I1", "either", "the second expert reads the first one's output")
class ChainOfExperts(LoopOf):
    def __init__(self):
        super().__init__(Mlp)

    def forward(self, x):
        t = x.reshape(-1, D)
        w, idx = self.gate(t).softmax(-1).topk(K, -1)
        for k in range(K):
            nxt = t.clone()
            for e, f in enumerate(self.experts):
                n = (idx[:, k] == e).nonzero().squeeze(-1)
                nxt[n] = t[n] + f(t[n]) * w[n, k, None]
            t = nxt
        return t.view_as(x)


@UNSEEN.case("n_product_of_experts", "I1", "either", "the chosen experts' outputs are multiplied, not added")
class ProductOfExperts(LoopOf):
    def __init__(self):
        super().__init__(Mlp)

    def forward(self, x):
        t = x.reshape(-1, D)
        w, idx = self.gate(t).softmax(-1).topk(K, -1)
        out = torch.ones_like(t)
        for e, f in enumerate(self.experts):
            n, k = torch.where(idx == e)
            out = out.index_put((n,), out[n] * (1 + f(t[n]) * w[n, k, None]))
        return out.view_as(x)


@UNSEEN.case("n_maximum_of_experts", "I3c", "either", "element-wise maximum over the chosen experts' outputs")
class MaximumOfExperts(LoopOf):
    def __init__(self):
        super().__init__(Mlp)

    def forward(self, x):
        t = x.reshape(-1, D)
        w, idx = self.gate(t).softmax(-1).topk(K, -1)
        outputs = torch.stack([f(t) for f in self.experts], 1)
        picked = outputs.gather(1, idx.unsqueeze(-1).expand(-1, -1, D)) * w.unsqueeze(-1)
        return picked.max(1).values.view_as(x)


@UNSEEN.case("n_global_output_norm", "I1", "either", "batch norm over all tokens between the experts and the weights")
class GlobalOutputNorm(LoopOf):
    def __init__(self):
        super().__init__(Mlp)
        self.scale = nn.Parameter(torch.ones(D))

    def forward(self, x):
        t = x.reshape(-1, D)
        w, idx = self.gate(t).softmax(-1).max(-1)
        out = torch.zeros_like(t)
        for e, f in enumerate(self.experts):
            n = (idx == e).nonzero().squeeze(-1)
            out[n] = f(t[n])
        out = (out - out.mean(0)) / (out.std(0, unbiased=False) + 1e-5) * self.scale
        return (out * w[:, None]).view_as(x)


@UNSEEN.case("n_load_dependent_choice", "I9", "refuse", "rows of a loaded expert are dropped at random",
                rng=True)  # fmt: skip
class LoadDependent(LoopOf):
    def __init__(self):
        super().__init__(Mlp)

    def forward(self, x):
        t = x.reshape(-1, D)
        p, idx = self.gate(t).softmax(-1).max(-1)
        out = t.clone()
        for e, f in enumerate(self.experts):
            rows = (idx == e).nonzero().squeeze(-1)
            rows = rows[torch.rand(len(rows)) < 4 / max(1, len(rows))]
            out[rows] = f(t[rows])
        return (out * p[:, None]).view_as(x)
