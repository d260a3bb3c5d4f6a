"""The layer that `bench ep` times: a router and stacked experts as a plain program."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn

from .ep_peers import choose_experts
from .shapes import Shape, activation, draw_tensors, skew_scores

WEIGHT_BYTES = 2  # of a routing weight: the layer multiplies by weights in bfloat16


class Layer(nn.Module):
    """A router and stacked experts as a plain program that runs all experts on all tokens."""

    bias: Tensor | None

    def __init__(self, shape: Shape, shared: bool = False, routing: str = "uniform", device: str = "cuda"):
        super().__init__()
        _, w1, w2, _ = draw_tensors(shape, device=device)
        self.shape = shape
        self.up, self.down = nn.Parameter(w1), nn.Parameter(w2)
        self.router = nn.Linear(shape.d, shape.E, bias=False, device=device, dtype=torch.bfloat16)
        nn.init.normal_(self.router.weight, std=shape.d**-0.5)  # normal logits
        bias = None if routing == "uniform" else skew_scores(torch.zeros(shape.E, device=device), routing)
        self.register_buffer("bias", bias)
        self.shared = _Mlp(shape, device) if shared else None

    def choose(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return weights and ids of the experts of each token, [T,K] each."""
        return choose_experts(self.router, self.bias, x, self.shape.K)

    def compute_imbalance(self, x: Tensor) -> float:
        """Compute the rows of the busiest rank divided by the mean, for these tokens on this rank."""
        rows = torch.bincount(self.choose(x)[1].flatten(), minlength=self.shape.E)
        dist.all_reduce(rows)
        by_rank = rows.view(dist.get_world_size(), -1).sum(1).double()
        return float(by_rank.max() / by_rank.mean())

    def gather_choices(self, x: Tensor) -> Tensor:
        """Return the experts of the tokens of all ranks, [W*T,K] on the CPU. Collective."""
        ids = self.choose(x)[1]
        parts = [torch.empty_like(ids) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, ids)
        return torch.cat(parts).cpu()

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = self.choose(x)
        outputs = torch.einsum(
            "esh,edh->sed", activation(self.shape, torch.einsum("sd,ehd->esh", x, self.up)), self.down
        )
        rows = outputs.gather(1, chosen[..., None].expand(*chosen.shape, x.shape[-1]))
        out = (rows * weights[..., None].to(x.dtype)).sum(1)
        return out if self.shared is None else out + self.shared(x)


class _Mlp(nn.Module):
    """A shared expert."""

    def __init__(self, shape: Shape, device: str):
        super().__init__()
        self.shape = shape
        self.up = nn.Linear(shape.d, shape.parts * shape.h, bias=False, device=device, dtype=torch.bfloat16)
        self.down = nn.Linear(shape.h, shape.d, bias=False, device=device, dtype=torch.bfloat16)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(activation(self.shape, self.up(x)))
