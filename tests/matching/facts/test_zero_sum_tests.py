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


def has_zero_weight_sum(rows, w):
    return w.sum() == 0


def has_no_weight(rows, w):
    return not (w != 0).any()


def has_zero_row_sum(rows, w):
    return rows.abs().sum() == 0


def has_no_entry(rows, w):
    return not rows.any()


@pytest.mark.sampled(3)
@pytest.mark.parametrize("writes", ["add", "put"])
@pytest.mark.parametrize("score", [torch.relu, torch.sigmoid, lambda s: s.softmax(-1)], ids=["relu", "sigmoid", "soft"])
def test_skipping_zero_weights_is_rewritten(writes, score):
    assert rewritten(Skipping(has_zero_weight_sum, writes=writes, score=score)).match.num_experts == E


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("skips", "options"),
    [
        (has_zero_row_sum, {}),
        (has_no_entry, {}),
        (has_zero_weight_sum, dict(weigh=lambda w: 1 + w)),
        (has_no_weight, dict(weigh=lambda w: w.exp())),
        (has_zero_weight_sum, dict(score=torch.tanh)),  # weights of both signs may add up to zero
        (has_no_weight, dict(score=lambda s: s)),  # a gradient reaches a weight of zero
    ],
    ids=["rows", "entries", "one_more", "exp", "signs", "gradient"],
)
def test_skipping_experts_with_nonzero_output_for_zeros_is_refused(skips, options):
    with pytest.raises(Refused, match="an expert's rows or weights sum to zero"):
        rewritten(Skipping(skips, **options))
