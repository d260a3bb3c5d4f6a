"""Saving, loading, copying and converting a compiled model."""

from __future__ import annotations

import copy
import io

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict

import moefx

from .models import (
    ALL,
    CLOSE,
    NEAR,
    assert_rewritten,
    assert_same,
    build,
    compiled_of,
    experts_of,
    ids,
    logits,
    loss,
    pair,
    step,
)


def perturb(model: nn.Module, seed: int = 1) -> nn.Module:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(1 + 0.2 * torch.rand(p.shape, generator=generator, dtype=p.dtype))
    return model


def through_a_file(value, **options):
    buffer = io.BytesIO()
    torch.save(value, buffer)
    buffer.seek(0)
    return torch.load(buffer, **options)


COPIES = {
    "deepcopy": copy.deepcopy,
    "torch.save": lambda m: through_a_file(m, weights_only=False),
    "twice": lambda m: copy.deepcopy(through_a_file(m, weights_only=False)),
}


@pytest.mark.sampled(8)
@pytest.mark.parametrize("kind", ALL)
@pytest.mark.parametrize("how", COPIES)
def test_copies_of_a_model_run_rewritten_and_share_nothing(kind, how):
    original, compiled = pair(kind)
    twin = COPIES[how](compiled)
    assert type(twin) is type(original)
    assert not {id(p) for p in twin.parameters()} & {id(p) for p in compiled.parameters()}
    assert_same(step(twin, ids()), step(original, ids()), **NEAR)
    assert_rewritten(twin)
    before = logits(compiled, ids())
    perturb(twin)
    assert not torch.allclose(logits(twin, ids()), before)
    assert torch.equal(logits(compiled, ids()), before)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("kind", ALL)
def test_state_dicts_go_both_ways(kind):
    original, compiled = pair(kind)
    other = perturb(build(kind))
    compiled.load_state_dict(through_a_file(other.state_dict(), weights_only=True))
    assert_same(step(compiled, ids()), step(other, ids()), **NEAR)
    original.load_state_dict(through_a_file(compiled.state_dict(), weights_only=True))
    assert_same(step(original, ids()), step(other, ids()))
    assert_rewritten(compiled)


@pytest.mark.parametrize("kind", ALL)
def test_assign(kind):
    """`assign=True` puts other parameters into the modules; the blocks read those."""
    _, compiled = pair(kind)
    step(compiled, ids())
    other = perturb(build(kind))
    compiled.load_state_dict(other.state_dict(), assign=True)
    assert_same(step(compiled, ids()), step(other, ids()), **NEAR)
    assert_rewritten(compiled)


@pytest.mark.parametrize("kind", ALL)
def test_distributed_checkpoint_both_ways(kind, tmp_path):
    """From the original into the compiled model and back, with the state of AdamW."""
    original, compiled = perturb(build(kind)), compiled_of(build(kind))
    dcp.save({"model": get_model_state_dict(original)}, checkpoint_id=tmp_path / "a", no_dist=True)
    state = {"model": get_model_state_dict(compiled)}
    dcp.load(state, checkpoint_id=tmp_path / "a", no_dist=True)
    set_model_state_dict(compiled, state["model"])
    expected = step(original, ids())
    assert_same(step(compiled, ids()), expected, **NEAR)
    dcp.save({"model": get_model_state_dict(compiled)}, checkpoint_id=tmp_path / "b", no_dist=True)
    fresh = build(kind)
    state = {"model": get_model_state_dict(fresh)}
    dcp.load(state, checkpoint_id=tmp_path / "b", no_dist=True)
    set_model_state_dict(fresh, state["model"])
    assert_same(step(fresh, ids()), expected)
    assert_rewritten(compiled)


@pytest.mark.parametrize("kind", ALL)
def test_an_optimizer_made_before_compile_trains(kind):
    original = build(kind)
    model = copy.deepcopy(original)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (original, model)]
    compiled = moefx.compile(model)
    for number in range(3):
        for m, optimizer in zip((original, compiled), optimizers, strict=True):
            optimizer.zero_grad()
            loss(m, ids(seed=number)).backward()
            optimizer.step()
    # AdamW divides by the root of squares: rounding shows where a gradient is close to zero
    for (name, a), b in zip(compiled.named_parameters(), original.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6, msg=lambda text, name=name: f"{name}: {text}")
    assert all(a is b for a, b in zip(compiled.parameters(), model.parameters(), strict=True))
    assert_rewritten(compiled)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("kind", ALL)
def test_to_another_dtype_and_back(kind):
    """A new specialization per dtype, not a fallback; measured against the original in float64."""
    original, compiled = pair(kind)
    truth = step(original, ids())
    single = step(copy.deepcopy(original).float(), ids())
    found = step(compiled.float(), ids())
    for name, value in truth.items():
        scale = value.abs().max().clamp_min(1e-3)
        allowed = 2 * (single[name].double() - value).abs().max() + 1e-6 * scale
        assert found[name].dtype is torch.float32
        assert (found[name].double() - value).abs().max() <= allowed, name
    assert_same(step(compiled.double(), ids()), step(original.float().double(), ids()), **NEAR)
    assert_rewritten(compiled)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("kind", ALL)
def test_rounded_weights_are_as_exact_as_in_the_original(kind):
    original, compiled = pair(kind)
    rounded = copy.deepcopy(original).bfloat16()
    truth = logits(copy.deepcopy(rounded).double(), ids())
    theirs = (logits(rounded, ids()).double() - truth).abs().mean()
    found = logits(compiled.bfloat16(), ids())
    assert found.dtype is torch.bfloat16
    assert (found.double() - truth).abs().mean() <= 3 * theirs + 1e-4
    assert_rewritten(compiled)


@pytest.mark.parametrize("kind", ["loop", "stacked"])
def test_from_meta_through_to_empty(kind):
    """Compiled without memory, then materialised and loaded."""
    original = build(kind)
    meta = copy.deepcopy(original).to("meta")
    compiled = moefx.compile(meta, example_inputs=(ids().to("meta"),))
    assert all(p.is_meta for p in compiled.parameters())
    compiled.to_empty(device="cpu")
    compiled.load_state_dict(original.state_dict())
    assert_same(step(compiled, ids()), step(original, ids()))
    assert_rewritten(compiled)
    assert "meta device" in str(moefx.explain(compiled))


@pytest.mark.parametrize("kind", ["loop", "stacked"])
def test_a_model_compiled_on_meta_takes_assigned_weights(kind):
    original = build(kind)
    compiled = moefx.compile(copy.deepcopy(original).to("meta"), example_inputs=(ids().to("meta"),))
    compiled.load_state_dict(copy.deepcopy(original.state_dict()), assign=True)
    assert_same(step(compiled, ids()), step(original, ids()))
    assert_rewritten(compiled)


@pytest.mark.parametrize("kind", ALL)
def test_functional_call_uses_the_given_parameters(kind):
    original, compiled = pair(kind)
    other = dict(perturb(build(kind)).named_parameters())
    out = torch.func.functional_call(compiled, other, kwargs={"input_ids": ids(), "labels": ids()})
    expected = torch.func.functional_call(original, other, kwargs={"input_ids": ids(), "labels": ids()})
    value, wanted = (o if isinstance(o, torch.Tensor) else o.loss for o in (out, expected))
    torch.testing.assert_close(value, wanted, **NEAR)
    name, parameter = next((n, p) for n, p in other.items() if p is not None and "experts" in n)
    (a,), (b,) = (torch.autograd.grad(v, parameter, retain_graph=True) for v in (value, wanted))
    torch.testing.assert_close(a, b, msg=lambda text: f"{name}: {text}", **NEAR)


def test_frozen_experts_train_as_in_the_original():
    original, compiled = pair("loop")
    for model in (original, compiled):
        experts_of(model).requires_grad_(False)
    assert_same(step(compiled, ids()), step(original, ids()))
    for p in compiled.parameters():
        p.requires_grad_(False)
    assert not loss(compiled, ids()).requires_grad
    assert_rewritten(compiled)


def test_an_update_between_forward_and_backward_raises():
    """As in the original: autograd's version check must see the user's own parameters."""
    for kind in ("loop", "stacked"):
        _, compiled = pair(kind)
        value = loss(compiled, ids())
        with torch.no_grad():
            next(p for n, p in compiled.named_parameters() if "experts" in n and "1." in n).add_(1.0)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            value.backward()


def test_tied_experts_of_two_layers():
    """One block under two names stays one."""
    original = build("loop")
    original.moes[1] = original.moes[0]
    compiled = compiled_of(original)
    assert compiled.moes[0] is compiled.moes[1]
    expected, found = loss(original, ids()), loss(compiled, ids())
    torch.testing.assert_close(found, expected, **CLOSE)
