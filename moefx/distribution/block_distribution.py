"""Spread proven blocks over a mesh: assign experts to ranks, add collectives to graphs, and support training."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from .._plan import Plan
from .._version import __version__
from ..compiler.block_compiler import BlockRewrite
from ..compiler.survey_result import MatchedBlock, Refusal, Survey
from ..errors import InvalidInput, InvalidPlan, MoefxError, Refused
from ..ir.expert_placement import ExchangeRoutes, Placement, SharedTokens
from ..ir.ops.uneven_all_to_all import format_ranks, get_group
from ..passes.collectives import insert_collectives
from ..passes.exchange.routed_region import RoutedRegion
from ..passes.overlap import overlap_exchanges
from ..passes.pass_manager import PassManager
from ..passes.ssmb import shard_sequence
from ..runtime.block_forward import find_rewritten_blocks
from ..runtime.block_layout import BlockLayout
from ..runtime.ranks import gradient_clipping, state_dicts
from ..runtime.ranks.sharding import (
    ExpertParameters,
    copy_with_all_experts,
    find_owner_and_tensor,
    place_experts_in_order,
    resolve_expert_axes,
    select_mesh_axis,
    shard_experts,
)
from ..runtime.ranks.state_dicts import OnLoad, OnSave, join_name
from ..runtime.ranks.topology import ExpertAxis
from ..runtime.saved_routing import save_routing as save_routing
from ..util.user_code import forward_line
from .dispatch_choice import choose_routes
from .expert_storage import find_expert_parameters
from .pipelines.stage_state import find_stages


@dataclasses.dataclass(frozen=True)
class ExpertLayout:
    """The layout, over the expert axis of a mesh, of blocks that share a proof.

    Attributes:
        reason: why `routes` was chosen, which says how rows travel.
        number: identifies the blocks that share this layout, see `ir.ops.parameter_samples`.
    """

    placement: Placement
    routes: ExchangeRoutes
    reason: str
    sequence: SharedTokens | None
    parameters: ExpertParameters
    plan: Plan
    number: int = dataclasses.field(default_factory=itertools.count(1).__next__, compare=False)

    @classmethod
    def for_block(cls, axis: ExpertAxis, result: BlockRewrite, plan: Plan) -> ExpertLayout:
        """Lay out the experts of a rewritten block.

        Raises:
            InvalidPlan: the experts cannot be divided evenly over the ranks, or the ranks over nodes.
            Refused: the block stores its experts' parameters in a way that cannot be divided.
        """
        placement = place_experts_in_order(axis, RoutedRegion.of(result.graph).num_experts, result.graph.name)
        sequence = axis.find_shared_tokens(plan.sequence_axis, plan.sequence_gradients) if plan.sequence_axis else None
        routes, reason = choose_routes(axis, plan, result)
        routes = dataclasses.replace(routes, chunks=plan.chunks)
        return cls(placement, routes, reason, sequence, find_expert_parameters(result), plan)

    def add_collectives(self, block: nn.Module, result: BlockRewrite) -> BlockRewrite:
        """Extend the history of a rewritten block by the graph with collectives. The proof stays as it is."""
        steps: list[Any] = [functools.partial(shard_sequence, sequence=self.sequence)] if self.sequence else []
        steps.append(
            functools.partial(
                insert_collectives,
                placement=self.placement,
                routes=self.routes,
                stacked=self.parameters.stacked,
                trained=frozenset(name for name, p in block.named_parameters() if p.requires_grad),
                samples=self.number,
            )
        )
        steps.append(overlap_exchanges)
        history = PassManager(block).extend(result.history, steps, self.plan, level="fused")
        match = dataclasses.replace(result.match, without_tokens=True)
        return dataclasses.replace(result, match=match, history=history)

    def __str__(self) -> str:
        placement, levels = self.placement, " x ".join(map(str, self.routes.sizes))
        way = "halo" if self.routes.splits_intra_node else "rbd" if len(self.routes.levels) > 1 else "one exchange"
        rows = "one row for each of its " + ("ranks" if self.routes.dedup else "experts")
        parts = f", in {self.routes.chunks} parts" if self.routes.chunks > 1 else ""
        if self.routes.gathers:
            limit = self.routes.max_tokens
            agreement = f"at most {limit} tokens a rank" if limit else "the hosts agree on the number of tokens"
            return (
                f"experts over {placement.num_ranks} ranks of mesh axis {placement.axis!r}, "
                f"{placement.num_slots} each; every rank gathers the tokens of all ranks, {agreement} ({self.reason})"
            )
        return (
            f"experts over {placement.num_ranks} ranks of mesh axis {placement.axis!r} ({levels}), "
            f"{placement.num_slots} each; a token travels as {rows}, {way}{parts} ({self.reason})"
        )

    def keep_own_experts(self, block: nn.Module, axis: ExpertAxis) -> None:
        """Reduce a block's parameters to those of this rank's experts."""
        shard_experts(block, self.parameters, self.placement, axis.own, axis.made)
        block.register_load_state_dict_pre_hook(OnLoad(self.parameters, self.placement))
        if self.parameters.separate and self.placement.num_ranks > 1:
            block.register_state_dict_pre_hook(OnSave())

    def __deepcopy__(self, memo: dict[int, Any]) -> ExpertLayout:
        return self  # a value

    def __reduce__(self) -> Any:
        # In another process the names of process groups are unknown, or mean other groups.
        raise MoefxError(
            "a model that is spread over a mesh cannot be pickled: its programs run in process groups of these "
            "processes. Save moefx.full_state_dict(model), or its state dict with torch.distributed.checkpoint, and "
            "load that into a model that moefx.compile has spread anew"
        )

    def copy_with_all_experts(self, block: nn.Module) -> nn.Module:
        """Copy a block after `keep_own_experts`, for another proof."""
        return copy_with_all_experts(block, self.parameters, self.placement)


def planned_axis(mesh: DeviceMesh, plan: Plan) -> ExpertAxis:
    """Find the expert axis that a plan names.

    Raises:
        InvalidPlan: the mesh has no such axis.
    """
    if plan.sequence_axis is not None:
        select_mesh_axis(mesh, "sequence_axis", (plan.sequence_axis,))
    own = select_mesh_axis(mesh, "expert_axis", resolve_expert_axes(mesh, plan.expert_axis))
    _check_placement(own, plan)
    return ExpertAxis(mesh, own, plan.node_size, plan.topology_levels, plan.timeout)


def _check_placement(axis: DeviceMesh, plan: Plan) -> None:
    ranks = axis.mesh.tolist()
    neighbours = sorted(ranks) == list(range(min(ranks), min(ranks) + len(ranks)))
    if plan.placement is None or len(ranks) == 1 or neighbours == (plan.placement == "ep_first"):
        return
    raise InvalidPlan(
        f"Plan(placement={plan.placement!r}): an expert group of the mesh has the {format_ranks(ranks)}, which are "
        f"{'neighbours' if neighbours else 'no neighbours'}: put the expert axis "
        f"{'before' if neighbours else 'after'} the data-parallel axis of the mesh"
    )


def check_agreement(axis: ExpertAxis, plan: Plan, summary: str) -> None:
    """Check that all ranks of the axis will run the same exchanges: one round of a few bytes. Collective, also for a
    rank that failed.

    Args:
        summary: the blocks that will be rewritten, or the error of this rank.

    Raises:
        InvalidPlan: the ranks have different plans, or found different blocks.
    """
    own_facts = {
        **{f"Plan({field}=...)": repr(value) for field, value in dataclasses.asdict(plan).items()},
        "the versions of moefx and torch": f"{__version__}, {torch.__version__}",
        "the nodes of ranks": _describe_nodes(axis),
        "the rewritten blocks": summary,
    }
    gathered: list[Any] = [None] * axis.size
    dist.all_gather_object(gathered, own_facts, group=get_group(axis.group))
    wrong = []
    for what, mine in own_facts.items():
        others = {number: each.get(what) for number, each in enumerate(gathered) if each.get(what) != mine}
        if others:
            number, theirs = next(iter(others.items()))
            several = f" ({len(others)} of {axis.size} differ)" if len(others) > 1 else ""
            wrong.append(f"{what}: rank {axis.rank} of it {mine}, rank {number} {theirs}{several}")
    if wrong:
        raise InvalidPlan(f"the ranks of mesh axis {axis.name!r} do not agree on " + "; ".join(wrong))


def gather_by_rank(mesh: DeviceMesh, own_value: Any) -> dict[int, Any]:
    """Gather a value from all ranks of a mesh, one axis after the other. Returns values by world rank. Collective."""
    gathered = {dist.get_rank(): own_value}
    for dim in range(mesh.ndim):
        along_axis: list[Any] = [None] * mesh.size(dim)
        dist.all_gather_object(along_axis, gathered, group=mesh.get_group(dim))
        gathered = {rank: value for each in along_axis for rank, value in each.items()}
    return gathered


def _describe_nodes(axis: ExpertAxis) -> str:
    """Describe the nodes as this rank sees them: other ranks may have another LOCAL_WORLD_SIZE."""
    try:
        return f"{' x '.join(map(str, axis.topology.sizes))}, in the order {axis.topology.order}"
    except InvalidPlan as error:
        return f"none, {error}"


def lay_out_block(matched: MatchedBlock, axis: ExpertAxis, plan: Plan) -> MatchedBlock:
    """Return a match with the layout of its experts. Collective, as `ExpertLayout.for_block` is."""
    return dataclasses.replace(matched, expert_layout=ExpertLayout.for_block(axis, matched.result, plan))


def preview_layouts(model: nn.Module, axis: ExpertAxis, survey: Survey, plan: Plan) -> Survey:
    """Lay out and finish the blocks of a survey without changing the model. Collective, as `lay_out_block` is.

    Returns:
        The survey with the graphs that `compile` would install, and with blocks that cannot be spread among the
        refused.
    """
    laid_out, finished, refused = list[MatchedBlock](), list[MatchedBlock](), [*survey.refused]
    for matched in survey.matched:
        try:
            laid_out.append(lay_out_block(matched, axis, plan))
        except (Refused, InvalidPlan) as why:
            refused += _refuse_layout(model, matched, why)
    layouts = dataclasses.replace(survey, matched=tuple(laid_out)).layout_by_name
    for matched in laid_out:
        try:
            check_owners(model, layouts, matched.names, axis.mesh)
            finished.append(matched.finish(model.get_submodule(matched.names[0]), plan, keeps_captured=False))
        except (Refused, InvalidInput) as why:
            refused += _refuse_layout(model, matched, why)
    return dataclasses.replace(survey, matched=tuple(finished), refused=tuple(refused))


def _refuse_layout(model: nn.Module, matched: MatchedBlock, why: MoefxError) -> list[Refusal]:
    """Build the refusals of the modules of a match that cannot be spread."""
    refusal = why if isinstance(why, Refused) else Refused(str(why))
    source = refusal.source or forward_line(model.get_submodule(matched.names[0]))
    return [
        Refusal(name, refusal.reason, source, refusal.culprits, refusal.remedy, cause=refusal.cause)
        for name in matched.names
    ]


def check_owners(model: nn.Module, layouts: dict[str, BlockLayout], blocks: Sequence[str], mesh: DeviceMesh) -> None:
    """Check that the parameters that will be spread are on the mesh's kind of device or on meta, and belong to such
    blocks alone.

    Raises:
        InvalidInput: a parameter is on another device.
        Refused: another part of the model has one of these parameters, and could not use it any more.
    """
    inside: dict[int, str] = {}
    for block in blocks:
        parameters = layouts[block].parameters
        for name in (*parameters.stacked, *(name for each in parameters.separate for name in each)):
            _, parameter = find_owner_and_tensor(model.get_submodule(block), name)
            each, num_experts = parameters.stacked.get(name), layouts[block].placement.num_experts
            if each and len(parameter) != each * num_experts:
                raise Refused(
                    f"{join_name(block, name)} holds {len(parameter) // each} experts, "
                    f"{num_experts} of them in the block",
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


# ---------------------------------------------------------------------- public functions
def full_state_dict(model: nn.Module, *, cpu: bool = False, rank: int | None = None) -> dict[str, Any]:
    """Gather the original's state dict, experts of all ranks included. Collective: every rank calls it.

    Args:
        cpu: move each tensor to the CPU as soon as it is whole.
        rank: the global rank that receives the dict; others receive an empty one. None: every rank.

    Returns:
        A dict with the names, order and shapes of the original's `state_dict`, and whole tensors for DTensors.
    """
    found = {name: (s.parameters, s.placement, s.routes) for name, s in find_expert_layouts(model).items()}
    stages = find_stages(model)
    if stages is None:
        return state_dicts.full_state_dict(model, found, cpu=cpu, rank=rank)
    return stages.gather_state(state_dicts.full_state_dict(model, found, cpu=cpu), cpu=cpu, rank=rank)


def clip_grad_norm_(
    model: nn.Module, max_norm: float, norm_type: float = 2.0, *, error_if_nonfinite: bool = False
) -> Tensor:
    """Clip the gradients of a model whose parameters are spread over meshes of any kind (experts over the expert axis,
    FSDP), as `torch.nn.utils.clip_grad_norm_` does on one rank. Collective: every rank calls it.

    Args:
        norm_type: > 0, infinity too.

    Returns:
        The norm before clipping, of the gradients of the whole model: the same on all ranks if the gradients of
        replicated parameters are.

    Raises:
        RuntimeError: `error_if_nonfinite`, and the norm is not finite.
    """
    stages = find_stages(model)
    group = "" if stages is None else stages.group.group_name
    return gradient_clipping.clip_grad_norm_(model, own_experts(model), max_norm, norm_type, error_if_nonfinite, group)


def expert_parameter_names(model: nn.Module, *, buffers: bool = False) -> list[str]:
    """List the parameters that differ between the ranks of the expert axis: data parallelism over all ranks must leave
    them alone. `buffers`: also the experts' buffers, and every name of a tensor with several names."""
    stacked = [join_name(name, p) for name, s in find_expert_layouts(model).items() for p in s.parameters.stacked]
    differing = {*stacked, *own_experts(model)}
    more = [name for name, _ in model.named_buffers(remove_duplicate=False)] if buffers else []
    names = [name for name, _ in model.named_parameters(remove_duplicate=not buffers)]
    return [name for name in names + more if name in differing]


def own_experts(model: nn.Module) -> dict[str, str]:
    """Map each parameter of separate experts to the process group whose ranks have other experts."""
    return {
        join_name(name, parameter): s.placement.group
        for name, s in find_expert_layouts(model).items()
        for each in s.parameters.separate
        for parameter in each
    }


def find_expert_layouts(model: nn.Module) -> dict[str, BlockLayout]:
    """Find the blocks of a model whose experts are spread, by name."""
    found = {name: forward.expert_layout for name, forward in find_rewritten_blocks(model).items()}
    return {name: layout for name, layout in found.items() if layout is not None}
