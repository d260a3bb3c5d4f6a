"""Train a few real layers: Qwen3-30B-A3B's shapes, 4 layers, 4 x 4096 tokens, bfloat16, fused AdamW.

    python -m moefx bench layers [--systems eager,grouped_mm,moefx,...] [--steps 10] [--profile] [--out results.jsonl]

Compares transformers' implementations, moefx.compile of the eager one (each with and without torch.compile), and
torch.compile with moefx as its backend (on grouped_mm, because Dynamo breaks the eager loop). On request also
"... reduce-overhead", torch.compile with CUDA graphs, and "... graph", the whole step as one by `moefx.capture_step`.
Each system runs in a process of its own with the same weights and tokens. Reports ms of a step (median), the peak of
memory above weights and optimizer, and the losses; with --profile also the GPU's time in one more step, kernel by
kernel.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from .results import append_row, build_parser

SHOWN_KERNELS = 25
_ATTENTION = "sdpa_without_mask"
SYSTEMS = ("eager", "grouped_mm", "grouped_mm compiled", "moefx", "moefx compiled", "moefx backend")


_SIZES = dict(vocab_size=32000, hidden_size=2048, num_attention_heads=32, num_key_value_heads=4, head_dim=128)
_SIZES |= dict(moe_intermediate_size=768, num_experts=128, num_experts_per_tok=8)
_TINY_SIZES = dict(vocab_size=96, hidden_size=32, num_attention_heads=4, num_key_value_heads=2, head_dim=8)
_TINY_SIZES |= dict(moe_intermediate_size=16, num_experts=16, num_experts_per_tok=2)


def build_config(layers: int, is_tiny: bool = False) -> Any:
    """Return the configuration of a model with Qwen3-30B-A3B's layers and a smaller vocabulary.

    Its attention is torch's causal one without a mask. While a CUDA graph is captured, transformers 5.17 makes a mask,
    with which attention takes 3.4 times as long.

    Args:
        is_tiny: layers of a few kilobytes instead, to test a benchmark on a CPU.
    """
    from transformers import AttentionInterface, Qwen3MoeConfig
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    AttentionInterface.register(_ATTENTION, sdpa_attention_forward)  # a name of its own: no function makes its masks
    sizes: Any = _TINY_SIZES if is_tiny else _SIZES
    options: Any = dict(norm_topk_prob=True, use_cache=False, tie_word_embeddings=False, attn_implementation=_ATTENTION)
    return Qwen3MoeConfig(num_hidden_layers=layers, **sizes, **options)


def build_model(system: str, layers: int, device: str = "cuda", is_tiny: bool = False) -> torch.nn.Module:
    from transformers import Qwen3MoeForCausalLM

    config = build_config(layers, is_tiny)
    is_plain = system.startswith(("eager", "moefx")) and system != "moefx backend"
    config._experts_implementation = "eager" if is_plain else "grouped_mm"
    torch.manual_seed(0)
    with torch.device(device):
        torch.set_default_dtype(torch.bfloat16)
        model = Qwen3MoeForCausalLM(config)
        torch.set_default_dtype(torch.float32)
    model.train()
    if system == "moefx backend":
        from ..frontends.dynamo.backend import backend

        return torch.compile(model, backend=backend)  # pyright: ignore[reportReturnType]
    if system.startswith("moefx"):
        import moefx

        model = moefx.compile(model)
    mode = {"compiled": "default", "reduce-overhead": "reduce-overhead"}.get(system.partition(" ")[2])
    return torch.compile(model, mode=mode) if mode else model  # pyright: ignore[reportReturnType]


def list_kernels(events: Iterable[Any]) -> list[dict[str, Any]]:
    """List name, ms and calls of each kernel in a profile, the longest first."""
    kernels = [e for e in events if e.device_type.name == "CUDA" and e.self_device_time_total > 0]
    kernels = [e for e in kernels if not e.is_user_annotation]  # the optimizer's range around its kernels
    kernels.sort(key=lambda e: -e.self_device_time_total)
    return [dict(kernel=e.key[:120], ms=e.self_device_time_total / 1e3, calls=e.count) for e in kernels]


def measure(system: str, steps: int, layers: int, batch: int, length: int, has_profile: bool = False) -> dict[str, Any]:
    from ..runtime.captured_step import capture_step

    started = time.perf_counter()
    model = build_model(system, layers)
    is_captured = system.endswith(" graph")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True, capturable=is_captured)
    generator = torch.Generator(device="cuda").manual_seed(1)
    ids = torch.randint(0, 32000, (steps, batch, length), device="cuda", generator=generator)
    losses, times, hosts, held_bytes, peak = [], [], [], 0, 0

    def train_eagerly(tokens: torch.Tensor) -> torch.Tensor:
        begin = time.perf_counter()
        torch.compiler.cudagraph_mark_step_begin()
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        if not is_captured:  # a replay runs no Python of the step
            hosts.append((time.perf_counter() - begin) * 1e3)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    run = capture_step(train_eagerly) if is_captured else train_eagerly

    def train(tokens: torch.Tensor) -> torch.Tensor:
        begin = time.perf_counter()
        loss = run(tokens)
        if is_captured:
            hosts.append((time.perf_counter() - begin) * 1e3)
        torch.cuda.synchronize()
        return loss

    first = 0.0
    for step in range(steps):
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        held_bytes, begin = torch.cuda.memory_allocated(), time.perf_counter()
        loss = train(ids[step])
        times.append((time.perf_counter() - begin) * 1e3)
        first = first or time.perf_counter() - started
        losses.append(loss.item())
        step_peak = torch.cuda.max_memory_allocated() - held_bytes
        # a replay allocates nothing, and the first step the optimizer's state
        peak = max(peak, step_peak) if is_captured and step > 1 else step_peak
    ms, host_ms = (statistics.median(values[steps // 2 :]) for values in (times, hosts))
    row = dict(system=system, tokens=batch * length, ms=ms, host_ms=host_ms, first_step_s=first)
    row |= dict(peak_gib=peak / 2**30, losses=losses)
    if has_profile:
        with torch.profiler.profile() as profile:
            train(ids[-1])
        row["kernels"] = list_kernels(profile.key_averages())
    if system.startswith("moefx"):
        from ..ir import op_providers

        row["providers"] = sorted({f"{op}: {provider}" for op, provider in op_providers.counters()})
    return row


def main(argv: Sequence[str] | None = None) -> None:
    parser = build_parser("layers", __doc__)
    parser.add_argument("--systems", default=",".join(SYSTEMS))
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--length", type=int, default=4096)
    parser.add_argument("--profile", action="store_true", help="where the GPU's time goes")
    parser.add_argument("--here", action="store_true", help="in this process")
    options = parser.parse_args(argv)
    for system in options.systems.split(","):
        if not options.here:
            command = [sys.executable, "-m", __spec__.name, "--systems", system, "--here"]
            command += ["--profile"] if options.profile else []
            for name in ("steps", "layers", "batch", "length"):
                command += [f"--{name}", str(getattr(options, name))]
            subprocess.run([*command, *(["--out", options.out] if options.out else [])], check=False)
            continue
        row = measure(system, options.steps, options.layers, options.batch, options.length, options.profile)
        if options.out:
            append_row(row, options.out)
        times = f"{row['ms']:8.1f} ms a step  host {row['host_ms']:6.1f} ms  first {row['first_step_s']:5.1f} s"
        losses, providers = " ".join(f"{x:.3f}" for x in row["losses"][:4]), ", ".join(row.get("providers", []))
        print(
            f"{system:20} {times}  peak {row['peak_gib']:6.2f} GiB  losses {losses} {providers}",
            flush=True,
        )
        for kernel in row.get("kernels", [])[:SHOWN_KERNELS]:
            print(f"    {kernel['ms']:8.2f} ms {kernel['calls']:6} x {kernel['kernel'][:90]}", flush=True)


if __name__ == "__main__":
    main()
