"""Time GEMMs, attention, copies and experts on one device, and read its memory.

Sizes are reduced so that none takes much longer than `_LONGEST` seconds, by the rates of a product and a copy.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import statistics
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..lowering.triton.timing import measure_milliseconds, settle_clock
from .peers import Inputs, build_moefx
from .rate_fit import ExpertTime, GemmTime
from .shapes import Shape, draw_tensors, random_routing

_LONGEST = 0.03
# (columns, inner): of routers and small experts, of experts and attention, of large ones
_GEMMS = (
    (768, 2048), (2048, 768), (2048, 2048), (4096, 4096), (14336, 4096), (4096, 14336), (2048, 7168), (7168, 2048)
)  # fmt: skip
_ROWS = (64, 256, 1024, 4096, 16384)
# T x d x h x E x K: wide and narrow experts, many and few rows of each, many and few experts
_EXPERTS = (
    (16384, 1024, 512, 64, 8), (16384, 1024, 2048, 64, 8), (16384, 2048, 512, 64, 8), (16384, 2048, 1024, 16, 8),
    (16384, 2048, 1024, 256, 8), (16384, 2048, 2048, 64, 8), (8192, 4096, 1024, 64, 8), (8192, 4096, 4096, 16, 8),
    (8192, 4096, 2048, 256, 8), (4096, 2048, 768, 128, 8), (2048, 2048, 768, 128, 8), (4096, 7168, 2048, 128, 8),
    (32768, 512, 512, 64, 8), (65536, 512, 2048, 32, 4),
)  # fmt: skip
_ATTENTION = ((1, 8192, 32, 128), (4, 4096, 32, 128), (4, 4096, 16, 64), (16, 1024, 32, 128))


class AttentionTime(NamedTuple):
    """Seconds of causal attention, forward and backward.

    Attributes:
        flop: FLOP of the forward; causal, so half of all pairs.
    """

    sequences: int
    tokens: int
    heads: int
    head_size: int
    seconds: float

    @property
    def flop(self) -> float:
        return 2.0 * self.sequences * self.heads * self.tokens**2 * self.head_size


@dataclasses.dataclass(frozen=True)
class Machine:
    """A device to measure.

    Attributes:
        dtype: dtype of all tensors.
    """

    device: torch.device
    dtype: torch.dtype

    @property
    def repeats(self) -> int:
        """Repetitions of each measurement, reported by their median."""
        return 15 if self.device.type == "cuda" else 5

    @property
    def name(self) -> str:
        if self.device.type == "cuda":
            return torch.cuda.get_device_name(self.device)
        return f"{os.cpu_count()} cores, {torch.get_num_threads()} threads of a rank"

    @property
    def memory_bytes(self) -> float:
        """Bytes of a GPU's memory, or of a local rank's part of the machine's memory."""
        if self.device.type == "cuda":
            return float(torch.cuda.get_device_properties(self.device).total_memory)
        ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / ranks

    def overhead(self) -> float:
        """Return the bytes of a GPU's memory in use by its context, libraries and process groups, not by tensors."""
        if self.device.type != "cuda":
            return 0.0
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info(self.device)
        return float(total - free - torch.cuda.memory_reserved(self.device))

    def seconds(self, work: Callable[[], object]) -> float:
        """Return the median seconds of `repeats` repetitions, after two for warm-up."""
        if self.device.type == "cuda":
            settle_clock(work, 0.1)  # the first call also tunes
            return measure_milliseconds(work, self.repeats) / 1e3
        durations = []
        for _ in range(self.repeats + 2):
            begin = time.perf_counter()
            work()
            durations.append(time.perf_counter() - begin)
        return statistics.median(durations[2:])

    def random(self, *size: int) -> Tensor:
        return torch.randn(size, device=self.device).to(self.dtype)

    def time_gemm(self, rows: int, columns: int, inner: int) -> GemmTime:
        a, b = self.random(rows, inner), self.random(columns, inner)
        return GemmTime(rows, columns, inner, self.seconds(lambda: F.linear(a, b)))

    def time_gemms(self) -> Iterator[GemmTime]:
        for columns, inner in _GEMMS:
            for rows in _ROWS:
                if 2 * rows * columns * inner <= self.max_flop:
                    yield self.time_gemm(rows, columns, inner)

    def time_attention(self) -> Iterator[AttentionTime]:
        limit = self.max_flop / 6  # forward and backward, slower than a product
        for sequences, tokens, heads, head_size in _ATTENTION:
            while 2 * sequences * heads * tokens**2 * head_size > limit and tokens > 256:
                tokens //= 2
            q, k, v, grad = (self.random(sequences, heads, tokens, head_size).requires_grad_() for _ in range(4))

            def step(q: Tensor = q, k: Tensor = k, v: Tensor = v, grad: Tensor = grad) -> None:
                torch.autograd.grad(F.scaled_dot_product_attention(q, k, v, is_causal=True), (q, k, v), grad)

            yield AttentionTime(sequences, tokens, heads, head_size, self.seconds(step))

    @functools.cached_property
    def copy(self) -> float:
        """Bytes a second, read and written together, of a copy larger than the caches."""
        size = min(2**28, int(self.memory_bytes / 64))
        a = torch.ones(size, device=self.device)
        b = torch.empty_like(a)
        return 2 * a.numel() * a.element_size() / self.seconds(lambda: b.copy_(a))

    @functools.cached_property
    def shapes(self) -> list[Shape]:
        """Shapes of all kinds of experts, reduced to the device, without duplicates."""
        shapes = []
        for T, d, h, E, K in _EXPERTS:
            while 18 * T * K * d * h > self.max_flop and T > 128:
                T //= 2
            while 3 * E * d * h * self.dtype.itemsize > self.copy * _LONGEST and E > K:
                E //= 2
            shapes.append(Shape(f"{T}x{d}x{h}x{E}x{K}", T, d, h, E, K))
        return list(dict.fromkeys(shapes))

    def time_expert(self, shape: Shape) -> Iterator[ExpertTime]:
        """Time the experts of a shape: forward, and forward with backward."""
        x, w1, w2, grad = draw_tensors(shape, self.dtype, str(self.device))
        work = build_moefx(Inputs(shape, x, w1, w2, grad, *random_routing(shape, str(self.device))))
        yield ExpertTime(shape, self.seconds(work.forward), False)
        yield ExpertTime(shape, self.seconds(work.step), True)

    @functools.cached_property
    def max_flop(self) -> float:
        """FLOP in `_LONGEST` seconds, at the rate of a large square product."""
        size, gemm = 512, self.time_gemm(512, 512, 512)
        while gemm.seconds < 1e-3 and size < 8192:
            size *= 2
            gemm = self.time_gemm(size, size, size)
        return gemm.flop / gemm.seconds * _LONGEST
