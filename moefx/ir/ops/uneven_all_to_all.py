"""Rows on their way between the ranks of a process group: starting an uneven all-to-all, and waiting for it."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from ...errors import MoefxError, RanksLost

_NO_EMPTY_RANKS = "MOEFX_NO_EMPTY_RANKS"  # see docs/expert_parallelism.md
_TAG = 29285  # apart from what the user's program sends


def get_group(name: str) -> dist.ProcessGroup:
    """The process group of a name, as `ProcessGroup.group_name` tells it."""
    return dist.distributed_c10d._resolve_process_group(name)  # type: ignore[attr-defined]


def format_ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks[:8]))}{', ...' if len(ranks) > 8 else ''}"


def start(rows: Tensor, sent: Sequence[int], received: Sequence[int], group: str) -> Tensor:
    """Rows on their way, in the order of the ranks: an uneven all-to-all that runs while the program goes on. Only
    `wait` may read the result."""
    if os.environ.get(_NO_EMPTY_RANKS, "") not in ("", "0"):
        return _with_own_row(rows, sent, received, group)
    if rows.device.type == "cpu" and _is_gloo(get_group(group)):
        return _receives_first(rows.contiguous(), sent, received, get_group(group))
    return torch.ops._c10d_functional.all_to_all_single(rows.contiguous(), received, sent, group)


def _is_gloo(group: dist.ProcessGroup) -> bool:
    cpu = torch.device("cpu")
    if not dist.is_gloo_available() or cpu not in group._device_types:  # others stand in for a backend
        return False
    return isinstance(group._get_backend(cpu), dist.distributed_c10d.ProcessGroupGloo)


def _receives_first(rows: Tensor, sent: Sequence[int], received: Sequence[int], group: dist.ProcessGroup) -> Tensor:
    """As `start`, by gloo, a send and a receive for each rank. A rank's rows leave once their receiver has said that it
    waits for them. Gloo's own all-to-all sends first, so that this word stands behind the rows that go the other way,
    and a link is used in one direction at a time: up to 1.4 times as long, by chance (benchmarks/NOTES.md)."""
    arrived, own, size = rows.new_empty((sum(received), *rows.shape[1:])), group.rank(), group.size()
    parts, places = rows.split(list(sent)), arrived.split(list(received))
    others = [(own + i) % size for i in range(1, size)]
    works = [group.recv([places[other]], other, _TAG) for other in reversed(others) if received[other]]
    works += [group.send([parts[other]], other, _TAG) for other in others if sent[other]]
    places[own].copy_(parts[own])
    for work in works:  # `wait_tensor` waits for all of them
        torch._C._distributed_c10d._register_work(arrived, work)  # type: ignore[attr-defined]
    return arrived


def _with_own_row(rows: Tensor, sent: Sequence[int], received: Sequence[int], group: str) -> Tensor:
    """As `start`, with one more row from each rank to itself: no rank has nothing to receive. It is waited for here."""
    own = dist.get_rank(get_group(group))
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
    with raise_ranks_lost():
        return torch.ops._c10d_functional.wait_tensor(rows)


def refuse_capture(tensor: Tensor, step: str, remedy: str) -> None:
    """Raise `MoefxError` if a CUDA graph is being captured: it cannot hold a step of the host."""
    if tensor.is_cuda and torch.cuda.is_current_stream_capturing():
        raise MoefxError(f"a CUDA graph cannot hold this exchange between ranks, which {step}: use {remedy}")


@contextlib.contextmanager
def raise_ranks_lost() -> Iterator[None]:
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
