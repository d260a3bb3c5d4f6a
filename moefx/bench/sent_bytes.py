"""Bytes that a rank sends in the exchanges of a layer's step: counted in a running step, and by the planner's formulas.

Bytes that stay on the rank do not count. With "pull" a rank sends nothing: the bytes that it reads from other ranks
count.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from ..ir.ops import peer_rows, row_exchange, sequence_shards, token_gather
from ..ir.ops.exchange_routes import find_destination_ranks
from ..ir.ops.uneven_all_to_all import get_group
from ..planner.communication import build_exchange_sheet, row_bytes
from ..planner.layout import PlannedDispatch
from ..planner.sheet import Sheet
from ..planner.simulation.routing_skew import count_traffic
from ..runtime.ranks.link_costs import EXCHANGES_PER_LAYER, count_pulled_bytes

_UNBOUNDED = 2**31  # destinations of "gather" and "pull" take four bytes


class SentBytes:
    """The bytes that this rank has sent, or read from others, since the counting began."""

    def __init__(self) -> None:
        self.num_bytes = 0
        self._own_rank = 0  # in the group of the last `shared_columns`

    def count_all_to_all(self, start: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def run(rows: Tensor, sent: Sequence[int], received: Sequence[int], group: str) -> Tensor:
            own, width = dist.get_rank(get_group(group)), rows.shape[1:].numel() * rows.element_size()
            self.num_bytes += width * sum(n for rank, n in enumerate(sent) if rank != own)
            return start(rows, sent, received, group)

        return run

    def count_gather(self, start: Callable[..., list[Tensor]]) -> Callable[..., list[Tensor]]:
        def run(parts: Sequence[Tensor], size: int, group: str) -> list[Tensor]:
            self.num_bytes += sum(part.nbytes for part in parts) * (size - 1)
            return start(parts, size, group)

        return run

    def count_scatter(self, start: Callable[..., list[Tensor]]) -> Callable[..., list[Tensor]]:
        def run(parts: Sequence[Tensor], size: int, group: str) -> list[Tensor]:
            self.num_bytes += sum(part.nbytes for part in parts) // size * (size - 1)
            return start(parts, size, group)

        return run

    def share_columns(self, share: Callable[..., Any]) -> Callable[..., Any]:
        @contextlib.contextmanager
        def run(columns: Sequence[Tensor], num_rows: int, group: str, room: int = 0) -> Iterator[Any]:
            self._own_rank = dist.get_rank(get_group(group))
            with share(columns, num_rows, group, room) as peers:
                yield [_ReadColumns(p, self, rank != self._own_rank) for rank, p in enumerate(peers)]

        return run

    def count_read_rows(self, read: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def run(peers: list[Tensor], local_ids: Tensor, *, experts_per_rank: int) -> Tensor:
            is_needed = ((local_ids >= 0) & (local_ids < experts_per_rank)).any(1).view(len(peers), -1)
            rows = int(is_needed.sum() - is_needed[self._own_rank].sum())
            self.num_bytes += rows * peers[0].shape[1] * peers[0].element_size()
            return read(peers, local_ids, experts_per_rank=experts_per_rank)

        return run

    def count_added_rows(self, add: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def run(peers: list[Tensor], destinations: Tensor, **options: int) -> Tensor:
            ranks = find_destination_ranks(destinations, options["experts_per_rank"])
            others = [rank for rank in range(len(peers)) if rank != self._own_rank]
            rows = sum(int((ranks == rank).any(1).sum()) for rank in others)
            self.num_bytes += rows * peers[0].shape[1] * peers[0].element_size()
            return add(peers, destinations, **options)

        return run


class _ReadColumns(list):
    """The columns of one rank. A slice of them is read whole, other columns by `read_rows` and `add_rows`."""

    def __init__(self, columns: Sequence[Tensor], counter: SentBytes, is_other: bool):
        super().__init__(columns)
        self._counter, self._is_other = counter, is_other

    def __getitem__(self, key: Any) -> Any:
        found = super().__getitem__(key)
        if isinstance(key, slice) and self._is_other:
            self._counter.num_bytes += sum(column.nbytes for column in found)
        return found


def count_sent_bytes() -> contextlib.AbstractContextManager[SentBytes]:
    """Count the bytes of exchanges of rows. A CUDA graph, which runs no Python, must not replay meanwhile."""
    from ..lowering import register  # noqa: F401 - registers kernels of the ops that are replaced below

    return _count(
        (row_exchange, "start_all_to_all", SentBytes.count_all_to_all),
        (token_gather, "start_gather", SentBytes.count_gather),
        (token_gather, "start_scatter", SentBytes.count_scatter),
        (peer_rows, "shared_columns", SentBytes.share_columns),
        (peer_rows, "read_rows", SentBytes.count_read_rows),
        (peer_rows, "add_rows", SentBytes.count_added_rows),
    )


def count_shard_bytes() -> contextlib.AbstractContextManager[SentBytes]:
    """Count the bytes that gather the shards of a sequence, and add up their gradients (`Plan(sequence_axis=...)`)."""
    return _count(
        (sequence_shards, "start_gather", SentBytes.count_gather),
        (sequence_shards, "start_scatter", SentBytes.count_scatter),
    )


@contextlib.contextmanager
def _count(*functions: tuple[Any, str, Callable[[SentBytes, Callable[..., Any]], Any]]) -> Iterator[SentBytes]:
    """Count by functions that replace those of these names in these modules."""
    counter = SentBytes()
    with contextlib.ExitStack() as replaced:
        for module, name, wrap in functions:
            replaced.enter_context(mock.patch.object(module, name, wrap(counter, getattr(module, name))))
        yield counter


def predict_sent_bytes(
    choices: Tensor,
    rank: int,
    num_experts: int,
    sizes: Sequence[int],
    dispatch: str,
    width: int,
    max_tokens: int = 0,
    weight_bytes: int = 4,
) -> int:
    """Predict the bytes that a rank sends in forward and backward, for these experts of the tokens.

    Args:
        choices: experts of the tokens of all ranks, [W*T,K]; each rank has T.
        sizes: units within a unit of the level above, coarse to fine; their product is W.
        dispatch: a dispatch.
        width: columns of a token, of two bytes each.
        max_tokens: as in `Plan`, at least T; 0 without a limit.
        weight_bytes: bytes of a routing weight.
    """
    ranks, top_k = math.prod(sizes), choices.shape[1]
    tokens, per_rank = len(choices) // ranks, num_experts // ranks
    length = max(tokens, max_tokens)
    weights = weight_bytes * top_k * (top_k > 1)  # of all slots of a token
    if dispatch == "gather":
        there, back, back_grad, _ = row_bytes(width, top_k, _UNBOUNDED, top_k > 1, weight_bytes)
        return (ranks - 1) * length * (there + back + back_grad + 2 * width + weights)
    sources = torch.arange(ranks).repeat_interleave(tokens)
    counted = cast(PlannedDispatch, "dedup" if dispatch == "pull" else dispatch)
    traffic = count_traffic(choices.sort(-1).values.t(), sources, num_experts, sizes, counted)
    if dispatch == "pull":
        (rows,) = traffic.hops
        leaving, arriving = (int(rows.sum(dim)[rank] - rows[rank, rank]) for dim in (1, 0))
        lists = (ranks - 1) * length * (4 * top_k + weights)  # destinations and weights of all tokens
        return lists + 2 * arriving * 2 * width + leaving * (2 * 2 * width + weights)
    slots = 1 if dispatch == "flat" else top_k
    there, back, back_grad, grad = row_bytes(width, slots, per_rank, top_k > 1, weight_bytes)
    total = 0
    for hop in (*traffic.hops, *([] if traffic.beside is None else [traffic.beside])):
        others = hop - torch.diag(hop.diag())
        total += int(others[rank].sum()) * (there + back_grad) + int(others[:, rank].sum()) * (back + grad)
    return total


def estimate_sent_bytes(
    tokens: int, num_experts: int, top_k: int, sizes: Sequence[int], dispatch: str, width: int, max_tokens: int = 0
) -> float:
    """Estimate the bytes that a rank sends in forward and backward under uniform routing, by the planner's formulas.

    The arguments are those of `predict_sent_bytes`; `tokens` are those of a rank.
    """
    ranks = math.prod(sizes)
    length = max(tokens, max_tokens)
    if dispatch == "pull":
        each = count_pulled_bytes(2.0 * width, num_experts, top_k, ranks, tokens, length)
        return each * (ranks - 1) * EXCHANGES_PER_LAYER
    # HALO sends the rows of RBD, in other phases
    prefix = {"gather": "all_gather", "halo": "rbd"}.get(dispatch, dispatch)
    formulas = build_exchange_sheet(len(sizes)).formulas.values()
    rows_only = Sheet(formula for formula in formulas if formula.unit == "1")
    results = rows_only(**{f"n{i + 1}": size for i, size in enumerate(sizes)}, E=num_experts, k=top_k)
    rows = sum(results[f"rows_{prefix}_{i + 1}"] for i in range(len(sizes)))
    slots = 1 if dispatch == "flat" else top_k
    per_rank = _UNBOUNDED if dispatch == "gather" else num_experts // ranks
    return rows * (length if dispatch == "gather" else tokens) * sum(row_bytes(width, slots, per_rank, top_k > 1))
