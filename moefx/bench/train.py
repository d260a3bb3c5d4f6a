"""Train Qwen3-30B-A3B's layers over GPUs: layouts side by side, and beside the planner's predictions.

    torchrun --nproc-per-node 2 -m moefx bench train [--systems fsdp,ep,...] [--layers 8] [--profile] [--out FILE]

| system | layout |
|---|---|
| `fsdp:grouped_mm` | transformers' `grouped_mm` under `fully_shard`, all GPUs with sequences of their own |
| `fsdp` | the same, compiled by moefx |
| `ep`, `ep:gather`, `ep:pull` | experts over all GPUs, everything else under `fully_shard` |
| `pp:gpipe`, `pp:1f1b`, `pp:interleaved` | a pipeline of as many stages as GPUs (interleaved: twice as many) |
| `ep:gather+graph`, `fsdp+graph`, ... | the same, the whole step as one CUDA graph (`moefx.capture_step`) |

Every system trains on `--sequences` sequences of `--length` tokens a step, over all GPUs, in bfloat16, with fused
AdamW. A pipeline cuts them into micro-batches of one sequence.

Reported: ms of a step (median; slowest rank), of it the optimizer's, tokens a second, the MFU of Piper eq. 12, the
largest peak of memory of a rank, the loss, and the planner's ms for the layout without the optimizer, whose states have
other dtypes there. A graph holds the optimizer, so its part has no time of its own.

For pipelines also the bubble: a step of twice as many micro-batches repeats everything else, so the bubble is
2 T(M) - T(2 M), without the optimizer.
"""

from __future__ import annotations

import gc
import os
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from .layers import SHOWN_KERNELS, build_config, build_model, list_kernels
from .results import append_row, build_parser

SYSTEMS = ("fsdp:grouped_mm", "fsdp", "ep", "ep:gather", "pp:gpipe", "pp:1f1b", "pp:interleaved")
_STEPS, _WARM_UP = 8, 4  # a captured step runs eagerly three times, and is captured in the fourth call
_GRAPH = "+graph"
_CHUNKS = 2  # stages of a rank under "interleaved"


def compute_loss(logits: Tensor, labels: Tensor) -> Tensor:
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


class Training:
    """One system on this rank.

    Attributes:
        microbatches: the micro-batches of a pipeline's step; 0 without a pipeline.
        is_captured: whether a step is one CUDA graph.
    """

    def __init__(self, system: str, layers: int, sequences: int, length: int):
        from torch.distributed.fsdp import fully_shard

        import moefx

        layout, self.is_captured = system.removesuffix(_GRAPH), system.endswith(_GRAPH)
        kind, _, choice = layout.partition(":")
        world, self.length = dist.get_world_size(), length
        self.microbatches = sequences if kind == "pp" else 0
        self.sequences = sequences if kind == "pp" else sequences // world
        self.model: Any = build_model("grouped_mm" if choice == "grouped_mm" else "eager", layers)
        axis = {"fsdp": "dp"}.get(kind, kind)
        mesh = init_device_mesh("cuda", (world,), mesh_dim_names=(axis,))
        if kind == "pp":
            example = {"input_ids": torch.zeros(1, 64, dtype=torch.long, device="cuda")}
            options: dict[str, Any] = dict(schedule=choice, microbatches=self.microbatches, example_inputs=example)
            self.model = moefx.pipeline(self.model, mesh, loss_fn=compute_loss, **options)
        elif kind == "ep":
            fields: dict[str, Any] = dict(dispatch=choice, max_tokens=self.sequences * length) if choice else {}
            plan = moefx.Plan(validation="symbolic", **fields)
            self.model = moefx.parallelize(moefx.compile(self.model, mesh=mesh, plan=plan), mesh)
        else:
            if choice != "grouped_mm":
                self.model = moefx.compile(self.model, plan=moefx.Plan(validation="symbolic"))
            for layer in self.model.model.layers:
                fully_shard(layer, mesh=mesh)
            fully_shard(self.model, mesh=mesh)
        # a captured AdamW(foreach=True) divides DTensors by plain tensors, the numbers of steps, and DTensor raises
        options = dict(lr=1e-4, fused=True, capturable=self.is_captured)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), **options)
        self.train_captured = moefx.capture_step(self.train) if self.is_captured else None
        seed = 1 if kind == "pp" else 1 + dist.get_rank()
        self.generator = torch.Generator("cuda").manual_seed(seed)

    def draw_ids(self) -> Tensor:
        size = self.sequences, self.length
        return torch.randint(0, 32000, size, device="cuda", generator=self.generator)

    def compute_gradients(self, ids: Tensor) -> Tensor:
        if self.microbatches:
            return self.model.step(input_ids=ids, target=ids)
        loss = compute_loss(self.model(input_ids=ids).logits, ids)
        loss.backward()
        return loss.detach()

    def update(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    def train(self, ids: Tensor) -> Tensor:
        loss = self.compute_gradients(ids)
        self.update()
        return loss

    def measure_step(self) -> tuple[Tensor, float, float]:
        """Run a step. Returns its loss, its ms without the optimizer, and the ms of the optimizer (0 in a graph)."""
        ids, losses = self.draw_ids(), []
        if (train_captured := self.train_captured) is not None:
            ms = _measure_ms(lambda: losses.append(train_captured(ids)))
            return losses[0], ms, 0.0
        gradients_ms = _measure_ms(lambda: losses.append(self.compute_gradients(ids)))
        return losses[0], gradients_ms, _measure_ms(self.update)

    def profile_kernels(self) -> list[dict[str, Any]]:
        """Profile one step. Returns name, ms and calls of its kernels, the longest first."""
        with torch.profiler.profile() as profile:
            self.measure_step()
        return list_kernels(profile.key_averages())


def _measure_ms(run: Callable[[], object]) -> float:
    torch.cuda.synchronize()
    dist.barrier()
    begin = time.perf_counter()
    run()
    torch.cuda.synchronize()
    return (time.perf_counter() - begin) * 1e3


def _take_largest(values: Sequence[float]) -> list[float]:
    """Return the largest of each value over the ranks."""
    tensor = torch.tensor(values, device="cuda", dtype=torch.float64)
    dist.all_reduce(tensor, dist.ReduceOp.MAX)
    return tensor.tolist()


def measure(system: str, layers: int, sequences: int, length: int, has_profile: bool = False) -> dict[str, Any]:
    """Train with one system. Returns its figures, the same on all ranks, and this rank's kernels with `has_profile`."""
    training = Training(system, layers, sequences, length)
    losses, gradients, updates = [], [], []
    for step in range(_STEPS):
        if step == _WARM_UP - 1:
            torch.cuda.reset_peak_memory_stats()  # before the capture, which allocates what replays use
        for values, value in zip((losses, gradients, updates), training.measure_step(), strict=True):
            values.append(value)
    peak = torch.cuda.max_memory_allocated() / 2**30
    kernels = training.profile_kernels() if has_profile else None
    if training.train_captured is not None:
        training.train_captured.free()
    medians = [statistics.median(times[_WARM_UP:]) for times in (gradients, updates)]
    gradients_ms, update_ms, peak, loss = _take_largest([*medians, peak, float(losses[-1])])
    tokens = sequences * length
    row: dict[str, Any] = dict(system=system, layers=layers, sequences=sequences, length=length)
    row |= dict(ranks=dist.get_world_size(), ms=gradients_ms + update_ms, gradients_ms=gradients_ms)
    row |= dict(tokens_per_s=tokens / (gradients_ms + update_ms) * 1e3, peak_gib=peak, loss=loss)
    return row | (dict(kernels=kernels) if kernels else {})


def predict(system: str, layers: int, sequences: int, length: int, ranks: int) -> dict[str, float]:
    """Predict the ms of a step without the optimizer, the ms of its bubble, and the step's FLOP on a rank at the peak
    rate, in ms."""
    from ..planner.breakdown import compute_time_parts
    from ..planner.layout import Layout
    from ..planner.local_platform import find_local_platform
    from ..planner.model_configs import describe_config
    from ..planner.step_formulas import compute_flop_per_token

    kind, _, choice = system.removesuffix(_GRAPH).partition(":")
    options: dict[str, Any] = dict(dp=ranks, zero=3, sequences=sequences // ranks)
    if kind == "pp":
        options = dict(pp=ranks, zero=0, microbatches=sequences, schedule=choice)
        options |= dict(chunks=_CHUNKS) if choice == "interleaved" else {}
    elif kind == "ep":
        options |= dict(ep=ranks, dispatch={"": "dedup", "pull": "gather"}.get(choice, choice))
    model, platform = describe_config(build_config(layers)), find_local_platform("cuda", ranks).platform
    parts = compute_time_parts(model, platform, Layout(tokens=length, **options))
    milliseconds = {name: 1e3 * seconds for name, seconds in parts.items()}
    total = sum(milliseconds.values()) - milliseconds.get("T_optimizer", 0.0)
    flop = compute_flop_per_token(model, length) * sequences * length / ranks
    prediction = dict(predicted_ms=total, ideal_ms=1e3 * flop / platform.peak)
    return prediction | (dict(predicted_bubble_ms=milliseconds.get("T_bubble", 0.0)) if kind == "pp" else {})


def main(argv: Sequence[str] | None = None) -> None:
    parser = build_parser("train", __doc__)
    parser.add_argument("--systems", default=",".join(SYSTEMS))
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--sequences", type=int, default=8, help="of a step, over all GPUs")
    parser.add_argument("--length", type=int, default=4096, help="tokens of a sequence")
    parser.add_argument("--profile", action="store_true", help="where the GPU's time goes")
    options = parser.parse_args(argv)
    if "LOCAL_RANK" not in os.environ:
        raise SystemExit("bench train: run it with torchrun, a process for each GPU")
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("cpu:gloo,cuda:nccl")
    for system in options.systems.split(","):
        sizes = options.layers, options.sequences, options.length
        row = measure(system, *sizes, has_profile=options.profile)
        row |= predict(system, *sizes, row["ranks"])
        row["mfu"] = row.pop("ideal_ms") / row["ms"]
        _free_memory()
        if system.startswith("pp"):
            double_batch = measure(system, options.layers, 2 * options.sequences, options.length)
            row["bubble_ms"] = 2 * row["gradients_ms"] - double_batch["gradients_ms"]
            _free_memory()
        if dist.get_rank() == 0:
            numbers = "  ".join(f"{name} {value:.4g}" for name, value in row.items() if isinstance(value, float))
            print(f"{system:18} {numbers}", flush=True)
            for kernel in row.get("kernels", [])[:SHOWN_KERNELS]:
                print(f"    {kernel['ms']:8.2f} ms {kernel['calls']:6} x {kernel['kernel'][:90]}", flush=True)
            if options.out:
                append_row(row, options.out)
    dist.destroy_process_group()


def _free_memory() -> None:
    gc.collect()
    torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
