"""Draw the experts of tokens by a skewed popularity, and count the rows from rank to rank.

Letters: T tokens, K experts of a token, E experts, W ranks of an expert axis.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import operator
from collections.abc import Sequence

import torch
from torch import Tensor

from ..layout import PlannedDispatch

_MAX_WEIGHT = 2**40  # weight of the most popular expert. Integer weights exclude that rounding draws an expert twice.


def compute_zipf_weights(num_experts: int, skew: float) -> Tensor:
    """Return integer weights of the experts by Zipf's law, int64 [E]: the n-th one has n^-skew of the first."""
    order = torch.arange(1, num_experts + 1, dtype=torch.float64)
    return (_MAX_WEIGHT * order**-skew).round().long().clamp(min=1)


def draw_choices(weights: Tensor, num_tokens: int, top_k: int, generator: torch.Generator) -> Tensor:
    """Draw the experts of each token without replacement, by `weights` [E].

    Returns:
        int64 [K, T], ascending for each token.
    """
    ends = weights.cumsum(0)
    begins = ends - weights
    left = ends[-1].expand(num_tokens)
    experts: list[Tensor] = []
    for _ in range(top_k):
        at = (torch.rand(num_tokens, dtype=torch.float64, generator=generator) * left).long()
        at = torch.minimum(at, left - 1)
        for expert in experts:  # skip the experts that are already chosen
            at = at + weights[expert] * (at >= begins[expert])
        new = torch.searchsorted(ends, at, right=True)
        left = left - weights[new]
        for i, expert in enumerate(experts):
            experts[i], new = torch.minimum(expert, new), torch.maximum(expert, new)
        experts.append(new)
    return torch.stack(experts)


@dataclasses.dataclass(frozen=True)
class Traffic:
    """Rows from rank to rank in one exchange.

    Attributes:
        hops: int64 [W, W] for each hop, senders first. Rows on the diagonal do not travel.
        beside: int64 [W, W] of the exchange beside all hops but the last (HALO's phase I), or None.
    """

    hops: tuple[Tensor, ...]
    beside: Tensor | None = None


def count_traffic(
    choices: Tensor, sources: Tensor, num_experts: int, sizes: Sequence[int], dispatch: PlannedDispatch
) -> Traffic:
    """Count the rows that ranks send each other.

    Args:
        choices: [K, T], as returned by `draw_choices`.
        sources: [T], the position of each token's rank.
        sizes: units within a unit of the level above, coarse to fine; their product is W.
        dispatch: "flat": a row for each slot. "dedup": a row for each rank. "rbd": a pilot for each unit, forwarded by
            the rank at the sender's position there (X-MoE section 4.2). "halo": as "rbd", with the rows that stay in
            the node in an exchange beside (Piper section V). "gather": a row for every rank.
    """
    ranks = math.prod(sizes)
    to = choices // (num_experts // ranks)
    if dispatch == "flat":
        return Traffic((_count_hop(to, sources, ranks, ranks, 1, None, counts_slots=True),))
    if dispatch == "gather":
        return Traffic((torch.bincount(sources, minlength=ranks)[:, None].expand(ranks, ranks),))
    if dispatch == "dedup":
        return Traffic((_count_hop(to, sources, ranks, ranks, 1),))
    behind = [ranks // units for units in itertools.accumulate(sizes, operator.mul, initial=1)]
    levels = list(itertools.pairwise(behind))
    if dispatch == "rbd":
        return Traffic(tuple(_count_hop(to, sources, ranks, *level) for level in levels))
    is_near = to // sizes[-1] == sources // sizes[-1]
    hops = tuple(_count_hop(to, sources, ranks, *level, ~is_near) for level in levels)
    return Traffic(hops, _count_hop(to, sources, ranks, *levels[-1], is_near))


def _count_hop(
    to: Tensor,
    sources: Tensor,
    ranks: int,
    unit_size: int,
    behind: int,
    taking_part: Tensor | None = None,
    counts_slots: bool = False,
) -> Tensor:
    """Count the rows of one hop between units of `behind` ranks inside of units of `unit_size` ranks.

    In each unit the rank at the sender's position receives.

    Args:
        taking_part: bool [K, T], choices that take part; None: all.
        counts_slots: count a row for each slot, not for each unit.
    """
    counts = torch.zeros(ranks * ranks, dtype=torch.int64)
    last = torch.full_like(sources, -1)
    for i, rank in enumerate(to):  # ascending, so equal units follow each other
        unit = rank // behind
        new = torch.ones_like(unit, dtype=torch.bool) if counts_slots else unit != last
        if taking_part is not None:
            new = new & taking_part[i]
            last = torch.where(taking_part[i], unit, last)
        else:
            last = unit
        sender = rank // unit_size * unit_size + sources % unit_size
        receiver = unit * behind + sources % behind
        counts += torch.bincount((sender * ranks + receiver)[new], minlength=ranks * ranks)
    return counts.view(ranks, ranks)


def count_choices(choices: Tensor, num_experts: int, ranks: int) -> Tensor:
    """Count the slots that select each rank's experts, int64 [W]."""
    return torch.bincount((choices // (num_experts // ranks)).flatten(), minlength=ranks)
