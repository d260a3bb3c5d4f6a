"""Prove a model for `compile`: survey and check it, let the planner decide, and make all ranks of a mesh agree.

torch.distributed and the planner are imported on first use because they load slowly.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from .._plan import Plan
from ..capture.environment.worker_thread import run_proof
from ..compiler.block_compiler import reapply_checkpoint
from ..compiler.checked_survey import survey_and_check
from ..compiler.survey import survey_model
from ..compiler.survey_result import Survey
from ..ir.argument_binding import find_device
from ..util.module_names import quote_name

if TYPE_CHECKING:
    from ..planner.decision import Decision
    from ..runtime.ranks.topology import ExpertAxis


@dataclasses.dataclass(frozen=True)
class AgreedProof:
    """The proof of a model that all ranks agree on.

    Attributes:
        plan: the plan, with the planner's decision in it.
        survey: the survey.
        axis: the mesh axis of the experts, None without a mesh.
        decision: the planner's decision, None if the plan leaves nothing to it.
    """

    plan: Plan
    survey: Survey
    axis: ExpertAxis | None = None
    decision: Decision | None = None


def prove_model(model: nn.Module, example_inputs: Any, plan: Plan, mesh: Any = None) -> AgreedProof:
    """Prove the blocks of a model, with the planner's decision. Over a mesh all ranks of the expert axis find the same
    blocks, or all raise; if the planner decides, all ranks of the mesh. Collective over a mesh.

    Raises:
        InvalidPlan: the mesh has no such axis, its ranks do not agree, or its pipeline has no stages.
        UnknownPlatform: see `planner.local_platform`.
    """
    survey, decision, axis = None, None, None
    if mesh is not None:
        from ..distribution.pipeline_stages import check_stages

        check_stages(model, mesh)
    if plan.is_undecided:
        survey, decision = _survey_and_decide(model, example_inputs, plan, mesh)
        plan = decision.plan
    if mesh is None:
        return AgreedProof(plan, survey_and_check(model, example_inputs, plan, survey), None, decision)
    from ..distribution.mesh_agreement import check_agreement, find_expert_axis

    axis = find_expert_axis(mesh, plan)
    try:
        survey = survey_and_check(model, example_inputs, plan, survey)
    except Exception as error:
        check_agreement(axis, plan, f"none, {type(error).__name__}: {error}")
        raise
    check_agreement(axis, plan, _summarize(survey))
    return AgreedProof(plan, survey, axis, decision)


def _survey_and_decide(model: nn.Module, example_inputs: Any, plan: Plan, mesh: Any) -> tuple[Survey, Decision]:
    """Survey a model and let the planner decide; all ranks of a mesh get the same decision. Collective over a mesh."""
    from ..planner.auto import collect_facts, decide, find_mesh_platform

    if mesh is not None:
        from ..distribution.mesh_agreement import gather_by_rank
    try:
        survey = run_proof(lambda: survey_model(model, example_inputs, plan), find_device(model).type)
        facts = collect_facts(model, survey, plan, find_mesh_platform(mesh, plan), example_inputs, mesh)
    except Exception as error:
        if mesh is not None:
            gather_by_rank(mesh, f"{type(error).__name__}: {error}")
        raise
    if mesh is None:
        decision = decide({0: facts}, 0)
    else:
        world = torch.distributed
        is_whole = mesh.size() == world.get_world_size()
        decision = decide(gather_by_rank(mesh, facts), world.get_rank(), mesh, is_whole=is_whole)
    matched = tuple(
        dataclasses.replace(m, result=reapply_checkpoint(model.get_submodule(m.names[0]), m.result, decision.plan))
        for m in survey.matched
    )
    return dataclasses.replace(survey, matched=matched), decision


def _summarize(survey: Survey) -> str:
    """List the rewrites in one line. Ranks that do not agree on them would wait for each other."""
    lines = []
    for matched in survey.matched:
        match, names = matched.result.match, ", ".join(map(quote_name, matched.names))
        lines.append(f"{names} ({match.num_experts} experts, {match.slots} a token)")
    return "; ".join(lines) or "none"
