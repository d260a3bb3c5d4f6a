"""Process groups by which hosts agree on values without waiting for their GPUs."""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist


def takes_cpu_tensors(group: dist.ProcessGroup) -> bool:
    """Return whether the collectives of a group take tensors on the CPU."""
    return torch.device("cpu") in group._device_types


def make_host_group(ranks: Sequence[int], name: str, timeout: float | None = None) -> dist.ProcessGroup:
    """Make a group of gloo. Collective over its ranks, and over no others.

    Args:
        ranks: ranks in the world.
        name: a description for debuggers.
        timeout: seconds; None for torch's default.
    """
    limit = None if timeout is None else datetime.timedelta(seconds=timeout)
    options: Any = dict(timeout=limit, use_local_synchronization=True, group_desc=name)
    group: Any = dist.new_group(list(ranks), backend="gloo", **options)
    return group
