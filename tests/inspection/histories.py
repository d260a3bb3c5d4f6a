"""A gated block and the history of its graphs."""

import torch
from torch import nn

from moefx import Plan
from moefx.inspection.history import History, Snapshot
from moefx.passes.pass_manager import PassManager

from ..ir.graphs import D, build_block_graph


def make_history(num_experts: int = 64) -> History:
    start = build_block_graph(num_experts, fused=False)
    run = PassManager().run(start, [], Plan(), made_by="rewrite", ms=12.25, level="dialect")
    fused = Snapshot(2, 2, "fuse", 1.9, 1, 7, "passes/fuse.py:88", build_block_graph(num_experts))
    first = Snapshot(1, 2, "rewrite", 12.25, 11, 0, "passes/rewrite.py:40", run.graph)
    return History(start.name, (first, fused))


class Gate(nn.Module):
    """Router that returns a container of tensors and other values."""

    def __init__(self, kind):
        super().__init__()
        self.weight, self.kind = nn.Parameter(torch.randn(4, D)), kind

    def forward(self, x):
        weights, ids = (x @ self.weight.T).softmax(-1).topk(2)
        return {"w": weights, "i": ids, "name": "gate"} if self.kind is dict else (weights, ids, None)


class Gated(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.gate = Gate(kind)
        self.experts = nn.ModuleList(nn.Linear(D, D) for _ in range(4))

    def forward(self, x):
        found = self.gate(x)
        weights, ids = (found["w"], found["i"]) if isinstance(found, dict) else found[:2]
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            token, slot = torch.where(ids == number)
            out.index_add_(0, token, expert(x[token]) * weights[token, slot, None])
        return out
