"""Small models of mixtures of experts that several tests share."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

from moefx import Plan
from moefx.capture.environment.worker_thread import run_in_worker
from moefx.compiler.block_compiler import BlockRewrite, rewrite_block

D, H, E, K = 6, 8, 4, 2


def rewritten(block: nn.Module, *args: torch.Tensor, plan: Plan | None = None) -> BlockRewrite:
    """Rewrite the block as `compile` does. Raises `Refused` if the block is not a mixture of experts."""
    return run_in_worker(lambda: rewrite_block(block, "moe", args or (torch.zeros(5, D),), {}, plan or Plan()))


class Gated(nn.Module):
    def __init__(self, bias: bool = False):
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(D, H, bias), nn.Linear(D, H, bias), nn.Linear(H, D, bias)

    def forward(self, x):
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Mlp(nn.Module):
    def __init__(self, act: Callable = F.relu):
        super().__init__()
        self.up, self.down, self.act = nn.Linear(D, H), nn.Linear(H, D), act

    def forward(self, x):
        return self.down(self.act(self.up(x)))


class Loop(nn.Module):
    """Loop over experts with `index_add`."""

    def __init__(self, expert: Callable[[], nn.Module] = Gated, k: int = K, num_experts: int = E):
        super().__init__()
        self.gate, self.k = nn.Linear(D, num_experts, bias=False), k
        self.experts = nn.ModuleList(expert() for _ in range(num_experts))

    def route(self, x):
        return self.gate(x).softmax(-1).topk(self.k, -1)

    def expert(self, e, x, w):
        return self.experts[e](x) * w

    def mixed(self, x, w, ids):
        out = torch.zeros_like(x)
        for e in range(len(self.experts)):
            t, k = torch.where(ids == e)
            out = out.index_add(0, t, self.expert(e, x[t], w[t, k, None]))
        return out

    def forward(self, x):
        return self.mixed(x, *self.route(x))


class Block(Loop):
    """Mixture whose forward is `fn(block, x, *rest)`."""

    def __init__(self, fn, expert: Callable[[], nn.Module] = Mlp, **attributes):
        super().__init__(expert)
        self.fn = fn
        for name, value in attributes.items():
            setattr(self, name, value)

    def forward(self, x, *rest):
        return self.fn(self, x, *rest)


class Dropping(Loop):
    """Give each expert at most three tokens."""

    def mixed(self, x, w, ids):
        out = torch.zeros_like(x)
        for e in range(len(self.experts)):
            t, k = torch.where(ids == e)
            t, k = t[:3], k[:3]
            out = out.index_add(0, t, self.expert(e, x[t], w[t, k, None]))
        return out


class Stacked(nn.Module):
    """Run all experts on all tokens, then gather the selected outputs. The experts are stacked parameters."""

    def __init__(self, body: Callable, num_experts: int = E, **shapes: tuple[int, ...]):
        super().__init__()
        self.gate, self.body, self.num_experts = nn.Linear(D, num_experts, bias=False), body, num_experts
        for name, shape in shapes.items():
            setattr(self, name, nn.Parameter(torch.randn(num_experts, *shape) / 3))

    def forward(self, x):
        w, ids = self.gate(x).softmax(-1).topk(K, -1)
        dense = self.body(self, x.expand(self.num_experts, *x.shape))
        chosen = dense.transpose(0, 1).gather(1, ids[..., None].expand(*ids.shape, D))
        return (chosen * w[..., None]).sum(1)


class WithBias(nn.Module):
    """Compute `x @ w + bias` for each expert, with stacked parameters, as gpt-oss does."""

    def __init__(self, scale: float = 1.0):
        super().__init__()
        self.gate = nn.Linear(D, E, bias=False)
        self.w1, self.w2 = (nn.Parameter(torch.randn(E, *shape) / 3) for shape in ((D, 2 * H), (H, D)))
        self.b1, self.b2 = (nn.Parameter(scale * torch.randn(E, n)) for n in (2 * H, D))

    def forward(self, x):
        w, ids = self.gate(x).softmax(-1).topk(K, -1)
        out = torch.zeros_like(x)
        for e in range(E):
            t, k = torch.where(ids == e)
            h = x[t] @ self.w1[e] + self.b1[e]
            act = h[:, ::2].clamp(max=7.0).sigmoid() * h[:, 1::2]
            y = act.to(self.w2.dtype) @ self.w2[e] + self.b2[e]
            out = out.index_add(0, t, (y * w[t, k, None]).to(x.dtype))
        return out
