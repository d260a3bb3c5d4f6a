"""One rank of several on one GPU: a process group all of whose ranks do what this one does.

What this rank, the first, sends to another one comes from there too: what arrives is what was sent. So rows have the
sizes that they have on a rank of a real group (but for its imbalance), and what is computed takes the time that it
takes there. An exchange takes as long as `seconds` says, on a stream of its own and of high priority, as NCCL's kernels
do with TORCH_NCCL_HIGH_PRIORITY=1. The values are of no use: rows meet the experts of this rank, whichever they were
for.
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
    """This rank is the first of `size`.

    Args:
        seconds: of an exchange, by the bytes that leave the rank.
    """

    def __init__(self, rank: int, size: int, seconds: Callable[[int], float]):
        super().__init__(rank, size)  # pyright: ignore[reportCallIssue]
        self.seconds = seconds
        self.stream = torch.cuda.Stream(priority=-1) if torch.cuda.is_available() else None
        # In turns, as making one takes longer than an exchange should: far fewer are on their way at once.
        self.works = itertools.cycle([_Queued(self.stream) for _ in range(64)])

    def alltoall_base(
        self, output: Tensor, rows: Tensor, received: Sequence[int], sent: Sequence[int], opts: Any = None
    ) -> Any:
        common = min(len(rows), len(output))
        if common < len(output):  # the second hop of several has about as many rows there as back
            output[common:].zero_()
        own = sent[0] / max(sum(sent), 1) if sent else 1 / self.size()
        return self._copied(rows, output, common * (rows.nbytes // max(len(rows), 1)), rows.nbytes * (1 - own))

    def allgather_into_tensor_coalesced(
        self, outputs: Sequence[Tensor], tensors: Sequence[Tensor], opts: Any = None
    ) -> Any:
        ((output,), (rows,)) = outputs, tensors
        output.view(self.size(), *rows.shape).copy_(rows)
        return self._copied(rows, output, rows.nbytes, rows.nbytes * (self.size() - 1))

    def _copied(self, source: Tensor, out: Tensor, num_bytes: int, leaving: float) -> Any:
        """The first bytes, in the time that it takes if so many leave the rank."""
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


class _Queued(dist.Work):
    """Work that a stream has been given. What waits for it is given to the stream that is current then."""

    def __init__(self, stream: torch.cuda.Stream | None):
        super().__init__()
        self.event: Any = None if stream is None else torch.cuda.Event()
        self.tensors: Any = ()  # their memory is not for others until what follows a wait

    def wait(self, timeout: Any = None) -> bool:
        if self.event is not None:
            self.event.wait()
        self.tensors = ()
        return True


def init_mirror_group(size: int, seconds: Callable[[int], float]) -> None:
    """Make a group of so many copies of this process the default one."""

    def made(_: Any, rank: int, size: int, __: Any) -> MirrorGroup:
        return MirrorGroup(rank, size, seconds)

    dist.Backend.register_backend(NAME, made, devices=["cpu", "cuda"])
    dist.init_process_group(NAME, rank=0, world_size=size, store=dist.HashStore())  # pyright: ignore[reportPrivateImportUsage]
