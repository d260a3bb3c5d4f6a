"""The checkpoint policy: what each expert MLP keeps for its backward (MoEBlaze section 5).

The router, the chosen experts and the layout are never recomputed: they are ordinary values of the block.
"""

from __future__ import annotations

from typing import Any

import torch

from ..ir.block_graph import BlockGraph
from .pass_manager import graph_pass


@graph_pass(level="fused")
def checkpoint(block: BlockGraph, plan: Any) -> BlockGraph:
    """Set the policy of every `expert_mlp`. `"auto"` is `"h"` until the planner has decided."""
    keep = "h" if plan.checkpoint == "auto" else plan.checkpoint
    block = block.copy()
    for node in block.find(torch.ops.moefx.expert_mlp.default):
        node.update_kwarg("keep", keep)
        node.meta.pop("val", None)  # another policy, another number of outputs
    return block
