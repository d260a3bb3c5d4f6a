"""Branches that skip experts without tokens, if every capture has tokens for each of the few experts."""

import copy

import pytest
import torch
from torch import nn

import moefx

D, E, K = 12, 4, 2

MASKS = {
    "gates above 0": lambda gates, chosen, e: gates[:, e] > 0,
    "gates that are not 0": lambda gates, chosen, e: gates[:, e] != 0,
    "choices": lambda gates, chosen, e: (chosen == e).any(-1),
    "one-hot": lambda gates, chosen, e: nn.functional.one_hot(chosen, E).sum(1)[:, e].bool(),
}
QUESTIONS = {
    "any": lambda mask: mask.any(),
    "sum": lambda mask: mask.sum() != 0,
    "number": lambda mask: mask.sum().item() > 0,
    "at least one": lambda mask: mask.sum() >= 1,
    "count": lambda mask: torch.count_nonzero(mask) != 0,
    "of floats": lambda mask: mask.float().sum() > 0,
    "largest": lambda mask: mask.max(),
}


class Asking(nn.Module):
    def __init__(self, mask, ask):
        super().__init__()
        self.mask, self.ask = mask, ask
        self.gate = nn.Linear(D, E, bias=False)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(D, 16), nn.SiLU(), nn.Linear(16, D)) for _ in range(E))

    def forward(self, x):
        weights, chosen = self.gate(x).softmax(-1).topk(K)
        gates = torch.zeros(len(x), E, dtype=x.dtype).scatter(-1, chosen, weights)
        out = torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            mask = self.mask(gates, chosen, e)
            if self.ask(mask):
                out[mask] += expert(x[mask]) * gates[mask, e, None]
            else:
                out = self.idle(out)
        return out

    def idle(self, out):
        return out


class HalvedForEveryIdleExpert(Asking):
    def idle(self, out):
        return out * 0.5


def draw(tokens):
    return torch.randn(tokens, D, dtype=torch.float64)


PAIRS = [(mask, "any") for mask in MASKS] + [("gates above 0", question) for question in QUESTIONS if question != "any"]


@pytest.mark.sampled(4)
@pytest.mark.parametrize(("mask", "question"), PAIRS)
def test_skipping_idle_experts_is_no_branch(mask, question):
    torch.manual_seed(0)
    model = Asking(MASKS[mask], QUESTIONS[question]).double()
    compiled = moefx.compile(model, example_inputs=(draw(16),))
    for tokens in (1, 2, 33):
        x = draw(tokens)
        torch.testing.assert_close(compiled(x), model(x), rtol=0, atol=1e-13)
    assert moefx.explain(compiled).matched[0].calls == (3, 0, 0)


OTHERS = {
    "two of them": lambda mask: mask.sum() > 1,
    "an even number": lambda mask: mask.sum() % 2 == 0,
    "8 bits": lambda mask: mask.sum().to(torch.uint8) > 0,
    "the others": lambda mask: (~mask).sum() != 0,
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("question", [question for question in OTHERS if question != "8 bits"])
def test_other_tests_are_branches(question):
    torch.manual_seed(0)
    model = Asking(MASKS["gates above 0"], OTHERS[question]).double()
    refused = moefx.explain(model, example_inputs=(draw(16),))
    assert not refused.matched
    reasons = ("the formula depends on", "some slots are dropped", "no expert's result is used for a few tokens")
    assert any(reason in str(refused) for reason in reasons)


@pytest.mark.exhaustive
def test_an_8_bit_count_is_guarded_below_256():
    torch.manual_seed(0)
    model = Asking(MASKS["gates above 0"], OTHERS["8 bits"]).double()
    compiled = moefx.compile(copy.deepcopy(model), example_inputs=(draw(16),))
    for tokens in (1, 20, 127, 128, 256, 300):
        x = draw(1).repeat(tokens, 1)
        torch.testing.assert_close(compiled(x), model(x), rtol=0, atol=1e-13)
    assert moefx.explain(compiled).matched[0].calls == (3, 3, 3)


class Listing(Asking):
    """Eager loop of transformers 4."""

    def forward(self, x):
        weights, chosen = self.gate(x).softmax(-1).topk(K)
        out = torch.zeros_like(x)
        mask = nn.functional.one_hot(chosen, E).permute(2, 1, 0)
        for e in torch.greater(mask.sum(dim=(-1, -2)), 0).nonzero():
            slot, token = torch.where(mask[e].squeeze(0))
            out.index_add_(0, token, self.experts[int(e)](x[token]) * weights[token, slot, None])
        return out


def test_a_list_of_the_experts_that_have_tokens():
    model = Listing(None, None).double()
    compiled = moefx.compile(model, example_inputs=(draw(16),))
    for tokens in (1, 2, 200):
        x = draw(tokens)
        torch.testing.assert_close(compiled(x), model(x), rtol=0, atol=1e-13)
    assert moefx.explain(compiled).matched[0].calls == (3, 0, 0)


def test_an_idle_expert_must_not_change_the_rest():
    torch.manual_seed(0)
    model = HalvedForEveryIdleExpert(MASKS["gates above 0"], QUESTIONS["sum"]).double()
    refused = moefx.explain(model, example_inputs=(draw(16),))
    assert not refused.matched
    assert "under different routings" in str(refused)


class CountedBehind(Asking):
    """Flatten the gates, and for the loss the selected experts, after the routed sum."""

    def forward(self, x):
        weights, chosen = self.gate(x).softmax(-1).topk(K)
        gates = torch.zeros(*x.shape[:-1], E, dtype=x.dtype).scatter(-1, chosen, weights)
        flat, gates = x.flatten(0, 1), gates.flatten(0, 1)
        out = torch.zeros_like(flat)
        for e, expert in enumerate(self.experts):
            mask = gates[:, e] > 0
            if mask.any():
                out[mask] += expert(flat[mask]) * gates[mask, e, None]
        return out.view_as(x), nn.functional.one_hot(chosen.view(-1), E).sum(0)


def test_computations_behind_the_sum_do_not_select():
    torch.manual_seed(0)
    model = CountedBehind(None, None).double()
    compiled = moefx.compile(model, example_inputs=(draw(16).view(2, 8, D),))
    for x in (draw(2)[None], draw(33).view(3, 11, D)):
        torch.testing.assert_close(compiled(x), model(x), rtol=0, atol=1e-13)
    assert moefx.explain(compiled).matched[0].calls == (2, 0, 0)


class Passing(Asking):
    """Select every expert whose score passes a threshold, possibly none."""

    def forward(self, x):
        scores, out = self.gate(x).sigmoid(), torch.zeros_like(x)
        passed = scores > 0.5
        for e, expert in enumerate(self.experts):
            t = passed[:, e].nonzero()[:, 0]
            if len(t) == 0:
                continue
            out = out.index_add(0, t, expert(x[t]) * scores[t, e, None])
        return out


def test_gradients_are_zeros_if_no_token_passes():
    torch.manual_seed(0)
    model = Passing(None, None).double()
    compiled = moefx.compile(model, example_inputs=(draw(10),))
    with torch.no_grad():
        model.gate.weight.copy_(torch.eye(E, D))
    x = draw(9).abs().neg()
    moefx.verify(compiled, model, (x,), routings=False).raise_if_failed()
    assert not compiled(x).any() and not model(x).requires_grad
