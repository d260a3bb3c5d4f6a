"""Tell numbers that follow from the choices of single tokens from counts, ranks and positions."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from moefx.capture.concolic import capture_block
from moefx.capture.tracing.concrete_routing import Routing
from moefx.matching.facts.token_functions import is_token_function

S, E, K = 29, 16, 4
POWERS = torch.tensor([64, 16, 4, 1])

OF_ONE = {
    "code": lambda ids: ids @ POWERS,
    "float code": lambda ids: ids.double() @ POWERS.double(),
    "einsum": lambda ids: torch.einsum("tk,k->t", ids.double(), POWERS.double()),
    "norm": lambda ids: ids.double().norm(dim=-1),
    "scan over slots": lambda ids: (ids == 1).long().cumprod(-1),
    "marks": lambda ids: torch.zeros(len(ids), E).scatter(1, ids, 1.0).sum(-1),
    "added marks": lambda ids: torch.zeros(len(ids), E).scatter_add(1, ids, torch.ones(ids.shape)).sum(-1),
    "table": lambda ids: torch.arange(E)[ids],
    "neighbour": lambda ids: ids.roll(1, 0) - ids,
}
OF_MANY = {
    "counts": lambda ids: F.one_hot(ids, E).sum((0, 1)),
    "ranks": lambda ids: F.one_hot(ids, E).sum(1).cumsum(0),
    "looked up counts": lambda ids: torch.bincount(ids.flatten(), minlength=E)[ids],
    "products over tokens": lambda ids: ids.double().t() @ torch.ones(len(ids), 1, dtype=torch.float64),
    "einsum over tokens": lambda ids: torch.einsum("tk,tj->kj", ids.double(), ids.double()),
    "equal tokens": lambda ids: (ids[:, None, 0] == ids[None, :, 0]).sum(1),
    "added counts": lambda ids: torch.zeros(E).index_add(0, ids[:, 0], torch.ones(len(ids))),
    "positions": lambda ids: ids[:, 0] + torch.arange(len(ids)),
    "rows": lambda ids: (ids == 1).nonzero()[:, 0],
    "order": lambda ids: ids[:, 0].argsort(),
}


class Numbers(nn.Module):
    def __init__(self, make):
        super().__init__()
        self.make = make

    def forward(self, x):
        return self.make(x.topk(K).indices)


def _is_of_one_token(make, tokens: int = S) -> bool:
    x = torch.empty(tokens, E, device="meta")
    capture = capture_block(Numbers(make), (x,), {}, Routing("diverse"), dims={"S": tokens})
    return is_token_function(capture, capture.out)


@pytest.mark.parametrize("make", OF_ONE.values(), ids=OF_ONE)
@pytest.mark.parametrize("tokens", [1, 2, K, S])
def test_numbers_of_one_token(make, tokens):
    assert _is_of_one_token(make, tokens)


@pytest.mark.parametrize("make", OF_MANY.values(), ids=OF_MANY)
def test_numbers_of_many_tokens(make):
    assert not _is_of_one_token(make)
