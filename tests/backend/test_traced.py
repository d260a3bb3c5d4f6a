"""`moefx.rewrite_graph` on graphs of `torch.fx.symbolic_trace` and of symbolic `make_fx`."""

from __future__ import annotations

import pytest
import torch
from torch import fx, nn
from torch.fx.experimental.proxy_tensor import make_fx

import moefx

from .test_refusals import D, Dense


class Mixture(Dense):
    def forward(self, x):
        p = self.gate(x).softmax(-1)
        w, ids = p.topk(2)
        return self.experts(x, torch.zeros_like(p).scatter(-1, ids, w))


class InPairs(Mixture):
    """Of three operands at once torch versions make different products."""

    def experts(self, x, gates):
        h = torch.einsum("td,edh->teh", x, self.up).relu()
        return torch.einsum("ted,te->td", torch.einsum("teh,ehd->ted", h, self.down), gates)


class Net(nn.Module):
    """Modules around the mixture, some of which act otherwise in training."""

    def __init__(self):
        super().__init__()
        self.norm, self.moe, self.act = nn.LayerNorm(D), Mixture(), nn.ReLU()
        self.drop, self.out = nn.Dropout(0.5), nn.Linear(D, 5)

    def forward(self, x):
        return self.out(self.drop(self.act(self.moe(self.norm(x)))))


def test_modules_that_are_called():
    """torch's own are looked into; those beside the mixture are called as before."""
    net = Net().double()
    net.norm.eval()
    gm, x = fx.symbolic_trace(net), torch.randn(9, D, dtype=torch.float64)
    out = moefx.rewrite_graph(gm, (x,))
    assert [str(n.target) for n in out.graph.nodes if n.op == "call_module"] == [
        "norm", "moefx.moe", "act", "drop", "out"
    ]  # fmt: skip
    assert list(out.state_dict()) == list(gm.state_dict()) and out.out is gm.out
    assert gm.get_submodule("moe.gate") is net.moe.gate and not net.norm.training and net.drop.training
    for tokens in (9, 4):
        x = torch.randn(tokens, D, dtype=torch.float64)
        results = []
        for run in (out, net):
            torch.manual_seed(1)
            results.append(run(x))
        torch.testing.assert_close(*results)
    moefx.verify(out, net, (x,)).raise_if_failed()
    assert not any(block.fallbacks for block in moefx.blocks(out))


def test_modules_with_hooks_are_not_looked_into():
    net = Net()
    net.norm.register_forward_hook(lambda *args: None)
    gm = fx.symbolic_trace(net)
    out = moefx.rewrite_graph(gm, (torch.randn(9, D),))
    assert moefx.blocks(out) and out.norm is net.norm
    net.moe.gate.register_forward_hook(lambda *args: None)
    assert moefx.rewrite_graph(gm, (torch.randn(9, D),)) is gm


def test_what_acts_otherwise_in_training_is_named(caplog):
    class Dropped(Mixture):
        def __init__(self):
            super().__init__()
            self.drop = nn.Dropout(0.1)

        def hidden(self, h):
            return self.drop(h)

    gm = fx.symbolic_trace(Dropped())
    assert moefx.rewrite_graph(gm, (torch.randn(9, D),)) is gm
    assert "the region calls a module, drop, whose code is not in the graph" in caplog.text


@pytest.mark.parametrize("mode", ["real", "symbolic"])
def test_make_fx(mode):
    """Symbolic tracing takes the sizes of what the experts compute."""
    m, x = InPairs().double(), torch.randn(9, D, dtype=torch.float64)
    gm = make_fx(lambda x: m(x), tracing_mode=mode, _allow_non_fake_inputs=True)(x)
    out = moefx.rewrite_graph(gm, (x,))
    (block,) = moefx.blocks(out)
    for tokens in (9, 4, 2) if mode == "symbolic" else (9,):
        x = torch.randn(tokens, D, dtype=torch.float64)
        torch.testing.assert_close(out(x), m(x))
    assert not block.fallbacks
