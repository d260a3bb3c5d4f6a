"""Plain mixture of experts, and an equal one rewritten by hand, to test `verify` without a compiler.

Each fault of `Rewritten` is a mistake that a compiler could make.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Expert(nn.Module):
    def __init__(self, dim: int, hidden: int):
        super().__init__()
        self.up = nn.Linear(dim, 2 * hidden)
        self.down = nn.Linear(hidden, dim)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.up(x).chunk(2, -1)
        return self.down(F.silu(gate) * up)


class Plain(nn.Module):
    """Loop over experts, with a running load, an auxiliary loss as an attribute, and dropout at the end."""

    def __init__(self, dim=16, hidden=8, num_experts=8, top_k=2, dropout=0.1):
        super().__init__()
        self.router = nn.Linear(dim, num_experts)
        self.experts = nn.ModuleList(Expert(dim, hidden) for _ in range(num_experts))
        self.dropout = nn.Dropout(dropout)
        self.top_k = top_k
        self.register_buffer("load", torch.zeros(num_experts))

    def route(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        scores = F.softmax(self.router(x), -1, dtype=torch.float32)
        weights, ids = scores.topk(self.top_k, -1)
        weights = (weights / weights.sum(-1, keepdim=True)).to(x.dtype)
        if self.training:
            self.load += F.one_hot(ids, len(self.experts)).sum((0, 1))
        self.aux_loss = scores.mean(0).square().sum()
        return scores, weights, ids

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x_SD = x.reshape(-1, x.shape[-1])
        scores, weights, ids = self.route(x_SD)
        out = torch.zeros_like(x_SD)
        for e, expert in enumerate(self.experts):
            token, slot = torch.where(ids == e)
            out.index_add_(0, token, expert(x_SD[token]) * weights[token, slot, None])
        return self.dropout(out.view_as(x)), scores


class Rewritten(Plain):
    """Run all experts on all tokens, then select: other sums, same function. `fault` names a mistake."""

    fault = ""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x_SD = x.reshape(-1, x.shape[-1])
        scores, weights, ids = self.route(x_SD)
        up = torch.stack([e.up.weight for e in self.experts])
        up_bias = torch.stack([e.up.bias for e in self.experts])
        down = torch.stack([e.down.weight for e in self.experts])
        down_bias = torch.stack([e.down.bias for e in self.experts])
        up, down, weights, ids, x_SD = self.spoil(up, down, weights, ids, x_SD)
        gate, value = (torch.einsum("sd,efd->sef", x_SD, up) + up_bias).chunk(2, -1)
        hidden = (F.gelu(gate) if self.fault == "other activation" else gate * torch.sigmoid(
            gate * (1.01 if self.fault == "activation constant" else 1.0))) * value  # fmt: skip
        rows = torch.einsum("sef,edf->sed", hidden, down)
        if self.fault != "missing bias":
            rows = rows + down_bias
        out = (rows.gather(1, ids[..., None].expand(-1, -1, x_SD.shape[-1])) * weights[..., None]).sum(1)
        if self.fault == "dropped token":
            out = out * (torch.arange(len(out)) != 7)[:, None]
        if self.fault == "overflow":
            out = out * 3e38 / 3e38 if out.dtype == torch.float32 else out * 6e4 * 6e4
        if self.fault == "one NaN":
            out = torch.where(torch.arange(out.numel()).view_as(out) == 3, torch.nan, out)
        out = out.view_as(x)
        return (out if self.fault == "no dropout" else self.dropout(out)), scores

    def spoil(self, up, down, weights, ids, x):
        last = len(self.experts) - 1
        if self.fault == "swapped experts":
            ids = torch.where(ids == 0, 1, torch.where(ids == 1, 0, ids))
        if self.fault == "dropped pair":
            weights = weights * (torch.arange(weights.numel()).view_as(weights) != 5)
        if self.fault == "weights of the other slot":
            weights = weights.flip(-1)
        if self.fault == "missing router gradient":
            weights = weights.detach()
        if self.fault == "scaled weight gradient":
            up = scale_gradient(up, 1.001)
        if self.fault == "scaled gradient of one expert":
            down = torch.cat([down[:last], scale_gradient(down[last:], 1.01)])
        if self.fault == "lost gradient of one expert":
            down = torch.cat([down[:last], down[last:].detach()])
        if self.fault == "missing input gradient":
            x = x.detach()
        return up, down, weights, ids, x

    def route(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        before, aux = self.load.clone(), getattr(self, "aux_loss", None)
        scores, weights, ids = super().route(x)
        if self.fault == "stale buffer":
            self.load.copy_(before)
        if self.fault == "stale attribute" and aux is not None:
            self.aux_loss = aux
        if self.fault == "not normalised":
            weights = scores.gather(-1, ids).to(x.dtype)
        if self.fault == "next expert":
            ids = (ids + (torch.arange(len(ids)) == 3)[:, None]) % len(self.experts)
        return scores, weights, ids


FAULTS = (
    "swapped experts", "dropped token", "dropped pair", "weights of the other slot", "not normalised",
    "next expert", "missing router gradient", "scaled weight gradient", "scaled gradient of one expert",
    "lost gradient of one expert", "missing input gradient", "other activation", "activation constant",
    "missing bias", "no dropout", "one NaN", "stale buffer", "stale attribute",
)  # fmt: skip


def scale_gradient(t: Tensor, factor: float) -> Tensor:
    """Return `t` with its gradient scaled by `factor`."""
    return t * factor + (t * (1 - factor)).detach()


def build_pair(seed: int = 0, fault: str = "", **kwargs) -> tuple[Plain, Rewritten]:
    """Return the original and the rewritten model. They share parameters, like a compiled model and its original."""
    torch.manual_seed(seed)
    original = Plain(**kwargs)
    original.aux_loss = torch.zeros(())
    rewritten = Rewritten(**kwargs)
    rewritten.load_state_dict(original.state_dict())
    for name, p in original.named_parameters():
        module, _, leaf = name.rpartition(".")
        setattr(rewritten.get_submodule(module), leaf, p)
    rewritten.aux_loss = torch.zeros(())
    rewritten.fault = fault
    return original, rewritten
