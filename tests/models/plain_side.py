"""Plain blocks with side conditions, and look-alikes that must be refused."""

from __future__ import annotations

import torch
import torch.nn as nn
import torch.nn.functional as F

from .case import D, E, H, K
from .parts import Gated, Mlp
from .plain_loops import CompareLoop, HitLoopModules, OneHotLoop
from .plain_suite import PLAIN


# side conditions
@PLAIN.case(
    "x_noisy_router",
    "I1",
    "match",
    "random noise in the router: with the same seed the same result",
    rng=True,
)
class NoisyRouter(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate, self.noise = nn.Linear(D, E, bias=False), nn.Linear(D, E, bias=False)
        self.experts = nn.ModuleList(Gated() for _ in range(E))

    def forward(self, x):
        t = x.reshape(-1, D)
        logits = self.gate(t) + torch.randn(t.shape[0], E, dtype=t.dtype) * F.softplus(self.noise(t))
        val, idx = logits.topk(K, -1)
        w = val.softmax(-1)
        out = torch.zeros_like(t)
        for e in range(E):
            n, k = torch.where(idx == e)
            out = out.index_add(0, n, self.experts[e](t[n]) * w[n, k, None])
        return out.view_as(x)


@PLAIN.case(
    "x_in_place_jitter",
    "I1",
    "match",
    "multiplies its own input in place before it routes: the caller's tensor must change too",
    rng=True,
)
class InPlaceJitter(OneHotLoop):
    def forward(self, x):
        if self.training:
            x *= torch.empty_like(x).uniform_(0.99, 1.01)
        return super().forward(x)


@PLAIN.case(
    "x_bare_block",
    "I1",
    "match",
    "the model is the block itself: its name is the empty string",
    bare=True,
)
class BareBlock(CompareLoop):
    """`CompareLoop` without a host."""


@PLAIN.case(
    "x_two_blocks",
    "I9a",
    "match",
    "two blocks in one model, each must be found; both return their logits",
    blocks=("first", "second"),
)
class TwoBlocks(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = HitLoopModules(), HitLoopModules()

    def forward(self, x):
        a, la = self.first(x)
        b, lb = self.second(F.layer_norm(x + a, (D,)))
        return a + b, la, lb


# negatives
@PLAIN.case(
    "n_dense_softmax",
    "I3",
    "refuse",
    "softmax over all experts and no selection: every expert matters for every token, nothing to skip",
)
class DenseSoftmax(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(D, E)
        self.experts = nn.ModuleList(Mlp() for _ in range(E))

    def forward(self, x):
        w = self.gate(x).softmax(-1)
        return torch.einsum("...e,...ed->...d", w, torch.stack([f(x) for f in self.experts], -2))


@PLAIN.case(
    "n_embedding_experts",
    "I5e",
    "refuse",
    "one-neuron experts in embedding tables, looked up per token: retrieval, not a grouped product",
)
class Retrieval(nn.Module):
    def __init__(self, n=64):
        super().__init__()
        self.keys, self.down, self.up = nn.Linear(D, n, bias=False), nn.Embedding(n, D), nn.Embedding(n, D)

    def forward(self, x):
        s, i = self.keys(x).topk(4, -1)
        h = F.gelu(torch.einsum("...d,...kd->...k", x, self.down(i))) * s.softmax(-1)
        return torch.einsum("...k,...kd->...d", h, self.up(i))


@PLAIN.case(
    "n_expert_choice",
    "I10",
    "refuse",
    "expert choice: each expert picks its tokens, so one token's result depends on all the others",
)
class ExpertChoice(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(D, E, bias=False)
        self.experts = nn.ModuleList(Gated() for _ in range(E))

    def forward(self, x):
        t = x.reshape(-1, D)
        w, rows = self.gate(t).softmax(-1).t().topk(max(1, t.shape[0] * 2 // E), -1)
        out = torch.zeros_like(t)
        for e in range(E):
            out.index_add_(0, rows[e], self.experts[e](t[rows[e]]) * w[e, :, None])
        return out.view_as(x)


@PLAIN.case(
    "n_soft_slots",
    "I10",
    "refuse",
    "soft slots: each slot is a mean over all tokens",
)
class SoftSlots(nn.Module):
    def __init__(self, slots=2):
        super().__init__()
        self.phi = nn.Parameter(torch.empty(D, E * slots))
        self.experts = nn.ModuleList(Gated() for _ in range(E))

    def forward(self, x):
        logits = x @ self.phi
        mixed = logits.softmax(-2).transpose(-1, -2) @ x
        done = torch.cat([f(s) for f, s in zip(self.experts, mixed.chunk(E, -2))], -2)
        return logits.softmax(-1) @ done


@PLAIN.case(
    "n_random_drop",
    "I11",
    "refuse",
    "drops tokens over capacity in a random order and passes them through unchanged",
    rng=True,
)
class RandomDrop(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(D, E)
        self.experts = nn.ModuleList(Gated() for _ in range(E))

    def forward(self, x):
        t = x.reshape(-1, D)
        cap = max(1, t.shape[0] // E)
        p, best = self.gate(t).softmax(-1).max(-1)
        out = t.clone()
        for e in range(E):
            rows = (best == e).nonzero().squeeze(-1)
            rows = rows[torch.randperm(len(rows))][:cap]
            out[rows] = self.experts[e](t[rows])
        return (out * p.unsqueeze(-1)).view_as(x)


class BatchNormExpert(Mlp):
    def __init__(self):
        super().__init__()
        self.bn = nn.BatchNorm1d(H)

    def forward(self, x):
        h = self.fc_in(x)
        return self.fc_out(F.relu(self.bn(h) if len(x) > 1 else h))


@PLAIN.case(
    "n_batch_norm_experts",
    "I1b",
    "refuse",
    "batch norm in the experts: a row's result depends on which other rows the expert got",
)
class BatchNormExperts(CompareLoop):
    def __init__(self):
        super().__init__()
        self.experts = nn.ModuleList(BatchNormExpert() for _ in range(E))


class MixingExpert(Mlp):
    def forward(self, x):
        return super().forward(x - x.mean(0, keepdim=True))


@PLAIN.case(
    "n_token_mixing_experts",
    "I1b",
    "refuse",
    "experts subtract the mean over their own tokens: not row by row",
)
class MixingExperts(CompareLoop):
    def __init__(self):
        super().__init__()
        self.experts = nn.ModuleList(MixingExpert() for _ in range(E))


class DropoutExpert(Mlp):
    def forward(self, x):
        return self.fc_out(F.dropout(self.act(self.fc_in(x)), 0.3, self.training))


@PLAIN.case(
    "n_dropout_experts",
    "I1b",
    "either",
    "dropout in the experts, train mode: the random stream depends on the order of the experts; refuse, "
    "or draw the same numbers",
    rng=True,
)
class DropoutExperts(CompareLoop):
    def __init__(self):
        super().__init__()
        self.experts = nn.ModuleList(DropoutExpert() for _ in range(E))


@PLAIN.case(
    "n_unequal_experts",
    "I1b",
    "either",
    "experts of different widths: not stackable; refuse, or group the equal ones",
)
class UnequalExperts(CompareLoop):
    def __init__(self):
        super().__init__()
        self.experts = nn.ModuleList(Mlp(h=H if e % 2 else H + 8) for e in range(E))


@PLAIN.case(
    "n_plain_layers",
    "-",
    "refuse",
    "a gated MLP with a ModuleList of layers: no router, no experts (explain() need not list it)",
    no_candidate=True,
)
class PlainStack(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Gated() for _ in range(E))
        self.gate = nn.Linear(D, E)

    def forward(self, x):
        for i, f in enumerate(self.layers):
            x = F.layer_norm(x + f(x) * self.gate(x)[..., i : i + 1].sigmoid(), (D,))
        return x
