"""Runs in a sandbox leave the model unchanged."""

from __future__ import annotations

import random

import torch
from torch import nn

from moefx.comparison.sandbox import Casts, RunOptions, execute, leaves, make_sandbox, random_state


class Awkward(nn.Module):
    """Model with state in parameters, buffers, lists, dicts, closures and aliases."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4, bias=False)
        self.b.weight = self.a.weight  # tied
        self.held = [self.a.weight, {"bias": self.a.bias}]
        self.register_buffer("count", torch.zeros((), dtype=torch.long))
        self.register_buffer("mean", torch.zeros(4))
        self.alias = self.mean
        self.last = None
        inner = self.forward
        self.forward = lambda x: inner(x) * 2  # a closure over the module itself

    def forward(self, x):
        self.count += 1
        self.alias += x.detach().mean(0)
        self.last = self.b(self.a(x)) + self.held[0].sum() + self.held[1]["bias"]
        return self.last


def test_a_sandbox_shares_parameters_and_owns_the_rest():
    model = Awkward()
    model.last = model.a.weight * 2  # deepcopy rejects tensors with a history
    box = make_sandbox(model, Casts(None))
    assert torch.equal(box.a.weight, model.a.weight) and box.b.weight is box.a.weight
    x = torch.randn(3, 4)
    assert torch.equal(box(x), 2 * (model.b(model.a(x)) + model.a.weight.sum() + model.a.bias))
    assert int(box.count) == 1 and int(model.count) == 0
    assert bool(box.mean.any()) and not bool(model.mean.any()) and box.alias is box.mean
    assert torch.equal(model.last, model.a.weight * 2) and box.last.shape == (3, 4)


def test_a_sandbox_in_another_precision_is_all_in_it():
    model, casts = Awkward(), Casts(torch.float64)
    box = make_sandbox(model, casts, torch.float64)
    assert {p.dtype for p in box.parameters()} == {torch.float64} and box.b.weight is box.a.weight
    assert box.held[0] is box.a.weight and box.held[1]["bias"] is box.a.bias
    assert box.mean.dtype == torch.float64 and box.count.dtype == torch.long
    assert box(torch.randn(3, 4).double()).dtype == torch.float64
    assert model.a.weight.dtype == torch.float32 and model.mean.dtype == torch.float32


def test_a_sandbox_copies_small_parameters_and_shares_large_ones(monkeypatch):
    model, casts = Awkward(), Casts(torch.float64)
    box = make_sandbox(model, Casts(None))
    with torch.no_grad():
        box.a.weight.mul_(2)  # like a forward that normalizes its weights
    assert not torch.equal(box.a.weight, model.a.weight)
    monkeypatch.setattr("moefx.comparison.sandbox._MAX_COPIED", 10)
    box = make_sandbox(model, Casts(None))
    assert box.a.weight.data_ptr() == model.a.weight.data_ptr() and box.a.bias.data_ptr() != model.a.bias.data_ptr()
    box.a.weight.data = torch.zeros(4, 4)
    assert bool(model.a.weight.any())
    cast = make_sandbox(model, casts, torch.float64)
    assert cast.a.weight.data_ptr() == make_sandbox(model, casts, torch.float64).a.weight.data_ptr(), "made once"


def test_execute_collects_all_values_and_changes_nothing():
    model = Awkward()
    x = torch.randn(3, 4)
    run = execute(make_sandbox(model, Casts(None)), ((x,), {}), RunOptions())
    assert {kind for kind, _ in run.values} == {"output", "grad_input", "grad_param", "buffer", "state"}
    assert {("buffer", "count"), ("buffer", "mean"), ("state", "last")} <= run.changed
    assert x.grad is None and model.a.weight.grad is None and int(model.count) == 0
    again = execute(make_sandbox(model, Casts(None)), ((x,), {}), RunOptions(), cotangents=run.cotangents)
    assert all(torch.equal(t, again.values[key]) for key, t in run.values.items())


def test_arguments_keep_their_aliases_and_containers():
    class Takes(nn.Module):
        def forward(self, pair, *, same):
            assert type(pair) is tuple and pair[0] is same and pair[0] is not x
            return pair[0].mul_(2) + pair[1]["ids"]

    x = torch.ones(2)
    run = execute(Takes(), (((x, {"ids": torch.arange(2)}),), {"same": x}), RunOptions())
    assert torch.equal(run.values["output", "output"], torch.tensor([2.0, 3.0]))
    assert torch.equal(run.values["grad_input", "0.0"], run.cotangents["output"] * 2)
    assert ("state", "input 0.0") in run.changed and torch.equal(x, torch.ones(2))


def test_random_state_is_put_back():
    before = torch.get_rng_state(), random.getstate()
    with random_state(3):
        first = torch.rand(2), random.random()
    with random_state(3):
        again = torch.rand(2), random.random()
    assert torch.equal(first[0], again[0]) and first[1] == again[1]
    assert torch.equal(before[0], torch.get_rng_state()) and before[1] == random.getstate()


def test_leaves_survive_cycles():
    tree: dict = {"a": torch.zeros(1), "n": 2, "s": "text", "f": print}
    tree["self"] = tree
    assert [name for name, _ in leaves(tree)] == ["a", "n"]
