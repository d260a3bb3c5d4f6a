"""Run groups of experts in parallel on the CPU.

A plain loop over experts can use several cores only inside of small kernels, which wastes about half of the time: a
256-row GEMM scales badly, and a small pointwise kernel is not split at all. Experts are independent, so each worker
takes whole experts, with single-threaded kernels that release the GIL. Results go to disjoint slices, so they do not
depend on the number or order of workers, bit by bit.
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
# More workers only wait for the GIL (8 were no faster than 2). With more cores each worker's kernels get more threads.
_MAX_WORKERS = 4


def for_each(
    items: Sequence[T],
    work: Callable[[T], Any],
    then: Callable[[T, Any], None] | None = None,
    *,
    parallel: bool = True,
) -> None:
    """Call `work` on every item, in parallel if torch may use several threads. Raises the first error.

    Args:
        then: called as `then(item, result)` for one item at a time, in the order of the items, so that sums do not
            depend on the number of workers.
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
    in_order = _OrderedResults(items, then)

    def run_tasks() -> None:
        # New threads have torch's default state; an op works below autograd.
        with torch._C._AutoDispatchBelowAutograd(), torch.no_grad():
            while True:
                with lock:
                    index, item = next(tasks, (-1, None))
                if item is None:
                    return
                in_order.put(index, work(item))

    _release_idle_threads()
    pool = _get_pool(num_threads, os.getpid())  # threads do not survive a fork
    futures = [pool.submit(run_tasks) for _ in range(num_workers)]
    wait(futures)
    for future in futures:
        future.result()


class _OrderedResults:
    """Passes results on in order. No worker waits: the one with the next result also passes on any early results."""

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
    """Stop OpenMP's idle threads from spinning on cores that the workers need.

    After a kernel GNU's OpenMP spins for 8 ms. A restart of its threads takes 0.1 ms.
    """
    pause = _openmp_pause()
    if pause is not None:
        pause(1)  # omp_pause_soft


@functools.cache
def _openmp_pause() -> Callable[[int], int] | None:
    """Return OpenMP 5's `omp_pause_resource_all`, or None if the process does not have it."""
    try:
        return ctypes.CDLL(None).omp_pause_resource_all
    except (AttributeError, OSError, TypeError):
        return None


@functools.lru_cache(maxsize=1)
def _get_pool(num_threads: int, pid: int) -> ThreadPoolExecutor:
    num_workers = min(num_threads, _MAX_WORKERS)
    barrier = threading.Barrier(num_workers + 1)

    def start() -> None:
        torch.set_num_threads(num_threads // num_workers)
        torch.get_num_threads()  # fixes the setting for this thread before it is reset for the others
        barrier.wait()

    pool = ThreadPoolExecutor(num_workers, thread_name_prefix="moefx")
    for _ in range(num_workers):
        pool.submit(start)  # the barrier makes each call run in a different thread
    barrier.wait()
    # Setting the number of threads also changes the default of new threads: restore it.
    torch.set_num_threads(num_threads)
    return pool
