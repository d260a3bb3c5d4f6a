"""Refuses plans that ask for what will not be done: fields without effect, and layouts that a mesh does not have."""

from __future__ import annotations

import dataclasses
import math
import warnings
from typing import Any

from ._plan import Plan
from .errors import InvalidPlan

_OF_A_MESH = (
    "expert_axis", "placement", "sequence_axis", "sequence_gradients", "gradients", "dispatch", "pilots", "chunks",
    "node_size", "topology_levels", "timeout",
)  # fmt: skip
_OF_THE_PLANNER = ("memory", "zero")
_STAGES, _SHARED = "pp", "tp"


def check_effects(plan: Plan, mesh: Any) -> None:
    """Raises:
    InvalidPlan: a field has no effect beside the others, or without a mesh.
    """
    changed = _changed(plan)
    if plan.expert_storage != "original":
        raise _no_effect(plan, "expert_storage", "compile leaves the storage of experts as it is")
    if "drop" in changed and plan.capacity_factor is None:
        raise _no_effect(plan, "drop", "experts drop nothing without Plan(capacity_factor=...)")
    if mesh is None:
        for field in _OF_A_MESH:
            is_asked = plan.is_undecided and (field == "node_size" or getattr(plan, field) == "auto")
            if field in changed and not is_asked:
                raise _no_effect(
                    plan, field, "pass moefx.compile(model, mesh=...), or leave the field out", "without a mesh"
                )
    if not plan.is_undecided:
        for field in _OF_THE_PLANNER:
            if field in changed:
                raise _no_effect(plan, field, "the planner is asked by 'auto' in plan, expert_axis or checkpoint")
    if "sequence_gradients" in changed and not plan.sequence_axis and plan.expert_axis != "auto":
        raise _no_effect(plan, "sequence_gradients", "say which ranks share tokens: Plan(sequence_axis=...)")
    if not plan.pilots and plan.dispatch not in ("halo", "auto"):
        raise _no_effect(plan, "pilots", f"dispatch={plan.dispatch!r} is not 'halo'")


def check_of_graphs(plan: Plan) -> None:
    """The same for a flat graph, which no mesh and no planner sees.

    Raises:
        InvalidPlan: see above.
    """
    for field in sorted(_changed(plan)):
        if field in _OF_A_MESH:
            value = getattr(plan, field)
            raise InvalidPlan(f"Plan({field}={value!r}): experts are spread by moefx.compile(mesh=...) only")
        if field in (*_OF_THE_PLANNER, "tokens", "layout") or getattr(plan, field) == "auto" != _DEFAULTS[field]:
            raise _no_effect(plan, field, "the planner is asked by moefx.compile only", "for a graph")
    check_effects(plan, None)


def check_layout(plan: Plan, mesh: Any) -> None:
    """Warn of what a layout of the planner counts on and `compile` does not do.

    Raises:
        InvalidPlan: the mesh is not that of the layout, or the layout has pipeline stages and there is no mesh.
    """
    if plan.layout is None:
        return
    counts, own = dict(plan.layout), "Plan(layout=None) says that you see to that yourself"
    sizes: dict[str, int] = {}
    if mesh is not None:
        sizes = dict(zip(mesh.mesh_dim_names or (), mesh.shape, strict=True))
    ep = counts.get("ep", 1)
    if mesh is not None and ep == 1:
        raise InvalidPlan(
            "the planner's layout has the experts on every rank (EP = 1), and a mesh spreads them: leave the mesh out. "
            + own
        )
    if mesh is None and (stages := counts.get(_STAGES, 1)) > 1:
        raise InvalidPlan(
            f"the planner's layout has {stages} pipeline stages, and compile cuts no model into stages: give it the "
            f"module of this rank's stage. {own}"
        )
    if mesh is not None:
        axes = plan.expert_axis if isinstance(plan.expert_axis, tuple) else (plan.expert_axis,)
        found = {_STAGES: sizes.get(_STAGES, 1), _SHARED: sizes.get(_SHARED, 1)}
        found["ep"] = math.prod(sizes.get(axis, 1) for axis in axes if axis)
        if wrong := [f"{name}={counts[name]} ({there} in the mesh)" for name, there in found.items()
                     if counts.get(name, 1) != there]:  # fmt: skip
            shown = ", ".join(f"{name}={size}" for name, size in sizes.items())
            raise InvalidPlan(
                f"the planner's layout has {', '.join(wrong)}, where the mesh is {shown}: take "
                f"init_device_mesh(device_type, **entry.mesh). {own}"
            )
    if left := _left_to_the_user(counts, plan):
        warnings.warn(
            f"moefx: the planner's layout counts on {', '.join(left)}, which compile does not do: memory and time are "
            f"others without. {own}",
            stacklevel=4,
        )


def _left_to_the_user(counts: dict[str, int], plan: Plan) -> list[str]:
    tp, zero, micro = (counts.get(name, 1) for name in (_SHARED, "zero", "microbatches"))
    return [
        *([f"tensor parallelism of the dense matrices over {tp} ranks"] if tp > 1 else []),
        *([f"ZeRO-{zero} (fully_shard)"] if counts.get("zero", 0) else []),
        *([f"{micro} micro-batches"] if micro > 1 else []),
        *(["layers that run again (torch.utils.checkpoint)"] if counts.get("recompute", 0) else []),
    ]


_DEFAULTS = {f.name: f.default for f in dataclasses.fields(Plan)}


def _changed(plan: Plan) -> set[str]:
    return {name for name, default in _DEFAULTS.items() if getattr(plan, name) != default}


def _no_effect(plan: Plan, field: str, why: str, where: str = "") -> InvalidPlan:
    return InvalidPlan(f"Plan({field}={getattr(plan, field)!r}) has no effect{f' {where}' if where else ''}: {why}")
