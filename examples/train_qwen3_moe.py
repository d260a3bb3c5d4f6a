"""Train Qwen3-MoE on a text: one file, from one process to pipeline x expert x data parallelism.

    pip install transformers
    python examples/train_qwen3_moe.py --text book.txt
    torchrun --nproc-per-node 4 examples/train_qwen3_moe.py --ep 2
    torchrun --nproc-per-node 8 examples/train_qwen3_moe.py --pp 2 --ep 2 --folder run

With a folder, the run saves checkpoints and goes on with the last one, over any mesh. On GPUs it uses NCCL, else gloo.
The losses are the same on every mesh.
"""

import argparse
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen3MoeConfig

import moefx
from moefx.demo.stdlib_text import batches, standard_library_text

OPTIONS = StateDictOptions(flatten_optimizer_state_dict=True)  # ranks have different parameters
CONTEXT, BATCH, MICROBATCHES = 64, 16, 2  # bytes of a sequence, sequences of all ranks, parts of a rank's batch


def build() -> PreTrainedModel:
    """A tiny model with random weights and bytes as tokens. For a released checkpoint, build the model on the meta
    device, and call moefx.load_pretrained(model, folder) after `distribute`."""
    torch.manual_seed(0)  # the same start on every rank
    sizes = {"vocab_size": 256, "hidden_size": 64, "intermediate_size": 96, "moe_intermediate_size": 32}
    counts = {"num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "num_experts": 8}
    config = Qwen3MoeConfig(**sizes, **counts, num_experts_per_tok=2, max_position_embeddings=CONTEXT)
    return AutoModelForCausalLM.from_config(config, experts_implementation="eager")


def compute_loss(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def distribute(model: PreTrainedModel, mesh: DeviceMesh | None) -> Any:
    """Compile a model, and spread it over the ranks if there are several."""
    if mesh is None:
        return moefx.compile(model)
    if mesh["pp"].size() > 1:
        ids = torch.zeros(1, CONTEXT, dtype=torch.long, device=mesh.device_type)
        return moefx.pipeline(
            model, mesh, loss_fn=compute_loss, microbatches=MICROBATCHES, example_inputs={"input_ids": ids}
        )
    return moefx.parallelize(moefx.compile(model, mesh=mesh), mesh)


def run_step(model: Any, ids: Tensor, labels: Tensor) -> Tensor:
    """Compute gradients in micro-batches. Returns the mean loss of all ranks."""
    if isinstance(model, moefx.Pipeline):
        return model.step(input_ids=ids, target=labels)
    total = torch.zeros((), device=ids.device)
    parts = zip(ids.chunk(MICROBATCHES), labels.chunk(MICROBATCHES), strict=True)
    for number, (some_ids, some_labels) in enumerate(parts):
        if dist.is_initialized():  # ranks reduce gradients once a step
            model.set_requires_gradient_sync(number == MICROBATCHES - 1)
        loss = compute_loss(model(input_ids=some_ids).logits, some_labels) / MICROBATCHES
        loss.backward()
        total += loss.detach()
    if dist.is_initialized():
        dist.all_reduce(total)
        total /= dist.get_world_size()
    return total


def read_state(model: Any, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    model_state, optimizer_state = get_state_dict(model, optimizer, options=OPTIONS)
    return {"model": model_state, "optimizer": optimizer_state}


def iterate_batches(text: bytes, first: int, mesh: DeviceMesh | None, device: Any) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield this rank's part of each batch from a step on. The ranks of a pipeline have the same part."""
    ranks, rank = 1, 0
    if mesh is not None:
        ranks = mesh["dp"].size() * mesh["ep"].size()
        rank = mesh.get_local_rank("dp") * mesh["ep"].size() + mesh.get_local_rank("ep")
    for step, batch in enumerate(batches(text, batch=BATCH, context=CONTEXT, seed=0)):
        if step >= first:
            ids, labels = (part.chunk(ranks)[rank].to(device) for part in batch)
            yield ids, labels


def main(arguments: argparse.Namespace) -> list[float]:
    """Returns the losses."""
    world, device, mesh = int(os.environ.get("WORLD_SIZE", "1")), "cpu", None
    if torch.cuda.is_available():
        device = "cuda"
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    if world > 1:
        dist.init_process_group("cpu:gloo,cuda:nccl" if device == "cuda" else "gloo")
        shape = (arguments.pp, world // (arguments.pp * arguments.ep), arguments.ep)
        mesh = init_device_mesh(device, shape, mesh_dim_names=("pp", "dp", "ep"))
    model = distribute(build().to(device), mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    done, losses, is_first = 0, [], world == 1 or dist.get_rank() == 0
    saved = sorted(Path(arguments.folder).glob("step-*/.metadata")) if arguments.folder else []
    if saved:
        state, done = read_state(model, optimizer), int(saved[-1].parent.name.removeprefix("step-"))
        load(state, checkpoint_id=saved[-1].parent)
        states = {"model_state_dict": state["model"], "optim_state_dict": state["optimizer"]}
        set_state_dict(model, optimizer, **states, options=OPTIONS)
    text = Path(arguments.text).read_bytes() if arguments.text else standard_library_text()
    stream = iterate_batches(text, done, mesh, device)
    for step in range(done, arguments.steps):
        loss = run_step(model, *next(stream))
        norm = moefx.clip_grad_norm_(model, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if is_first:
            print(f"step {step:4}  loss {loss.item():.5f}  norm of the gradient {norm.item():.4f}", flush=True)
        if arguments.folder and (step + 1) % arguments.save_every == 0:
            save(read_state(model, optimizer), checkpoint_id=Path(arguments.folder) / f"step-{step + 1:06}")
    if arguments.folder:
        moefx.save_pretrained(model, Path(arguments.folder) / "model")  # for from_pretrained
    if world > 1:
        dist.barrier()
        dist.destroy_process_group()
    return losses


def parse_arguments(command: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", help="a text file; default: the source of Python's standard library")
    parser.add_argument("--pp", type=int, default=1, help="stages of the pipeline")
    parser.add_argument("--ep", type=int, default=1, help="ranks that share the experts; the rest is data parallelism")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--folder", help="a folder for checkpoints, which all ranks see")
    parser.add_argument("--save-every", type=int, default=10, help="steps between checkpoints")
    return parser.parse_args(command)


if __name__ == "__main__":
    main(parse_arguments())
