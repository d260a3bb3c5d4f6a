"""A decoder whose sizes the planner finds."""

from __future__ import annotations

from torch import nn

from ..blocks import D, Gated, Loop


class Decoder(nn.Module):
    """Plain decoder with four attention heads and experts in every other layer."""

    def __init__(self, layers: int = 4, d: int = 32, expert: type = Gated):
        super().__init__()
        self.embed = nn.Embedding(64, D)
        self.layers = nn.ModuleList(
            nn.ModuleDict(
                dict(
                    attention=nn.MultiheadAttention(D, 2, bias=False, batch_first=True),
                    before=nn.RMSNorm(D), behind=nn.RMSNorm(D),
                    ffn=Loop(expert) if i % 2 else nn.Sequential(nn.Linear(D, 5 * D), nn.SiLU(), nn.Linear(5 * D, D)),
                )
            )
            for i in range(layers)
        )  # fmt: skip
        self.norm = nn.RMSNorm(D)
        self.head = nn.Linear(D, 64, bias=False)

    def forward(self, ids):
        x = self.embed(ids)
        for layer in self.layers:
            rows = layer["before"](x)
            x = x + layer["attention"](rows, rows, rows, need_weights=False)[0]
            rows = layer["behind"](x)
            x = x + layer["ffn"](rows.flatten(0, 1)).view(rows.shape)
        return self.head(self.norm(x))
