"""Experts with zero or one token next to experts with more, in code without reads that a probe can force."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import nn

import moefx

from ...blocks import D


class Skips(nn.Module):
    """Loop over few experts; `run` adds the rows of each.

    The widths keep captures from having 3, 4 or 5 tokens, which would leave experts with one token by chance.
    """

    def __init__(self, num_experts: int, top_k: int, run):
        super().__init__()
        self.num_experts, self.top_k, self.run = num_experts, top_k, run
        self.router = nn.Linear(D, num_experts, bias=False)
        widths = (D, 3, 4, 5, D)
        self.experts = nn.ModuleList(
            nn.Sequential(*[nn.Linear(a, b) for a, b in itertools.pairwise(widths)]) for _ in range(num_experts)
        )

    def forward(self, x):
        w, ids = self.router(x).softmax(-1).topk(self.top_k)
        out = torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            out = self.run(self, out, expert, x, w, ids, e)
        return out


def _add(out, expert, x, w, t, k):
    return out.index_add(0, t, expert(x[t]) * w[t, k, None])


def add_any_tokens(block, out, expert, x, w, ids, e):
    return _add(out, expert, x, w, *torch.where(ids == e))


def skip_zero_sum(block, out, expert, x, w, ids, e):
    t, k = torch.where(ids == e)
    return out if w[t, k].sum() == 0 else _add(out, expert, x, w, t, k)


def skip_single_token(block, out, expert, x, w, ids, e):
    mask = ids == e
    if int(mask.sum()) <= 1:
        return out
    return _add(out, expert, x, w, *torch.where(mask))


def skip_without_second_row(block, out, expert, x, w, ids, e):
    t, k = torch.where(ids == e)
    try:
        t[1]
    except IndexError:
        return out
    return _add(out, expert, x, w, t, k)


def scale_by_list(block, out, expert, x, w, ids, e):
    t, k = torch.where(ids == e)
    scale = ([1.0, 0.5] + [1.0] * 1000)[len(t)]
    return _add(out, expert, x, w * scale, t, k)


def add_one_if_idle(block, out, expert, x, w, ids, e):
    t, k = torch.where(ids == e)
    return _add(out, expert, x, w, t, k) + (0.0 if len(t) else 1.0)


def skip_small_weights(block, out, expert, x, w, ids, e):
    t, k = torch.where(ids == e)
    if not (w[t, k] > 0.4).any():
        return out
    return _add(out, expert, x, w, t, k)


def skip_small_sum(block, out, expert, x, w, ids, e):
    t, k = torch.where(ids == e)
    if w[t, k].sum() < 0.4:
        return out
    return _add(out, expert, x, w, t, k)


def skip_small_dense_weights(block, out, expert, x, w, ids, e):
    dense = torch.zeros(len(x), block.num_experts, dtype=x.dtype).scatter(1, ids, w)[:, e]
    if not (dense > 0.4).any():
        return out
    return out + expert(x) * dense[:, None]


def _draw_inputs(*lead: int) -> torch.Tensor:
    return torch.randn(*lead, D, dtype=torch.float64)


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("run", "num_experts", "top_k"),
    [
        (skip_without_second_row, 2, 1), (skip_single_token, 2, 1), (scale_by_list, 3, 2), (add_one_if_idle, 3, 2),
        (skip_small_weights, 4, 1), (skip_small_sum, 4, 1), (skip_small_dense_weights, 4, 1),
    ],
)  # fmt: skip
def test_special_cases_of_few_tokens_are_refused(run, num_experts, top_k):
    model = Skips(num_experts, top_k, run).double()
    with pytest.raises(moefx.NoMoEBlockFound):
        moefx.compile(model, example_inputs=(_draw_inputs(9),), plan=moefx.Plan(validation="symbolic"))


class SkipsInBatches(Skips):
    def forward(self, x):
        return super().forward(x.reshape(-1, D)).reshape(x.shape)


def double_in_a_crowd(block, out, expert, x, w, ids, e):
    if int(torch.bincount(ids.flatten()).max()) > 20:
        w = w * 2
    return _add(out, expert, x, w, *torch.where(ids == e))


@pytest.mark.sampled(4)
@pytest.mark.parametrize("lead", [(2, 5), (2, 2, 6)])
@pytest.mark.parametrize("run", [skip_without_second_row, double_in_a_crowd])
def test_special_cases_of_few_tokens_in_batches_are_refused(run, lead):
    model = SkipsInBatches(2, 1, run).double()
    with pytest.raises(moefx.NoMoEBlockFound):
        moefx.compile(model, example_inputs=(_draw_inputs(*lead),), plan=moefx.Plan(validation="symbolic"))


@pytest.mark.parametrize(
    ("run", "num_experts", "top_k"), [(add_any_tokens, 2, 1), (add_any_tokens, 3, 2), (skip_zero_sum, 4, 2)]
)
def test_blocks_that_depend_on_no_count_are_rewritten(run, num_experts, top_k):
    model = Skips(num_experts, top_k, run).double()
    compiled = moefx.compile(model, example_inputs=(_draw_inputs(9),), plan=moefx.Plan(validation="symbolic"))
    assert len(moefx.blocks(compiled)) == 1
