"""Rows on their way between the ranks of a process group: starting an uneven all-to-all, and waiting for it."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from ..errors import MoefxError, RanksLost

_NO_EMPTY_RANKS = "MOEFX_NO_EMPTY_RANKS"  # see docs/expert_parallelism.md


def group_of(name: str) -> dist.ProcessGroup:
    """The process group of a name, as `ProcessGroup.group_name` tells it."""
    return dist.distributed_c10d._resolve_process_group(name)  # type: ignore[attr-defined]


def shown_ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks[:8]))}{', ...' if len(ranks) > 8 else ''}"


def start(rows: Tensor, sent: Sequence[int], received: Sequence[int], group: str) -> Tensor:
    """Rows on their way, in the order of the ranks: an uneven all-to-all that runs while the program goes on. Only
    `wait` may read the result."""
    if os.environ.get(_NO_EMPTY_RANKS, "") not in ("", "0"):
        return _with_own_row(rows, sent, received, group)
    return torch.ops._c10d_functional.all_to_all_single(rows.contiguous(), received, sent, group)


def _with_own_row(rows: Tensor, sent: Sequence[int], received: Sequence[int], group: str) -> Tensor:
    """As `start`, with one more row from each rank to itself: no rank has nothing to receive. It is waited for here."""
    own = dist.get_rank(group_of(group))
    more = [[n + (rank == own) for rank, n in enumerate(counts)] for counts in (sent, received)]
    cut = sum(sent[: own + 1])
    rows = torch.cat([rows[:cut], rows.new_zeros((1, *rows.shape[1:])), rows[cut:]])
    arrived = wait(torch.ops._c10d_functional.all_to_all_single(rows, more[1], more[0], group))
    cut = sum(received[: own + 1])
    return torch.cat([arrived[:cut], arrived[cut + 1 :]])


def wait(rows: Tensor) -> Tensor:
    """What `start` returned, once it has arrived.

    Raises:
        RanksLost: another rank has died, or does not answer within the time that the process group allows.
    """
    # a tracer's sizes may be unknown, and its rows have no memory
    if type(rows) is Tensor and rows.numel() and not rows.untyped_storage().nbytes():
        raise MoefxError(
            "rows are waited for again that moefx.save_routing has freed: a policy around it recomputes a wait that "
            "it wants to be kept"
        )
    with others_answer():
        return torch.ops._c10d_functional.wait_tensor(rows)


@contextlib.contextmanager
def others_answer() -> Iterator[None]:
    """Say what an error of a collective means."""
    try:
        yield
    except RuntimeError as error:
        first = str(error).partition("\n")[0]
        raise RanksLost(
            f"rank {dist.get_rank()} waits for rows of other ranks in vain: one of them has ended with an error, has "
            f"stalled for longer than is allowed (Plan(timeout=...), else the process group says), or runs "
            f"another program; look at their outputs. torch says: {first}"
        ) from error
