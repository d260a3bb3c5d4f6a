"""The rewritten graph: the dialect around the user's own parts, with effects and kept modules."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from moefx.errors import Refused

from .blocks import D, E, Loop, Mlp, rewritten

ops = torch.ops.moefx


def kept_modules(result) -> set[str]:
    return {n.target for n in result.graph.graph.nodes if n.op == "call_module"}


def test_ops_and_absorbed_parameters():
    result = rewritten(Loop(Mlp))
    for op in (ops.build_pft, ops.expert_mlp):
        assert len(result.graph.find(op.default)) == 1
    assert len(result.rewritten.absorbed) == 4 * E
    assert kept_modules(result) == {"gate"}


def test_buffer_updates_and_several_outputs_stay():
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


def test_shared_expert_stays_a_call():
    class Shared(Loop):
        def __init__(self):
            super().__init__(Mlp)
            self.shared = Mlp()

        def forward(self, x):
            return super().forward(x) + self.shared(x)

    assert kept_modules(rewritten(Shared())) == {"gate", "shared"}


def test_random_experts_are_refused():
    with pytest.raises(Refused, match=r"random numbers|bernoulli"):
        rewritten(Loop(lambda: nn.Sequential(nn.Linear(D, D), nn.Dropout(0.5))))
