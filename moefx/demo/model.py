"""A small DeepSeek-style language model as one writes it first: plain PyTorch, a loop over the experts.

Nothing here knows about moefx. Letters: N sequences of T tokens, S = N*T, D model dim, K experts a token.
"""

from __future__ import annotations

import dataclasses

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclasses.dataclass(frozen=True)
class Config:
    vocabulary: int = 256  # bytes
    dim: int = 128
    layers: int = 3
    heads: int = 4
    dense_layers: int = 1  # the first layers have an ordinary MLP, as in DeepSeek-V2 and V3
    dense_hidden: int = 384
    num_experts: int = 64  # fine-grained: many small experts ...
    expert_hidden: int = 64
    top_k: int = 6  # ... every token takes several of them
    shared_experts: int = 2  # and some that every token takes
    routed_scale: float = 1.5
    context: int = 128


class RMSNorm(nn.Module):
    def __init__(self, dim: int, eps: float = 1e-6):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps) * self.weight


class SwiGLU(nn.Module):
    def __init__(self, dim: int, hidden: int):
        super().__init__()
        self.gate_proj = nn.Linear(dim, hidden, bias=False)
        self.up_proj = nn.Linear(dim, hidden, bias=False)
        self.down_proj = nn.Linear(hidden, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Router(nn.Module):
    """Sigmoid scores; a bias that takes part in the choice only keeps the experts busy (DeepSeek-V3)."""

    balance_bias: Tensor
    load: Tensor

    def __init__(self, config: Config):
        super().__init__()
        self.top_k, self.scale = config.top_k, config.routed_scale
        self.weight = nn.Parameter(torch.randn(config.num_experts, config.dim) * config.dim**-0.5)
        self.register_buffer("balance_bias", torch.zeros(config.num_experts))
        self.register_buffer("load", torch.zeros(config.num_experts))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        scores = F.linear(x, self.weight).sigmoid()
        expert_ids = (scores + self.balance_bias).topk(self.top_k, dim=-1).indices
        weights = scores.gather(-1, expert_ids)
        weights = self.scale * weights / weights.sum(-1, keepdim=True)
        if self.training:
            self.load.index_add_(0, expert_ids.flatten(), torch.ones_like(weights).flatten())
        return weights, expert_ids

    @torch.no_grad()
    def rebalance(self, rate: float = 1e-3) -> None:
        """Push the bias of the overloaded experts down and of the idle ones up; once a training step."""
        self.balance_bias += rate * torch.sign(self.load.mean() - self.load)
        self.load.zero_()


class MoE(nn.Module):
    def __init__(self, config: Config):
        super().__init__()
        self.router = Router(config)
        self.experts = nn.ModuleList(SwiGLU(config.dim, config.expert_hidden) for _ in range(config.num_experts))
        self.shared = SwiGLU(config.dim, config.shared_experts * config.expert_hidden)

    def forward(self, x: Tensor) -> Tensor:
        shape = x.shape
        x = x.reshape(-1, shape[-1])  # [S, D]
        weights, expert_ids = self.router(x)  # [S, K] each
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            token, slot = torch.where(expert_ids == number)
            out.index_add_(0, token, expert(x[token]) * weights[token, slot, None])
        return (out + self.shared(x)).reshape(shape)


class Attention(nn.Module):
    cos: Tensor
    sin: Tensor

    def __init__(self, config: Config):
        super().__init__()
        self.heads = config.heads
        self.qkv = nn.Linear(config.dim, 3 * config.dim, bias=False)
        self.out = nn.Linear(config.dim, config.dim, bias=False)
        half = config.dim // config.heads // 2
        angle = torch.outer(torch.arange(config.context), 10000.0 ** (-torch.arange(half) / half))
        self.register_buffer("cos", angle.cos(), persistent=False)
        self.register_buffer("sin", angle.sin(), persistent=False)

    def rotate(self, x: Tensor) -> Tensor:
        """Apply a rotary position embedding to x[N, heads, T, D/heads]."""
        a, b = x.chunk(2, dim=-1)
        cos, sin = self.cos[: x.shape[-2]], self.sin[: x.shape[-2]]
        return torch.cat((a * cos - b * sin, a * sin + b * cos), dim=-1)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (y.unflatten(-1, (self.heads, -1)).transpose(1, 2) for y in self.qkv(x).chunk(3, dim=-1))
        y = F.scaled_dot_product_attention(self.rotate(q), self.rotate(k), v, is_causal=True)
        return self.out(y.transpose(1, 2).flatten(2))


class Layer(nn.Module):
    def __init__(self, config: Config, dense: bool):
        super().__init__()
        self.attention_norm, self.mlp_norm = RMSNorm(config.dim), RMSNorm(config.dim)
        self.attention = Attention(config)
        self.mlp = SwiGLU(config.dim, config.dense_hidden) if dense else MoE(config)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.mlp(self.mlp_norm(x))


class LanguageModel(nn.Module):
    """Token ids [N, T] in, logits [N, T, vocabulary] out; with `labels` [N, T] the mean cross entropy."""

    def __init__(self, config: Config | None = None):
        super().__init__()
        self.config = config = config or Config()
        self.embed = nn.Embedding(config.vocabulary, config.dim)
        self.layers = nn.ModuleList(
            Layer(config, dense=number < config.dense_layers) for number in range(config.layers)
        )
        self.norm = RMSNorm(config.dim)
        self.head = nn.Linear(config.dim, config.vocabulary, bias=False)
        nn.init.normal_(self.embed.weight, std=0.5)

    def forward(self, ids: Tensor, labels: Tensor | None = None) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        logits = self.head(self.norm(x))
        if labels is None:
            return logits
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())

    def routers(self) -> list[Router]:
        return [module for module in self.modules() if isinstance(module, Router)]
