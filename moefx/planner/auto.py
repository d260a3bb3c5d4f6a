"""Decide the fields that `compile(plan="auto")` or `Plan(checkpoint="auto")` leaves open: the fastest choice that fits.

Times and memory come from the planner's sheets.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import nn

from .._plan import Plan
from ..compiler.survey_result import Survey
from ..errors import InvalidPlan, UnknownArchitecture
from ..runtime.ranks.link_costs import DEFAULT_TOKENS
from ..runtime.ranks.sharding import PIPELINE_AXIS, is_replica_axis
from ..runtime.ranks.topology import resolve_node_size
from ..util.module_names import quote_name
from ..util.unit_text import amount
from .architecture import Architecture
from .decision import Candidate, Decision, Facts
from .describe import describe_survey
from .local_platform import PLATFORM_VARIABLE, LocalPlatform, find_local_platform
from .mesh_axes import AxisUse, list_axis_uses
from .search import MEMORY_TERMS, choose_layout_dispatch, estimate_entry
from .step_formulas import evaluate_memory

_POLICIES = ("h", "x")  # "all" keeps more than "h" and takes as long


def find_mesh_platform(mesh: Any, plan: Plan) -> LocalPlatform:
    """Return the platform of a mesh's ranks. Without a mesh: of the current GPU, or of the CPU."""
    if mesh is None:
        return find_local_platform("cuda" if torch.cuda.is_available() else "cpu", plan.node_size)
    return find_local_platform(mesh.device_type, resolve_node_size(plan.node_size, torch.distributed.get_world_size()))


def collect_facts(
    model: nn.Module, survey: Survey, plan: Plan, local: LocalPlatform, example_inputs: Any = None, mesh: Any = None
) -> Facts:
    """Collect the facts that this rank contributes to the decision.

    Args:
        survey: the blocks that will be rewritten.
        example_inputs: the user's example inputs of the model.
    """
    architecture: Architecture | str | None = None
    total, length, source = DEFAULT_TOKENS, DEFAULT_TOKENS, "by default, without example inputs"
    try:
        if survey.matched:
            architecture = describe_survey(model, survey)
            if example_inputs is not None:
                width = architecture.hidden_size
                if (counted := _count_call_tokens(survey, width)) is None:
                    source = f"by default: no input of {quote_name(survey.matched[0].names[0])} has an axis of {width}"
                else:
                    total, source = counted, "as in the example inputs"
                    length = _find_sequence_length(example_inputs, total)
    except UnknownArchitecture as error:
        architecture = str(error)
    if plan.tokens is not None:
        total, source = plan.tokens, "as planned"
        length = length if total % length == 0 else total
    if plan.memory is not None:
        local = dataclasses.replace(
            local, platform=dataclasses.replace(local.platform, memory_bytes=float(plan.memory))
        )
    stage, stages = 0, 1
    if mesh is not None and PIPELINE_AXIS in (mesh.mesh_dim_names or ()):
        axis = mesh.mesh_dim_names.index(PIPELINE_AXIS)
        stage, stages = mesh.get_coordinate()[axis], mesh.mesh.shape[axis]
    return Facts(plan, architecture, total // length, length, source, local, stage, stages)


def decide(
    facts_by_rank: Mapping[int, Facts | str], own_rank: int, mesh: Any = None, *, is_whole: bool = True
) -> Decision:
    """Decide for this rank by the facts of all ranks, so that all ranks decide alike.

    All stages of a pipeline share the expert axes. Each stage has its own checkpoint policy.

    Args:
        facts_by_rank: the facts of each rank, or the error of a rank that failed.
        own_rank: this rank.
        mesh: None for one device.
        is_whole: see `mesh_axes.list_axis_uses`.

    Raises:
        InvalidPlan: the mesh has no axis for experts, no axis divides the experts, or the ranks disagree.
    """
    ranks = _check_agreement(facts_by_rank)
    stages, wanted = _merge_by_stage(list(ranks.values())), ranks[own_rank].user_plan
    own_stage = stages[ranks[own_rank].stage]
    if unknown := next((facts.model for facts in stages.values() if isinstance(facts.model, str)), ""):
        changes: dict[str, Any] = dict(checkpoint="h") if wanted.checkpoint == "auto" else {}
        changes |= dict(expert_axis=None) if wanted.expert_axis == "auto" else {}
        warning = f"the planner cannot read this model and uses the defaults: {unknown}"
        return Decision(wanted.replace(**changes), own_stage, warning=warning)
    choices = [AxisUse()] if mesh is None else list_axis_uses(mesh, wanted, is_whole=is_whole)
    if wanted.expert_axis == "auto":
        choices = _drop_replica_axes(choices)
    models = {stage: facts.model for stage, facts in stages.items() if isinstance(facts.model, Architecture)}
    choices = _drop_uneven(choices, models.values())
    use, candidates = choices[0], {}
    for zero in (0, 1, 2, 3) if wanted.zero is None else (wanted.zero,):
        candidates = {
            stage: _estimate_candidates(choices, model, stages[stage], zero) for stage, model in models.items()
        }
        use = min(choices, key=lambda use: _compute_sort_key(use, candidates))
        if not any(_compute_sort_key(use, candidates)[:1]) or use.tp * use.dp == 1:
            break
    own = sorted(candidates.get(own_stage.stage, []), key=lambda candidate: candidate.sort_key)
    first = next((candidate for candidate in own if candidate.use == use), None)
    shown = (first, *(candidate for candidate in own if candidate is not first)) if first else ()
    warning = _format_shortage_warning(first, own_stage) if first and first.lacking > 0 else ""
    return Decision(_build_plan(use, shown, own_stage), own_stage, shown, warning)


def _check_agreement(facts_by_rank: Mapping[int, Facts | str]) -> dict[int, Facts]:
    """Return the facts of all ranks, if their plans and platforms agree: ranks that decide differently would deadlock.

    Raises:
        InvalidPlan: a rank failed, or two ranks differ.
    """
    by_rank: dict[int, Facts] = {}
    for rank, facts in sorted(facts_by_rank.items()):
        if isinstance(facts, str):
            raise InvalidPlan(f"rank {rank} of the mesh failed before the decision: {facts}")
        by_rank[rank] = facts
    (first, expected), *others = ((rank, _list_agreement_fields(facts)) for rank, facts in by_rank.items())
    for rank, theirs in others:
        if wrong := [
            f"{field}: rank {first} {expected[field]}, rank {rank} {theirs[field]}"
            for field in expected
            if expected[field] != theirs[field]
        ]:
            raise InvalidPlan(f"the ranks of the mesh do not agree on {'; '.join(wrong)}")
    return by_rank


def _list_agreement_fields(facts: Facts) -> dict[str, str]:
    fields = {f"Plan({name}=...)": repr(value) for name, value in dataclasses.asdict(facts.user_plan).items()}
    return fields | {f"their platform (set by {PLATFORM_VARIABLE})": facts.local.platform.name}


def _merge_by_stage(all_facts: list[Facts]) -> dict[int, Facts]:
    """Return the facts of each stage, with the most tokens and the least memory of any rank."""
    most = max(all_facts, key=lambda facts: (facts.sequences * facts.tokens, facts.tokens))
    least = min(facts.local.platform.memory_bytes for facts in all_facts)
    local = all_facts[0].local
    local = dataclasses.replace(local, platform=dataclasses.replace(local.platform, memory_bytes=least))
    alike = dict(sequences=most.sequences, tokens=most.tokens, source=most.source, local=local)
    return {facts.stage: dataclasses.replace(facts, **alike) for facts in reversed(all_facts)}


def _drop_replica_axes(choices: list[AxisUse]) -> list[AxisUse]:
    """Drop the uses that spread experts over an axis named for replicas: its ranks keep the same experts.

    Raises:
        InvalidPlan: no use is left.
    """
    kept = [use for use in choices if not any(map(is_replica_axis, use.expert_axis))]
    if not kept:
        shown = "; ".join(map(str, choices))
        raise InvalidPlan(
            f"Plan(expert_axis='auto'): the mesh leaves {shown} to choose from, and an axis of that name holds "
            "replicas. Add an axis 'ep' to the mesh, or name the axis in Plan(expert_axis=...)"
        )
    return kept


def _drop_uneven(choices: list[AxisUse], models: Iterable[Architecture]) -> list[AxisUse]:
    """Drop the uses whose ranks do not divide the experts of every stage.

    Raises:
        InvalidPlan: no use is left.
    """
    numbers = sorted({model.num_experts for model in models})
    kept = [use for use in choices if not any(number % use.ep for number in numbers)]
    if not kept:
        experts = " and ".join(map(str, numbers))
        raise InvalidPlan(f"{experts} experts do not divide: " + "; ".join(map(str, choices)))
    return kept


def _estimate_candidates(choices: list[AxisUse], model: Architecture, facts: Facts, zero: int) -> list[Candidate]:
    """Estimate every use and policy at one stage, with as many micro-batches in flight as under 1F1B."""
    platform, wanted, candidates = facts.local.platform, facts.user_plan, []
    for use in choices:
        first = use.experts_first(platform)
        for kept in _POLICIES if wanted.checkpoint == "auto" else (wanted.checkpoint,):
            layout = use.layout(
                zero=zero, kept=kept, sequences=facts.sequences, tokens=facts.tokens,
                microbatches=facts.stages - facts.stage, schedule="gpipe",
            )  # fmt: skip
            dispatch = choose_layout_dispatch(model, layout, platform, first, wanted.dispatch)
            entry = estimate_entry(model, dataclasses.replace(layout, dispatch=dispatch), platform, first)
            candidates.append(Candidate(use, entry, entry.memory["M_gpu"] - platform.memory_bytes))
    return candidates


def _compute_sort_key(use: AxisUse, candidates: Mapping[int, list[Candidate]]) -> tuple[float, ...]:
    """Return the sort key of an axis use: that of its slowest stage, each with its best candidate."""
    best = (
        min(candidate.sort_key for candidate in of_stage if candidate.use == use) for of_stage in candidates.values()
    )
    return max(best, default=(0.0,))


def _build_plan(use: AxisUse, candidates: Sequence[Candidate], facts: Facts) -> Plan:
    first = next(iter(candidates), None)
    axes: Any = use.expert_axis if len(use.expert_axis) > 1 else next(iter(use.expert_axis), None)
    # These fields told the planner what to assume; they have no effect now.
    changes: dict[str, Any] = dict(tokens=facts.sequences * facts.tokens, memory=None, zero=None)
    if facts.user_plan.checkpoint == "auto":
        changes |= dict(checkpoint=first.entry.layout.kept if first else "h")
    if facts.user_plan.expert_axis == "auto":
        changes |= dict(expert_axis=axes, sequence_axis=use.sequence_axis)
    if facts.user_plan.dispatch == "auto" and first and use.ep > 1 and not _has_room_to_gather(first, facts):
        changes |= dict(dispatch=first.entry.layout.dispatch)
    return facts.user_plan.replace(**changes)


def _has_room_to_gather(chosen: Candidate, facts: Facts) -> bool:
    """Return whether the chosen candidate also fits with "gather": `compile` may choose it by measured links.

    Over several levels `compile` does not choose it: True.
    """
    assert isinstance(facts.model, Architecture)
    layout, platform = chosen.entry.layout, facts.local.platform
    if len(platform.list_levels(layout.ep, 1 if chosen.entry.experts_first else layout.expert_replicas)[0]) > 1:
        return True
    return (
        evaluate_memory(facts.model, dataclasses.replace(layout, dispatch="gather"), platform)["M_gpu"]
        <= platform.memory_bytes
    )


def _format_shortage_warning(least: Candidate, facts: Facts) -> str:
    assert isinstance(facts.model, Architecture)
    layout, platform, memory = least.entry.layout, facts.local.platform, least.entry.memory
    most = max(MEMORY_TERMS, key=memory.__getitem__)
    again = evaluate_memory(facts.model, dataclasses.replace(layout, recompute=True), platform)["M_gpu"]
    remedy = (
        "It fits if layers run again in the backward (torch.utils.checkpoint)"
        if again <= platform.memory_bytes
        else "Take fewer tokens, more ranks or more memory"
    )
    return (
        f"nothing fits {amount(platform.memory_bytes, 'B')} a rank with {facts.tokens_text}. The choice is the "
        f"layout that needs the least additional memory, {least}: {amount(memory['M_gpu'], 'B')}. The largest part "
        f"{most} is {amount(memory[most], 'B')}. {remedy}"
    )


def _count_call_tokens(survey: Survey, width: int) -> int | None:
    """Count the tokens in the first block's call, for the example inputs. None if no input has an axis of `width`."""
    call = survey.matched[0].call
    leaves = [t for t in pytree.tree_leaves((call.args, call.kwargs)) if isinstance(t, torch.Tensor)]
    counts = (max(t.numel() // width, 1) for t in leaves if t.is_floating_point() and width in t.shape)
    return next(counts, None)


def _find_sequence_length(example_inputs: Any, total: int) -> int:
    """Find the tokens of a sequence, if an input [batch, length] has `total` tokens. Otherwise all tokens are one
    sequence."""
    leaves = [t for t in pytree.tree_leaves(example_inputs) if isinstance(t, torch.Tensor) and t.dim() > 1]
    return next((t.shape[1] for t in leaves if t.shape[0] * t.shape[1] == total), total)
