"""Emulate GPUs that read each other's memory (`Plan(dispatch="pull")`) on a CPU, by files that all processes map."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist

from ..ir.ops import peer_memory
from ..ir.ops.peer_memory import SharedBuffers
from ..runtime.ranks.topology import ExpertAxis


def allocate_files(group: dist.ProcessGroup, num_bytes: int, device: torch.device) -> SharedBuffers:
    """Map a file of each rank. Collective."""
    handle, path = tempfile.mkstemp()
    os.close(handle)
    paths: list[str] = [""] * group.size()
    dist.all_gather_object(paths, path, group=group)
    buffers = [torch.from_file(name, shared=True, size=num_bytes, dtype=torch.uint8) for name in paths]
    dist.barrier(group)
    Path(path).unlink()
    return SharedBuffers(buffers, lambda: dist.barrier(group))


@contextlib.contextmanager
def memory_of_files() -> Iterator[None]:
    """Let ranks on a CPU run "pull"."""
    with (
        mock.patch.object(peer_memory, "allocate", allocate_files),
        mock.patch.object(ExpertAxis, "pull_obstacle", None),
    ):
        yield
