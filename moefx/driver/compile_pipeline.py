"""All steps of `compile` in order, on one page: `prove_model` and `install_programs`.

| step of `compile_steps.COMPILE_STEPS` | call below | over a mesh |
|---|---|---|
| 1 survey, with 2 to 6 for each candidate: capture, match, rewrite_block, fuse, checkpoint | `survey_model` | - |
| - | `_survey_and_decide`, if the plan has "auto" | all ranks of the mesh take one decision |
| 7 numeric check | `check_blocks` | all ranks of the expert axis must find the same blocks |
| - | `_lay_out_experts` | decides which rank holds which experts |
| 8 limit, 9 ssmb, 10 collectives, 11 overlap | `MatchedBlock.finish` | 9 to 11 run over a mesh only |
| 12 lowering | `_install_program`; each call of the program lowers its ops | - |

Two other callers run steps 2 to 12 on one block each: `compiler.specialization`, for a kind of call that `compile` did
not see, and `frontends.fx.proof_cache`, for a region of a flat graph.

torch.distributed and the planner are imported on first use because they load slowly.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from .._plan import Plan
from ..compiler.block_checks import check_blocks
from ..compiler.block_compiler import rerun_from_checkpoint
from ..compiler.block_report import build_report
from ..compiler.program_builder import build_program
from ..compiler.specialization import LazySpecializer
from ..compiler.survey import survey_model
from ..compiler.survey_result import MatchedBlock, Survey
from ..inspection.explain import BlockReport
from ..ir.argument_binding import flatten_arguments, make_signature_binder
from ..ir.guards.attribute_reads import BLOCK_MODE, find_tied_tensors
from ..runtime.block_forward import install_forward
from ..runtime.program import Program
from ..util.module_names import quote_name

if TYPE_CHECKING:
    from ..planner.decision import Decision
    from ..runtime.ranks.topology import ExpertAxis


@dataclasses.dataclass(frozen=True)
class ModelProof:
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


@dataclasses.dataclass(frozen=True)
class Installation:
    """The programs of a model.

    Attributes:
        survey: the survey, with the layouts of experts over a mesh and with the blocks that cannot be laid out.
        reports: a report on each kind of block.
        gradients: the reductions of gradients over a mesh, a line for each group of parameters.
        failed_guards: a guard for each kind of block whose program does not run for the example's call.
    """

    survey: Survey
    reports: tuple[BlockReport, ...]
    gradients: tuple[str, ...] = ()
    failed_guards: dict[str, str] = dataclasses.field(default_factory=dict)


def prove_model(model: nn.Module, example_inputs: Any, plan: Plan, mesh: Any = None) -> ModelProof:
    """Run steps 1 to 7: prove, rewrite and check the blocks of a model, with the planner's decision. Over a mesh all
    ranks of the expert axis find the same blocks, or all raise; if the planner decides, all ranks of the mesh.
    Collective over a mesh.

    Raises:
        InvalidPlan: the mesh has no such axis, its ranks do not agree, or its pipeline has no stages.
        UnknownPlatform: see `planner.local_platform`.
    """
    survey, decision, axis = None, None, None
    if mesh is not None:
        from ..distribution.mesh_agreement import check_same_blocks, find_expert_axis
        from ..distribution.pipeline_stages import check_stages

        check_stages(model, mesh)
    if plan.is_undecided:
        survey, decision = _survey_and_decide(model, example_inputs, plan, mesh)  # steps 1 to 6
        plan = decision.plan
    if mesh is not None:
        axis = find_expert_axis(mesh, plan)
    try:
        survey = survey or survey_model(model, example_inputs, plan)  # steps 1 to 6
        survey = check_blocks(survey, plan)  # step 7
    except Exception as error:
        if axis is not None:
            check_same_blocks(axis, plan, f"none, {type(error).__name__}: {error}")
        raise
    if axis is not None:
        check_same_blocks(axis, plan, _summarize(survey))
    return ModelProof(plan, survey, axis, decision)


def install_programs(
    model: nn.Module, proven: ModelProof, compiled: nn.Module, copies: dict[nn.Module, nn.Module]
) -> Installation:
    """Run steps 8 to 12: finish all blocks, and install their programs. Collective over a mesh.

    Args:
        model: the original.
        compiled: its copy, which receives the programs.
        copies: the module of `compiled` for each module of `model`.

    Raises:
        InvalidPlan, InvalidInput, Refused: the experts of a block cannot be spread, or the capacity does not fit.
    """
    survey, plan = _lay_out_experts(model, proven), proven.plan
    reports, failed_guards = list[BlockReport](), dict[str, str]()
    for proven_block in survey.matched:
        block = model.get_submodule(proven_block.names[0])
        matched = proven_block.finish(block, plan)  # steps 8 to 11
        program = _install_program(model, copies, matched, plan, proven.axis)  # step 12
        if guard := _describe_failed_guard(program, matched, block):
            failed_guards[matched.names[0]] = guard
        reports.append(build_report(matched, program, block))
    if proven.axis is None:
        return Installation(survey, tuple(reports), (), failed_guards)
    from ..distribution.training_wiring import describe_reductions, prepare_training

    prepare_training(compiled, proven.axis, plan)
    gradients = describe_reductions(compiled, survey.layout_by_name, proven.axis, plan)
    return Installation(survey, tuple(reports), tuple(gradients), failed_guards)


def preview_programs(model: nn.Module, proven: ModelProof) -> Installation:
    """Finish all blocks, and build their programs without installing them. Collective over a mesh."""
    survey, plan, gradients = proven.survey, proven.plan, ()
    if proven.axis is None:
        finished = (m.finish(model.get_submodule(m.names[0]), plan, keeps_captured=False) for m in survey.matched)
        survey = dataclasses.replace(survey, matched=tuple(finished))
    else:
        from ..distribution.expert_layouts import preview_layouts
        from ..distribution.training_wiring import describe_reductions

        survey = preview_layouts(model, proven.axis, survey, plan)
        gradients = tuple(describe_reductions(model, survey.layout_by_name, proven.axis, plan))
    reports = []
    for matched in survey.matched:
        block = model.get_submodule(matched.names[0])
        reports.append(build_report(matched, _build_program(matched, block), block))
    return Installation(survey, tuple(reports), gradients)


def _survey_and_decide(model: nn.Module, example_inputs: Any, plan: Plan, mesh: Any) -> tuple[Survey, Decision]:
    """Survey a model and let the planner decide; all ranks of a mesh get the same decision. Collective over a mesh."""
    from ..planner.auto import collect_facts, decide, find_mesh_platform

    if mesh is not None:
        from ..distribution.mesh_agreement import gather_by_rank
    try:
        survey = survey_model(model, example_inputs, plan)
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
        dataclasses.replace(m, result=rerun_from_checkpoint(model.get_submodule(m.names[0]), m.result, decision.plan))
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


def _lay_out_experts(model: nn.Module, proven: ModelProof) -> Survey:
    """Return the survey with the layout of each block's experts over the mesh, if there is one.

    Raises:
        InvalidPlan, InvalidInput, Refused: the experts of a block cannot be spread.
    """
    if proven.axis is None:
        return proven.survey
    from ..distribution.expert_layouts import check_owners, lay_out_block, share_stash

    laid_out = [lay_out_block(m, proven.axis, proven.plan) for m in proven.survey.matched]
    matched = share_stash(laid_out, proven.axis, proven.plan)
    survey = dataclasses.replace(proven.survey, matched=matched)
    layouts = survey.layout_by_name
    check_owners(model, layouts, list(layouts), proven.axis.mesh)
    return survey


def _install_program(
    model: nn.Module,
    copies: dict[nn.Module, nn.Module],
    matched: MatchedBlock,
    plan: Plan,
    axis: ExpertAxis | None,
) -> Program:
    """Build the program of a finished match, and install it on the copies of the matched modules."""
    modules, layout = dict(model.named_modules()), matched.expert_layout
    if layout is not None and axis is not None:
        from ..distribution.expert_layouts import spread_experts

        for name in matched.names:
            spread_experts(copies[modules[name]], layout, axis)
    program = _build_program(matched, modules[matched.names[0]])
    specialize = LazySpecializer(matched.result.match.arguments, plan, BLOCK_MODE in matched.attributes_read)
    for name in matched.names:
        block, watch = copies[modules[name]], None
        if layout is not None:
            from ..distribution.training_wiring import watch_block

            watch = watch_block(block, name, layout)
        own_program = program.renamed(name)
        install_forward(block, [own_program], name=name, specialize=specialize, expert_layout=layout, watch=watch)
    return program


def _build_program(matched: MatchedBlock, block: nn.Module) -> Program:
    call = matched.call
    return build_program(
        block,
        matched.result,
        call.args,
        call.kwargs,
        attributes_read=matched.attributes_read,
        tied=find_tied_tensors(block),
    )


def _describe_failed_guard(program: Program, matched: MatchedBlock, block: nn.Module) -> str:
    """Return the first guard of a program that the example's own call fails, in words; "" if it fails none."""
    named = make_signature_binder(block)(*matched.call.args, **matched.call.kwargs)
    guard = program.find_failed_guard(block, flatten_arguments(named, program.objects))
    return "" if guard is None else str(guard)
