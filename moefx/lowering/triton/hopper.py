"""The GEMMs of `gemm_forward` for sm90, in Gluon: loads, products and the pointwise part run in parallel.

Each multiprocessor has one block of threads for all its tiles. Its warps have roles, and pass data to each other
through shared memory and barriers:

    load      4 warps       fills a ring of stages: weights and contiguous rows by TMA; scattered rows, and those of
                            an expert's last, shorter stage, by cp.async, which can mask rows
    multiply  8 warps       accumulates a tile's product, and stores it to shared memory, rounded, when it is complete
    pointwise 4 or 8 warps  runs the pointwise part on the latest tile in shared memory, with its rows of H; in kernels
                            without a pointwise part, TMA writes the tile at the same time

The ring continues across tiles, so that a tile's first stages are loaded while the previous tile is multiplied. Its
`full` barriers count the loading threads, because each issues its own copies, and one arrival for TMA's bytes.

All tensors have 16 bits; `warp_specialized` describes rows and weights. A tile is BM = 128 rows of one expert. Rows
after the expert's last one are other experts' if TMA loads them, otherwise zeros. Their results are never stored.

This file has the products of rows and weights. `hopper_ring` has the ring and its barriers, `hopper_outer` the
gradients of the weights, and `hopper_pointwise` the products with a pointwise part.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, fence_async_shared, mbarrier, tma

from .hopper_ring import (
    PIECE,
    allocate_row_ring,
    copy_rows,
    locate_block,
    mark_multiple_of_8,
    multiply_blocks,
    split_into_pieces,
    tma_load,
    tma_store,
    view,
    wait_empty,
)
from .tiles import locate_rows


@gluon.jit
def _tokens(token_ids, row, end, GATHER: gl.constexpr):
    tokens = row
    if GATHER:
        tokens = gl.load(token_ids + row, mask=row < end, other=0)
    return tokens


@gluon.jit
def rows_load(
    rows, rows0_desc, rows1_desc, rows_row, token_ids, schedule, max_tiles, w0, w1, width, inner,
    num_tiles, row_buffers, w_buffers, full, empty,
    TERMS: gl.constexpr, PAIRED: gl.constexpr, JOINED: gl.constexpr, GATHER: gl.constexpr, TILE: gl.constexpr,
    COLUMNS_FIRST: gl.constexpr, GROUP: gl.constexpr,
):  # fmt: skip
    """Load TILE columns of w0 and, if PAIRED, the same columns of w1; JOINED: pairs of columns."""
    STAGES: gl.constexpr = row_buffers.shape[0]
    BM: gl.constexpr = row_buffers.shape[1]
    BK: gl.constexpr = row_buffers.shape[2]
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    W_BUFFERS: gl.constexpr = 2 if PAIRED else 1
    BYTES: gl.constexpr = 2 * ((0 if GATHER else BM * BK) + W_BUFFERS * w_buffers.shape[1] * w_buffers.shape[2])
    block = 0
    within = gl.arange(0, BM, gl.SliceLayout(1, LAYOUT))
    num_row_tiles = gl.load(schedule + 3 * max_tiles)
    # The position and rows of the next tile are loaded while a tile is loaded.
    next_expert, next_row, next_n, next_end = locate_rows(
        gl.program_id(0), num_row_tiles, width, schedule, max_tiles, TILE, GROUP
    )
    then_expert, then_row, then_n, then_end = locate_rows(
        gl.program_id(0) + gl.num_programs(0), num_row_tiles, width, schedule, max_tiles, TILE, GROUP
    )
    next_tokens = _tokens(token_ids, next_row + within, next_end, GATHER)
    for tile in range(gl.program_id(0), num_tiles, gl.num_programs(0)):
        expert, first_row, end, column = next_expert, next_row, next_end, next_n * TILE * (2 if JOINED else 1)
        tokens, in_expert = next_tokens, first_row + within < end
        next_expert, next_row, next_n, next_end = then_expert, then_row, then_n, then_end
        next_tokens = _tokens(token_ids, next_row + within, next_end, GATHER)
        then_expert, then_row, then_n, then_end = locate_rows(
            tile + 2 * gl.num_programs(0), num_row_tiles, width, schedule, max_tiles, TILE, GROUP
        )
        for term in gl.static_range(TERMS):
            for k in range(0, inner, BK):
                wait_empty(empty, block, STAGES)
                bar = full.index(block % STAGES)
                mbarrier.expect(bar, BYTES)
                w = w_buffers.index(block % STAGES * W_BUFFERS)
                if COLUMNS_FIRST:
                    at = [expert, column, k]
                else:
                    at = [expert, k, column]
                if term == 0:
                    tma_load(w0, at, bar, view(w, w.dtype, w0.block_type.shape, w0.layout))
                if PAIRED:
                    w = w_buffers.index(block % STAGES * 2 + 1)
                if PAIRED or term == 1:
                    tma_load(w1, at, bar, view(w, w.dtype, w1.block_type.shape, w1.layout))
                if GATHER:
                    copy_rows(rows, rows_row, tokens, in_expert, k, inner, row_buffers.index(block % STAGES), LAYOUT)
                elif term == 0:
                    tma_load(rows0_desc, [first_row, k], bar, row_buffers.index(block % STAGES))
                else:
                    tma_load(rows1_desc, [first_row, k], bar, row_buffers.index(block % STAGES))
                async_copy.mbarrier_arrive(bar, increment_count=False)
                block += 1


@gluon.jit
def _rows_multiply(
    schedule, max_tiles, bias, bias_expert, bias_column, row_weights, out, out_desc, width, inner,
    num_tiles, row_buffers, w_buffers, full, empty, staged,
    SCALE: gl.constexpr, TERMS: gl.constexpr, GATHER: gl.constexpr, BN: gl.constexpr, COLUMNS_FIRST: gl.constexpr,
    HAS_BIAS: gl.constexpr, HAS_SCALE: gl.constexpr, GROUP: gl.constexpr,
):  # fmt: skip
    width = mark_multiple_of_8(width)
    BM: gl.constexpr = row_buffers.shape[1]
    MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, BN, 16])
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [gl.num_warps(), 1], [1, 0])
    block, num_blocks = 0, TERMS * gl.cdiv(inner, row_buffers.shape[2])
    num_row_tiles = gl.load(schedule + 3 * max_tiles)
    for tile in range(gl.program_id(0), num_tiles, gl.num_programs(0)):
        expert, first_row, n, end = locate_rows(tile, num_row_tiles, width, schedule, max_tiles, BN, GROUP)
        acc = gl.zeros([BM, BN], gl.float32, MMA)
        acc = multiply_blocks(acc, row_buffers, w_buffers, full, empty, block, num_blocks, COLUMNS_FIRST, GATHER)
        block += num_blocks
        if HAS_BIAS:
            column = n * BN + gl.arange(0, BN, gl.SliceLayout(0, MMA))
            b_at = bias + expert.to(gl.int64) * bias_expert + column * bias_column
            acc += gl.load(b_at, mask=column < width, other=0.0).to(gl.float32)[None, :]
        if HAS_SCALE:
            row = first_row + gl.arange(0, BM, gl.SliceLayout(1, MMA))
            acc *= SCALE(gl.load(row_weights + row, mask=row < end, other=0.0).to(gl.float32))[:, None]
        pieces = split_into_pieces(acc.to(staged.dtype))
        tma.store_wait(0)  # stores of the last tile: a partial tile issues none, so later waits would not cover them
        for i in gl.static_range(BN // PIECE):
            tma.store_wait(1)
            staged.index(i % 2).store(pieces[i])
            if first_row + BM <= end:
                fence_async_shared()
                tma_store(out_desc, [first_row, n * BN + i * PIECE], staged.index(i % 2))
            else:  # TMA would overwrite the next expert's rows
                at, mask = locate_block(width, first_row, n * BN + i * PIECE, end, width, BM, PIECE, LAYOUT)
                gl.store(out + at, staged.index(i % 2).load(LAYOUT), mask=mask)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["max_tiles"])
def hopper_rows_kernel(
    rows, rows0_desc, rows1_desc, rows_row, token_ids, schedule, max_tiles, w0, w1,
    bias, bias_expert, bias_column, row_weights, out, out_desc, width, inner,
    SCALE: gl.constexpr, TERMS: gl.constexpr, GATHER: gl.constexpr, COLUMNS_FIRST: gl.constexpr,
    HAS_BIAS: gl.constexpr, HAS_SCALE: gl.constexpr,
    BM: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr, STAGES: gl.constexpr, GROUP: gl.constexpr,
):  # fmt: skip
    """See `gemm_forward.rows_kernel`."""
    num_tiles = gl.load(schedule + 3 * max_tiles) * gl.cdiv(width, BN)
    OUT: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BM, PIECE], out.dtype.element_ty)
    row_buffers, w_buffers, full, empty = allocate_row_ring(w0.dtype, BM, BK, BN, 1, COLUMNS_FIRST, STAGES)
    staged = gl.allocate_shared_memory(out.dtype.element_ty, [2, BM, PIECE], OUT)
    gl.warp_specialize(
        [
            (
                _rows_multiply,
                (
                    schedule, max_tiles, bias, bias_expert, bias_column, row_weights, out, out_desc,
                    width, inner, num_tiles, row_buffers, w_buffers, full, empty, staged,
                    SCALE, TERMS, GATHER, BN, COLUMNS_FIRST, HAS_BIAS, HAS_SCALE, GROUP,
                ),
            ),
            (
                rows_load,
                (
                    rows, rows0_desc, rows1_desc, rows_row, token_ids, schedule, max_tiles, w0, w1,
                    width, inner, num_tiles, row_buffers, w_buffers, full, empty,
                    TERMS, False, False, GATHER, BN, COLUMNS_FIRST, GROUP,
                ),
            ),
        ],
        [4],
        [88],
    )  # fmt: skip
