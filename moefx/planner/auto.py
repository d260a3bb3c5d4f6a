"""What `compile(plan="auto")` and `Plan(checkpoint="auto")` take: the fastest that fits, by the planner's sheets."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import nn

from .._plan import Plan
from ..compiler.survey import Survey
from ..errors import InvalidPlan, UnknownArchitecture
from ..runtime.links import DEFAULT_TOKENS
from ..runtime.sharding import is_replica_axis
from ..runtime.topology import resolve_node_size
from ..util.unit_text import amount
from .architecture import Architecture
from .decision import Candidate, Decision, Facts
from .describe import describe_survey
from .local_platform import PLATFORM_VARIABLE, LocalPlatform, find_local_platform
from .mesh_axes import STAGES, AxisUse, list_axis_uses
from .search import STATES, choose_way, estimate_entry
from .step_formulas import evaluate_memory

_POLICIES = ("h", "x")  # "all" keeps more than "h" and takes as long


def find_mesh_platform(mesh: Any, asked: Plan) -> LocalPlatform:
    """The platform of the ranks of a mesh; without one that of a GPU, if there is one."""
    if mesh is None:
        return find_local_platform("cuda" if torch.cuda.is_available() else "cpu", asked.node_size)
    return find_local_platform(mesh.device_type, resolve_node_size(asked.node_size, torch.distributed.get_world_size()))


def collect_facts(
    model: nn.Module, found: Survey, asked: Plan, here: LocalPlatform, example_inputs: Any = None, mesh: Any = None
) -> Facts:
    """Of this rank.

    Args:
        found: the blocks that will be rewritten.
        example_inputs: of the model, as the user gave them.
    """
    made: Architecture | str | None = None
    total, length, source = DEFAULT_TOKENS, DEFAULT_TOKENS, "for want of example inputs"
    try:
        if found.matched:
            made = describe_survey(model, found)
            if example_inputs is not None:
                total = _tokens_of_call(found, made.hidden_size)
                length, source = _length(example_inputs, total), "as in the example inputs"
    except UnknownArchitecture as error:
        made = str(error)
    if asked.tokens is not None:
        total, source = asked.tokens, "as planned"
        length = length if total % length == 0 else total
    if asked.memory is not None:
        here = dataclasses.replace(here, platform=dataclasses.replace(here.platform, capacity=float(asked.memory)))
    stage, stages = 0, 1
    if mesh is not None and STAGES in (mesh.mesh_dim_names or ()):
        axis = mesh.mesh_dim_names.index(STAGES)
        stage, stages = mesh.get_coordinate()[axis], mesh.mesh.shape[axis]
    return Facts(asked, made, total // length, length, source, here, stage, stages)


def decide(told: Mapping[int, Facts | str], own: int, mesh: Any = None, *, is_whole: bool = True) -> Decision:
    """By the facts of all ranks of a mesh, which all come to the same: the axes for all stages of a pipeline, and for
    each of them what is kept.

    Args:
        told: by rank; `own` is this one. A text is the error of a rank that cannot go on.
        mesh: None for one device.
        is_whole: see `axes.uses`.

    Raises:
        InvalidPlan: the mesh has no axis for experts, or they do not divide over any; or its ranks do not agree.
    """
    ranks = _agreeing(told)
    stages, asked = _merged(list(ranks.values())), ranks[own].asked
    own_stage = stages[ranks[own].stage]
    if unknown := next((of.model for of in stages.values() if isinstance(of.model, str)), ""):
        changes: dict[str, Any] = dict(checkpoint="h") if asked.checkpoint == "auto" else {}
        changes |= dict(expert_axis=None) if asked.expert_axis == "auto" else {}
        warning = f"the planner cannot make out this model, and takes what is taken without it: {unknown}"
        return Decision(asked.replace(**changes), own_stage, warning=warning)
    choices = [AxisUse()] if mesh is None else list_axis_uses(mesh, asked, is_whole=is_whole)
    if asked.expert_axis == "auto":
        choices = _without_replicas(choices)
    models = {stage: of.model for stage, of in stages.items() if isinstance(of.model, Architecture)}
    choices = _dividing(choices, models.values())
    use, tried = choices[0], {}
    for zero in (0, 1, 2, 3) if asked.zero is None else (asked.zero,):
        tried = {stage: _tried(choices, model, stages[stage], zero) for stage, model in models.items()}
        use = min(choices, key=lambda use: _slowest(use, tried))
        if not any(_slowest(use, tried)[:1]) or use.tp * use.dp == 1:
            break
    mine = sorted(tried.get(own_stage.stage, []), key=lambda t: t.rank)
    first = next((t for t in mine if t.use == use), None)
    shown = (first, *(t for t in mine if t is not first)) if first else ()
    warning = _warning(first, own_stage) if first and first.lacking > 0 else ""
    return Decision(_decided(use, first, own_stage), own_stage, shown, warning)


def _agreeing(told: Mapping[int, Facts | str]) -> dict[int, Facts]:
    """Ranks that do not decide alike would wait for each other."""
    found: dict[int, Facts] = {}
    for rank, of in sorted(told.items()):
        if isinstance(of, str):
            raise InvalidPlan(f"rank {rank} of the mesh cannot go on, {of}")
        found[rank] = of
    (first, mine), *others = ((rank, _must_be_alike(of)) for rank, of in found.items())
    for rank, theirs in others:
        if wrong := [
            f"{what}: rank {first} {mine[what]}, rank {rank} {theirs[what]}"
            for what in mine
            if mine[what] != theirs[what]
        ]:
            raise InvalidPlan(f"the ranks of the mesh do not agree on {'; '.join(wrong)}")
    return found


def _must_be_alike(of: Facts) -> dict[str, str]:
    fields = {f"Plan({name}=...)": repr(value) for name, value in dataclasses.asdict(of.asked).items()}
    return fields | {f"their platform, which {PLATFORM_VARIABLE} may name": of.here.platform.name}


def _merged(told: list[Facts]) -> dict[int, Facts]:
    """By stage, with the most tokens that a rank has, and the least memory."""
    most = max(told, key=lambda of: (of.sequences * of.tokens, of.tokens))
    least = min(of.here.platform.capacity for of in told)
    here = dataclasses.replace(told[0].here, platform=dataclasses.replace(told[0].here.platform, capacity=least))
    alike = dict(sequences=most.sequences, tokens=most.tokens, source=most.source, here=here)
    return {of.stage: dataclasses.replace(of, **alike) for of in reversed(told)}


def _without_replicas(choices: list[AxisUse]) -> list[AxisUse]:
    """Ranks along an axis that is named for replicas keep the same experts."""
    found = [use for use in choices if not any(map(is_replica_axis, use.expert_axis))]
    if not found:
        shown = "; ".join(map(str, choices))
        raise InvalidPlan(
            f"Plan(expert_axis='auto'): the mesh leaves {shown} to choose from, and an axis of that name holds "
            "replicas. Add an axis 'ep' to the mesh, or name the axis in Plan(expert_axis=...)"
        )
    return found


def _dividing(choices: list[AxisUse], models: Iterable[Architecture]) -> list[AxisUse]:
    numbers = sorted({model.num_experts for model in models})
    found = [use for use in choices if not any(number % use.ep for number in numbers)]
    if not found:
        experts = " and ".join(map(str, numbers))
        raise InvalidPlan(f"{experts} experts do not divide: " + "; ".join(map(str, choices)))
    return found


def _tried(choices: list[AxisUse], model: Architecture, of: Facts, zero: int) -> list[Candidate]:
    """At one stage. As many micro-batches are in flight as 1F1B has."""
    platform, asked, found = of.here.platform, of.asked, []
    for use in choices:
        first = use.experts_first(platform)
        for kept in _POLICIES if asked.checkpoint == "auto" else (asked.checkpoint,):
            layout = use.layout(
                zero=zero, kept=kept, sequences=of.sequences, tokens=of.tokens,
                microbatches=of.stages - of.stage, schedule="gpipe",
            )  # fmt: skip
            way = choose_way(model, layout, platform, first, asked.dispatch)
            entry = estimate_entry(model, dataclasses.replace(layout, way=way), platform, first)
            found.append(Candidate(use, entry, entry.memory["M_gpu"] - platform.capacity))
    return found


def _slowest(use: AxisUse, tried: Mapping[int, list[Candidate]]) -> tuple[float, ...]:
    """The best that each stage can do with it, of the stage that does worst."""
    return max((min(t.rank for t in each if t.use == use) for each in tried.values()), default=(0.0,))


def _decided(use: AxisUse, first: Candidate | None, of: Facts) -> Plan:
    axes: Any = use.expert_axis if len(use.expert_axis) > 1 else next(iter(use.expert_axis), None)
    # What was asked of the planner has no effect any more.
    changes: dict[str, Any] = dict(tokens=of.sequences * of.tokens, memory=None, zero=None)
    if of.asked.checkpoint == "auto":
        changes |= dict(checkpoint=first.entry.layout.kept if first else "h")
    if of.asked.expert_axis == "auto":
        changes |= dict(expert_axis=axes, sequence_axis=use.sequence_axis)
    return of.asked.replace(**changes)


def _warning(least: Candidate, of: Facts) -> str:
    assert isinstance(of.model, Architecture)
    layout, platform, taken = least.entry.layout, of.here.platform, least.entry.memory
    most = max(STATES, key=taken.__getitem__)
    again = evaluate_memory(of.model, dataclasses.replace(layout, recompute=True), platform)["M_gpu"]
    remedy = (
        "It fits where layers run again in the backward (torch.utils.checkpoint)"
        if again <= platform.capacity
        else "Take fewer tokens, more ranks or more memory"
    )
    return (
        f"nothing fits {amount(platform.capacity, 'B')} a rank with {of.tokens_text}. What lacks least is taken, "
        f"{least}: "
        f"{amount(taken['M_gpu'], 'B')}, of which {most} is {amount(taken[most], 'B')}. {remedy}"
    )


def _tokens_of_call(found: Survey, width: int) -> int:
    """That the first block was given for the example inputs."""
    call = found.matched[0].call
    leaves = [t for t in pytree.tree_leaves((call.args, call.kwargs)) if isinstance(t, torch.Tensor)]
    return max(
        next((t.numel() // width for t in leaves if t.is_floating_point() and width in t.shape), DEFAULT_TOKENS), 1
    )


def _length(example_inputs: Any, total: int) -> int:
    """Of a sequence, where an input shows how the tokens are arranged; else they are one."""
    leaves = [t for t in pytree.tree_leaves(example_inputs) if isinstance(t, torch.Tensor) and t.dim() > 1]
    return next((t.shape[1] for t in leaves if t.shape[0] * t.shape[1] == total), total)
