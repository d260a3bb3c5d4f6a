"""The ways to use the axes of a mesh.

The names of the axes fix PP, TP and DP: "pp" has the stages of a pipeline, the ranks of "tp" or of
`Plan(sequence_axis=...)` have the same tokens, and all other axes have tokens of their own. The expert axes and SSMB
remain to be chosen.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from .._plan import Plan
from ..errors import InvalidPlan
from ..runtime.ranks.sharding import EXPERT_AXIS, PIPELINE_AXIS, TENSOR_AXIS, resolve_expert_axes
from .layout import Layout
from .platforms import Platform


@dataclasses.dataclass(frozen=True)
class AxisUse:
    """One way to use the axes.

    Attributes:
        expert_axis: axes that experts are spread over.
        sequence_axis: axis of SSMB, or None.
        shared: axis whose ranks have the same tokens, "" without one.
        tp, dp: ranks of a stage with the same tokens, and with other tokens.
        group: ranks of one expert group.
    """

    expert_axis: tuple[str, ...] = ()
    sequence_axis: str | None = None
    shared: str = ""
    tp: int = 1
    dp: int = 1
    group: tuple[int, ...] = (0,)

    @property
    def ep(self) -> int:
        return len(self.group)

    def layout(self, **fields: Any) -> Layout:
        """Return the layout of one stage.

        Args:
            fields: further fields of `Layout`.
        """
        return Layout(tp=self.tp, dp=self.dp, ep=self.ep, ssmb=self.sequence_axis is not None, **fields)

    def experts_first(self, platform: Platform) -> bool:
        """Return whether the ranks of a group are as close to each other as neighbouring ranks."""
        stride = -(-(max(self.group) - min(self.group)) // max(self.ep - 1, 1))
        return platform.list_levels(self.ep, stride or 1) == platform.list_levels(self.ep)

    def __str__(self) -> str:
        if not self.expert_axis:
            return "one device"
        ssmb = f", SSMB over {self.sequence_axis}" if self.sequence_axis else ""
        return f"experts over {' x '.join(self.expert_axis)} ({self.ep}){ssmb}"


def list_axis_uses(mesh: Any, plan: Plan, *, is_whole: bool = True) -> list[AxisUse]:
    """List the uses of a mesh that a plan leaves open and in which an expert sees each token once.

    Ranks with the same tokens share experts by SSMB or not at all. An axis "ep" is always the expert axis.

    Args:
        is_whole: whether the mesh has all ranks. Flattening several axes to one needs all ranks, so it is left out
            otherwise.

    Raises:
        InvalidPlan: experts cannot be spread over any axis, or the axes have no names.
    """
    names = mesh.mesh_dim_names or ()
    sizes: dict[str, int] = dict(zip(names, mesh.mesh.shape if names else (), strict=True))
    token_axis = plan.sequence_axis or (TENSOR_AXIS if sizes.get(TENSOR_AXIS, 1) > 1 else None)
    tp = sizes.get(token_axis, 1) if token_axis else 1
    ranks = math.prod(size for name, size in sizes.items() if name != PIPELINE_AXIS)

    def use(axes: tuple[str, ...], sequence_axis: str | None) -> AxisUse:
        in_order = tuple(name for name in sizes if name in axes)
        group = mesh.mesh[tuple(slice(None) if name in axes else 0 for name in sizes)]
        return AxisUse(in_order, sequence_axis, token_axis or "", tp, ranks // tp, tuple(group.flatten().tolist()))

    if plan.expert_axis != "auto" or not sizes:
        return [use(resolve_expert_axes(mesh, plan.expert_axis), plan.sequence_axis)]
    candidates = [name for name in sizes if name not in (PIPELINE_AXIS, token_axis)]
    large_axes = [name for name in candidates if sizes[name] > 1] or candidates
    choices = [(EXPERT_AXIS,)] if EXPERT_AXIS in candidates else [*((name,) for name in large_axes), tuple(large_axes)]
    uses = []
    for axes in dict.fromkeys(choices):
        uses += [use((*axes, token_axis), token_axis)] if token_axis else []
        uses += [use(axes, None)] if axes and not plan.sequence_axis else []
    uses = [choice for choice in uses if is_whole or len(choice.expert_axis) == 1]
    if not uses:
        axes_text = ", ".join(f"{name}={size}" for name, size in sizes.items())
        explanation = "" if is_whole else "; axes are flattened only if the mesh has all ranks"
        raise InvalidPlan(
            f"Plan(expert_axis='auto'): a mesh of {axes_text} has no axis that experts can be spread over{explanation}"
        )
    return uses
