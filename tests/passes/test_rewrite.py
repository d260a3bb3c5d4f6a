"""Rewritten graphs: the dialect around the user's own parts, with effects and kept modules."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import moefx
from moefx.errors import Refused

from ..blocks import D, E, Loop, Mlp, rewritten

ops = torch.ops.moefx


def list_kept_modules(result) -> set[str]:
    return {n.target for n in result.graph.graph.nodes if n.op == "call_module"}


def test_ops_and_absorbed_parameters():
    result = rewritten(Loop(Mlp))
    for op in (ops.build_pft, ops.expert_mlp):
        assert len(result.graph.find(op.default)) == 1
    assert len(result.dialect_graph.absorbed) == 4 * E
    assert list_kept_modules(result) == {"gate"}


def test_buffer_updates_and_several_outputs_are_kept():
    class Counting(Loop):
        def __init__(self):
            super().__init__(Mlp)
            self.register_buffer("load", torch.zeros(E))

        def forward(self, x):
            w, ids = self.route(x)
            self.load += torch.bincount(ids.flatten(), minlength=E)
            return super().forward(x), {"aux": w.mean()}

    block = Counting()
    fn = rewritten(block).graph.compile()
    x = torch.randn(9, D)
    (found, aux), after = fn(block, x), block.load.clone()
    wanted, extra = block(x)
    torch.testing.assert_close((found, aux["aux"]), (wanted, extra["aux"]))
    assert after.sum() == 18 and block.load.sum() == 36


def test_router_hooks_fire():
    block, calls = Loop(Mlp), []
    fn = rewritten(block).graph.compile()
    block.gate.register_forward_hook(lambda *a: calls.append(1))
    fn(block, torch.randn(4, D))
    assert len(calls) == 1


class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.mlp, self.linear = Mlp(), nn.Linear(D, D)

    def forward(self, x):
        return x + self.mlp(x) - self.linear(x)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("base", [lambda: nn.Linear(D, D), Mlp, Residual, lambda: nn.LayerNorm(D)])
def test_experts_are_added_to_another_modules_output(base):
    class Added(Loop):
        def __init__(self):
            super().__init__()
            self.shared = base()

        def forward(self, x):
            (w, ids), out = self.route(x), self.shared(x)
            for e in range(E):
                t, k = torch.where(ids == e)
                out = out.index_add(0, t, self.expert(e, x[t], w[t, k, None]))
            return out

    block = Added()
    assert list_kept_modules(rewritten(block)) == {"gate", "shared"}
    x = torch.randn(9, D)
    torch.testing.assert_close(moefx.compile(block, example_inputs=(x,))(x), block(x))


def test_shared_expert_stays_a_call():
    class Shared(Loop):
        def __init__(self):
            super().__init__(Mlp)
            self.shared = Mlp()

        def forward(self, x):
            return super().forward(x) + self.shared(x)

    assert list_kept_modules(rewritten(Shared())) == {"gate", "shared"}


def test_random_experts_are_refused():
    with pytest.raises(Refused, match=r"random numbers|bernoulli"):
        rewritten(Loop(lambda: nn.Sequential(nn.Linear(D, D), nn.Dropout(0.5))))


class DividesByItsChoice(Loop):
    """Drop slots, and divide by a value of each slot."""

    def forward(self, x):
        scores = self.gate(x)
        w, ids = scores.softmax(-1).topk(self.k, -1)
        value, kept, out = scores.gather(1, ids).exp(), w > 0.35, torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            t, k = torch.where((ids == e) & kept)
            out = out.index_add(0, t, torch.tanh(expert(x[t]) / value[t, k, None]) * w[t, k, None])
        return out


def test_rows_that_are_dropped_do_not_reach_the_gradients_of_choices():
    torch.manual_seed(0)
    block = DividesByItsChoice().double()
    graph = rewritten(block, torch.zeros(5, D, dtype=torch.float64)).graph
    x = torch.randn(9, D, dtype=torch.float64, requires_grad=True)
    again = x.detach().clone().requires_grad_()
    want = block(x)
    out = graph.compile()(block, again)
    torch.testing.assert_close(out, want)
    want.sum().backward()
    out.sum().backward()
    torch.testing.assert_close(again.grad, x.grad)


class LoadIfUneven(Loop):
    """Return the load of experts if it is uneven, else None."""

    def forward(self, x):
        _, ids = self.route(x)
        load = torch.bincount(ids.flatten(), minlength=len(self.experts))
        return super().forward(x), None if int(load.max()) - int(load.min()) < 4 else load


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("num_experts", "k"), [(3, 1), (4, 1)])
def test_results_that_some_calls_lack_are_refused(num_experts, k):
    with pytest.raises(Refused, match=r"the block returns a tensor depends on the routing"):
        rewritten(LoadIfUneven(Mlp, k, num_experts), torch.zeros(12, D))
