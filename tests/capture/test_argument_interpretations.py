"""Interpretations of arguments: which axes are token axes, and which ones the model fixes."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import moefx
from moefx.capture.arguments.argument_interpretations import MAX_INTERPRETATIONS, interpret_arguments
from moefx.capture.arguments.size_collisions import ModelNumbers

D, H, E, LENGTH = 16, 12, 4, 10


class Routed(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(D, E)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(D, H), nn.GELU(), nn.Linear(H, D)) for _ in range(E))

    def routed(self, x):
        weights, ids = self.gate(x).softmax(-1).topk(2)
        out = torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            *token, slot = torch.where(ids == e)
            out.index_put_(tuple(token), expert(x[tuple(token)]) * weights[(*token, slot)][:, None], accumulate=True)
        return out

    def forward(self, x):
        return self.routed(x)


class Positions(Routed):
    def __init__(self, *shape):
        super().__init__()
        self.positions = nn.Parameter(torch.randn(*shape, D))

    def forward(self, x):
        return self.routed(x + self.positions)


class FlatPositions(Positions):
    def forward(self, x):
        return self.routed((x + self.positions).flatten(0, 1)).view_as(x)


class EmbeddedPositions(Routed):
    def __init__(self):
        super().__init__()
        self.positions = nn.Embedding(LENGTH, D)

    def forward(self, x):
        return self.routed(x + self.positions(torch.arange(LENGTH, device=x.device)))


class MixedTokens(Routed):
    """Apply a linear layer to all positions of a sequence before the experts, like MLP-Mixer."""

    def __init__(self):
        super().__init__()
        self.mix = nn.Linear(LENGTH, LENGTH)

    def forward(self, x):
        return self.routed(x + self.mix(x.transpose(1, 2)).transpose(1, 2))


class TablePerPlace(Routed):
    def __init__(self):
        super().__init__()
        self.positions = nn.Parameter(torch.randn(4, 6, D))

    def forward(self, x):  # [B, 4, 6, D]
        return self.routed(x + self.positions)


class AssertedLength(Positions):
    def forward(self, x):
        assert x.shape[1] == LENGTH, "this model is for sequences of ten"
        return self.routed(x + self.positions)


FIXED = {
    "a table": (lambda: Positions(LENGTH), (3, LENGTH)),
    "a table with a batch axis": (lambda: Positions(1, LENGTH), (3, LENGTH)),
    "one sample": (lambda: Positions(LENGTH), (1, LENGTH)),
    "as many samples as positions": (lambda: Positions(LENGTH), (LENGTH, LENGTH)),
    "flattened": (lambda: FlatPositions(LENGTH), (3, LENGTH)),
    "an embedding": (EmbeddedPositions, (3, LENGTH)),
    "mixed tokens": (MixedTokens, (3, LENGTH)),
    "two axes": (TablePerPlace, (2, 4, 6)),
    "asserted": (lambda: AssertedLength(LENGTH), (3, LENGTH)),
}


@pytest.mark.sampled(4)
@pytest.mark.parametrize("make, lead", FIXED.values(), ids=FIXED)
def test_the_model_fixes_one_axis_and_leaves_the_batch_free(make, lead):
    torch.manual_seed(0)
    model = make()
    compiled = moefx.compile(model, example_inputs=(torch.randn(*lead, D),))
    for batch in (lead[0], 1, 2, 13):
        x = torch.randn(batch, *lead[1:], D, requires_grad=True)
        torch.testing.assert_close(compiled(x), model(x), rtol=1e-4, atol=1e-5)
        (got,), (want,) = (torch.autograd.grad(m(x).square().sum(), [x]) for m in (compiled, model))
        torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-4)
    (block,) = moefx.explain(compiled).matched
    assert block.calls[1] == 0


class Capacity(Positions):
    """Compute a capacity from all tokens: ten per sample."""

    def forward(self, x):
        flat = (x + self.positions).flatten(0, 1)
        weights, ids = self.gate(flat).softmax(-1).max(-1)
        places, out = int(1.25 * len(flat) / E), torch.zeros_like(flat)
        for e, expert in enumerate(self.experts):
            token = torch.where(ids == e)[0][:places]
            out[token] = expert(flat[token]) * weights[token, None]
        return out.view_as(x)


def test_a_capacity_counts_the_tokens_of_a_fixed_axis():
    torch.manual_seed(0)
    model = Capacity(LENGTH).double()
    compiled = moefx.compile(model, example_inputs=(torch.randn(3, LENGTH, D).double(),))
    for batch in (1, 2, 3, 7, 40):
        x = torch.randn(batch, LENGTH, D).double() + 2 * torch.randn(D).double()
        torch.testing.assert_close(compiled(x), model(x))
    (block,) = moefx.explain(compiled).matched
    assert block.calls[1] == 0


class Branching(Positions):
    def forward(self, x):
        flat = (x + self.positions).flatten(0, 1)
        return (self.routed(flat) * (2 if flat.shape[0] > 100 else 1)).view_as(x)


def test_a_branch_on_all_tokens_is_seen():
    torch.manual_seed(0)
    model = Branching(LENGTH)
    compiled = moefx.compile(model, example_inputs=(torch.randn(3, LENGTH, D),))
    for batch in (1, 3, 10, 11, 30):
        x = torch.randn(batch, LENGTH, D)
        torch.testing.assert_close(compiled(x), model(x), rtol=1e-4, atol=1e-5)


class TestReadings:
    def test_the_likeliest_interpretation_is_first(self):
        found = list(interpret_arguments((torch.zeros(2, 8, D), torch.zeros(2, 8)), {}, ModelNumbers()))
        assert [leaf.shape for leaf in found[0].tensors] == [("B", "S", D), ("B", "S")]
        assert found[1].feature == 1 and len(found) <= MAX_INTERPRETATIONS + 2
        others = [(a.dims, a.tensors[1].shape) for a in found[2:]]
        assert (("B", "S"), ("B", 8)) in others and (("B",), ("B", 8)) in others and (("S",), (2, "S")) in others

    def test_sizes_of_a_free_batch_count_fixed_tokens(self):
        *_, last = interpret_arguments((torch.zeros(3, 4, 5, D),), {}, ModelNumbers())
        found = {
            a.dims: a for a in interpret_arguments((torch.zeros(3, 4, 5, D), torch.zeros(60, 2)), {}, ModelNumbers())
        }
        batch = found[("B",)]
        assert batch.tokens_per_unit == 20 and batch.tokens == "B*20" and batch.tensors[1].shape == ("B*20", 2)
        assert batch.choose_sequence(40) == {"B": 2} and batch.build_call({"B": 2})[0][1].shape == (40, 2)
        assert len(last.dims) == 1
