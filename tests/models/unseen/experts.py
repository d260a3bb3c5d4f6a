"""Unusual experts: other shapes and activations, shared parts, identities."""

from __future__ import annotations

import torch
import torch.nn as nn
import torch.nn.functional as F

from ..case import D, E, H, K
from ..parts import Gated, Mlp, make_stack
from .suite import UNSEEN


def route(gate, t, k=K):
    w, idx = gate(t).softmax(-1).topk(k, -1)
    return w / w.sum(-1, keepdim=True), idx


class Loop(nn.Module):
    """Loop over experts that `expert()` creates."""

    def __init__(self, expert, k=K, count=E):
        super().__init__()
        self.k = k
        self.gate = nn.Linear(D, count, bias=False)
        self.experts = nn.ModuleList([expert() for _ in range(count)])

    def run(self, e, rows):
        return self.experts[e](rows)

    def forward(self, x):
        t = x.reshape(-1, D)
        w, idx = route(self.gate, t, self.k)
        out = torch.zeros_like(t)
        for e in range(len(self.experts)):
            n, k = torch.where(idx == e)
            out.index_add_(0, n, self.run(e, t[n]) * w[n, k, None])
        return out.view_as(x)


UNSEEN.case("s_expert_pre_norm", "I1", "match", "LayerNorm of its own in front of every expert")(
    lambda: Loop(lambda: nn.Sequential(nn.LayerNorm(D), nn.Linear(D, H), nn.GELU(), nn.Linear(H, D)))
)
UNSEEN.case("s_expert_three_layers", "I1", "match", "experts of three linear layers")(
    lambda: Loop(
        lambda: nn.Sequential(
            nn.Linear(D, H),
            nn.ReLU(),
            nn.Linear(H, H + 4),
            nn.LeakyReLU(0.2),
            nn.Linear(H + 4, D, bias=False),
        )
    )
)
UNSEEN.case("s_expert_single_linear", "I1", "match", "an expert is one linear layer")(
    lambda: Loop(lambda: nn.Linear(D, D), k=3)
)
UNSEEN.case("s_expert_prelu", "I1", "match", "an activation with a parameter of its own in every expert")(
    lambda: Loop(lambda: nn.Sequential(nn.Linear(D, H), nn.PReLU(H), nn.Linear(H, D)))
)
UNSEEN.case("s_expert_mish", "I1", "match", "an activation that is itself composed: x * tanh(softplus(x))")(
    lambda: Loop(lambda: Mlp(act=lambda h: h * F.softplus(h).tanh()))
)
UNSEEN.case("s_expert_reglu", "I1", "match", "ReLU-gated experts")(lambda: Loop(lambda: Gated(act=F.relu)))
UNSEEN.case("s_expert_geglu_tanh", "I1", "match", "GELU(tanh)-gated experts")(
    lambda: Loop(lambda: Gated(act=lambda g: F.gelu(g, approximate="tanh")))
)
UNSEEN.case("s_expert_bilinear", "I1", "match", "gated without a non-linearity")(
    lambda: Loop(lambda: Gated(act=lambda g: g))
)
UNSEEN.case("s_expert_softmax_hidden", "I1", "match", "softmax over the hidden units: not pointwise, still row by row")(
    lambda: Loop(lambda: Mlp(act=lambda h: h.softmax(-1)))
)
UNSEEN.case("s_expert_glu", "I1", "match", "F.glu: the second half is the gate, through a sigmoid")(
    lambda: Loop(lambda: nn.Sequential(nn.Linear(D, 2 * H), nn.GLU(dim=-1), nn.Linear(H, D)))
)


class Skip(nn.Module):
    """Residual connection inside the expert, with post-norm."""

    def __init__(self):
        super().__init__()
        self.inner, self.ln = Mlp(act=F.elu), nn.LayerNorm(D)

    def forward(self, x):
        return self.ln(x + self.inner(x))


UNSEEN.case("s_expert_residual_inside", "I1", "match", "norm(x + f(x)) in every expert")(lambda: Loop(Skip))


class Conv(nn.Module):
    """Convolutions of kernel size 1, with rows as the length axis."""

    def __init__(self):
        super().__init__()
        self.c1, self.c2 = nn.Conv1d(D, H, kernel_size=1), nn.Conv1d(H, D, kernel_size=1)

    def forward(self, x):
        if len(x) == 0:  # a convolution rejects an empty sequence
            return x
        return self.c2(F.relu(self.c1(x.t().unsqueeze(0)))).squeeze(0).t()


UNSEEN.case("s_expert_conv1x1", "I1", "match", "experts as nn.Conv1d with kernel size 1")(lambda: Loop(Conv))


class ClampedLoop(Loop):
    """Clamp rows: if one expert has all tokens, its rows look like a node with a row per token."""

    def run(self, e, rows):
        return self.experts[e](rows.clamp(-2, 2).abs())


UNSEEN.case(
    "s_clamped_rows", "I1", "match", "the rows are clamped in the loop over the experts", num_experts=4, live=2
)(lambda: ClampedLoop(Gated, count=4))


@UNSEEN.case(
    "s_moe_plus_plus", "I2", "match", "MoE++: FFN experts, one that copies, one that is a constant, one that is zero"
)
class MoEPlusPlus(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(D, E, bias=False)
        self.down, self.up = nn.Linear(D, H, bias=False), nn.Linear(H, D, bias=False)
        self.experts = nn.ModuleList([Mlp(H, D) for _ in range(E - 3)])
        self.constant = nn.Parameter(torch.empty(H))

    def forward(self, x):
        t = x.reshape(-1, D)
        w, idx = route(self.gate, t)
        z = self.down(t)
        out = torch.zeros_like(z)
        for e, expert in enumerate(self.experts):
            n, k = torch.where(idx == e)
            out.index_add_(0, n, expert(z[n].clamp(-5, 5)) * w[n, k, None])
        n, k = torch.where(idx == E - 3)
        out.index_add_(0, n, z[n] * w[n, k, None])
        n, k = torch.where(idx == E - 2)
        out.index_add_(0, n, self.constant * w[n, k, None])
        return self.up(out).view_as(x)


class BiasApart(nn.Module):
    """Return the output bias separately, as Megatron's linear layers do."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(D, H), nn.Linear(H, D, bias=False)
        self.bias = nn.Parameter(torch.empty(D))

    def forward(self, x):
        return self.down(F.gelu(self.up(x))), self.bias


class BiasApartLoop(Loop):
    def run(self, e, rows):
        y, bias = self.experts[e](rows)
        return y + bias.expand_as(y)


UNSEEN.case("s_expert_returns_bias", "I1", "match", "an expert returns (output, bias)")(
    lambda: BiasApartLoop(BiasApart)
)


class DropoutExpert(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(D, H), nn.ReLU(), nn.Dropout(0.5), nn.Linear(H, D), nn.Dropout(0.1))

    def forward(self, x):
        return self.net(x)


UNSEEN.case(
    "s_expert_dropout_eval",
    "I1",
    "match",
    "dropout in the experts, eval mode: nothing is dropped",
    eval_mode=True,
)(lambda: Loop(DropoutExpert))


@UNSEEN.case("s_lora_experts", "I5", "match", "a shared base layer plus low-rank experts (mixture of LoRAs)")
class LoraExperts(nn.Module):
    def __init__(self, rank=4):
        super().__init__()
        self.base = nn.Linear(D, D)
        self.router = nn.Linear(D, E, bias=False)
        self.lora_a, self.lora_b = make_stack(E, rank, D), make_stack(E, D, rank)
        self.scaling = 2.0 / rank

    def forward(self, x):
        t = x.reshape(-1, D)
        w, idx = route(self.router, t)
        gates = torch.zeros(t.shape[0], E, dtype=t.dtype).scatter(1, idx, w)
        low = torch.einsum("nd,erd->ner", t, self.lora_a)
        delta = torch.einsum("ner,eor,ne->no", low, self.lora_b, gates)
        return (self.base(t) + delta * self.scaling).view_as(x)


@UNSEEN.case("s_lora_on_frozen_experts", "I1", "match", "every expert is a frozen weight plus its own LoRA pair")
class LoraOnFrozen(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(D, E, bias=False)
        self.weight = nn.Parameter(torch.empty(E, D, D), requires_grad=False)
        self.a, self.b = make_stack(E, D, 4), make_stack(E, 4, D)

    def forward(self, x):
        t = x.reshape(-1, D)
        w, idx = route(self.gate, t)
        out = torch.zeros_like(t)
        for e in range(E):
            n, k = torch.where(idx == e)
            out.index_add_(0, n, F.gelu(t[n] @ self.weight[e] + t[n] @ self.a[e] @ self.b[e]) * w[n, k, None])
        return out.view_as(x)


@UNSEEN.case(
    "s_zero_copy_constant",
    "I1",
    "match",
    "MoE++: zero, copy and constant experts next to the real ones",
    num_experts=E + 3,
)
class ZeroCopyConstant(nn.Module):
    def __init__(self):
        super().__init__()
        self.router = nn.Linear(D, E + 3, bias=False)
        self.experts = nn.ModuleList([Gated() for _ in range(E)])
        self.constant = nn.Parameter(torch.empty(D))

    def forward(self, x):
        t = x.reshape(-1, D)
        w, idx = route(self.router, t, 3)
        out = torch.zeros_like(t)
        for e in range(E):
            n, k = torch.where(idx == e)
            out.index_add_(0, n, self.experts[e](t[n]) * w[n, k, None])
        n, k = torch.where(idx == E + 1)
        out.index_add_(0, n, t[n] * w[n, k, None])
        n, k = torch.where(idx == E + 2)
        out.index_add_(0, n, self.constant.expand(len(n), D) * w[n, k, None])
        return out.view_as(x)


@UNSEEN.case(
    "s_identity_experts_dense",
    "I2",
    "match",
    "LongCat: ids >= E are identity experts, their weights summed",
    num_experts=12,
)
class IdentityExperts(nn.Module):
    def __init__(self):
        super().__init__()
        self.classifier = nn.Linear(D, 12, bias=False)
        self.experts = nn.ModuleList([Gated() for _ in range(E)])

    def forward(self, x):
        t = x.reshape(-1, D)
        w, idx = route(self.classifier, t, 4)
        identity = (w * (idx >= E)).sum(-1, keepdim=True)
        out = t * identity
        for e, f in enumerate(self.experts):
            selected = idx == e
            rows = selected.any(-1)
            out[rows] = out[rows] + f(t[rows]) * (w * selected).sum(-1, keepdim=True)[rows]
        return out.view_as(x)


@UNSEEN.case("s_shared_as_expert_zero", "I8", "match", "the shared expert is number E in the same list, slot K for all")
class SharedAsExpert(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(D, E, bias=False)
        self.experts = nn.ModuleList([Gated() for _ in range(E + 1)])

    def forward(self, x):
        t = x.reshape(-1, D)
        w, idx = route(self.gate, t)
        idx = torch.cat([idx, torch.full_like(idx[:, :1], E)], dim=1)
        w = torch.cat([w, torch.ones_like(w[:, :1])], dim=1)
        rows, flat = t.repeat_interleave(K + 1, 0), idx.flatten()
        y = torch.zeros_like(rows)
        for e, f in enumerate(self.experts):
            y[flat == e] = f(rows[flat == e])
        return (y.view(-1, K + 1, D) * w.unsqueeze(-1)).sum(1).view_as(x)


@UNSEEN.case("s_shared_first_layer", "I1b", "match", "one up-projection for all, a down-projection per expert")
class SharedFirstLayer(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate, self.up = nn.Linear(D, E), nn.Linear(D, H)
        self.down = nn.ModuleList([nn.Linear(H, D) for _ in range(E)])

    def forward(self, x):
        t = x.reshape(-1, D)
        w, idx = route(self.gate, t)
        h, out = F.silu(self.up(t)), torch.zeros_like(t)
        for e, f in enumerate(self.down):
            n, k = torch.where(idx == e)
            out[n] += f(h[n]) * w[n, k, None]
        return out.view_as(x)


@UNSEEN.case("s_per_expert_scale", "I1", "match", "a scalar and a vector scale per expert, indexed by the expert id")
class PerExpertScale(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(D, E, bias=False)
        self.experts = nn.ModuleList([Gated() for _ in range(E)])
        self.expert_scale = nn.Parameter(torch.empty(E))
        self.layer_scale = nn.Parameter(torch.empty(E, D))

    def forward(self, x):
        t = x.reshape(-1, D)
        w, idx = route(self.gate, t)
        w = w * self.expert_scale[idx]
        out = torch.zeros_like(t)
        for e, f in enumerate(self.experts):
            n, k = torch.where(idx == e)
            out.index_add_(0, n, self.layer_scale[e] * f(t[n]) * w[n, k, None])
        return out.view_as(x)


@UNSEEN.case("s_learned_swish_beta", "I9a", "match", "stacked experts, a learned swish slope per expert and unit")
class LearnedSwish(nn.Module):
    def __init__(self):
        super().__init__()
        self.router = nn.Linear(D, E, bias=False)
        self.w1, self.w2 = make_stack(E, D, 2 * H), make_stack(E, H, D)
        self.beta = nn.Parameter(torch.empty(E, H))

    def forward(self, x):
        t = x.reshape(-1, D)
        w, idx = route(self.router, t)
        out = torch.zeros_like(t)
        for e in idx.unique():
            n, k = torch.where(idx == e)
            g, u = (t[n] @ self.w1[e]).split(H, dim=-1)
            out = out.index_add(0, n, (g * torch.sigmoid(self.beta[e] * g) * u) @ self.w2[e] * w[n, k, None])
        return out.view_as(x)


@UNSEEN.case("s_parameter_list", "I1", "match", "weights of each expert in nn.ParameterList, torch.addmm")
class ParameterLists(nn.Module):
    def __init__(self):
        super().__init__()
        self.wg = nn.Parameter(torch.empty(D, E))
        self.fc1 = nn.ParameterList([nn.Parameter(torch.empty(D, H)) for _ in range(E)])
        self.fc2 = nn.ParameterList([nn.Parameter(torch.empty(H, D)) for _ in range(E)])
        self.bias1 = nn.ParameterList([nn.Parameter(torch.empty(H)) for _ in range(E)])

    def forward(self, x):
        t = x.reshape(-1, D)
        w, idx = torch.softmax(t @ self.wg, dim=-1).topk(K)
        out = torch.zeros_like(t)
        for e, (w1, b1, w2) in enumerate(zip(self.fc1, self.bias1, self.fc2)):
            n, k = (idx == e).nonzero(as_tuple=True)
            out = out.index_add(0, n, torch.addmm(b1, t[n], w1).relu().mm(w2).mul(w[n, k].unsqueeze(1)))
        return out.view_as(x)


@UNSEEN.case("s_weights_in_embedding", "I5e", "either", "whole matrices of each expert stored as a row of an embedding")
class WeightsInEmbedding(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(D, E, bias=False)
        self.w_in, self.w_out = nn.Embedding(E, D * H), nn.Embedding(E, H * D)

    def forward(self, x):
        t = x.reshape(-1, D)
        w, idx = route(self.gate, t)
        h = torch.einsum("nd,nkdh->nkh", t, self.w_in(idx).view(-1, K, D, H)).relu()
        return torch.einsum("nkh,nkhd,nk->nd", h, self.w_out(idx).view(-1, K, H, D), w).view_as(x)


@UNSEEN.case(
    "s_conditioned_experts",
    "I1",
    "match",
    "experts modulated by a second per-token input (FiLM)",
    extra=lambda b, s, g, dtype: (torch.randn(b, s, 6, generator=g).to(dtype),),
)
class Conditioned(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(D, E, bias=False)
        self.up, self.down = make_stack(E, D, H), make_stack(E, H, D)
        self.film = make_stack(E, 6, H)

    def forward(self, x, cond):
        t, c = x.reshape(-1, D), cond.reshape(-1, 6)
        w, idx = route(self.gate, t)
        out = torch.zeros_like(t)
        for e in range(E):
            n, k = torch.where(idx == e)
            h = F.silu(t[n] @ self.up[e]) * (1 + c[n] @ self.film[e])
            out.index_add_(0, n, h @ self.down[e] * w[n, k, None])
        return out.view_as(x)


@UNSEEN.case(
    "s_clamped_silu_scores_inside",
    "I9a",
    "match",
    "clamps on both halves, weight multiplies the hidden units",
)
class WeightOnHidden(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(D, E, bias=False)
        self.w13, self.w2 = make_stack(E, 2 * H, D), make_stack(E, D, H)

    def forward(self, x):
        t = x.reshape(-1, D)
        w, idx = route(self.gate, t)
        out = torch.zeros_like(t)
        for e in torch.unique(idx).tolist():
            n, k = torch.nonzero(idx == e, as_tuple=True)
            g, u = F.linear(t[n], self.w13[e]).chunk(2, -1)
            h = F.silu(g.clamp(max=0.7)) * u.clamp(min=-0.7, max=0.7) * w[n, k].unsqueeze(-1)
            out[n] += F.linear(h, self.w2[e])
        return out.view_as(x)


@UNSEEN.case("s_fine_grained_top16", "I9a", "match", "32 small experts, 16 of them per token", num_experts=32, live=20)
class FineGrained(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(D, 32, bias=False)
        self.up, self.down = make_stack(32, D, 16), make_stack(32, 8, D)

    def forward(self, x):
        t = x.reshape(-1, D)
        w, idx = route(self.gate, t, 16)
        out = torch.zeros_like(t)
        for e in range(32):
            n, k = torch.where(idx == e)
            a, b = (t[n] @ self.up[e]).chunk(2, -1)
            out.index_add_(0, n, (F.silu(a) * b) @ self.down[e] * w[n, k, None])
        return out.view_as(x)


@UNSEEN.case(
    "s_all_experts_chosen",
    "I1",
    "either",
    "K = E: nothing is left out, still written as a top-k",
    num_experts=4,
)
class AllChosen(Loop):
    def __init__(self):
        super().__init__(Gated, k=4, count=4)


@UNSEEN.case("s_head_output", "I1", "match", "experts map to another width (classifier heads)", bare=True)
class OtherWidth(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(D, E, bias=False)
        self.experts = nn.ModuleList([nn.Sequential(nn.Linear(D, H), nn.Tanh(), nn.Linear(H, 10)) for _ in range(E)])

    def forward(self, x):
        t = x.reshape(-1, D)
        w, idx = route(self.gate, t)
        out = t.new_zeros(t.shape[0], 10)
        for e, f in enumerate(self.experts):
            n, k = torch.where(idx == e)
            out.index_add_(0, n, f(t[n]) * w[n, k, None])
        return out.view(*x.shape[:-1], 10)


@UNSEEN.case("s_two_kinds_of_experts", "I1", "either", "four wide experts and four narrow ones in two lists")
class TwoKinds(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(D, E, bias=False)
        self.wide = nn.ModuleList([Gated(h=2 * H) for _ in range(4)])
        self.narrow = nn.ModuleList([Mlp() for _ in range(4)])

    def forward(self, x):
        t = x.reshape(-1, D)
        w, idx = route(self.gate, t)
        out = torch.zeros_like(t)
        for e, f in enumerate([*self.wide, *self.narrow]):
            n, k = torch.where(idx == e)
            out.index_add_(0, n, f(t[n]) * w[n, k, None])
        return out.view_as(x)
