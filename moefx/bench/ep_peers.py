"""A layer in plain torch with its experts over all ranks, as a peer in `bench ep` (see `ep_variants.PEERS`).

`AllToAllLayer` is plain torch, all-to-all and `grouped_mm`. The host reads the row counts, the all-to-all sends a row
for each slot of a token, and an index puts the rows of each local expert together: what training frameworks do without
kernels of their own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.nn.functional import all_to_all_single

from .shapes import Shape, activation

if TYPE_CHECKING:
    from .ep_layers import Layer


def choose_experts(router: nn.Linear, bias: Tensor | None, x: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
    """Return weights and ids of the experts of each token, [T,K] each. bias: [E], added to the logits."""
    logits = router(x).float()
    return (logits if bias is None else logits + bias).softmax(-1).topk(top_k)


class AllToAllLayer(nn.Module):
    """A MoE layer whose experts are spread over all ranks, [T,d] to [T,d].

    Args:
        router, bias: see `choose_experts`.
        up, down: the matrices of all experts. The layer keeps the part of this rank.
    """

    bias: Tensor | None

    def __init__(self, shape: Shape, router: nn.Linear, bias: Tensor | None, up: Tensor, down: Tensor):
        super().__init__()
        self.shape, self.ranks = shape, dist.get_world_size()
        self.num_local, first = shape.E // self.ranks, shape.E // self.ranks * dist.get_rank()
        own = slice(first, first + self.num_local)
        self.router = router
        self.register_buffer("bias", bias)
        self.up, self.down = nn.Parameter(up[own].detach().clone()), nn.Parameter(down[own].detach().clone())

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = choose_experts(self.router, self.bias, x, self.shape.K)
        slots = chosen.flatten()
        order = slots.argsort(stable=True)
        rows = x[order // self.shape.K]
        counts = torch.bincount(slots, minlength=self.shape.E)
        arriving = torch.empty_like(counts)
        dist.all_to_all_single(arriving, counts)
        by_rank = torch.stack([counts, arriving]).view(2, self.ranks, self.num_local)
        sent, received = by_rank.sum(2).tolist()
        arrived = all_to_all_single(rows.new_empty(sum(received), x.shape[1]), rows, received, sent)
        experts = torch.arange(self.num_local, device=x.device).repeat(self.ranks)
        by_expert = experts.repeat_interleave(arriving, output_size=sum(received)).argsort(stable=True)
        ends = by_rank[1].sum(0).cumsum(0).to(torch.int32)
        hidden = F.grouped_mm(arrived[by_expert], self.up.transpose(1, 2), offs=ends)
        outputs = F.grouped_mm(activation(self.shape, hidden), self.down.transpose(1, 2), offs=ends)
        returned = torch.empty_like(outputs).index_copy(0, by_expert, outputs)
        back = all_to_all_single(torch.empty_like(rows), returned, sent, received)
        by_slot = torch.empty_like(back).index_copy(0, order, back).view(*chosen.shape, -1)
        return (by_slot * weights[..., None].to(x.dtype)).sum(1)


def build_all_to_all(layer: Layer, shape: Shape) -> nn.Module:
    return AllToAllLayer(shape, layer.router, layer.bias, layer.up, layer.down)
