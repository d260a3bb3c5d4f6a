"""Resolve and check the plan of a public function.

Refused are plans that have no effect in part or name unknown passes, and layouts that the mesh does not have.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from .._plan import Plan
from ..compiler.compile_steps import list_optional_passes
from ..errors import InvalidPlan
from ..runtime.ranks.sharding import PIPELINE_AXIS, TENSOR_AXIS

_MESH_FIELDS = (
    "expert_axis", "placement", "sequence_axis", "sequence_gradients", "gradients", "dispatch", "pilots", "chunks",
    "max_tokens", "stash_factor", "node_size", "topology_levels", "timeout",
)  # fmt: skip
_PLANNER_FIELDS = ("memory", "zero")


def resolve_plan(plan: Plan | str | None) -> Plan:
    """Return the plan for the argument `plan` of a public function: a `Plan`, "auto", or None for the defaults.

    Raises:
        InvalidPlan: anything else.
    """
    if plan is None:
        return Plan()
    if plan == "auto":
        return Plan(expert_axis="auto", checkpoint="auto")
    if not isinstance(plan, Plan):
        shown = repr(plan) if isinstance(plan, str) else f"a {type(plan).__name__}"
        advice = ": pass its plan()" if hasattr(plan, "plan") else ""
        raise InvalidPlan(f"plan is {shown}; expected a moefx.Plan, 'auto' or None{advice}")
    return plan


def check_plan(plan: Plan, mesh: Any) -> None:
    """Check the plan and the mesh of `compile`.

    Raises:
        InvalidPlan: not a mesh; or the plan has no effect in part, does not fit the mesh, or disables an unknown pass.
    """
    if mesh is not None and not hasattr(mesh, "mesh_dim_names"):
        raise InvalidPlan(f"mesh is a {type(mesh).__name__}; expected a torch.distributed.DeviceMesh or None")
    check_effects(plan, mesh)
    check_layout(plan, mesh)
    check_passes(plan)


def check_effects(plan: Plan, mesh: Any) -> None:
    """Check that each changed field of a plan has an effect.

    Raises:
        InvalidPlan: a field has no effect together with the others, or without a mesh.
    """
    changed = _changed_fields(plan)
    if "drop" in changed and plan.capacity_factor is None:
        raise _no_effect(plan, "drop", "experts drop nothing without Plan(capacity_factor=...)")
    if mesh is None:
        for field in _MESH_FIELDS:
            is_planned = plan.is_undecided and (field == "node_size" or getattr(plan, field) == "auto")
            if field in changed and not is_planned:
                raise _no_effect(
                    plan, field, "pass moefx.compile(model, mesh=...), or leave the field out", "without a mesh"
                )
    if not plan.is_undecided:
        for field in _PLANNER_FIELDS:
            if field in changed:
                raise _no_effect(plan, field, "the planner runs only with 'auto' in plan, expert_axis or checkpoint")
    if "sequence_gradients" in changed and not plan.sequence_axis and plan.expert_axis != "auto":
        raise _no_effect(plan, "sequence_gradients", "say which ranks share tokens: Plan(sequence_axis=...)")
    if not plan.pilots and plan.dispatch not in ("halo", "auto"):
        raise _no_effect(plan, "pilots", f"dispatch={plan.dispatch!r} is not 'halo'")
    if plan.max_tokens is not None and not plan.may_gather:
        raise _no_effect(plan, "max_tokens", f"dispatch={plan.dispatch!r} is neither 'gather' nor 'pull'")
    if "stash_factor" in changed and not plan.may_gather:
        raise _no_effect(plan, "stash_factor", f"dispatch={plan.dispatch!r} is neither 'gather' nor 'pull'")
    if plan.chunks > 1 and plan.dispatch in ("gather", "pull"):
        raise _no_effect(plan, "chunks", f"dispatch={plan.dispatch!r} moves all tokens at once")


def without_mesh_fields(plan: Plan) -> Plan:
    """Return the plan for a single rank: without the fields that have no effect there."""
    default = Plan()
    return plan.replace(**{field: getattr(default, field) for field in _MESH_FIELDS})


def check_graph_plan(plan: Plan) -> None:
    """Check the plan of a flat graph, which has neither mesh nor planner.

    Raises:
        InvalidPlan: a field has no effect on a graph.
    """
    for field in sorted(_changed_fields(plan)):
        if field in _MESH_FIELDS:
            value = getattr(plan, field)
            raise InvalidPlan(f"Plan({field}={value!r}): only moefx.compile(mesh=...) spreads experts")
        if field in (*_PLANNER_FIELDS, "tokens", "layout") or getattr(plan, field) == "auto" != _DEFAULTS[field]:
            raise _no_effect(plan, field, "only moefx.compile asks the planner", "for a graph")
    check_effects(plan, None)


def check_passes(plan: Plan) -> None:
    """Check that a plan disables known passes only.

    Raises:
        InvalidPlan: the plan disables an unknown pass.
    """
    names = list_optional_passes()
    for name in plan.disable:
        if name not in names:
            raise InvalidPlan(f"Plan(disable={list(plan.disable)}): no pass {name!r}; there is {', '.join(names)}")


def check_layout(plan: Plan, mesh: Any) -> None:
    """Check that `compile` can do all that a layout of the planner counts on. Sizes that the user removed from
    `plan.layout` are not checked.

    Raises:
        InvalidPlan: the mesh has other sizes than the layout; the layout has pipeline stages or spreads experts without
            a mesh; or it counts on tensor parallelism, ZeRO, micro-batches or recomputed layers.
    """
    if plan.layout is None:
        return
    counts = dict(plan.layout)
    sizes: dict[str, int] = {}
    if mesh is not None:
        sizes = dict(zip(mesh.mesh_dim_names or (), mesh.shape, strict=True))
    if mesh is not None and counts.get("ep") == 1:
        raise InvalidPlan(
            "the planner's layout keeps all experts on every rank (EP = 1), but a mesh distributes them: leave out the "
            f"mesh, or deviate from the plan: {_advise_without(counts, 'ep')}"
        )
    if mesh is None and (stages := counts.get(PIPELINE_AXIS, 1)) > 1:
        raise InvalidPlan(
            f"the planner's layout has {stages} pipeline stages, and compile does not split a model: give it "
            f"the module of this rank's stage and {_advise_without(counts, PIPELINE_AXIS)}"
        )
    if mesh is None and (ranks := counts.get("ep", 1)) > 1:
        raise InvalidPlan(
            f"compile got no mesh, but the planner's layout spreads the experts over {ranks} ranks: pass "
            f"mesh=init_device_mesh(device_type, **entry.mesh), or {_advise_without(counts, 'ep')}"
        )
    if mesh is not None:
        axes = plan.expert_axis if isinstance(plan.expert_axis, tuple) else (plan.expert_axis,)
        sizes_here = {PIPELINE_AXIS: sizes.get(PIPELINE_AXIS, 1), TENSOR_AXIS: sizes.get(TENSOR_AXIS, 1)}
        sizes_here["ep"] = math.prod(sizes.get(axis, 1) for axis in axes if axis)
        if wrong := [name for name, size_here in sizes_here.items() if counts.get(name, size_here) != size_here]:
            shown = ", ".join(f"{name}={size}" for name, size in sizes.items())
            lacking = ", ".join(f"{name}={counts[name]} ({sizes_here[name]} in the mesh)" for name in wrong)
            raise InvalidPlan(
                f"the planner's layout has {lacking}, but the mesh is {shown}: take init_device_mesh(device_type, "
                f"**entry.mesh), or {_advise_without(counts, *wrong)}"
            )
    if duties := _user_duties(counts):
        raise InvalidPlan(
            f"the planner's layout counts on {', '.join(duties.values())}, which compile does not do: it rewrites the "
            "blocks and spreads their experts, and the planner's memory and time assume the rest. Do that yourself and "
            f"{_advise_without(counts, *duties)}"
        )


def _advise_without(counts: dict[str, int], *names: str) -> str:
    """Tell the user how to take responsibility for some sizes of a layout."""
    rest = {name: size for name, size in counts.items() if name not in names}
    return f"say so by taking {', '.join(names)} out of the layout: plan.replace(layout={rest or None})"


def _user_duties(counts: dict[str, int]) -> dict[str, str]:
    """Return the parts of a layout that the user must set up, by name, in words."""
    tp, zero, micro = (counts.get(name, 1) for name in (TENSOR_AXIS, "zero", "microbatches"))
    return {
        **({TENSOR_AXIS: f"tensor parallelism of the dense matrices over {tp} ranks"} if tp > 1 else {}),
        **({"zero": f"ZeRO-{zero} (fully_shard)"} if counts.get("zero", 0) else {}),
        **({"microbatches": f"{micro} micro-batches"} if micro > 1 else {}),
        **({"recompute": "layers that run again (torch.utils.checkpoint)"} if counts.get("recompute", 0) else {}),
    }


_DEFAULTS = {f.name: f.default for f in dataclasses.fields(Plan)}


def _changed_fields(plan: Plan) -> set[str]:
    return {name for name, default in _DEFAULTS.items() if getattr(plan, name) != default}


def _no_effect(plan: Plan, field: str, why: str, where: str = "") -> InvalidPlan:
    return InvalidPlan(f"Plan({field}={getattr(plan, field)!r}) has no effect{f' {where}' if where else ''}: {why}")
