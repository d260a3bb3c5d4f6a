"""Find the part of a reference's results that a rank of a spread model can compare."""

from __future__ import annotations

from torch import nn

from ..comparison.rank_shares import Shares


def find_shares(compiled: nn.Module) -> Shares | None:
    """This rank's part; None for a model that is not spread over a mesh."""
    from ..distribution.block_distribution import spread_blocks  # torch.distributed is not in every build

    stacked, here, elsewhere, group, sequence = {}, set(), set(), "", None
    for block, spread in spread_blocks(compiled).items():
        prefix, group = f"{block}." * bool(block), spread.placement.group
        own, sequence = spread.placement.local_experts, spread.sequence
        stacked |= {prefix + name: spread.placement for name in spread.parameters.stacked}
        for expert, names in enumerate(spread.parameters.separate):
            (here if expert in own else elsewhere).update(prefix + name for name in names)
    names = frozenset(here), frozenset(elsewhere - here)
    return Shares(group, stacked, *names, sequence, "" in spread_blocks(compiled)) if group else None
