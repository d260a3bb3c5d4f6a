"""Work on groups of experts side by side on the CPU.

A plain loop over experts leaves the cores to the insides of each small kernel, where half of their time is
    lost: splitting a 256-row GEMM over two cores, or a pointwise part that is too small to be split. Experts
    are independent, so each worker takes whole ones, with kernels of one thread. The kernels release the GIL;
    results go to disjoint slices, so that neither the number of workers nor their order changes a bit of
    them.
"""

from __future__ import annotations

import ctypes
import functools
import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any, TypeVar

import torch

T = TypeVar("T")
# More workers wait for the GIL (8 were no faster than 2): beyond, each gets several threads for its kernels.
_MAX_WORKERS = 4


def for_each(
    items: Sequence[T],
    work: Callable[[T], Any],
    then: Callable[[T, Any], None] | None = None,
    *,
    parallel: bool = True,
) -> None:
    """Call `work` on every item, in parallel where torch may use several threads. Raises the first error.

    `then(item, result)` is called for one item at a time, in the order of the items: sums come out the same
    with any number of workers.
    """
    num_threads = torch.get_num_threads()
    num_workers = min(num_threads, _MAX_WORKERS, len(items))
    if num_workers < 2 or not parallel:
        for item in items:
            result = work(item)
            if then is not None:
                then(item, result)
        return
    tasks, lock = enumerate(items), threading.Lock()
    in_order = _InOrder(items, then)

    def drain() -> None:
        # New threads have torch's default state; an op works below autograd.
        with torch._C._AutoDispatchBelowAutograd(), torch.no_grad():
            while True:
                with lock:
                    index, item = next(tasks, (-1, None))
                if item is None:
                    return
                in_order.put(index, work(item))

    _release_idle_threads()
    pool = _pool(num_threads, os.getpid())  # threads do not survive a fork
    futures = [pool.submit(drain) for _ in range(num_workers)]
    wait(futures)
    for future in futures:
        future.result()


class _InOrder:
    """Hands results on in order. Nobody waits: who brings the next one hands on those that came early."""

    def __init__(self, items: Sequence[Any], then: Callable[[Any, Any], None] | None):
        self.items, self.then = items, then
        self.ready: dict[int, Any] = {}
        self.next, self.busy, self.lock = 0, False, threading.Lock()

    def put(self, index: int, result: Any) -> None:
        if self.then is None:
            return
        with self.lock:
            self.ready[index] = result
            if self.busy:
                return
            self.busy = True
        while True:
            with self.lock:
                if self.next not in self.ready:
                    self.busy = False
                    return
                index, result = self.next, self.ready.pop(self.next)
                self.next += 1
            self.then(self.items[index], result)


def _release_idle_threads() -> None:
    """Stop OpenMP's threads from spinning. After a kernel of the caller's they wait for the next one on a core
    that the workers need, for 8 ms with GNU's OpenMP. It starts them anew when they are needed, in 0.1 ms."""
    pause = _openmp_pause()
    if pause is not None:
        pause(1)  # omp_pause_soft


@functools.cache
def _openmp_pause() -> Callable[[int], int] | None:
    """OpenMP 5's `omp_pause_resource_all`, where the process has it."""
    try:
        return ctypes.CDLL(None).omp_pause_resource_all
    except (AttributeError, OSError, TypeError):
        return None


@functools.lru_cache(maxsize=1)
def _pool(num_threads: int, pid: int) -> ThreadPoolExecutor:
    num_workers = min(num_threads, _MAX_WORKERS)
    barrier = threading.Barrier(num_workers + 1)

    def start() -> None:
        torch.set_num_threads(num_threads // num_workers)
        torch.get_num_threads()  # makes it this thread's own before it is put back for the others
        barrier.wait()

    pool = ThreadPoolExecutor(num_workers, thread_name_prefix="moefx")
    for _ in range(num_workers):
        pool.submit(start)  # each waits at the barrier, so that each runs in a thread of its own
    barrier.wait()
    # The number of threads is a thread's own, but also what threads to come start with: put that back.
    torch.set_num_threads(num_threads)
    return pool
