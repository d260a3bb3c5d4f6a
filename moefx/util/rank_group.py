"""The ranks that save a model together. They gather values, and raise each other's errors."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch.distributed as dist

from .rank_values import gather_or_raise, gather_values


class RankGroup:
    """The ranks of a process group, or this process alone.

    Args:
        group: None if this process holds everything.

    Attributes:
        rank, ranks: this rank, and all ranks of the group, in the world.
        is_first: whether this rank does what one rank does for all.
    """

    def __init__(self, group: dist.ProcessGroup | None):
        self.group = group
        self.ranks = [0] if group is None else dist.get_process_group_ranks(group)
        self.rank = self.ranks[0] if group is None else dist.get_rank()
        self.is_first = self.rank == self.ranks[0]

    def gather(self, value: Any) -> list[Any]:
        """Return the values of all ranks. Collective."""
        return [value] if self.group is None else gather_values(value, self.group)

    @contextlib.contextmanager
    def raise_together(self) -> Iterator[None]:
        """If the block raises on any rank, raise on all ranks. Collective; the block must not communicate.

        Raises:
            MoefxError: the block raised on another rank. A rank whose own block raised raises that error.
        """
        error: Exception | None = None
        try:
            yield
        except Exception as found:
            error = found
        gather_or_raise(None, error, self.gather, [f"rank {rank}" for rank in self.ranks])
