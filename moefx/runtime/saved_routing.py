"""A policy for `torch.utils.checkpoint` around a spread block."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils.checkpoint import CheckpointPolicy, SelectiveCheckpointContext

# Recomputed routing may differ by rounding, and a recomputed exchange costs as much as the first.
_SAVED_OPS = frozenset(
    {
        "moefx::place_choices", "moefx::chunk_choices", "moefx::near_and_far", "moefx::plan_dispatch",
        "moefx::exchange_counts", "moefx::read_counts", "moefx::all_to_all_rows", "moefx::wait_rows",
        "moefx::all_to_all_back", "moefx::wait_sums", "moefx::agree_length", "moefx::gather_tokens",
        "moefx::wait_gathered", "moefx::scatter_sums", "moefx::wait_scattered", "moefx::pull_tokens",
        "moefx::pull_sums", "moefx::shard_tokens", "moefx::unshard_tokens", "moefx::build_pft", "aten::topk",
        "aten::sort", "aten::argmax", "aten::max.dim", "aten::multinomial",
    }
)  # fmt: skip


_WAIT_OPS = ("moefx::wait_rows", "moefx::wait_sums", "moefx::wait_gathered", "moefx::wait_scattered")


class _ThreadState(threading.local):
    """Storages that the last wait of this thread read."""

    arrived: Sequence[torch.UntypedStorage] = ()


_thread_state = _ThreadState()


def save_routing(
    ctx: SelectiveCheckpointContext, op: Callable[..., object], *args: Any, **kwargs: object
) -> CheckpointPolicy:
    """Return a policy for `torch.utils.checkpoint.create_selective_checkpoint_contexts`.

    Saves the router's selection and the results of exchanges, and recomputes the rest. The buffer of an exchange would
    stay alive with its result, although only its wait reads it. So its memory is freed at the next operation, when the
    wait has run. Nested checkpoints call the policy several times for one operation.
    """
    full_name = op.name() if isinstance(op, torch._ops.OpOverload) else ""
    name = full_name.partition(".")[0]
    arriving: list[torch.UntypedStorage] = []
    if name in _WAIT_OPS and not ctx.is_recompute:
        sent = args[0] if isinstance(args[0], (list, tuple)) else [args[0]]
        arriving = [t.untyped_storage() for t in sent if type(t) is torch.Tensor]  # skip fake tensors
    still = {storage.data_ptr() for storage in arriving}
    for storage in _thread_state.arrived:
        if storage.data_ptr() not in still:
            storage.resize_(0)
    _thread_state.arrived = arriving
    return (
        CheckpointPolicy.MUST_SAVE
        if not _SAVED_OPS.isdisjoint((name, full_name))
        else CheckpointPolicy.PREFER_RECOMPUTE
    )
