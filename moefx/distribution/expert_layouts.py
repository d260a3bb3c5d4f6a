"""Lay out the experts of proven blocks over a mesh, check that they can be spread, and spread them."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from .._plan import Plan
from ..compiler.block_compiler import BlockRewrite
from ..compiler.survey_result import MatchedBlock, Refusal, Survey
from ..errors import InvalidInput, InvalidPlan, MoefxError, Refused
from ..ir.expressions.expert_body import find_up_widths
from ..passes.exchange.routed_region import RoutedRegion
from ..runtime.block_forward import find_rewritten_blocks
from ..runtime.ranks.expert_layout import ExpertLayout
from ..runtime.ranks.sharding import find_owner_and_tensor, place_experts_in_order, shard_experts
from ..runtime.ranks.state_dicts import KeepLocalExperts, RefuseTorchFullStateDict, join_name
from ..runtime.ranks.topology import ExpertAxis
from ..util.user_code import forward_line
from .dispatch_choice import choose_routes
from .expert_storage import find_expert_parameters

ops = torch.ops.moefx


def create_layout(axis: ExpertAxis, result: BlockRewrite, plan: Plan) -> ExpertLayout:
    """Lay out the experts of a rewritten block. Collective over the axis.

    Raises:
        InvalidPlan: the experts cannot be divided evenly over the ranks, or the ranks over nodes.
        Refused: the block stores its experts' parameters in a way that cannot be divided.
    """
    placement = place_experts_in_order(axis, RoutedRegion.of(result.graph).num_experts, result.graph.name)
    sequence = axis.find_shared_tokens(plan.sequence_axis, plan.sequence_gradients) if plan.sequence_axis else None
    routes, reason = choose_routes(axis, plan, result)
    routes = dataclasses.replace(routes, chunks=plan.chunks)
    return ExpertLayout(placement, routes, reason, sequence, find_expert_parameters(result))


def lay_out_block(matched: MatchedBlock, axis: ExpertAxis, plan: Plan) -> MatchedBlock:
    """Return a match with the layout of its experts. Collective, as `create_layout` is."""
    return dataclasses.replace(matched, expert_layout=create_layout(axis, matched.result, plan))


def share_stash(matched: Sequence[MatchedBlock], axis: ExpertAxis, plan: Plan) -> tuple[MatchedBlock, ...]:
    """Set the size of the stash that all blocks with "gather" share, on GPUs."""
    factor = plan.resolve_stash_factor(axis.size)
    if factor is None or not has_stash(axis):
        return tuple(matched)
    gathering = [m for m in matched if m.expert_layout is not None and m.expert_layout.routes.gathers]
    widths = {m.names: tuple(map(find_up_widths, m.result.graph.find(ops.expert_mlp.default))) for m in gathering}
    num_blocks = Counter[tuple[tuple[int, ...], ...]]()  # each width of rows has its own stash
    for names, widths_of_block in widths.items():
        num_blocks[widths_of_block] += len(names)
    blocks = []
    for block in matched:
        if (layout := block.expert_layout) is not None and block.names in widths:
            routes = dataclasses.replace(layout.routes, stash_layers=factor * num_blocks[widths[block.names]])
            block = dataclasses.replace(block, expert_layout=dataclasses.replace(layout, routes=routes))
        blocks.append(block)
    return tuple(blocks)


def has_stash(axis: ExpertAxis) -> bool:
    """Return whether kernels put activations into a stash, as on GPUs. On a CPU each call knows its number of rows."""
    return axis.mesh.device_type != "cpu"


def spread_experts(block: nn.Module, layout: ExpertLayout, axis: ExpertAxis) -> None:
    """Reduce a block's parameters to the local experts' parameters, and convert its state dicts."""
    shard_experts(block, layout.parameters, layout.placement, axis.axis_mesh, axis.sharded_parameters)
    block.register_load_state_dict_pre_hook(KeepLocalExperts(layout.parameters, layout.placement))
    if layout.parameters.separate and layout.placement.num_ranks > 1:
        block.register_state_dict_pre_hook(RefuseTorchFullStateDict())


def preview_layouts(model: nn.Module, axis: ExpertAxis, survey: Survey, plan: Plan) -> Survey:
    """Lay out and finish the blocks of a survey without changing the model. Collective, as `lay_out_block` is.

    Returns:
        The survey with the graphs that `compile` would install, and with blocks that cannot be spread among the
        refused.
    """
    laid_out, finished_blocks, refusals = list[MatchedBlock](), list[MatchedBlock](), [*survey.refused]
    for matched in survey.matched:
        try:
            laid_out.append(lay_out_block(matched, axis, plan))
        except (Refused, InvalidPlan) as error:
            refusals += _refuse_layout(model, matched, error)
    laid_out = [*share_stash(laid_out, axis, plan)]
    layouts = dataclasses.replace(survey, matched=tuple(laid_out)).layout_by_name
    for matched in laid_out:
        try:
            check_owners(model, layouts, matched.names, axis.mesh)
            finished_blocks.append(matched.finish(model.get_submodule(matched.names[0]), plan, keeps_captured=False))
        except (Refused, InvalidInput) as error:
            refusals += _refuse_layout(model, matched, error)
    return dataclasses.replace(survey, matched=tuple(finished_blocks), refused=tuple(refusals))


def _refuse_layout(model: nn.Module, matched: MatchedBlock, error: MoefxError) -> list[Refusal]:
    """Build the refusals of the modules of a match that cannot be spread."""
    refusal = error if isinstance(error, Refused) else Refused(str(error))
    source = refusal.source or forward_line(model.get_submodule(matched.names[0]))
    return [
        Refusal(name, refusal.reason, source, refusal.culprits, refusal.remedy, cause=refusal.cause)
        for name in matched.names
    ]


def check_owners(model: nn.Module, layouts: dict[str, ExpertLayout], blocks: Sequence[str], mesh: DeviceMesh) -> None:
    """Check that the parameters that will be spread are on the mesh's kind of device or on meta, and belong to such
    blocks alone.

    Raises:
        InvalidInput: a parameter is on another device.
        Refused: another part of the model has one of these parameters, and could not use it any more.
    """
    inside: dict[int, str] = {}
    for block in blocks:
        parameters = layouts[block].parameters
        for name in (
            *parameters.stacked,
            *(name for names in parameters.separate for name in names),
        ):
            _, parameter = find_owner_and_tensor(model.get_submodule(block), name)
            rows_per_expert, num_experts = parameters.stacked.get(name), layouts[block].placement.num_experts
            if rows_per_expert and len(parameter) != rows_per_expert * num_experts:
                raise Refused(
                    f"{join_name(block, name)} holds {len(parameter) // rows_per_expert} experts, "
                    f"but the block uses {num_experts}",
                    remedy="keep those that are spread over the mesh in a parameter of their own",
                )
            if parameter.device.type not in (mesh.device_type, "meta"):
                raise InvalidInput(
                    f"{join_name(block, name)} is on {parameter.device}, the mesh is of {mesh.device_type}: "
                    f"model.to({mesh.device_type!r}) first, or make the model on the meta device"
                )
            inside[id(parameter)] = join_name(block, name)
    prefixes = tuple(f"{block}." * bool(block) for block in layouts)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if id(parameter) in inside and not name.startswith(prefixes):
            raise Refused(
                f"{name} is the parameter {inside[id(parameter)]} of an expert, which would live on one rank only",
                remedy="use experts in their block alone",
            )


def find_expert_layouts(model: nn.Module) -> dict[str, ExpertLayout]:
    """Find the blocks of a model whose experts are spread, by name."""
    layouts = {name: forward.expert_layout for name, forward in find_rewritten_blocks(model).items()}
    return {name: layout for name, layout in layouts.items() if layout is not None}
