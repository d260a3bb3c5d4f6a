"""Bases of mutants: one class per idiom, with hooks (`# @name`) at which a mutation inserts its line.

Names that a mutation may use at each hook:

    @logits    t [N, D], logits [N, E]
    @routed    ... and p [N, E], w [N, K], idx [N, K]
    @rows      ... and e (an int), n (token numbers), rows = t[n], v [rows, 1] (their weights), per expert
    @hidden    rows, e, h [rows, H]; inside one expert
    @out       those of @rows, and y [rows, D], not weighted yet
    @weighted  the same, y weighted
    @combined  t, w, idx, out [N, D]

The dense idioms give every expert all tokens (`rows = t`, `n = arange(N)`), most of them with weight zero.
"""

# ruff: noqa: F841 (the variables are there for the mutations)

from __future__ import annotations

import torch
import torch.nn as nn
import torch.nn.functional as F

D, H, E, K = 8, 6, 5, 2  # all different, so that tests notice exchanged axes


class Expert(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(D, H), nn.Linear(H, D, bias=False)


class ListOfExperts(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(D, E, bias=False)
        self.experts = nn.ModuleList([Expert() for _ in range(E)])


class StackedExperts(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(D, E, bias=False)
        self.w_gate, self.w_up = nn.Parameter(torch.empty(E, D, H)), nn.Parameter(torch.empty(E, D, H))
        self.w_down = nn.Parameter(torch.empty(E, H, D))


class WhereLoop(ListOfExperts):
    """I1: loop over experts, rows by comparison, index_add."""

    def expert(self, e, rows):
        h = F.gelu(self.experts[e].up(rows))
        # @hidden
        return self.experts[e].down(h)

    def forward(self, x):
        t = x.reshape(-1, D)
        logits = self.gate(t)
        # @logits
        p = logits.softmax(-1)
        w, idx = p.topk(K, dim=-1)
        # @routed
        out = torch.zeros_like(t)
        for e in range(E):
            n, k = torch.where(idx == e)
            rows, v = t[n], w[n, k, None]
            # @rows
            y = self.expert(e, rows)
            # @out
            y = y * v
            # @weighted
            out = out.index_add(0, n, y)
        # @combined
        return out.view_as(x)


class AnyMask(ListOfExperts):
    """I1c: boolean rows, empty experts skipped, renormalised sigmoid weights."""

    def expert(self, e, rows):
        h = F.silu(self.experts[e].up(rows))
        # @hidden
        return self.experts[e].down(h)

    def forward(self, x):
        t = x.reshape(-1, D)
        logits = self.gate(t)
        # @logits
        p = logits.sigmoid()
        w, idx = p.topk(K, dim=-1)
        w = w / (w.sum(-1, keepdim=True) + 1e-9)
        # @routed
        out = torch.zeros_like(t)
        for e in range(E):
            here = idx == e
            mine = here.any(-1)
            if not mine.any():
                continue
            n = mine.nonzero().squeeze(-1)
            rows, v = t[mine], (w * here).sum(-1, keepdim=True)[mine]
            # @rows
            y = self.expert(e, rows)
            # @out
            y = y * v
            # @weighted
            out[n] += y
        # @combined
        return out.view_as(x)


class SortSlices(StackedExperts):
    """I6: stable sort, counts to the host, contiguous slices, rows put back by index."""

    def expert(self, e, rows):
        h = F.silu(rows @ self.w_gate[e]) * (rows @ self.w_up[e])
        # @hidden
        return h @ self.w_down[e]

    def forward(self, x):
        t = x.reshape(-1, D)
        logits = self.gate(t)
        # @logits
        p = logits.softmax(-1)
        w, idx = p.topk(K, dim=-1)
        # @routed
        flat = idx.flatten()
        order = flat.argsort(stable=True)
        buffer, start = t.new_zeros(t.shape[0] * K, D), 0
        for e, count in enumerate(torch.bincount(flat, minlength=E).tolist()):
            here = order[start : start + count]
            start += count
            if not count:
                continue
            n = here // K
            rows, v = t[n], w.flatten()[here, None]
            # @rows
            y = self.expert(e, rows)
            # @out
            y = y * v
            # @weighted
            buffer[here] = y
        out = buffer.view(-1, K, D).sum(1)
        # @combined
        return out.view_as(x)


class HitLoop(StackedExperts):
    """I9a: loop over the experts that were hit, stacked weights, index_add_ in place."""

    def expert(self, e, rows):
        h = F.relu(rows @ self.w_up[e]).square()
        # @hidden
        return h @ self.w_down[e]

    def forward(self, x):
        t = x.reshape(-1, D)
        logits = self.gate(t)
        # @logits
        p = logits.softmax(-1)
        val, idx = logits.topk(K, dim=-1)
        w = val.softmax(-1)
        # @routed
        out = torch.zeros_like(t)
        with torch.no_grad():
            mask = F.one_hot(idx, E).permute(2, 1, 0)
            hit = mask.sum((-1, -2)).nonzero()
        for e in hit.flatten().tolist():
            k, n = torch.where(mask[e])
            rows, v = t[n], w[n, k, None]
            # @rows
            y = self.expert(e, rows)
            # @out
            y = y * v
            # @weighted
            out.index_add_(0, n, y)
        # @combined
        return out.view_as(x)


class DenseMasked(ListOfExperts):
    """I2: every expert on every token times its mostly zero gate."""

    def expert(self, e, rows):
        h = torch.tanh(self.experts[e].up(rows))
        # @hidden
        return self.experts[e].down(h)

    def forward(self, x):
        t = x.reshape(-1, D)
        logits = self.gate(t)
        # @logits
        p = logits.softmax(-1)
        w, idx = p.topk(K, dim=-1)
        # @routed
        n = torch.arange(t.shape[0])
        out = torch.zeros_like(t)
        for e in range(E):
            rows, v = t, (w * (idx == e)).sum(-1, keepdim=True)
            # @rows
            y = self.expert(e, rows)
            # @out
            y = y * v
            # @weighted
            out = out + y
        # @combined
        return out.view_as(x)


class StackGather(StackedExperts):
    """I3c: all experts stacked, then the chosen outputs gathered."""

    def expert(self, e, rows):
        h = F.silu(rows @ self.w_gate[e]) * (rows @ self.w_up[e])
        # @hidden
        return h @ self.w_down[e]

    def forward(self, x):
        t = x.reshape(-1, D)
        logits = self.gate(t)
        # @logits
        p = logits.softmax(-1)
        w, idx = p.topk(K, dim=-1)
        # @routed
        n, every = torch.arange(t.shape[0]), []
        for e in range(E):
            rows, v = t, p[:, e, None]
            # @rows
            y = self.expert(e, rows)
            # @out
            every.append(y)
        picked = torch.stack(every, 1).gather(1, idx.unsqueeze(-1).expand(-1, -1, D))
        out = (picked * w.unsqueeze(-1)).sum(1)
        # @combined
        return out.view_as(x)


class WeightGather(StackedExperts):
    """I5: weights gathered per token, einsum."""

    def forward(self, x):
        t = x.reshape(-1, D)
        logits = self.gate(t)
        # @logits
        p = logits.softmax(-1)
        w, idx = p.topk(K, dim=-1)
        # @routed
        h = F.silu(torch.einsum("nd,nkdh->nkh", t, self.w_gate[idx]))
        h = h * torch.einsum("nd,nkdh->nkh", t, self.w_up[idx])
        y = torch.einsum("nkh,nkhd->nkd", h, self.w_down[idx])
        out = (y * w.unsqueeze(-1)).sum(1)
        # @combined
        return out.view_as(x)


class CapacityEinsum(StackedExperts):
    """I4: first choices queue first, dispatch and combine tensors [N, E, C]."""

    def forward(self, x):
        t = x.reshape(-1, D)
        logits = self.gate(t)
        # @logits
        p = logits.softmax(-1)
        w, idx = p.topk(K, dim=-1)
        # @routed
        capacity = max(1, K * t.shape[0] // E)
        slots = F.one_hot(idx, E).transpose(0, 1).reshape(-1, E)
        place = ((slots.cumsum(0) - 1) * slots).sum(-1).view(K, -1).t()
        keep = place < capacity
        spot = F.one_hot(place.clamp(max=capacity - 1), capacity).to(t.dtype) * keep.unsqueeze(-1)
        hot = F.one_hot(idx, E).to(t.dtype)
        dispatch = torch.einsum("nke,nkc->nec", hot, spot)
        combine = torch.einsum("nk,nke,nkc->nec", w, hot, spot)
        rows = torch.einsum("nec,nd->ecd", dispatch, t)
        h = F.relu(torch.bmm(rows, self.w_up))
        y = torch.bmm(h, self.w_down)
        out = torch.einsum("nec,ecd->nd", combine, y)
        # @combined
        return out.view_as(x)


class RepeatMasks(ListOfExperts):
    """I8: tokens repeated K times, boolean assignment, view and weighted sum."""

    def expert(self, e, rows):
        h = F.relu(self.experts[e].up(rows))
        # @hidden
        return self.experts[e].down(h)

    def forward(self, x):
        t = x.reshape(-1, D)
        logits = self.gate(t)
        # @logits
        p = logits.softmax(-1)
        w, idx = p.topk(K, dim=-1)
        # @routed
        many, flat = t.repeat_interleave(K, dim=0), idx.flatten()
        filled = torch.zeros_like(many)
        for e in range(E):
            here = flat == e
            n = here.nonzero().squeeze(-1) // K
            rows, v = many[here], w.flatten()[here, None]
            # @rows
            y = self.expert(e, rows)
            # @out
            filled[here] = y
        out = (filled.view(-1, K, D) * w.unsqueeze(-1)).sum(1)
        # @combined
        return out.view_as(x)


class TopOneAssign(ListOfExperts):
    """I1d: top-1, rows assigned, probability once at the end."""

    def expert(self, e, rows):
        h = F.relu(self.experts[e].up(rows))
        # @hidden
        return self.experts[e].down(h)

    def forward(self, x):
        t = x.reshape(-1, D)
        logits = self.gate(t)
        # @logits
        p = logits.softmax(-1)
        w, idx = p.max(-1, keepdim=True)
        # @routed
        out = torch.zeros_like(t)
        for e in range(E):
            n = (idx[:, 0] == e).nonzero(as_tuple=True)[0]
            rows, v = t[n], w[n]
            # @rows
            y = self.expert(e, rows)
            # @out
            out[n] = y
        out = out * w
        # @combined
        return out.view_as(x)


class WeightBefore(StackedExperts):
    """I3b: all experts on all tokens with bmm, sigmoid weight in front of the expert."""

    def forward(self, x):
        t = x.reshape(-1, D)
        logits = self.gate(t)
        # @logits
        p = logits.sigmoid()
        val, idx = logits.topk(K, -1)
        w = val.sigmoid()
        # @routed
        gates = torch.zeros_like(logits).scatter(-1, idx, w)
        every = t.unsqueeze(0).expand(E, -1, -1) * gates.t().unsqueeze(-1)
        h = F.silu(torch.bmm(every, self.w_gate)) * torch.bmm(every, self.w_up)
        out = torch.bmm(h, self.w_down).sum(0)
        # @combined
        return out.view_as(x)


class TokenLoop(ListOfExperts):
    """I7: python loop over tokens and slots."""

    def expert(self, e, rows):
        h = F.gelu(self.experts[e].up(rows))
        # @hidden
        return self.experts[e].down(h)

    def forward(self, x):
        t = x.reshape(-1, D)
        logits = self.gate(t)
        # @logits
        p = logits.softmax(-1)
        w, idx = p.topk(K, dim=-1)
        # @routed
        sums = []
        for token in range(t.shape[0]):
            total = 0
            for k in range(K):
                e, n = int(idx[token, k]), torch.tensor([token])
                rows, v = t[token : token + 1], w[token, k].view(1, 1)
                # @rows
                y = self.expert(e, rows)
                # @out
                y = y * v
                # @weighted
                total = total + y
            sums.append(total)
        out = torch.cat(sums)
        # @combined
        return out.view_as(x)


BASES = {
    base.__name__: base
    for base in (
        WhereLoop,
        AnyMask,
        SortSlices,
        HitLoop,
        DenseMasked,
        StackGather,
        WeightGather,
        CapacityEinsum,
        RepeatMasks,
        TopOneAssign,
        WeightBefore,
        TokenLoop,
    )
}
