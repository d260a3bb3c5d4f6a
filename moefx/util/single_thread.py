"""Run small ops on one core."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import torch


@contextlib.contextmanager
def use_one_thread() -> Iterator[None]:
    """Run the ops of this thread on one core: threads of OpenMP spin while they wait for the next op.

    Threads that start meanwhile keep the number of before.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.get_num_threads()  # fixes the setting for this thread before it is reset for others
    with ThreadPoolExecutor(1) as other:
        other.submit(torch.set_num_threads, before).result()
    try:
        yield
    finally:
        torch.set_num_threads(before)
