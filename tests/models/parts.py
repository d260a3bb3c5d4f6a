"""Experts and small helpers that several cases share."""

from __future__ import annotations

import torch
import torch.nn as nn
import torch.nn.functional as F

from .case import D, H


def make_stack(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.empty(*shape))


class Gated(nn.Module):
    """SwiGLU expert with three matrices."""

    def __init__(self, d=D, h=H, act=F.silu):
        super().__init__()
        self.gate_proj = nn.Linear(d, h, bias=False)
        self.up_proj = nn.Linear(d, h, bias=False)
        self.down_proj = nn.Linear(h, d, bias=False)
        self.act = act

    def forward(self, x):
        return self.down_proj(self.act(self.gate_proj(x)) * self.up_proj(x))


class Mlp(nn.Module):
    """Two matrices with biases and a nonlinearity between them."""

    def __init__(self, d=D, h=H, act=F.gelu):
        super().__init__()
        self.fc_in, self.fc_out = nn.Linear(d, h), nn.Linear(h, d)
        self.act = act

    def forward(self, x):
        return self.fc_out(self.act(self.fc_in(x)))
