"""Masks and comparisons that are constant for the example and vary in later calls."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import moefx

from ..blocks import D, E, Loop, Mlp

ROWS = 33


def compile_block(model: nn.Module, *args: torch.Tensor) -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    model = model.double()
    return copy.deepcopy(model), moefx.compile(model, example_inputs=args)


class Masked(Loop):
    """Mask padding in the selection of rows (`early`), or in the results of experts."""

    def __init__(self, early: bool):
        super().__init__(Mlp)
        self.early = early

    def forward(self, x, mask):
        w, ids = self.route(x)
        out = torch.zeros_like(x)
        for e in range(E):
            t, k = torch.where((ids == e) & mask[:, None] if self.early else ids == e)
            y = self.expert(e, x[t], w[t, k, None])
            out = out.index_add(0, t, y if self.early else y * mask[t, None])
        return out


@pytest.mark.parametrize("early", [True, False])
def test_a_mask_of_ones_is_a_mask(early):
    x = torch.randn(ROWS, D).double()
    original, compiled = compile_block(Masked(early), x, torch.ones(ROWS, dtype=torch.bool))
    for mask in (torch.ones(ROWS), torch.zeros(ROWS), torch.arange(ROWS) % 3):
        torch.testing.assert_close(compiled(x, mask > 0), original(x, mask > 0))
    assert moefx.explain(compiled).matched[0].calls == (3, 0, 0)  # never the original


class Padding(Loop):
    def forward(self, x):
        return super().forward(x) if not self.rule else self.mixed(x)

    def __init__(self, rule=None):
        super().__init__(Mlp)
        self.rule = rule

    def mixed(self, x):
        w, ids = self.route(x)
        out = torch.zeros_like(x)
        for e in range(E):
            t, k = torch.where(ids == e)
            out = out.index_add(0, t, self.rule(self.expert(e, x[t], w[t, k, None]), x, t))
        return out


def keep_tokens(y, x, t):
    return y * (x != 0).any(-1)[t, None]


def mask_zeros(y, x, t):
    return y.masked_fill((x == 0).all(-1)[t, None], 0.0)


def count_nonzero(y, x, t):
    return y * (torch.count_nonzero(x, -1) > 0)[t, None]


def mask_by_any(y, x, t):
    return y * x.any(-1)[t, None]


def mask_by_cast(y, x, t):
    return y * x.abs().sum(-1).bool()[t, None]


def mask_by_all(y, x, t):
    return y * ~torch.logical_not(x).all(-1)[t, None]


def select_by_where(y, x, t):
    real = torch.zeros(len(x), dtype=torch.bool).index_fill(0, x.abs().sum(-1).nonzero().squeeze(-1), True)
    return y * real[t, None]


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    "rule", [keep_tokens, mask_zeros, count_nonzero, mask_by_any, mask_by_cast, mask_by_all, select_by_where]
)
def test_rows_of_zeros_are_padding(rule):
    x = torch.randn(ROWS, D).double()
    original, compiled = compile_block(Padding(rule), x)
    x[::3] = 0
    torch.testing.assert_close(compiled(x), original(x))
    assert moefx.explain(compiled).matched[0].calls == (1, 0, 0)


def halve_positive(y, x, t):
    return y * torch.where((x > 0).all(-1)[t, None], 0.5, 1.0)


def test_reductions_over_a_row_that_change_experts_are_refused():
    with pytest.raises(moefx.NoMoEBlockFound, match="with the same outcome in all captures"):
        compile_block(Padding(halve_positive), torch.randn(ROWS, D).double())


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    "number",
    [
        lambda y: (y / 30).int(),
        lambda y: (y.abs() / 20).to(torch.uint8),
        lambda y: (y / 30).round().long() >> 1,
        lambda y: torch.stack([y * 0 + 20, y]).argmax(0),
        lambda y: torch.stack([y * 0 + 20, y]).max(0).indices,
        lambda y: torch.stack([y, y * 0 + 20, y * 0 + 40]).sort(0).indices[2] - 2,
        lambda y: torch.stack([y, y * 0 + 20], -1).topk(1, -1).indices[..., 0],
        lambda y: torch.searchsorted(torch.tensor([20.0, 40.0]).double(), y),
    ],
    ids=["cast", "uint8", "shifted", "argmax", "max", "sort", "topk", "searchsorted"],
)
def test_integers_computed_from_activations_are_not_folded(number):
    """Refuse integers that are constant for small activations."""
    with pytest.raises(moefx.NoMoEBlockFound):
        compile_block(Padding(lambda y, x, t: y * (1 + number(y))), torch.randn(ROWS, D).double())


def exceed_20(y):
    return (y - 20).relu()


@pytest.mark.parametrize("is_large", [lambda z: ~torch.logical_not(z), torch.Tensor.bool], ids=["logical_not", "bool"])
def test_booleans_computed_from_activations_are_not_folded(is_large):
    x = torch.randn(ROWS, D).double()
    original, compiled = compile_block(Padding(lambda y, x, t: y.masked_fill(is_large(exceed_20(y)), 0.0)), x)
    plain = Padding(lambda y, x, t: y).double()
    plain.load_state_dict(original.state_dict())
    assert not torch.equal(original(1000 * x), plain(1000 * x))
    torch.testing.assert_close(compiled(1000 * x), original(1000 * x))


def write_masks_twice(y, x, t):
    y, other = y.clone(), x[t]
    y[y > 20] = other[y > 20]
    return y


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "rule",
    [
        lambda y, x, t: y.masked_fill(torch.any(exceed_20(y), -1, keepdim=True), 0.0),
        lambda y, x, t: torch.where(y.norm() > 300, y * (300 / y.norm()), y),  # over all rows of an expert
        lambda y, x, t: torch.where(y > 20 + t[:, None], 2 * y, y),  # depends on the token
        write_masks_twice,
    ],
    ids=["any", "norm", "token", "masks_written_twice"],
)
def test_rules_that_are_no_formula_of_a_row_are_refused(rule):
    with pytest.raises(moefx.NoMoEBlockFound):
        compile_block(Padding(rule), torch.randn(ROWS, D).double())


def compare_with(a, threshold):
    return a > threshold


class Shared(Padding):
    """Call one comparison with values that vary and with values that never do for small inputs."""

    def __init__(self):
        super().__init__(lambda y, x, t: torch.where(compare_with(y, 12.0), 2 * y, y))

    def route(self, x):
        w, ids = super().route(x)
        return w * compare_with(w, 0.3), ids


def test_a_comparison_in_a_function_that_is_called_twice():
    x = torch.randn(ROWS, D).double()
    original, compiled = compile_block(Shared(), x)
    for scale in (1, 100):
        torch.testing.assert_close(compiled(scale * x), original(scale * x))


class Alive(Loop):
    """Mask experts by a buffer."""

    def __init__(self, alive):
        super().__init__(Mlp)
        self.register_buffer("alive", alive)

    def route(self, x):
        return self.gate(x).masked_fill(~self.alive, -1e9).softmax(-1).topk(self.k, -1)


@pytest.mark.parametrize("alive", [torch.ones(E) > 0, torch.arange(E)[None] != 2], ids=["all", "all but one"])
def test_flags_in_a_buffer_are_followed(alive):
    x = torch.randn(ROWS, D).double()
    original, compiled = compile_block(Alive(alive), x)
    for model in (original, compiled):
        model.alive.fill_(True)
        model.alive[..., 1] = False
    torch.testing.assert_close(compiled(x), original(x))
    assert moefx.explain(compiled).matched[0].calls == (1, 0, 0)


class TwoFlags(Loop):
    """Mask experts by one buffer and their weights by another; both start with all experts."""

    def __init__(self):
        super().__init__(Mlp)
        self.register_buffer("alive", torch.ones(E, dtype=torch.bool))
        self.register_buffer("counts", torch.ones(E, dtype=torch.bool))

    def forward(self, x):
        w, ids = self.gate(x).masked_fill(~self.alive, float("-inf")).softmax(-1).topk(2)
        w, out = w * self.counts[ids], torch.zeros_like(x)
        for e in range(E):
            t, k = torch.where(ids == e)
            out = out.index_add(0, t, self.expert(e, x[t], w[t, k, None]))
        return out


def test_equal_buffers_are_separate():
    x = torch.randn(ROWS, D, dtype=torch.float64)
    model, compiled = compile_block(TwoFlags(), x)
    for flags in ("counts", "alive"):
        for one in (model, compiled):
            one.get_buffer(flags)[1] = False
        torch.testing.assert_close(compiled(x), model(x))
