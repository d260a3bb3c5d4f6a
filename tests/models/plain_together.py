"""Plain blocks that compute all experts at once, gather weights, fill capacity buffers or sort (I2 to I6)."""

from __future__ import annotations

import torch
import torch.nn as nn
import torch.nn.functional as F

from .case import D, E, H, K
from .parts import Gated, Mlp, make_stack
from .plain_suite import PLAIN


# I2: every expert on every token, masked
@PLAIN.case(
    "i2_dense_masked_sum",
    "I2",
    "match",
    "dense loop: each expert sees all tokens and is multiplied by its (mostly zero) gate",
)
class DenseMasked(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(D, E, bias=False)
        self.experts = nn.ModuleList(Gated() for _ in range(E))

    def forward(self, x):
        w, idx = self.gate(x).softmax(-1).topk(K, -1)
        total = torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            total = total + expert(x) * (w * (idx == e)).sum(-1, keepdim=True)
        return total


# I3: all experts computed together
@PLAIN.case(
    "i3_stack_times_sparse_gates",
    "I3",
    "match",
    "dense stack of all experts times gates that a scatter made sparse",
)
class ScatterGates(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(D, E, bias=False)
        self.fc1, self.fc2, self.fc3 = (
            nn.ModuleList(nn.Linear(a, b, bias=False) for _ in range(E)) for a, b in ((D, H), (D, H), (H, D))
        )

    def forward(self, x):
        logits = self.gate(x)
        val, idx = logits.topk(K, -1)
        gates = torch.zeros_like(logits).scatter(-1, idx, val.softmax(-1))
        outputs = torch.stack([self.fc3[e](F.silu(self.fc1[e](x)) * self.fc2[e](x)) for e in range(E)], dim=-2)
        return (outputs * gates.unsqueeze(-1)).sum(-2)


@PLAIN.case(
    "i3b_bmm_weight_before",
    "I3b",
    "match",
    "all experts on all tokens with bmm; sigmoid weight applied BEFORE the expert (needs f(0) = 0)",
)
class BmmBefore(nn.Module):
    def __init__(self):
        super().__init__()
        self.router = nn.Linear(D, E, bias=False)
        self.gate_up, self.down = make_stack(E, D, 2 * H), make_stack(E, H, D)

    def forward(self, x):
        t = x.reshape(-1, D)
        logits = self.router(t)
        val, idx = logits.topk(1, -1)
        score = torch.full_like(logits, float("-inf")).scatter(-1, idx, val).sigmoid()
        rows = t.unsqueeze(0).expand(E, -1, -1) * score.t().unsqueeze(-1)
        g, u = torch.bmm(rows, self.gate_up).chunk(2, -1)
        return torch.bmm(u * F.silu(g), self.down).sum(0).view_as(x)


@PLAIN.case(
    "i3c_stack_then_gather",
    "I3c",
    "match",
    "all experts stacked, then the top-k outputs gathered",
)
class StackGather(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(D, E)
        self.experts = nn.ModuleList(Mlp(act=F.relu) for _ in range(E))

    def forward(self, x):
        t = x.reshape(-1, D)
        w, idx = self.gate(t).sigmoid().topk(K, -1)
        all_out = torch.stack([f(t) for f in self.experts], 1)
        picked = all_out.gather(1, idx.unsqueeze(-1).expand(-1, -1, D))
        return (picked * w.unsqueeze(-1)).sum(1).view_as(x)


# I4: capacity dispatch / combine tensors
@PLAIN.case(
    "i4_capacity_einsum",
    "I4",
    "either",
    "capacity by position: dropped tokens get zero. Exact means the same drops; matching is preferred",
)
class CapacityEinsum(nn.Module):
    def __init__(self, factor=1.0):
        super().__init__()
        self.wg = nn.Linear(D, E, bias=False)
        self.w1, self.b1, self.w2, self.b2 = (
            make_stack(E, D, H),
            make_stack(E, 1, H),
            make_stack(E, H, D),
            make_stack(E, 1, D),
        )
        self.factor = factor

    def forward(self, x):
        t = x.reshape(-1, D)
        cap = max(2, int(self.factor * K * t.shape[0] / E))
        prob = self.wg(t).softmax(-1)
        w, idx = prob.topk(K, -1)
        w = w / w.sum(-1, keepdim=True)
        slots = F.one_hot(idx, E).transpose(0, 1).reshape(-1, E)  # first choices first
        place = ((slots.cumsum(0) - 1) * slots).sum(-1).view(K, -1).t()
        keep = (place < cap).to(t.dtype)
        spot = F.one_hot(place.clamp(max=cap - 1), cap).to(t.dtype) * keep.unsqueeze(-1)
        combine = torch.einsum("nk,nke,nkc->nec", w, F.one_hot(idx, E).to(t.dtype), spot)
        dispatch = (combine > 0).to(t.dtype)
        h = torch.einsum("nec,nd->ecd", dispatch, t)
        h = F.relu(torch.baddbmm(self.b1, h, self.w1))
        h = torch.baddbmm(self.b2, h, self.w2)
        aux = E * (prob.mean(0) * F.one_hot(idx[:, 0], E).to(t.dtype).mean(0)).sum()
        return torch.einsum("nec,ecd->nd", combine, h).view_as(x), aux


# I5: weights gathered per token
@PLAIN.case(
    "i5_gather_weights_interleaved",
    "I5",
    "match",
    "weights gathered per token, einsum; interleaved gate and up, clamp before the activation, biases",
)
class WeightGather(nn.Module):
    def __init__(self, limit=0.8, alpha=1.7):
        super().__init__()
        self.gate = nn.Linear(D, E)
        self.w1, self.b1, self.w2, self.b2 = (
            make_stack(E, 2 * H, D),
            make_stack(E, 2 * H),
            make_stack(E, D, H),
            make_stack(E, D),
        )
        self.limit, self.alpha = limit, alpha

    def forward(self, x):
        t = x.reshape(-1, D)
        top = self.gate(t).topk(K, -1)
        w = top.values.softmax(-1)
        h = torch.einsum("nkod,nd->nko", self.w1[top.indices], t) + self.b1[top.indices]
        g, u = h[..., 0::2].clamp(max=self.limit), h[..., 1::2].clamp(-self.limit, self.limit)
        h = g * torch.sigmoid(self.alpha * g) * (u + 1)
        y = torch.einsum("nkdo,nko->nkd", self.w2[top.indices], h) + self.b2[top.indices]
        return torch.einsum("nkd,nk->nd", y, w).view_as(x)


# I6: sort by expert, contiguous slices
@PLAIN.case(
    "i6_sort_counts_slices",
    "I6",
    "match",
    "argsort, bincount, slices; weight after; scatter back; a counter buffer as a side effect",
)
class SortSlices(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(D, E, bias=False)
        self.experts = nn.ModuleList(Gated() for _ in range(E))
        self.register_buffer("seen", torch.zeros(E))

    def forward(self, x):
        t = x.reshape(-1, D)
        w, idx = self.gate(t).softmax(-1).topk(K, -1)
        flat = idx.flatten()
        order = flat.argsort(stable=True)
        counts = torch.bincount(flat, minlength=E)
        with torch.no_grad():
            self.seen.add_(counts)
        rows, parts, start = t[order // K], [], 0
        for e, n in enumerate(counts.tolist()):
            if n:
                parts.append(self.experts[e](rows[start : start + n]))
            start += n
        y = torch.empty_like(rows)
        y[order] = torch.cat(parts)
        return (y.view(-1, K, D) * w.unsqueeze(-1)).sum(1).view_as(x)


@PLAIN.case(
    "i6b_split_weight_before_norm",
    "I6b",
    "match",
    "sort, split(list), weight BEFORE the expert, non-gated relu^2, RMS norm on every expert output, index_add",
)
class SplitLists(nn.Module):
    def __init__(self):
        super().__init__()
        self.router = nn.Linear(D, E, bias=False)
        self.w_in, self.w_out = make_stack(E, H, D), make_stack(E, D, H)
        self.norm = nn.Parameter(torch.ones(D))

    def forward(self, x):
        t = x.reshape(-1, D)
        val, idx = self.router(t).topk(K, -1)
        w = val.softmax(-1).flatten()
        by_expert = idx.flatten().sort(stable=True)
        token = by_expert.indices.div(K, rounding_mode="trunc")
        sizes = idx.flatten().bincount(minlength=E).tolist()
        rows = t[token] * w[by_expert.indices].unsqueeze(-1)
        outs = []
        for e, part in enumerate(rows.split(sizes)):
            h = F.linear(F.relu(F.linear(part, self.w_in[e])).square(), self.w_out[e])
            outs.append(h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-6) * self.norm)
        return torch.zeros_like(t).index_add(0, token, torch.cat(outs)).view_as(x)
