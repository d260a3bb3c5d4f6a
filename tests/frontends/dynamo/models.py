"""Functions and modules with a mixture that a tracer captures in one graph, one per idiom."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from tests.mutants import bases

D, H, E, K = bases.D, bases.H, bases.E, bases.K  # all different


class SortAndGroup(bases.StackedExperts):
    """I6: sort rows by expert, run one grouped product, restore the order by the inverse permutation."""

    def __init__(self):
        super().__init__()
        self.w_gate, self.w_up = nn.Parameter(torch.empty(E, D, 16)), nn.Parameter(torch.empty(E, D, 16))
        self.w_down = nn.Parameter(torch.empty(E, 16, D))  # torch requires rows of 16 bytes

    def forward(self, x):
        t = x.reshape(-1, D)
        w, idx = self.gate(t).softmax(-1).topk(K, dim=-1)
        order = idx.flatten().argsort(stable=True)
        ends = torch.histc(idx.flatten().float(), bins=E, min=0, max=E - 1).cumsum(0).to(torch.int32)
        rows = t[order // K]
        h = F.silu(F.grouped_mm(rows, self.w_gate, offs=ends)) * F.grouped_mm(rows, self.w_up, offs=ends)
        y = F.grouped_mm(h, self.w_down, offs=ends) * w.flatten()[order].unsqueeze(-1)
        back = torch.empty_like(order)
        back[order] = torch.arange(len(order), device=x.device)
        return y[back].view(-1, K, D).sum(1).view_as(x)


class SparseGates(bases.ListOfExperts):
    """I3: stack all experts and multiply by sparse gates, with an auxiliary loss and counts."""

    def __init__(self):
        super().__init__()
        self.register_buffer("load", torch.zeros(E))

    def forward(self, x):
        p = self.gate(x).softmax(-1)
        w, idx = p.topk(K, dim=-1)
        gates = torch.zeros_like(p).scatter(-1, idx, w)
        outputs = torch.stack([e.down(F.relu(e.up(x))) for e in self.experts], -2)
        with torch.no_grad():
            self.load += F.one_hot(idx, E).flatten(0, -2).sum(0)
        fraction = F.one_hot(idx, E).to(p.dtype).mean((0, 1, 2))
        return (outputs * gates.unsqueeze(-1)).sum(-2), E * (fraction * p.mean((0, 1))).sum()


class Model(nn.Module):
    """Two layers of a mixture, each after a norm and with a residual connection."""

    def __init__(self, make, num_layers: int = 2):
        super().__init__()
        self.layers = nn.ModuleList(nn.ModuleDict({"norm": nn.LayerNorm(D), "moe": make()}) for _ in range(num_layers))

    def forward(self, x):
        aux = x.new_zeros(())
        for layer in self.layers:
            y = layer["moe"](layer["norm"](x))
            if isinstance(y, tuple):
                y, loss = y
                aux = aux + loss
            x = x + y
        return x, aux


IDIOMS = {
    "dense_masked": bases.DenseMasked,
    "sparse_gates": SparseGates,
    "stack_gather": bases.StackGather,
    "weight_gather": bases.WeightGather,
    "gshard": bases.CapacityEinsum,
    "bmm_weight_before": bases.WeightBefore,
    "sort_and_group": SortAndGroup,
}


def build_model(idiom: str, dtype: torch.dtype = torch.float64, num_layers: int = 2) -> Model:
    """Build a model with weights of usual size.

    Sorted experts use bfloat16: torch traces grouped products only in it.
    """
    torch.manual_seed(0)
    result = Model(IDIOMS[idiom], num_layers)
    for p in result.parameters():
        if p.dim() > 1:
            nn.init.normal_(p, std=0.5)
    return result.to(torch.bfloat16 if idiom == "sort_and_group" else dtype)
