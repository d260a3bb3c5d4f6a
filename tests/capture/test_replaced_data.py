"""Forwards that replace or convert the `.data` of parameters and buffers, which writes without an op."""

import copy

import pytest
import torch
from torch import nn

import moefx
from moefx.errors import NoMoEBlockFound

D, E = 8, 4


class Replacing(nn.Module):
    def __init__(self, before=None, after=None):
        super().__init__()
        self.router = nn.Linear(D, E, bias=False)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(D, 12), nn.ReLU(), nn.Linear(12, D)) for _ in range(E))
        self.register_buffer("bias", torch.zeros(E))
        self.before, self.after = before, after

    def forward(self, x):
        if self.before:
            self.before(self)
        scores = self.router(x.to(self.router.weight.dtype)).softmax(-1).to(x.dtype)
        chosen = (scores + self.bias).topk(2).indices
        weights = scores.gather(1, chosen)
        if self.after:
            self.after(self, chosen)
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            token, slot = torch.where(chosen == number)
            out[token] += expert(x[token]) * weights[token, slot, None]
        return out


def _count(chosen):
    return torch.bincount(chosen.flatten(), minlength=E).double()


def _add_counts(model, chosen):
    model.bias.data = model.bias.data + _count(chosen)


def _balance(model, chosen):
    model.bias.data = model.bias + 0.1 * (_count(chosen).mean() - _count(chosen)).sign()


def _set_to_counts(model, chosen):
    nn.Module.get_buffer(model, "bias").data = _count(chosen)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("after", [_add_counts, _balance, _set_to_counts])
@pytest.mark.parametrize("validation", ["symbolic", "auto"])
def test_buffers_are_updated(after, validation):
    torch.manual_seed(0)
    model, x = Replacing(after=after).double(), torch.randn(11, D, dtype=torch.float64)
    reference = copy.deepcopy(model)
    compiled = moefx.compile(model, plan=moefx.Plan(validation=validation), example_inputs=(x,))
    for _ in range(3):
        torch.testing.assert_close(compiled(x), reference(x))
        assert torch.equal(compiled.bias, reference.bias)
    assert compiled.bias.abs().sum() > 0


def _cast(model):
    model.router = model.router.to(torch.float32)


def _cast_data(model):
    model.router.weight.data = model.router.weight.data.float()


def _cast_all(model):
    model.router.float()


def _clamp(model):
    model.router.weight.data = model.router.weight.data.clamp(-0.1, 0.1)


def _tie(model):
    model.router.weight.data = model.experts[0][0].weight.data[:E]


@pytest.mark.parametrize(
    ("before", "reason"),
    [
        (_cast, r"from float64\[4, 8\] to float32\[4, 8\]"),
        (_cast_all, r"from float64\[4, 8\] to float32\[4, 8\]"),
        (_cast_data, r"from float64\[4, 8\] to float32\[4, 8\]"),
        (_clamp, "changes router.weight when it is called"),
        (_tie, "they share memory"),
    ],
)
def test_parameters_are_not_replaced(before, reason):
    model, x = Replacing(before).double(), torch.randn(11, D, dtype=torch.float64)
    with pytest.raises(NoMoEBlockFound, match=reason):
        moefx.compile(model, plan=moefx.Plan(validation="symbolic"), example_inputs=(x,))
    assert model.router.weight.dtype is torch.float64


@pytest.mark.sampled(2)
@pytest.mark.parametrize("before", [_cast, _cast_all, _cast_data])
def test_converted_before(before):
    """Convert the model before `compile`, as the error advises."""
    model, x = Replacing(before).double(), torch.randn(11, D, dtype=torch.float64)
    expected = model(x)
    compiled = moefx.compile(model, example_inputs=(x,))
    torch.testing.assert_close(compiled(x), expected)
