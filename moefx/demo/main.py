"""The demo: the found blocks, the rewritten graph, equivalence, costs, two loss curves, and report.html."""

from __future__ import annotations

import copy
import dataclasses
import math
import platform
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import moefx
from moefx.inspection.history import History
from moefx.passes.checkpoint import set_checkpoint_policy
from moefx.passes.pass_manager import PassManager
from moefx.util.unit_text import format_bytes

from . import report_page
from .model import Config, LanguageModel
from .stdlib_text import batches, standard_library_text
from .step_cost import block_inputs, parameters_and_buffers, saved_bytes, side_by_side
from .terminal import Progress, chart, heading, table

NUM_PARTS = 6
BATCH = 8
# Two float64 curves of one computation stay this close over a training run; a wrong gradient shows in step 1.
CURVE_TOLERANCE = 1e-6
LEGEND = """\
  N sequences of T tokens, S = N*T; D features; each token takes K experts; B = S*K rows of the experts.
  router(...), shared(...)   the model's own modules, called as they are
  build_pft                  which rows belong to which expert: indices, no copies of tokens
  expert_mlp                 gathers rows, runs the experts' GEMMs and what stands between them, and sums each
                             token's results; g, u are its projections up, y the one down, w the routing weight
  keep="h"                   the backward keeps g and u and recomputes what follows from them"""


@dataclasses.dataclass
class Curves:
    original: list[float] = dataclasses.field(default_factory=list)
    compiled: list[float] = dataclasses.field(default_factory=list)

    @property
    def largest_difference(self) -> float:
        differences = [abs(a - b) for a, b in zip(self.original, self.compiled, strict=True)]
        return math.nan if any(map(math.isnan, differences)) else max(differences)

    @property
    def equal(self) -> bool:
        return self.largest_difference <= CURVE_TOLERANCE  # False for NaN


@dataclasses.dataclass
class Costs:
    """One training step of the whole model, one forward+backward of all MoE blocks; seconds and bytes."""

    step_seconds: dict[str, float]
    block_seconds: dict[str, float]
    model_bytes: dict[str, int]
    block_bytes: dict[str, int]
    tokens: int

    def rows(self) -> list[tuple[str, str, str, str]]:
        def row(label: str, values: dict[str, Any], show: Any) -> tuple[str, str, str, str]:
            before, after = values["original"], values["compiled"]
            return label, show(before), show(after), f"{before / after:.2f}x" if after else "-"

        def ms(seconds: float) -> str:
            return f"{1e3 * seconds:.1f} ms"

        return [
            row("training step, whole model", self.step_seconds, ms),
            row("MoE blocks, forward+backward", self.block_seconds, ms),
            row("saved for backward, whole model", self.model_bytes, format_bytes),
            row("saved for backward, MoE blocks", self.block_bytes, format_bytes),
        ]


@dataclasses.dataclass
class Result:
    """The results that the report shows."""

    config: Config
    text_bytes: int
    num_parameters: int
    compile_seconds: float
    explanation: str
    graphs: dict[str, str]
    policy_bytes: dict[str, int]  # of the first block, as written and under each save policy
    histories: dict[str, History]
    verification: str
    verified: bool
    costs: Costs
    curves: Curves
    fallbacks: int  # calls of rewritten blocks that ran the original code instead
    legend: str = LEGEND
    seconds: float = 0.0

    @property
    def ok(self) -> bool:
        return self.verified and self.curves.equal and self.fallbacks == 0


def train(models: dict[str, Any], text: bytes, *, steps: int, seed: int, learning_rate: float = 2e-3) -> Curves:
    """Train `models` (original, compiled) in turns on the same batches, each with an AdamW of its own."""
    device = next(models["original"].parameters()).device
    context = models["original"].config.context
    optimizers = {name: torch.optim.AdamW(model.parameters(), lr=learning_rate) for name, model in models.items()}
    curves = {name: [] for name in models}
    progress = Progress("training", steps)
    stream = batches(text, batch=BATCH, context=context, seed=seed)
    for step in range(steps):
        ids, labels = (t.to(device) for t in next(stream))
        for name, model in models.items():
            train_step(model, optimizers[name], ids, labels, curves[name])
        loss, other = curves["original"][-1], curves["compiled"][-1]
        progress.update(step + 1, f"loss {loss:.4f}, difference {abs(loss - other):.1e}")
    return Curves(curves["original"], curves["compiled"])


def train_step(model: Any, optimizer: torch.optim.Optimizer, ids: Tensor, labels: Tensor, losses: list[float]) -> None:
    loss = model(ids, labels)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    for router in model.routers():
        router.rebalance()
    losses.append(loss.item())


def measure(models: dict[str, Any], names: list[str], ids: Tensor, labels: Tensor, repeats: int) -> Costs:
    """Measure both models. Changes their weights.

    Args:
        names: the MoE blocks.
    """
    inputs = block_inputs(models["original"], names, ids)

    def run_blocks(model: nn.Module) -> Any:
        return [model.get_submodule(name)(*inputs[name][0], **inputs[name][1]) for name in names]

    def blocks_forward_backward(model: nn.Module) -> None:
        for out in run_blocks(model):
            out.sum().backward()
        model.zero_grad()

    model_bytes = {n: saved_bytes(lambda m=m: m(ids, labels), parameters_and_buffers(m)) for n, m in models.items()}
    block_bytes = {n: saved_bytes(lambda m=m: run_blocks(m), parameters_and_buffers(m)) for n, m in models.items()}
    optimizers = {n: torch.optim.AdamW(m.parameters(), lr=1e-3) for n, m in models.items()}
    progress = Progress("timing", 2 * repeats)
    step_seconds = side_by_side(
        {n: lambda n=n, m=m: train_step(m, optimizers[n], ids, labels, []) for n, m in models.items()},
        repeats=repeats,
        progress=progress.update,
    )
    block_seconds = side_by_side(
        {n: lambda m=m: blocks_forward_backward(m) for n, m in models.items()},
        repeats=repeats,
        progress=lambda done: progress.update(repeats + done),
    )
    return Costs(step_seconds, block_seconds, model_bytes, block_bytes, tokens=ids.numel())


def measure_policies(block: nn.Module, history: History, x: Tensor) -> dict[str, int]:
    """Measure the bytes that one block saves for its backward on x: as written, and rewritten under each save
    policy."""
    exclude = parameters_and_buffers(block)
    saved = {"original": saved_bytes(lambda: block(x), exclude)}
    fused = history["fuse"].graph.copy()
    for node in fused.find("moefx::expert_mlp"):
        node.meta.pop("val", None)  # how many tensors it returns depends on the policy
    for policy in ("all", "h", "x"):
        plan = moefx.Plan(checkpoint=policy)
        program = PassManager(block).run(fused, (set_checkpoint_policy,), plan, level="fused").graph.compile()
        saved[f'checkpoint="{policy}"'] = saved_bytes(lambda program=program: program(block, x), exclude)
    return saved


def fallbacks(compiled: nn.Module) -> int:
    return sum(block.fallbacks for block in moefx.blocks(compiled))


def run(
    *,
    steps: int = 100,
    repeats: int = 10,
    seed: int = 0,
    device: str = "cpu",
    out: Path | None = None,
    config: Config | None = None,
) -> Result:
    """Run the whole demo, and write the report to `out` (default: report.html in the current directory)."""
    started = time.perf_counter()
    out = out or Path("report.html")
    torch.manual_seed(seed)
    config = config or Config()
    original = LanguageModel(config).to(device)
    text = standard_library_text()
    ids, labels = (t.to(device) for t in next(batches(text, batch=BATCH, context=config.context, seed=seed + 1)))
    num_parameters = sum(p.numel() for p in original.parameters())
    print(
        f"moefx {moefx.__version__}, torch {torch.__version__}, {platform.machine()}, "
        f"{torch.get_num_threads()} thread(s)\n"
        f"A byte-level language model: {num_parameters / 1e6:.1f} M parameters, {config.layers} layers, "
        f"{config.num_experts} experts of hidden size {config.expert_hidden} (top {config.top_k}) and "
        f"{config.shared_experts} shared ones;\n"
        f"{BATCH} x {config.context} bytes of the standard library a step."
    )

    heading(1, NUM_PARTS, "moefx.compile(model); moefx.explain(model)")
    clock = time.perf_counter()
    # The result shares its parameters with the argument. The two are to be trained apart, hence a copy.
    compiled = moefx.compile(copy.deepcopy(original), example_inputs=(ids,))
    compile_seconds = time.perf_counter() - clock
    explanation = str(moefx.explain(compiled))
    print(explanation)
    print(f"\nmoefx.compile took {compile_seconds:.1f} s, the numeric check of the rewritten blocks included")

    names = [block.name for block in moefx.blocks(compiled)]
    heading(2, NUM_PARTS, f'moefx.graph(model, "{names[0]}")')
    graphs = {name: str(moefx.graph(compiled, name)) for name in names}
    print(f"{graphs[names[0]]}\n\n{LEGEND}")

    heading(3, NUM_PARTS, "moefx.verify(model, reference, inputs): forward and gradients")
    verification = moefx.verify(compiled, original, (ids,))
    print(verification)

    heading(4, NUM_PARTS, "Time and memory, float32")
    models = {"original": copy.deepcopy(original), "compiled": compiled}
    costs = measure(models, names, ids, labels, repeats)
    print(table(("", "original", "compiled", "ratio"), costs.rows()))
    histories = {name: moefx.history(compiled, name) for name in names}
    block = original.get_submodule(names[0])
    args, _ = block_inputs(original, names[:1], ids)[names[0]]
    policy_bytes = measure_policies(block, histories[names[0]], args[0])
    print(f"\n  saved for backward by {names[0]} under each save policy")
    print(table(("", "bytes"), [(name, format_bytes(value)) for name, value in policy_bytes.items()]))

    heading(5, NUM_PARTS, f"Training: {steps} steps, same weights, same batches, float64")
    # In float32 two correct programs drift apart once rounding flips a routing decision; in float64 not.
    models = {
        "original": copy.deepcopy(original).double(),
        # The numeric check of compile ran above; here the training itself is one.
        "compiled": moefx.compile(
            copy.deepcopy(original).double(), example_inputs=(ids,), plan=moefx.Plan(validation="symbolic")
        ),
    }
    curves = train(models, text, steps=steps, seed=seed)
    print(chart(curves.original, curves.compiled, names=("original", "compiled")))
    print(f"  largest difference of the two losses in {steps} steps: {curves.largest_difference:.1e}")

    result = Result(
        config=config, text_bytes=len(text), num_parameters=num_parameters, compile_seconds=compile_seconds,
        explanation=explanation, graphs=graphs, histories=histories, policy_bytes=policy_bytes,
        verification=str(verification), verified=verification.ok, costs=costs, curves=curves,
        fallbacks=fallbacks(compiled) + fallbacks(models["compiled"]),
    )  # fmt: skip
    heading(6, NUM_PARTS, "Report")
    result.seconds = time.perf_counter() - started
    out.write_text(report_page.render(result), encoding="utf-8")
    print(f"wrote {out.resolve()} after {result.seconds:.0f} s")
    if result.fallbacks:
        print(f"\n{result.fallbacks} calls of rewritten blocks ran the original code")
    verdict = "Equivalent: verified, and the loss curves are equal." if result.ok else "NOT equivalent: see above."
    print(f"\n{verdict}")
    return result
