"""The device of a rank in the benchmarks of several ranks: a GPU under NCCL, or the CPU under gloo.

The CPU only tests the benchmarks: its figures mean nothing.
"""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Callable

import torch
import torch.distributed as dist


@dataclasses.dataclass(frozen=True)
class RankDevice:
    """The device of this rank.

    Attributes:
        type: "cuda" or "cpu".
    """

    type: str

    @property
    def is_gpu(self) -> bool:
        return self.type == "cuda"

    def synchronize(self) -> None:
        if self.is_gpu:
            torch.cuda.synchronize()

    def measure_milliseconds(self, work: Callable[[], object]) -> float:
        """Measure the milliseconds of the device from before `work` until its end."""
        if not self.is_gpu:
            start = time.perf_counter()
            work()
            return (time.perf_counter() - start) * 1e3
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        work()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end)

    def reset_peak_memory(self) -> None:
        if self.is_gpu:
            torch.cuda.reset_peak_memory_stats()

    def read_peak_gib(self) -> float:
        """Return the GiB of the largest allocation since the reset; 0 on a CPU, where nobody counts."""
        return torch.cuda.max_memory_allocated() / 2**30 if self.is_gpu else 0.0

    def free_memory(self) -> None:
        if self.is_gpu:
            torch.cuda.empty_cache()

    def occupy(self, seconds: float) -> None:
        """Occupy the current stream, or the CPU, for some seconds."""
        if not self.is_gpu:
            time.sleep(seconds)
            return
        from .spin_kernel import copy_for  # needs Triton

        source, out = torch.zeros(2, 1, dtype=torch.int64, device="cuda")
        copy_for(seconds, source, out, 8, torch.cuda.current_stream())


def start_ranks(command: str, device_type: str, backend: str = "nccl") -> RankDevice:
    """Join the process group of a torchrun, with a GPU for each process if the device is "cuda".

    Args:
        command: the name of the benchmark, for the error.
        backend: of GPUs. The CPU has gloo.

    Raises:
        SystemExit: the process was not started by torchrun.
    """
    if "LOCAL_RANK" not in os.environ:
        raise SystemExit(f"{command}: run it with torchrun, a process for each GPU")
    if device_type == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        os.environ.setdefault("TORCH_NCCL_HIGH_PRIORITY", "1")  # otherwise other kernels may delay an exchange
    else:
        torch.set_num_threads(1)
    dist.init_process_group(backend if device_type == "cuda" else "gloo")
    return RankDevice(device_type)


def take_largest(values: list[float], device: str) -> list[float]:
    """Return the largest of each value over the ranks. Collective."""
    tensor = torch.tensor(values, device=device, dtype=torch.float64)
    dist.all_reduce(tensor, dist.ReduceOp.MAX)
    return tensor.tolist()


def share_failures(error: str) -> str:
    """Return the first error of a rank, "" if no rank has one. Collective."""
    errors = [""] * dist.get_world_size()
    dist.all_gather_object(errors, error)
    return next((f"rank {rank}: {text}" for rank, text in enumerate(errors) if text), "")
