"""Effects of a graph: transforms of torch.func, state of modules, calls without results."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn
from torch.func import functional_call, grad, jvp, vjp, vmap

import moefx
from moefx.frontends.dynamo.backend import backend

from .dense_mixture import D, Dense


def compute_energy(x):
    return (x**2).sum().sin()


def list_weights(m):
    return dict(m.named_parameters())


def run_step(m, x):
    slopes = grad(lambda p: functional_call(m, p, (x,)).pow(2).sum())(list_weights(m))
    return functional_call(m, {name: p - 0.1 * slopes[name] for name, p in list_weights(m).items()}, (x,))


# Per transform: the function, and the number of mixtures outside all transforms.
TRANSFORMS = {
    "grad": (lambda m, x: grad(lambda z: m(z).pow(2).sum())(x), 0),
    "vjp": (lambda m, x: vjp(m, x)[1](torch.ones_like(x))[0], 0),
    "jvp": (lambda m, x: jvp(m, (x,), (torch.ones_like(x),))[1], 0),
    "vmap": (lambda m, x: vmap(lambda row: m(row[None])[0])(x), 0),
    "grad of weights": (
        lambda m, x: grad(lambda p: functional_call(m, p, (x,)).pow(2).sum())(list_weights(m))["up"],
        0,
    ),
    "weights of a step": (run_step, 0),
    "beside": (lambda m, x: x - 0.1 * grad(lambda z: m(z).pow(2).sum())(x) + m(x), 1),
    "behind": (lambda m, x: m(x - 0.1 * grad(compute_energy)(x)), 1),
    "before": (lambda m, x: grad(compute_energy)(m(x)) + m(x.sin()), 2),
}


@pytest.mark.sampled(5)
@pytest.mark.parametrize("rest", ["eager", "aot_eager"])
@pytest.mark.parametrize("name", TRANSFORMS)
def test_mixtures_inside_a_transform_stay(name, rest):
    """Keep mixtures inside a transform and the transform itself unchanged."""
    torch.manual_seed(0)
    fn, outside = TRANSFORMS[name]
    m, x = Dense().double(), torch.randn(9, D, dtype=torch.float64)
    want = fn(m, x)
    compiled = torch.compile(lambda x: fn(m, x), backend=backend, options={"backend": rest})
    torch.testing.assert_close(compiled(x), want)
    blocks = moefx.blocks(compiled)
    assert len(blocks) == outside and not any(block.fallbacks for block in blocks)
    assert want.abs().max() > 0


def test_forward_mode_derivatives_are_refused(caplog):
    m = Dense()
    torch.compile(lambda x: jvp(m, (x,), (x,))[1], backend=backend, options={"backend": "eager"})(torch.randn(9, D))
    assert "is inside torch.func.jvp, which is not supported in graphs" in caplog.text
    assert "moefx.compile(model) supports it if one module contains all of it" in caplog.text


class Keeps(Dense):
    """Compute an unused result with a module that updates its state."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(D)

    def forward(self, x):
        self.unused(x)
        p = self.gate(x).softmax(-1)
        w, ids = p.topk(2)
        return self.experts(x, torch.zeros_like(p).scatter(-1, ids, w))

    def unused(self, x):
        self.norm(x)


class KeepsByFunction(Keeps):
    def unused(self, x):
        F.batch_norm(x, self.norm.running_mean, self.norm.running_var, training=True)


class NoLeaves(fx.Tracer):
    def is_leaf_module(self, m, qualname):
        return isinstance(m, nn.BatchNorm1d)


@pytest.mark.parametrize("make", [Keeps, KeepsByFunction])
def test_stateful_modules_are_called(make):
    for how in ("dynamo", "fx"):
        torch.manual_seed(0)
        m, x = make(), torch.randn(9, D)
        if how == "dynamo":
            run = torch.compile(m, backend=backend, options={"backend": "eager"})
        else:
            run = moefx.rewrite_graph(fx.GraphModule(m, NoLeaves().trace(m)), (x,))
        run(x)
        assert moefx.blocks(run)
        torch.testing.assert_close(m.norm.running_mean, 0.1 * x.mean(0))


class Counts(Keeps):
    """Module with unused parameters and buffers, and a counter that tracers do not record."""

    def __init__(self):
        super().__init__()
        self.spare, self.calls = nn.Parameter(torch.ones(3)), 0
        self.register_buffer("seen", torch.zeros(()))
        self.register_buffer("unseen", torch.zeros(()))

    def unused(self, x):
        self.seen += 1.0


def test_unused_results_are_not_needed():
    m, x = Counts(), torch.randn(9, D)
    exported = moefx.rewrite_graph(torch.export.export(m, (x,)).module(), (x,))
    moefx.verify(exported, m, (x,)).raise_if_failed()
    traced = fx.GraphModule(m, NoLeaves().trace(m))
    traced.graph.eliminate_dead_code()
    report = moefx.verify(moefx.rewrite_graph(traced, (x,)), m, (x,))
    assert {(row.kind, row.name, row.note) for row in report.failed} == {("buffer", "seen", "only in the original")}
