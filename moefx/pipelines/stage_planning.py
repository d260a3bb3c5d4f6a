"""Ask the planner about the stages of a pipeline: where to cut the layers, and which fields a plan leaves to it."""

from __future__ import annotations

import dataclasses
import itertools
import math
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from .._plan import Plan
from ..compiler.survey import survey_model
from ..distribution.mesh_agreement import gather_by_rank
from ..errors import MoefxError, UnknownArchitecture
from ..planner.architecture import Architecture
from ..planner.auto import collect_facts, decide, find_mesh_platform
from ..planner.decision import Decision, Facts
from ..planner.layout import Layout
from ..planner.mesh_axes import AxisUse, list_axis_uses
from ..planner.platforms import Platform
from ..planner.search import choose_layout_dispatch
from ..planner.stage_times import cut_by_time, predict_layer_times
from ..runtime.ranks.sharding import PIPELINE_AXIS, TENSOR_AXIS
from .stage_split import count_layers


@dataclasses.dataclass(frozen=True)
class PlannerSurvey:
    """The planner's view of a whole model on this rank.

    Attributes:
        facts: its architecture, its tokens and the platform; or the error of this rank.
        layers: name of the container of the layers.
        has_experts: for each layer, whether it holds a block with experts.
    """

    facts: Facts | str
    layers: str
    has_experts: tuple[bool, ...]

    def require_facts(self) -> tuple[Facts, Architecture]:
        """Return the facts, and the architecture in them.

        Raises:
            UnknownArchitecture: the planner cannot read the model.
        """
        facts = self.facts
        if isinstance(facts, str) or not isinstance(facts.model, Architecture):
            raise UnknownArchitecture(facts if isinstance(facts, str) else facts.model or "it has no experts")
        if facts.model.num_layers != len(self.has_experts):
            raise UnknownArchitecture(
                f"{self.layers} has {len(self.has_experts)} layers, and {facts.model.num_layers} are around blocks"
            )
        return facts, facts.model


def survey_for_planner(
    model: nn.Module, layers: str, keys: tuple[str, ...], example_inputs: Any, plan: Plan, mesh: DeviceMesh
) -> PlannerSurvey:
    """Survey a whole model for the planner. Nothing runs on a device, and ranks do not communicate.

    Args:
        layers, keys: see `StageSplit`.
    """
    blocks: list[str] = []
    facts: Facts | str
    try:
        survey = survey_model(model, example_inputs, Plan(validation="symbolic"))
        blocks = [f"{name}." for matched in survey.matched for name in matched.names]
        facts = collect_facts(model, survey, plan, find_mesh_platform(mesh, plan), example_inputs, mesh)
    except MoefxError as error:
        facts = f"{type(error).__name__}: {error}"
    has_experts = tuple(any(block.startswith(f"{layers}.{key}.") for block in blocks) for key in keys)
    return PlannerSurvey(facts, layers, has_experts)


def choose_counts(survey: PlannerSurvey, plan: Plan, mesh: DeviceMesh, num_stages: int) -> tuple[tuple[int, ...], str]:
    """Choose the number of layers of each stage for `split="auto"`: stages of equal predicted time, or of equal numbers
    of layers if the planner cannot read the model. Collective over the mesh: all ranks take the cut of the first one.

    Returns:
        The numbers, and the basis of the choice for readers.

    Raises:
        InvalidPlan: there are fewer layers than stages.
    """
    counts = count_layers(len(survey.has_experts), num_stages)
    try:
        facts, model = survey.require_facts()
        layout, experts_first = _find_layout(facts, model, plan, mesh)
        counts = cut_by_predicted_time(survey, layout, facts.local.platform, experts_first, num_stages)
        basis = f"equal predicted times, by the figures of {facts.local.figures}"
    except MoefxError as error:
        basis = f"equal numbers of layers, because no times can be predicted: {str(error).splitlines()[0]}"
    return min(gather_by_rank(mesh, (counts, basis)).items())[1]


def cut_by_predicted_time(
    survey: PlannerSurvey,
    layout: Layout,
    platform: Platform,
    experts_first: bool,
    num_stages: int,
    max_layers: int | None = None,
) -> tuple[int, ...]:
    """Return the number of layers of each stage, for stages of equal predicted time.

    Raises:
        UnknownArchitecture: the planner cannot read the model. InvalidPlan: the layout does not fit it.
    """
    times = predict_layer_times(survey.require_facts()[1], layout, platform, experts_first)
    return cut_by_time(times.of_layers(survey.has_experts), times.head, num_stages, max_layers)


def _find_layout(facts: Facts, model: Architecture, plan: Plan, mesh: DeviceMesh) -> tuple[Layout, bool]:
    """Return the layout of a stage on a mesh, and whether the ranks of an expert axis are neighbours."""
    use, platform = _find_first_use(plan, mesh), facts.local.platform
    layout = use.layout(kept="x" if plan.checkpoint == "x" else "h", sequences=facts.sequences, tokens=facts.tokens)
    first = use.experts_first(platform)
    return dataclasses.replace(
        layout, dispatch=choose_layout_dispatch(model, layout, platform, first, plan.dispatch)
    ), first


def _find_first_use(plan: Plan, mesh: DeviceMesh) -> AxisUse:
    """Return how the ranks of a stage share experts and tokens: the first use if the plan leaves it open."""
    sizes = {name: mesh[name].size() for name in mesh.mesh_dim_names or () if name != PIPELINE_AXIS}
    ranks, shared_axis = math.prod(sizes.values()), plan.sequence_axis or TENSOR_AXIS
    if ranks == 1 or dict(plan.layout or ()).get("ep") == 1:
        tp = sizes.get(shared_axis, 1)
        return AxisUse(tp=tp, dp=ranks // tp)
    return list_axis_uses(mesh, plan)[0]


def decide_plan(
    survey: PlannerSurvey, counts: tuple[int, ...], own_stages: list[int], plan: Plan, mesh: DeviceMesh
) -> Decision:
    """Decide the fields that a plan leaves open, for this rank's stages. All ranks decide alike on the axes; each stage
    has a checkpoint policy of its own. Collective over the mesh.

    Args:
        counts: number of layers of each stage.

    Raises:
        InvalidPlan: no axis of the mesh is left for experts, or the ranks disagree.
    """
    facts = survey.facts
    if isinstance(facts, Facts) and isinstance(facts.model, Architecture):
        facts = dataclasses.replace(facts, model=_reduce_architecture(facts.model, survey, counts, own_stages))
    stage_ranks = mesh.size() // mesh[PIPELINE_AXIS].size()
    is_whole = mesh.size() == dist.get_world_size()
    return decide(gather_by_rank(mesh, facts), dist.get_rank(), mesh if stage_ranks > 1 else None, is_whole=is_whole)


def _reduce_architecture(
    architecture: Architecture, survey: PlannerSurvey, counts: tuple[int, ...], own_stages: list[int]
) -> Architecture | None:
    """Return the architecture of the stages of one rank together, None without experts."""
    ends = list(itertools.accumulate(counts, initial=0))
    has_experts = [is_moe for stage in own_stages for is_moe in survey.has_experts[ends[stage] : ends[stage + 1]]]
    if not any(has_experts):
        return None
    embedding, is_last = architecture.vocab_size * architecture.hidden_size, len(counts) - 1 in own_stages
    sizes = dict(num_layers=len(has_experts), num_moe_layers=sum(has_experts))
    if is_last and 0 in own_stages:
        return architecture.replace(**sizes)
    if is_last:  # the only table is the head's
        return architecture.replace(**sizes, is_tied=True)
    return architecture.replace(**sizes, vocab_size=0, num_other=embedding if 0 in own_stages else 0)
