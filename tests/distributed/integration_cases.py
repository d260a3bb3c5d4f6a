"""transformers' `Trainer` and accelerate train spread models as one process trains the original, or refuse them."""

from __future__ import annotations

import contextlib
import errno
import functools
import os
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
from accelerate import Accelerator, DistributedType
from accelerate.utils import DataLoaderConfiguration
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.checkpoint import CheckpointException
from torch.utils.data import DataLoader, Dataset, SequentialSampler
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

import moefx
from moefx.errors import InvalidCheckpoint, InvalidInput, MoefxError
from moefx.integrations.sharded_state import load_model, save_model
from moefx.integrations.spread_training import check_trainable

from . import parallelize_cases
from .models import VOCAB, build_causal_model
from .parallelize_cases import PLAN, check_raises, compute_loss, draw_batch, make_mesh, parallelize_model
from .pipeline_transformers_cases import build as build_pipeline
from .state_cases import check_equal, create_shared_folder

RANKS, PARTS, BATCH, LENGTH, STEPS = 4, 2, 2, 7, 4
RATE, MAX_NORM = 0.02, 0.05
os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1", "LOCAL_RANK": os.environ["RANK"]}  # for accelerate
LAYOUTS: tuple[tuple[dict[str, int], dict[str, Any] | None], ...] = (
    (dict(ep=4), None),  # the integration parallelizes
    (dict(dp=2, ep=2), {}),
    (dict(dp=2, ep=2), dict(data="ddp")),
)


class Rows(Dataset):
    """Rows with different numbers of labels, so that ranks have different numbers of tokens."""

    def __init__(self, size: int = RANKS * PARTS * BATCH * STEPS):
        self.size = size

    def __len__(self):
        return self.size

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        ids = torch.randint(VOCAB, (LENGTH,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": ids, "labels": torch.where(torch.arange(LENGTH) < index % LENGTH, -100, ids)}


class InOrder:
    """Methods of a Trainer that reads rows in order, as `train_in_one_process` does."""

    def _get_train_sampler(self, *args: Any) -> SequentialSampler:
        return SequentialSampler(self.train_dataset)


class PlainTrainer(InOrder, Trainer):
    pass


class SpreadTrainer(InOrder, moefx.integrations.SpreadTrainer):
    """Decays all parameters, as `train_in_one_process` does, and keeps losses that Trainer would log in float32."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.losses: list[Tensor] = []

    def get_decay_parameter_names(self, model: nn.Module) -> list[str]:
        return [name for name, _ in model.named_parameters()]

    def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
        loss = super().training_step(*args, **kwargs)
        total = loss.clone()
        dist.all_reduce(total)
        self.losses.append(total / RANKS)
        return loss


def stack(rows: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    return {name: torch.stack([row[name] for row in rows]) for name in rows[0]}


def sum_losses(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), reduction="sum")


def average_losses(logits: Tensor, labels: Tensor, size: int, num_items_in_batch: Any = None, **kwargs: Any) -> Tensor:
    """Compute the loss of transformers' causal models in float64; theirs casts to float32."""
    number = labels[:, 1:].ne(-100).sum() if num_items_in_batch is None else num_items_in_batch
    return sum_losses(logits, labels) / number


@functools.cache
def train_in_one_process(
    optimizer_class: Any = torch.optim.AdamW, **options: float
) -> tuple[list[float], list[float], dict[str, Tensor]]:
    """Train on the batches of all ranks and micro-batches at once. Returns losses, norms and parameters."""
    model, rows, losses, norms = build_causal_model(layers=1), Rows(), [], []
    optimizer = optimizer_class(model.parameters(), **(options or dict(lr=RATE, weight_decay=0.1)))
    for step in range(STEPS):
        size = len(rows) // STEPS
        batch = stack([rows[step * size + index] for index in range(size)])
        loss = sum_losses(model(batch["input_ids"]).logits, batch["labels"]) / batch["labels"][:, 1:].ne(-100).sum()
        optimizer.zero_grad()
        loss.backward()
        for parameter in model.parameters():  # AdamW also decays weights of experts without tokens
            parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM).item())
        losses.append(loss.item())
        optimizer.step()
    return losses, norms, dict(model.state_dict())


def spread_model(sizes: dict[str, int], options: dict[str, Any] | None = None, model: Any = None) -> Any:
    mesh = make_mesh(**sizes)
    example = {"input_ids": torch.zeros(2, LENGTH, dtype=torch.long)}
    model = moefx.compile(model or build_causal_model(layers=1), mesh=mesh, plan=PLAN, example_inputs=example)
    model.loss_function = average_losses
    return model if options is None else moefx.parallelize(model, mesh, **options)


def build_arguments(folder: str, **options: Any) -> TrainingArguments:
    defaults = dict(
        output_dir=folder, max_steps=STEPS, per_device_train_batch_size=BATCH, gradient_accumulation_steps=PARTS,
        per_device_eval_batch_size=BATCH, learning_rate=RATE, lr_scheduler_type="constant", weight_decay=0.1,
        max_grad_norm=MAX_NORM, logging_steps=1, save_strategy="no", report_to=[], use_cpu=True, disable_tqdm=True,
    )  # fmt: skip
    return TrainingArguments(**(defaults | options))  # type: ignore[arg-type]


def build_trainer(model: Any, folder: str, cls: Any = SpreadTrainer, **options: Any) -> Any:
    return cls(model=model, args=build_arguments(folder, **options), train_dataset=Rows(), eval_dataset=Rows(16))


def check_trained(trainer: Any, first: int = 0) -> None:
    """Compare losses, norms and parameters with `train_in_one_process`, from the step `first` on."""
    losses, norms, parameters = train_in_one_process()
    close = functools.partial(torch.testing.assert_close, rtol=0, atol=1e-9)
    close(torch.stack(trainer.losses).view(-1, PARTS).sum(1).tolist(), losses[first:])
    close([float(entry["grad_norm"]) for entry in trainer.state.log_history if "loss" in entry][first:], norms[first:])
    close(moefx.full_state_dict(trainer.model), parameters)


def case_training_equals_one_process() -> None:
    """Train with evaluations, clip, accumulate, save, and resume over other meshes."""
    folder, optimizers = create_shared_folder(), ("adamw_torch", "adamw_torch_fused", "adamw_torch")
    assert all(norm > MAX_NORM for norm in train_in_one_process()[1])  # clipping changes the gradients
    for (sizes, options), optim in zip(LAYOUTS, optimizers, strict=True):
        saves = dict(save_strategy="steps", save_steps=2) if options is None else {}
        evaluates = dict(eval_strategy="steps", eval_steps=2)
        trainer = build_trainer(spread_model(sizes, options), folder, optim=optim, **saves, **evaluates)
        trainer.evaluate()  # before training, which leaves gathered parameters
        trainer.train()
        check_trained(trainer)
    for sizes, options in ((dict(ep=2, dp=2), {}), (dict(ep=4), None)):
        trainer = build_trainer(spread_model(sizes, options), folder)
        trainer.train(resume_from_checkpoint=f"{folder}/checkpoint-2")
        check_trained(trainer, first=2)
    saved = AutoModelForCausalLM.from_pretrained(f"{folder}/checkpoint-4", dtype=torch.float64)
    check_equal(saved.state_dict(), moefx.full_state_dict(trainer.model))
    assert saved.config.architectures == ["Qwen3MoeForCausalLM"]
    assert Path(folder, "checkpoint-4", "training_args.bin").exists()


def case_the_best_model_is_loaded() -> None:
    """Load the checkpoint with the lowest loss of an evaluation, which leaves gathered parameters."""
    folder = create_shared_folder()
    trainer = build_trainer(
        spread_model(dict(dp=2, ep=2), {}), folder, learning_rate=1.0, save_strategy="steps", save_steps=1,
        eval_strategy="steps", eval_steps=1, load_best_model_at_end=True, metric_for_best_model="loss",
    )  # fmt: skip
    trainer.train()
    losses = [entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry]
    assert trainer.state.best_global_step == 1 + losses.index(min(losses)) < STEPS
    assert abs(trainer.evaluate()["eval_loss"] - min(losses)) < 1e-6 < max(losses) - min(losses)


def case_auxiliary_losses_of_ranks_add_up() -> None:
    """Each is computed from one rank's tokens of a micro-batch. Trainer multiplies the loss by the number of processes,
    and does not divide it by that of micro-batches: their sum is trained."""
    factor, num_parts = 0.5, RANKS * PARTS
    batch = stack([Rows()[index] for index in range(num_parts * BATCH)])

    def build() -> Any:
        return build_causal_model(layers=1, output_router_logits=True, router_aux_loss_coef=factor)

    def train_original(rows: int, scale: float) -> dict[str, Tensor]:
        """Train one step with the sum of auxiliary losses, each of some rows of the batch, times a scale."""
        model = build()
        loss = sum_losses(model(batch["input_ids"]).logits, batch["labels"]) / batch["labels"][:, 1:].ne(-100).sum()
        loss = loss + scale * factor * sum(model(ids).aux_loss for ids in batch["input_ids"].split(rows))
        loss.backward()
        torch.optim.SGD(model.parameters(), lr=RATE).step()
        return dict(model.state_dict())

    trainer = build_trainer(
        spread_model(dict(dp=2, ep=2), model=build()), create_shared_folder(), optim="sgd", weight_decay=0.0,
        max_grad_norm=0.0, max_steps=1,
    )  # fmt: skip
    trainer.train()
    trained, bounds = moefx.full_state_dict(trainer.model), dict(rtol=0, atol=1e-7)  # auxiliary losses are in float32
    torch.testing.assert_close(trained, train_original(BATCH, 1.0), **bounds)
    router = next(name for name in trained if name.endswith("mlp.gate.weight"))
    mean, of_all_tokens = train_original(BATCH, 1 / num_parts), train_original(num_parts * BATCH, num_parts)
    assert not any(torch.allclose(trained[router], other[router], **bounds) for other in (mean, of_all_tokens))


def case_smoothed_labels_are_shifted() -> None:
    """Trainer decides by the name of a class whether a label smoother shifts labels, and FSDP changes the name."""
    batch = stack([Rows()[index] for index in range(4 * BATCH)])
    loss = F.cross_entropy(
        build_causal_model(layers=1)(batch["input_ids"]).logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten(),
        label_smoothing=0.1,
    )  # fmt: skip
    for options in ({}, None):
        trainer = build_trainer(
            spread_model(dict(dp=2, ep=2), options), create_shared_folder(), label_smoothing_factor=0.1, max_steps=1,
            gradient_accumulation_steps=1,
        )  # fmt: skip
        trainer.train()
        torch.testing.assert_close(trainer.losses[0], loss.detach(), rtol=0, atol=1e-7)  # sums in float32


def case_adapters() -> None:
    """Train adapters that were added before `compile`, resume, and write them as PEFT does."""
    from peft import LoraConfig, get_peft_model

    folder, states = create_shared_folder(), []
    for resumed in (None, f"{folder}/checkpoint-2"):
        model = get_peft_model(build_causal_model(layers=1), LoraConfig(r=2, target_modules=["q_proj"])).double()
        trainer = build_trainer(
            spread_model(dict(dp=2, ep=2), model=model), folder, save_strategy="steps", save_steps=2
        )
        trainer.train(resume_from_checkpoint=resumed)
        states.append(moefx.full_state_dict(trainer.model))
    torch.testing.assert_close(*states, rtol=0, atol=1e-9)
    original = build_causal_model(layers=1).state_dict()
    check_equal({n: states[0][f"base_model.model.{n}"] for n in original if "q_proj" not in n},
                {n: value for n, value in original.items() if "q_proj" not in n})  # fmt: skip
    trainer.model.save_pretrained(f"{folder}/adapter-{dist.get_rank()}", state_dict=states[1])
    saved = load_file(f"{folder}/adapter-{dist.get_rank()}/adapter_model.safetensors")
    adapters = {n.replace(".default.", "."): value for n, value in states[0].items() if "lora" in n}
    assert len(adapters) == 2
    assert all(value.abs().max() > 0 for value in adapters.values())
    torch.testing.assert_close(saved, adapters, rtol=0, atol=1e-9)


def run_loop(accelerator: Any, model: Any, first: int = 0, folder: str = "") -> None:
    """Train a model by a loop with accelerate from the step `first` on, and compare with `train_in_one_process`.

    Args:
        folder: save the state after two steps here, or load it before the first one if it is not 0.
    """
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=0.1)
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(Rows(), batch_size=BATCH))
    if first:
        accelerator.load_state(folder)
    _, norms, parameters = train_in_one_process()
    number = len(Rows()) // STEPS
    for index, batch in enumerate(loader):
        step = index // PARTS
        if step < first:
            continue
        labels = stack([Rows()[row] for row in range(step * number, (step + 1) * number)])["labels"]
        with accelerator.accumulate(model):
            outputs = model(input_ids=batch["input_ids"])
            loss = sum_losses(outputs.logits, batch["labels"]) / labels[:, 1:].ne(-100).sum() * RANKS * PARTS
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                norm = accelerator.clip_grad_norm_(model.parameters(), MAX_NORM)
                torch.testing.assert_close(norm.item(), norms[step], rtol=0, atol=1e-9)
            optimizer.step()
            optimizer.zero_grad()
        if accelerator.sync_gradients and step == 1 and folder and not first:
            accelerator.save_state(folder)
    state = accelerator.get_state_dict(model)
    assert bool(state) == accelerator.is_main_process
    if state:
        torch.testing.assert_close(state, parameters, rtol=0, atol=1e-9)


def case_loops_with_accelerate() -> None:
    """Train by a loop with accelerate, and go on with its state over another mesh."""
    folder = create_shared_folder()
    for sizes, first in ((dict(dp=2, ep=2), 0), (dict(ep=4), 2)):
        accelerator = moefx.integrations.SpreadAccelerator(cpu=True, gradient_accumulation_steps=PARTS)
        model = spread_model(sizes, {})
        model.set_requires_gradient_sync = mock.Mock(wraps=model.set_requires_gradient_sync)
        run_loop(accelerator, model, first, folder)
        given = [call.args[0] for call in model.set_requires_gradient_sync.call_args_list]
        assert given == [False, True] * (STEPS - first) * (PARTS - 1)  # one reduction of gradients in a step


def case_loops_with_separate_experts() -> None:
    """Experts that are modules of their own live on one rank each: their norms add up, and their states move."""
    wanted, parameters = parallelize_cases.train_in_one_process("gated")
    folder = create_shared_folder()
    for sizes, first in ((dict(dp=2, ep=2), 0), (dict(ep=4), 2)):
        model = parallelize_model("gated", sizes)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
        accelerator = moefx.integrations.SpreadAccelerator(cpu=True, gradient_accumulation_steps=PARTS)
        model, optimizer = accelerator.prepare(model, optimizer)
        if first:
            accelerator.load_state(folder)
        for step in range(first, parallelize_cases.STEPS):
            for part in range(PARTS):
                with accelerator.accumulate(model):
                    accelerator.backward(PARTS * compute_loss(model, draw_batch(step, part)[dist.get_rank()]))
                    if accelerator.sync_gradients:
                        norm = accelerator.clip_grad_norm_(model.parameters(), 0.1)
                        torch.testing.assert_close(norm, wanted[(PARTS + 1) * step + PARTS], rtol=0, atol=1e-9)
                    optimizer.step()
                    optimizer.zero_grad()
            if step == 1 and not first:
                accelerator.save_state(folder)
        torch.testing.assert_close(moefx.full_state_dict(model), dict(parameters), rtol=0, atol=1e-9)


def case_saved_states_outlive_saves_that_fail() -> None:
    """Raise on each rank if one fails, and keep the earlier state."""
    folder, rank, model = create_shared_folder(), dist.get_rank(), parallelize_model("joined", dict(dp=2, ep=2))
    save_model(model, folder)
    wanted, names = moefx.full_state_dict(model), sorted(os.listdir(folder))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    full = OSError(errno.ENOSPC, "No space left on device")
    for failing, target in (
        (0, "moefx.util.save_folder.os.rename"),
        (2, "torch.distributed.checkpoint.FileSystemWriter.write_data"),
    ):
        with mock.patch(target, side_effect=full) if rank == failing else contextlib.nullcontext():
            check_raises((OSError, MoefxError, CheckpointException), "No space left", save_model, model, folder)
        dist.barrier()
        assert sorted(os.listdir(folder)) == names
        dist.barrier()
    load_model(model, folder)
    check_equal(moefx.full_state_dict(model), wanted)
    dist.barrier()
    if rank == 0:  # a save was killed before it put its files in place
        os.mkdir(f"{folder}/complete-save")
        for name in names:
            os.rename(f"{folder}/{name}", f"{folder}/complete-save/{name}")
    dist.barrier()
    load_model(model, folder)
    save_model(model, folder)
    assert sorted(os.listdir(folder)) == names
    check_raises(InvalidCheckpoint, "has no complete state", load_model, model, f"{folder}/none")


def case_plain_libraries_are_refused() -> None:
    """Raise before the first step, with the class that trains the model."""
    for options in (None, {}):
        model = spread_model(dict(dp=2, ep=2), options)
        trainer = build_trainer(model, create_shared_folder(), PlainTrainer)
        for call in (trainer.evaluate, trainer.train):
            check_raises(InvalidInput, "Use moefx.integrations.SpreadTrainer instead", call)
        check_raises(InvalidInput, "moefx.integrations.SpreadAccelerator instead", Accelerator(cpu=True).prepare, model)
    original = build_trainer(build_causal_model(layers=1), create_shared_folder(), SpreadTrainer, max_steps=1)
    original.train()  # models in one process train as always
    assert isinstance(original.model_wrapped, nn.parallel.DistributedDataParallel)


def case_mistakes() -> None:
    def prepare(*args: Any, **options: Any) -> Any:
        return moefx.integrations.SpreadAccelerator(cpu=True, **options).prepare(*args)

    model = spread_model(dict(dp=2, ep=2))
    optimizer = torch.optim.AdamW(model.parameters())
    check_raises(InvalidInput, "call moefx.parallelize(model, mesh) before you build", prepare, model, optimizer)
    arguments = build_arguments(create_shared_folder())
    trainer = SpreadTrainer(model, arguments, train_dataset=Rows(), optimizers=(optimizer, None))
    check_raises(InvalidInput, "was given an optimizer of", trainer.train)
    model = moefx.parallelize(model, make_mesh(dp=2, ep=2))
    check_raises(InvalidInput, "build the optimizer after moefx.parallelize", prepare, model, optimizer)
    model = spread_model(dict(dp=2, ep=2), {})
    model(input_ids=torch.zeros(1, LENGTH, dtype=torch.long))
    optimizer = torch.optim.AdamW(model.parameters())
    check_raises(InvalidInput, "and before a forward with gradients", prepare, model, optimizer)
    check_raises(InvalidInput, "inside of Sequential", prepare, nn.Sequential(model))
    accelerator = moefx.integrations.SpreadAccelerator(cpu=True)
    prepared = accelerator.prepare(model)
    check_raises(
        InvalidInput, "Pass model.parameters()", accelerator.clip_grad_norm_, list(prepared.parameters())[1:], 1
    )
    model = spread_model(dict(dp=2, ep=2), {})
    model.adapter = nn.Linear(2, 2)
    check_raises(InvalidInput, "(adapter.weight, ...) were added after", prepare, model)
    uneven = DataLoaderConfiguration(even_batches=False)
    model = spread_model(dict(dp=2, ep=2), {})
    check_raises(InvalidInput, "even_batches=False", prepare, model, dataloader_config=uneven)
    check_raises(InvalidInput, "mixed_precision='fp16'", check_trainable, model, RANKS, "fp16")
    with mock.patch.object(Accelerator, "distributed_type", DistributedType.FSDP):
        check_raises(InvalidInput, "accelerate is set up for FSDP", prepare, model)
    pipe = build_pipeline(build_causal_model())
    check_raises(InvalidInput, "call pipe.step in a loop", prepare, pipe)
    check_raises(InvalidInput, "call pipe.step in a loop", Accelerator(cpu=True).prepare, pipe)
    model = spread_model(dict(tp=2, ep=2), {})
    check_raises(InvalidInput, "have tokens of their own, and accelerate gives each of 4", prepare, model)
    folder = create_shared_folder()
    if dist.get_rank() == 0:
        build_causal_model(layers=1).save_pretrained(f"{folder}/checkpoint-1")
        Path(folder, "checkpoint-1", "optimizer.pt").touch()
        trainer.state.save_to_json(f"{folder}/checkpoint-1/trainer_state.json")
    dist.barrier()
    trainer = build_trainer(spread_model(dict(ep=4)), folder)
    check_raises(
        InvalidCheckpoint, "optimizer's state of a model in one process", trainer.train, f"{folder}/checkpoint-1"
    )
