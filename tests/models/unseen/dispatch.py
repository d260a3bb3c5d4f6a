"""Ways to move rows to experts and back that the visible corpus lacks."""

from __future__ import annotations

from collections import defaultdict

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.func import functional_call, stack_module_state
from torch.utils.checkpoint import checkpoint

from ..case import D, E, H, K
from ..parts import Gated, Mlp, make_stack
from .suite import UNSEEN


class TopK(nn.Module):
    """Softmax, then the k best, renormalized: the most common router."""

    def __init__(self, k=K, experts=E, dim=D):
        super().__init__()
        self.k = k
        self.gate = nn.Linear(dim, experts, bias=False)

    def forward(self, t):
        w, idx = self.gate(t).softmax(-1).topk(self.k, dim=-1)
        return w / w.sum(-1, keepdim=True), idx


class Routed(nn.Module):
    """Router and list of experts, which the cases of this file share."""

    def __init__(self, k=K, expert=Gated):
        super().__init__()
        self.router = TopK(k)
        self.experts = nn.ModuleList([expert() for _ in range(E)])

    def forward(self, x):
        t = x.reshape(-1, x.shape[-1])
        return self.mix(t, *self.router(t)).view_as(x)


@UNSEEN.case("s_masked_select", "I1c", "match", "masked_select on expanded masks, masked_scatter back")
class MaskedSelect(Routed):
    def mix(self, t, w, idx):
        out = torch.zeros_like(t)
        for e, expert in enumerate(self.experts):
            for k in range(K):
                mask = (idx[:, k] == e).unsqueeze(-1)
                rows = torch.masked_select(t, mask).view(-1, D)
                y = expert(rows) * torch.masked_select(w[:, k : k + 1], mask).unsqueeze(-1)
                out = out + torch.zeros_like(t).masked_scatter(mask.expand_as(t), y)
        return out


@UNSEEN.case("s_index_put_accumulate", "I6", "match", "sort, unique_consecutive, split, index_put_(accumulate=True)")
class IndexPut(Routed):
    def mix(self, t, w, idx):
        ids, order = idx.flatten().sort(stable=True)
        hit, counts = torch.unique_consecutive(ids, return_counts=True)
        token, out = order // K, torch.zeros_like(t)
        parts = zip(hit.tolist(), token.split(counts.tolist()), w.flatten()[order].split(counts.tolist()))
        for e, rows, weight in parts:
            out.index_put_((rows,), self.experts[e](t[rows]) * weight[:, None], accumulate=True)
        return out


@UNSEEN.case("s_dict_of_lists", "I7", "match", "python dict expert -> list of (token, slot); stack of rows")
class DictOfLists(Routed):
    def mix(self, t, w, idx):
        queues = defaultdict(list)
        for n, choice in enumerate(idx.tolist()):
            for k, e in enumerate(choice):
                queues[e].append((n, k))
        sums = [torch.zeros_like(t[0]) for _ in range(len(t))]
        for e, queue in queues.items():
            y = self.experts[e](torch.stack([t[n] for n, _ in queue]))
            for row, (n, k) in zip(y, queue):
                sums[n] = sums[n] + row * w[n, k]
        return torch.stack(sums)


@UNSEEN.case(
    "s_searchsorted_offsets",
    "I6",
    "match",
    "searchsorted gives the offsets, inverse permutation by argsort(argsort)",
)
class SearchSorted(Routed):
    def mix(self, t, w, idx):
        ids = idx.flatten()
        order = torch.argsort(ids, stable=True)
        bounds = torch.searchsorted(ids[order], torch.arange(E + 1))
        rows = t.repeat_interleave(K, dim=0)[order]
        outs = [f(rows[int(bounds[e]) : int(bounds[e + 1])]) for e, f in enumerate(self.experts)]
        y = torch.cat(outs)[torch.argsort(order)].view(-1, K, D)
        return (w.unsqueeze(1) @ y).squeeze(1)


@UNSEEN.case("s_tensor_split", "I6", "match", "tensor_split at the cumulated counts, combination through scatter_add")
class TensorSplit(Routed):
    def mix(self, t, w, idx):
        ids, order = torch.sort(idx.view(-1))
        cuts = torch.bincount(ids, minlength=E).cumsum(0)[:-1].cpu()
        token = torch.div(order, K, rounding_mode="floor")
        parts = torch.tensor_split(t.index_select(0, token), cuts)
        y = torch.vstack([f(p) for f, p in zip(self.experts, parts)]) * w.reshape(-1, 1).take_along_dim(
            order[:, None], 0
        )
        return torch.zeros_like(t).scatter_add(0, token[:, None].expand_as(y), y)


@UNSEEN.case("s_while_segments", "I6", "match", "a while loop walks over the sorted ids")
class WhileSegments(Routed):
    def mix(self, t, w, idx):
        order = idx.reshape(-1).argsort(stable=True)
        ids, out, start = idx.reshape(-1)[order].tolist(), t.new_zeros(len(t) * K, D), 0
        while start < len(ids):
            stop = start
            while stop < len(ids) and ids[stop] == ids[start]:
                stop += 1
            here = order[start:stop]
            out[here] = self.experts[ids[start]](t[here // K])
            start = stop
        return torch.einsum("nk,nkd->nd", w, out.view(-1, K, D))


class ScatterRows(torch.autograd.Function):
    """Scatter rows by index, with a hand-written backward."""

    @staticmethod
    def forward(ctx, x, index):
        ctx.save_for_backward(index)
        ctx.rows = x.shape[0]
        return x.index_select(0, index)

    @staticmethod
    def backward(ctx, grad):
        (index,) = ctx.saved_tensors
        return torch.zeros(ctx.rows, grad.shape[1], dtype=grad.dtype).index_add_(0, index, grad), None


class GatherRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx, y, index, rows):
        ctx.save_for_backward(index)
        return torch.zeros(rows, y.shape[1], dtype=y.dtype).index_copy_(0, index, y)

    @staticmethod
    def backward(ctx, grad):
        (index,) = ctx.saved_tensors
        return grad.index_select(0, index), None, None


@UNSEEN.case("s_fastmoe_functions", "I6", "match", "FastMoE: custom autograd functions scatter and gather the rows")
class FastMoeFunctions(Routed):
    def mix(self, t, w, idx):
        _, pos = torch.sort(idx.view(-1), stable=True)
        counts = torch.bincount(idx.view(-1), minlength=E)
        rows = ScatterRows.apply(t, torch.div(pos, K, rounding_mode="floor"))
        outs, base = [], 0
        for e, n in enumerate(counts.tolist()):
            if n <= 0:
                continue
            outs.append(self.experts[e](rows[base : base + n]))
            base += n
        y = GatherRows.apply(torch.cat(outs, dim=0), pos, pos.shape[0])
        return torch.bmm(w.view(-1, 1, K), y.view(-1, K, D)).reshape(-1, D)


@UNSEEN.case("s_vmap_stacked_state", "I3", "match", "functional_call vmapped over the stacked state of all experts")
class VmapExperts(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(D, E, bias=False)
        params, _ = stack_module_state([nn.Sequential(nn.Linear(D, H), nn.Tanh(), nn.Linear(H, D)) for _ in range(E)])
        self.stack = nn.ParameterDict({k.replace(".", "_"): nn.Parameter(v.detach()) for k, v in params.items()})
        self.__dict__["base"] = nn.Sequential(nn.Linear(D, H), nn.Tanh(), nn.Linear(H, D)).to("meta")

    def forward(self, x):
        t = x.reshape(-1, D)
        w, idx = self.gate(t).softmax(-1).topk(K, -1)
        state = {k.replace("_", "."): v for k, v in self.stack.items()}
        outputs = torch.vmap(lambda p, v: functional_call(self.base, p, (v,)), in_dims=(0, None))(state, t)
        picked = outputs[idx, torch.arange(len(t))[:, None]]
        return (w.unsqueeze(-1) * picked).sum(1).view_as(x)


@UNSEEN.case("s_vmap_tokens", "I5", "match", "vmap over tokens of a function that indexes the stacked weights")
class VmapTokens(nn.Module):
    def __init__(self):
        super().__init__()
        self.router = TopK()
        self.w_in, self.w_out = make_stack(E, H, D), make_stack(E, D, H)

    def forward(self, x):
        t = x.reshape(-1, D)
        w, idx = self.router(t)

        def one(token, weight, a, b):
            return torch.einsum(
                "k,kd->d", weight, torch.einsum("kdh,kh->kd", b, F.silu(torch.einsum("khd,d->kh", a, token)))
            )

        return torch.vmap(one)(t, w, self.w_in[idx], self.w_out[idx]).view_as(x)


@UNSEEN.case(
    "s_index_select_bmm",
    "I5",
    "match",
    "one matrix per routed row by index_select, batched matrix-vector products",
)
class IndexSelectBmm(nn.Module):
    def __init__(self):
        super().__init__()
        self.router = TopK(3)
        self.up, self.up_bias = make_stack(E, H, D), make_stack(E, H)
        self.down = make_stack(E, D, H)

    def forward(self, x):
        t = x.reshape(-1, D)
        w, idx = self.router(t)
        flat = idx.reshape(-1)
        rows = t.repeat_interleave(3, 0).unsqueeze(-1)
        h = torch.baddbmm(self.up_bias.index_select(0, flat).unsqueeze(-1), self.up.index_select(0, flat), rows)
        y = torch.bmm(self.down.index_select(0, flat), h.relu()).squeeze(-1)
        return (y.view(-1, 3, D) * w[..., None]).sum(-2).view_as(x)


@UNSEEN.case(
    "s_matmul_broadcast",
    "I5",
    "match",
    "x[:, None, None, :] @ W[idx]: gathered weights and broadcasting matmul",
)
class MatmulBroadcast(nn.Module):
    def __init__(self):
        super().__init__()
        self.router = TopK()
        self.w13, self.w2 = make_stack(E, D, 2, H), make_stack(E, H, D)

    def forward(self, x):
        t = x.flatten(0, 1)
        w, idx = self.router(t)
        w13 = self.w13[idx]
        gate = (t[:, None, None, :] @ w13[..., 0, :]).squeeze(-2)
        up = (t[:, None, None, :] @ w13[..., 1, :]).squeeze(-2)
        y = ((F.silu(gate) * up).unsqueeze(-2) @ self.w2[idx]).squeeze(-2)
        return torch.sum(y * w.unsqueeze(-1), dim=1).unflatten(0, x.shape[:2])


@UNSEEN.case(
    "s_one_wide_hidden",
    "I3",
    "match",
    "all experts as one wide MLP whose hidden units are masked by the gates",
)
class OneWideHidden(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(D, E, bias=False)
        self.wide_in, self.wide_out = nn.Linear(D, E * H, bias=False), nn.Linear(E * H, D, bias=False)

    def forward(self, x):
        p = self.gate(x).softmax(-1)
        kth = p.topk(K, -1).values[..., -1:]
        gates = torch.where(p >= kth, p, torch.zeros_like(p))
        gates = gates / gates.sum(-1, keepdim=True)
        h = F.silu(self.wide_in(x)).unflatten(-1, (E, H)) * gates.unsqueeze(-1)
        return self.wide_out(h.flatten(-2))


@UNSEEN.case("s_dense_einsum", "I3", "match", "einsum with an expert axis over stacked weights, gates by scatter")
class DenseEinsum(nn.Module):
    def __init__(self):
        super().__init__()
        self.router = nn.Linear(D, E, bias=False)
        self.w1, self.w2, self.w3 = make_stack(E, D, H), make_stack(E, H, D), make_stack(E, D, H)

    def forward(self, x):
        logits = self.router(x)
        top, at = logits.topk(K, dim=-1)
        gates = torch.zeros_like(logits).scatter_(-1, at, top.softmax(-1))
        h = F.silu(torch.einsum("bsd,edh->bseh", x, self.w1)) * torch.einsum("bsd,edh->bseh", x, self.w3)
        return torch.einsum("bseh,ehd,bse->bsd", h, self.w2, gates)


@UNSEEN.case("s_grouped_conv", "I3", "match", "all experts in one grouped 1x1 convolution over the sequence")
class GroupedConv(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(D, E)
        self.up, self.down = nn.Conv1d(D, E * H, 1), nn.Conv1d(E * H, E * D, 1, groups=E)

    def forward(self, x):
        w, idx = self.gate(x).softmax(-1).topk(K, -1)
        y = self.down(F.gelu(self.up(x.transpose(1, 2))))
        y = y.view(x.shape[0], E, D, -1).permute(0, 3, 1, 2)
        return (y.gather(2, idx.unsqueeze(-1).expand(-1, -1, -1, D)) * w.unsqueeze(-1)).sum(2)


@UNSEEN.case("s_checkpointed_experts", "I1b", "match", "every expert call inside torch.utils.checkpoint")
class Checkpointed(Routed):
    def mix(self, t, w, idx):
        out = torch.zeros_like(t)
        for e, expert in enumerate(self.experts):
            token, slot = torch.where(idx == e)
            y = checkpoint(expert, t[token], use_reentrant=False)
            out = out.index_add(0, token, y * w[token, slot].unsqueeze(1))
        return out


@UNSEEN.case(
    "s_getattr_experts",
    "I1",
    "match",
    "experts by add_module and getattr, weights by a product with the one-hot mask",
)
class GetattrExperts(nn.Module):
    def __init__(self):
        super().__init__()
        self.router = TopK()
        for e in range(E):
            self.add_module(f"ffn_{e}", Mlp())

    def forward(self, x):
        t = x.reshape(-1, D)
        w, idx = self.router(t)
        gates = (F.one_hot(idx, E) * w.unsqueeze(-1)).sum(1)
        result = 0
        for e in range(E):
            rows = gates[:, e].nonzero(as_tuple=True)[0]
            y = getattr(self, f"ffn_{e}")(t[rows]) * gates[rows, e].unsqueeze(-1)
            result = result + torch.zeros_like(t).index_copy(0, rows, y)
        return result.view_as(x)


@UNSEEN.case("s_sparse_matrix_combine", "I6", "either", "a sparse COO matrix times the rows as dispatch and combine")
class SparseMatrix(Routed):
    def mix(self, t, w, idx):
        flat = idx.flatten()
        order = flat.argsort(stable=True)
        token, n = order // K, len(order)
        counts = flat.bincount(minlength=E).tolist()
        y = torch.cat([f(r) for f, r in zip(self.experts, t[token].split(counts))])
        combine = torch.sparse_coo_tensor(torch.stack([token, torch.arange(n)]), w.flatten()[order], (len(t), n))
        return torch.sparse.mm(combine, y)


@UNSEEN.case("s_embedding_bag_combine", "I6", "either", "embedding_bag with per-sample weights sums each token's rows")
class EmbeddingBagCombine(Routed):
    def mix(self, t, w, idx):
        flat = idx.flatten()
        order = flat.argsort(stable=True)
        counts = flat.bincount(minlength=E).tolist()
        y = torch.cat([f(r) for f, r in zip(self.experts, t[order // K].split(counts))])
        return F.embedding_bag(order.argsort().view(-1, K), y, per_sample_weights=w, mode="sum")


@UNSEEN.case("s_one_slot_at_a_time", "I9b", "match", "k rounds of top-1: argmax, mask out, run, add")
class OneSlotAtATime(nn.Module):
    """Rounds as in Shazeer et al.: each round masks the expert of the previous one in the logits."""

    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(D, E)
        self.experts = nn.ModuleList([Mlp(act=torch.tanh) for _ in range(E)])

    def forward(self, x):
        t = x.reshape(-1, D)
        p, out = self.gate(t).softmax(-1), 0
        left = p
        for _ in range(3):
            weight, choice = left.max(dim=-1, keepdim=True)
            y = torch.zeros_like(t)
            for e in choice.unique().tolist():
                rows = choice[:, 0] == e
                y[rows] = self.experts[e](t[rows])
            out = out + weight * y
            left = left.scatter(-1, choice, 0.0)
        return out.view_as(x)
