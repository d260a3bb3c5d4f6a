"""What `torch.utils.checkpoint` around a spread block must keep."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import torch
from torch.utils.checkpoint import CheckpointPolicy

# A second routing may differ from the first by rounding, and a second exchange costs what the first did.
_KEPT = frozenset(
    {
        "moefx::place_choices", "moefx::chunk_choices", "moefx::near_and_far", "moefx::plan_dispatch",
        "moefx::exchange_counts", "moefx::read_counts", "moefx::all_to_all_rows", "moefx::wait_rows",
        "moefx::all_to_all_back", "moefx::wait_sums", "moefx::agree_length", "moefx::gather_tokens",
        "moefx::wait_gathered", "moefx::scatter_sums", "moefx::wait_scattered", "moefx::shard_tokens",
        "moefx::unshard_tokens", "moefx::build_pft", "aten::topk", "aten::sort", "aten::argmax", "aten::max.dim",
        "aten::multinomial",
    }
)  # fmt: skip


_WAITS = ("moefx::wait_rows", "moefx::wait_sums", "moefx::wait_gathered", "moefx::wait_scattered")


class _Here(threading.local):
    """Of this thread: what the last wait has read."""

    arrived: Sequence[torch.UntypedStorage] = ()


_here = _Here()


def save_routing(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """A policy for `torch.utils.checkpoint.create_selective_checkpoint_contexts`: keep the router's choice and what the
    exchanges brought, recompute the rest.

    Nothing reads rows as they arrived behind their wait, but they would be kept with the result of the exchange: so
    their memory is freed, when the wait has run, which is when another operation asks. (Of checkpoints in each other
    each asks for the same one.)
    """
    full_name = op.name() if isinstance(op, torch._ops.OpOverload) else ""
    name = full_name.partition(".")[0]
    arriving: list[torch.UntypedStorage] = []
    if name in _WAITS and not ctx.is_recompute:
        sent = args[0] if isinstance(args[0], (list, tuple)) else [args[0]]
        arriving = [t.untyped_storage() for t in sent if type(t) is torch.Tensor]  # not those of a trace
    still = {storage.data_ptr() for storage in arriving}
    for storage in _here.arrived:
        if storage.data_ptr() not in still:
            storage.resize_(0)
    _here.arrived = arriving
    return CheckpointPolicy.MUST_SAVE if not _KEPT.isdisjoint((name, full_name)) else CheckpointPolicy.PREFER_RECOMPUTE
