"""Models with blocks that tests make faulty."""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F
from torch import nn

import moefx

from .models import Plain

IDS = torch.arange(36).remainder(32).view(2, 18)


def make_ids(provider: str) -> torch.Tensor:
    """Return inputs on a device of the provider. Triton's kernels run in the interpreter on machines without a GPU."""
    return IDS.cuda() if provider == "triton" and torch.cuda.is_available() else IDS


class Layer(Plain):
    """Experts with biases, routing weights after the experts, and a running load."""

    def route(self, x):
        scores = self.router(x).softmax(-1)
        weights, ids = scores.topk(self.top_k, -1)
        self.load += F.one_hot(ids, len(self.experts)).sum((0, 1))
        return scores, weights / weights.sum(-1, keepdim=True), ids


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(32, 8)
        self.layer = Layer(dim=8, hidden=8, num_experts=4, dropout=0.0)
        self.head = nn.Linear(8, 32)

    def forward(self, ids):
        x = self.embed(ids)
        return self.head(x + self.layer(x)[0])


@functools.cache
def build_models(fuse: bool, provider: str = "") -> tuple[Model, Model]:
    torch.manual_seed(0)
    original = Model().to(make_ids(provider).device, torch.bfloat16 if provider == "grouped_mm" else torch.float32)
    return original, moefx.compile(original, plan=moefx.Plan(fuse=fuse), example_inputs=(make_ids(provider),))
