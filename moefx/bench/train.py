"""Train Qwen3-30B-A3B's layers over GPUs: layouts side by side, and beside the planner's predictions.

    torchrun --nproc-per-node 2 -m moefx bench train [--systems fsdp,ep,...] [--layers 8] [--profile] [--out FILE]
    torchrun --nproc-per-node 8 -m moefx bench train --systems dp2xep4,pp2xep4:zbv,pp2xdp2xep2:1f1b+gather

| system | layout |
|---|---|
| `fsdp:grouped_mm` | transformers' `grouped_mm` under `fully_shard`, all GPUs with sequences of their own |
| `fsdp` | the same, compiled by moefx |
| `ep`, `ep:gather`, `ep:pull` | experts over all GPUs, everything else under `fully_shard` |
| `dp2xep4` | experts over 4 GPUs, sharded over 2 |
| `pp:gpipe`, `pp:1f1b`, `pp:interleaved` | a pipeline of as many stages as GPUs (interleaved: twice as many) |
| `pp2xep4:zbv`, `pp2xdp2xep2:1f1b` | a pipeline of 2 stages, each spread as above over 4 GPUs |
| `ep:gather+graph`, `fsdp:graph`, ... | no pipeline, the whole step as one CUDA graph (`moefx.capture_step`) |

Every system trains on `--sequences` sequences of `--length` tokens a step, over all GPUs, in bfloat16, with fused
AdamW. A pipeline cuts them into micro-batches of one sequence. The others accumulate gradients over forwards of at most
`--most` sequences.

Reported: ms of a step (median; slowest rank), of it the optimizer's, tokens a second, the MFU of Piper eq. 12, the
largest peak of memory of a rank, the loss, and the planner's ms for the layout without the optimizer, whose states have
other dtypes there. A graph holds the optimizer, so its part has no time of its own. `--profile` shows where the GPU's
time goes.

For pipelines also the bubble: a step of twice as many micro-batches repeats everything else, so the bubble is
2 T(M) - T(2 M), without the optimizer. In stages over several GPUs this includes the reduction of gradients, which a
step does once: compare it with the predicted bubble and the predicted reduction together.

`--device cpu` trains a tiny model over gloo to test the benchmark itself. Its figures mean nothing.
"""

from __future__ import annotations

import gc
import statistics
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist

from .layers import SHOWN_KERNELS, build_config
from .rank_device import RankDevice, start_ranks, take_largest
from .results import append_row, build_parser
from .train_systems import System, Training, TrainingSize, parse_system

SYSTEMS = ("fsdp:grouped_mm", "fsdp", "ep", "ep:gather", "pp:gpipe", "pp:1f1b", "pp:interleaved")
_STEPS, _WARM_UP = 8, 4  # a captured step runs eagerly three times, and is captured in the fourth call
_CHUNKS = {"interleaved": 2}  # stages of a rank


def measure(
    system: System, size: TrainingSize, device: RankDevice, steps: int = _STEPS, has_profile: bool = False
) -> dict[str, Any]:
    """Train with one system. Returns its figures, the same on all ranks, and this rank's kernels with `has_profile`."""
    training = Training(system, size, device)
    warm_up = min(_WARM_UP, steps - 1)
    losses, gradients, updates = [], [], []
    for step in range(steps):
        if step == max(0, warm_up - 1):
            device.reset_peak_memory()  # before the capture, which allocates what replays use
        for values, value in zip((losses, gradients, updates), training.measure_step(), strict=True):
            values.append(value)
    peak = device.read_peak_gib()
    kernels = training.profile_kernels() if has_profile else None
    training.free()
    medians = [statistics.median(times[warm_up:]) for times in (gradients, updates)]
    gradients_ms, update_ms, peak, loss = take_largest([*medians, peak, float(losses[-1])], device.type)
    tokens = size.sequences * size.length
    row: dict[str, Any] = dict(system=system.name, layers=size.layers, sequences=size.sequences, length=size.length)
    row |= dict(ranks=dist.get_world_size(), microbatches=training.microbatches)
    row |= dict(ms=gradients_ms + update_ms, gradients_ms=gradients_ms)
    row |= dict(tokens_per_s=tokens / (gradients_ms + update_ms) * 1e3, peak_gib=peak, loss=loss)
    return row | (dict(kernels=kernels) if kernels else {})


def predict(system: System, size: TrainingSize, device_type: str = "cuda") -> dict[str, float]:
    """Predict the ms of a step without the optimizer, of its bubble and its reduction of gradients, and the step's FLOP
    on a rank at the peak rate, in ms.

    Only the last one for systems that the planner has no formulas for: schedules of its simulation, `grouped_mm`.
    """
    from ..planner.breakdown import compute_time_parts
    from ..planner.layout import Layout
    from ..planner.local_platform import find_local_platform
    from ..planner.model_configs import describe_config
    from ..planner.step_formulas import compute_flop_per_token

    ranks = system.pp * system.data_ranks
    model = describe_config(build_config(size.layers, size.is_tiny))
    platform = find_local_platform(device_type, ranks).platform
    flop = compute_flop_per_token(model, size.length) * size.sequences * size.length / ranks
    ideal = dict(ideal_ms=1e3 * flop / platform.peak)
    if system.schedule in ("zbv", "dualpipev") or not system.is_compiled:
        return ideal
    microbatches, sequences = system.split_sequences(size)
    options: dict[str, Any] = dict(pp=system.pp, dp=system.data_ranks, ep=system.ep, tokens=size.length)
    options |= dict(microbatches=microbatches, sequences=sequences)
    options |= dict(zero=int(system.data_ranks > 1) if system.schedule else 3)
    if system.schedule:
        options |= dict(schedule=system.schedule, chunks=_CHUNKS.get(system.schedule, 1))
    if system.ep > 1:
        options |= dict(dispatch={"": "dedup", "pull": "gather"}.get(system.dispatch, system.dispatch))
    parts = compute_time_parts(model, platform, Layout(**options))
    milliseconds = {name: 1e3 * seconds for name, seconds in parts.items()}
    if not system.schedule and "T_grads" in milliseconds:
        milliseconds["T_grads"] /= microbatches  # `Training` reduces once a step, the formulas each time under ZeRO-3
    total = sum(milliseconds.values()) - milliseconds.get("T_optimizer", 0.0)
    prediction = ideal | dict(predicted_ms=total)
    if system.schedule:
        once = dict(bubble="T_bubble", reduction="T_grads")
        prediction |= {f"predicted_{name}_ms": milliseconds.get(part, 0.0) for name, part in once.items()}
    return prediction


def main(argv: Sequence[str] | None = None) -> None:
    parser = build_parser("train", __doc__)
    parser.add_argument("--systems", default=",".join(SYSTEMS))
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--sequences", type=int, default=8, help="of a step, over all GPUs")
    parser.add_argument("--length", type=int, default=4096, help="tokens of a sequence")
    parser.add_argument("--most", type=int, default=4, help="sequences of a forward on a rank, without a pipeline")
    parser.add_argument("--steps", type=int, default=_STEPS, help=f"steps to run; the first {_WARM_UP} are not timed")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"), help="cpu only tests the benchmark")
    parser.add_argument("--profile", action="store_true", help="where the GPU's time goes")
    options = parser.parse_args(argv)
    device = start_ranks("bench train", options.device, "cpu:gloo,cuda:nccl")
    is_tiny = not device.is_gpu
    for text in options.systems.split(","):
        system = parse_system(text, dist.get_world_size())
        size = TrainingSize(options.layers, options.sequences, options.length, options.most, is_tiny)
        row = measure(system, size, device, options.steps, options.profile)
        row |= predict(system, size, device.type)
        row["mfu"] = row.pop("ideal_ms") / row["ms"]
        _free_memory(device)
        if system.schedule:
            double = TrainingSize(options.layers, 2 * options.sequences, options.length, options.most, is_tiny)
            double_batch = measure(system, double, device, options.steps)
            row["bubble_ms"] = 2 * row["gradients_ms"] - double_batch["gradients_ms"]
            _free_memory(device)
        if dist.get_rank() == 0:
            numbers = "  ".join(f"{name} {value:.4g}" for name, value in row.items() if isinstance(value, float))
            print(f"{text:18} {numbers}", flush=True)
            for kernel in row.get("kernels", [])[:SHOWN_KERNELS]:
                print(f"    {kernel['ms']:8.2f} ms {kernel['calls']:6} x {kernel['kernel'][:90]}", flush=True)
            if options.out:
                append_row(row, options.out)
    dist.destroy_process_group()


def _free_memory(device: RankDevice) -> None:
    gc.collect()
    device.free_memory()


if __name__ == "__main__":
    main()
