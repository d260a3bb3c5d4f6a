"""Gradients of the weights for sm90, sums over each expert's rows, with the roles and the ring of `hopper`."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma_wait,
)

from .hopper_ring import (
    PIECE,
    allocate_barriers,
    copy_rows,
    multiply_block,
    split_into_pieces,
    tma_load,
    tma_store,
    view,
    wait_empty,
)
from .tiles import locate_outer


@gluon.jit
def _outer_load(
    left, left_desc, left_row, right, right_desc, right_row, token_ids, expert_offsets, height, width, num_tiles,
    left_buffers, right_buffers, full, empty,
    GATHER_LEFT: gl.constexpr, GATHER_RIGHT: gl.constexpr, GROUP: gl.constexpr,
):  # fmt: skip
    STAGES: gl.constexpr = left_buffers.shape[0]
    BK: gl.constexpr = left_buffers.shape[1]
    BM: gl.constexpr = left_buffers.shape[2]
    BN: gl.constexpr = right_buffers.shape[2]
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    BYTES: gl.constexpr = (0 if GATHER_LEFT else BK * BM * 2) + (0 if GATHER_RIGHT else BK * BN * 2)
    ks = gl.arange(0, BK, gl.SliceLayout(1, LAYOUT))
    block = 0
    for tile in range(gl.program_id(0), num_tiles, gl.num_programs(0)):
        _, m, n, begin, end = locate_outer(tile, height, width, expert_offsets, BM, BN, GROUP)
        tokens = ks
        if GATHER_LEFT or GATHER_RIGHT:
            tokens = gl.load(token_ids + begin + ks, mask=begin + ks < end, other=0)
        for k in range(begin, end, BK):
            mask = k + ks < end
            next_tokens = tokens
            if GATHER_LEFT or GATHER_RIGHT:
                next_tokens = gl.load(token_ids + k + BK + ks, mask=k + BK + ks < end, other=0)
            wait_empty(empty, block, STAGES)
            bar = full.index(block % STAGES)
            a, b = left_buffers.index(block % STAGES), right_buffers.index(block % STAGES)
            if k + BK <= end:
                mbarrier.expect(bar, BYTES)
                if not GATHER_LEFT:
                    tma_load(left_desc, [k, m * BM], bar, a)
                if not GATHER_RIGHT:
                    tma_load(right_desc, [k, n * BN], bar, b)
            else:
                mbarrier.arrive(bar, count=1)
                if not GATHER_LEFT:
                    copy_rows(left, left_row, k + ks, mask, m * BM, height, a, LAYOUT)
                if not GATHER_RIGHT:
                    copy_rows(right, right_row, k + ks, mask, n * BN, width, b, LAYOUT)
            if GATHER_LEFT:
                copy_rows(left, left_row, tokens, mask, m * BM, height, a, LAYOUT)
            if GATHER_RIGHT:
                copy_rows(right, right_row, tokens, mask, n * BN, width, b, LAYOUT)
            async_copy.mbarrier_arrive(bar, increment_count=False)
            tokens = next_tokens
            block += 1


@gluon.jit
def _outer_multiply(
    expert_offsets, out, height, width, num_tiles, left_buffers, right_buffers, full, empty, staged,
    GROUP: gl.constexpr,
):  # fmt: skip
    STAGES: gl.constexpr = left_buffers.shape[0]
    BK: gl.constexpr = left_buffers.shape[1]
    BM: gl.constexpr = left_buffers.shape[2]
    BN: gl.constexpr = right_buffers.shape[2]
    MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, BN, 16])
    block = 0
    for tile in range(gl.program_id(0), num_tiles, gl.num_programs(0)):
        expert, m, n, begin, end = locate_outer(tile, height, width, expert_offsets, BM, BN, GROUP)
        acc = gl.zeros([BM, BN], gl.float32, MMA)
        for k in range(begin, end, BK):
            a, b = left_buffers.index(block % STAGES).permute((1, 0)), right_buffers.index(block % STAGES)
            acc = multiply_block(acc, a, b, full, empty, block, k == begin, STAGES, True)
            block += 1
        acc = warpgroup_mma_wait(0, deps=(acc,))
        mbarrier.arrive(empty.index((block + STAGES - 1) % STAGES), count=1, pred=begin < end)
        pieces = split_into_pieces(acc.to(staged.dtype))
        tma.store_wait(0)  # stores of the last tile: a partial tile issues none, so later waits would not cover them
        for i in gl.static_range(BN // PIECE):
            tma.store_wait(1)
            staged.index(i % 2).store(pieces[i])
            fence_async_shared()
            piece = view(staged.index(i % 2), staged.dtype, [1, BM, PIECE], out.layout)
            tma_store(out, [expert, m * BM, n * BN + i * PIECE], piece)
    tma.store_wait(0)


@gluon.jit
def hopper_outer_kernel(
    left, left_desc, left_row, right, right_desc, right_row, token_ids, expert_offsets, out, height, width, num_experts,
    GATHER_LEFT: gl.constexpr, GATHER_RIGHT: gl.constexpr,
    BM: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr, STAGES: gl.constexpr, GROUP: gl.constexpr,
):  # fmt: skip
    """out[e] = left[rows of e]^T @ right[rows of e], [E,height,width]; zero for experts without rows."""
    dtype: gl.constexpr = left.dtype.element_ty
    num_tiles = num_experts * gl.cdiv(height, BM) * gl.cdiv(width, BN)
    LEFT: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BK, BM], dtype)
    RIGHT: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BK, BN], dtype)
    OUT: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BM, PIECE], out.dtype)
    left_buffers = gl.allocate_shared_memory(dtype, [STAGES, BK, BM], LEFT)
    right_buffers = gl.allocate_shared_memory(dtype, [STAGES, BK, BN], RIGHT)
    staged = gl.allocate_shared_memory(out.dtype, [2, BM, PIECE], OUT)
    full, empty = allocate_barriers(STAGES)
    gl.warp_specialize(
        [
            (
                _outer_multiply,
                (
                    expert_offsets, out, height, width, num_tiles, left_buffers, right_buffers, full, empty, staged,
                    GROUP,
                ),
            ),
            (
                _outer_load,
                (
                    left, left_desc, left_row, right, right_desc, right_row, token_ids, expert_offsets, height, width,
                    num_tiles, left_buffers, right_buffers, full, empty, GATHER_LEFT, GATHER_RIGHT, GROUP,
                ),
            ),
        ],
        [4],
        [88],
    )  # fmt: skip
