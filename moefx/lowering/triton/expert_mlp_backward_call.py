"""One call of the backward of `expert_mlp`: the launches that its forward does not have."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from . import row_kernels as rows
from . import warp_specialized
from .expert_mlp_call import KernelCall
from .gemm_backward import act_backward_kernel, outer_kernel
from .launch import cdiv, choose_block
from .launch_replay import apply, empty, launch
from .tile_configs import GemmConfig, portable_config
from .weight_operands import is_describable, make_descriptor

_SHARED_BYTES = 227 * 1024 - 4096  # shared memory of a block on GPUs with tensor descriptors, without barriers


class BackwardCall(KernelCall):
    """One call of `expert_mlp_backward`."""

    def act_backward(
        self,
        grad: Tensor,
        gather: bool,
        hidden: Sequence[Tensor],
        grad_hidden: Sequence[Tensor],
        scaled_act: Tensor | None,
        need_w: bool,
        tiles: GemmConfig | None = None,
    ) -> tuple[Tensor | None, int, Tensor, bool]:
        """Compute dH and scale * A.

        Returns:
            Partial sums <dA', A>, their number, the gradient's rows for the next kernel, and whether they are by token.
        """
        call, pointwise = self.call, self.pointwise
        width, inner = self.act_width, self.out_width

        def trial(tiles: GemmConfig) -> None:  # does not overwrite H
            grad_buffers = [torch.empty_like(h) for h in hidden] if grad_hidden is hidden else grad_hidden
            self.act_backward(grad, gather, hidden, grad_buffers, scaled_act, need_w, tiles)

        tiles = tiles or self.config("act_backward", width, inner, trial)
        if tiles.roles and tiles.fused and not warp_specialized.supports_act_backward(self, grad, hidden, tiles):
            tiles = portable_config("act_backward")
        if gather and tiles.gather_first:
            grad, gather = self.gather(grad), False
        num_partials, dots = (cdiv(width, tiles.bn) if tiles.fused else 1), None
        num_sums = (pointwise.scale is not None) + pointwise.uses_weight
        if need_w and num_sums:
            dots = self.empty(num_partials * num_sums, call.num_rows, torch.float32)
        (h0, h1), (dh0, dh1) = self.parts(hidden), self.parts(grad_hidden)
        constants = pointwise.vjp_constants | dict(STORE_ACT=scaled_act is not None, STORE_DOTS=dots is not None)
        if not tiles.fused:
            grad_act = self.empty(call.num_rows, width) if scaled_act is None else scaled_act
            self.multiply_rows([grad], [self.down], grad_act, backward=True, gather=gather, tiles=tiles)
            bt, bd = choose_block(width)
            args = (grad_act, h0, h1, dh0, dh1, h0.stride(0), call.expert_offsets, self.w, dots, call.num_rows)
            args = (*args, width, self.num_experts)
            launch(rows.act_vjp_kernel, (cdiv(call.num_rows, bt),), args, constants | dict(BT=bt, BD=bd))
            return dots, num_partials, grad, gather
        if tiles.roles:
            warp_specialized.act_backward(self, grad, gather, (h0, h1), (dh0, dh1), scaled_act, dots, constants, tiles)
            return dots, num_partials, grad, gather
        schedule, max_tiles = self.schedule(tiles.bm)
        w = self.down.operand(backward=True, block=(tiles.bn, tiles.bk) if tiles.descriptors else None)
        args = (
            *(grad, grad.stride(0), call.token_ids, schedule, max_tiles),
            *(w.source, w.expert, w.column, w.inner, self.w, h0, h1, dh0, dh1, h0.stride(0)),
            *(scaled_act, dots, call.num_rows, width, inner),
        )
        constants |= dict(GATHER=gather, WEIGHT=w.access, COLUMNS_FIRST=w.columns_first, SLICES=tiles.slices)
        self.launch_gemm(act_backward_kernel, tiles, max_tiles * num_partials, width, inner, args, constants)
        return dots, num_partials, grad, gather

    def weight_gradient(self, grad: Tensor, gather: bool, dots: Tensor | None, num_partials: int) -> Tensor:
        call, pointwise = self.call, self.pointwise
        if dots is None:
            return apply(lambda w, num_rows=call.num_rows: w.new_zeros(num_rows), self.w)
        out = empty((call.num_rows,), self.w.dtype, self.device)
        bias = self.down_bias
        block = 256 if bias is None else 32
        args = (
            *(dots, num_partials, self.w, grad, grad.stride(0), call.token_ids, call.expert_offsets),
            *(bias, *((0, 0) if bias is None else bias.stride()), out, call.num_rows, self.out_width),
        )
        constants = dict(
            SCALE_GRAD=pointwise.scale_grad,
            HAS_SCALE=pointwise.scale is not None,
            USES_WEIGHT=pointwise.uses_weight,
            HAS_BIAS=bias is not None,
            GATHER=gather,
            E=self.num_experts,
            E_BINS=self.bins,
            BLOCK=block,
            BD=128,
        )
        launch(rows.weight_gradient_kernel, (cdiv(call.num_rows, block),), args, constants)
        return out

    def outer(
        self,
        kernel: str,
        left: tuple[Tensor, bool],
        right: tuple[Tensor, bool],
        dtype: torch.dtype,
        tiles: GemmConfig | None = None,
    ) -> Tensor:
        """Sum left[r]^T right[r] over each expert's rows, [E,.,.]. Each side is (rows, whether to gather them)."""
        sizes = right[0].shape[1], left[0].shape[1]
        tiles = tiles or self.config(kernel, *sizes, lambda tiles: self.outer(kernel, left, right, dtype, tiles))
        if tiles.gather_first:
            left, right = ((self.gather(t), False) if to_gather else (t, False) for t, to_gather in (left, right))
        (a, gather_left), (b, gather_right) = left, right
        height, width = a.shape[1], b.shape[1]
        out = empty((self.num_experts, height, width), dtype, self.device)
        if tiles.roles:
            if warp_specialized.try_outer(self, left, right, out, tiles):
                return out
            tiles = portable_config(kernel)
        num_tiles = self.num_experts * cdiv(height, tiles.bm) * cdiv(width, tiles.bn)
        describe_left = tiles.descriptors and not gather_left and is_describable(a)
        describe_right = tiles.descriptors and not gather_right and is_describable(b)
        if describe_left or describe_right:  # described sides have a buffer for each stage, a gathered side has one
            left_bytes, right_bytes = (n * tiles.bk * a.element_size() for n in (tiles.bm, tiles.bn))
            bytes_of_stage = describe_left * left_bytes + describe_right * right_bytes
            room = _SHARED_BYTES - (left_bytes + right_bytes - bytes_of_stage)
            tiles = dataclasses.replace(tiles, stages=max(1, min(tiles.stages, room // bytes_of_stage)))
        # The result's tile is staged in shared memory, which is too small for float64.
        describe_out = tiles.descriptors and width * out.element_size() % 16 == 0 and out.element_size() <= 4
        args = (
            *(make_descriptor(a, tiles.bk, tiles.bm) if describe_left else a, a.stride(0)),
            *(make_descriptor(b, tiles.bk, tiles.bn) if describe_right else b, b.stride(0)),
            *(self.call.token_ids, self.call.expert_offsets),
            *(make_descriptor(out, 1, tiles.bm, tiles.bn) if describe_out else out, height, width, self.num_experts),
        )
        constants = dict(
            GATHER_LEFT=gather_left,
            GATHER_RIGHT=gather_right,
            LEFT_DESCRIPTOR=describe_left,
            RIGHT_DESCRIPTOR=describe_right,
            OUT_DESCRIPTOR=describe_out,
            EVEN=height % tiles.bm == 0 and width % tiles.bn == 0,
            VECTOR=math.gcd(height, width, 8),
            **self.tile_constants(tiles),
        )
        launch(outer_kernel, self.grid(tiles, num_tiles), args, constants, warps=tiles.warps, stages=tiles.stages)
        return out

    def sum_rows(self, tensor: Tensor, gather: bool, scale: Any, dtype: torch.dtype) -> Tensor:
        """Sum each expert's rows, each times `scale` of its weight, [E,width]."""
        width = tensor.shape[1]
        out = self.empty(self.num_experts, width, dtype)
        launch(
            rows.sum_rows_kernel,
            (self.num_experts, cdiv(width, 64)),
            (tensor, tensor.stride(0), self.call.token_ids, self.call.expert_offsets, self.w, out, width),
            dict(SCALE=scale, HAS_SCALE=scale is not None, GATHER=gather, BR=32, BD=64),
        )
        return out
