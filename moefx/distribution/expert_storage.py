"""Find how a block stores its experts' parameters: stacked in one tensor, or separately."""

from __future__ import annotations

from collections.abc import Sequence

from ..compiler.block_compiler import BlockRewrite
from ..errors import Refused
from ..matching.lift.canonical_form import has_matrix_products
from ..matching.terms.parameter_slices import ParameterSlice
from ..passes.exchange.routed_region import RoutedRegion
from ..runtime.ranks.sharding import ExpertParameters


def find_expert_parameters(result: BlockRewrite) -> ExpertParameters:
    """Find the experts' parameters of a block, and how the block stores them."""
    groups = result.match.groups
    if len(groups) > 1:  # see `RoutedRegion.of`
        groups = [g for g in groups if len(g.ids) > 1 and has_matrix_products(g.body)]
    if len(groups) != 1 or len(groups[0].ids) != RoutedRegion.of(result.graph).num_experts:
        raise Refused(
            f"the block has experts of {len(result.match.groups)} kinds, and {len(groups)} of the kinds have several "
            "experts with matrix products: one kind is spread over a mesh, the others stay on every rank",
            remedy="give each kind a module of its own, with its own router",
        )
    (group,) = groups
    stacked: dict[str, int] = {}
    separate: list[list[str]] = [[] for _ in group.ids]
    for table in group.tables:
        names = [part.fqn for part in table]
        if len(set(names)) == 1:
            stacked[names[0]] = _expert_length(table)
        elif len(set(names)) == len(names):
            for expert_names, name in zip(separate, names, strict=True):
                expert_names.append(name)
        else:
            shared = next(name for name in names if names.count(name) > 1)
            raise Refused(
                f"{names.count(shared)} of {len(names)} experts share the parameter {shared}, and would be on "
                "different ranks",
                culprits=(shared,),
                remedy="give each expert a parameter of its own: nn.Parameter(weight.clone())",
            )
    return ExpertParameters(
        stacked,
        tuple(tuple(dict.fromkeys(expert_names)) for expert_names in separate) if any(separate) else (),
    )


def _expert_length(table: Sequence[ParameterSlice]) -> int:
    """Find the experts' parts of a parameter's first axis, in order of the experts.

    Raises:
        Refused: the experts are stored otherwise.
    """
    row_ranges = [_first_axis_range(part) for part in table]
    length = row_ranges[0][1] - row_ranges[0][0] if row_ranges[0] else 0
    for e, (part, rows) in enumerate(zip(table, row_ranges, strict=True)):
        if rows != (e * length, (e + 1) * length):
            raise Refused(
                f"the experts' parameter {part.fqn} does not store expert after expert along its first axis",
                culprits=(part.fqn,),
                remedy="store it as [experts, ...], with the experts in order",
            )
    return length


def _first_axis_range(part: ParameterSlice) -> tuple[int, int] | None:
    op, *arguments = part.steps[0] if part.steps else ("",)
    if op == "select" and arguments[1][0][0] == 0:
        return arguments[1][0][1], arguments[1][0][1] + 1
    if op == "slice" and (arguments[1], arguments[4]) == (0, 1):
        return arguments[2], arguments[3]
    return None
