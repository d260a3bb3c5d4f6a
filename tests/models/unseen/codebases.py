"""Blocks in the style of well-known code bases, written from memory."""

from __future__ import annotations

import torch
import torch.nn as nn
import torch.nn.functional as F

from ..case import D, E, H, K
from ..parts import Gated, Mlp, make_stack
from .suite import UNSEEN


class GroupLimitedGate(nn.Module):
    """DeepSeek-V3: sigmoid scores, a bias for the selection, best groups by the sum of their two best, scaled."""

    def __init__(self, topk=3, groups=4, topk_groups=2, route_scale=2.5):
        super().__init__()
        self.topk, self.n_groups, self.topk_groups, self.route_scale = topk, groups, topk_groups, route_scale
        self.weight = nn.Parameter(torch.empty(E, D))
        self.bias = nn.Parameter(torch.empty(E))

    def forward(self, x):
        scores = F.linear(x, self.weight).sigmoid()
        original_scores = scores
        scores = scores + self.bias
        scores = scores.view(x.size(0), self.n_groups, -1)
        group_scores = scores.topk(2, dim=-1)[0].sum(dim=-1)
        indices = group_scores.topk(self.topk_groups, dim=-1)[1]
        mask = scores.new_ones(x.size(0), self.n_groups, dtype=bool).scatter_(1, indices, False)
        scores = scores.masked_fill_(mask.unsqueeze(-1), float("-inf")).flatten(1)
        indices = torch.topk(scores, self.topk, dim=-1)[1]
        weights = original_scores.gather(1, indices)
        weights /= weights.sum(dim=-1, keepdim=True)
        weights *= self.route_scale
        return weights.type_as(x), indices


@UNSEEN.case("s_deepseek_counts", "I9", "match", "bincount().tolist(), skip at zero, y[idx] +=, shared MLP")
class DeepSeekCounts(nn.Module):
    def __init__(self):
        super().__init__()
        self.n_routed_experts = E
        self.gate = GroupLimitedGate()
        self.experts = nn.ModuleList([Gated() for _ in range(E)])
        self.shared_experts = Gated(h=2 * H)

    def forward(self, x):
        shape = x.size()
        x = x.view(-1, D)
        weights, indices = self.gate(x)
        y = torch.zeros_like(x)
        counts = torch.bincount(indices.flatten(), minlength=self.n_routed_experts).tolist()
        for i in range(self.n_routed_experts):
            if counts[i] == 0:
                continue
            expert = self.experts[i]
            idx, top = torch.where(indices == i)
            y[idx] += expert(x[idx]) * weights[idx, top, None]
        z = self.shared_experts(x)
        return (y + z).view(shape)


class AddAuxiliaryLoss(torch.autograd.Function):
    """Identity whose backward gives the auxiliary loss a gradient of one."""

    @staticmethod
    def forward(ctx, x, loss):
        ctx.dtype = loss.dtype
        return x.clone()

    @staticmethod
    def backward(ctx, grad_output):
        return grad_output, torch.ones((), dtype=ctx.dtype)


@UNSEEN.case("s_deepseek_scatter_reduce", "I6", "match", "scatter_reduce_ into a cache; aux loss in the backward")
class DeepSeekScatterReduce(nn.Module):
    def __init__(self, alpha=0.01):
        super().__init__()
        self.gate = nn.Linear(D, E, bias=False)
        self.experts = nn.ModuleList([Gated() for _ in range(E)])
        self.alpha = alpha

    def forward(self, hidden_states):
        x = hidden_states.view(-1, D)
        scores = self.gate(x).softmax(dim=-1)
        topk_weight, topk_idx = torch.topk(scores, k=K, dim=-1, sorted=False)
        ce = F.one_hot(topk_idx.view(-1), num_classes=E).to(x.dtype).mean(0)
        aux_loss = (scores.mean(0) * ce * E).sum() * self.alpha
        y = self.dispatch(x, topk_idx.view(-1), topk_weight.view(-1, 1))
        return AddAuxiliaryLoss.apply(y, aux_loss).view_as(hidden_states)

    def dispatch(self, x, flat_expert_indices, flat_expert_weights):
        expert_cache = torch.zeros_like(x)
        idxs = flat_expert_indices.argsort()
        tokens_per_expert = flat_expert_indices.bincount().cpu().numpy().cumsum(0)
        token_idxs = idxs // K
        for i, end_idx in enumerate(tokens_per_expert):
            start_idx = 0 if i == 0 else tokens_per_expert[i - 1]
            if start_idx == end_idx:
                continue
            exp_token_idx = token_idxs[start_idx:end_idx]
            expert_out = self.experts[i](x[exp_token_idx])
            expert_out = expert_out.mul(flat_expert_weights[idxs[start_idx:end_idx]])
            expert_cache = expert_cache.scatter_reduce(
                0, exp_token_idx.view(-1, 1).repeat(1, x.shape[-1]), expert_out, reduce="sum"
            )
        return expert_cache


@UNSEEN.case("s_deepseek_moe_infer", "I6", "match", "cnts.scatter_, sorted tokens, new_x[idxs] = outs, mul_ and sum")
class DeepSeekInfer(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(D, E, bias=False)
        self.experts = nn.ModuleList([Gated() for _ in range(E)])

    def forward(self, x):
        orig_shape = x.shape
        x = x.view(-1, x.shape[-1])
        topk_weight, topk_ids = torch.topk(self.gate(x).softmax(dim=-1), k=3, dim=-1, sorted=False)
        cnts = topk_ids.new_zeros((topk_ids.shape[0], len(self.experts)))
        cnts.scatter_(1, topk_ids, 1)
        tokens_per_expert = cnts.sum(dim=0)
        idxs = topk_ids.view(-1).argsort()
        sorted_tokens = x[idxs // topk_ids.shape[1]]
        outputs, start_idx = [], 0
        for i, num_tokens in enumerate(tokens_per_expert.cpu().numpy()):
            end_idx = start_idx + num_tokens
            if num_tokens == 0:
                continue
            outputs.append(self.experts[i](sorted_tokens[start_idx:end_idx]))
            start_idx = end_idx
        outs = torch.cat(outputs, dim=0) if len(outputs) else sorted_tokens.new_empty(0)
        new_x = torch.empty_like(outs)
        new_x[idxs] = outs
        final_out = new_x.view(*topk_ids.shape, -1).mul_(topk_weight.unsqueeze(dim=-1)).sum(dim=1)
        return final_out.view(*orig_shape)


def _skew_columns(block):
    w = block.w_gate
    w[:, 1:4:2], w[:, 4:] = -w[:, 0:4:2], 0
    return 1


@UNSEEN.case(
    "s_shazeer_dispatcher",
    "I6b",
    "match",
    "nonzero(gates).sort(0), split, stitch, cv^2 losses",
    rng=True,
    skew=_skew_columns,
)
class ShazeerDispatcher(nn.Module):
    """Noisy top-k gating with the sparse dispatcher over the positive gates."""

    def __init__(self):
        super().__init__()
        self.w_gate = nn.Parameter(torch.empty(D, E))
        self.w_noise = nn.Parameter(torch.empty(D, E))
        self.experts = nn.ModuleList([Mlp(act=F.relu) for _ in range(E)])

    def cv_squared(self, v):
        return v.var() / (v.mean() ** 2 + 1e-10)

    def gating(self, x):
        clean = x @ self.w_gate
        if self.training:
            logits = clean + torch.randn_like(clean) * (F.softplus(x @ self.w_noise) + 1e-2)
        else:
            logits = clean
        top_logits, top_indices = logits.topk(K + 1, dim=1)
        top_gates = top_logits[:, :K].softmax(1)
        return torch.zeros_like(logits).scatter(1, top_indices[:, :K], top_gates)

    def forward(self, x, loss_coef=1e-2):
        shape = x.shape
        x = x.reshape(-1, D)
        gates = self.gating(x)
        loss = loss_coef * (self.cv_squared(gates.sum(0)) + self.cv_squared((gates > 0).sum(0).to(x.dtype)))
        sorted_experts, index_sorted = torch.nonzero(gates).sort(0)
        _, expert_index = sorted_experts.split(1, dim=1)
        batch_index = torch.nonzero(gates)[index_sorted[:, 1], 0]
        part_sizes = (gates > 0).sum(0).tolist()
        nonzero_gates = torch.gather(gates[batch_index.flatten()], 1, expert_index)
        inputs = torch.split(x[batch_index], part_sizes, dim=0)
        outputs = [self.experts[i](inputs[i]) for i in range(E)]
        stitched = torch.cat(outputs, 0).mul(nonzero_gates)
        y = torch.zeros(gates.size(0), D, dtype=x.dtype).index_add(0, batch_index, stitched)
        return y.view(shape), loss


@UNSEEN.case("s_megatron_permute", "I6b", "match", "routing map [S, E], masked_select of token indices, scatter_add_")
class MegatronPermute(nn.Module):
    def __init__(self):
        super().__init__()
        self.router = nn.Linear(D, E, bias=False)
        self.linear_fc1 = make_stack(E, D, 2 * H)
        self.linear_fc2 = make_stack(E, H, D)

    def forward(self, hidden):
        tokens = hidden.reshape(-1, D)
        logits = self.router(tokens)
        scores, top_indices = torch.topk(logits, k=K, dim=1)
        probs = torch.softmax(scores, dim=-1)
        routing_probs = torch.zeros_like(logits).scatter(1, top_indices, probs)
        routing_map = torch.zeros_like(logits).int().scatter(1, top_indices, 1).bool()
        num_tokens, num_experts = routing_map.shape
        by_expert = routing_map.T.contiguous()
        token_indices = torch.arange(num_tokens).unsqueeze(0).expand(num_experts, -1)
        sorted_indices = token_indices.masked_select(by_expert)
        permuted = tokens.index_select(0, sorted_indices)
        permuted_probs = routing_probs.T.contiguous().masked_select(by_expert)
        outs = []
        for e, rows in enumerate(torch.split(permuted, routing_map.sum(0).tolist())):
            gate, up = torch.chunk(rows @ self.linear_fc1[e], 2, dim=-1)
            outs.append((F.silu(gate) * up) @ self.linear_fc2[e])
        permuted = torch.cat(outs) * permuted_probs.unsqueeze(-1)
        restored = torch.zeros_like(tokens)
        restored.scatter_add_(0, sorted_indices.unsqueeze(1).expand(-1, D), permuted)
        return restored.view(hidden.shape)


@UNSEEN.case("s_titan_scores_before", "I6b", "match", "histc, reorder, scores before the experts in fp32, scatter_add")
class TitanScoresBefore(nn.Module):
    """Gather rows with expanded indices, multiply them by their scores, and pad them with zero rows at the end."""

    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(D, E, bias=False)
        self.w1, self.w2, self.w3 = make_stack(E, H, D), make_stack(E, D, H), make_stack(E, H, D)
        self.register_buffer("tokens_per_expert", torch.zeros(E), persistent=False)

    def forward(self, x):
        bs, slen, dim = x.shape
        x = x.view(-1, dim)
        scores = torch.sigmoid(self.gate(x))
        top_scores, selected = torch.topk(scores, k=K, dim=1)
        counts = torch.histc(selected.view(-1).to(x.dtype), bins=E, min=0, max=E)
        with torch.no_grad():
            self.tokens_per_expert.add_(counts)
        order = torch.argsort(selected.view(-1), stable=True)
        top_scores, token_indices = top_scores.view(-1)[order], order // K
        index = token_indices.reshape(-1, 1).expand(-1, dim)
        routed = torch.gather(x, dim=0, index=index)
        routed = (routed * top_scores.reshape(-1, 1)).to(x.dtype)
        counts = counts.int().tolist()
        num_padding = 3
        routed = torch.vstack((routed, routed.new_zeros((num_padding, dim))))
        splits = torch.split(routed[: sum(counts)], split_size_or_sections=counts, dim=0)
        outs = []
        for e, rows in enumerate(splits):
            h = F.silu(torch.matmul(rows, self.w1[e].transpose(-2, -1)))
            h = h * torch.matmul(rows, self.w3[e].transpose(-2, -1))
            outs.append(torch.matmul(h, self.w2[e].transpose(-2, -1)))
        out = torch.cat(outs, dim=0)
        out = torch.vstack((out, out.new_zeros((num_padding, out.shape[-1]))))[:-num_padding]
        return torch.zeros_like(x).scatter_add(dim=0, index=index, src=out).reshape(bs, slen, dim)


@UNSEEN.case(
    "s_scatter_moe",
    "I6",
    "match",
    "offsets by cumsum, slices, output put back by index, gates applied by bmm",
)
class ScatterMoe(nn.Module):
    def __init__(self):
        super().__init__()
        self.router = nn.Linear(D, E, bias=False)
        self.up, self.down = make_stack(E, 2 * H, D), make_stack(E, D, H)

    def parallel_linear(self, rows, weight, offsets):
        out = rows.new_empty(rows.shape[0], weight.shape[1])
        for e in range(E):
            a, b = int(offsets[e]), int(offsets[e + 1])
            out[a:b] = F.linear(rows[a:b], weight[e])
        return out

    def forward(self, x):
        t = x.reshape(-1, D)
        gates, chosen = torch.topk(self.router(t).softmax(dim=-1), 4)
        gates = gates / gates.sum(-1, keepdim=True)
        sorted_experts, sorted_scattered = torch.sort(chosen.flatten())
        offsets = F.pad(sorted_experts.bincount(minlength=E).cumsum(-1), (1, 0))
        rows = t[torch.div(sorted_scattered, 4, rounding_mode="floor")]
        h, g = self.parallel_linear(rows, self.up, offsets).chunk(2, dim=-1)
        y = self.parallel_linear(F.gelu(g) * h, self.down, offsets)
        scattered = torch.zeros_like(y)
        scattered[sorted_scattered] = y
        return torch.bmm(gates.unsqueeze(1), scattered.view(-1, 4, D)).squeeze(1).view_as(x)


@UNSEEN.case(
    "s_block_diagonal",
    "I6",
    "match",
    "rows padded to blocks of 4, every block multiplied by its expert's matrix",
)
class BlockDiagonal(nn.Module):
    """Dropless: no expert is ever full; padding rows are zero and nothing reads their results."""

    def __init__(self, block=4):
        super().__init__()
        self.block = block
        self.router = nn.Linear(D, E, bias=False)
        self.w1, self.w2 = make_stack(E, D, H), make_stack(E, H, D)

    def forward(self, x):
        t = x.reshape(-1, D)
        weights, experts = self.router(t).softmax(-1).topk(K, -1)
        bin_ids, indices = torch.sort(experts.flatten(), stable=True)
        per_expert = torch.bincount(experts.flatten(), minlength=E)
        padded = (per_expert + self.block - 1) // self.block * self.block
        start, padded_start = per_expert.cumsum(0) - per_expert, padded.cumsum(0) - padded
        place = torch.arange(len(indices)) - start[bin_ids] + padded_start[bin_ids]
        rows = t.new_zeros(int(padded.sum()), D).index_copy(0, place, t[indices // K])
        block_expert = torch.repeat_interleave(torch.arange(E), padded // self.block)
        h = torch.bmm(rows.view(-1, self.block, D), self.w1[block_expert])
        y = torch.bmm(F.gelu(h, approximate="tanh"), self.w2[block_expert]).view(-1, D)
        y = y[place] * weights.flatten()[indices].unsqueeze(-1)
        return t.new_zeros(t.shape).index_add(0, indices // K, y).view_as(x)


@UNSEEN.case(
    "s_longest_queue_bmm",
    "I6",
    "match",
    "buffers [E, longest queue, D] filled by scatter, bmm, gathered back",
)
class LongestQueue(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(D, E)
        self.w_up, self.w_gate, self.w_down = make_stack(E, D, H), make_stack(E, D, H), make_stack(E, H, D)

    def forward(self, x):
        flat = x.reshape(-1, D)
        val, idx = self.gate(flat).topk(K, dim=-1)
        p = F.softmax(val, dim=-1)
        onehot = F.one_hot(idx.reshape(-1), E)
        rank = (onehot.cumsum(0) * onehot).sum(-1) - 1
        longest = int(onehot.sum(0).max().item())
        at = idx.reshape(-1) * longest + rank
        buf = flat.new_zeros(E * longest, D)
        buf = buf.scatter(0, at[:, None].expand(-1, D), flat.repeat_interleave(K, 0)).view(E, longest, D)
        h = F.silu(torch.bmm(buf, self.w_gate)) * torch.bmm(buf, self.w_up)
        y = torch.bmm(h, self.w_down).view(E * longest, D)[at].view(-1, K, D)
        return torch.einsum("nk,nkd->nd", p, y).view_as(x)


@UNSEEN.case("s_pr_moe", "I3", "match", "DeepSpeed PR-MoE: a dense MLP beside the experts, mixed by a learned softmax")
class ResidualMoe(nn.Module):
    def __init__(self):
        super().__init__()
        self.wg = nn.Linear(D, E, bias=False)
        self.experts = nn.ModuleList([Mlp() for _ in range(E)])
        self.mlp = Mlp()
        self.coefficient = nn.Linear(D, 2)

    def forward(self, x):
        t = x.reshape(-1, D)
        prob = self.wg(t).softmax(-1)
        top = prob.argmax(-1)
        gate = prob.gather(1, top[:, None])
        moe = torch.zeros_like(t)
        for e in range(E):
            rows = torch.nonzero(top == e).flatten()
            if rows.numel() > 0:
                moe[rows] = self.experts[e](t[rows])
        moe = moe * gate
        coef = F.softmax(self.coefficient(t), dim=-1)
        return (moe * coef[..., 0:1] + self.mlp(t) * coef[..., 1:]).view_as(x)


@UNSEEN.case("s_minimal_tutorial", "I9", "match", "for k: for e: mask; boolean rows, in-place addition")
class SlotThenExpert(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(D, E, bias=False)
        self.experts = nn.ModuleList(
            [nn.Sequential(nn.Linear(D, 4 * D), nn.ReLU(), nn.Linear(4 * D, D), nn.Dropout(0.0)) for _ in range(E)]
        )

    def forward(self, x):
        logits = self.gate(x)
        sparse = torch.full_like(logits, float("-inf"))
        top, indices = logits.topk(K, dim=-1)
        router_output = F.softmax(sparse.scatter(-1, indices, top), dim=-1)
        final_output = torch.zeros_like(x)
        flat_x = x.view(-1, x.size(-1))
        flat_router = router_output.view(-1, router_output.size(-1))
        for i, expert in enumerate(self.experts):
            expert_mask = (indices == i).any(dim=-1)
            flat_mask = expert_mask.view(-1)
            if flat_mask.any():
                expert_output = expert(flat_x[flat_mask])
                gating_scores = flat_router[flat_mask, i].unsqueeze(1)
                final_output[expert_mask] += (expert_output * gating_scores).squeeze(1)
        return final_output
