"""One call of `expert_mlp` or its backward: the kernels' arguments and their launches.

Each piece of work is a method of `KernelCall`, or of `BackwardCall` in `expert_mlp_backward_call`. It gets its
configuration from `tuning.choose_config`. `warp_specialized` launches configurations with warp roles, these classes the
kernels of `gemm_forward`, `gemm_backward` and `row_kernels`.
"""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from triton import next_power_of_2

from ...ir.ops.mlp_arguments import ExpertMlpCall
from . import row_kernels as rows
from . import warp_specialized
from .exchange_ops import sum_rows_of_tokens
from .gemm_forward import rows_kernel, up_kernel
from .launch import cdiv, choose_block
from .launch_replay import apply, empty, launch
from .pointwise import Pointwise, build_pointwise
from .tile_configs import GemmConfig, get_target, num_multiprocessors, portable_config
from .tiles import schedule_kernel
from .tuning import choose_config
from .weight_operands import Weights, is_describable, make_descriptor, stack_biases


def choose_matmul_precision(x: Tensor) -> str:
    """Return the precision of float32 products, "tf32" or "ieee": torch's setting for matmul, if the device has
    TF32."""
    allows_tf32 = x.dtype is torch.float32 and torch.backends.cuda.matmul.fp32_precision == "tf32"
    uses_tf32 = allows_tf32 and (get_target(x.device).startswith("sm") or get_target(x.device) == "gfx942")
    return "tf32" if uses_tf32 else "ieee"


class KernelCall:
    """One call with its arguments as the kernels take them.

    Args:
        overlaps_exchange: whether an exchange occupies some multiprocessors at the same time. A persistent program that
            waits for one of them would start its whole share of tiles late, so each tile gets its own program.
    """

    def __init__(
        self, args: Sequence[Any], body: str, keep: str, dtype: torch.dtype | None, overlaps_exchange: bool = False
    ):
        self.overlaps_exchange = overlaps_exchange
        call = ExpertMlpCall.of(args, body, keep, dtype)
        names = ("token_ids", "expert_offsets", "inverse", "w")  # the kernels take no strides for these
        self.call = call = dataclasses.replace(call, **{name: _contiguous(getattr(call, name)) for name in names})
        self.up_widths, self.act_width, self.out_width = call.widths
        self.device, self.dtype = call.x.device, call.dtype
        self.pointwise: Pointwise = build_pointwise(
            body, tuple(self.up_widths), get_target(self.device).startswith("sm")
        )
        self.num_experts = call.expert_offsets.shape[0] - 1
        self.x = make_rows_contiguous(call.x)
        self.up = Weights.of_groups(call.up, call.body.up[0].transposed, call.dtype)
        self.up_bias = [stack_biases(b) for b in call.up_bias]
        if len({b.stride() for b in self.up_bias if b is not None}) > 1:  # one kernel adds both
            self.up_bias = [_contiguous(b) for b in self.up_bias]
        self.down = Weights.of(call.down, call.body.down.transposed, call.dtype)
        self.down_bias = stack_biases(call.down_bias)
        # A kernel that reads no weights still needs a valid pointer.
        self.w = call.token_ids if call.w is None else call.w
        self.schedules: dict[int, tuple[Tensor, int]] = {}

    def with_offsets(self, expert_offsets: Tensor) -> KernelCall:
        """Return the same call for other rows."""
        other = copy.copy(self)
        other.call, other.schedules = dataclasses.replace(self.call, expert_offsets=expert_offsets), {}
        return other

    def config(self, kernel: str, columns: int, inner: int, trial: Callable[[GemmConfig], object]) -> GemmConfig:
        """Return the configuration of a GEMM, which may be tuned with `trial`."""
        shape = (columns, inner, self.call.num_rows // self.num_experts)
        schedules = self.schedules.copy()
        try:
            return choose_config(kernel, self.device, self.dtype, shape, self.num_experts, trial)
        finally:
            self.schedules = schedules  # schedules of trials are not on the tape

    def empty(self, num_rows: int, width: int, dtype: torch.dtype | None = None) -> Tensor:
        return empty((num_rows, width), dtype or self.dtype, self.device)

    def schedule(self, bm: int) -> tuple[Tensor, int]:
        """(schedule, largest number of tiles) for row tiles of `bm` rows (see `schedule_kernel`)."""
        if bm not in self.schedules:
            max_tiles = cdiv(self.call.num_rows, bm) + self.num_experts
            schedule = empty((3 * max_tiles + 1,), torch.int32, self.device)
            launch(
                schedule_kernel,
                (self.num_experts,),
                (self.call.expert_offsets, schedule, max_tiles),
                dict(E=self.num_experts, E_BINS=self.bins, BM=bm),
                warps=1,
            )
            self.schedules[bm] = (schedule, max_tiles)
        return self.schedules[bm]

    @property
    def bins(self) -> int:
        return next_power_of_2(self.num_experts)

    def grid(self, tiles: GemmConfig, num_tiles: int) -> tuple[int]:
        if self.overlaps_exchange or not tiles.persistent:
            return (num_tiles,)
        return (min(num_tiles, tiles.persistent * num_multiprocessors(self.device)),)

    def parts(self, hidden: Sequence[Tensor]) -> list[Tensor]:
        """Views of the up-projections at which the kernels' two parts begin. Joined parts begin at the same one."""
        if self.pointwise.joined:
            return [hidden[0], hidden[0]]
        parts = list(self.call.slice_hidden(hidden).values())
        return [parts[0], parts[-1]]

    def part_weights(self) -> list[Weights]:
        if self.pointwise.joined:
            return [self.up[0], self.up[0]]
        parts = [self.up[g].columns(*columns) for g, *columns in self.call.body.parts]
        return [parts[0], parts[-1]]

    def part_biases(self) -> list[Tensor | None]:
        parts = []
        for g, start, stop, step in self.call.body.parts:
            bias = self.up_bias[g]
            parts.append(None if bias is None else bias[:, start:stop:step])
        if self.pointwise.joined and self.call.body.parts[0][1]:
            parts.reverse()
        return [parts[0], parts[-1]]

    # -- pieces of the forward

    def project_up(self, hidden: list[Tensor] | None, act: Tensor | None, tiles: GemmConfig | None = None) -> None:
        call, pointwise = self.call, self.pointwise
        width, inner = self.act_width, self.x.shape[1]
        tiles = tiles or self.config("up", width, inner, lambda tiles: self.project_up(hidden, act, tiles))
        if not tiles.fused:
            hidden = hidden or [self.empty(call.num_rows, w) for w in self.up_widths]
            for h, w, bias in zip(hidden, self.up, self.up_bias, strict=True):
                self.multiply_rows([self.x], [w], h, backward=False, gather=True, bias=bias, tiles=tiles)
            if act is not None:
                self.activate(hidden, act)
            return
        if tiles.roles:
            if warp_specialized.try_project_up(self, hidden, act, tiles):
                return
            tiles = portable_config("up")
        schedule, max_tiles = self.schedule(tiles.bm)
        block = ((2 if pointwise.joined else 1) * tiles.bn, tiles.bk) if tiles.descriptors else None
        w0, w1 = (w.operand(backward=False, block=block) for w in self.part_weights())
        bias0, bias1 = self.part_biases()
        h0, h1 = self.parts(hidden) if hidden else (self.x, self.x)
        results = [t for t in (h0 if hidden else None, h1 if hidden else None, act) if t is not None]
        outputs: list[Any] = [None, None, None]
        if describe_out := tiles.store_descriptors and all(map(is_describable, results)):
            if hidden:
                outputs[:2] = (
                    make_descriptor(h, tiles.bm, (2 if pointwise.joined else 1) * tiles.bn) for h in (h0, h1)
                )
            outputs[2] = None if act is None else make_descriptor(act, tiles.bm, tiles.bn)
        args = (
            *(self.x, self.x.stride(0), call.token_ids, schedule, max_tiles),
            *(w0.source, w1.source, w0.expert, w0.column, w0.inner),
            *(bias0, bias1, *((0, 0) if bias0 is None else bias0.stride())),
            *(self.w, h0, h1, h0.stride(0), self.x if act is None else act, *outputs, width, inner),
        )
        constants = pointwise.act_constants | dict(
            WEIGHT=max(w0.access, w1.access, key=len),  # "unaligned" if one of them is
            COLUMNS_FIRST=w0.columns_first,
            HAS_BIAS=bias0 is not None,
            STORE_H=hidden is not None,
            STORE_ACT=act is not None,
            OUT_DESCRIPTOR=describe_out,
        )
        self.launch_gemm(up_kernel, tiles, max_tiles * cdiv(width, tiles.bn), width, inner, args, constants)

    def activate(self, hidden: Sequence[Tensor], act: Tensor) -> None:
        """Run the pointwise part in a separate kernel."""
        width = self.act_width
        (h0, h1), (bt, bd) = self.parts(hidden), choose_block(width)
        launch(
            rows.act_kernel,
            (cdiv(self.call.num_rows, bt), cdiv(width, bd)),
            (h0, h1, h0.stride(0), self.call.expert_offsets, self.w, act, width, self.num_experts),
            self.pointwise.act_constants | dict(BT=bt, BD=bd),
        )

    def project_down(self, act: Tensor, out: Tensor, scaled: bool, tiles: GemmConfig | None = None) -> None:
        scale = self.pointwise.scale if scaled else None
        self.multiply_rows([act], [self.down], out, backward=False, bias=self.down_bias, scale=scale, tiles=tiles)

    def multiply_rows(
        self,
        terms: Sequence[Tensor],
        weights: Sequence[Weights],
        out: Tensor,
        *,
        backward: bool,
        bias: Tensor | None = None,
        scale: Any = None,
        gather: bool = False,
        tiles: GemmConfig | None = None,
    ) -> None:
        width, inner = out.shape[1], terms[0].shape[1]

        def trial(tiles: GemmConfig) -> None:
            self.multiply_rows(
                terms, weights, out, backward=backward, bias=bias, scale=scale, gather=gather, tiles=tiles
            )

        tiles = tiles or self.config("grad_x" if backward else "down", width, inner, trial)
        if gather and tiles.gather_first:
            terms, gather = [self.gather(term) for term in terms], False
        if tiles.roles:
            if warp_specialized.try_multiply_rows(
                self, terms, weights, out, backward=backward, bias=bias, scale=scale, gather=gather, tiles=tiles
            ):
                return
            tiles = portable_config("down")
        if out.element_size() > terms[0].element_size():
            # A wider result needs twice the shared memory for its tile.
            tiles = dataclasses.replace(tiles, flatten=False, store_descriptors=False)
        schedule, max_tiles = self.schedule(tiles.bm)
        operands = [
            w.operand(backward=backward, block=(tiles.bn, tiles.bk) if tiles.descriptors else None) for w in weights
        ]
        is_table = operands[0].access.startswith("table")
        if is_table:  # flattened loops do not pipeline loads through addresses
            tiles = dataclasses.replace(tiles, flatten=False)
        is_described = tiles.descriptors and not gather and not is_table and is_describable(terms[0])
        described_out = tiles.store_descriptors and is_describable(out)
        left = [make_descriptor(t, tiles.bm, tiles.bk) if is_described else t for t in terms]
        args = (
            *(left[0], left[-1], terms[0].stride(0), self.call.token_ids),
            *(schedule, max_tiles),
            *(operands[0].source, operands[-1].source, operands[0].expert, operands[0].column, operands[0].inner),
            *(bias, *((0, 0) if bias is None else bias.stride()), self.w, out),
            *(make_descriptor(out, tiles.bm, tiles.bn) if described_out else None, width, inner),
        )
        constants = dict(
            SCALE=scale,
            TERMS=len(terms),
            GATHER=gather,
            ROWS_DESCRIPTOR=is_described,
            OUT_DESCRIPTOR=described_out,
            WEIGHT=operands[0].access,
            COLUMNS_FIRST=operands[0].columns_first,
            HAS_BIAS=bias is not None,
            HAS_SCALE=scale is not None,
        )
        self.launch_gemm(rows_kernel, tiles, max_tiles * cdiv(width, tiles.bn), width, inner, args, constants)

    def combine(self, out: Tensor, dtype: torch.dtype, scale: Any) -> Tensor:
        """Sum each token's rows, [S,width]. The number of tokens is not recorded on the tape."""

        def sum_rows(rows: Tensor, weights: Tensor, inverse: Tensor) -> Tensor:
            return sum_rows_of_tokens(rows, weights, inverse, dtype, scale)

        return apply(sum_rows, out, self.w, self.call.inverse)

    def launch_gemm(
        self,
        kernel: Any,
        tiles: GemmConfig,
        num_tiles: int,
        width: int,
        inner: int,
        args: Sequence[Any],
        constants: dict[str, Any],
    ) -> None:
        even = dict(EVEN_N=width % tiles.bn == 0, EVEN_K=inner % tiles.bk == 0, VECTOR=math.gcd(width, 8))
        constants = {**constants, **even, **self.tile_constants(tiles)}
        launch(kernel, self.grid(tiles, num_tiles), args, constants, warps=tiles.warps, stages=tiles.stages)

    def tile_constants(self, tiles: GemmConfig) -> dict[str, Any]:
        return dict(
            PRECISION=choose_matmul_precision(self.x),
            BM=tiles.bm,
            BN=tiles.bn,
            BK=tiles.bk,
            GROUP=tiles.group,
            PERSISTENT=bool(tiles.persistent),
            FLATTEN=tiles.flatten,
        )

    def gather(self, tensor: Tensor) -> Tensor:
        """Gather the routed rows [B,width] of a tensor by token."""
        num_rows, width = self.call.num_rows, tensor.shape[1]
        out, (bt, bd) = self.empty(num_rows, width), choose_block(width, 4096)
        launch(
            rows.gather_kernel,
            (cdiv(num_rows, bt), cdiv(width, bd)),
            (tensor, tensor.stride(0), self.call.token_ids, self.call.expert_offsets, out, width, self.num_experts),
            dict(BT=bt, BD=bd),
        )
        return out


def _contiguous(tensor: Tensor | None) -> Tensor | None:
    return tensor if tensor is None or tensor.is_contiguous() else apply(Tensor.contiguous, tensor)


def make_rows_contiguous(tensor: Tensor) -> Tensor:
    return tensor if tensor.stride(1) == 1 or tensor.shape[1] == 1 else apply(Tensor.contiguous, tensor)
