"""Exchange Python values between ranks."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist


def gather_values(value: Any, group: dist.ProcessGroup) -> list[Any]:
    """Return the values of all ranks of a group, in its order. Collective. `value` can be pickled."""
    values: list[Any] = [None] * group.size()
    dist.all_gather_object(values, value, group=group)
    return values
