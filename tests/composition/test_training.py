"""Mixed precision, gradient checkpointing and trainers around a compiled model."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import moefx

from .models import (
    ALL,
    CLOSE,
    NEAR,
    PLAIN,
    D,
    Model,
    assert_rewritten,
    assert_same,
    build_pair,
    compute_loss,
    draw_ids,
    needs_transformers,
    run_step,
)


def compute_distances(found: dict[str, Tensor], truth: dict[str, Tensor]) -> dict[str, float]:
    """Return the mean distance of each value, relative to the largest entry."""
    return {
        name: float((found[name].double() - value).abs().mean() / value.abs().max().clamp_min(1e-3))
        for name, value in truth.items()
    }


def check_distances(original: nn.Module, compiled: nn.Module, run: Callable[[nn.Module], dict[str, Tensor]]) -> None:
    """Check that the compiled model's distance to float64 is at most three times the original's."""
    truth = run_step(copy.deepcopy(original).double(), draw_ids())
    original_distances, distances = compute_distances(run(original), truth), compute_distances(run(compiled), truth)
    for name, allowed in original_distances.items():
        assert distances[name] <= 3 * allowed + 1e-4, f"{name}: {distances[name]:.2g}, the original {allowed:.2g}"


@pytest.mark.sampled(3)
@pytest.mark.parametrize("kind", ALL)
def test_a_step_under_autocast_equals_the_original(kind):
    original, compiled = build_pair(kind, torch.float32)

    def run(model):
        model.zero_grad(set_to_none=True)
        with torch.autocast("cpu", torch.bfloat16):
            value = compute_loss(model, draw_ids())
        value.backward()
        grads = {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in model.named_parameters()}
        assert all(g.dtype is torch.float32 for g in grads.values())
        return {"loss": value.detach(), **grads}

    check_distances(original, compiled, run)
    assert_rewritten(compiled)


@pytest.mark.parametrize("kind", PLAIN)
def test_grad_scaler(kind):
    """Scale losses within float16, unscale gradients, and skip a step with an overflow."""
    original, compiled = build_pair(kind, torch.float32)

    def run(model):
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        with torch.autocast("cpu", torch.float16):
            value = compute_loss(model, draw_ids())
        scaler.scale(value).backward()
        scaler.unscale_(optimizer)
        result = {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in model.named_parameters()}
        scaler.step(optimizer)
        scaler.update()
        assert scaler.get_scale() == 2.0**10
        return {"loss": value.detach(), **result}

    check_distances(original, compiled, run)
    before = [p.detach().clone() for p in compiled.parameters()]
    scaler, optimizer = (
        torch.amp.GradScaler("cpu", init_scale=2.0**100),
        torch.optim.SGD(compiled.parameters(), lr=1.0),
    )
    optimizer.zero_grad()
    with torch.autocast("cpu", torch.float16):
        value = compute_loss(compiled, draw_ids())
    scaler.scale(value).backward()
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() < 2.0**100
    assert all(torch.equal(a, b) for a, b in zip(compiled.parameters(), before, strict=True))
    assert_rewritten(compiled)


# -- gradient checkpointing ------------------------------------------------------------------------


class Checkpointed(nn.Module):
    """Run each MoE layer of a `Model` under `torch.utils.checkpoint`."""

    def __init__(self, model: Model, **options) -> None:
        super().__init__()
        self.model, self.options = model, options

    def forward(self, input_ids, labels):
        model = self.model
        h = model.embed(input_ids)
        for norm, moe in zip(model.norms, model.moes, strict=True):
            layer = lambda x, norm=norm, moe=moe: x + moe(norm(x))  # noqa: E731
            h = checkpoint(layer, h, **self.options)
        return nn.functional.cross_entropy(model.head(h)[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


@pytest.mark.sampled(5)
@pytest.mark.parametrize("kind", PLAIN)
@pytest.mark.parametrize("keep", ["h", "x", "all"])
@pytest.mark.parametrize("use_reentrant", [True, False], ids=["reentrant", "hooks"])
def test_recomputed_blocks_run_rewritten(kind, keep, use_reentrant):
    original, compiled = build_pair(kind, plan=moefx.Plan(checkpoint=keep))
    wrapped = [Checkpointed(m, use_reentrant=use_reentrant) for m in (original, compiled)]
    assert_same(run_step(wrapped[1], draw_ids()), run_step(wrapped[0], draw_ids()))
    assert_rewritten(compiled)
    calls = [block.forward.counts.rewritten for block in moefx.blocks(compiled)]
    assert calls == [2, 2]  # forward and recomputation


@pytest.mark.parametrize("kind", PLAIN)
def test_checkpointing_under_autocast(kind):
    """Use the autocast program in the recomputation, which runs in the backward outside the region."""
    _, compiled = build_pair(kind, torch.float32)
    wrapped = Checkpointed(compiled, use_reentrant=False)
    with torch.autocast("cpu", torch.bfloat16):
        expected = torch.autograd.grad(
            compute_loss(compiled, draw_ids()), list(compiled.parameters()), allow_unused=True
        )
        value = compute_loss(wrapped, draw_ids())
    found = torch.autograd.grad(value, list(compiled.parameters()), allow_unused=True)
    for a, b in zip(found, expected, strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            torch.testing.assert_close(a, b, rtol=0, atol=0)
    assert_rewritten(compiled)


def test_selective_checkpointing_sees_the_experts():
    """Save the expert op, one node of the policy, instead of running it again."""
    _, compiled = build_pair("loop")
    seen = []

    def policy(context, op, *args, **kwargs):
        if op is torch.ops.moefx.expert_mlp.default:
            seen.append(context.is_recompute)
            return CheckpointPolicy.MUST_SAVE
        return CheckpointPolicy.PREFER_RECOMPUTE

    wrapped = Checkpointed(
        compiled, use_reentrant=False, context_fn=lambda: create_selective_checkpoint_contexts(policy)
    )
    assert_same(
        {k.removeprefix("model."): v for k, v in run_step(wrapped, draw_ids()).items()}, run_step(compiled, draw_ids())
    )
    assert seen.count(False) == 2


@needs_transformers
@pytest.mark.hf
@pytest.mark.parametrize("use_reentrant", [True, False], ids=["reentrant", "hooks"])
def test_gradient_checkpointing_of_transformers(use_reentrant):
    original, compiled = build_pair("qwen3")
    expected = run_step(original, draw_ids())
    for model in (original, compiled):
        model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
        model.enable_input_require_grads()
        model.train()
    assert_same(run_step(original, draw_ids()), expected, **NEAR)
    assert_same(run_step(compiled, draw_ids()), expected, **NEAR)
    assert_rewritten(compiled)
    assert all(block.forward.counts.rewritten == 2 for block in moefx.blocks(compiled))


# -- training loops of other libraries -------------------------------------------------------------


class Tokens(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return 16

    def __getitem__(self, number: int) -> dict[str, Tensor]:
        row = draw_ids(1, 8, seed=number)[0]
        return {"input_ids": row, "labels": row}


@needs_transformers
@pytest.mark.hf
@pytest.mark.parametrize("checkpointing", [False, True], ids=["plain", "checkpointing"])
def test_the_trainer_of_transformers(tmp_path, checkpointing):
    pytest.importorskip("accelerate")
    from transformers import Trainer, TrainingArguments

    original, compiled = build_pair("qwen3")
    results = []
    for name, model in (("original", original), ("compiled", compiled)):
        arguments = TrainingArguments(
            output_dir=str(tmp_path / name),
            max_steps=2,
            per_device_train_batch_size=4,
            logging_steps=1,
            save_strategy="steps",
            save_steps=2,
            report_to=[],
            use_cpu=True,
            disable_tqdm=True,
            learning_rate=1e-2,
            gradient_checkpointing=checkpointing,
            seed=0,
        )
        trainer = Trainer(model=model, args=arguments, train_dataset=Tokens())
        trainer.train()
        results.append([entry["loss"] for entry in trainer.state.log_history if "loss" in entry])
    assert len(results[0]) == 2 and results[0][0] != results[0][1]
    assert results[1] == pytest.approx(results[0], rel=1e-6)
    for (name, a), b in zip(compiled.named_parameters(), original.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5, msg=lambda text, name=name: f"{name}: {text}")
    assert_rewritten(compiled)
    saved = tmp_path / "compiled" / "checkpoint-2"
    again = type(original).from_pretrained(saved, dtype=torch.float64, experts_implementation="eager")
    assert_same(run_step(again, draw_ids()), run_step(compiled, draw_ids()), **NEAR)


@pytest.mark.parametrize("kind", PLAIN)
def test_gradient_accumulation_and_clipping(kind):
    original, compiled = build_pair(kind)
    for model in (original, compiled):
        for seed in range(3):
            compute_loss(model, draw_ids(seed=seed)).backward()
    norms = [torch.nn.utils.clip_grad_norm_(m.parameters(), 0.1) for m in (original, compiled)]
    torch.testing.assert_close(norms[1], norms[0], **CLOSE)
    for a, b in zip(compiled.parameters(), original.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, **CLOSE)


def test_anomaly_mode_and_retained_graphs():
    _, compiled = build_pair("loop")
    with torch.autograd.set_detect_anomaly(True):
        value = compute_loss(compiled, draw_ids())
        value.backward(retain_graph=True)
        first = [p.grad.clone() for p in compiled.parameters()]
        value.backward()
    for grad, p in zip(first, compiled.parameters(), strict=True):
        torch.testing.assert_close(p.grad, 2 * grad, **CLOSE)


def test_evaluation_between_steps():
    """Train, run in inference mode, and train again with three programs, and never the original code."""
    original, compiled = build_pair("stacked")
    for _ in range(2):
        assert_same(run_step(compiled.train(), draw_ids()), run_step(original, draw_ids()))
        with torch.inference_mode():
            torch.testing.assert_close(
                compute_loss(compiled.eval(), draw_ids()), compute_loss(original, draw_ids()), **CLOSE
            )
    assert_rewritten(compiled)


def test_a_block_alone_and_hidden_states_that_need_no_gradient():
    original, compiled = build_pair("loop")
    x = torch.randn(3, 5, D, dtype=torch.float64)
    torch.testing.assert_close(compiled.moes[0](x), original.moes[0](x), **CLOSE)
    compiled.moes[0](x).sum().backward()
    original.moes[0](x).sum().backward()
    for a, b in zip(compiled.moes[0].parameters(), original.moes[0].parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, **CLOSE)
