"""Find the part of a reference's results that a rank of a spread model can compare."""

from __future__ import annotations

from torch import nn

from ..comparison.rank_shares import Shares


def find_shares(compiled: nn.Module) -> Shares | None:
    """Return this rank's part; None for a model that is not spread over a mesh."""
    from ..distribution.expert_layouts import find_expert_layouts  # torch.distributed is not in every build

    stacked, own_names, other_names, group, sequence = {}, set(), set(), "", None
    for block, layout in find_expert_layouts(compiled).items():
        prefix, group = f"{block}." * bool(block), layout.placement.group
        local_experts, sequence = layout.placement.local_experts, layout.sequence
        stacked |= {prefix + name: layout.placement for name in layout.parameters.stacked}
        for expert, names in enumerate(layout.parameters.separate):
            (own_names if expert in local_experts else other_names).update(prefix + name for name in names)
    names = frozenset(own_names), frozenset(other_names - own_names)
    return Shares(group, stacked, *names, sequence, "" in find_expert_layouts(compiled)) if group else None
