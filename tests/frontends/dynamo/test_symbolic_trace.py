"""`moefx.rewrite_graph` on graphs of `torch.fx.symbolic_trace` and of symbolic `make_fx`."""

from __future__ import annotations

import copy
import io

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn
from torch.fx.experimental.proxy_tensor import make_fx

import moefx
from moefx.errors import AbsorbedModuleChanged

from .dense_mixture import D, Dense, E


class Mixture(Dense):
    def forward(self, x):
        p = self.gate(x).softmax(-1)
        w, ids = p.topk(2)
        return self.experts(x, torch.zeros_like(p).scatter(-1, ids, w))


class InPairs(Mixture):
    """Use einsums of two operands: torch versions decompose three operands differently."""

    def experts(self, x, gates):
        h = torch.einsum("td,edh->teh", x, self.up).relu()
        return torch.einsum("ted,te->td", torch.einsum("teh,ehd->ted", h, self.down), gates)


class Net(nn.Module):
    """Put a mixture between modules. Some of these depend on the training mode."""

    def __init__(self):
        super().__init__()
        self.norm, self.moe, self.act = nn.LayerNorm(D), Mixture(), nn.ReLU()
        self.drop, self.out = nn.Dropout(0.5), nn.Linear(D, 5)

    def forward(self, x):
        return self.out(self.drop(self.act(self.moe(self.norm(x)))))


def test_modules_that_are_called():
    """Inline torch's own modules, and keep calls of the modules around the mixture."""
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


def test_absorbed_modules_reject_hooks():
    m, x = Net(), torch.randn(9, D)
    out = moefx.rewrite_graph(fx.symbolic_trace(m), (x,))
    for register in ("register_forward_hook", "register_forward_pre_hook", "register_full_backward_hook"):
        with pytest.raises(AbsorbedModuleChanged, match=r"moe\.gate is not called any more"):
            getattr(out.moe.gate, register)(lambda *args: None)
        getattr(out.out, register)(lambda *args: None)
    torch.testing.assert_close(copy.deepcopy(out).moe.gate.weight, m.moe.gate.weight)


def test_modules_that_do_nothing():
    class Idle(Mixture):
        def __init__(self):
            super().__init__()
            self.idle = nn.Sequential(nn.Identity(), nn.Dropout(0.0))

        def hidden(self, h):
            return self.idle(h)

    m, x = Idle(), torch.randn(9, D)
    out = moefx.rewrite_graph(fx.symbolic_trace(m), (x,))
    torch.testing.assert_close(out(x), m(x))
    assert moefx.blocks(out)


def test_modules_that_depend_on_the_mode_are_named(caplog):
    class Dropped(Mixture):
        def __init__(self):
            super().__init__()
            self.drop = nn.Dropout(0.1)

        def hidden(self, h):
            return self.drop(h)

    gm = fx.symbolic_trace(Dropped())
    assert moefx.rewrite_graph(gm, (torch.randn(9, D),)) is gm
    assert "the region calls a module, drop, whose code is not in the graph" in caplog.text


class Sized(Mixture):
    """Use numbers from sizes in all parts of the mixture."""

    def forward(self, x):
        batch, tokens, _ = x.shape
        rows = x.view(-1, x.size(-1))
        p = self.gate(rows).softmax(-1)
        w, ids = p.topk(2)
        w = w * (torch.arange(tokens) < tokens - 1).expand(batch, tokens).reshape(-1, 1) / rows.shape[0]
        gates = torch.zeros(p.shape[:-1] + (p.size()[1],), dtype=x.dtype).scatter(-1, ids, w)
        return self.experts(rows, gates).view(x.size())


class Capacity(Mixture):
    """Compute a capacity as in GShard that no expert exceeds."""

    def forward(self, x):
        tokens = x.shape[0]
        places = tokens * 2
        w, ids = self.gate(x).softmax(-1).topk(2)
        mask = F.one_hot(ids, E)
        at = (mask.transpose(0, 1).reshape(2 * tokens, E).cumsum(0) - 1).reshape(2, tokens, E).transpose(0, 1)
        sent = F.one_hot(at.clamp(min=0), num_classes=places) * (mask * (at < places)).unsqueeze(-1)
        rows = torch.einsum("tkec,td->ecd", sent.to(x.dtype), x)
        out = (rows @ self.up).relu() @ self.down
        return torch.einsum("tkec,tk,ecd->td", sent.to(x.dtype), w, out)


class Windowed(Mixture):
    """Multiply by a window, for which symbolic sizes become a number."""

    def forward(self, x):
        return super().forward(x) * torch.hann_window(x.shape[0], dtype=x.dtype)[:, None]


CASES = [
    (Sized, (2, 9), [(2, 9), (3, 5), (1, 7)]),
    (Sized, (1, 9), [(3, 5)]),
    (Sized, (8, 8), [(3, 5)]),
    (Sized, (4, 1), [(4, 1), (3, 5)]),
    (Sized, (1, 1), [(3, 5)]),
    pytest.param(
        Capacity, (9,), [(9,), (4,), (80,)],
        marks=pytest.mark.skipif(torch.__version__.startswith("2.11"), reason="its products make numbers of symbols"),
    ),
]  # fmt: skip


@pytest.mark.sampled(4)
@pytest.mark.parametrize(("kind", "example", "others"), CASES)
def test_graphs_that_read_sizes(kind, example, others):
    """Run the rewritten graph at other sizes: the graph is valid for all."""
    m = kind().double()
    out = moefx.rewrite_graph(fx.symbolic_trace(m), (torch.randn(*example, D, dtype=torch.float64),))
    assert not any("val" in n.meta for n in out.graph.nodes)
    for sizes in others:
        x = torch.randn(*sizes, D, dtype=torch.float64)
        torch.testing.assert_close(out(x), m(x))
    (block,) = moefx.blocks(out)
    assert block.fallbacks == 0


def test_functions_that_read_sizes():
    """Rewrite a function that gets its weights as inputs."""

    def mixture(x, gate, up, down):
        batch, tokens, width = x.shape
        rows = x.reshape(-1, width)
        p = (rows @ gate).softmax(-1)
        w, ids = p.topk(2, -1)
        gates = torch.zeros_like(p).scatter(-1, ids, w / tokens)
        h = torch.einsum("td,edh->teh", rows, up).relu()
        return torch.einsum("teh,ehd,te->td", h, down, gates).reshape(batch, tokens, width)

    def rows(*sizes):
        return torch.randn(*sizes, dtype=torch.float64)

    weights = rows(D, E), rows(E, D, 6), rows(E, 6, D)
    out = moefx.rewrite_graph(fx.symbolic_trace(mixture), (rows(2, 9, D), *weights))
    for sizes in ((2, 9), (3, 5)):
        x = rows(*sizes, D)
        torch.testing.assert_close(out(x, *weights), mixture(x, *weights))
    assert [block.fallbacks for block in moefx.blocks(out)] == [0]


def test_another_rank_than_the_examples():
    class Rows(Mixture):
        def forward(self, x):
            shape = x.shape
            return super().forward(x.view(-1, shape[-1])).view(shape)

    m = Rows()
    out = moefx.rewrite_graph(fx.symbolic_trace(m), (torch.randn(2, 9, D),))
    for run in (out, torch.compile(out, backend="eager")):
        with pytest.raises(Exception, match=rf"x is \[5, {D}\]; the graph was rewritten for examples of 3 dimensions"):
            run(torch.randn(5, D))
        x = torch.randn(3, 4, D)
        torch.testing.assert_close(run(x), m(x))
    out.graph.eliminate_dead_code()
    assert "expect_rank" in out.graph.python_code("self").src


def test_arguments_with_defaults_may_be_left_out():
    class Biased(Mixture):
        def forward(self, x, bias=None, scale=2.0):
            return super().forward(x)

    m, x = Biased(), torch.randn(9, D)
    out = moefx.rewrite_graph(fx.symbolic_trace(m), (x,))
    torch.testing.assert_close(out(x), m(x))
    assert moefx.blocks(out)


def test_numbers_among_the_inputs():
    """Accept another number in each call."""

    class Tempered(Mixture):
        def forward(self, x, temperature):
            return super().forward(x / (2 * temperature))

    class Listed(Mixture):
        def forward(self, x, temperature):
            return super().forward(x * temperature[0])

    gm = fx.symbolic_trace(Tempered())
    out = moefx.rewrite_graph(gm, (torch.randn(9, D), 1.0))
    x = torch.randn(9, D)
    torch.testing.assert_close(out(x, 0.5), gm(x, 0.5))
    gm = fx.symbolic_trace(Listed())
    out = moefx.rewrite_graph(gm, (torch.randn(9, D), [1.0]))
    torch.testing.assert_close(out(x, [0.5]), gm(x, [0.5]))


class Compared(Mixture):
    def forward(self, x):
        return super().forward(x) * (x.shape[0] > 5)


def test_sizes_that_are_compared(caplog):
    gm = fx.symbolic_trace(Compared())
    assert moefx.rewrite_graph(gm, (torch.randn(9, D),)) is gm
    assert "the graph compares sizes" in caplog.text


def test_sizes_that_become_numbers(caplog):
    gm = fx.symbolic_trace(Windowed())
    assert moefx.rewrite_graph(gm, (torch.randn(9, D),)) is gm
    assert "fixes axis 0 of x to 9" in caplog.text


@pytest.mark.parametrize("mode", ["real", "symbolic"])
def test_make_fx(mode):
    """Trace with symbolic sizes inside the experts."""
    m, x = InPairs().double(), torch.randn(9, D, dtype=torch.float64)
    gm = make_fx(lambda x: m(x), tracing_mode=mode, _allow_non_fake_inputs=True)(x)
    out = moefx.rewrite_graph(gm, (x,))
    (block,) = moefx.blocks(out)
    for tokens in (9, 4, 2) if mode == "symbolic" else (9,):
        x = torch.randn(tokens, D, dtype=torch.float64)
        torch.testing.assert_close(out(x), m(x))
    assert not block.fallbacks


class Masked(Mixture):
    """Write through views: later values depend on the writes only through shared memory."""

    def __init__(self, way):
        super().__init__()
        self.way = way

    def forward(self, x):
        x, scores = x.clone(), self.gate(x)
        if self.way == "an expert":
            scores[:, 0] = -torch.inf
        if self.way == "rows":
            x.view(-1).mul_(2)
        p = scores.softmax(-1)
        w, ids = p.topk(2)
        if self.way == "a weight":
            w.unbind(-1)[1].mul_(0.5)
        if self.way == "features":
            x[:, :2] = 0
        return self.experts(x, torch.zeros_like(p).scatter(-1, ids, w))


def save_and_run(m, x):
    file = io.BytesIO()
    torch.export.save(torch.export.export(m, (x,)), file)
    file.seek(0)
    return torch.export.load(file).module()


@pytest.mark.sampled(2)
@pytest.mark.parametrize("tracer", [save_and_run, lambda m, x: make_fx(m)(x)], ids=["saved", "make_fx"])
@pytest.mark.parametrize("way", ["an expert", "rows", "a weight", "features"])
def test_writes_through_views_reach_the_result(way, tracer):
    m = Masked(way).double().requires_grad_(False)
    gm = tracer(m, torch.randn(9, D, dtype=torch.float64))
    out = moefx.rewrite_graph(gm, (torch.randn(9, D, dtype=torch.float64),))
    x = torch.randn(9, D, dtype=torch.float64)
    torch.testing.assert_close(out(x), m(x))


def test_explain_of_a_graph_names_rewrite_graph():
    """Recommend `moefx.rewrite_graph` for graphs of `torch.export` that reject other sizes."""
    x = torch.randn(9, D)
    explanation = moefx.explain(torch.export.export(Mixture(), (x,)).module(), example_inputs=(x,))
    (refusal,) = explanation.refused
    assert "does not run at other sizes" in refusal.reason and "moefx.rewrite_graph" in refusal.remedy


class Modes(Mixture):
    """Compute scores in float32 under any autocast and select without gradients, like DeepSeek-V3."""

    def forward(self, x):
        with torch.autocast("cpu", enabled=False):
            p = self.gate(x).sigmoid()
        with torch.no_grad():
            w, ids = p.topk(2)
        gates = torch.zeros_like(p).scatter(-1, ids, p.gather(-1, ids) + w)
        return self.experts(x, gates)


def test_modes_that_export_makes_graphs_of():
    m, x = Modes(), torch.randn(9, D, requires_grad=True)
    out = moefx.rewrite_graph(torch.export.export(m, (x,)).module(), (x,))
    assert moefx.blocks(out)
    for run in (m, out):
        run(x).square().sum().backward()
    torch.testing.assert_close(dict(out.named_parameters())["gate.weight"].grad, m.gate.weight.grad)
    with torch.no_grad():
        assert not out(x).requires_grad and not torch.is_grad_enabled()
