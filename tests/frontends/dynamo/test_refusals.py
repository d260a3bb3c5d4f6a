"""Messages for regions that are not rewritten."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import nn

import moefx
from moefx.frontends.dynamo.backend import backend
from moefx.inspection.proof_trace import LiftStep

from .dense_mixture import D, Dense, E


class Clamp(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.clamp(min=0)

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return grad * (x > 0)


class Mixture(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(D, E, bias=False)
        self.w = nn.Parameter(torch.randn(E, D, D))

    def forward(self, x):
        w, ids = self.gate(x).softmax(-1).topk(2)
        out = torch.zeros_like(x)
        for e in range(E):
            out = out + Clamp.apply(x @ self.w[e]) * (w * (ids == e)).sum(-1, keepdim=True)
        return out


class Given(Mixture):
    """Select experts by ids of the tokens that the caller passes."""

    def forward(self, x, ids):
        out = torch.zeros_like(x)
        for e in range(E):
            h = x @ self.w[e]
            out = out + ((h * (h > 0)) @ self.w[e]) * (ids == e).to(x.dtype)[..., None]
        return out


class HiddenChecked(Dense):
    def hidden(self, h):
        torch._assert_async(torch.isfinite(h).all(), "not finite")
        return h


class HiddenReturned(Dense):
    def hidden(self, h):
        self.size = h.square().mean()
        return h

    def forward(self, x):
        return super().forward(x), self.size


class WeightsChecked(Dense):
    """Check the weights, counts and sizes."""

    def __init__(self):
        super().__init__()
        self.register_buffer("limit", torch.tensor(2.0))

    def routed(self, x):
        w, ids = super().routed(x)
        torch._check(ids.shape[0] == x.shape[0])
        torch._assert_async((w < self.limit).all(), "too large")
        torch._assert_async(nn.functional.one_hot(ids, E).sum() == 2 * x.shape[0])
        return w, ids


def read_refusals(module, *args):
    call = torch.compile(module, backend=backend, options={"backend": "eager", "validation": "symbolic"})
    torch.testing.assert_close(call(*args), module(*args))
    return moefx.explain(call).refused


def test_a_custom_autograd_function_is_named():
    (refusal,) = read_refusals(Mixture(), torch.randn(3, 9, D))
    assert "calls the torch.autograd.Function Clamp" in refusal.reason
    assert refusal.source.startswith("test_refusals.py:")


def test_experts_among_the_inputs_are_refused():
    """Do not treat comparisons inside the experts as a selection."""
    (refusal,) = read_refusals(Given(), torch.randn(3, 9, D), torch.randint(0, E, (3, 9)))
    assert refusal.reason.startswith("the graph does not select experts here, and receives ids: ")
    assert "moefx.compile(model) supports them" in refusal.remedy


class Centered(Dense):
    """Mix all tokens in the experts."""

    def hidden(self, h):
        return h - h.mean(0)


def iterate_leaves(value):
    """Return the values in tuples and dataclasses."""
    if dataclasses.is_dataclass(value):
        value = tuple(vars(value).values())
    return [leaf for item in value for leaf in iterate_leaves(item)] if isinstance(value, tuple) else [value]


def test_a_refusal_keeps_the_words_of_its_trace_alone():
    """A refusal must not keep captures, which need hundreds of megabytes."""
    (refusal,) = read_refusals(Centered(), torch.randn(24, D))
    assert refusal.trace.cuts
    assert {type(leaf) for leaf in iterate_leaves(refusal.trace)} <= {str, int, float, bool, LiftStep}


class Layers(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Given() for _ in range(3))

    def forward(self, x, ids):
        for layer in self.layers:
            x = x + layer(x, ids)
        return x


def test_a_reason_is_logged_once(caplog):
    module, args = Layers(), (torch.randn(3, 9, D), torch.randint(0, E, (3, 9)))
    call = torch.compile(module, backend=backend, options={"backend": "eager", "validation": "symbolic"})
    call(*args)
    report = moefx.explain(call)
    assert len(report.refused) == 3 and str(report).count("does not select experts") == 1
    assert "refused: layers.0 ... layers.2 (3 blocks)   test_refusals.py:" in str(report)
    (text,) = {r.getMessage() for r in caplog.records if "left a region" in r.getMessage()}
    assert "layers.0 ... layers.2 (3 blocks)" in text


@pytest.mark.parametrize(("kind", "op"), [(HiddenChecked, "isfinite"), (HiddenReturned, "square")])
def test_use_of_expert_results_outside_is_refused(kind, op):
    (refusal,) = read_refusals(kind(), torch.randn(20, D))
    assert f"h, which the experts compute, is used outside the mixture, by {op}" in refusal.reason
    assert (
        refusal.source.startswith("test_refusals.py:") and "the inputs or the outputs of the mixture" in refusal.remedy
    )


def test_checks_of_weights_still_raise():
    module, x = WeightsChecked(), torch.randn(20, D)
    call = torch.compile(module, backend=backend, options={"backend": "aot_eager", "validation": "symbolic"})
    torch.testing.assert_close(call(x), module(x))
    assert moefx.blocks(call) and not moefx.explain(call).refused
    module.limit.zero_()
    with pytest.raises(RuntimeError, match="too large"):
        call(x)


def _slices(t):
    return [t[i : i + 16] for i in range(0, len(t), 16)]


@pytest.mark.parametrize("cut", [lambda t: t.split(16), _slices])
def test_rows_that_are_cut_into_parts(cut):
    """Refuse a loop over chunks, which the graph contains unrolled for its size."""
    (refusal,) = read_refusals(Dense(cut), torch.randn(40, D))
    assert refusal.reason.startswith("the rows are split into 3 chunks") and "loops over chunks" in refusal.remedy
    assert refusal.source.startswith("test_refusals.py:")


class InParts(Dense):
    def forward(self, x):
        return torch.cat([super(InParts, self).forward(part) for part in x.split(16)])


def test_each_part_is_a_region():
    """Rewrite each part as a region if it selects for itself; refuse a module that selects for all parts."""
    module, x = InParts(), torch.randn(40, D)
    call = torch.compile(module, backend=backend, options={"backend": "eager", "validation": "symbolic"})
    torch.testing.assert_close(call(x), module(x))
    (block,) = moefx.explain(call).matched
    assert (
        block.names == tuple(b.name for b in moefx.blocks(call)) == (block.name, f"{block.name}_2", f"{block.name}_3")
    )
    (refusal,) = moefx.explain(module, example_inputs=(x,)).refused
    assert refusal.reason.startswith("the tokens are split into 3 chunks with a separate selection each")
    assert refusal.culprits == ("topk",) and "backend='moefx'" in refusal.remedy


class Shared(Dense):
    """Two mixtures with one selection."""

    def __init__(self, ways):
        super().__init__()
        self.second, self.ways = Dense(), ways

    def forward(self, x):
        w, ids = self.routed(x)
        gates = torch.zeros_like(x[:, :E]).scatter(-1, ids, w)
        return self.ways(lambda z: self.experts(z, gates), lambda z: self.second.experts(z, gates), x)


@pytest.mark.parametrize("ways", [lambda f, g, x: f(x) + g(x), lambda f, g, x: g(f(x))], ids=["beside", "behind"])
def test_a_choice_that_is_used_twice(ways):
    call = torch.compile(Shared(ways), backend=backend, options={"backend": "eager"})
    for tokens in (9, 7, 1):
        call(torch.randn(tokens, D))
    (refusal,) = moefx.explain(call).refused  # not repeated for the graph of one token
    assert refusal.reason.startswith("2 mixtures of different experts share one selection")
    assert "concatenate the hidden units" in refusal.remedy
