"""Emulate one rank of several on one GPU: a process group whose other ranks are copies of this one.

This rank receives from each other rank the rows that it sends there. So it has as many rows as on a real rank (without
imbalance), and computes for as long. An exchange takes the time that `seconds` returns, on a high-priority stream of
its own, like NCCL's kernels with TORCH_NCCL_HIGH_PRIORITY=1. The values are meaningless: rows reach this rank's experts
whichever expert they are for.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

NAME = "mirror"


class MirrorGroup(dist.ProcessGroup):
    """A group of `size` ranks, of which this is the first.

    Args:
        seconds: seconds of an exchange by the bytes that leave the rank.
    """

    def __init__(self, rank: int, size: int, seconds: Callable[[int], float]):
        super().__init__(rank, size)  # pyright: ignore[reportCallIssue]
        self.seconds = seconds
        self.stream = torch.cuda.Stream(priority=-1) if torch.cuda.is_available() else None
        # Works are reused in turns, because creating one takes too long. Far fewer are in flight at once.
        self.works = itertools.cycle([_QueuedWork(self.stream) for _ in range(64)])

    def alltoall_base(
        self, output: Tensor, rows: Tensor, received_counts: Sequence[int], sent_counts: Sequence[int], opts: Any = None
    ) -> Any:
        common = min(len(rows), len(output))
        if common < len(output):  # in a second hop the numbers of sent and received rows differ a little
            output[common:].zero_()
        own_share = sent_counts[0] / max(sum(sent_counts), 1) if sent_counts else 1 / self.size()
        return self._copy(rows, output, common * (rows.nbytes // max(len(rows), 1)), rows.nbytes * (1 - own_share))

    def allgather_into_tensor_coalesced(
        self, outputs: Sequence[Tensor], tensors: Sequence[Tensor], opts: Any = None
    ) -> Any:
        for output, rows in zip(outputs, tensors, strict=True):
            output.view(self.size(), *rows.shape).copy_(rows)
        largest = max(range(len(tensors)), key=lambda i: tensors[i].nbytes)
        leaving = sum(rows.nbytes for rows in tensors) * (self.size() - 1)
        return self._copy(tensors[largest], outputs[largest], tensors[largest].nbytes, leaving)

    def reduce_scatter_tensor_coalesced(
        self, outputs: Sequence[Tensor], tensors: Sequence[Tensor], opts: Any = None
    ) -> Any:
        for output, rows in zip(outputs, tensors, strict=True):
            output.copy_(rows[: len(output)])
        largest = max(range(len(outputs)), key=lambda i: outputs[i].nbytes)
        leaving = sum(output.nbytes for output in outputs) * (self.size() - 1)
        return self._copy(tensors[largest], outputs[largest], outputs[largest].nbytes, leaving)

    def _copy(self, source: Tensor, out: Tensor, num_bytes: int, leaving: float) -> Any:
        """Copy the first `num_bytes`, in the time of an exchange of `leaving` bytes."""
        if self.stream is None or not source.is_cuda:
            out.view(-1).view(torch.uint8)[:num_bytes].copy_(source.view(-1).view(torch.uint8)[:num_bytes])
            return next(self.works)
        from .spin_kernel import copy_for  # needs Triton

        work = next(self.works)
        work.event.record()
        work.event.wait(self.stream)
        copy_for(self.seconds(round(leaving)), source, out, num_bytes, self.stream)
        work.event.record(self.stream)
        work.tensors = source, out
        return work

    def allreduce(self, tensors: Sequence[Tensor], opts: Any = None) -> Any:
        if opts is not None and opts.reduceOp == dist.ReduceOp.SUM:
            for tensor in tensors:
                tensor.mul_(self.size())
        return next(self.works)

    def allgather(self, outputs: Sequence[Sequence[Tensor]], tensors: Sequence[Tensor], opts: Any = None) -> Any:
        for parts, tensor in zip(outputs, tensors, strict=True):
            for part in parts:
                part.copy_(tensor)
        return next(self.works)

    def broadcast(self, tensors: Sequence[Tensor], opts: Any = None) -> Any:
        return next(self.works)

    def barrier(self, opts: Any = None) -> Any:
        return next(self.works)

    def getBackendName(self) -> str:
        return NAME

    @property
    def group_name(self) -> str:
        return dist.distributed_c10d._world.pg_names[self]


class _QueuedWork(dist.Work):
    """Work that is queued on a stream. `wait` makes the current stream wait."""

    def __init__(self, stream: torch.cuda.Stream | None):
        super().__init__()
        self.event: Any = None if stream is None else torch.cuda.Event()
        self.tensors: Any = ()  # keeps their memory until `wait`

    def wait(self, timeout: Any = None) -> bool:
        if self.event is not None:
            self.event.wait()
        self.tensors = ()
        return True


def init_mirror_group(size: int, seconds: Callable[[int], float]) -> None:
    """Make a group of `size` copies of this process the default process group."""

    def made(_: Any, rank: int, size: int, __: Any) -> MirrorGroup:
        return MirrorGroup(rank, size, seconds)

    dist.Backend.register_backend(NAME, made, devices=["cpu", "cuda"])
    dist.init_process_group(NAME, rank=0, world_size=size, store=dist.HashStore())  # pyright: ignore[reportPrivateImportUsage]
