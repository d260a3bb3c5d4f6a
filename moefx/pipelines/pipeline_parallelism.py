"""`pipeline`: cut a decoder into stages over the pipeline axis of a mesh, and train it with torch's schedules."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import math
import warnings
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy

from .._plan import Plan
from ..api import compile as compile_model
from ..compiled_blocks import RECORD
from ..distribution.data_parallelism import Sharding
from ..distribution.training_wiring import mark_as_spread
from ..driver.plan_check import resolve_plan, without_mesh_fields
from ..errors import InvalidInput, InvalidPlan, NoMoEBlockFound
from ..ir.argument_binding import ExampleInputs
from ..planner.decision import Decision
from ..runtime.block_forward import find_rewritten_blocks
from ..runtime.ranks.sharding import PIPELINE_AXIS, format_mesh, resolve_expert_axes
from ..runtime.ranks.staged_models import refuse_pipeline
from .pipeline_model import Pipeline
from .pipeline_schedules import Stage, StageOrder, order_stages
from .stage_modules import StagePort
from .stage_planning import choose_counts, decide_plan, survey_for_planner
from .stage_sharding import AxisNames, DataLayout, StageSharding, count_data_ranks, recompute_layers, resolve_zero
from .stage_split import (
    Split,
    StageSplit,
    count_layers,
    find_layer_keys,
    install_stage,
    read_split,
    reduce_to_stage,
    split_model,
)
from .stage_state import StageGroup


def pipeline(
    model: nn.Module,
    mesh: DeviceMesh,
    *,
    plan: Plan | str | None = None,
    loss_fn: Callable[[Tensor, Any], Tensor],
    schedule: str = "1f1b",
    microbatches: int,
    chunks: int | None = None,
    split: Split = "auto",
    data: DataLayout = "fsdp",
    shard_axes: AxisNames = None,
    replicate_axes: AxisNames = None,
    mp_policy: MixedPrecisionPolicy | None = None,
    zero: int | None = None,
    recompute: bool | None = None,
    example_inputs: ExampleInputs | None = None,
) -> Pipeline:
    """Cut a decoder into stages over the axis "pp" of a mesh. Each stage is compiled over the other axes, and sharded
    there by `parallelize`. Collective: every rank of the mesh calls it.

    The decoder is any model that runs a list of layers one after the other on hidden states: an embedding, layers, a
    norm and a head, such as those of transformers. It stays as it is; the stages share its parameters.

    Args:
        model: the original model, not compiled. On the meta device, each rank allocates its own stages only, by
            `Pipeline.to_empty`.
        mesh: has an axis "pp". `compile` and `parallelize` use the other axes.
        plan: as for `compile`. `"auto"`: the planner decides for all stages together. The plan of a planner's entry
            goes with the entry's schedule and micro-batches; `Ranking.build` passes all of them. With EP = 1 in its
            layout every rank of a stage keeps all experts.
        loss_fn: `loss_fn(output, target)`: the mean loss of a micro-batch. `output` is the model's output if it is a
            tensor, else its field `logits`.
        schedule: "gpipe", "1f1b", "interleaved", "zb-h1", "zbv" or "dualpipev". "zb-h2" is simulated by the planner
            only.
        microbatches: the micro-batches of a step.
        chunks: the stages of a rank. None: as many as `split` has, or the fewest that the schedule takes.
        split: "auto": equal times, as the planner predicts them, or equal numbers of layers if it cannot read the
            model; or the name of the list of layers with the number of layers of each stage, {"model.layers": [3, 5]}.
        data: as for `parallelize`, over the axes other than "pp".
        shard_axes: as for `parallelize`.
        replicate_axes: as for `parallelize`.
        mp_policy: as for `parallelize`.
        zero: the states that the ranks of a stage share while a step runs, experts' states over the axes beside the
            expert axis. 1: the optimizer's. 2: gradients too, reduced after each micro-batch. 3: parameters too,
            gathered for each forward and backward. None: as in the plan's layout, else 1, or 0 with `data="ddp"`.
        recompute: each layer keeps only its input, and runs again in the backward. None: as in the plan's layout, else
            False.
        example_inputs: as for `compile`.

    Returns:
        A `Pipeline`: build the optimizer from its parameters, and call `step`.

    Raises:
        InvalidPlan: the mesh has no axis "pp"; or the schedule, the micro-batches, the split, or the sharding of the
            stages do not fit.
        InvalidInput: the model cannot be cut into stages; the message has the line and the change that helps.
        NoMoEBlockFound: no block of any stage was rewritten.
    """
    plan, (name, counts) = _check_call(model, mesh, plan, loss_fn), read_split(split)
    order = order_stages(
        schedule, mesh[PIPELINE_AXIS].size(), microbatches, None if counts is None else len(counts), chunks
    )
    sizes = {axis: mesh[axis].size() for axis in mesh.mesh_dim_names or () if axis != PIPELINE_AXIS}
    planned_layout, data_ranks = dict(plan.layout or ()), count_data_ranks(sizes, plan)
    zero = resolve_zero(data, zero, planned_layout.get("zero"), data_ranks, order.kind.splits_backward)
    sharding = StageSharding(data, shard_axes, replicate_axes, mp_policy, zero)
    sharding.check_ranks(math.prod(sizes.values()))
    recompute = bool(planned_layout.get("recompute")) if recompute is None else recompute
    done_sizes = {
        **order.sizes,
        "recompute": int(recompute),
        "zero": zero if data_ranks > 1 else planned_layout.get("zero", 0),
    }
    plan = _remove_done_sizes(plan, done_sizes)
    group = StageGroup(mesh, list(model.state_dict()))
    stage_split, plan, decision = _plan_stages(model, mesh, plan, order, name, counts, example_inputs)
    stage_mesh = mesh[tuple(sizes)] if sizes else None
    if stage_mesh is not None and stage_mesh.size() == 1:  # parameters stay plain tensors, as without these axes
        stage_mesh, plan = None, without_mesh_fields(plan)
    stages: list[Stage] = []
    shardings: list[Sharding] = []
    missing: list[str] = []
    error: Exception | None = None
    try:
        for number in order.list_stages(mesh[PIPELINE_AXIS].get_local_rank()):
            port = StagePort(number, number == stage_split.num_stages - 1, loss_fn, microbatches)
            stage_model, reason = _compile_stage(model, stage_split, number, plan, stage_mesh, example_inputs, order)
            if decision is not None and RECORD in vars(stage_model):
                vars(stage_model)[RECORD] = dataclasses.replace(vars(stage_model)[RECORD], planned=decision)
            install_stage(stage_model, stage_split, number, port)
            stages.append(Stage(number, stage_model, port, sharding))
            missing += [reason] if reason else []
            if recompute:
                recompute_layers(stage_model, stage_split.list_layers(number))
            if stage_mesh is not None:
                shardings.append(sharding.plan(stage_model, stage_mesh))
    except Exception as found:
        error = found
    num_blocks = sum(len(find_rewritten_blocks(stage.model)) for stage in stages)
    # before process groups are made: ranks that made different numbers of them could make no further ones together
    if not any(group.raise_together(error, num_blocks)):
        raise NoMoEBlockFound(f"no stage of the pipeline has a block that was rewritten: {missing[0]}")
    try:
        for planned in shardings:
            sharding.apply(planned)
    except Exception as found:
        error = found
    group.raise_together(error, num_blocks)
    return Pipeline(model, stages, stage_split, order, group)


def _check_call(model: nn.Module, mesh: DeviceMesh, plan: Plan | str | None, loss_fn: Any) -> Plan:
    """Check the arguments of `pipeline` that need no model, and return the plan."""
    if not isinstance(mesh, DeviceMesh) or PIPELINE_AXIS not in (mesh.mesh_dim_names or ()):
        axes = format_mesh(mesh) if isinstance(mesh, DeviceMesh) and mesh.mesh_dim_names else repr(mesh)
        raise InvalidPlan(
            f"the mesh ({axes}) has no axis {PIPELINE_AXIS!r} for the stages: "
            'init_device_mesh(device, (stages, ranks), mesh_dim_names=("pp", "ep"))'
        )
    plan = resolve_plan(plan)
    refuse_pipeline(model, "pipeline")
    if blocks := list(find_rewritten_blocks(model)):
        raise InvalidInput(
            f"{type(model).__name__} is compiled already ({blocks[0]}): pass the original model, moefx.pipeline "
            "compiles each stage over its part of the mesh"
        )
    if not callable(loss_fn):
        raise InvalidInput(f"loss_fn={loss_fn!r}: expected a function of (output, target) that returns the mean loss")
    model_ids = {id(module) for module in model.modules()}
    for module in _find_modules(loss_fn):
        if id(module) in model_ids:
            raise InvalidInput(
                f"loss_fn uses {type(module).__name__} of the model. The stages are copies, so it would read what no "
                "step writes, and lose the losses of layers in other stages: compute the loss from (output, target) "
                "alone"
            )
    return plan


def _remove_done_sizes(plan: Plan, done_sizes: dict[str, int]) -> Plan:
    """Remove the sizes that `pipeline` applies from a planner's layout. `compile` checks the rest.

    Args:
        done_sizes: stages, micro-batches, the stage of ZeRO, and whether layers run again.

    Raises:
        InvalidPlan: the layout has other sizes.
    """
    counts = dict(plan.layout or ())
    for name, size in done_sizes.items():
        if counts.get(name, size) != size:
            raise InvalidPlan(
                f"the planner's layout has {name}={counts[name]}, and pipeline was given {name}={size}: call "
                "ranking.build(index, model, loss_fn), or take init_device_mesh(device_type, **entry.mesh), "
                "schedule=entry.layout.schedule and microbatches=entry.layout.microbatches"
            )
    return plan.replace(layout={name: size for name, size in counts.items() if name not in done_sizes} or None)


def _find_modules(function: Any) -> list[nn.Module]:
    """Return the modules that a function is or holds, with theirs: in its closure, as a bound object or as bound
    arguments."""
    if isinstance(function, functools.partial):
        parts = [function.func, *function.args, *function.keywords.values()]
        return [module for part in parts for module in _find_modules(part)]
    if isinstance(function, nn.Module):
        return list(function.modules())
    if inspect.ismethod(function):
        return _find_modules(function.__self__) + _find_modules(function.__func__)
    if not inspect.isfunction(function):
        return []
    variables = inspect.getclosurevars(function)
    values = [*variables.nonlocals.values(), *variables.globals.values(), *(function.__defaults__ or ())]
    return [module for value in values if isinstance(value, nn.Module) for module in value.modules()]


def _plan_stages(
    model: nn.Module,
    mesh: DeviceMesh,
    plan: Plan,
    order: StageOrder,
    name: str | None,
    counts: tuple[int, ...] | None,
    example_inputs: ExampleInputs | None,
) -> tuple[StageSplit, Plan, Decision | None]:
    """Cut a model into stages, and let the planner decide the fields that the plan leaves open. Collective.

    Args:
        name: the name of the list of layers in `split`; None: find the list.
        counts: the number of layers of each stage in `split`; None: choose the numbers.

    Returns:
        The cut, the plan of this rank, and the planner's decision.
    """
    layers, keys = find_layer_keys(model, name)
    basis, decision, survey = "as split says" if order.num_stages > 1 else "one stage", None, None
    if plan.is_undecided or (counts is None and order.num_stages > 1):
        survey = survey_for_planner(model, layers, keys, example_inputs, plan, mesh)
    if counts is None and survey is not None:
        counts, basis = choose_counts(survey, plan, mesh, order.num_stages)
    elif counts is None:
        counts = count_layers(len(keys), order.num_stages)
    if plan.is_undecided and survey is not None:
        decision = decide_plan(survey, counts, order.list_stages(mesh[PIPELINE_AXIS].get_local_rank()), plan, mesh)
        plan = decision.plan
        if decision.warning:
            warnings.warn(f"moefx: {decision.warning}", stacklevel=3)
    return split_model(model, layers, keys, counts, basis, example_inputs), plan, decision


def _widen_stash(plan: Plan, mesh: DeviceMesh, order: StageOrder) -> Plan:
    """Make room for all micro-batches in flight, if the experts of a stage share a stash."""
    if not plan.may_gather:
        return plan
    axes = resolve_expert_axes(mesh, plan.expert_axis)
    factor = plan.resolve_stash_factor(math.prod(mesh[axis].size() for axis in axes))
    return plan if factor is None else plan.replace(stash_factor=factor * order.max_in_flight)


def _compile_stage(
    model: nn.Module,
    split: StageSplit,
    number: int,
    plan: Plan,
    mesh: DeviceMesh | None,
    example_inputs: ExampleInputs | None,
    order: StageOrder,
) -> tuple[nn.Module, str]:
    """Compile a stage over its part of the mesh. Collective over the ranks of the stage.

    Returns:
        The stage's model, and the reason if none of its blocks was rewritten.
    """
    reduced_model, reason = reduce_to_stage(model, split, number), ""
    spreads = mesh is not None and dict(plan.layout or ()).get("ep") != 1
    if spreads and mesh is not None:
        plan = _widen_stash(plan, mesh, order)
    try:
        stage_model = compile_model(reduced_model, example_inputs, mesh=mesh if spreads else None, plan=plan)
    except NoMoEBlockFound as error:  # a stage of dense layers
        stage_model, reason = reduced_model, str(error)
    if mesh is not None and (reason or not spreads):
        axes = resolve_expert_axes(mesh, plan.expert_axis) if spreads else ()
        mark_as_spread(stage_model, mesh, axes, plan.sequence_axis)
    return stage_model, reason
