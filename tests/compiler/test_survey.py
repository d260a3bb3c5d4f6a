"""Surveys of a model: layers that share a proof, and refusals."""

from __future__ import annotations

import types

import pytest
import torch
from torch import nn

import moefx
from moefx import Plan
from moefx.compiler import survey
from moefx.compiler.survey import survey_model
from moefx.compiler.survey_result import Refusal

from ..blocks import D, Loop, Mlp


class Layer(Loop):
    def __init__(self, scale: float = 1.0, number: int = 0):
        super().__init__(Mlp)
        self.scale, self.number = scale, number

    def forward(self, x):
        return super().forward(x) * self.scale


class Model(nn.Module):
    def __init__(self, *layers: nn.Module):
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x):
        for layer in self.layers:
            x = x + layer(x)
        return x


def list_names(model: nn.Module) -> list[list[str]]:
    found = survey_model(model, (torch.zeros(5, D),), Plan())
    assert not found.refused
    return [[*m.names] for m in found.matched]


def test_unread_numbers_share_one_program():
    assert list_names(Model(*(Layer(number=i) for i in range(3)))) == [["layers.0", "layers.1", "layers.2"]]


def test_layers_that_read_other_attributes_are_proven_separately():
    assert list_names(Model(Layer(1.0), Layer(2.0), Layer(1.0))) == [["layers.0", "layers.2"], ["layers.1"]]


def make_activation(kind: type[nn.Module]) -> nn.Module:
    layer = Layer()
    for expert in layer.experts:
        expert.act = kind()
    return layer


def make_integers(value: int) -> nn.Module:
    layer = Layer()
    layer.register_buffer("offset", torch.tensor(value))
    return layer


def make_method() -> nn.Module:
    layer = Layer()
    layer.route = types.MethodType(lambda self, x: self.gate(x).sigmoid().topk(self.k, -1), layer)
    return layer


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("one", "other"),
    [
        (lambda: make_activation(nn.ReLU), lambda: make_activation(nn.SiLU)),
        (lambda: make_integers(1), lambda: make_integers(2)),
        (Layer, make_method),
    ],
    ids=["class of a submodule", "integer buffer", "method of its own"],
)
def test_different_blocks_of_one_class_are_proven_separately(one, other):
    model = Model(one(), other(), one())
    assert list_names(model) == [["layers.0", "layers.2"], ["layers.1"]]


def test_a_parent_reads_attributes_that_layers_set():
    class Leaves(Layer):
        def forward(self, x):
            self.seen = x.mean()
            return super().forward(x)

    class Reads(Model):
        def forward(self, x):
            return super().forward(x) + sum(layer.seen for layer in self.layers)

    assert list_names(Reads(Leaves(), Leaves())) == [["layers.0", "layers.1"]]


def test_watching_does_not_change_the_class():
    before = set(vars(Layer))
    list_names(Model(Layer(1.0), Layer(2.0)))
    assert set(vars(Layer)) == before


def test_all_branches_contribute():
    class Dense(nn.Module):
        def __init__(self):
            super().__init__()
            self.experts = nn.ModuleList(Mlp() for _ in range(3))

        def forward(self, x):
            return sum(e(x) for e in self.experts)

    found = survey_model(Model(Dense()), (torch.zeros(5, D),), Plan())
    assert not found.matched
    (refusal,) = found.refused
    assert refusal.name == "layers.0" and "contribute to every token" in refusal.reason
    assert refusal.source.startswith("test_survey.py:") and "topk" in refusal.remedy


def test_a_plain_model_has_nothing():
    found = survey_model(Model(Mlp()), (torch.zeros(5, D),), Plan())
    assert not found.matched and not found.refused


def test_progress_names_modules(monkeypatch):
    announced = []
    for module in ("survey", "equal_modules"):
        monkeypatch.setattr(f"moefx.compiler.{module}.announce", announced.append)
    survey_model(Model(Layer()), (torch.zeros(5, D),), Plan())
    assert announced == ["running Model on abstract tensors", "proving layers.0"]


class AddsUp(Loop):
    """Let experts add up their rows: a row depends on others."""

    def expert(self, e, x, w):
        return super().expert(e, x, w).cumsum(0)


class Wrapper(nn.Module):
    def __init__(self, change=lambda x, out: out):
        super().__init__()
        self.block, self.change = AddsUp(), change

    def forward(self, x):
        return self.change(x, self.block(x))


class Owner(Wrapper):
    """Own a parameter beside the block, which the block may use through a list or a closure."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(D))


@pytest.mark.parametrize(
    ("model", "proven"),
    [
        (Owner(), ["block", ""]),
        (nn.Sequential(AddsUp()), ["0"]),
        (Wrapper(), ["block"]),
        (nn.Sequential(Wrapper()), ["0.block"]),
        (Wrapper(lambda x, out: x + out), ["block", ""]),
        (Wrapper(lambda x, out: (out, x)), ["block", ""]),
    ],
)
def test_a_module_around_a_refused_one_is_proven_if_it_adds_something(model, proven, monkeypatch):
    names, prove = [], survey.prove_equal_modules
    monkeypatch.setattr(survey, "prove_equal_modules", lambda name, *rest: names.append(name) or prove(name, *rest))
    found = survey_model(model, (torch.zeros(5, D),), Plan())
    assert not found.matched and found.refused[0].name == proven[0]
    assert names == proven


def test_a_refusal_prints_block_reason_line_and_remedy():
    assert str(Refusal("", "why")) == "the model: why"
    assert str(Refusal("a.b", "why", "m.py:3", ("x", "y"), "do z")) == "a.b: why [x, y] (m.py:3); do z"


def test_weights_that_are_not_finite():
    """Name the weights; the remedy works."""
    model, x = Loop(Mlp), torch.randn(5, D)
    with torch.no_grad():
        model.experts[1].up.weight.fill_(float("nan"))
    with pytest.raises(moefx.NoMoEBlockFound, match=r"values of experts\.1\.up\.weight are NaN"):
        moefx.compile(model, example_inputs=(x,))
    compiled = moefx.compile(model, example_inputs=(x,), plan=Plan(validation="symbolic"))
    torch.testing.assert_close(compiled(x), model(x), equal_nan=True)


@pytest.mark.parametrize("bad", [(0,), (0, 1, 2)])
def test_equal_blocks_with_nonfinite_weights(bad):
    """Use the comparison of an equal block with finite weights; without one, list all blocks."""
    model, x = nn.Sequential(*(Loop(Mlp) for _ in range(3))), torch.randn(5, D)
    with torch.no_grad():
        for i in bad:
            model[i].experts[1].up.weight.fill_(float("nan"))
    explained = moefx.explain(moefx.compile(model, example_inputs=(x,), strict=False))
    refused = sorted(refusal.name for refusal in explained.refused)
    assert refused == ([] if len(bad) < 3 else ["0", "1", "2"])
    assert len(explained.matched) == (1 if len(bad) < 3 else 0)
