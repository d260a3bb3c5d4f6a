"""Plain blocks that loop over experts, selected experts or tokens (idioms I1, I7, I8, I9)."""

from __future__ import annotations

import torch
import torch.nn as nn
import torch.nn.functional as F

from .case import D, E, H, K
from .parts import Gated, Mlp, make_stack
from .plain_suite import PLAIN


# I1: loop over experts, tokens found with a mask
@PLAIN.case(
    "i1_one_hot_index_add",
    "I1",
    "match",
    "one-hot mask, where, index_add_; weight after the expert",
)
class OneHotLoop(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(D, E, bias=False)
        self.experts = nn.ModuleList(Gated() for _ in range(E))

    def forward(self, x):
        flat = x.reshape(-1, D)
        prob = self.gate(flat).softmax(-1, dtype=torch.float32 if x.dtype != torch.float64 else None)
        top, idx = prob.topk(K, dim=-1)
        top = (top / top.sum(-1, keepdim=True)).to(flat.dtype)
        out = torch.zeros_like(flat)
        chosen = F.one_hot(idx, E).permute(2, 1, 0)
        for e in range(E):
            slot, token = torch.where(chosen[e])
            y = self.experts[e](flat[token]) * top[token, slot].unsqueeze(-1)
            out.index_add_(0, token, y)
        return out.view_as(x)


@PLAIN.case(
    "i1b_where_plus_equals",
    "I1b",
    "match",
    "advanced-index +=, biased GELU experts, top-k before the softmax",
)
class CompareLoop(nn.Module):
    def __init__(self):
        super().__init__()
        self.router = nn.Linear(D, E)
        self.experts = nn.ModuleList(Mlp() for _ in range(E))

    def forward(self, x):
        shape = x.shape
        x = x.flatten(0, -2)
        score, pick = self.router(x).topk(K)
        share = score.softmax(-1)
        y = torch.zeros_like(x)
        for i, expert in enumerate(self.experts):
            row, col = torch.where(pick == i)
            y[row] += share[row, col, None] * expert(x[row])
        return y.view(shape)


@PLAIN.case(
    "i1c_any_mask_skip",
    "I1c",
    "match",
    "boolean mask with any(), empty experts skipped, sigmoid scores with a selection bias, gated shared expert",
)
class AnyMaskLoop(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(D, E, bias=False)
        self.register_buffer("selection_bias", torch.zeros(E))
        self.experts = nn.ModuleList(Gated() for _ in range(E))
        self.shared = Gated()
        self.shared_gate = nn.Linear(D, 1, bias=False)

    def forward(self, x):
        t = x.reshape(-1, D)
        score = self.gate(t).sigmoid()
        idx = (score + self.selection_bias).topk(K, dim=-1).indices
        w = score.gather(-1, idx)
        w = 2.5 * w / (w.sum(-1, keepdim=True) + 1e-9)
        out = torch.zeros_like(t)
        for e, expert in enumerate(self.experts):
            here = idx == e
            has_expert = here.any(-1)
            if not has_expert.any():
                continue
            out[has_expert] += expert(t[has_expert]) * (w * here).sum(-1)[has_expert].unsqueeze(-1)
        out = out + torch.sigmoid(self.shared_gate(t)) * self.shared(t)
        return out.view_as(x)


@PLAIN.case(
    "i1d_top1_assignment",
    "I1d",
    "match",
    "top-1, rows assigned instead of added, probability applied once at the end; ReLU experts",
)
class AssignTop1(nn.Module):
    def __init__(self):
        super().__init__()
        self.switch = nn.Linear(D, E)
        self.experts = nn.ModuleList(Mlp(act=F.relu) for _ in range(E))

    def forward(self, x):
        t = x.reshape(-1, D)
        p, route = self.switch(t).softmax(-1).max(-1)
        out = torch.zeros_like(t)
        for e in range(E):
            ids = torch.eq(route, e).nonzero(as_tuple=True)[0]
            out[ids, :] = self.experts[e](t[ids, :])
        return (out * p.unsqueeze(-1)).view_as(x)


@PLAIN.case(
    "i1e_flat_weights_lists",
    "I1e",
    "match",
    "weights of all experts in flat matrices that are chunked; indices through python lists",
)
class FlatListLoop(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(D, E, bias=False)
        self.w_in, self.w_gate, self.w_out = make_stack(E * H, D), make_stack(E * H, D), make_stack(E * H, D)

    def forward(self, x):
        t = x.reshape(-1, D)
        w, idx = self.gate(t).softmax(-1).topk(K, -1)
        w = w / torch.norm(w, p=2, dim=-1, keepdim=True)
        out = torch.zeros_like(t)
        a, b, c = (m.chunk(E, dim=0) for m in (self.w_gate, self.w_in, self.w_out))
        hit = F.one_hot(idx, num_classes=E).permute(2, 1, 0)
        for e in range(E):
            k, n = torch.where(hit[e])
            if n.shape[0] == 0:
                continue
            k, n = k.tolist(), n.tolist()
            z = t[None, n].reshape(-1, D)
            z = (F.silu(z @ a[e].t()) * (z @ b[e].t())) @ c[e]
            out.index_add_(0, torch.tensor(n), z * w[n, k, None])
        return out.view_as(x)


# I7: python loop over the tokens
@PLAIN.case(
    "i7_token_loop",
    "I7",
    "match",
    "token by token, expert by expert; slow, but a user's first draft",
)
class TokenLoop(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(D, E)
        self.experts = nn.ModuleList(Mlp() for _ in range(E))

    def forward(self, x):
        t = x.reshape(-1, D)
        w, idx = self.gate(t).softmax(-1).topk(K, -1)
        rows = []
        for n in range(t.shape[0]):
            acc = 0
            for k in range(K):
                acc = acc + w[n, k] * self.experts[int(idx[n, k])](t[n : n + 1])
            rows.append(acc)
        return torch.cat(rows).view_as(x)


# I8: tokens repeated k times, boolean masks
@PLAIN.case(
    "i8_repeat_interleave_masks",
    "I8",
    "match",
    "repeat_interleave, y[flat == e] = expert(...), shared expert, output scale after the combine",
)
class RepeatMask(nn.Module):
    def __init__(self, scale=1.7):
        super().__init__()
        self.gate = nn.Linear(D, E, bias=False)
        self.experts = nn.ModuleList(Gated() for _ in range(E))
        self.shared = Mlp()
        self.scale = scale

    def forward(self, x):
        t = x.reshape(-1, D)
        w, idx = self.gate(t).softmax(-1).topk(K, -1, sorted=False)
        many, flat = t.repeat_interleave(K, dim=0), idx.view(-1)
        y = torch.empty_like(many)
        for e in range(E):
            y[flat == e] = self.experts[e](many[flat == e])
        y = (y.view(*w.shape, -1) * w.unsqueeze(-1)).sum(1) * self.scale
        return y.view_as(x) + self.shared(x)


# I9: loop over the selected experts
@PLAIN.case(
    "i9_unique_hit_loop",
    "I9",
    "match",
    "torch.unique and .item(); index_select and index_add",
)
class UniqueLoop(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(D, E, bias=False)
        self.w1, self.w2, self.w3 = (
            nn.ModuleList(nn.Linear(a, b, bias=False) for _ in range(E)) for a, b in ((D, H), (H, D), (D, H))
        )

    def forward(self, x):
        t = x.reshape(-1, D)
        val, idx = self.gate(t).topk(K, -1)
        w = val.softmax(-1)
        out = t.new_zeros(t.shape)
        for e in torch.unique(idx):
            e = int(e.item())
            at = idx == e
            rows = at.any(-1).nonzero().squeeze(-1)
            slot = at[rows].int().argmax(-1, keepdim=True)
            z = t.index_select(0, rows)
            z = self.w2[e](F.silu(self.w1[e](z)) * self.w3[e](z))
            out.index_add_(0, rows, z * w.index_select(0, rows).gather(-1, slot))
        return out.view_as(x)


class StackedExperts(nn.Module):
    """Separate module of experts that gets indices and weights as inputs."""

    def __init__(self, d=D, act=F.silu):
        super().__init__()
        self.gate_up, self.down, self.act = make_stack(E, d, 2 * H), make_stack(E, H, d), act

    def forward(self, t, idx, w):
        out = torch.zeros_like(t, dtype=torch.promote_types(t.dtype, torch.float32))
        with torch.no_grad():
            mask = F.one_hot(idx, E).permute(2, 1, 0)
            hit = mask.sum((-1, -2)).nonzero()
        for e in hit:
            e = e[0]
            k, n = torch.where(mask[e])
            g, u = (t[n] @ self.gate_up[e]).chunk(2, -1)
            out.index_add_(0, n, ((self.act(g) * u) @ self.down[e] * w[n, k, None]).to(out.dtype))
        return out.to(t.dtype)


class GroupRouter(nn.Module):
    """Sigmoid scores, one of two groups, a bias for the selection only, renormalized and scaled weights."""

    def __init__(self, d=D):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(E, d))
        self.register_buffer("choice_bias", torch.zeros(E))

    def forward(self, t):
        logits = F.linear(t, self.weight)
        score = logits.sigmoid()
        choice = score + self.choice_bias
        best = choice.view(-1, 2, E // 2).topk(2, -1).values.sum(-1).topk(1, -1).indices
        allowed = torch.zeros(t.shape[0], 2, dtype=torch.bool).scatter_(1, best, True).repeat_interleave(E // 2, 1)
        idx = choice.masked_fill(~allowed, float("-inf")).topk(K, -1).indices
        w = score.gather(1, idx)
        return logits, 1.5 * w / (w.sum(-1, keepdim=True) + 1e-20), idx


@PLAIN.case(
    "i9a_submodules_tuple",
    "I9a",
    "match",
    "router and experts as submodules, transposed stacked weights, float32 accumulator, returns (output, logits)",
)
class HitLoopModules(nn.Module):
    def __init__(self):
        super().__init__()
        self.router, self.experts = GroupRouter(), StackedExperts()

    def forward(self, x):
        t = x.reshape(-1, D)
        logits, w, idx = self.router(t)
        return self.experts(t, idx, w).view_as(x), logits


@PLAIN.case(
    "i9a_latent_projection",
    "I9a",
    "match",
    "experts work in a smaller latent space: shared projections before and after",
)
class Latent(nn.Module):
    def __init__(self, m=20):
        super().__init__()
        self.router, self.experts = GroupRouter(), StackedExperts(d=m, act=F.gelu)
        self.squeeze, self.widen = nn.Linear(D, m, bias=False), nn.Linear(m, D, bias=False)

    def forward(self, x):
        t = x.reshape(-1, D)
        _, w, idx = self.router(t)
        return self.widen(self.experts(self.squeeze(t), idx, w)).view_as(x)


@PLAIN.case(
    "i9b_module_dict",
    "I9b",
    "match",
    "top-1, experts in a ModuleDict, loop over the sorted set of the chosen ones",
)
class DictExperts(nn.Module):
    def __init__(self):
        super().__init__()
        self.classifier = nn.Linear(D, E, bias=False)
        self.experts = nn.ModuleDict({f"expert_{e}": Mlp(act=F.relu) for e in range(E)})

    def forward(self, x):
        t = x.reshape(-1, D)
        p, best = self.classifier(t).softmax(-1).max(-1)
        out = torch.zeros_like(t)
        for e in sorted(set(best.tolist())):
            rows = (best == e).nonzero().squeeze(-1)
            out = out.index_add(0, rows, self.experts[f"expert_{e}"](t[rows]) * p[rows, None])
        return out.view_as(x)
