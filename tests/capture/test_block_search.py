"""Block candidates of a model: modules that select experts, innermost module first."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from moefx.capture.search.block_search import search_blocks
from moefx.capture.search.module_structure import compute_signature

D, E = 4, 3


class Gate(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(D, E)

    def forward(self, x):
        return self.lin(x).topk(2, -1)


class Moe(nn.Module):
    def __init__(self, gate: type[nn.Module] = Gate):
        super().__init__()
        self.gate = gate()
        self.experts = nn.ModuleList(nn.Linear(D, D) for _ in range(E))

    def forward(self, x):
        w, ids = self.gate(x)
        dense = torch.stack([e(x) for e in self.experts], 1)
        return (dense.gather(1, ids[..., None].expand(-1, -1, D)) * w[..., None]).sum(1)


class Layer(nn.Module):
    def __init__(self, width: int = D):
        super().__init__()
        self.norm, self.moe = nn.LayerNorm(width), Moe()

    def forward(self, x):
        return x + self.moe(self.norm(x))


class Stack(nn.Module):
    def __init__(self, n: int):
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(n))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


X = torch.zeros(5, D)


class TestEnclosingModules:
    def test_the_innermost_module_comes_first(self):
        assert search_blocks(Layer(), (X,), {}).enclosing_modules == [["moe.gate", "moe", ""]]

    def test_at_most_four_modules_are_tried(self):
        model = nn.Sequential(nn.Sequential(nn.Sequential(nn.Sequential(Layer()))))
        (enclosing,) = search_blocks(model, (X,), {}).enclosing_modules
        assert len(enclosing) == 4 and enclosing[0].endswith("moe.gate")

    def test_a_module_that_selects_twice_is_not_tried(self):
        enclosing = search_blocks(Stack(2), (X,), {}).enclosing_modules
        assert enclosing[0] == ["layers.0.moe.gate", "layers.0.moe", "layers.0"]

    def test_calls_hold_arguments(self):
        calls = search_blocks(Layer(), (X,), {}).calls
        assert calls["moe"].args[0].shape == (5, D) and calls["moe"].name == "moe"

    def test_a_model_that_selects_nothing_has_no_candidates(self):
        assert search_blocks(nn.Sequential(nn.Linear(D, D), nn.ReLU()), (X,), {}).enclosing_modules == []


class TestEqualModules:
    def test_equal_layers_run_once(self):
        ran = itertools.count()  # captures restore lists

        class Counted(Layer):
            def forward(self, x):
                next(ran)
                return super().forward(x)

        model = Stack(0)
        model.layers.extend(Counted() for _ in range(5))
        found = search_blocks(model, (X,), {})
        assert next(ran) == 1 and found.equal_modules == {f"layers.{i}": "layers.0" for i in range(1, 5)}
        assert found.calls["layers.4"].args[0].shape == (5, D)

    def test_other_shapes_run_again(self):
        class Halved(nn.Module):
            def __init__(self):
                super().__init__()
                self.a, self.b = Layer(), Layer()

            def forward(self, x):
                return self.b(self.a(x)[:2])

        assert search_blocks(Halved(), (X,), {}).equal_modules == {}

    def test_training_mode_is_part_of_the_signature(self):
        a, b = Layer(), Layer()
        assert compute_signature(a) == compute_signature(b) and compute_signature(a) != compute_signature(b.eval())
        assert compute_signature(a) != compute_signature(Layer().double()) and compute_signature(
            Moe()
        ) != compute_signature(Layer())


class ManualSoftmax(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(D, D)

    def forward(self, x):
        y = self.lin(x)
        e = (y - y.max(-1, keepdim=True).values).exp()
        return e / e.sum(-1, keepdim=True)


class TestNoChoice:
    def test_max_in_a_softmax(self):
        assert search_blocks(ManualSoftmax(), (X,), {}).enclosing_modules == []

    def test_max_is_a_selection_if_its_index_is_used(self):
        class First(nn.Module):
            def __init__(self):
                super().__init__()
                self.lin = nn.Linear(D, D)

            def forward(self, x):
                values, ids = self.lin(x).max(-1)
                return F.one_hot(ids, D) * values[:, None]

        assert search_blocks(First(), (X,), {}).enclosing_modules == [[""]]

    def test_an_argmax_of_integers_is_no_selection(self):
        class Ids(nn.Module):
            def forward(self, ids):
                return ids.argmax(-1)

        assert search_blocks(Ids(), (torch.zeros(5, 3, dtype=torch.long),), {}).enclosing_modules == []


class Dense(nn.Module):
    """Equal layers in parallel, without a selection."""

    def __init__(self, stacked: bool = False):
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(D, D) for _ in range(E))

    def forward(self, x):
        return sum(e(x) for e in self.experts)


class TestStructural:
    def test_experts_side_by_side_make_a_candidate(self):
        found = search_blocks(Dense(), (X,), {})
        assert found.structural == {""} and found.branches == {""} and found.enclosing_modules == [[""]]

    def test_one_after_the_other(self):
        class Deep(Dense):
            def forward(self, x):
                for e in self.experts:
                    x = e(x)
                return x

        found = search_blocks(Deep(), (X,), {})
        assert found.branches == set() and found.structural == {""}

    def test_stacked_parameters_make_a_candidate(self):
        class Stacked(nn.Module):
            def __init__(self):
                super().__init__()
                self.w = nn.Parameter(torch.randn(E, D, D))

            def forward(self, x):
                return torch.einsum("td,edf->tf", x, self.w)

        assert search_blocks(nn.Sequential(Stacked()), (X,), {}).structural == {"0"}

    @pytest.mark.parametrize("hold", [lambda w: nn.ParameterList([w]), lambda w: nn.ParameterDict({"0": w})])
    def test_stacked_parameters_in_a_list(self, hold):
        class Held(nn.Module):
            def __init__(self):
                super().__init__()
                self.w = hold(torch.randn(E, D, D))

            def forward(self, x):
                return torch.einsum("td,edf->tf", x, next(iter(self.w.parameters())))

        assert search_blocks(nn.Sequential(Held()), (X,), {}).structural == {"0"}


def test_the_model_is_unchanged():
    model, call = Stack(2), nn.Module.__call__
    before = {k: v.clone() for k, v in model.state_dict().items()}
    search_blocks(model, (X,), {})
    assert nn.Module.__call__ is call
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())


def test_signatures_compare_integers_and_not_their_hashes():
    """hash(-1) is hash(-2)."""
    signatures = []
    for last in (-1, -2):
        module = nn.Linear(2, 2)
        module.register_buffer("table", torch.tensor([0, last]))
        signatures.append(compute_signature(module))
    assert signatures[0] != signatures[1]
