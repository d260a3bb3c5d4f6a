"""Seconds and memory that `moefx.explain` and `moefx.compile` take on models far larger than this machine, and those of
`moefx.rewrite_graph` on Dynamo's graph of all of a model, with experts as `grouped_mm`.

    python benchmarks/compile_time.py [mixtral-8x7b deepseek-v3-eager loop-512 ...] [--json benchmarks/results/...]

Models of transformers on the meta device, made from their configurations: nothing is downloaded, no weight is
allocated. Each call runs in a process of its own. Memory is the peak of the resident set above that of
`import torch, transformers`; the model's own modules are part of it. CPU seconds are those of all threads of the
call: on a busy machine they say more than the seconds on the clock, which the bars are for.

Then one model with more and more layers of one kind: identical blocks are captured and proved once.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

# Published sizes; class names of transformers. Bars: seconds of each call, and a GiB of memory.
MODELS: dict[str, tuple[str, str, dict[str, Any], float]] = {
    "mixtral-8x7b": (
        "MixtralConfig",
        "MixtralForCausalLM",
        {
            "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
            "num_key_value_heads": 8, "num_local_experts": 8, "num_experts_per_tok": 2, "vocab_size": 32000,
        },
        4.0,
    ),
    "qwen3-30b-a3b": (
        "Qwen3MoeConfig",
        "Qwen3MoeForCausalLM",
        {
            "hidden_size": 2048, "intermediate_size": 6144, "moe_intermediate_size": 768, "num_hidden_layers": 48,
            "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "num_experts": 128,
            "num_experts_per_tok": 8, "norm_topk_prob": True, "vocab_size": 151936,
        },
        12.0,
    ),
    "deepseek-v3": (
        "DeepseekV3Config",
        "DeepseekV3ForCausalLM",
        {
            "hidden_size": 7168, "intermediate_size": 18432, "moe_intermediate_size": 2048, "num_hidden_layers": 61,
            "num_attention_heads": 128, "num_key_value_heads": 128, "n_routed_experts": 256, "n_shared_experts": 1,
            "num_experts_per_tok": 8, "n_group": 8, "topk_group": 4, "first_k_dense_replace": 3, "vocab_size": 129280,
        },
        30.0,
    ),
}  # fmt: skip
# The same models with the loop over experts of transformers, and plain loops over a list: seconds.
EAGER, LOOPS = {"deepseek-v3-eager": 6.0}, {"loop-512": 10.0, "loop-4096": 60.0}
MEMORY_BAR = 1024.0  # MiB
GRAPH_BAR = 20.0  # seconds; Dynamo's own are not counted, nor is memory, most of which is Dynamo's
CALLS = ("explain", "compile")
GRAPH = "graph"
# The model of the second table, and its numbers of layers.
DEPTH_MODEL, DEPTHS = "qwen3-30b-a3b", (4, 12, 48, 96)


def peak_mib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def run(name: str, call: str, layers: int | None = None) -> dict[str, Any]:
    """One call on one model, in this process. `layers`: instead of the model's own number of them."""
    import torch
    import transformers

    imported = peak_mib()
    inputs, sizes = None, {"num_hidden_layers": 1}
    if name in LOOPS:
        model, inputs = loop(int(name.partition("-")[2])), (torch.zeros(64, 16),)
    else:
        config_class, model_class, sizes, _ = MODELS[name.removesuffix("-eager")]
        if layers is not None:
            sizes = {**sizes, "num_hidden_layers": layers}
        with torch.device("meta"):
            model = getattr(transformers, model_class)(getattr(transformers, config_class)(**sizes))
        if name in EAGER:
            model.set_experts_implementation("eager")
    built = peak_mib()
    import moefx

    call_of = moefx.explain if call == "explain" else moefx.compile
    work = lambda: call_of(model, example_inputs=inputs)  # noqa: E731
    if call == GRAPH:
        work = of_graph(model)
    start, cpu_start = time.perf_counter(), time.process_time()
    result = work()
    seconds, cpu_seconds = time.perf_counter() - start, time.process_time() - cpu_start
    blocks = sum(len(m.names) for m in result.matched) if call == "explain" else len(moefx.blocks(result))
    return {
        "model": name,
        "call": call,
        "layers": sizes["num_hidden_layers"],
        "parameters_billion": round(sum(p.numel() for p in model.parameters()) / 1e9, 1),
        "blocks": blocks,
        "seconds": round(seconds, 2),
        "cpu_seconds": round(cpu_seconds, 2),
        "mib_above_imports": round(peak_mib() - imported),
        "mib_of_the_model": round(built - imported),
    }


def loop(num_experts: int) -> Any:
    """A plain loop over a list of small experts."""
    import torch
    from torch import nn

    class Loop(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate = nn.Linear(16, num_experts)
            experts = (nn.Sequential(nn.Linear(16, 12), nn.GELU(), nn.Linear(12, 16)) for _ in range(num_experts))
            self.experts = nn.ModuleList(experts)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            weights, ids = self.gate(x).softmax(-1).topk(2)
            out = torch.zeros_like(x)
            for e, expert in enumerate(self.experts):
                token, slot = torch.where(ids == e)
                out.index_add_(0, token, expert(x[token]) * weights[token, slot, None])
            return out

    return Loop()


def of_graph(model: Any) -> Callable[[], Any]:
    """`rewrite_graph` of the one graph that Dynamo makes of a model."""
    import torch

    import moefx

    model.set_experts_implementation("grouped_mm")
    taken: list[tuple[Any, Any]] = []

    def backend(graph: Any, inputs: Any) -> Any:
        taken.append((graph, inputs))
        return graph.forward

    ids = torch.zeros(1, 64, dtype=torch.long, device="meta")
    torch.compile(model.bfloat16(), backend=backend)(input_ids=ids, use_cache=False)
    ((graph, inputs),) = taken
    return lambda: moefx.rewrite_graph(graph, inputs)


def in_new_process(*arguments: object) -> dict[str, Any]:
    command = [sys.executable, __file__, "--one", *map(str, arguments)]
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def against_bars(name: str, call: str) -> dict[str, Any]:
    own = {**EAGER, **LOOPS, **{model: sizes[3] for model, sizes in MODELS.items()}}
    result, bar = in_new_process(name, call), GRAPH_BAR if call == GRAPH else own[name]
    result["bar_seconds"], result["bar_mib"] = bar, None if call == GRAPH else MEMORY_BAR
    result["ok"] = result["seconds"] < bar and (call == GRAPH or result["mib_above_imports"] < MEMORY_BAR)
    memory = "" if call == GRAPH else f"{result['mib_above_imports']:4} MiB (bar {MEMORY_BAR:.0f})"
    print(
        f"{name:15} {call:8} {result['blocks']:3} blocks {result['seconds']:6.2f} s (bar {bar:.0f})"
        f" {result['cpu_seconds']:6.2f} s CPU  {memory:20}  {'ok' if result['ok'] else 'OVER'}",
        flush=True,
    )
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("models", nargs="*", help=f"of {', '.join(MODELS)}; default: all")
    parser.add_argument("--json", type=Path, help="write the results here, with the environment")
    parser.add_argument("--one", nargs="+", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        name, call, *layers = args.one
        print(json.dumps(run(name, call, *map(int, layers))))
        return
    names = [*MODELS, *EAGER, *LOOPS]
    if unknown := set(args.models) - {*names}:
        parser.error(f"no model {', '.join(unknown)}; there are {', '.join(names)}")
    calls = [(name, call) for name in args.models or names for call in (*CALLS, *([GRAPH] if name in MODELS else []))]
    results = [against_bars(name, call) for name, call in calls]
    depths = []
    if DEPTH_MODEL in (args.models or MODELS):
        print(f"\n{DEPTH_MODEL} with another number of layers, CPU seconds (MiB)")
        for layers in DEPTHS:
            found = {call: in_new_process(DEPTH_MODEL, call, layers) for call in CALLS}
            cells = [f"{c} {r['cpu_seconds']:5.2f} ({r['mib_above_imports']})" for c, r in found.items()]
            print(f"{layers:4} layers   {'   '.join(cells)}", flush=True)
            depths += found.values()
    if args.json:
        from environment import environment

        found = {"environment": environment(), "results": results, "layers": depths}
        args.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
