"""`pipeline`: cut a decoder into stages over the pipeline axis of a mesh, and train it with torch's schedules."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from ..._plan import Plan
from ...api import compile as compile_model
from ...errors import InvalidInput, InvalidPlan, NoMoEBlockFound
from ...ir.argument_binding import ExampleInputs
from ...runtime.block_forward import find_rewritten_blocks
from ...runtime.ranks.sharding import format_mesh
from ...runtime.ranks.staged_models import refuse_pipeline
from ..data_parallelism import parallelize
from ..training_wiring import mark_as_spread
from .pipeline_model import Pipeline
from .pipeline_schedules import Stage, order_stages
from .pipeline_stages import STAGES
from .stage_modules import StagePort
from .stage_split import Split, StageSplit, install_stage, read_split, reduce_to_stage, split_model
from .stage_state import StageGroup


def pipeline(
    model: nn.Module,
    mesh: DeviceMesh,
    *,
    plan: Plan | None = None,
    loss_fn: Callable[[Tensor, Any], Tensor],
    schedule: str = "1f1b",
    microbatches: int,
    split: Split = "auto",
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
        plan: as for `compile`, but without "auto". The plan of a planner's entry goes with the entry's schedule and
            micro-batches.
        loss_fn: `loss_fn(output, target)`: the mean loss of a micro-batch. `output` is the model's output if it is a
            tensor, else its field `logits`.
        schedule: "gpipe", "1f1b", "interleaved", "zb-h1", "zbv" or "dualpipev". "zb-h2" is simulated by the planner
            only.
        microbatches: the micro-batches of a step.
        split: "auto": equal numbers of layers, with the embedding and the head as a layer each; or the name of the
            list of layers with the number of layers of each stage, {"model.layers": [3, 5]}.
        example_inputs: as for `compile`.

    Returns:
        A `Pipeline`: build the optimizer from its parameters, and call `step`.

    Raises:
        InvalidPlan: the mesh has no axis "pp", or the schedule, the micro-batches or the split do not fit.
        InvalidInput: the model cannot be cut into stages; the message has the line and the change that helps.
        NoMoEBlockFound: no block of any stage was rewritten.
    """
    plan = _settle_layout(_check_call(model, mesh, plan, loss_fn), mesh, microbatches)
    name, counts = read_split(split)
    order = order_stages(schedule, mesh[STAGES].size(), microbatches, None if counts is None else len(counts))
    group = StageGroup(mesh, list(model.state_dict()))
    cut = split_model(model, name, counts, order.num_stages, example_inputs)
    stages: list[Stage] = []
    missing: list[str] = []
    error: Exception | None = None
    names = tuple(axis for axis in mesh.mesh_dim_names or () if axis != STAGES)
    stage_mesh = mesh[names] if names else None
    try:
        for number in order.list_stages(mesh[STAGES].get_local_rank()):
            port = StagePort(number, number == cut.num_stages - 1, loss_fn, microbatches)
            stage, why = _build_stage(model, cut, number, port, plan, stage_mesh, example_inputs)
            stages.append(stage)
            missing += [why] if why else []
    except Exception as found:
        error = found
    num_blocks = sum(len(find_rewritten_blocks(stage.model)) for stage in stages)
    # before process groups are made: ranks that made different numbers of them could make no further ones together
    if not any(group.raise_together(error, num_blocks)):
        raise NoMoEBlockFound(f"no stage of the pipeline has a block that was rewritten: {missing[0]}")
    if stage_mesh is not None and stage_mesh.size() > 1:
        try:
            for stage in stages:
                # Parameters stay gathered in a step: micro-batches in flight would gather them again and again, and
                # torch finds the delayed gradients of weights by the parameters of the forward.
                parallelize(stage.model, stage_mesh, reshard_after_forward=False)
        except Exception as found:
            error = found
        group.raise_together(error, num_blocks)
    return Pipeline(model, stages, cut, order, group)


def _check_call(model: nn.Module, mesh: DeviceMesh, plan: Plan | None, loss_fn: Any) -> Plan:
    """Check the arguments of `pipeline` that need no model, and return the plan."""
    if not isinstance(mesh, DeviceMesh) or STAGES not in (mesh.mesh_dim_names or ()):
        shown = format_mesh(mesh) if isinstance(mesh, DeviceMesh) and mesh.mesh_dim_names else repr(mesh)
        raise InvalidPlan(
            f"the mesh ({shown}) has no axis {STAGES!r} for the stages: "
            'init_device_mesh(device, (stages, ranks), mesh_dim_names=("pp", "ep"))'
        )
    plan = Plan() if plan is None else plan
    if not isinstance(plan, Plan) or plan.is_undecided:
        raise InvalidPlan(
            f"pipeline(plan={plan!r}): the planner cannot decide for a stage alone. Pass a Plan without 'auto' for "
            "checkpoint and expert_axis; moefx.plan ranks layouts with stages"
        )
    refuse_pipeline(model, "pipeline")
    if blocks := list(find_rewritten_blocks(model)):
        raise InvalidInput(
            f"{type(model).__name__} is compiled already ({blocks[0]}): pass the original model, moefx.pipeline "
            "compiles each stage over its part of the mesh"
        )
    if not callable(loss_fn):
        raise InvalidInput(f"loss_fn={loss_fn!r}: expected a function of (output, target) that returns the mean loss")
    held = {id(module) for module in model.modules()}
    for module in _find_modules(loss_fn):
        if id(module) in held:
            raise InvalidInput(
                f"loss_fn uses {type(module).__name__} of the model. The stages are copies, so it would read what no "
                "step writes, and lose the losses of layers in other stages: compute the loss from (output, target) "
                "alone"
            )
    return plan


def _settle_layout(plan: Plan, mesh: DeviceMesh, microbatches: int) -> Plan:
    """Take out of a planner's layout what `pipeline` does: stages, micro-batches and ZeRO-1. `compile` checks the rest.

    Raises:
        InvalidPlan: the layout has other stages or micro-batches.
    """
    counts = dict(plan.layout or ())
    here = {"pp": mesh[STAGES].size(), "microbatches": microbatches}
    for name, size in here.items():
        if counts.get(name, size) != size:
            raise InvalidPlan(
                f"the planner's layout has {name}={counts[name]}, and pipeline was given {name}={size}: take "
                "init_device_mesh(device_type, **entry.mesh), schedule=entry.layout.schedule and "
                "microbatches=entry.layout.microbatches"
            )
    done = {*here, *(["zero"] if counts.get("zero", 0) <= 1 else [])}
    return plan.replace(layout={name: size for name, size in counts.items() if name not in done} or None)


def _find_modules(function: Any) -> list[nn.Module]:
    """Return the modules that a function holds: in its closure, as a bound object or as bound arguments."""
    if isinstance(function, functools.partial):
        parts = [function.func, *function.args, *function.keywords.values()]
        return [module for part in parts for module in _find_modules(part)]
    if isinstance(function, nn.Module):
        return [function]
    if inspect.ismethod(function):
        return _find_modules(function.__self__) + _find_modules(function.__func__)
    if not inspect.isfunction(function):
        return []
    found = inspect.getclosurevars(function)
    values = [*found.nonlocals.values(), *found.globals.values(), *(function.__defaults__ or ())]
    return [value for value in values if isinstance(value, nn.Module)]


def _build_stage(
    model: nn.Module,
    cut: StageSplit,
    number: int,
    port: StagePort,
    plan: Plan,
    mesh: DeviceMesh | None,
    example_inputs: ExampleInputs | None,
) -> tuple[Stage, str]:
    """Compile a stage over its part of the mesh. Collective over the ranks of the stage.

    Returns:
        The stage, and the reason if none of its blocks was rewritten.
    """
    reduced, why = reduce_to_stage(model, cut, number), ""
    try:
        stage_model = compile_model(reduced, example_inputs, mesh=mesh, plan=plan)
    except NoMoEBlockFound as error:  # a stage of dense layers
        stage_model, why = reduced, str(error)
        if mesh is not None:
            mark_as_spread(stage_model, mesh, plan)
    install_stage(stage_model, cut, number, port)
    return Stage(number, stage_model, port), why
