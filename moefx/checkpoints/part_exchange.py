"""Gather regions of tensors, whose parts several ranks hold, on the rank that writes them."""

from __future__ import annotations

import hashlib
import math
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..errors import InvalidCheckpoint, MoefxError
from ..util.rank_group import RankGroup
from .model_tensors import LocalPart
from .tensor_regions import Region


class PartExchange:
    """The parts of all ranks. Collective.

    Args:
        parts: what this rank holds.
        ranks: the ranks that hold the model.
        device: of the group's collectives.

    Attributes:
        described: shape and dtype of each tensor, by name.
    """

    def __init__(self, parts: dict[str, LocalPart], ranks: RankGroup, device: torch.device):
        self.ranks, self.device, self._parts = ranks, device, parts
        descriptions = {name: (part.shape, part.tensor.dtype, part.region) for name, part in parts.items()}
        self.described: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
        self._owners: dict[str, dict[Region, list[int]]] = {}
        for rank, held in zip(ranks.ranks, ranks.gather(descriptions), strict=True):
            for name, (shape, dtype, region) in held.items():
                if self.described.setdefault(name, (shape, dtype)) != (shape, dtype):
                    raise InvalidCheckpoint(
                        f"{name} has different shapes or dtypes on ranks: {shape}, {dtype} on {rank}"
                    )
                self._owners.setdefault(name, {}).setdefault(region, []).append(rank)
        for name, (shape, _) in self.described.items():
            held_elements = sum(math.prod(end - first for first, end in region) for region in self._owners[name])
            if held_elements != math.prod(shape):
                raise MoefxError(
                    f"the ranks hold {held_elements} of the {math.prod(shape)} elements of {name}, in the regions "
                    f"{list(self._owners[name])}: every rank that holds a part of the model has to call this"
                )

    def gather(self, name: str, region: Region, out: Tensor, writer: int) -> None:
        """Write a region of a tensor into `out` on the rank `writer`. All ranks call this in the same order.

        Args:
            out: has the region's shape; a meta tensor on other ranks.
        """
        for held, owners in self._owners[name].items():
            overlap = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(region, held, strict=True))
            if any(first >= end for first, end in overlap):
                continue
            owner = writer if writer in owners else owners[0]
            if self.ranks.rank not in (owner, writer):
                continue
            view, dtype = out[_cut(overlap, region)], self.described[name][1]
            if self.ranks.rank == owner:
                part = self._parts[name].tensor[_cut(overlap, held)]
                if owner != writer:
                    flat = part.to(self.device).contiguous().reshape(-1)
                    dist.send(flat.view(torch.uint8), writer, group=self.ranks.group)
                    continue
                view.copy_(part)
                continue
            is_direct = view.is_contiguous() and view.device.type == self.device.type and view.dtype == dtype
            part = view if is_direct else torch.empty(view.shape, dtype=dtype, device=self.device)
            dist.recv(part.reshape(-1).view(torch.uint8), owner, group=self.ranks.group)
            if not is_direct:
                view.copy_(part)

    def merge_tied(self, tied: dict[str, str]) -> dict[str, str]:
        """Return the second names of parameters that any rank has. Collective."""
        return {name: first for tied_of_rank in self.ranks.gather(tied) for name, first in tied_of_rank.items()}

    def check_same_plan(self, plan: Any) -> None:
        """Check that all ranks have the same plan, which decides on the order of sends and receives. Collective.

        Raises:
            MoefxError: a rank has another plan.
        """
        digests = self.ranks.gather(hashlib.sha256(repr(plan).encode()).hexdigest())
        others = [rank for rank, digest in zip(self.ranks.ranks, digests, strict=True) if digest != digests[0]]
        if others:
            raise MoefxError(
                f"ranks {others} would write other files than rank {self.ranks.ranks[0]}: build the same model, and "
                "pass the same max_shard_size"
            )


def _cut(overlap: Region, around: Region) -> tuple[slice, ...]:
    """Return the index of a region in a tensor that holds the region `around`."""
    return tuple(slice(a - first, b - first) for (a, b), (first, _) in zip(overlap, around, strict=True))
