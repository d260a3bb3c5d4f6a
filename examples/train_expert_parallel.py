"""Experts over ranks: train, save, and go on with the experts over half as many ranks. The losses are the same.

torchrun --nproc-per-node 4 examples/train_expert_parallel.py [--steps 8] [--dispatch dedup]

One file for CPUs (gloo) and GPUs (NCCL). The model is a plain one; its MoE blocks are found and spread by `compile`.
"""

import argparse
import itertools
import os
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import moefx
from moefx.demo.model import Config, LanguageModel
from moefx.demo.stdlib_text import batches, standard_library_text

CONFIG = Config(dim=64, layers=2, dense_hidden=96, num_experts=16, expert_hidden=32, top_k=4, context=64)
OPTIONS = StateDictOptions(flatten_optimizer_state_dict=True)  # ranks have different parameters
BATCH = 8  # sequences of all ranks together


class Training:
    """The model with its experts over one axis of a mesh, and the same step on every mesh."""

    def __init__(self, mesh: DeviceMesh, plan: moefx.Plan):
        torch.manual_seed(0)  # the same start on every rank
        self.mesh = mesh
        self.reference = LanguageModel(CONFIG).to(mesh.device_type)
        ids = torch.zeros(1, CONFIG.context, dtype=torch.long, device=mesh.device_type)
        self.model: Any = moefx.compile(self.reference, mesh=mesh, plan=plan, example_inputs=(ids, ids))

    def parallelize(self) -> None:
        """Shard the model over all ranks. Gradients are those of the mean loss from here on."""
        moefx.parallelize(self.model, self.mesh)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=3e-3, fused=True)

    def step(self, ids: torch.Tensor, labels: torch.Tensor) -> float:
        """One step on this rank's part of the batch; the mean loss of all ranks."""
        ids, labels = (t.chunk(dist.get_world_size())[dist.get_rank()].to(self.mesh.device_type) for t in (ids, labels))
        loss = self.model(ids, labels)
        loss.backward()
        moefx.clip_grad_norm_(self.model, 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        for router in self.model.routers():
            dist.all_reduce(router.load)
            router.rebalance()
        total = loss.detach().clone()
        dist.all_reduce(total)
        return total.item() / dist.get_world_size()

    def save(self, folder: Path) -> None:
        model, optimizer = get_state_dict(self.model, self.optimizer, options=OPTIONS)
        save({"model": model, "optimizer": optimizer}, checkpoint_id=folder)

    def load(self, folder: Path) -> None:
        model, optimizer = get_state_dict(self.model, self.optimizer, options=OPTIONS)
        state = {"model": model, "optimizer": optimizer}
        load(state, checkpoint_id=folder)
        states = {"model_state_dict": state["model"], "optim_state_dict": state["optimizer"]}
        set_state_dict(self.model, self.optimizer, **states, options=OPTIONS)


def run(training: Training, steps: range) -> list[float]:
    stream = batches(standard_library_text(), batch=BATCH, context=CONFIG.context, seed=0)
    return [training.step(*batch) for batch in itertools.islice(stream, steps.start, steps.stop)]


def main(steps: int = 8, dispatch: Any = "dedup") -> float:
    """Returns the largest difference of the losses before and after the change of meshes."""
    on_gpu = torch.cuda.is_available()
    if on_gpu:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("cpu:gloo,cuda:nccl" if on_gpu else "gloo")
    world, first = dist.get_world_size(), dist.get_rank() == 0
    plan, kind = moefx.Plan(dispatch=dispatch), "cuda" if on_gpu else "cpu"

    whole = Training(init_device_mesh(kind, (1, world), mesh_dim_names=("dp", "ep")), plan)
    ids, labels = next(batches(standard_library_text(), batch=1 + dist.get_rank(), context=CONFIG.context, seed=0))
    report = moefx.verify(whole.model, whole.reference, (ids.to(kind), labels.to(kind)))
    report.raise_if_failed()
    whole.parallelize()
    if first:
        print(moefx.graph(whole.model, moefx.blocks(whole.model)[0].name))
        print(f"\n{str(report).splitlines()[0]}\n")

    box = [tempfile.mkdtemp() if first else None]
    dist.broadcast_object_list(box)
    folder = Path(str(box[0]))
    run(whole, range(0, steps // 2))
    whole.save(folder)
    on_all = run(whole, range(steps // 2, steps))

    half = Training(init_device_mesh(kind, (2, world // 2), mesh_dim_names=("dp", "ep")), plan)
    half.parallelize()
    half.load(folder)
    on_half = run(half, range(steps // 2, steps))
    for step, (a, b) in enumerate(zip(on_all, on_half, strict=True), steps // 2):
        if first:
            print(f"step {step}   loss with the experts over {world} ranks {a:.6f}, over {world // 2} ranks {b:.6f}")
    dist.destroy_process_group()
    return max(abs(a - b) for a, b in zip(on_all, on_half, strict=True))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--dispatch", default="dedup", choices=("flat", "dedup", "rbd", "halo"))
    arguments = parser.parse_args()
    difference = main(arguments.steps, arguments.dispatch)
    if not difference < 1e-3:
        raise SystemExit(f"the losses differ by {difference}")
