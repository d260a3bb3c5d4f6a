"""Run an entry of a ranking: make its mesh, check the model, and pass all that the entry says to `pipeline`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, get_args

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from .._plan import Checkpoint, Plan
from ..distribution.mesh_agreement import raise_on_all_ranks
from ..errors import InvalidInput, InvalidPlan, MoefxError
from ..planner.architecture import Architecture
from ..planner.entries import Entry
from ..planner.layout import CHECKPOINT_POLICIES
from ..planner.platforms import Platform
from ..planner.stage_times import find_max_layers
from ..runtime.ranks.sharding import PIPELINE_AXIS
from ..runtime.ranks.topology import resolve_node_size
from .pipeline_model import Pipeline
from .pipeline_parallelism import pipeline
from .stage_planning import PlannerSurvey, cut_by_predicted_time, survey_for_planner
from .stage_split import find_layer_keys

if TYPE_CHECKING:
    from ..ranking import Ranking

_SIZES = (
    "hidden_size", "num_layers", "num_moe_layers", "num_experts", "top_k", "expert_size", "matrices", "shared_size",
    "dense_size", "vocab_size",
)  # fmt: skip
_HEADS = ("num_heads", "num_kv_heads", "head_size", "value_size", "query_rank", "kv_rank")
_REPLICATE = (
    '. Or keep them whole on each rank of "tp" with build(..., replicate_dense=True): SSMB runs as planned, and '
    "the dense part takes the memory and time of TP = 1"
)


@dataclasses.dataclass(frozen=True)
class EntryArguments:
    """The arguments with which an entry runs.

    Attributes:
        axes: the axes of the mesh, with the pipeline axis, also of one stage.
        plan: the plan of each stage.
        options: further arguments of `pipeline`.
        batch: sequences of a rank in a step, and tokens of a sequence.
    """

    axes: dict[str, int]
    plan: Plan
    options: dict[str, Any]
    batch: tuple[int, int]


def read_entry(entry: Entry, *, replicate_dense: bool = False, **fields: Any) -> EntryArguments:
    """Return the arguments with which an entry runs. Each field of the entry and of its layout decides some of them.

    Args:
        replicate_dense, fields: see `Ranking.build`.

    Raises:
        InvalidPlan: moefx cannot run a field of the entry, or `fields` are no fields of a plan.
    """
    x = entry.layout
    if x.kept not in get_args(Checkpoint):
        source = CHECKPOINT_POLICIES[x.kept].source
        raise InvalidPlan(f"the entry keeps what {x.kept!r} keeps ({source}), moefx keeps 'h', 'x' or 'all'")
    if replicate_dense and not x.ssmb:
        raise InvalidPlan("build(replicate_dense=True) has no effect: the entry shares no tokens by SSMB")
    if x.tp > 1 and not replicate_dense:
        raise InvalidPlan(
            f"the entry shares the dense matrices over TP = {x.tp} ranks, which moefx does not do: build an entry with "
            "TP = 1, next(i for i, entry in enumerate(ranking) if entry.layout.tp == 1)"
            + (_REPLICATE if x.ssmb else "")
        )
    names, sizes = entry.mesh["mesh_dim_names"], entry.mesh["mesh_shape"]
    axes = {PIPELINE_AXIS: x.pp} | {
        name: size for name, size in zip(names, sizes, strict=True) if name != PIPELINE_AXIS
    }
    plan = entry.plan(**fields)
    if replicate_dense and plan.layout:
        plan = plan.replace(layout={name: size for name, size in plan.layout if name != "tp"})
    is_shared = x.dp > 1
    options: dict[str, Any] = dict(
        schedule=x.schedule, microbatches=x.microbatches, chunks=x.chunks, recompute=x.recompute,
        data="ddp" if is_shared and not x.zero else "fsdp", zero=x.zero if is_shared else None,
    )  # fmt: skip
    return EntryArguments(axes, plan, options, (x.microbatches * x.sequences, x.tokens))


def build_entry(
    ranking: Ranking,
    index: int,
    model: nn.Module,
    loss_fn: Callable[[Tensor, Any], Tensor],
    *,
    example_inputs: Any,
    device_type: str | None,
    mp_policy: Any,
    replicate_dense: bool,
    fields: dict[str, Any],
) -> Pipeline:
    """Build the pipeline of an entry. `Ranking.build` has the arguments and the errors. Collective."""
    entry = ranking[index]
    arguments = read_entry(entry, replicate_dense=replicate_dense, **fields)
    mesh = _build_mesh(entry, arguments.axes, device_type or _find_device_type(model))
    layers, counts, error = "", (), None
    try:
        _check_nodes(entry, arguments.plan, ranking.platform)
        layers, keys = find_layer_keys(model, None)
        survey = survey_for_planner(model, layers, keys, example_inputs, arguments.plan, mesh)
        check_model(ranking.model, survey.require_facts()[1], type(model).__name__)
        counts = _cut_entry(ranking, entry, survey)
    except MoefxError as found:
        error = found
    raise_on_all_ranks(mesh, error)
    pipe = pipeline(
        model, mesh, plan=arguments.plan, loss_fn=loss_fn, split={layers: list(counts)}, mp_policy=mp_policy,
        example_inputs=example_inputs, **arguments.options,
    )  # fmt: skip
    pipe.planned_batch = arguments.batch
    if len(counts) > 1:
        pipe.cut_basis = f"equal predicted times, by the figures of {ranking.platform.name}"
    return pipe


def check_model(planned: Architecture, actual: Architecture, name: str) -> None:
    """Check that a model has the sizes that a ranking counted on.

    Raises:
        InvalidInput: sizes differ.
    """
    pairs = [(size, getattr(planned, size), getattr(actual, size)) for size in _SIZES]
    if not actual.note:  # otherwise the heads are assumed
        pairs += [(size, getattr(planned.attention, size), getattr(actual.attention, size)) for size in _HEADS]
    if differences := [
        f"{size} {actual_size} instead of {planned_size}"
        for size, planned_size, actual_size in pairs
        if actual_size != planned_size
    ]:
        raise InvalidInput(
            f"{name} is not the model of the ranking, {planned.name}: it has {', '.join(differences)}. Rank the model "
            "that you train: moefx.plan(model, platform, world_size, ...)"
        )


def _cut_entry(ranking: Ranking, entry: Entry, survey: PlannerSurvey) -> tuple[int, ...]:
    """Return the number of layers of each stage: of equal predicted time, among those that fit the planned memory."""
    layout, num_stages = entry.layout, entry.layout.pp * entry.layout.chunks
    even = -(-ranking.model.num_layers // num_stages)
    most = max(even, find_max_layers(ranking.model, layout, ranking.platform) // layout.chunks)
    return cut_by_predicted_time(survey, layout, ranking.platform, entry.experts_first, num_stages, most)


def _check_nodes(entry: Entry, plan: Plan, platform: Platform) -> None:
    """Check that rows which travel by nodes find nodes of the planned size.

    Raises:
        InvalidPlan: the nodes of this job have another size.
    """
    node_size = resolve_node_size(plan.node_size, dist.get_world_size())
    if entry.layout.dispatch in ("rbd", "halo") and plan.node_size is None and node_size != platform.node_size:
        raise InvalidPlan(
            f"the entry's rows travel by nodes of {platform.node_size} ranks ({entry.layout.dispatch!r}), and a node "
            f"of this job has {node_size}: build(..., node_size={node_size}) takes these, or rank layouts on a "
            "platform with these nodes"
        )


def _find_device_type(model: nn.Module) -> str:
    """Return the type of a model's device; for a model on the meta device, the type of the ranks' devices."""
    device_type = next((p.device.type for p in model.parameters() if not p.is_meta), None)
    return device_type or ("cuda" if torch.cuda.is_available() else "cpu")


def _build_mesh(entry: Entry, axes: dict[str, int], device_type: str) -> DeviceMesh:
    """Build the mesh of an entry over all ranks. Collective.

    Raises:
        InvalidPlan: the job has another number of ranks.
    """
    ranks = entry.layout.num_ranks
    if not dist.is_initialized():
        raise InvalidPlan(
            f"the entry is for {ranks} ranks, and torch.distributed is not initialized: start {ranks} processes with "
            "torchrun, and call torch.distributed.init_process_group(...) first"
        )
    if dist.get_world_size() != ranks:
        raise InvalidPlan(
            f"the entry is for {ranks} ranks, and this job has {dist.get_world_size()}: start {ranks} processes, or "
            f"rank layouts with moefx.plan(model, platform, {dist.get_world_size()}, ...)"
        )
    return init_device_mesh(device_type, tuple(axes.values()), mesh_dim_names=tuple(axes))
