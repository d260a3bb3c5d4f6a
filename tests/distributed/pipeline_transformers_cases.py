"""`moefx.pipeline` on models of transformers."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import moefx
from moefx.errors import InvalidInput

from .models import VOCAB, build_causal_model
from .parallelize_cases import check_raises, make_mesh
from .pipeline_training_cases import DELAYED

PLAN = moefx.Plan(validation="symbolic")
LENGTH = 5


def loss_fn(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


def build(model: nn.Module, **options: Any) -> Any:
    return moefx.pipeline(model, make_mesh(pp=2, ep=2), plan=PLAN, loss_fn=loss_fn, microbatches=2, **options)


def check_gradients(pipe: Any, model: Any, **kwargs: Any) -> None:
    """Compare a step with the mean loss of all micro-batches in one process.

    Args:
        kwargs: further inputs; tensors are [data ranks, batch, ...].
    """
    ids = torch.randint(VOCAB, (2, 4, LENGTH), generator=torch.Generator().manual_seed(0))
    number, losses = make_mesh(pp=2, ep=2)["ep"].get_local_rank(), []
    for rank, part in ((rank, slice(first, first + 2)) for rank in range(2) for first in (0, 2)):
        inputs = {name: v[rank, part] if isinstance(v, Tensor) else v for name, v in kwargs.items()}
        losses.append(loss_fn(model(ids[rank, part], **inputs).logits, ids[rank, part]))
    wanted = torch.stack(losses).mean()
    for module in (model, pipe):
        module.zero_grad()
    wanted.backward()
    inputs = {name: value[number] if isinstance(value, Tensor) else value for name, value in kwargs.items()}
    loss = pipe.step(input_ids=ids[number], target=ids[number], **inputs)
    torch.testing.assert_close(loss, wanted.detach(), rtol=0, atol=1e-9)
    assert len(list(pipe.parameters())) > 8
    for name, parameter in pipe.named_parameters():
        gradient = model.get_parameter(name).grad
        gradient = torch.zeros_like(parameter.full_tensor()) if gradient is None else gradient
        torch.testing.assert_close(parameter.grad.full_tensor(), gradient, rtol=0, atol=1e-9)


def case_gradients_of_a_causal_model() -> None:
    """Pass padded sequences, and positions of packed ones."""
    padded = torch.ones(2, 4, LENGTH, dtype=torch.long)
    padded[:, 1, :2] = 0
    positions = torch.tensor([0, 1, 2, 0, 1]).expand(2, 4, LENGTH)
    model, pipe = build_causal_model(), build(build_causal_model())
    for kwargs in ({}, {"attention_mask": padded}, {"position_ids": positions, "use_cache": False}):
        check_gradients(pipe, model, **kwargs)


def case_activation_checkpointing() -> None:
    """Enable checkpointing by the model's method, with a schedule that delays gradients of weights."""
    checkpointed, calls = build_causal_model(layers=4), []
    getattr(checkpointed, "activation_checkpointing_enable", checkpointed.gradient_checkpointing_enable)()
    for schedule in ("1f1b", *DELAYED[1:2]):
        pipe = build(checkpointed, schedule=schedule)
        for stage in pipe.stages.values():
            for module in stage.modules():
                if type(module).__name__ == "Qwen3MoeAttention":
                    module.register_forward_hook(lambda *_: calls.append(1))
        check_gradients(pipe, build_causal_model(layers=4), use_cache=False)
        assert len(calls) >= 2 * 2 * 2  # layers, micro-batches, and again in the backward
        calls.clear()


def case_losses_over_several_layers() -> None:
    """Refuse a loss over the router logits of all layers: a stage only has the logits of its layers."""
    text = "asks for a loss of the router logits of all layers"
    check_raises(InvalidInput, text, build, build_causal_model(output_router_logits=True))
    pipe, ids = build(build_causal_model()), torch.zeros(2, LENGTH, dtype=torch.long)
    check_raises(InvalidInput, text, pipe.step, ids, target=ids, output_router_logits=True)
    check_raises(InvalidInput, "the model's output has 'loss'", pipe.step, ids, target=ids, labels=ids)
    model = build_causal_model()
    text = "loss_fn uses Qwen3MoeForCausalLM of the model"
    loss = lambda logits, labels: model.loss_function(logits, labels, VOCAB)  # noqa: E731
    check_raises(InvalidInput, text, moefx.pipeline, model, make_mesh(pp=2, ep=2), loss_fn=loss, microbatches=2)


def case_tied_embeddings() -> None:
    text = "model.embed_tokens.weight and lm_head.weight are the same parameter, in stages 0 and 1"
    check_raises(InvalidInput, text, build, build_causal_model(tie_word_embeddings=True))
