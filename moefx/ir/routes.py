"""Which rows go to which rank (X-MoE sections 4.1 and 4.2; Piper section V).

A choice of an expert is a place: position * num_slots + slot, -1 where the choice does not count. The ranks of the
expert axis are numbered by position: those of one node behind one another, and so on at each level of a topology
(`levels`, coarse to fine: [2, 4] is two nodes of four ranks). A hop is an exchange among the ranks that differ at one
level only; a place taken modulo the places of a unit of that level is a place within the unit. What arrives after a
hop is tokens with choices again, and so the next hop's plan is made as the first one's is.

Letters: S tokens, K choices, B = S*K, W ranks of a hop. `splits` [2,W] is on the host: rows sent to, and received
    from, each rank.
"""

from __future__ import annotations

import datetime
import functools
import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..errors import RanksLost
from .op import op
from .payload import group_of, others_answer, shown_ranks
from .routing import build_pft


@op(
    "place_choices(Tensor topk_ids, Tensor? keep, *, int[] places) -> Tensor",
    contract="topk_ids[S,K], keep[S,K]? -> place[S,K]",
)
def place_choices(topk_ids: Tensor, keep: Tensor | None, *, places: Sequence[int]) -> Tensor:
    """The place of each choice, int32; -1 where `keep` is False or the id is outside [0, E).

    Args:
        places: of each expert, position * num_slots + slot.
    """
    num_experts = len(places)
    valid = (topk_ids >= 0) & (topk_ids < num_experts)
    if keep is not None:
        valid = valid & keep
    place = topk_ids.to(torch.int32)
    if list(places) != list(range(num_experts)):
        place = _table(tuple(places), topk_ids.device)[topk_ids.clamp(0, num_experts - 1).to(torch.int64)]
    return place.masked_fill(~valid, -1)


@functools.lru_cache(maxsize=64)
def _table(values: tuple[int, ...], device: torch.device) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)


@op(
    "near_and_far(Tensor place, *, int begin, int num_places) -> (Tensor, Tensor)",
    contract="place[S,K] -> near[S,K], far[S,K]",
)
def near_and_far(place: Tensor, *, begin: int, num_places: int) -> tuple[Tensor, Tensor]:
    """Choices of the own node, whose places are `begin` ... `begin + num_places - 1`, and all others: each -1 in the
    other. Near ones are places within the node."""
    near = (place >= begin) & (place < begin + num_places)
    return torch.where(near, place - begin, -1), torch.where(near, -1, place)


@op(
    "plan_dispatch(Tensor place, *, int num_ranks, int num_slots, bool dedup) -> (Tensor, Tensor, Tensor, Tensor)",
    contract="place[S,K] -> token_ids[B], slot_ids[B], rank_offsets[_], inverse[S,K]",
)
def plan_dispatch(
    place: Tensor, *, num_ranks: int, num_slots: int, dedup: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The ERI arrays of a hop's ranks instead of experts.

    Args:
        place: modulo num_ranks * num_slots, num_slots being the places behind each of the hop's ranks.

    Returns:
        token_ids[B], slot_ids[B], rank_offsets[W+1], inverse[S,K]: as of `build_pft`, the rows in the order of the
        ranks. With `dedup` the first choice of a token at a rank stands for all of them there (the pilot), and
        inverse is -1 for the others; else there is a row for each choice, in the order of their places.
    """
    if not dedup:
        token_ids, slot_ids, offsets, inverse, _ = build_pft(place, None, None, num_experts=num_ranks * num_slots)
        return token_ids, slot_ids, offsets[::num_slots].contiguous(), inverse
    rank = rank_of(place, num_slots)
    again = (rank[:, :, None] == rank[:, None, :]).tril_(-1).any(-1)
    return build_pft(rank, None, ~again, num_experts=num_ranks)[:4]


def rank_of(place: Tensor, num_slots: int) -> Tensor:
    return torch.div(place, num_slots, rounding_mode="floor")  # -1 stays -1


@op(
    "exchange_counts(Tensor place, *, int[] levels, int num_slots, bool dedup, bool near=False, "
    "int fingerprint=0, float? timeout=None, str group) -> Tensor[]",
    contract="place[S,K] -> splits[*]",
)
def exchange_counts(
    place: Tensor,
    *,
    levels: Sequence[int],
    num_slots: int,
    dedup: bool,
    near: bool = False,
    fingerprint: int = 0,
    timeout: float | None = None,
    group: str,
) -> list[Tensor]:
    """Rows sent to and received from each rank, of every hop: one even exchange of a few numbers with each rank, and
    the one copy that the host waits for.

    Args:
        place: of the choices at their tokens' rank. group: of all positions, in their order.
        near: choices of the own node take no part in the hops, but in an exchange of their own.
        fingerprint: of what this rank will send and do with rows; that of the others must be the same.
        timeout: seconds to wait for the other ranks; None: as long as the process group allows.

    Returns:
        int64 [2,W] on the host, W = levels[i], of each hop; with `near`, of the exchange in the node at last.

    Raises:
        RanksLost: another rank has died, does not answer in time, or has another fingerprint.
    """
    own = group_of(group)
    counts = _Counts(rank_of(place, num_slots), levels, dedup, dist.get_rank(own), near)
    told = torch.cat([counts.told(), place.new_full((math.prod(levels), 1), fingerprint, dtype=torch.int64)], 1)
    heard = torch.empty_like(told)
    with others_answer():
        work: Any = dist.all_to_all_single(heard, told, group=own, async_op=True)
        work.wait(*([] if timeout is None else [datetime.timedelta(seconds=timeout)]))
    sizes = [*levels, *(levels[-1:] if near else ())]
    splits = counts.splits(heard[:, :-1].view(*levels, -1))
    flat = torch.cat([*(s.flatten() for s in splits), heard[:, -1]]).cpu()
    *parts, theirs = flat.split([*(2 * size for size in sizes), len(heard)])
    ranks = dist.get_process_group_ranks(own)
    if others := [ranks[i] for i in (theirs != fingerprint).nonzero().flatten().tolist()]:
        raise RanksLost(
            f"rank {dist.get_rank()} and {shown_ranks(others)} do not run a block in the same way: what a call fixes "
            "must be the same on all ranks that share its experts, which is dtypes, the number of features, numbers "
            "among the arguments and the attributes of modules, and autocast"
        )
    return [part.view(2, -1).clone() for part in parts]


class _Counts:
    """Rows for each unit of each level, from one rank's choices.

    A rank at coordinates c holds, before the hop at level j, the rows of all ranks that have its coordinates from j
    on; they are for the unit at its coordinates up to j-1, and go to the units within. So a rank needs to hear of
    each other one: rows for its own unit at the first level, and rows for each unit beside its own at the others.
    """

    def __init__(self, position: Tensor, levels: Sequence[int], dedup: bool, own: int, near: bool):
        self.levels, number = list(levels), math.prod(levels)
        self.own = [own // math.prod(levels[j + 1 :]) % n for j, n in enumerate(levels)]
        self.node = slice(own // levels[-1] * levels[-1], (own // levels[-1] + 1) * levels[-1])
        tokens = position.shape[0]
        if dedup:  # whether a token has a choice there
            at = torch.zeros((tokens, number + 1), dtype=torch.int64, device=position.device)
            at = at.scatter_(1, position.to(torch.int64) + 1, 1)[:, 1:]
        else:
            flat = position.reshape(-1).to(torch.int64) + 1
            at = torch.zeros(number + 1, dtype=torch.int64, device=position.device)
            at = at.scatter_add_(0, flat, torch.ones_like(flat))[None, 1:]
        self.near = at[:, self.node].sum(0) if near else None
        if near:
            at[:, self.node] = 0
        self.of_level = []
        for j in range(len(levels)):
            units = math.prod(levels[: j + 1])
            inside = at.unflatten(1, (units, number // units))
            self.of_level.append((inside.amax(2) if dedup else inside.sum(2)).sum(0))

    def told(self) -> Tensor:
        """What each position is told, [positions, numbers]."""
        number = math.prod(self.levels)
        columns = [self.of_level[0].repeat_interleave(number // self.levels[0])[:, None]]
        for j, n in enumerate(self.levels[1:], 1):
            parents = self.of_level[j].view(-1, n)
            columns.append(parents.repeat_interleave(number // parents.shape[0], 0))
        if self.near is not None:
            column = torch.zeros_like(columns[0])
            column[self.node, 0] = self.near
            columns.append(column)
        return torch.cat(columns, 1)

    def splits(self, heard: Tensor) -> list[Tensor]:
        """[2,W] of each hop, on the device, of what each position told, [*levels, numbers]."""
        own, begin = self.own, 1
        found = [torch.stack([self.of_level[0], heard[(slice(None), *own[1:], 0)]])]
        for j, n in enumerate(self.levels[1:], 1):
            through = heard[(..., *own[j + 1 :], slice(begin, begin + n))]  # from ranks as this one behind level j
            through = through.reshape(-1, self.levels[j], n).sum(0)
            found.append(torch.stack([through[own[j]], through[:, own[j]]]))
            begin += n
        if self.near is not None:
            found.append(torch.stack([self.near, heard[(*own[:-1], slice(None), -1)]]))
        return found


# -- registration
# ------------------------------------------------------------------------------------------------------


@place_choices.fake
def _(topk_ids, keep, *, places):
    return topk_ids.new_empty(topk_ids.shape, dtype=torch.int32)


@near_and_far.fake
def _(place, *, begin, num_places):
    return torch.empty_like(place), torch.empty_like(place)


@plan_dispatch.fake
def _(place, *, num_ranks, num_slots, dedup):
    token_ids = place.new_empty((place.shape[0] * place.shape[1],), dtype=torch.int32)
    offsets = token_ids.new_empty((num_ranks + 1,))
    return token_ids, torch.empty_like(token_ids), offsets, token_ids.new_empty(place.shape)


@exchange_counts.fake
def _(place, *, levels, num_slots, dedup, near=False, fingerprint=0, timeout=None, group):
    sizes = [*levels, *list(levels[-1:]) * near]
    return [torch.empty((2, size), dtype=torch.int64, device="cpu") for size in sizes]
