"""The checkpoint policy: the values that each expert MLP keeps for its backward (MoEBlaze section 5).

Router, expert index and layout are ordinary values of the block: they are never recomputed.
"""

from __future__ import annotations

from typing import Any

import torch

from ..ir.graphs.block_graph import BlockGraph
from .pass_manager import graph_pass


@graph_pass(level="fused", name="checkpoint")
def set_checkpoint_policy(block: BlockGraph, plan: Any) -> BlockGraph:
    """Set the policy of every `expert_mlp`. `"auto"` is `"h"` until the planner has decided."""
    keep = "h" if plan.checkpoint == "auto" else plan.checkpoint
    block = block.copy()
    for node in block.find(torch.ops.moefx.expert_mlp.default):
        node.update_kwarg("keep", keep)
        node.meta.pop("val", None)  # the number of outputs depends on the policy
    return block
