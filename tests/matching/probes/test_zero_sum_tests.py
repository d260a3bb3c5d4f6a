"""`if weights[t, k].sum() == 0: continue` skips experts without tokens, and experts whose tokens have no weight."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from moefx.errors import Refused

from ...blocks import D, Mlp, rewritten

E = 5


class Skipping(nn.Module):
    def __init__(self, skips, weigh=lambda w: w, score=lambda s: s.softmax(-1), writes="add"):
        super().__init__()
        self.skips, self.weigh, self.score, self.writes = skips, weigh, score, writes
        self.gate = nn.Linear(D, E, bias=False)
        self.experts = nn.ModuleList(Mlp() for _ in range(E))

    def forward(self, x):
        w, ids = self.score(self.gate(x)).topk(2)
        out = torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            t, k = torch.where(ids == e)
            if self.skips(x[t], w[t, k]):
                continue
            y = expert(x[t]) * self.weigh(w[t, k, None])
            if self.writes == "add":
                out = out.index_add(0, t, y)
            else:
                out[t] += y
        return out


def sum_of_weights(rows, w):
    return w.sum() == 0


def no_weight(rows, w):
    return not (w != 0).any()


def sum_of_rows(rows, w):
    return rows.abs().sum() == 0


def no_entry(rows, w):
    return not rows.any()


@pytest.mark.sampled(3)
@pytest.mark.parametrize("writes", ["add", "put"])
@pytest.mark.parametrize("score", [torch.relu, torch.sigmoid, lambda s: s.softmax(-1)], ids=["relu", "sigmoid", "soft"])
def test_skipping_zero_weights_is_rewritten(writes, score):
    assert rewritten(Skipping(sum_of_weights, writes=writes, score=score)).match.num_experts == E


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("skips", "more"),
    [
        (sum_of_rows, {}),
        (no_entry, {}),
        (sum_of_weights, dict(weigh=lambda w: 1 + w)),
        (no_weight, dict(weigh=lambda w: w.exp())),
        (sum_of_weights, dict(score=torch.tanh)),  # weights of both signs may add up to zero
        (no_weight, dict(score=lambda s: s)),  # a gradient reaches a weight of zero
    ],
    ids=["rows", "entries", "one_more", "exp", "signs", "gradient"],
)
def test_skipping_experts_with_nonzero_output_for_zeros_is_refused(skips, more):
    with pytest.raises(Refused, match="an expert's rows or weights sum to zero"):
        rewritten(Skipping(skips, **more))
