"""Experts with a limited capacity: common drop rules, and results for dropped tokens."""

from __future__ import annotations

import math

import torch
import torch.nn as nn
import torch.nn.functional as F

from ..case import D, E, H, K
from ..parts import Gated, Mlp, make_stack
from .suite import UNSEEN


@UNSEEN.case(
    "s_gshard_top2",
    "I4",
    "match",
    "second choices queue behind all first ones; weights renormalised after drops",
)
class GShardTop2(nn.Module):
    """Mesh-TensorFlow / fairseq top-2: a dropped slot gives its share to the other one."""

    def __init__(self, capacity_factor=1.0):
        super().__init__()
        self.wg = nn.Linear(D, E, bias=False)
        self.experts = nn.ModuleList([Mlp(act=F.relu) for _ in range(E)])
        self.capacity_factor = capacity_factor

    def forward(self, input):
        x = input.reshape(-1, D)
        gates = F.softmax(self.wg(x), dim=1)
        capacity = math.ceil(2 * x.shape[0] / E * self.capacity_factor)
        indices1 = torch.argmax(gates, dim=1)
        mask1 = F.one_hot(indices1, num_classes=E)
        without_first = gates.masked_fill(mask1.bool(), float("-inf"))
        indices2 = torch.argmax(without_first, dim=1)
        mask2 = F.one_hot(indices2, num_classes=E)
        locations1 = torch.cumsum(mask1, dim=0) - 1
        locations2 = torch.cumsum(mask2, dim=0) - 1
        locations2 += torch.sum(mask1, dim=0, keepdim=True)
        l_aux = (gates.mean(0) * mask1.to(x.dtype).mean(0)).mean() * E * E
        mask1 = mask1 * torch.lt(locations1, capacity)
        mask2 = mask2 * torch.lt(locations2, capacity)
        locations1_s = torch.sum(locations1 * mask1, dim=1)
        locations2_s = torch.sum(locations2 * mask2, dim=1)
        gates1_s = torch.einsum("se,se->s", gates, mask1.to(gates.dtype))
        gates2_s = torch.einsum("se,se->s", gates, mask2.to(gates.dtype))
        denom = torch.clamp(gates1_s + gates2_s, min=torch.finfo(gates.dtype).eps)
        gates1_s, gates2_s = gates1_s / denom, gates2_s / denom
        gates1 = torch.einsum("s,se->se", gates1_s, mask1.to(gates.dtype))
        gates2 = torch.einsum("s,se->se", gates2_s, mask2.to(gates.dtype))
        spot1 = F.one_hot(locations1_s, num_classes=capacity).to(gates.dtype)
        spot2 = F.one_hot(locations2_s, num_classes=capacity).to(gates.dtype)
        combine = torch.einsum("se,sc->sec", gates1, spot1) + torch.einsum("se,sc->sec", gates2, spot2)
        dispatched = torch.einsum("sec,sm->ecm", combine.bool().to(x.dtype), x)
        outputs = [expert(chunk) for chunk, expert in zip(dispatched.chunk(E, dim=0), self.experts)]
        combined = torch.einsum("sec,ecm->sm", combine, torch.cat(outputs, dim=0))
        return combined.reshape(input.shape), l_aux


@UNSEEN.case(
    "s_switch_mesh",
    "I4",
    "match",
    "top-1, position by cumsum over tokens, probability kept, zeros for dropped",
)
class SwitchMesh(nn.Module):
    def __init__(self, capacity_factor=1.25):
        super().__init__()
        self.router = nn.Linear(D, E)
        self.wi, self.wo = make_stack(E, D, H), make_stack(E, H, D)
        self.capacity_factor = capacity_factor

    def forward(self, x):
        t = x.reshape(-1, D)
        probs = self.router(t).softmax(-1)
        gate, index = torch.max(probs, dim=-1)
        mask = F.one_hot(index, E).to(t.dtype)
        capacity = max(int(self.capacity_factor * t.shape[0] / E), 4)
        position = torch.cumsum(mask, dim=0) * mask
        mask = mask * torch.less_equal(position, capacity)
        kept = mask.sum(-1)
        gate = gate * kept
        slot = F.one_hot(((position - 1) * mask).sum(-1).long(), capacity).to(t.dtype)
        combine = gate[:, None, None] * mask[:, :, None] * slot[:, None, :]
        dispatch = (combine > 0).to(t.dtype)
        inputs = torch.einsum("nec,nd->ecd", dispatch, t)
        h = torch.einsum("ecd,edf->ecf", inputs, self.wi).relu()
        out = torch.einsum("ecf,efd->ecd", h, self.wo)
        return torch.einsum("nec,ecd->nd", combine, out).view_as(x)


@UNSEEN.case("s_tutel_locations", "I4", "match", "flat buffer [E * C, D], row number = expert * capacity + location")
class TutelLocations(nn.Module):
    """Token-major queue: locations in the order of (token, slot)."""

    def __init__(self):
        super().__init__()
        self.wg = nn.Linear(D, E, bias=False)
        self.fc1_w, self.fc1_bias = make_stack(E, H, D), make_stack(E, H)
        self.fc2_w, self.fc2_bias = make_stack(E, H, D), make_stack(E, D)

    def forward(self, x):
        t = x.reshape(-1, D)
        scores = F.softmax(self.wg(t), dim=1)
        gates, indices = torch.topk(scores, K, dim=1)
        gates = gates / torch.clamp(gates.sum(1, keepdim=True), min=1e-9)
        capacity = K * ((t.shape[0] + E - 1) // E)
        mask = F.one_hot(indices.view(-1), E)
        location = (torch.cumsum(mask, dim=0) - 1).gather(1, indices.view(-1, 1)).squeeze(1)
        ok = location < capacity
        place = (indices.view(-1) * capacity + location)[ok]
        token = torch.arange(t.shape[0]).repeat_interleave(K)[ok]
        dispatched = t.new_zeros(E * capacity, D).index_add(0, place, t[token]).view(E, capacity, D)
        y = torch.add(torch.matmul(dispatched, self.fc1_w.transpose(1, 2)), self.fc1_bias.unsqueeze(1))
        y = F.silu(y)
        y = torch.add(torch.matmul(y, self.fc2_w), self.fc2_bias.unsqueeze(1)).view(E * capacity, D)
        out = torch.zeros_like(t).index_add(0, token, y[place] * gates.reshape(-1)[ok].unsqueeze(-1))
        return out.view_as(x)


@UNSEEN.case("s_capacity_by_probability", "I4", "match", "Megatron drop policy probs: each expert keeps its best rows")
class DropByProbability(nn.Module):
    def __init__(self, capacity_factor=1.0):
        super().__init__()
        self.router = nn.Linear(D, E, bias=False)
        self.experts = nn.ModuleList([Gated() for _ in range(E)])
        self.capacity_factor = capacity_factor

    def forward(self, x):
        t = x.reshape(-1, D)
        logits = self.router(t)
        scores, top_indices = torch.topk(logits, k=K, dim=1)
        probs = torch.softmax(scores, dim=-1)
        gates = torch.zeros_like(logits).scatter(1, top_indices, probs)
        topk_map = torch.zeros_like(logits).int().scatter(1, top_indices, 1).bool()
        capacity = min(t.shape[0], math.ceil(t.shape[0] * K / E * self.capacity_factor))
        _, capacity_indices = torch.topk(gates, k=capacity, dim=0, sorted=False)
        capacity_mask = torch.zeros_like(logits).scatter(0, capacity_indices, 1).bool()
        final_map = torch.logical_and(topk_map, capacity_mask)
        final_probs = gates * final_map
        out = torch.zeros_like(t)
        for e, expert in enumerate(self.experts):
            rows = final_map[:, e].nonzero(as_tuple=True)[0]
            out = out.index_add(0, rows, expert(t[rows]) * final_probs[rows, e, None])
        return out.view_as(x)


@UNSEEN.case(
    "s_capacity_slices",
    "I9",
    "match",
    "rows of an expert cut after the first C of them: expert_rows[:capacity]",
)
class SliceDrop(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(D, E)
        self.experts = nn.ModuleList([Mlp() for _ in range(E)])

    def forward(self, x):
        b, s, d = x.shape
        capacity = max(1, math.floor(1.2 * K * b * s / E))
        x = x.reshape(b * s, d)
        w, pick = self.gate(x).softmax(-1).topk(K)
        out = torch.zeros_like(x)
        for e in range(E):
            token, slot = (pick == e).nonzero(as_tuple=True)
            token, slot = token[:capacity], slot[:capacity]
            if token.numel() == 0:
                continue
            out.index_add_(0, token, w[token, slot].unsqueeze(1) * self.experts[e](x[token]))
        return out.reshape(b, s, d)


@UNSEEN.case("s_capacity_last_wins", "I9", "either", "the queue keeps the last C arrivals instead of the first")
class LastWins(SliceDrop):
    def forward(self, x):
        b, s, d = x.shape
        capacity = max(1, K * b * s // E)
        x = x.reshape(b * s, d)
        w, pick = self.gate(x).softmax(-1).topk(K)
        out = torch.zeros_like(x)
        for e in range(E):
            token, slot = (pick == e).nonzero(as_tuple=True)
            token, slot = token[-capacity:], slot[-capacity:]
            out.index_add_(0, token, w[token, slot].unsqueeze(1) * self.experts[e](x[token]))
        return out.reshape(b, s, d)


@UNSEEN.case("s_batch_priority", "I4", "match", "V-MoE: tokens with the larger top weight queue first")
class BatchPriority(nn.Module):
    """Positions in the queue follow each token's largest weight, with first choices first."""

    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(D, E, bias=False)
        self.w1, self.w2 = make_stack(E, D, H), make_stack(E, H, D)

    def forward(self, x):
        t = x.reshape(-1, D)
        n = t.shape[0]
        w, idx = self.gate(t).softmax(-1).topk(K, -1)
        capacity = max(1, n * K // E)
        order = torch.argsort(-w[:, 0], stable=True)
        hot = F.one_hot(idx[order], E).transpose(0, 1).reshape(K * n, E)
        place = ((hot.cumsum(0) - 1) * hot).sum(-1).view(K, n).t()
        back = torch.argsort(order)
        keep = (place < capacity)[back]
        out = torch.zeros_like(t)
        for e in range(E):
            row, slot = torch.where((idx == e) & keep)
            out = out.index_add(0, row, (F.gelu(t[row] @ self.w1[e]) @ self.w2[e]) * w[row, slot, None])
        return out.view_as(x)


@UNSEEN.case("s_capacity_per_sequence", "I4", "either", "each sequence of the batch has queues of its own")
class PerSequenceQueues(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(D, E, bias=False)
        self.w1, self.w2 = make_stack(E, D, H), make_stack(E, H, D)

    def forward(self, x):
        b, n, d = x.shape
        capacity = max(2, math.ceil(1.25 * n / E))
        p, idx = self.gate(x).softmax(-1).max(-1)
        hot = F.one_hot(idx, E)
        place = ((hot.cumsum(1) - 1) * hot).sum(-1)
        keep = (place < capacity).to(x.dtype)
        spot = F.one_hot(place.clamp(max=capacity - 1), capacity).to(x.dtype) * keep[..., None]
        mask = torch.einsum("bne,bnc->bnec", hot.to(x.dtype), spot)
        inputs = torch.einsum("bnec,bnd->ebcd", mask, x).reshape(E, b * capacity, d)
        y = torch.bmm(torch.bmm(inputs, self.w1).relu(), self.w2).reshape(E, b, capacity, d)
        return torch.einsum("bnec,ebcd,bn->bnd", mask, y, p)


@UNSEEN.case("s_drop_passes_through", "I9", "match", "a token without a place goes through unchanged")
class PassThrough(nn.Module):
    def __init__(self):
        super().__init__()
        self.switch = nn.Linear(D, E)
        self.experts = nn.ModuleList([Mlp(act=F.relu) for _ in range(E)])

    def forward(self, x):
        t = x.reshape(-1, D)
        capacity = max(1, int(1.5 * t.shape[0] / E))
        p, routes = self.switch(t).softmax(-1).max(-1)
        final = t.clone()
        for e in range(E):
            rows = torch.eq(routes, e).nonzero(as_tuple=True)[0][:capacity]
            final[rows] = self.experts[e](t[rows]) * p[rows].unsqueeze(-1)
        return final.view_as(x)


@UNSEEN.case("s_capacity_never_reached", "I4", "match", "capacity = number of tokens: dispatch tensors without a drop")
class RoomForAll(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(D, E, bias=False)
        self.experts = nn.ModuleList([Gated() for _ in range(E)])

    def forward(self, x):
        t = x.reshape(-1, D)
        n = t.shape[0]
        w, idx = self.gate(t).softmax(-1).topk(K, -1)
        hot = F.one_hot(idx, E).to(t.dtype)
        flat = hot.reshape(n * K, E)
        place = (flat.cumsum(0) * flat - 1).max(-1).values.long().view(n, K)
        spot = F.one_hot(place, n).to(t.dtype)
        dispatch = torch.einsum("nke,nkc->enc", hot, spot)
        combine = torch.einsum("nk,nke,nkc->enc", w, hot, spot)
        y = torch.stack([f(d.t() @ t) for f, d in zip(self.experts, dispatch)])
        return torch.einsum("enc,ecd->nd", combine, y).view_as(x)


@UNSEEN.case(
    "s_openmoe_matmul",
    "I4",
    "match",
    "sec masks as matrices: permute, matmul, view, matmul; second choice is optional",
)
class OpenMoeMatmul(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate_weight = make_stack(E, D)
        self.wi_gate, self.wi_up, self.wo = make_stack(E, D, H), make_stack(E, D, H), make_stack(E, H, D)

    def capacity(self, tokens):
        c = math.floor(K * 1.5 * tokens / E)
        c += c % 2
        return max(c, 4)

    def forward(self, x):
        tokens = x.reshape(-1, D)
        n, c = tokens.shape[0], self.capacity(tokens.shape[0])
        probs = F.softmax(F.linear(tokens, self.gate_weight), dim=-1)
        top1 = probs.argmax(-1)
        mask1 = F.one_hot(top1, E).to(torch.int32)
        top2 = (probs * mask1.logical_not()).argmax(-1)
        mask2 = F.one_hot(top2, E).to(torch.int32)
        rank1 = mask1.cumsum(0) - 1
        rank2 = mask2.cumsum(0) - 1 + mask1.sum(0, keepdim=True)
        mask1 = mask1 * (rank1 < c)
        mask2 = mask2 * (rank2 < c)
        rank1, rank2 = (mask1 * rank1).sum(-1), (mask2 * rank2).sum(-1)
        cb_weight, sec_mask = tokens.new_zeros(n, E, c), torch.zeros(n, E, c, dtype=torch.bool)
        at = torch.arange(n)
        cb_weight[at, top1, rank1] += (mask1 * probs).sum(-1)
        cb_weight[at, top2, rank2] += (mask2 * probs).sum(-1)
        sec_mask[at, top1, rank1] |= mask1.bool()[at, top1]
        sec_mask[at, top2, rank2] |= mask2.bool()[at, top2]
        rows = torch.matmul(sec_mask.to(tokens.dtype).permute(1, 2, 0), tokens)
        h = F.silu(torch.bmm(rows, self.wi_gate)) * torch.bmm(rows, self.wi_up)
        out = torch.bmm(h, self.wo).reshape(-1, D)
        return torch.matmul(cb_weight.view(n, -1), out).view_as(x)


@UNSEEN.case(
    "s_overflow_to_next",
    "I4",
    "either",
    "a token whose first choice is full goes to its second choice instead",
)
class OverflowToNext(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(D, E)
        self.experts = nn.ModuleList([Mlp() for _ in range(E)])

    def forward(self, x):
        t = x.reshape(-1, D)
        capacity = max(1, t.shape[0] // E + 1)
        p, idx = self.gate(t).softmax(-1).topk(2, -1)
        used, choice = [0] * E, []
        for first, second in idx.tolist():
            slot = 0 if used[first] < capacity else 1
            used[(first, second)[slot]] += 1
            choice.append(slot)
        slot = torch.tensor(choice)[:, None]
        expert, weight = idx.gather(1, slot).squeeze(1), p.gather(1, slot)
        out = torch.zeros_like(t)
        for e in range(E):
            rows = (expert == e).nonzero().flatten()
            out[rows] = self.experts[e](t[rows])
        return (out * weight).view_as(x)
