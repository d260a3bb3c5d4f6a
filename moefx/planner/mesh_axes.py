"""The ways to use the axes of a mesh.

Their names fix PP, TP and DP: the ranks of "pp" have other stages of a pipeline, those of "tp", or of
`Plan(sequence_axis=...)`, have the same tokens, all others have tokens of their own. Left to choose are the axes that
experts are spread over, and SSMB.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from .._plan import Plan
from ..errors import InvalidPlan
from ..runtime.sharding import resolve_expert_axes
from .layout import Layout
from .platforms import Platform

STAGES, SHARED, EXPERTS = "pp", "tp", "ep"


@dataclasses.dataclass(frozen=True)
class AxisUse:
    """One way.

    Attributes:
        shared: the axis whose ranks are taken to have the same tokens, "" if there is none.
        tp, dp: ranks with the same tokens, and with others, of a stage.
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

    def layout(self, **more: Any) -> Layout:
        """Of one stage."""
        return Layout(tp=self.tp, dp=self.dp, ep=self.ep, ssmb=self.sequence_axis is not None, **more)

    def experts_first(self, platform: Platform) -> bool:
        """Whether the ranks of a group are as near each other as neighbours are."""
        stride = -(-(max(self.group) - min(self.group)) // max(self.ep - 1, 1))
        return platform.levels(self.ep, stride or 1) == platform.levels(self.ep)

    def __str__(self) -> str:
        if not self.expert_axis:
            return "one device"
        ssmb = f", SSMB over {self.sequence_axis}" if self.sequence_axis else ""
        return f"experts over {' x '.join(self.expert_axis)} ({self.ep}){ssmb}"


def list_axis_uses(mesh: Any, asked: Plan, *, is_whole: bool = True) -> list[AxisUse]:
    """Of a mesh, those that a plan leaves open, in which an expert sees each token once: ranks with the same tokens
    share experts by SSMB or not at all. An axis "ep" is that of experts, whatever else there is.

    Args:
        is_whole: it has all ranks there are. Else axes are not made one, which takes all ranks.

    Raises:
        InvalidPlan: the mesh has no axis that experts can be spread over, or its axes have no names.
    """
    names = mesh.mesh_dim_names or ()
    sizes: dict[str, int] = dict(zip(names, mesh.mesh.shape if names else (), strict=True))
    shared = asked.sequence_axis or (SHARED if sizes.get(SHARED, 1) > 1 else None)
    tp = sizes.get(shared, 1) if shared else 1
    ranks = math.prod(size for name, size in sizes.items() if name != STAGES)

    def use(axes: tuple[str, ...], sequence_axis: str | None) -> AxisUse:
        in_order = tuple(name for name in sizes if name in axes)
        group = mesh.mesh[tuple(slice(None) if name in axes else 0 for name in sizes)]
        return AxisUse(in_order, sequence_axis, shared or "", tp, ranks // tp, tuple(group.flatten().tolist()))

    if asked.expert_axis != "auto" or not sizes:
        return [use(resolve_expert_axes(mesh, asked.expert_axis), asked.sequence_axis)]
    own = [name for name in sizes if name not in (STAGES, shared)]
    several = [name for name in own if sizes[name] > 1] or own
    choices = [(EXPERTS,)] if EXPERTS in own else [*((name,) for name in several), tuple(several)]
    found = []
    for axes in dict.fromkeys(choices):
        found += [use((*axes, shared), shared)] if shared else []
        found += [use(axes, None)] if axes and not asked.sequence_axis else []
    found = [each for each in found if is_whole or len(each.expert_axis) == 1]
    if not found:
        shown = ", ".join(f"{name}={size}" for name, size in sizes.items())
        whole = "" if is_whole else ", and axes are made one where it has all ranks there are"
        raise InvalidPlan(
            f"Plan(expert_axis='auto'): a mesh of {shown} has no axis that experts can be spread over{whole}"
        )
    return found
