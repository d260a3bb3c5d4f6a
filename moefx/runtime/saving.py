"""What `torch.utils.checkpoint` around a spread block must keep."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.checkpoint import CheckpointPolicy

# A second routing may differ from the first by rounding, and a second exchange costs what the first did.
_KEPT = frozenset(
    {
        "moefx::place_choices", "moefx::chunk_choices", "moefx::near_and_far", "moefx::plan_dispatch",
        "moefx::exchange_counts", "moefx::read_counts", "moefx::all_to_all_rows", "moefx::wait_rows",
        "moefx::all_to_all_back", "moefx::wait_sums", "moefx::shard_tokens", "moefx::unshard_tokens",
        "moefx::build_pft", "aten::topk", "aten::sort",
    }
)  # fmt: skip


def save_routing(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """A policy for `torch.utils.checkpoint.create_selective_checkpoint_contexts`: keep the router's choice and what the
    exchanges brought, recompute the rest."""
    name = op.name().partition(".")[0] if isinstance(op, torch._ops.OpOverload) else ""
    return CheckpointPolicy.MUST_SAVE if name in _KEPT else CheckpointPolicy.PREFER_RECOMPUTE
