"""Models with modules that do not run on abstract tensors, around blocks that do."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import moefx
from moefx.errors import CaptureError

from ..blocks import D, Loop


class PackedWeight(nn.Parameter):
    """Integer parameter with a scale as a Python attribute."""

    def __new__(cls, weight):
        packed = super().__new__(cls, weight.mul(100).round().to(torch.int8), requires_grad=False)
        packed.scale = 0.01
        return packed

    def __deepcopy__(self, memo):
        return self


class Packed(nn.Module):
    """Quantized linear layer. The abstract weight lacks the attribute `scale`."""

    def __init__(self, width=D):
        super().__init__()
        self.weight = PackedWeight(torch.randn(width, D))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x):
        self.calls += 1
        return x @ (self.weight.double() * self.weight.scale).to(x.dtype).T


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.out = Packed(3 * D), Packed()

    def forward(self, x):
        q, k, v = self.qkv(x).chunk(3, -1)
        return x + self.out(nn.functional.scaled_dot_product_attention(q, k, v)), q


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention, self.moe = Attention(), Loop()

    def forward(self, x):
        x, _ = self.attention(x)
        return x + self.moe(x.flatten(0, 1)).view_as(x)


def test_packed_layers_outside_of_the_block():
    torch.manual_seed(0)
    model, x = nn.Sequential(Layer(), Layer()).double(), torch.randn(2, 7, D, dtype=torch.float64)
    state = torch.get_rng_state()
    compiled = moefx.compile(model, example_inputs=(x,))
    assert torch.equal(torch.get_rng_state(), state)
    assert not any(m.calls for m in model.modules() if isinstance(m, Packed))
    assert [b.name for b in moefx.blocks(compiled)] == ["0.moe", "1.moe"]
    for batch in (1, 3):
        x = torch.randn(batch, 9, D, dtype=torch.float64)
        weights = [p for p in model.parameters() if p.requires_grad]
        actual, expected = ([out := m(x), *torch.autograd.grad(out.sum(), weights)] for m in (compiled, model))
        torch.testing.assert_close(actual, expected)


def test_packed_experts_are_refused():
    explanation = moefx.explain(nn.Sequential(Loop(lambda: Packed())), example_inputs=(torch.randn(9, D),))
    assert not explanation.matched and "does not run on abstract tensors" in explanation.refused[0].reason


def make_jagged(x):
    rows = torch.nested.as_nested_tensor([x[:3], x[3:]], layout=torch.jagged)
    return x + rows.values().sum()


def convert_in_numpy(x):
    return x + torch.from_numpy(x.detach().numpy())


class Around(nn.Module):
    """Prepare the input with code that captures cannot follow, in the model's own forward."""

    def __init__(self, prepare):
        super().__init__()
        self.prepare, self.moe = prepare, Loop()

    def forward(self, x):
        return self.moe(self.prepare(x))


@pytest.mark.parametrize(("prepare", "why"), [(make_jagged, "a torch.jagged tensor"), (convert_in_numpy, "numpy")])
def test_a_model_that_runs_is_not_blamed(prepare, why):
    model, x = Around(prepare), torch.randn(9, D)
    assert moefx.compile(model, example_inputs=(x,), strict=False) is model
    refusal = moefx.explain(model).refused[0]
    assert "runs, but not on abstract tensors" in refusal.reason and why in refusal.reason
    assert "test_unsupported_modules.py:" in refusal.source
    with pytest.raises(moefx.NoMoEBlockFound, match="runs, but not on abstract"):
        moefx.compile(model, example_inputs=(x,))
    wanted = model(x)
    model.moe = moefx.compile(model.moe, example_inputs=(x,))  # as the refusal advises
    torch.testing.assert_close(model(x), wanted)


def test_a_bug_of_moefx_does_not_blame_the_inputs(monkeypatch):
    def broken(*_):
        raise AttributeError("no such thing")

    monkeypatch.setattr("moefx.capture.concolic.collect_effects", broken)
    model = nn.Sequential(Loop())
    assert moefx.compile(model, example_inputs=(torch.randn(9, D),), strict=False) is model
    assert "no such thing" in moefx.explain(model).refused[0].reason


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_inputs_that_do_not_fit_are_blamed(device):
    with pytest.raises(CaptureError, match="does not run on the example inputs"):
        moefx.compile(nn.Sequential(Loop()).to(device), example_inputs=(torch.randn(9, D + 1),), strict=False)


class Sparse(Loop):
    def mixed(self, x, w, ids):
        out = torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            t, k = torch.where(ids == e)
            places = torch.stack([t, torch.arange(len(t))])
            out = out + torch.sparse.mm(torch.sparse_coo_tensor(places, w[t, k], (len(x), len(t))), expert(x[t]))
        return out


def test_sparse_tensors_are_named():
    with pytest.raises(moefx.NoMoEBlockFound, match=r"a torch.sparse_coo tensor; .*test_unsupported_modules.py"):
        moefx.compile(nn.Sequential(Sparse()), example_inputs=(torch.randn(9, D),))


class Uncopyable:
    def __deepcopy__(self, memo):
        raise TypeError("not me")


def test_a_model_that_cannot_be_copied_is_returned_unchanged():
    model = nn.Sequential(Loop())
    model.handle = Uncopyable()
    assert moefx.compile(model, example_inputs=(torch.randn(9, D),), strict=False) is model
    assert "cannot be copied" in moefx.explain(model).refused[0].reason


class ThroughNumpy(Loop):
    """Send the rows of each expert through NumPy, which needs real memory."""

    def mixed(self, x, w, ids):
        out = torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            t, k = torch.where(ids == e)
            rows = torch.from_numpy(x[t].detach().cpu().numpy()).to(x.device)
            out[t] += expert(rows) * w[t, k, None]
        return out


@pytest.mark.parametrize(
    "device",
    [
        "cpu",
        pytest.param(
            "cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
        ),
    ],
)
def test_a_failed_capture_leaves_the_model_on_its_device(device):
    torch.manual_seed(0)
    model, x = nn.Sequential(ThroughNumpy()).to(device), torch.randn(9, D, device=device)
    wanted = model(x)
    compiled = moefx.compile(model, example_inputs=(x,), strict=False)
    (refused,) = moefx.explain(model, example_inputs=(x,)).refused
    assert refused.reason and refused.source.startswith("test_unsupported_modules.py:")
    assert not moefx.blocks(compiled) and {t.device.type for t in model.state_dict().values()} == {device}
    assert torch.equal(compiled(x), wanted)
    compiled(x).sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
    assert len(moefx.blocks(moefx.compile(nn.Sequential(Loop()).to(device), example_inputs=(x,)))) == 1
