"""Run collectives over a group of one rank in captures: they return their inputs, and send nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.utils._pytree as pytree

_UNCHANGED = {"allreduce_", "broadcast_", "reduce_"}
_COPIES = {"_allgather_base_", "_reduce_scatter_base_", "allgather_", "alltoall_", "alltoall_base_", "reduce_scatter_"}


def is_single_rank_op(func: Any, args: tuple) -> bool:
    """Return whether an op of `torch.distributed` communicates in place over a group of one rank."""
    if getattr(func, "namespace", "") != "c10d" or func.overloadpacket.__name__ not in _UNCHANGED | _COPIES:
        return False
    groups = [a for a in args if isinstance(a, torch.ScriptObject) and "ProcessGroup" in str(a._type())]
    return all(dist.ProcessGroup.unbox(group).size() == 1 for group in groups)


def run_single_rank_op(func: Any, args: tuple, copy: Callable[[torch.Tensor, torch.Tensor], Any]) -> Any:
    """Return the result of an op that `is_single_rank_op`. Args: copy: writes the second tensor into the first."""
    from torch._C._distributed_c10d import FakeWork

    name, work = func.overloadpacket.__name__, FakeWork().boxed()
    if name in _COPIES:
        for target, source in zip(pytree.tree_leaves(args[0]), pytree.tree_leaves(args[1]), strict=True):
            copy(target, source)
    return work if name == "alltoall_base_" else (args[0], work)
