"""Weights that change for one rare combination of a token's choices, by numbers made of the choices."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import moefx

E, K = 16, 4
RARE = torch.tensor([3, 7, 5, 11])  # one of 43680 ordered selections: no capture has it
POWERS = torch.tensor([4096, 256, 16, 1])
CODE = int(RARE @ POWERS)


class Loop(nn.Module):
    """Token choice in which token feature e is the score of expert e, so that inputs can make any selection."""

    def __init__(self, weigh):
        super().__init__()
        self.gate = nn.Linear(E, E, bias=False)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(E, 4), nn.Tanh(), nn.Linear(4, E)) for _ in range(E))
        self.weigh = weigh
        with torch.no_grad():
            self.gate.weight.copy_(torch.eye(E))

    def forward(self, x):
        w, ids = self.gate(x).softmax(-1).topk(K)
        w = self.weigh(w, ids)
        out = torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            t, k = torch.where(ids == e)
            out = out.index_add(0, t, expert(x[t]) * w[t, k, None])
        return out


def _drop(w, condition):
    return torch.where(condition[:, None], 0.0, w)


def _scale(w, factor):
    return w * (1 - factor.reshape(len(w), 1).to(w.dtype))


def _match_slots(ids):
    return (ids == RARE).long()


def _halve_codes(w, ids):
    for code in (4660, CODE, 17):
        w = w * (1 - 0.5 * (ids @ POWERS == code).to(w.dtype))[:, None]
    return w


def _fill_rows(w, ids):
    w = w.clone()
    w[ids.double() @ POWERS.double() == CODE] = 0.0
    return w


FLOATS = {
    "matvec": lambda w, ids: _drop(w, ids.double() @ POWERS.double() == CODE),
    "sum of products": lambda w, ids: _drop(w, (ids.float() * POWERS.float()).sum(-1) == CODE),
    "einsum": lambda w, ids: _drop(w, torch.einsum("tk,k->t", ids.double(), POWERS.double()) == CODE),
    "linear": lambda w, ids: _drop(w, F.linear(ids.double(), POWERS[None].double())[:, 0] == CODE),
    "addmm": lambda w, ids: _drop(w, torch.addmm(torch.zeros(1), ids.float(), POWERS[:, None].float())[:, 0] == CODE),
    "norm": lambda w, ids: _drop(w, (ids.double() - RARE).norm(dim=-1) == 0),
    "close to a sine": lambda w, ids: _drop(w, (ids.double() @ POWERS.double() - CODE).sin().abs() < 1e-12),
    "sum of matches": lambda w, ids: _drop(w, (ids == RARE).double().sum(-1) == K),
    "rounded": lambda w, ids: _drop(w, (ids.double() @ POWERS.double()).long() == CODE),
    "infinite": lambda w, ids: w * torch.isfinite(1 / (ids.double() @ POWERS.double() - CODE))[:, None],
    "filled rows": _fill_rows,
}
INTEGERS = {
    "matvec": lambda w, ids: _drop(w, ids @ POWERS == CODE),
    "bits": lambda w, ids: _drop(w, (1 << ids).sum(-1) == int((1 << RARE).sum())),
    "hash": lambda w, ids: _drop(w, (ids @ POWERS) * 2654435761 % (1 << 32) == CODE * 2654435761 % (1 << 32)),
    "unique": lambda w, ids: _scale(w, (torch.unique(ids @ POWERS) == CODE).any().expand(len(w)) * 0.5),
    "product": lambda w, ids: _scale(w, (ids == RARE).long().prod(-1)),
    "least": lambda w, ids: _scale(w, (ids == RARE).double().min(-1).values),
    "several codes": _halve_codes,
}
PARTS = {
    "unbound": lambda m: m.unbind(-1)[3],
    "split": lambda m: m.split(1, -1)[3],
    "chunk": lambda m: m.chunk(2, -1)[1][:, 1],
    "flipped": lambda m: m.flip(-1)[:, 0],
    "transposed": lambda m: m.t()[3],
    "flat": lambda m: m.flatten()[3::4],
    "narrow": lambda m: m.narrow(1, 3, 1),
}
COLUMNS = {
    "one column": lambda w, ids: _scale(w, F.one_hot(ids[:, :3] @ POWERS[1:], 4096)[:, CODE >> 4]),
    "three axes": lambda w, ids: _scale(
        w, torch.einsum("ta,tb,tc->tabc", *F.one_hot(ids[:, :3], E).double().unbind(1))[:, 3, 7, 5]
    ),
}


def _check(weigh):
    torch.manual_seed(0)
    model = Loop(weigh).double()
    plan, example = moefx.Plan(validation="symbolic"), torch.randn(24, E, dtype=torch.float64)
    compiled = moefx.compile(copy.deepcopy(model), plan=plan, example_inputs=example)
    torch.testing.assert_close(compiled(example), model(example), rtol=0, atol=1e-12)
    assert not moefx.blocks(compiled)[0].fallbacks
    rare = torch.zeros(1, E, dtype=torch.float64)
    rare[0, RARE] = torch.tensor([4.0, 3.0, 2.0, 1.0], dtype=torch.float64)
    for x in (rare, torch.cat([example, rare]), rare.expand(9, E)):
        torch.testing.assert_close(compiled(x), model(x), rtol=0, atol=1e-12)
    return moefx.blocks(compiled)[0]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("weigh", FLOATS.values(), ids=FLOATS)
def test_floats_of_choices(weigh):
    assert _check(weigh).fallbacks == 0


@pytest.mark.sampled(2)
@pytest.mark.parametrize("weigh", INTEGERS.values(), ids=INTEGERS)
def test_integers_of_choices(weigh):
    _check(weigh)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("part", PARTS.values(), ids=PARTS)
def test_parts_of_a_scan_over_slots(part):
    _check(lambda w, ids: _scale(w, part(_match_slots(ids).cumprod(-1))))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("weigh", COLUMNS.values(), ids=COLUMNS)
def test_columns_of_one_hot_combinations(weigh):
    _check(weigh)


ORDINARY = {
    "a function of the sum": lambda w, ids: w * (ids.sum(-1, keepdim=True) < 30),
    "a function of the norm": lambda w, ids: w * (1 + ids.double().norm(dim=-1, keepdim=True)),
    "a count of marks": lambda w, ids: w / torch.zeros(len(w), E, dtype=w.dtype).scatter(1, ids, 1.0).sum(-1, True),
    "neighbours": lambda w, ids: w * (1 + (ids[:, :1] == ids[:, 1:2] + 1).to(w.dtype)),
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("weigh", ORDINARY.values(), ids=ORDINARY)
def test_ordinary_numbers_of_choices_need_no_guard(weigh):
    assert not _check(weigh).fallbacks


MASKS = {
    "even sums": lambda w, ids: _drop(w, ids.sum(-1) % 2 == 0),
    "odd sums": lambda w, ids: _drop(w, ids.sum(-1) % 2 == 1),
    "odd last choices": lambda w, ids: _drop(w, ids[:, -1] % 2 == 1),
    "neighbours": lambda w, ids: _drop(w, (ids[:, 0] - ids[:, 1]).abs() < 2),
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("weigh", MASKS.values(), ids=MASKS)
def test_masks_of_many_combinations(weigh):
    """A few tokens that choose one expert keep some of their slots, for experts other than the first."""
    assert not _check(weigh).fallbacks


def _subtract_product(w, ids):
    product = w
    for k in range(K):
        product = product * (ids[:, k] == RARE[k])[:, None]
    return w - product


def _nest(w, ids, changed):
    for k in range(K):
        changed = torch.where((ids[:, k] == RARE[k])[:, None], changed, w)
    return changed


def _count_code(w, ids):
    code = ids @ POWERS
    return _drop(w, (code == CODE) & (torch.bincount(code)[code] == 9))


def _nest_columns(w, ids):
    slots = [_nest(w[:, k : k + 1], ids, 0.5 * w[:, k : k + 1]) for k in range(2)]
    return torch.cat([*slots, w[:, 2:]], 1)


TESTS = {
    "nested": lambda w, ids: _nest(w, ids, 0.5 * w),
    "nested columns": _nest_columns,
    "product": _subtract_product,
    "a code and its count": _count_code,
    "diagonal of a scan": lambda w, ids: _scale(
        w, torch.einsum("tkk->tk", _match_slots(ids).cumprod(-1)[:, None].expand(-1, K, -1))[:, 3]
    ),
    "equal counts": lambda w, ids: _drop(w, (torch.bincount(ids.flatten(), minlength=E)[ids] == 9).all(-1)),
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("weigh", TESTS.values(), ids=TESTS)
def test_tests_that_meet_on_the_weights(weigh):
    """Compute the tests as the program does: the graph reads the weights behind them."""
    assert _check(weigh).fallbacks == 0


class Unweighted(Loop):
    """Give `weigh` the rows of tokens or of experts, not the weights."""

    def __init__(self, weigh, is_input):
        super().__init__(weigh)
        self.is_input = is_input

    def forward(self, x):
        w, ids = self.gate(x).softmax(-1).topk(K)
        rows = self.weigh(x, ids) if self.is_input else x
        out = torch.zeros(len(x), K, E, dtype=x.dtype)
        for e, expert in enumerate(self.experts):
            t, k = torch.where(ids == e)
            out = out.index_put((t, k), expert(rows[t]))
        if self.is_input:
            return (out * w[..., None]).sum(1)
        return sum(self.weigh(out[:, k], ids) * w[:, k, None] for k in range(K))


def test_tests_that_meet_on_the_results_are_refused():
    model = Unweighted(TESTS["nested"], is_input=False)
    with pytest.raises(moefx.NoMoEBlockFound, match="whether the choices of a token pass several tests at once"):
        moefx.compile(model, example_inputs=torch.randn(24, E))


def test_tests_that_meet_on_the_inputs():
    torch.manual_seed(0)
    model = Unweighted(TESTS["nested"], is_input=True).double()
    example = torch.randn(24, E, dtype=torch.float64)
    compiled = moefx.compile(copy.deepcopy(model), example_inputs=example)
    rare = torch.zeros(1, E, dtype=torch.float64)
    rare[0, RARE] = torch.tensor([4.0, 3.0, 2.0, 1.0], dtype=torch.float64)
    torch.testing.assert_close(compiled(rare), model(rare), rtol=0, atol=1e-12)
