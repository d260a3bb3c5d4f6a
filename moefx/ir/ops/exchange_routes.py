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
import itertools
import math
import operator
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ...errors import RanksLost
from .op_definition import op
from .parameter_samples import NUM_WORDS, Sampler, local_sample, take_sampler
from .token_routing import build_pft
from .uneven_all_to_all import format_ranks, get_group, raise_ranks_lost, refuse_capture


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
    table = build_destination_table(places, topk_ids.device)
    if table is None:
        place = topk_ids.to(torch.int32)
    else:
        place = table[topk_ids.clamp(0, num_experts - 1).to(torch.int64)]
    return place.masked_fill(~valid, -1)


def build_destination_table(places: Sequence[int], device: torch.device) -> Tensor | None:
    """The place of each expert, int32 [E]; None where it is its number."""
    return None if list(places) == list(range(len(places))) else _table(tuple(places), device)


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
    "chunk_choices(Tensor place, *, int chunks) -> Tensor[]",
    contract="place[S,K] -> places[*]",
)
def chunk_choices(place: Tensor, *, chunks: int) -> list[Tensor]:
    """The choices of each of so many runs of tokens, as even as can be; those of all others are -1 there."""
    token, number = torch.arange(place.shape[0], device=place.device)[:, None], place.shape[0]
    ends = [number * i // chunks for i in range(chunks + 1)]
    return [torch.where((token >= ends[i]) & (token < ends[i + 1]), place, -1) for i in range(chunks)]


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
    rank = destination_rank(place, num_slots)
    again = (rank[:, :, None] == rank[:, None, :]).tril_(-1).any(-1)
    return build_pft(rank, None, ~again, num_experts=num_ranks)[:4]


def count_units(levels: Sequence[int]) -> list[int]:
    """How many units each level has in all, coarse to fine."""
    return list(itertools.accumulate(levels, operator.mul))


def destination_rank(place: Tensor, num_slots: int) -> Tensor:
    return torch.div(place, num_slots, rounding_mode="floor")  # -1 stays -1


@op(
    "exchange_counts(Tensor[] places, *, int[] levels, int num_slots, bool dedup, bool near=False, "
    "int fingerprint=0, int samples=0, str group) -> (Tensor, Tensor)",
    contract="places[*] -> counts[_,_], heard[_,_,_]",
)
def exchange_counts(
    places: list[Tensor],
    *,
    levels: Sequence[int],
    num_slots: int,
    dedup: bool,
    near: bool = False,
    fingerprint: int = 0,
    samples: int = 0,
    group: str,
) -> tuple[Tensor, Tensor]:
    """Start to tell the other ranks how many rows they get, over all hops: one even exchange of a few numbers with each
    rank.

    Args:
        places: of the choices [S,K] at their tokens' rank, of each chunk of tokens. group: of all positions, in their
            order.
        near: choices of the own node take no part in the hops, but in an exchange of their own.
        fingerprint: of what this rank will send and do with rows; that of the others must be the same.
        samples: the number of the samplers of the experts' parameters, see `parameter_samples`.

    Returns:
        For `read_counts`: this rank's numbers, int64 [chunks, numbers], and what others tell it, on its way.
    """
    own = get_group(group)
    counted = _counted(tuple(levels), dist.get_rank(own), near)
    near_node = counted.node if near else []
    kwargs = {"levels": levels, "num_slots": num_slots, "dedup": dedup, "near": near_node, "fingerprint": fingerprint}
    each = [count_rows(place, **kwargs) for place in places]
    counts = torch.stack(each) if len(each) > 1 else each[0][None]
    told = counts[:, counted.told(counts.device)].movedim(1, 0)
    sampler = take_sampler(samples)
    sample = local_sample(sampler, counts.device).expand(*told.shape[:2], NUM_WORDS)
    told = torch.cat([told, sample], dim=-1)
    heard = torch.empty_like(told)  # [positions, chunks, numbers]
    with raise_ranks_lost():
        _on_their_way[heard.data_ptr()] = dist.all_to_all_single(heard, told, group=own, async_op=True), sampler
    while len(_on_their_way) > _MOST:  # what an error left behind
        _on_their_way.pop(next(iter(_on_their_way)))
    return counts, heard


# The counts that have not been read, by their address, and who sent a sample with them; functional collectives know of
# no time to wait.
_on_their_way: dict[int, tuple[Any, Sampler | None]] = {}
_MOST = 64


@op(
    "read_counts(Tensor counts, Tensor heard, *, int[] levels, bool near=False, int fingerprint=0, "
    "float? timeout=None, str group) -> Tensor[]",
    contract="counts[_,_], heard[_,_,_] -> splits[*]",
)
def read_counts(
    counts: Tensor,
    heard: Tensor,
    *,
    levels: Sequence[int],
    near: bool = False,
    fingerprint: int = 0,
    timeout: float | None = None,
    group: str,
) -> list[Tensor]:
    """Rows sent to and received from each rank, of every hop: the one copy that the host waits for.

    Args:
        levels, near, fingerprint, group: as of `exchange_counts`.
        timeout: seconds to wait for the other ranks; None: as long as the process group allows.

    Returns:
        int64 [2,W] on the host, W = levels[i], of each hop, and with `near` of the exchange in the node; then [1], of
        how many choices the experts are here. For one chunk after the other.

    Raises:
        RanksLost: another rank has died, does not answer in time, or has another fingerprint.
        ExpertsOverwritten: see `runtime.overwriting`.
        MoefxError: a CUDA graph is being captured, which cannot hold the copy.
    """
    refuse_capture(
        counts, "copies numbers of rows to the host", 'Plan(dispatch="gather", max_tokens=...), whose exchange is even'
    )
    own = get_group(group)
    counted = _counted(tuple(levels), dist.get_rank(own), near)
    # They are gone if a checkpoint has kept the counts, which are then read again.
    work, sampler = _on_their_way.pop(heard.data_ptr(), (None, None))
    with raise_ranks_lost():
        if work is not None:
            work.wait(*([] if timeout is None else [datetime.timedelta(seconds=timeout)]))
    # As numbers of Python's: the GPU waits meanwhile, and operations on small tensors take longer.
    flat = torch.cat([counts.flatten(), heard.flatten()]).cpu().tolist()
    numbers = iter(flat)
    of_chunks = [list(itertools.islice(numbers, counts.shape[1])) for _ in range(counts.shape[0])]
    of_positions = [
        [list(itertools.islice(numbers, heard.shape[2])) for _ in range(heard.shape[1])] for _ in range(heard.shape[0])
    ]
    samples = [told[0][-NUM_WORDS:] for told in of_positions]
    of_positions = [[told[:-NUM_WORDS] for told in position] for position in of_positions]
    if any(told[0][-1] != fingerprint for told in of_positions):
        ranks = dist.get_process_group_ranks(own)
        others = [rank for rank, told in zip(ranks, of_positions, strict=True) if told[0][-1] != fingerprint]
        raise RanksLost(
            f"rank {dist.get_rank()} and {format_ranks(others)} do not run a block in the same way: what a call fixes "
            "must be the same on all ranks that share its experts, which is dtypes, the number of features, numbers "
            "among the arguments and the attributes of modules, and autocast"
        )
    if sampler is not None:
        sampler.compare_samples(samples)
    found = [counted.splits(told, [p[i] for p in of_positions]) for i, told in enumerate(of_chunks)]
    return [torch.tensor(splits, device="cpu") for of_chunk in found for splits in of_chunk]


@op(
    "count_rows(Tensor place, *, int[] levels, int num_slots, bool dedup, int[] near, int fingerprint=0) -> Tensor",
    contract="place[S,K] -> counts[_]",
)
def count_rows(
    place: Tensor, *, levels: Sequence[int], num_slots: int, dedup: bool, near: Sequence[int], fingerprint: int = 0
) -> Tensor:
    """Rows of one rank's choices for each unit of each level, coarse to fine, int64; with `near` = [begin, end), the
    positions of the own node, whose choices then do not count there, those for each of them. Then choices at each
    position, a 0, and the fingerprint."""
    number = math.prod(levels)
    position = destination_rank(place, num_slots).to(torch.int64) + 1
    choices = torch.zeros((place.shape[0], number + 1), dtype=torch.int64, device=place.device)
    choices = choices.scatter_add_(1, position, torch.ones_like(position))[:, 1:]
    at = choices.clamp(max=1) if dedup else choices.clone()  # whether a token has a choice there
    counts, beside = [], []
    if near:
        beside = [at[:, slice(*near)].sum(0)]
        at[:, slice(*near)] = 0
    for units in count_units(levels):
        inside = at.unflatten(1, (units, number // units))
        counts.append((inside.amax(2) if dedup else inside.sum(2)).sum(0))
    return torch.cat([*counts, *beside, choices.sum(0), counts[0].new_tensor([0, fingerprint])])


def count_fields(levels: Sequence[int], near: Sequence[int]) -> int:
    """How many numbers `count_rows` finds."""
    return sum(count_units(levels)) + (near[1] - near[0] if near else 0) + math.prod(levels) + 2


class _Counts:
    """What ranks tell each other of the numbers that `count_rows` finds, and what they learn of it.

    A rank at coordinates c holds, before the hop at level j, the rows of all ranks that have its coordinates from j
    on; they are for the unit at its coordinates up to j-1, and go to the units within. So a rank needs to hear of
    each other one: rows for its own unit at the first level, and rows for each unit beside its own at the others.

    Attributes:
        node: begin and end of the positions of the own node.
        beside: where among the numbers those for the positions of the own node begin; choices: those of choices; zero:
            a 0, behind which is the fingerprint.
    """

    def __init__(self, levels: Sequence[int], own: int, near: bool):
        self.levels, self.near, self.position = list(levels), near, own
        self.own = [own // math.prod(levels[j + 1 :]) % n for j, n in enumerate(levels)]
        self.node = [own // levels[-1] * levels[-1], (own // levels[-1] + 1) * levels[-1]]
        units = count_units(levels)
        self.begins = [sum(units[:j]) for j in range(len(levels))]  # of the levels, among the numbers
        self.beside = sum(units)
        self.choices = self.beside + self.levels[-1] * near
        self.zero = self.choices + math.prod(levels)
        self._told: dict[torch.device, Tensor] = {}

    def told(self, device: torch.device) -> Tensor:
        """Of what each position is told the indices among the numbers, [positions, numbers]."""
        if device not in self._told:
            self._told[device] = torch.tensor([self._told_to(p) for p in range(math.prod(self.levels))], device=device)
        return self._told[device]

    def _told_to(self, position: int) -> list[int]:
        told = [position // math.prod(self.levels[1:])]
        for j, n in enumerate(self.levels[1:], 1):
            begin, parent = self.begins[j], position // math.prod(self.levels[j:])
            told += range(begin + parent * n, begin + (parent + 1) * n)
        if self.near:
            is_near = self.node[0] <= position < self.node[1]
            told.append(self.beside + position - self.node[0] if is_near else self.zero)
        return [*told, self.choices + position, self.zero + 1]

    def splits(self, counts: list[int], heard: list[list[int]]) -> list[Any]:
        """[2,W] of each hop, and [1] choices that end here, of this rank's numbers and of what each position told."""
        within, begin = math.prod(self.levels[1:]), 1
        found: list[Any] = [[counts[: self.levels[0]], [told[0] for told in heard[self.position % within :: within]]]]
        for own, n in zip(self.own[1:], self.levels[1:], strict=True):
            within //= n
            through = heard[self.position % within :: within]  # from ranks as this one behind the level: n of each unit
            sent = [sum(told[begin + other] for told in through[own::n]) for other in range(n)]
            received = [sum(told[begin + own] for told in through[other::n]) for other in range(n)]
            found.append([sent, received])
            begin += n
        if self.near:
            found.append([counts[self.beside : self.choices], [told[-3] for told in heard[slice(*self.node)]]])
        return [*found, [sum(told[-2] for told in heard)]]


@functools.lru_cache(maxsize=64)
def _counted(levels: tuple[int, ...], own: int, near: bool) -> _Counts:
    return _Counts(levels, own, near)


# -- registration
# ------------------------------------------------------------------------------------------------------


@place_choices.fake
def _(topk_ids, keep, *, places):
    return topk_ids.new_empty(topk_ids.shape, dtype=torch.int32)


@near_and_far.fake
def _(place, *, begin, num_places):
    return torch.empty_like(place), torch.empty_like(place)


@chunk_choices.fake
def _(place, *, chunks):
    return [torch.empty_like(place) for _ in range(chunks)]


@plan_dispatch.fake
def _(place, *, num_ranks, num_slots, dedup):
    token_ids = place.new_empty((place.shape[0] * place.shape[1],), dtype=torch.int32)
    offsets = token_ids.new_empty((num_ranks + 1,))
    return token_ids, torch.empty_like(token_ids), offsets, token_ids.new_empty(place.shape)


@count_rows.fake
def _(place, *, levels, num_slots, dedup, near, fingerprint=0):
    return place.new_empty(count_fields(levels, near), dtype=torch.int64)


@exchange_counts.fake
def _(places, *, levels, num_slots, dedup, near=False, fingerprint=0, samples=0, group):
    numbers, told = count_fields(levels, [0, levels[-1]] * near), 3 + sum(levels[1:]) + near + NUM_WORDS
    counts = places[0].new_empty((len(places), numbers), dtype=torch.int64)
    return counts, counts.new_empty((math.prod(levels), len(places), told))


@read_counts.fake
def _(counts, heard, *, levels, near=False, fingerprint=0, timeout=None, group):
    sizes = [*((2, n) for n in (*levels, *list(levels[-1:]) * near)), (1,)] * counts.shape[0]
    return [torch.empty(size, dtype=torch.int64, device="cpu") for size in sizes]
