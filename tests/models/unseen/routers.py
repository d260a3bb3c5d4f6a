"""Unusual routers around ordinary experts."""

from __future__ import annotations

import dataclasses
import math

import torch
import torch.nn as nn
import torch.nn.functional as F

from ..case import D, E, K
from ..parts import Gated, Mlp
from .suite import UNSEEN


class Experts(nn.Module):
    """Ordinary experts: `out[t] = sum_k w[t, k] * f_idx[t, k](x[t])`; ids outside 0..E-1 select no expert."""

    def __init__(self, make=Gated, count=E):
        super().__init__()
        self.experts = nn.ModuleList([make() for _ in range(count)])

    def mix(self, t, w, idx):
        out = torch.zeros_like(t)
        for e, f in enumerate(self.experts):
            n, k = torch.where(idx == e)
            out.index_add_(0, n, f(t[n]) * w[n, k, None].to(t.dtype))
        return out

    def forward(self, x, *extra):
        t = x.reshape(-1, D)
        w, idx = self.route(t, *extra)
        return self.mix(t, w, idx).view_as(x)


@UNSEEN.case(
    "s_cosine_router",
    "I1",
    "match",
    "normalised projection against normalised centroids, learned temperature",
)
class CosineRouter(Experts):
    def __init__(self):
        super().__init__()
        self.cosine_projector = nn.Linear(D, 12)
        self.centroids = nn.Parameter(torch.empty(12, E))
        self.temperature = nn.Parameter(torch.zeros(1))

    def route(self, t):
        logit_scale = torch.clamp(self.temperature, max=math.log(100.0)).exp()
        sim = F.normalize(self.cosine_projector(t), dim=1) @ F.normalize(self.centroids, dim=0)
        w, idx = torch.softmax(sim * logit_scale * 10, dim=1).topk(K, dim=1)
        return w, idx


@UNSEEN.case("s_cosine_similarity", "I1", "match", "torch's own cosine, whose parts hide from autograd")
class CosineOfTorch(Experts):
    def __init__(self):
        super().__init__()
        self.centroids = nn.Parameter(torch.randn(E, D))

    def route(self, t):
        sim = F.cosine_similarity(t[:, None], x2=self.centroids, dim=-1)
        return torch.topk(F.softmax(5 * sim, dim=-1), K)


def _skew_last_linear(block):
    last = block.router[-1]
    last.weight[4:], last.bias[4:], last.weight[1:4:2] = 0, -5, -last.weight[0:4:2]
    last.bias[:4] = 0
    return 2


@UNSEEN.case("s_mlp_router", "I1", "match", "a two-layer router with tanh", skew=_skew_last_linear)
class MlpRouter(Experts):
    def __init__(self):
        super().__init__(Mlp)
        self.router = nn.Sequential(nn.Linear(D, 16), nn.Tanh(), nn.LayerNorm(16), nn.Linear(16, E))

    def route(self, t):
        w, idx = torch.topk(self.router(t), K)
        return w.softmax(-1), idx


@UNSEEN.case("s_negative_weights_l1", "I1", "match", "raw logits of the largest magnitude as weights, L1-normalised")
class L1Weights(Experts):
    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(D, E)

    def route(self, t):
        logits = self.gate(t)
        idx = logits.abs().topk(3).indices
        w = logits.gather(-1, idx)
        return F.normalize(w, p=1, dim=-1), idx


@UNSEEN.case("s_unnormalised_tanh", "I1", "match", "tanh of the chosen logits, not normalised at all")
class TanhWeights(Experts):
    def __init__(self):
        super().__init__(Mlp)
        self.gate = nn.Linear(D, E)

    def route(self, t):
        idx = self.gate(t).argsort(dim=-1, descending=True)[:, :K]
        return torch.tanh(self.gate(t)).take_along_dim(idx, -1), idx


@UNSEEN.case("s_router_on_other_norm", "I1", "match", "router reads RMS-normed tokens, experts read the raw ones")
class RouterNorm(Experts):
    def __init__(self):
        super().__init__()
        self.norm_weight = nn.Parameter(torch.ones(D))
        self.gate = nn.Linear(D, E, bias=False)

    def route(self, t):
        normed = t * torch.rsqrt(t.pow(2).mean(-1, keepdim=True) + 1e-6) * self.norm_weight
        w, idx = self.gate(normed).softmax(-1).topk(K)
        return w, idx


@UNSEEN.case(
    "s_router_input_argument",
    "I1",
    "match",
    "the router reads another tensor that the caller hands in",
    extra=lambda b, s, g, dtype: (torch.randn(b, s, D, generator=g).to(dtype),),
)
class RouterInput(Experts):
    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(D, E, bias=False)

    def route(self, t, router_input):
        w, idx = self.gate(router_input.reshape(-1, D)).softmax(-1).topk(K)
        return w / w.sum(-1, keepdim=True), idx


def _token_ids(b, s, g, dtype):
    return (torch.randint(0, 50, (b, s), generator=g),)


def _skew_table(block):
    block.table.remainder_(4)
    return 1


@UNSEEN.case(
    "s_hash_table",
    "I1",
    "match",
    "hash layer: a fixed table from token id to expert, no learned router",
    extra=_token_ids,
    skew=_skew_table,
)
class HashTable(Experts):
    def __init__(self):
        super().__init__(Mlp)
        self.register_buffer("table", torch.randperm(50) % E)

    def forward(self, x, input_ids):
        t, expert = x.reshape(-1, D), self.table[input_ids].reshape(-1)
        out = torch.zeros_like(t)
        for e, f in enumerate(self.experts):
            rows = (expert == e).nonzero().squeeze(-1)
            out = out.index_add(0, rows, f(t[rows]))
        return out.view_as(x)


@UNSEEN.case(
    "s_hash_arithmetic",
    "I1",
    "match",
    "two hashes of the token id pick two experts, both with weight 1/2",
    extra=_token_ids,
    skew=lambda block: 1,
)
class HashArithmetic(Experts):
    def route(self, t, input_ids):
        ids = input_ids.reshape(-1)
        idx = torch.stack([(ids * 7919) % E, (ids * 104729 + 1) % E], -1)
        return torch.full(idx.shape, 0.5, dtype=t.dtype), idx


@UNSEEN.case(
    "s_two_level_gating",
    "I1",
    "match",
    "softmax over groups, then within the group: flattened ids and products",
)
class TwoLevel(Experts):
    def __init__(self, groups=4):
        super().__init__()
        self.groups = groups
        self.group_gate = nn.Linear(D, groups, bias=False)
        self.gate = nn.Linear(D, E, bias=False)

    def route(self, t):
        pg, g = self.group_gate(t).softmax(-1).topk(2, -1)
        inner = self.gate(t).view(-1, self.groups, E // self.groups).softmax(-1)
        chosen = inner.gather(1, g.unsqueeze(-1).expand(-1, -1, E // self.groups))
        pe, e = chosen.max(-1)
        return pg * pe, g * (E // self.groups) + e


@UNSEEN.case(
    "s_loss_free_balancing",
    "I1",
    "match",
    "a bias buffer moves towards the mean load after every training step",
)
class LossFreeBalancing(Experts):
    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(D, E, bias=False)
        self.register_buffer("expert_bias", torch.zeros(E))

    def route(self, t):
        scores = self.gate(t).sigmoid()
        idx = (scores + self.expert_bias).topk(K, -1).indices
        w = scores.gather(-1, idx)
        if self.training:
            with torch.no_grad():
                load = torch.bincount(idx.flatten(), minlength=E).to(scores.dtype)
                self.expert_bias += 0.01 * torch.sign(load.mean() - load)
        return w / w.sum(-1, keepdim=True), idx


@UNSEEN.case("s_multinomial", "I1", "match", "experts drawn from the router's distribution", rng=True)
class Multinomial(Experts):
    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(D, E)

    def route(self, t):
        p = self.gate(t).softmax(-1)
        idx = torch.multinomial(p, K) if self.training else p.topk(K).indices
        return p.gather(1, idx), idx


@UNSEEN.case("s_gumbel_noise", "I1", "match", "Gumbel noise on the logits for the choice, clean weights", rng=True)
class Gumbel(Experts):
    def __init__(self):
        super().__init__(Mlp)
        self.gate = nn.Linear(D, E)

    def route(self, t):
        logits = self.gate(t)
        noisy = logits
        if self.training:
            noisy = logits - torch.log(-torch.log(torch.rand_like(logits).clamp(1e-6, 1 - 1e-6)))
        idx = noisy.topk(K, -1).indices
        return logits.gather(-1, idx).softmax(-1), idx


@UNSEEN.case(
    "s_straight_through_one",
    "I1",
    "match",
    "weight w / w.detach(): 1 in the forward, a gradient in the backward",
)
class StraightThroughOne(Experts):
    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(D, E, bias=False)

    def route(self, t):
        p, idx = self.gate(t).softmax(-1).topk(1, -1)
        return p / p.detach(), idx


@UNSEEN.case("s_float32_router", "I1", "match", "router in float32 whatever the tokens are, autocast switched off")
class Float32Router(Experts):
    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(D, E, bias=False)

    def route(self, t):
        with torch.autocast("cpu", enabled=False):
            logits = F.linear(t.float(), self.gate.weight.float())
        w, idx = F.softmax(logits, dim=1, dtype=torch.float).topk(K, dim=-1)
        return (w / w.sum(-1, keepdim=True)).to(t.dtype), idx


@UNSEEN.case(
    "s_kth_value_threshold",
    "I2",
    "match",
    "logits below the k-th value are masked with -inf before the softmax",
)
class KthValue(Experts):
    def __init__(self):
        super().__init__(Mlp)
        self.gate = nn.Linear(D, E, bias=False)

    def forward(self, x):
        logits = self.gate(x)
        kth = logits.kthvalue(E - K + 1, dim=-1, keepdim=True).values
        gates = logits.masked_fill(logits < kth, float("-inf")).softmax(-1)
        return sum(gates[..., e : e + 1] * f(x) for e, f in enumerate(self.experts))


@UNSEEN.case("s_top_p", "I1", "either", "as many experts as it takes to reach 60 % of the probability")
class TopP(Experts):
    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(D, E)

    def route(self, t):
        p, idx = self.gate(t).softmax(-1).sort(-1, descending=True)
        before = p.cumsum(-1) - p
        keep = before < 0.6
        return p * keep, idx.masked_fill(~keep, E)


@UNSEEN.case("s_relu_router", "I1c", "either", "ReMoE: ReLU gates, every positive one counts, any number per token")
class ReluRouter(Experts):
    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(D, E)

    def forward(self, x):
        t = x.reshape(-1, D)
        gates, out = self.gate(t).relu(), torch.zeros_like(t)
        for e, f in enumerate(self.experts):
            rows = gates[:, e].nonzero().squeeze(-1)
            out = out.index_add(0, rows, f(t[rows]) * gates[rows, e, None])
        return out.view_as(x)


@UNSEEN.case(
    "s_gumbel_straight_through",
    "I3",
    "either",
    "hard one-hot forward, soft gradient to all experts",
    rng=True,
)
class GumbelStraightThrough(Experts):
    """Dense in the backward: the outputs of unselected experts are part of the router's gradient."""

    def __init__(self):
        super().__init__(Mlp)
        self.gate = nn.Linear(D, E)

    def forward(self, x):
        gates = F.gumbel_softmax(self.gate(x), hard=True, dim=-1)
        outputs = torch.stack([f(x) for f in self.experts], -2)
        return (gates.unsqueeze(-1) * outputs).sum(-2)


@UNSEEN.case(
    "s_threshold_second",
    "I1",
    "either",
    "the second expert only where its probability is at least half of the first",
)
class ThresholdSecond(Experts):
    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(D, E)

    def route(self, t):
        p, idx = self.gate(t).softmax(-1).topk(2, -1)
        second = p[:, 1] >= 0.5 * p[:, 0]
        w = torch.stack([p[:, 0], torch.where(second, p[:, 1], 0.0)], -1)
        return w / w.sum(-1, keepdim=True), torch.stack([idx[:, 0], torch.where(second, idx[:, 1], E)], -1)


@UNSEEN.case("s_sqrt_softplus", "I1", "match", "square root of softplus scores, z-loss and entropy returned in a dict")
class SqrtSoftplus(Experts):
    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(D, E, bias=False)

    def forward(self, x):
        t = x.reshape(-1, D)
        logits = self.gate(t)
        scores = F.softplus(logits).sqrt()
        w, idx = scores.topk(K, -1)
        z_loss = torch.logsumexp(logits, -1).square().mean()
        p = scores / scores.sum(-1, keepdim=True)
        entropy = -(p * (p + 1e-9).log()).sum(-1).mean()
        y = self.mix(t, 1.5 * w / (w.sum(-1, keepdim=True) + 1e-20), idx)
        return {"output": y.view_as(x), "z_loss": z_loss, "entropy": entropy}


@dataclasses.dataclass
class RoutingOutput:
    weights: torch.Tensor
    expert_ids: torch.Tensor
    balance_loss: torch.Tensor


class DataclassRouter(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(D, E))

    def forward(self, t):
        p = torch.matmul(t, self.weight).softmax(-1)
        w, idx = p.topk(K)
        load = F.one_hot(idx, E).sum((0, 1)).to(p.dtype) / idx.numel()
        return RoutingOutput(w, idx, E * (load * p.mean(0)).sum())


@UNSEEN.case(
    "s_router_returns_dataclass",
    "I1",
    "match",
    "a router module that returns a dataclass; (y, loss) returned",
)
class ReturnsDataclass(Experts):
    def __init__(self):
        super().__init__()
        self.router = DataclassRouter()

    def forward(self, x):
        t = x.reshape(-1, D)
        r = self.router(t)
        return self.mix(t, r.weights, r.expert_ids).view_as(x), r.balance_loss


def _skew_router_weight(block):
    w = block.router.weight
    w[:, 1:4:2], w[:, 4:] = -w[:, 0:4:2], 0
    return 1


UNSEEN.specs["s_router_returns_dataclass"] = dataclasses.replace(
    UNSEEN.specs["s_router_returns_dataclass"], skew=_skew_router_weight
)


@UNSEEN.case("s_sentence_level", "I1", "either", "one choice per sequence, from the mean of its tokens")
class SentenceLevel(Experts):
    def __init__(self):
        super().__init__(Mlp)
        self.gate = nn.Linear(D, E)

    def forward(self, x):
        p, idx = self.gate(x.mean(1)).softmax(-1).topk(K, -1)
        w, idx = (v.repeat_interleave(x.shape[1], 0) for v in (p, idx))
        return self.mix(x.reshape(-1, D), w, idx).view_as(x)


@UNSEEN.case(
    "s_task_router",
    "I1",
    "either",
    "multi-task: a gate per task, chosen by the sample's task id",
    extra=lambda b, s, g, dtype: (torch.randint(0, 3, (b,), generator=g),),
)
class TaskRouter(Experts):
    def __init__(self):
        super().__init__(Mlp)
        self.task_gates = nn.Parameter(torch.empty(3, E, D))

    def forward(self, x, task):
        logits = torch.einsum("bsd,bed->bse", x, self.task_gates[task])
        w, idx = logits.softmax(-1).topk(K, -1)
        return self.mix(x.reshape(-1, D), w.reshape(-1, K), idx.reshape(-1, K)).view_as(x)


def _skew_tasks(block):
    block.task_gates[:, 1:4:2], block.task_gates[:, 4:] = -block.task_gates[:, 0:4:2], 0
    return 1


UNSEEN.specs["s_task_router"] = dataclasses.replace(UNSEEN.specs["s_task_router"], skew=_skew_tasks)
