"""Measure the memory that a rank takes to load and save a checkpoint of a 30B-A3B shape, with 4 of its 48 layers.

    torchrun --nproc-per-node 4 benchmarks/checkpoint_memory.py [--folder DIR] [--layout 'pp=2, ep=2']

Rank 0 writes a random checkpoint in bfloat16, one tensor at a time. Each rank builds the model on the meta device,
spreads it, loads its part and saves it again. A thread samples RssAnon of the process: memory without pages of mapped
files, which the kernel can drop. The report has the growth of RssAnon at its peak, and the bytes of the rank's own
parts.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import re
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

import moefx

LAYOUTS = {"ep=4": {"ep": 4}, "dp=2, ep=2": {"dp": 2, "ep": 2}, "pp=2, ep=2": {"pp": 2, "ep": 2}}


def build(layers: int) -> Any:
    config = Qwen3MoeConfig(
        vocab_size=151936, hidden_size=2048, num_hidden_layers=layers, num_attention_heads=32, num_key_value_heads=4,
        head_dim=128, num_experts=128, num_experts_per_tok=8, moe_intermediate_size=768, intermediate_size=6144,
        tie_word_embeddings=False, dtype="bfloat16",
    )  # fmt: skip
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, experts_implementation="eager")


def write_random(folder: Path, layers: int) -> None:
    """Write random values with the keys of a released checkpoint: one matrix of each expert."""
    from moefx.checkpoints.key_conversion import group_model_names
    from moefx.checkpoints.safetensors_files import ShardFile, TensorEntry, split_into_shards, write_index

    model, entries = build(layers), []
    state = model.state_dict()
    shapes = {name: tuple(value.shape) for name, value in state.items()}
    for group in group_model_names(model, state):
        sources = {name: (shapes[name], torch.bfloat16) for name in group.source_names}
        results = group.record(sources, model, shapes).results
        entries += [TensorEntry(key, tuple(value.shape), value.dtype) for key, value in results.items()]
    shards = split_into_shards(entries, 10**9)
    for name, shard in shards.items():
        with ShardFile(folder / name, shard) as file:
            for entry in shard:
                file.append(torch.randn(entry.shape, dtype=torch.bfloat16) / 50)
    write_index(folder, shards)


def read_anonymous() -> int:
    return int(re.search(r"RssAnon:\s+(\d+) kB", Path("/proc/self/status").read_text())[1]) * 1024  # type: ignore[index]


def measure(call: Callable[[], Any]) -> tuple[int, float]:
    """Return the growth of RssAnon at its peak in bytes, and the seconds."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # else freed memory would hide a part of the growth
    before, peak, done = read_anonymous(), 0, threading.Event()

    def sample() -> None:
        nonlocal peak
        while not done.is_set():
            peak = max(peak, read_anonymous())
            time.sleep(0.002)

    thread = threading.Thread(target=sample)
    thread.start()
    start = time.perf_counter()
    call()
    seconds = time.perf_counter() - start
    done.set()
    thread.join()
    return max(peak, read_anonymous()) - before, seconds


def spread(model: Any, sizes: dict[str, int]) -> Any:
    mesh = init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    plan = moefx.Plan(validation="symbolic")
    if "pp" in sizes:
        return moefx.pipeline(model, mesh, plan=plan, loss_fn=lambda logits, target: logits.mean(), microbatches=2)
    compiled = moefx.compile(model, mesh=mesh, plan=plan)
    return moefx.parallelize(compiled, mesh) if "dp" in sizes else compiled


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, help="keeps the checkpoint there, and takes one that is there")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--layout", default="ep=4", choices=list(LAYOUTS))
    arguments = parser.parse_args()
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    box = [str(arguments.folder or tempfile.mkdtemp()) if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(box)
    folder = Path(box[0])
    if dist.get_rank() == 0 and not list(folder.glob("*.safetensors")):
        folder.mkdir(parents=True, exist_ok=True)
        write_random(folder, arguments.layers)
    dist.barrier()
    saved = folder / "saved"
    model = spread(build(arguments.layers), LAYOUTS[arguments.layout])
    dist.barrier()
    load_peak, load_seconds = measure(lambda: moefx.load_pretrained(model, folder))
    tensors = [p.to_local() if isinstance(p, DTensor) else p for p in (*model.parameters(), *model.buffers())]
    own = sum(tensor.nbytes for tensor in tensors)
    save_peak, save_seconds = measure(lambda: moefx.save_pretrained(model, saved, max_shard_size="1GB"))
    row = {"own": own, "load": load_peak, "ratio": round(load_peak / own, 3), "load_s": round(load_seconds, 1),
           "save": save_peak, "save_s": round(save_seconds, 1)}  # fmt: skip
    rows: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(rows, row)
    if dist.get_rank() == 0:
        for rank, each in enumerate(rows):
            print(f"{arguments.layout}  rank {rank}  {json.dumps(each)}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
