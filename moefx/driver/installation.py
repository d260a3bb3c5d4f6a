"""Install the programs of a proven model: lay out experts over ranks, finish graphs, and replace forwards."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from torch import nn

from .._plan import Plan
from ..compiler.block_report import build_report
from ..compiler.program_builder import build_program
from ..compiler.specialization import LazySpecializer
from ..compiler.survey_result import MatchedBlock, Survey
from ..inspection.explain import BlockReport
from ..ir.argument_binding import flatten_arguments, make_signature_binder
from ..ir.guards.attribute_reads import BLOCK_MODE, find_tied_tensors
from ..runtime.block_forward import install_forward
from ..runtime.program import Program
from .agreed_proof import AgreedProof

if TYPE_CHECKING:
    from ..runtime.ranks.topology import ExpertAxis


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


def install_programs(
    model: nn.Module, proven: AgreedProof, compiled: nn.Module, copies: dict[nn.Module, nn.Module]
) -> Installation:
    """Finish all blocks, and install their programs. Collective over a mesh.

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
        matched = proven_block.finish(block, plan)
        program = _install_program(model, copies, matched, plan, proven.axis)
        if guard := _find_failed_guard(program, matched, block):
            failed_guards[matched.names[0]] = guard
        reports.append(build_report(matched, program, block))
    if proven.axis is None:
        return Installation(survey, tuple(reports), (), failed_guards)
    from ..distribution.training_wiring import describe_reductions, prepare_training

    prepare_training(compiled, proven.axis, plan)
    gradients = describe_reductions(compiled, survey.layout_by_name, proven.axis, plan)
    return Installation(survey, tuple(reports), tuple(gradients), failed_guards)


def preview_programs(model: nn.Module, proven: AgreedProof) -> Installation:
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


def _lay_out_experts(model: nn.Module, proven: AgreedProof) -> Survey:
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


def _find_failed_guard(program: Program, matched: MatchedBlock, block: nn.Module) -> str:
    """Return the first guard of a program that the example's own call fails, or ""."""
    named = make_signature_binder(block)(*matched.call.args, **matched.call.kwargs)
    index = program.find_failed_guard(block, flatten_arguments(named, program.objects))
    return "" if index < 0 else str(program.guards[index])
