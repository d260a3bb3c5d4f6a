"""Compiled models return the original's outputs and gradients for every routing."""

from __future__ import annotations

import functools

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import moefx

from .models import CLOSE

D, H, E = 5, 4, 4


class Forced(nn.Module):
    """Ordinary router whose scores tests can dictate: they are part of the tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, x):
        return x[:, :E] * self.scale


class Expert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(D, H), nn.Linear(H, D)

    def forward(self, x):
        return self.down(F.silu(self.up(x)))


class Loop(nn.Module):
    def __init__(self, k: int) -> None:
        super().__init__()
        self.router, self.k, self.experts = Forced(), k, nn.ModuleList(Expert() for _ in range(E))

    def forward(self, x):
        weights, chosen = self.router(x).softmax(-1).topk(self.k)
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            token, slot = torch.where(chosen == number)
            out = out.index_add(0, token, expert(x[token]) * weights[token, slot, None])
        return out


class Capacity(Loop):
    """Limit each expert to 1.25 times its share, and drop later tokens."""

    def forward(self, x):
        weights, chosen = self.router(x).softmax(-1).topk(self.k)
        capacity = (len(x) * self.k * 5) // (E * 4)
        hot = F.one_hot(chosen, E)  # [S, K, E]
        place = (hot.flatten(0, 1).cumsum(0).view_as(hot) * hot).sum(-1) - 1
        kept = place < capacity
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            token, slot = torch.where((chosen == number) & kept)
            out = out.index_add(0, token, expert(x[token]) * weights[token, slot, None])
        return out


class Stacked(Loop):
    def __init__(self, k: int) -> None:
        super().__init__(k)
        self.experts = None
        self.up = nn.Parameter(torch.randn(E, 2 * H, D))
        self.down = nn.Parameter(torch.randn(E, D, H))

    def forward(self, x):
        weights, chosen = self.router(x).softmax(-1).topk(self.k)
        order = chosen.flatten().argsort(stable=True)
        rows, ends = x[order // self.k], chosen.flatten().bincount(minlength=E).cumsum(0).tolist()
        y, start = torch.empty_like(rows), 0
        for number, end in enumerate(ends):
            gate, up = (rows[start:end] @ self.up[number].T).chunk(2, -1)
            y[start:end] = (gate.tanh() * up) @ self.down[number].T
            start = end
        y = y * weights.flatten()[order, None]
        return torch.zeros_like(x).index_add(0, order // self.k, y)


MODELS = {
    "loop": lambda: Loop(2),
    "top-1": lambda: Loop(1),
    "all experts": lambda: Loop(E),
    "stacked": lambda: Stacked(2),
    "capacity": lambda: Capacity(2),
}


@functools.cache
def build_pair(kind: str) -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    model = nn.Sequential(MODELS[kind]()).double()
    return model, moefx.compile(model, example_inputs=(torch.randn(12, D, dtype=torch.float64),))


# Few levels, so that ties are frequent; the fifth column is the token's own value.
LEVELS = st.sampled_from([-1.0, 0.0, 0.0, 0.5, 2.0])
ROUTINGS = st.lists(st.lists(LEVELS, min_size=E, max_size=E), min_size=0, max_size=24)


def run_and_differentiate(model: nn.Module, x: Tensor) -> list[Tensor]:
    x = x.clone().requires_grad_()
    out = model(x)
    sources = [x, *model.parameters()]
    grads = torch.autograd.grad((out * out.detach().cos()).sum(), sources, allow_unused=True, materialize_grads=True)
    return [out.detach(), *grads]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("kind", MODELS)
@settings(max_examples=24, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(scores=ROUTINGS)
@example(scores=[])  # no token
@example(scores=[[0.0] * E] * 9)  # ties everywhere
@example(scores=[[2.0, 0.0, -1.0, -1.0]] * 20)  # all to the same experts, the others empty; overflow
@example(scores=[[-1.0, -1.0, 0.5, 2.0]])  # one token
def test_any_routing_gives_outputs_and_gradients_of_the_original(kind, scores):
    model, compiled = build_pair(kind)
    x = torch.zeros(len(scores), D, dtype=torch.float64)
    if scores:
        x[:, :E] = torch.tensor(scores, dtype=torch.float64)
    x[:, E] = torch.linspace(-1, 1, len(scores), dtype=torch.float64)
    (block,) = moefx.blocks(compiled)
    fallbacks, calls = block.fallbacks, block.forward.counts.rewritten
    found = run_and_differentiate(compiled, x)
    # captures determine how the capacity depends on the size; for smaller sizes the original may run
    if kind != "capacity" or len(scores) >= 4:
        assert (block.fallbacks, block.forward.counts.rewritten) == (fallbacks, calls + 1)
    for a, b in zip(found, run_and_differentiate(model, x), strict=True):
        torch.testing.assert_close(a, b, **CLOSE)


def test_the_capacity_drops():
    """Check that the property above includes dropped tokens."""
    model, compiled = build_pair("capacity")
    x = torch.zeros(20, D, dtype=torch.float64)
    x[:, :E] = torch.tensor([2.0, 0.5, -1.0, -1.0], dtype=torch.float64)
    out = compiled(x)
    torch.testing.assert_close(out, model(x), **CLOSE)
    assert out[:12].all(dim=1).all() and not out[12:].any()  # 20 * 2 * 5 / 16
