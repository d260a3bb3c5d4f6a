"""Plan the rows that each rank sends to each other rank (X-MoE sections 4.1 and 4.2; Piper section V).

The *destination* of a slot is position * experts_per_rank + the local id of its expert, or -1 if the slot is dropped.
Positions number the ranks of the expert axis: the ranks of a node are consecutive, and so are the ranks of a unit at
each level of the topology (`levels`, coarse to fine: [2, 4] is two nodes of four ranks). A *hop* is an exchange among
the ranks that differ at one level only. A destination modulo the destinations of a unit is a destination within the
unit. After a hop, a rank again has tokens with destinations, so the next hop is planned in the same way.

Schemas and printed graphs call destinations `place`, and the destinations behind each rank of a hop `num_slots`.

Letters: S tokens, K slots, B = S*K, W ranks of a hop. `splits` [2,W] is on the host: numbers of rows sent to, and
    received from, each rank.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ...errors import RanksLost
from ...util.turn_taking import offer_turn
from .counts_layout import count_units, find_counts_layout, num_row_counts
from .op_definition import op
from .parameter_samples import NUM_WORDS, Sampler, local_sample, take_sampler
from .token_routing import build_pft
from .uneven_all_to_all import format_ranks, get_group, raise_ranks_lost, refuse_capture, wait_on_host


@op(
    "place_choices(Tensor topk_ids, Tensor? keep, *, int[] places) -> Tensor",
    contract="topk_ids[S,K], keep[S,K]? -> place[S,K]",
)
def place_choices(topk_ids: Tensor, keep: Tensor | None, *, places: Sequence[int]) -> Tensor:
    """Return the destination of each slot, int32; -1 if `keep` is False or the id is outside [0, E).

    Args:
        places: the destination of each expert.
    """
    num_experts = len(places)
    valid = (topk_ids >= 0) & (topk_ids < num_experts)
    if keep is not None:
        valid = valid & keep
    table = build_destination_table(places, topk_ids.device)
    if table is None:
        destinations = topk_ids.to(torch.int32)
    else:
        destinations = table[topk_ids.clamp(0, num_experts - 1).to(torch.int64)]
    return destinations.masked_fill(~valid, -1)


def build_destination_table(expert_destinations: Sequence[int], device: torch.device) -> Tensor | None:
    """Return the destination of each expert, int32 [E]; None if it is the expert's number."""
    return (
        None
        if list(expert_destinations) == list(range(len(expert_destinations)))
        else _build_table(tuple(expert_destinations), device)
    )


@functools.lru_cache(maxsize=64)
def _build_table(values: tuple[int, ...], device: torch.device) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)


@op(
    "near_and_far(Tensor place, *, int begin, int num_places) -> (Tensor, Tensor)",
    contract="place[S,K] -> near[S,K], far[S,K]",
)
def near_and_far(destinations: Tensor, *, begin: int, num_places: int) -> tuple[Tensor, Tensor]:
    """Split destinations into those on this node, [begin, begin + num_places), and all others. Each part has -1 for
    slots of the other one. Destinations on this node are numbered within the node."""
    near = (destinations >= begin) & (destinations < begin + num_places)
    return torch.where(near, destinations - begin, -1), torch.where(near, -1, destinations)


@op(
    "chunk_choices(Tensor place, *, int chunks) -> Tensor[]",
    contract="place[S,K] -> places[*]",
)
def chunk_choices(destinations: Tensor, *, chunks: int) -> list[Tensor]:
    """Split the tokens into `chunks` even runs. Return the destinations of each run, with -1 for all other tokens."""
    token, num_tokens = torch.arange(destinations.shape[0], device=destinations.device)[:, None], destinations.shape[0]
    ends = [num_tokens * i // chunks for i in range(chunks + 1)]
    return [torch.where((token >= ends[i]) & (token < ends[i + 1]), destinations, -1) for i in range(chunks)]


@op(
    "plan_dispatch(Tensor place, *, int num_ranks, int num_slots, bool dedup) -> (Tensor, Tensor, Tensor, Tensor)",
    contract="place[S,K] -> token_ids[B], slot_ids[B], rank_offsets[_], inverse[S,K]",
)
def plan_dispatch(
    destinations: Tensor, *, num_ranks: int, num_slots: int, dedup: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Build the index arrays of a hop, with ranks in place of experts.

    Args:
        destinations: modulo num_ranks * num_slots. num_slots: destinations behind each of the hop's ranks.

    Returns:
        token_ids[B], slot_ids[B], rank_offsets[W+1], inverse[S,K]: as from `build_pft`, with rows in rank order. With
        `dedup`, the first slot of a token at a rank is the pilot for all its slots there, and inverse is -1 for the
        others. Otherwise each slot has a row, in the order of destinations.
    """
    if not dedup:
        token_ids, slot_ids, offsets, inverse, _ = build_pft(
            destinations, None, None, num_experts=num_ranks * num_slots
        )
        return token_ids, slot_ids, offsets[::num_slots].contiguous(), inverse
    ranks = find_destination_ranks(destinations, num_slots)
    is_replica = (ranks[:, :, None] == ranks[:, None, :]).tril_(-1).any(-1)
    return build_pft(ranks, None, ~is_replica, num_experts=num_ranks)[:4]


def find_destination_ranks(destinations: Tensor, destinations_per_rank: int) -> Tensor:
    return torch.div(destinations, destinations_per_rank, rounding_mode="floor")  # -1 stays -1


@op(
    "exchange_counts(Tensor[] places, *, int[] levels, int num_slots, bool dedup, bool near=False, "
    "int fingerprint=0, int samples=0, str group) -> (Tensor, Tensor)",
    contract="places[*] -> counts[_,_], heard[_,_,_]",
)
def exchange_counts(
    destinations_by_chunk: list[Tensor],
    *,
    levels: Sequence[int],
    num_slots: int,
    dedup: bool,
    near: bool = False,
    fingerprint: int = 0,
    samples: int = 0,
    group: str,
) -> tuple[Tensor, Tensor]:
    """Start to exchange row counts over all hops: one even all-to-all of a few numbers.

    Args:
        destinations_by_chunk: [S,K] for each chunk of tokens. group: the process group of all positions, in order.
        near: slots whose expert is on this node skip the hops; they have an exchange of their own.
        fingerprint: identifies the program; it must be equal on all ranks.
        samples: the sampler number for the experts' parameters, see `parameter_samples`.

    Returns:
        Arguments for `read_counts`: this rank's counts, int64 [chunks, numbers], and the other ranks' counts in
        transit.

    Raises:
        MoefxError: a CUDA graph is being captured, which cannot hold the copy to the host in `read_counts`.
    """
    refuse_capture(
        destinations_by_chunk[0],
        "copies numbers of rows to the host",
        'Plan(dispatch="gather", max_tokens=...), whose exchange is even',
    )
    process_group = get_group(group)
    layout = find_counts_layout(tuple(levels), dist.get_rank(process_group), near)
    node_range = layout.node_range if near else []
    kwargs = {"levels": levels, "num_slots": num_slots, "dedup": dedup, "near": node_range, "fingerprint": fingerprint}
    by_chunk = [count_rows(chunk, **kwargs) for chunk in destinations_by_chunk]
    counts = torch.stack(by_chunk) if len(by_chunk) > 1 else by_chunk[0][None]
    sent = counts[:, layout.sent_indices(counts.device)].movedim(1, 0)
    sampler = take_sampler(samples)
    sample = local_sample(sampler, counts.device).expand(*sent.shape[:2], NUM_WORDS)
    sent = torch.cat([sent, sample], dim=-1)
    received_counts = torch.empty_like(sent)  # [positions, chunks, numbers]
    with raise_ranks_lost():
        _counts_in_transit[received_counts.data_ptr()] = (
            dist.all_to_all_single(received_counts, sent, group=process_group, async_op=True),
            sampler,
        )
    while len(_counts_in_transit) > _MAX_IN_TRANSIT:  # left behind by errors
        _counts_in_transit.pop(next(iter(_counts_in_transit)))
    return counts, received_counts


# By the address of the received counts: the collective, and the sampler of its sample. `dist` instead of functional
# collectives, which have no timeout.
_counts_in_transit: dict[int, tuple[Any, Sampler | None]] = {}
_MAX_IN_TRANSIT = 64


@op(
    "read_counts(Tensor counts, Tensor heard, *, int[] levels, bool near=False, int fingerprint=0, "
    "float? timeout=None, str group) -> Tensor[]",
    contract="counts[_,_], heard[_,_,_] -> splits[*]",
)
def read_counts(
    counts: Tensor,
    received_counts: Tensor,
    *,
    levels: Sequence[int],
    near: bool = False,
    fingerprint: int = 0,
    timeout: float | None = None,
    group: str,
) -> list[Tensor]:
    """Read the number of rows to send to and receive from each rank, for every hop. No other step makes the host wait
    for the device.

    Args:
        received_counts: the other ranks' counts. levels, near, fingerprint, group: as for `exchange_counts`.
        timeout: seconds to wait for the other ranks; None for the limit of the process group.

    Returns:
        For each chunk, on the host: int64 [2,W] for each hop (W = levels[i]), and with `near` one more for the exchange
        in the node; then [1], the number of slots whose expert is on this rank.

    Raises:
        RanksLost: another rank has died, does not answer in time, or has another fingerprint.
        ExpertsOverwritten: see `runtime.ranks.overwrite_detection`.
    """
    process_group = get_group(group)
    layout = find_counts_layout(tuple(levels), dist.get_rank(process_group), near)
    # A checkpoint that kept the counts reads them again, without an entry.
    work, sampler = _counts_in_transit.pop(received_counts.data_ptr(), (None, None))
    if work is not None:
        offer_turn()
        with raise_ranks_lost():
            wait_on_host(work, timeout)
    # Compute with Python numbers: the GPU idles meanwhile, and ops on small tensors take longer.
    flat = torch.cat([counts.flatten(), received_counts.flatten()]).cpu().tolist()
    numbers = iter(flat)
    local = [list(itertools.islice(numbers, counts.shape[1])) for _ in range(counts.shape[0])]
    received = [  # [position][chunk]
        [list(itertools.islice(numbers, received_counts.shape[2])) for _ in range(received_counts.shape[1])]
        for _ in range(received_counts.shape[0])
    ]
    parameter_samples = [by_chunk[0][-NUM_WORDS:] for by_chunk in received]
    received = [[numbers[:-NUM_WORDS] for numbers in by_chunk] for by_chunk in received]
    if any(by_chunk[0][-1] != fingerprint for by_chunk in received):
        ranks = dist.get_process_group_ranks(process_group)
        unequal = [rank for rank, by_chunk in zip(ranks, received, strict=True) if by_chunk[0][-1] != fingerprint]
        raise RanksLost(
            f"rank {dist.get_rank()} and {format_ranks(unequal)} run different programs for one block: give all ranks "
            "that share experts the same dtypes, number of features, autocast, numbers among the arguments, and "
            "attributes of modules"
        )
    if sampler is not None:
        sampler.compare_samples(parameter_samples)
    splits = [layout.compute_splits(numbers, [p[i] for p in received]) for i, numbers in enumerate(local)]
    return [torch.tensor(pair, device="cpu") for by_hop in splits for pair in by_hop]


@op(
    "count_rows(Tensor place, *, int[] levels, int num_slots, bool dedup, int[] near, int fingerprint=0) -> Tensor",
    contract="place[S,K] -> counts[_]",
)
def count_rows(
    destinations: Tensor,
    *,
    levels: Sequence[int],
    num_slots: int,
    dedup: bool,
    near: Sequence[int],
    fingerprint: int = 0,
) -> Tensor:
    """Count this rank's rows for each unit of each level, coarse to fine, int64.

    With `near` = [begin, end), the positions of this node, rows for these positions are counted by position and not by
    unit. Then follow the number of slots for each position, a 0, and the fingerprint.
    """
    num_positions = math.prod(levels)
    positions = find_destination_ranks(destinations, num_slots).to(torch.int64) + 1
    slot_counts = torch.zeros((destinations.shape[0], num_positions + 1), dtype=torch.int64, device=destinations.device)
    slot_counts = slot_counts.scatter_add_(1, positions, torch.ones_like(positions))[:, 1:]
    rows = slot_counts.clamp(max=1) if dedup else slot_counts.clone()  # [S, positions]
    counts, near_counts = [], []
    if near:
        near_counts = [rows[:, slice(*near)].sum(0)]
        rows[:, slice(*near)] = 0
    for units in count_units(levels):
        by_unit = rows.unflatten(1, (units, num_positions // units))
        counts.append((by_unit.amax(2) if dedup else by_unit.sum(2)).sum(0))
    return torch.cat([*counts, *near_counts, slot_counts.sum(0), counts[0].new_tensor([0, fingerprint])])


# -- registration


@place_choices.fake
def _(topk_ids, keep, *, places):
    return topk_ids.new_empty(topk_ids.shape, dtype=torch.int32)


@near_and_far.fake
def _(destinations, *, begin, num_places):
    return torch.empty_like(destinations), torch.empty_like(destinations)


@chunk_choices.fake
def _(destinations, *, chunks):
    return [torch.empty_like(destinations) for _ in range(chunks)]


@plan_dispatch.fake
def _(destinations, *, num_ranks, num_slots, dedup):
    token_ids = destinations.new_empty((destinations.shape[0] * destinations.shape[1],), dtype=torch.int32)
    offsets = token_ids.new_empty((num_ranks + 1,))
    return token_ids, torch.empty_like(token_ids), offsets, token_ids.new_empty(destinations.shape)


@count_rows.fake
def _(destinations, *, levels, num_slots, dedup, near, fingerprint=0):
    return destinations.new_empty(num_row_counts(levels, near), dtype=torch.int64)


@exchange_counts.fake
def _(destinations_by_chunk, *, levels, num_slots, dedup, near=False, fingerprint=0, samples=0, group):
    num_counts, num_sent = num_row_counts(levels, [0, levels[-1]] * near), 3 + sum(levels[1:]) + near + NUM_WORDS
    counts = destinations_by_chunk[0].new_empty((len(destinations_by_chunk), num_counts), dtype=torch.int64)
    return counts, counts.new_empty((math.prod(levels), len(destinations_by_chunk), num_sent))


@read_counts.fake
def _(counts, received_counts, *, levels, near=False, fingerprint=0, timeout=None, group):
    sizes = [*((2, n) for n in (*levels, *list(levels[-1:]) * near)), (1,)] * counts.shape[0]
    return [torch.empty(size, dtype=torch.int64, device="cpu") for size in sizes]
