"""Start an uneven all-to-all of rows between the ranks of a process group, and wait for it."""

from __future__ import annotations

import contextlib
import datetime
import os
from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from ...errors import MoefxError, RanksLost
from ...util.turn_taking import offer_turn

_NO_EMPTY_RANKS = "MOEFX_NO_EMPTY_RANKS"  # see docs/expert_parallelism.md
_TAG = 29285  # distinct from tags of the user's program


def get_group(name: str) -> dist.ProcessGroup:
    """Return the process group with this `group_name`."""
    return dist.distributed_c10d._resolve_process_group(name)  # type: ignore[attr-defined]


def format_ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks[:8]))}{', ...' if len(ranks) > 8 else ''}"


def start_all_to_all(rows: Tensor, send_counts: Sequence[int], receive_counts: Sequence[int], group: str) -> Tensor:
    """Start an uneven all-to-all of rows in rank order. Read the result only by `wait_for_collective`.

    Args:
        send_counts, receive_counts: numbers of rows for, and from, each rank.
    """
    if os.environ.get(_NO_EMPTY_RANKS, "") not in ("", "0"):
        return _exchange_with_own_row(rows, send_counts, receive_counts, group)
    if rows.device.type == "cpu" and _is_gloo(get_group(group)):
        return _receive_first(rows.contiguous(), send_counts, receive_counts, get_group(group))
    return torch.ops._c10d_functional.all_to_all_single(rows.contiguous(), receive_counts, send_counts, group)


def _is_gloo(group: dist.ProcessGroup) -> bool:
    cpu = torch.device("cpu")
    if not dist.is_gloo_available() or cpu not in group._device_types:  # a test's stand-in for a backend
        return False
    return isinstance(group._get_backend(cpu), dist.distributed_c10d.ProcessGroupGloo)


def _receive_first(
    rows: Tensor, send_counts: Sequence[int], receive_counts: Sequence[int], group: dist.ProcessGroup
) -> Tensor:
    """Start the exchange over gloo with a receive and a send for each rank.

    Gloo sends rows once the receiver has announced its receive. Its own all-to-all posts the sends first, so the
    announcement queues behind the rows in the other direction, and only one direction of the link is used at a time. It
    takes up to 1.4 times as long (benchmarks/NOTES.md).
    """
    received_rows, rank, size = rows.new_empty((sum(receive_counts), *rows.shape[1:])), group.rank(), group.size()
    parts, received_parts = rows.split(list(send_counts)), received_rows.split(list(receive_counts))
    peers = [(rank + i) % size for i in range(1, size)]
    works = [group.recv([received_parts[other]], other, _TAG) for other in reversed(peers) if receive_counts[other]]
    works += [group.send([parts[other]], other, _TAG) for other in peers if send_counts[other]]
    received_parts[rank].copy_(parts[rank])
    for work in works:  # `wait_tensor` waits for all of them
        torch._C._distributed_c10d._register_work(received_rows, work)  # type: ignore[attr-defined]
    return received_rows


def _exchange_with_own_row(
    rows: Tensor, send_counts: Sequence[int], receive_counts: Sequence[int], group: str
) -> Tensor:
    """Exchange rows, and wait. Each rank sends one more row to itself, so that it receives at least one."""
    own_rank = dist.get_rank(get_group(group))
    counts_with_own = [
        [n + (rank == own_rank) for rank, n in enumerate(counts)] for counts in (send_counts, receive_counts)
    ]
    own_row = sum(send_counts[: own_rank + 1])
    rows = torch.cat([rows[:own_row], rows.new_zeros((1, *rows.shape[1:])), rows[own_row:]])
    result = wait_for_collective(
        torch.ops._c10d_functional.all_to_all_single(rows, counts_with_own[1], counts_with_own[0], group)
    )
    own_row = sum(receive_counts[: own_rank + 1])
    return torch.cat([result[:own_row], result[own_row + 1 :]])


def wait_for_collective(rows: Tensor, *, in_backward: bool = False) -> Tensor:
    """Wait for a collective, such as `start_all_to_all`, and return its result: see `wait_for_collectives`."""
    return wait_for_collectives([rows], in_backward=in_backward)[0]


def wait_for_collectives(parts: Sequence[Tensor], *, in_backward: bool = False) -> list[Tensor]:
    """Wait for several collectives, and return their results. Another micro-batch may compute meanwhile.

    Args:
        in_backward: whether a backward waits, see `offer_turn`.

    Raises:
        RanksLost: another rank has died, or does not answer within the process group's limit.
    """
    offer_turn(in_backward)
    return [_wait_for_rows(part) for part in parts]


def _wait_for_rows(rows: Tensor) -> Tensor:
    # A tracer's tensors have no memory, and their sizes may be unknown.
    if type(rows) is Tensor and rows.numel() and not rows.untyped_storage().nbytes():
        raise MoefxError(
            "a wait for rows runs again, and moefx.save_routing has freed these rows: a checkpoint policy around it "
            "recomputes the wait instead of saving its result"
        )
    with raise_ranks_lost():
        return torch.ops._c10d_functional.wait_tensor(rows)


def refuse_capture(tensor: Tensor, step: str, remedy: str) -> None:
    """Raise `MoefxError` if a CUDA graph is being captured: it cannot hold a step of the host."""
    if tensor.is_cuda and torch.cuda.is_current_stream_capturing():
        raise MoefxError(f"a CUDA graph cannot hold this exchange between ranks, which {step}: use {remedy}")


def wait_on_host(work: dist.Work, timeout: float | None) -> None:
    """Wait for a collective. With NCCL, only a `timeout` in seconds lets the host wait for the device."""
    work.wait(*([] if timeout is None else [datetime.timedelta(seconds=timeout)]))


@contextlib.contextmanager
def raise_ranks_lost() -> Iterator[None]:
    """Raise `RanksLost` for an error of a collective."""
    try:
        yield
    except RuntimeError as error:
        raise describe_lost_ranks(error) from error


def describe_lost_ranks(error: RuntimeError) -> RanksLost:
    first = str(error).partition("\n")[0]
    return RanksLost(
        f"rank {dist.get_rank()} waits for rows of other ranks in vain: one of them has ended with an error, has "
        f"stalled for longer than Plan(timeout=...) or the process group allows, or runs another program; look at "
        f"their outputs. torch says: {first}"
    )
