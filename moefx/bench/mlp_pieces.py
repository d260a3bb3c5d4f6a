"""The pieces of one shape's expert MLP, for benchmarks of single kernels."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..lowering.triton import build_pft, tuning
from ..lowering.triton.expert_mlp_backward_call import BackwardCall
from ..lowering.triton.tile_configs import GemmConfig
from .routing import sort_by_expert
from .shapes import Shape, activation, draw_tensors, expert_body, random_routing


class MlpPieces:
    """The tensors of one shape, and the pieces of a step as functions."""

    def __init__(self, shape: Shape, device: str = "cuda", kind: str = "uniform"):
        self.shape = shape
        self.x, self.w1, self.w2, self.grad = draw_tensors(shape, device=device)
        self.ids, self.weights = random_routing(shape, device, kind)
        self.token_ids, _, self.offsets, self.inverse, row_weights = self.route()
        args = (self.x, self.token_ids, self.offsets, self.inverse, row_weights, [self.w1], [], [self.w2], [])
        self.run = BackwardCall(args, expert_body(shape).to_json(), "h", None)
        rows = shape.T * shape.K

        def empty(*size: int) -> Tensor:
            return torch.empty(size, dtype=self.x.dtype, device=self.x.device)

        self.hidden, self.act, self.out = empty(rows, shape.parts * shape.h), empty(rows, shape.h), empty(rows, shape.d)
        self.grad_hidden, self.scaled = empty(rows, shape.parts * shape.h), empty(rows, shape.h)
        for tensor in (self.hidden, self.act, self.grad_hidden, self.scaled):
            tensor.normal_()
        self.handed_on: tuple[Tensor, bool] = (self.grad, True)

    def route(self) -> Sequence[Any]:
        return build_pft.build_pft(self.ids, self.weights, None, num_experts=self.shape.E)

    def list_kernels(self) -> dict[str, tuple[int, Callable[[GemmConfig], Any]]]:
        """List the GEMMs: name -> (number of d x h matrices, work for a configuration).

        grad_down reads dO as the last act_backward left it: by token, or gathered.
        """
        run, dtype = self.run, self.x.dtype
        grad_hidden, scaled = (self.grad_hidden, False), (self.scaled, False)
        hidden, grad_rows, parts = [self.hidden], [self.grad_hidden], self.shape.parts

        def act_backward(tiles: GemmConfig) -> None:
            self.handed_on = run.act_backward(self.grad, True, hidden, grad_rows, self.scaled, True, tiles)[2:]

        return {
            "up": (parts, lambda tiles: run.project_up(hidden, self.act, tiles)),
            "down": (1, lambda tiles: run.project_down(self.act, self.out, False, tiles)),
            "act_backward": (1, act_backward),
            "grad_x": (parts, lambda tiles: run.multiply_rows(grad_rows, run.up, self.out, backward=True, tiles=tiles)),
            "grad_up": (parts, lambda tiles: run.outer("grad_up", grad_hidden, (self.x, True), dtype, tiles)),
            "grad_down": (1, lambda tiles: run.outer("grad_down", self.handed_on, scaled, dtype, tiles)),
        }

    def list_tuned_kernels(self) -> dict[str, tuple[int, Callable[[GemmConfig], Any]]]:
        """Return the work of `list_kernels` to tune configurations by: act_backward includes grad_down, which uses its
        gathered rows."""
        gemms = self.list_kernels()
        (_, act_backward), (_, grad_down) = gemms["act_backward"], gemms["grad_down"]
        tiles = self.choose_config("grad_down")

        def both(other: GemmConfig) -> None:
            act_backward(other)
            grad_down(tiles)
            self.handed_on = (self.grad, True)

        return gemms | {"act_backward": (2, both)}

    def choose_config(self, kernel: str) -> GemmConfig:
        return tuning.find_nearest_config(kernel, self.x.device, self.x.dtype, self.get_sizes(kernel))[0]

    def get_sizes(self, kernel: str) -> tuple[int, int, int]:
        """Return (columns, inner, mean rows of an expert), by which `tuning.choose_config` chooses."""
        s = self.shape
        pairs = dict(up=(s.h, s.d), down=(s.d, s.h), act_backward=(s.h, s.d), grad_x=(s.d, s.parts * s.h))
        pairs |= dict(grad_up=(s.d, s.parts * s.h), grad_down=(s.h, s.d))
        return (*pairs[kernel], s.T * s.K // s.E)

    def list_stages(self) -> dict[str, tuple[int, int, Callable[[], object]]]:
        """List the stages of a step in order: name -> (floating-point operations of GEMMs, bytes read and written at
        least, work)."""
        s, run, gemms = self.shape, self.run, self.list_kernels()
        rows, width, matrix, hidden = s.T * s.K, self.x.element_size(), s.E * s.d * s.h, s.parts * s.h
        num_moved = {  # elements
            "up": rows * (s.d + hidden + s.h) + s.parts * matrix,
            "down": rows * (s.h + s.d) + matrix,
            "act_backward": rows * (s.d + 2 * hidden + s.h) + matrix,
            "grad_down": rows * (s.h + s.d) + matrix,
            "grad_up": rows * (hidden + s.d) + s.parts * matrix,
            "grad_x": rows * (hidden + s.d) + s.parts * matrix,
        }

        def gemm(name: str) -> tuple[int, int, Callable[[], object]]:
            matrices, work = gemms[name]
            tiles = self.choose_config(name)
            return matrices * s.flops, num_moved[name] * width, lambda: work(tiles)

        combine_cost = (0, (rows + s.T) * s.d * width)
        scale = run.pointwise.scale
        return {
            "routing": (0, rows * (8 + 4 + 4 * 4), self.route),
            "up": gemm("up"),
            "down": gemm("down"),
            "combine": (*combine_cost, lambda: run.combine(self.out, self.x.dtype, scale)),
            "act_backward": gemm("act_backward"),
            "grad_down": gemm("grad_down"),
            "grad_up": gemm("grad_up"),
            "grad_x": gemm("grad_x"),
            "combine_backward": (*combine_cost, lambda: run.combine(self.out, self.x.dtype, None)),
        }

    def list_parts(self) -> dict[str, dict[str, Callable[[], object]]]:
        """List the parts of a forward as in X-MoE's figure 11: part -> system -> work."""
        s, stages = self.shape, self.list_stages()
        router = torch.randn(s.E, s.d, device=self.x.device).to(self.x.dtype)
        w1, w2 = self.w1.transpose(1, 2), self.w2.transpose(1, 2)
        ends, by_slot = self.offsets[1:].to(torch.int32), self.weights[..., None].to(self.x.dtype)
        rows = self.x[self.token_ids.long()]

        def gating() -> object:
            return F.linear(self.x, router).float().softmax(-1).topk(s.K)

        def dispatch() -> object:
            token_ids, _, offsets, inverse, _ = sort_by_expert(self.ids, self.weights, s.E)
            return inverse.reshape(-1), offsets[1:], self.x[token_ids]

        def experts() -> object:
            return F.grouped_mm(activation(s, F.grouped_mm(rows, w1, offs=ends)), w2, offs=ends)

        def combine() -> object:
            return (self.out[self.inverse.long()] * by_slot).sum(1)

        def ours(*names: str) -> Callable[[], object]:
            return lambda: [stages[name][2]() for name in names]

        return {
            "gating": {"moefx": gating, "torch": gating},
            "dispatch": {"moefx": ours("routing"), "torch": dispatch},
            "experts": {"moefx": ours("up", "down"), "torch": experts},
            "combine": {"moefx": ours("combine"), "torch": combine},
        }
