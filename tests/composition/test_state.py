"""Saving, loading, copying and converting compiled models."""

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
    build_pair,
    compile_model,
    compute_logits,
    compute_loss,
    draw_ids,
    find_experts,
    run_step,
)


def perturb(model: nn.Module, seed: int = 1) -> nn.Module:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(1 + 0.2 * torch.rand(p.shape, generator=generator, dtype=p.dtype))
    return model


def save_and_load(value, **options):
    buffer = io.BytesIO()
    torch.save(value, buffer)
    buffer.seek(0)
    return torch.load(buffer, **options)


COPIES = {
    "deepcopy": copy.deepcopy,
    "torch.save": lambda m: save_and_load(m, weights_only=False),
    "twice": lambda m: copy.deepcopy(save_and_load(m, weights_only=False)),
}


@pytest.mark.sampled(8)
@pytest.mark.parametrize("kind", ALL)
@pytest.mark.parametrize("how", COPIES)
def test_copies_of_a_model_run_rewritten_and_share_nothing(kind, how):
    original, compiled = build_pair(kind)
    twin = COPIES[how](compiled)
    assert type(twin) is type(original)
    assert not {id(p) for p in twin.parameters()} & {id(p) for p in compiled.parameters()}
    assert_same(run_step(twin, draw_ids()), run_step(original, draw_ids()), **NEAR)
    assert_rewritten(twin)
    before = compute_logits(compiled, draw_ids())
    perturb(twin)
    assert not torch.allclose(compute_logits(twin, draw_ids()), before)
    assert torch.equal(compute_logits(compiled, draw_ids()), before)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("kind", ALL)
def test_state_dicts_go_both_ways(kind):
    original, compiled = build_pair(kind)
    other = perturb(build(kind))
    compiled.load_state_dict(save_and_load(other.state_dict(), weights_only=True))
    assert_same(run_step(compiled, draw_ids()), run_step(other, draw_ids()), **NEAR)
    original.load_state_dict(save_and_load(compiled.state_dict(), weights_only=True))
    assert_same(run_step(original, draw_ids()), run_step(other, draw_ids()))
    assert_rewritten(compiled)


@pytest.mark.parametrize("kind", ALL)
def test_assigned_parameters_are_read(kind):
    """Read the parameters that `assign=True` puts into the modules."""
    _, compiled = build_pair(kind)
    run_step(compiled, draw_ids())
    other = perturb(build(kind))
    compiled.load_state_dict(other.state_dict(), assign=True)
    assert_same(run_step(compiled, draw_ids()), run_step(other, draw_ids()), **NEAR)
    assert_rewritten(compiled)


@pytest.mark.parametrize("kind", ALL)
def test_distributed_checkpoint_both_ways(kind, tmp_path):
    """Load the original into the compiled model and back, with the state of AdamW."""
    original, compiled = perturb(build(kind)), compile_model(build(kind))
    dcp.save({"model": get_model_state_dict(original)}, checkpoint_id=tmp_path / "a", no_dist=True)
    state = {"model": get_model_state_dict(compiled)}
    dcp.load(state, checkpoint_id=tmp_path / "a", no_dist=True)
    set_model_state_dict(compiled, state["model"])
    expected = run_step(original, draw_ids())
    assert_same(run_step(compiled, draw_ids()), expected, **NEAR)
    dcp.save({"model": get_model_state_dict(compiled)}, checkpoint_id=tmp_path / "b", no_dist=True)
    fresh = build(kind)
    state = {"model": get_model_state_dict(fresh)}
    dcp.load(state, checkpoint_id=tmp_path / "b", no_dist=True)
    set_model_state_dict(fresh, state["model"])
    assert_same(run_step(fresh, draw_ids()), expected)
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
            compute_loss(m, draw_ids(seed=number)).backward()
            optimizer.step()
    # AdamW divides by the root of squares: rounding shows for gradients close to zero
    for (name, a), b in zip(compiled.named_parameters(), original.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6, msg=lambda text, name=name: f"{name}: {text}")
    assert all(a is b for a, b in zip(compiled.parameters(), model.parameters(), strict=True))
    assert_rewritten(compiled)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("kind", ALL)
def test_to_another_dtype_and_back(kind):
    """Build a program per dtype without a fallback, compared with the original in float64."""
    original, compiled = build_pair(kind)
    truth = run_step(original, draw_ids())
    single = run_step(copy.deepcopy(original).float(), draw_ids())
    found = run_step(compiled.float(), draw_ids())
    for name, value in truth.items():
        scale = value.abs().max().clamp_min(1e-3)
        allowed = 2 * (single[name].double() - value).abs().max() + 1e-6 * scale
        assert found[name].dtype is torch.float32
        assert (found[name].double() - value).abs().max() <= allowed, name
    assert_same(run_step(compiled.double(), draw_ids()), run_step(original.float().double(), draw_ids()), **NEAR)
    assert_rewritten(compiled)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("kind", ALL)
def test_rounded_weights_are_as_exact_as_the_original(kind):
    original, compiled = build_pair(kind)
    rounded = copy.deepcopy(original).bfloat16()
    truth = compute_logits(copy.deepcopy(rounded).double(), draw_ids())
    original_error = (compute_logits(rounded, draw_ids()).double() - truth).abs().mean()
    found = compute_logits(compiled.bfloat16(), draw_ids())
    assert found.dtype is torch.bfloat16
    assert (found.double() - truth).abs().mean() <= 3 * original_error + 1e-4
    assert_rewritten(compiled)


@pytest.mark.parametrize("kind", ["loop", "stacked"])
def test_from_meta_through_to_empty(kind):
    """Compile without memory, then materialize and load."""
    original = build(kind)
    meta = copy.deepcopy(original).to("meta")
    compiled = moefx.compile(meta, example_inputs=(draw_ids().to("meta"),))
    assert all(p.is_meta for p in compiled.parameters())
    compiled.to_empty(device="cpu")
    compiled.load_state_dict(original.state_dict())
    assert_same(run_step(compiled, draw_ids()), run_step(original, draw_ids()))
    assert_rewritten(compiled)
    assert "meta device" in str(moefx.explain(compiled))


@pytest.mark.parametrize("kind", ["loop", "stacked"])
def test_a_model_compiled_on_meta_takes_assigned_weights(kind):
    original = build(kind)
    compiled = moefx.compile(copy.deepcopy(original).to("meta"), example_inputs=(draw_ids().to("meta"),))
    compiled.load_state_dict(copy.deepcopy(original.state_dict()), assign=True)
    assert_same(run_step(compiled, draw_ids()), run_step(original, draw_ids()))
    assert_rewritten(compiled)


@pytest.mark.parametrize("kind", ALL)
def test_functional_call_uses_its_parameters(kind):
    original, compiled = build_pair(kind)
    other = dict(perturb(build(kind)).named_parameters())
    out = torch.func.functional_call(compiled, other, kwargs={"input_ids": draw_ids(), "labels": draw_ids()})
    expected = torch.func.functional_call(original, other, kwargs={"input_ids": draw_ids(), "labels": draw_ids()})
    value, wanted = (o if isinstance(o, torch.Tensor) else o.loss for o in (out, expected))
    torch.testing.assert_close(value, wanted, **NEAR)
    name, parameter = next((n, p) for n, p in other.items() if p is not None and "experts" in n)
    (a,), (b,) = (torch.autograd.grad(v, parameter, retain_graph=True) for v in (value, wanted))
    torch.testing.assert_close(a, b, msg=lambda text: f"{name}: {text}", **NEAR)


def test_frozen_experts_train_as_in_the_original():
    original, compiled = build_pair("loop")
    for model in (original, compiled):
        find_experts(model).requires_grad_(False)
    assert_same(run_step(compiled, draw_ids()), run_step(original, draw_ids()))
    for p in compiled.parameters():
        p.requires_grad_(False)
    assert not compute_loss(compiled, draw_ids()).requires_grad
    assert_rewritten(compiled)


def test_an_update_between_forward_and_backward_raises():
    """Raise as in the original: autograd's version check must see the user's parameters."""
    for kind in ("loop", "stacked"):
        _, compiled = build_pair(kind)
        value = compute_loss(compiled, draw_ids())
        with torch.no_grad():
            next(p for n, p in compiled.named_parameters() if "experts" in n and "1." in n).add_(1.0)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            value.backward()


def test_tied_experts_of_two_layers():
    """Keep one block under two names."""
    original = build("loop")
    original.moes[1] = original.moes[0]
    compiled = compile_model(original)
    assert compiled.moes[0] is compiled.moes[1]
    expected, found = compute_loss(original, draw_ids()), compute_loss(compiled, draw_ids())
    torch.testing.assert_close(found, expected, **CLOSE)
