"""Find the expert axis of a mesh, and check that its ranks agree on plan, versions and blocks."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from .._plan import Plan
from .._version import __version__
from ..errors import InvalidInput, InvalidPlan
from ..ir.ops.uneven_all_to_all import format_ranks, get_group
from ..runtime.ranks.sharding import resolve_expert_axes, select_mesh_axis
from ..runtime.ranks.topology import ExpertAxis
from ..util.rank_values import gather_or_raise, gather_values


def find_expert_axis(mesh: DeviceMesh, plan: Plan) -> ExpertAxis:
    """Find the expert axis that a plan names.

    Raises:
        InvalidPlan: the mesh has no such axis.
    """
    if plan.sequence_axis is not None:
        select_mesh_axis(mesh, "sequence_axis", (plan.sequence_axis,))
    expert_mesh = select_mesh_axis(mesh, "expert_axis", resolve_expert_axes(mesh, plan.expert_axis))
    _check_placement(expert_mesh, plan)
    return ExpertAxis(mesh, expert_mesh, plan.node_size, plan.topology_levels, plan.timeout)


def _check_placement(axis: DeviceMesh, plan: Plan) -> None:
    ranks = axis.mesh.tolist()
    are_neighbours = sorted(ranks) == list(range(min(ranks), min(ranks) + len(ranks)))
    if plan.placement is None or len(ranks) == 1 or are_neighbours == (plan.placement == "ep_first"):
        return
    raise InvalidPlan(
        f"Plan(placement={plan.placement!r}): an expert group of the mesh has the {format_ranks(ranks)}, which are "
        f"{'neighbours' if are_neighbours else 'no neighbours'}: put the expert axis "
        f"{'before' if are_neighbours else 'after'} the data-parallel axis of the mesh"
    )


def check_same_blocks(axis: ExpertAxis, plan: Plan, summary: str) -> None:
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
    facts_by_rank = gather_values(own_facts, get_group(axis.group))
    differences = []
    for name, fact in own_facts.items():
        others = {number: facts.get(name) for number, facts in enumerate(facts_by_rank) if facts.get(name) != fact}
        if others:
            number, other = next(iter(others.items()))
            count = f" ({len(others)} of {axis.size} differ)" if len(others) > 1 else ""
            differences.append(f"{name}: rank {axis.rank} of the axis has {fact}, rank {number} has {other}{count}")
    if differences:
        raise InvalidPlan(f"the ranks of mesh axis {axis.name!r} do not agree on " + "; ".join(differences))


def gather_by_rank(mesh: DeviceMesh, own_value: Any) -> dict[int, Any]:
    """Gather a value from all ranks of a mesh, one axis after the other. Returns values by world rank. Collective."""
    value_by_rank = {dist.get_rank(): own_value}
    for dim in range(mesh.ndim):
        along_axis = gather_values(value_by_rank, mesh.get_group(dim))
        value_by_rank = {rank: value for values in along_axis for rank, value in values.items()}
    return value_by_rank


def raise_on_all_ranks(mesh: DeviceMesh, error: Exception | None, value: Any = None) -> dict[int, Any]:
    """Raise on every rank of a mesh if one of them has an error: its own error there, `InvalidInput` on others.
    Collective.

    Returns:
        The values of all ranks, by world rank.
    """
    ranks = sorted(mesh.mesh.flatten().tolist())

    def gather(own_value: Any) -> list[Any]:
        value_by_rank = gather_by_rank(mesh, own_value)
        return [value_by_rank[rank] for rank in ranks]

    names = [f"rank {rank}" for rank in ranks]
    return dict(zip(ranks, gather_or_raise(value, error, gather, names, InvalidInput), strict=True))


def _describe_nodes(axis: ExpertAxis) -> str:
    """Describe the nodes as this rank sees them: other ranks may have another LOCAL_WORLD_SIZE."""
    try:
        return f"{' x '.join(map(str, axis.topology.sizes))}, in the order {axis.topology.order}"
    except InvalidPlan as error:
        return f"none, {error}"
