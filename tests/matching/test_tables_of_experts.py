"""Token ids select experts through a table, in loops that skip experts without tokens."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import moefx

VOCABULARY, D, E = 50, 16, 4


class Hash(nn.Module):
    def __init__(self, seed, start):
        super().__init__()
        torch.manual_seed(seed)
        self.embedding, self.start = nn.Embedding(VOCABULARY, D), start
        self.register_buffer("table", torch.randint(0, E, (VOCABULARY,)))
        experts = (nn.Sequential(nn.Linear(D, D), nn.GELU(), nn.Linear(D, D)) for _ in range(E))
        self.experts, self.norm = nn.ModuleList(experts), nn.LayerNorm(D)

    def forward(self, ids):
        x = self.embedding(ids)
        rows, route = x.reshape(-1, D), self.table[ids].reshape(-1)
        out = self.start(rows)
        for e, expert in enumerate(self.experts):
            chosen = route == e
            if chosen.any():
                out[chosen] = expert(rows[chosen])
        return self.norm(x + out.view_as(x))


def draw(seed: int, *shape: int) -> torch.Tensor:
    return torch.randint(0, VOCABULARY, shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("seed", range(6))
def test_is_rewritten_for_any_table(seed):
    model = Hash(seed, torch.zeros_like).double()
    compiled = moefx.compile(copy.deepcopy(model), (draw(1, 2, 8),))
    for shape in ((1, 1), (1, 2), (7, 1), (4, 25), (2, 200)):
        ids = draw(2, *shape)
        torch.testing.assert_close(compiled(ids), model(ids))
    alike = torch.full((2, 3), 7)
    torch.testing.assert_close(compiled(alike), model(alike))
    assert moefx.blocks(compiled)[0].fallbacks == 0


def test_memory_that_was_never_written_is_named():
    model = Hash(0, torch.empty_like)
    model.table[::2] = -1
    (refused,) = moefx.explain(model, (draw(1, 2, 8),)).refused
    assert "keep memory that was never written" in refused.reason
