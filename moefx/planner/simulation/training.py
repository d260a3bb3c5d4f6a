"""Simulate one training step as events: the compute of each rank, and its waits for others."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from ...errors import InvalidPlan
from ...util.single_thread import use_one_thread
from ...util.unit_text import amount
from ..architecture import Architecture
from ..layout import Layout
from ..platforms import Platform
from ..step_formulas import collect_values, find_step_sheet
from .exchanges import draw_exchanges
from .schedule import run_schedule
from .stage_work import StageWork, build_stages, list_expert_groups

COMPONENTS = {  # component -> description for readers
    "compute": "GEMMs and attention", "waiting": "for the slowest rank of a group",
    "exchanges": "rows to experts and back", "tensor ranks": "all-reduces of TP, gathers of SSMB",
    "parameters": "gathered, ZeRO-3", "stages": "bubbles, and transfers that are waited for",
    "gradients": "reduced and spread", "optimizer": "its step",
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class SimulatedStep:
    """A simulated step.

    Attributes:
        seconds: duration of the step.
        components: seconds by component, averaged over the ranks of the busiest stage; they add up to `seconds`.
        formulas: the same components by the formulas; they add up to `T_step`.
        slowest: the rank that computes longest.
        imbalance: routed rows of the busiest rank in an exchange over the mean of all ranks, averaged over exchanges.
        exchanges: quantiles of the seconds of row exchanges, from the minimum to the maximum; () without expert
            parallelism.
        skew, seed: the arguments.
        draws: number of drawn exchanges.
    """

    seconds: float
    components: dict[str, float]
    formulas: dict[str, float]
    slowest: int
    imbalance: float
    exchanges: tuple[float, ...]
    skew: float
    seed: int
    draws: int

    @property
    def ratio(self) -> float:
        """Seconds by the formulas over simulated seconds."""
        return sum(self.formulas.values()) / self.seconds

    def __str__(self) -> str:
        rows = [("", "formulas", "simulated", "")]
        for name, meaning in COMPONENTS.items():
            predicted, simulated = (
                amount(round(parts[name], 9) + 0.0, "s") for parts in (self.formulas, self.components)
            )
            rows.append((name, predicted, simulated, meaning))
        rows += [("step", amount(sum(self.formulas.values()), "s"), amount(self.seconds, "s"), "")]
        lines = [f"{row[0]:<16}{row[1]:<12}{row[2]:<12}{row[3]}".rstrip() for row in rows]
        lines += ["", f"formulas over simulated {self.ratio:.3f}; routing of skew {self.skew:g}, seed {self.seed}"]
        lines += [f"rank {self.slowest} computes longest"]
        if self.exchanges:
            shortest, middle, most = (amount(self.exchanges[i], "s") for i in (0, len(self.exchanges) // 2, -1))
            lines[-1] += f"; the busiest of an exchange has {self.imbalance:.3g} times the mean of choices"
            lines += [f"an exchange takes {shortest} to {most}, the median {middle}; of {self.draws} drawn ones"]
        return "\n".join(lines)


def simulate(
    model: Architecture, layout: Layout, platform: Platform, experts_first: bool = True, *, skew: float = 0.0,
    seed: int = 0, stragglers: bool = True,
) -> SimulatedStep:  # fmt: skip
    """Simulate a training step on the CPU; takes seconds.

    Each rank computes its own rows by the formulas of `planner.compute`. An exchange ends with its slowest link, and
    the ranks of an expert group go on together. Stages follow the schedule. Up to 64 exchanges are drawn token by
    token; each layer, micro-batch and group takes one at random. Layers differ in their popular experts, micro-batches
    do not.

    Args:
        experts_first: the ranks of an expert axis are neighbours, otherwise their replicas are (X-MoE appendix C.1).
        skew: Zipf's exponent of the experts' popularity: with 0 all are equal, with 1 the n-th has 1/n of the first.
        stragglers: slow exchanges down by chance, by the measured `Network.spread`. Without one, it has no effect.

    Raises:
        InvalidPlan: a size is invalid, or sizes do not fit together.
    """
    if not (isinstance(skew, int | float) and 0 <= skew <= 4):
        raise InvalidPlan(f"skew is {skew!r}, expected a number from 0 to 4")
    if type(seed) is not int:
        raise InvalidPlan(f"seed is {seed!r}, expected a whole number")
    with use_one_thread():  # the tensors are small
        return _simulate_step(model, layout, platform, experts_first, float(skew), seed, stragglers)


def _simulate_step(
    model: Architecture, layout: Layout, platform: Platform, experts_first: bool, skew: float, seed: int,
    stragglers: bool,
) -> SimulatedStep:  # fmt: skip
    generator = torch.Generator().manual_seed(seed)
    straggler_generator = torch.Generator().manual_seed(int(torch.randint(2**62, (), generator=generator)))
    layout.values(model)  # raises if they do not fit
    groups, pipelines = list_expert_groups(layout, experts_first)
    exchanges = draw_exchanges(model, layout, platform, groups, skew, generator)
    stages = build_stages(model, layout, platform, experts_first)
    patterns, first_layer = len(exchanges) // exchanges.repeats, 0
    stage_times: list[_StageTimes] = []
    for stage in stages:
        layers = torch.arange(first_layer, first_layer + stage.moe_layers)
        first_layer += stage.moe_layers
        shape = (stage.moe_layers, layout.microbatches, len(groups))
        exchange_ids = torch.randint(exchanges.repeats, shape, generator=generator)
        exchange_ids += exchanges.repeats * (layers % patterns)[:, None, None]
        exchange_seconds = exchanges.seconds(exchange_ids, straggler_generator if stragglers else None)
        stage_times.append(_simulate_stage(stage, exchanges.load, exchange_ids, exchange_seconds, pipelines))
    forward, backward, weights = (torch.stack([getattr(w, name) for w in stage_times]) for name in _DURATIONS)
    weight_seconds = weights if layout.schedule.startswith("zb") else None
    timeline = run_schedule(
        layout.schedule, forward, backward, weight_seconds, chunks=layout.chunks, transfer=stages[0].transfer
    )
    end_times = [end[-1].max().item() for end in timeline.end]
    seconds = max(end + s.gradients + s.optimizer for end, s in zip(end_times, stages, strict=True))
    most = max(range(layout.pp), key=lambda i: (forward[i] + backward[i]).sum().item())
    parts = stage_times[most].parts | {"gradients": stages[most].gradients, "optimizer": stages[most].optimizer}
    left = seconds - sum(parts.values())
    if layout.pp > 1:
        parts["stages"] = left
    else:  # waiting for other groups at the end of the step
        parts |= {"stages": 0.0, "waiting": parts["waiting"] + left}
    computed = torch.stack([work.computed for work in stage_times])  # [PP, G, EP]
    by_rank = torch.empty(layout.pp, layout.tp * layout.dp, dtype=torch.float64)
    by_rank[:, groups] = computed
    return SimulatedStep(
        seconds=seconds,
        components={name: parts[name] for name in COMPONENTS},
        formulas=_evaluate_components(model, layout, platform, experts_first),
        slowest=int(by_rank.argmax()),
        imbalance=exchanges.load.amax(1).mean().item(),
        exchanges=_compute_quantiles(torch.cat([work.exchanges for work in stage_times])) if layout.ep > 1 else (),
        skew=skew, seed=seed, draws=len(exchanges),
    )  # fmt: skip


_DURATIONS = ("forward", "backward", "weights")


@dataclasses.dataclass(frozen=True)
class _StageTimes:
    """The simulated work of a stage.

    Attributes:
        forward, backward, weights: [M, P] seconds of each micro-batch and pipeline.
        parts: seconds of a step by component, averaged over ranks.
        computed: [G, EP] seconds that each rank computes.
        exchanges: [*] seconds of all row exchanges.
    """

    forward: Tensor
    backward: Tensor
    weights: Tensor
    parts: dict[str, float]
    computed: Tensor
    exchanges: Tensor


def _simulate_stage(
    stage: StageWork, load: Tensor, exchange_ids: Tensor, exchange_seconds: Tensor, pipelines: Tensor
) -> _StageTimes:
    """Simulate one stage.

    Args:
        load: [N, EP], the load of each rank in each drawn exchange.
        exchange_ids: [l, M, G], the exchange of each layer, micro-batch and group.
        exchange_seconds: [4, l, M, G], its seconds.
        pipelines: [G], the pipeline of each group.
    """
    microbatches, num_groups = exchange_ids.shape[1:]
    times = [torch.bincount(exchange_ids[..., group].flatten(), minlength=len(load)) for group in range(num_groups)]
    parts: dict[str, float] = dict.fromkeys(("compute", "waiting", "exchanges", "tensor ranks", "parameters"), 0.0)
    computed, durations = torch.zeros(num_groups, load.shape[1], dtype=torch.float64), []
    forward_exchanges = exchange_seconds[:2].sum(0)
    backward_exchanges = exchange_seconds[2:].sum(0) + stage.again * forward_exchanges
    for work, exchanges in ((stage.forward, forward_exchanges), (stage.backward, backward_exchanges)):
        experts = work.experts.seconds(load)
        layers = _wait_for_groups(exchanges + experts.amax(1)[exchange_ids], pipelines)
        durations.append(layers.sum(0) + work.dense + work.tensor + work.parameters)
        computing = torch.stack(times).double() @ experts
        computed += computing + microbatches * work.dense
        transfer = exchanges.sum((0, 1)).mean().item()
        parts["compute"] += computing.mean().item() + microbatches * work.dense
        parts["waiting"] += layers[..., pipelines].sum((0, 1)).mean().item() - transfer - computing.mean().item()
        parts["exchanges"] += transfer
        parts["tensor ranks"] += microbatches * work.tensor
        parts["parameters"] += microbatches * work.parameters
    weights = (
        _wait_for_groups(stage.weights.experts.seconds(load).amax(1)[exchange_ids], pipelines).sum(0)
        + stage.weights.dense
    )
    return _StageTimes(durations[0], durations[1], weights, parts, computed, exchange_seconds.flatten())


def _wait_for_groups(seconds: Tensor, pipelines: Tensor) -> Tensor:
    """Reduce seconds [l, M, G] to [l, M, P]: the groups of a pipeline wait for each other in each layer."""
    number = int(pipelines.max()) + 1
    slowest = seconds.new_zeros(*seconds.shape[:2], number)
    return slowest.scatter_reduce_(2, pipelines.expand_as(seconds), seconds, "amax")


def _evaluate_components(
    model: Architecture, layout: Layout, platform: Platform, experts_first: bool
) -> dict[str, float]:
    results = find_step_sheet(layout, platform, experts_first)(**collect_values(model, layout, platform, experts_first))
    per_microbatch = {"compute": results["T_compute"], "waiting": 0.0, "exchanges": results["T_alltoall"],
            "tensor ranks": results["T_tp"] + results["T_gather"], "parameters": results["T_params"],
            }  # fmt: skip
    per_step = {
        "stages": results["T_bubble"] + results["T_p2p"],
        "gradients": results["T_grads"],
        "optimizer": results["T_optimizer"],
    }
    return {name: layout.microbatches * per_microbatch.get(name, 0.0) + per_step.get(name, 0.0) for name in COMPONENTS}


def _compute_quantiles(seconds: Tensor, number: int = 21) -> tuple[float, ...]:
    """Return `number` evenly spaced quantiles, from the minimum to the maximum."""
    if not len(seconds):
        return ()
    return tuple(
        seconds.sort().values[torch.linspace(0, len(seconds) - 1, number, dtype=torch.float32).round().long()].tolist()
    )
