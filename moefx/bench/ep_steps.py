"""Steps of a layer over ranks, eager and as one CUDA graph, and their times."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from .rank_device import RankDevice
from .sent_bytes import count_sent_bytes
from .shapes import Shape

_STEPS = 4
_GPU = RankDevice("cuda")


class Step:
    """Forward and backward of a layer on this rank's tokens. Tokens, and so the numbers of sent rows, differ in each
    step.

    Attributes:
        delay: seconds for which this rank's device is busy before each step.
        is_captured: whether the step is a CUDA graph.
    """

    is_captured = False

    def __init__(self, layer: nn.Module, shape: Shape, device: RankDevice = _GPU):
        self.layer, self.shape, self.device, self.delay = layer, shape, device, 0.0
        self.generator = torch.Generator(device.type).manual_seed(17 + dist.get_rank())
        self.grad = self.draw_rows()
        self.inputs: list[Tensor] = []

    def draw_rows(self) -> Tensor:
        """Draw rows [T,d] of a normal distribution."""
        size = self.shape.T, self.shape.d
        return torch.randn(size, device=self.device.type, dtype=torch.bfloat16, generator=self.generator)

    def prepare(self, steps: int) -> None:
        """Create the inputs of the next `steps` steps."""
        self.inputs = [self.draw_rows().requires_grad_() for _ in range(steps)]

    def __call__(self) -> None:
        self.run_eagerly(self.inputs.pop())

    def run_eagerly(self, x: Tensor) -> None:
        """Run forward and backward without a graph."""
        self.layer(x).backward(self.grad)
        for parameter in self.layer.parameters():
            parameter.grad = None

    def measure_milliseconds(self) -> float:
        """Measure the milliseconds of a step among several."""
        self.prepare(_STEPS)
        dist.barrier()
        return self.device.measure_milliseconds(self._run_several) / _STEPS

    def _run_several(self) -> None:
        for _ in range(_STEPS):
            if self.delay:
                self.device.occupy(self.delay)
            self()

    def compute_output(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            return self.layer(x).float()

    def count_sent_bytes(self, x: Tensor) -> int:
        """Count the bytes that this rank sends in one step on the tokens `x`. Collective."""
        with count_sent_bytes() as sent:
            self.run_eagerly(x.detach().requires_grad_())
        return sent.num_bytes

    def profile_kernels(self) -> list[tuple[str, float, float]]:
        """Profile one step. Returns (name, begin, end) of its kernels in ms, by begin; none on a CPU."""
        if not self.device.is_gpu:
            return []
        self.prepare(2)
        self()
        torch.cuda.synchronize()
        with torch.profiler.profile() as profile:
            dist.barrier()
            self()
            torch.cuda.synchronize()
        events: Iterable[Any] = profile.events() or ()
        kernels = [e for e in events if e.device_type.name == "CUDA" and not e.is_user_annotation]
        first = min(e.time_range.start for e in kernels)
        spans = [(e.name, (e.time_range.start - first) / 1e3, (e.time_range.end - first) / 1e3) for e in kernels]
        return sorted(spans, key=lambda span: span[1])


class GraphStep(Step):
    """A step as one CUDA graph. Each replay fills its input first."""

    is_captured = True

    def __init__(self, layer: nn.Module, shape: Shape, device: RankDevice = _GPU):
        super().__init__(layer, shape, device)
        self.input = self.draw_rows().requires_grad_()
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                self._run()
        torch.cuda.current_stream().wait_stream(side)
        torch.cuda.synchronize()
        dist.barrier()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self._run()

    def _run(self) -> None:
        self.input.grad = None
        self.run_eagerly(self.input)

    def __call__(self) -> None:
        with torch.no_grad():
            self.input.copy_(self.inputs.pop())
        self.graph.replay()
