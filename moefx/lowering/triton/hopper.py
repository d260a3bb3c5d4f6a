"""The GEMMs of `gemm` for sm90, in Gluon: loads, products and what follows them run side by side.

Each multiprocessor has one block of threads for all its tiles. Its warps have roles, and hand data to each other
through shared memory and barriers:

    load      4 warps       fills a ring of stages: weights and contiguous rows by TMA; scattered rows, and those of
                            an expert's last, shorter stage, by cp.async, which can leave rows out
    multiply  8 warps       adds up a tile's product, and puts it into shared memory, rounded, when it is complete
    point     4 or 8 warps  the pointwise part of the tile that was put there last, with the rows of H it needs;
                            in the kernels without one, TMA writes the tile out while the next one is added up

The ring runs on across tiles, so that a tile's first stages are loaded while the last one is still multiplied. Its
barriers `full` count the loading threads, as each has copies of its own, and one for TMA's bytes.

Everything is 16 bit, rows and weights as `roles` describes them. A tile is BM = 128 rows of one expert; rows behind the
expert's last one are computed along where they come by TMA, zeros where they do not, and never stored.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from .gemm import place

# Names of triton 3.6 and of later versions.
_tma_load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
_tma_store = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global
_copy = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared

_memory = gl.shared_memory_descriptor
_as = getattr(_memory, "reinterpret", None) or _memory._reinterpret

_LOADERS = gl.constexpr(128)  # threads that load
_PIECE = gl.constexpr(64)  # columns of a product that are handed on at a time


@gluon.jit
def _wait_empty(empty, block, STAGES: gl.constexpr):
    mbarrier.wait(empty.index(block % STAGES), ((block // STAGES) & 1) ^ 1)


@gluon.jit
def _multiply_block(acc, a, b, full, empty, block, is_first, STAGES: gl.constexpr, FENCE: gl.constexpr):
    """acc + a @ b, once the ring's stage is full; the stage before it is handed back."""
    mbarrier.wait(full.index(block % STAGES), (block // STAGES) & 1)
    if FENCE:  # what cp.async wrote is read by the matrix unit
        fence_async_shared()
    acc = warpgroup_mma(a, b, acc, is_async=True)
    acc = warpgroup_mma_wait(1, deps=(acc,))
    mbarrier.arrive(empty.index((block + STAGES - 1) % STAGES), count=1, pred=is_first == 0)
    return acc


@gluon.jit
def _rings(STAGES: gl.constexpr):
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=_LOADERS + 1)
        mbarrier.init(empty.index(i), count=1)
    fence_async_shared()
    return full, empty


@gluon.jit
def _eights(size):
    """A multiple of 8, as all sizes and strides are here: so the compiler knows, and moves 16 bytes at a time."""
    return size // 8 * 8


@gluon.jit
def _copy_rows(pointer, row_stride, row, mask, column, width, buffer, LAYOUT: gl.constexpr):
    """cp.async of rows; zeros where they are masked, and right of the width."""
    columns = column + gl.arange(0, buffer.shape[1], gl.SliceLayout(0, LAYOUT))
    there = mask[:, None] & (columns < _eights(width))[None, :]
    _copy(buffer, pointer + row[:, None].to(gl.int64) * _eights(row_stride) + columns[None, :], mask=there)


@gluon.jit
def _halves(acc):
    left, right = acc.reshape([acc.shape[0], 2, acc.shape[1] // 2]).permute(0, 2, 1).split()
    return left, right


@gluon.jit
def _pieces(acc):
    """[BM,BN] by 64 columns, from left to right; elements stay in their threads."""
    left, right = _halves(acc)
    if acc.shape[1] == 128:
        pieces = left, right
    else:
        gl.static_assert(acc.shape[1] == 256)
        a, b = _halves(left)
        c, d = _halves(right)
        pieces = a, b, c, d
    return pieces


@gluon.jit
def _places(
    row_stride, first_row, first_column, end, width, ROWS: gl.constexpr, COLUMNS: gl.constexpr, LAYOUT: gl.constexpr
):
    """Offsets of a block, and which of them are before row `end` and column `width`."""
    row = first_row + gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT))
    column = first_column + gl.arange(0, COLUMNS, gl.SliceLayout(0, LAYOUT))
    return row[:, None].to(gl.int64) * row_stride + column[None, :], (row < end)[:, None] & (column < width)[None, :]


# -- gradients of the weights: sums over each expert's rows
# -------------------------------------------------------------------------------------------


@gluon.jit
def _outer_place(tile, height, width, expert_offsets, BM: gl.constexpr, BN: gl.constexpr, GROUP: gl.constexpr):
    num_row_tiles, num_column_tiles = gl.cdiv(height, BM), gl.cdiv(width, BN)
    expert = tile // (num_row_tiles * num_column_tiles)
    within = tile - expert * (num_row_tiles * num_column_tiles)
    m, n = place(within, num_row_tiles, num_column_tiles, GROUP)
    begin, end = gl.load(expert_offsets + expert), gl.load(expert_offsets + expert + 1)
    return expert, m, n, begin, end


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
        _, m, n, begin, end = _outer_place(tile, height, width, expert_offsets, BM, BN, GROUP)
        tokens = ks
        if GATHER_LEFT or GATHER_RIGHT:
            tokens = gl.load(token_ids + begin + ks, mask=begin + ks < end, other=0)
        for k in range(begin, end, BK):
            mask = k + ks < end
            next_tokens = tokens
            if GATHER_LEFT or GATHER_RIGHT:
                next_tokens = gl.load(token_ids + k + BK + ks, mask=k + BK + ks < end, other=0)
            _wait_empty(empty, block, STAGES)
            bar = full.index(block % STAGES)
            a, b = left_buffers.index(block % STAGES), right_buffers.index(block % STAGES)
            if k + BK <= end:
                mbarrier.expect(bar, BYTES)
                if not GATHER_LEFT:
                    _tma_load(left_desc, [k, m * BM], bar, a)
                if not GATHER_RIGHT:
                    _tma_load(right_desc, [k, n * BN], bar, b)
            else:
                mbarrier.arrive(bar, count=1)
                if not GATHER_LEFT:
                    _copy_rows(left, left_row, k + ks, mask, m * BM, height, a, LAYOUT)
                if not GATHER_RIGHT:
                    _copy_rows(right, right_row, k + ks, mask, n * BN, width, b, LAYOUT)
            if GATHER_LEFT:
                _copy_rows(left, left_row, tokens, mask, m * BM, height, a, LAYOUT)
            if GATHER_RIGHT:
                _copy_rows(right, right_row, tokens, mask, n * BN, width, b, LAYOUT)
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
        expert, m, n, begin, end = _outer_place(tile, height, width, expert_offsets, BM, BN, GROUP)
        acc = gl.zeros([BM, BN], gl.float32, MMA)
        for k in range(begin, end, BK):
            a, b = left_buffers.index(block % STAGES).permute((1, 0)), right_buffers.index(block % STAGES)
            acc = _multiply_block(acc, a, b, full, empty, block, k == begin, STAGES, True)
            block += 1
        acc = warpgroup_mma_wait(0, deps=(acc,))
        mbarrier.arrive(empty.index((block + STAGES - 1) % STAGES), count=1, pred=begin < end)
        pieces = _pieces(acc.to(staged.dtype))
        tma.store_wait(0)  # those of the last tile; a tile that is not full has none to wait for later
        for i in gl.static_range(BN // _PIECE):
            tma.store_wait(1)
            staged.index(i % 2).store(pieces[i])
            fence_async_shared()
            piece = _as(staged.index(i % 2), staged.dtype, [1, BM, _PIECE], out.layout)
            _tma_store(out, [expert, m * BM, n * BN + i * _PIECE], piece)
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
    OUT: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BM, _PIECE], out.dtype)
    left_buffers = gl.allocate_shared_memory(dtype, [STAGES, BK, BM], LEFT)
    right_buffers = gl.allocate_shared_memory(dtype, [STAGES, BK, BN], RIGHT)
    staged = gl.allocate_shared_memory(out.dtype, [2, BM, _PIECE], OUT)
    full, empty = _rings(STAGES)
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


# -- rows times weights
# -------------------------------------------------------------------------------------------


@gluon.jit
def _rows_place(
    tile, width, expert_offsets, schedule, max_tiles, BM: gl.constexpr, TILE: gl.constexpr, GROUP: gl.constexpr
):
    """Of a tile: expert, first row, number of the columns' tile, and the row behind the expert's last one."""
    m, n = place(tile, gl.load(schedule + 2 * max_tiles), gl.cdiv(width, TILE), GROUP)
    expert, first_row = gl.load(schedule + m), gl.load(schedule + max_tiles + m)
    return expert, first_row, n, gl.load(expert_offsets + expert + 1)


@gluon.jit
def _rows_load(
    rows, rows0_desc, rows1_desc, rows_row, token_ids, expert_offsets, schedule, max_tiles, w0, w1, width, inner,
    num_tiles, row_buffers, w_buffers, full, empty,
    TERMS: gl.constexpr, PAIRED: gl.constexpr, JOINED: gl.constexpr, GATHER: gl.constexpr, TILE: gl.constexpr,
    COLUMNS_FIRST: gl.constexpr, GROUP: gl.constexpr,
):  # fmt: skip
    """TILE columns of w0 and, if PAIRED, as many of w1 beside them; JOINED: pairs of columns."""
    STAGES: gl.constexpr = row_buffers.shape[0]
    BM: gl.constexpr = row_buffers.shape[1]
    BK: gl.constexpr = row_buffers.shape[2]
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    W_BUFFERS: gl.constexpr = 2 if PAIRED else 1
    BYTES: gl.constexpr = 2 * ((0 if GATHER else BM * BK) + W_BUFFERS * w_buffers.shape[1] * w_buffers.shape[2])
    block = 0
    within = gl.arange(0, BM, gl.SliceLayout(1, LAYOUT))
    for tile in range(gl.program_id(0), num_tiles, gl.num_programs(0)):
        expert, first_row, n, end = _rows_place(tile, width, expert_offsets, schedule, max_tiles, BM, TILE, GROUP)
        column = n * TILE * (2 if JOINED else 1)
        is_mine, tokens = first_row + within < end, within
        if GATHER:
            tokens = gl.load(token_ids + first_row + within, mask=is_mine, other=0)
        for term in gl.static_range(TERMS):
            for k in range(0, inner, BK):
                _wait_empty(empty, block, STAGES)
                bar = full.index(block % STAGES)
                mbarrier.expect(bar, BYTES)
                w = w_buffers.index(block % STAGES * W_BUFFERS)
                if COLUMNS_FIRST:
                    at = [expert, column, k]
                else:
                    at = [expert, k, column]
                if term == 0:
                    _tma_load(w0, at, bar, _as(w, w.dtype, w0.block_type.shape, w0.layout))
                if PAIRED:
                    w = w_buffers.index(block % STAGES * 2 + 1)
                if PAIRED or term == 1:
                    _tma_load(w1, at, bar, _as(w, w.dtype, w1.block_type.shape, w1.layout))
                if GATHER:
                    _copy_rows(rows, rows_row, tokens, is_mine, k, inner, row_buffers.index(block % STAGES), LAYOUT)
                elif term == 0:
                    _tma_load(rows0_desc, [first_row, k], bar, row_buffers.index(block % STAGES))
                else:
                    _tma_load(rows1_desc, [first_row, k], bar, row_buffers.index(block % STAGES))
                async_copy.mbarrier_arrive(bar, increment_count=False)
                block += 1


@gluon.jit
def _rows_multiply(
    expert_offsets, schedule, max_tiles, bias, bias_expert, bias_column, row_weights, out, out_desc, width, inner,
    num_tiles, row_buffers, w_buffers, full, empty, staged,
    SCALE: gl.constexpr, TERMS: gl.constexpr, GATHER: gl.constexpr, BN: gl.constexpr, COLUMNS_FIRST: gl.constexpr,
    HAS_BIAS: gl.constexpr, HAS_SCALE: gl.constexpr, GROUP: gl.constexpr,
):  # fmt: skip
    width = _eights(width)
    STAGES: gl.constexpr = row_buffers.shape[0]
    BM: gl.constexpr = row_buffers.shape[1]
    BK: gl.constexpr = row_buffers.shape[2]
    MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, BN, 16])
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [gl.num_warps(), 1], [1, 0])
    block = 0
    for tile in range(gl.program_id(0), num_tiles, gl.num_programs(0)):
        expert, first_row, n, end = _rows_place(tile, width, expert_offsets, schedule, max_tiles, BM, BN, GROUP)
        acc = gl.zeros([BM, BN], gl.float32, MMA)
        for k in range(0, TERMS * gl.cdiv(inner, BK)):
            a, b = row_buffers.index(block % STAGES), w_buffers.index(block % STAGES)
            if COLUMNS_FIRST:
                b = b.permute((1, 0))
            acc = _multiply_block(acc, a, b, full, empty, block, k == 0, STAGES, GATHER)
            block += 1
        acc = warpgroup_mma_wait(0, deps=(acc,))
        mbarrier.arrive(empty.index((block + STAGES - 1) % STAGES), count=1)
        if HAS_BIAS:
            column = n * BN + gl.arange(0, BN, gl.SliceLayout(0, MMA))
            b_at = bias + expert.to(gl.int64) * bias_expert + column * bias_column
            acc += gl.load(b_at, mask=column < width, other=0.0).to(gl.float32)[None, :]
        if HAS_SCALE:
            row = first_row + gl.arange(0, BM, gl.SliceLayout(1, MMA))
            acc *= SCALE(gl.load(row_weights + row, mask=row < end, other=0.0).to(gl.float32))[:, None]
        pieces = _pieces(acc.to(staged.dtype))
        tma.store_wait(0)  # those of the last tile; a tile that is not full has none to wait for later
        for i in gl.static_range(BN // _PIECE):
            tma.store_wait(1)
            staged.index(i % 2).store(pieces[i])
            if first_row + BM <= end:
                fence_async_shared()
                _tma_store(out_desc, [first_row, n * BN + i * _PIECE], staged.index(i % 2))
            else:  # the box would write into the next expert's rows
                at, mask = _places(width, first_row, n * BN + i * _PIECE, end, width, BM, _PIECE, LAYOUT)
                gl.store(out + at, staged.index(i % 2).load(LAYOUT), mask=mask)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["max_tiles"])
def hopper_rows_kernel(
    rows, rows0_desc, rows1_desc, rows_row, token_ids, expert_offsets, schedule, max_tiles, w0, w1,
    bias, bias_expert, bias_column, row_weights, out, out_desc, width, inner,
    SCALE: gl.constexpr, TERMS: gl.constexpr, GATHER: gl.constexpr, COLUMNS_FIRST: gl.constexpr,
    HAS_BIAS: gl.constexpr, HAS_SCALE: gl.constexpr,
    BM: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr, STAGES: gl.constexpr, GROUP: gl.constexpr,
):  # fmt: skip
    """See `gemm.rows_kernel`."""
    dtype: gl.constexpr = w0.dtype
    num_tiles = gl.load(schedule + 2 * max_tiles) * gl.cdiv(width, BN)
    W_SHAPE: gl.constexpr = [BN, BK] if COLUMNS_FIRST else [BK, BN]
    ROWS: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BM, BK], dtype)
    W: gl.constexpr = gl.NVMMASharedLayout.get_default_for(W_SHAPE, dtype)
    OUT: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BM, _PIECE], out.dtype.element_ty)
    row_buffers = gl.allocate_shared_memory(dtype, [STAGES, BM, BK], ROWS)
    w_buffers = gl.allocate_shared_memory(dtype, [STAGES, W_SHAPE[0], W_SHAPE[1]], W)
    staged = gl.allocate_shared_memory(out.dtype.element_ty, [2, BM, _PIECE], OUT)
    full, empty = _rings(STAGES)
    gl.warp_specialize(
        [
            (
                _rows_multiply,
                (
                    expert_offsets, schedule, max_tiles, bias, bias_expert, bias_column, row_weights, out, out_desc,
                    width, inner, num_tiles, row_buffers, w_buffers, full, empty, staged,
                    SCALE, TERMS, GATHER, BN, COLUMNS_FIRST, HAS_BIAS, HAS_SCALE, GROUP,
                ),
            ),
            (
                _rows_load,
                (
                    rows, rows0_desc, rows1_desc, rows_row, token_ids, expert_offsets, schedule, max_tiles, w0, w1,
                    width, inner, num_tiles, row_buffers, w_buffers, full, empty,
                    TERMS, False, False, GATHER, BN, COLUMNS_FIRST, GROUP,
                ),
            ),
        ],
        [4],
        [88],
    )  # fmt: skip


# -- GEMMs with the pointwise part behind them, in warps of its own
# -------------------------------------------------------------------------------------------


@gluon.jit
def _point_multiply(
    expert_offsets, schedule, max_tiles, bias0, bias1, bias_expert, bias_column, width, inner, num_tiles,
    row_buffers, w_buffers, full, empty, staged, staged_full, staged_empty,
    FENCE: gl.constexpr, PAIRED: gl.constexpr, JOINED: gl.constexpr, HAS_BIAS: gl.constexpr,
    TILE: gl.constexpr, COLUMNS_FIRST: gl.constexpr, GROUP: gl.constexpr,
):  # fmt: skip
    """Products of a tile, rounded, for the warps that go on with them."""
    STAGES: gl.constexpr = row_buffers.shape[0]
    BM: gl.constexpr = row_buffers.shape[1]
    BK: gl.constexpr = row_buffers.shape[2]
    BN: gl.constexpr = staged.shape[0] * _PIECE
    MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, 128, 16])
    block, turn = 0, 0
    if PAIRED:
        W_SHAPE: gl.constexpr = [STAGES, BN, BK] if COLUMNS_FIRST else [STAGES, BK, BN]
        w_buffers = _as(w_buffers, w_buffers.dtype, W_SHAPE, w_buffers.layout)
    for tile in range(gl.program_id(0), num_tiles, gl.num_programs(0)):
        acc = gl.zeros([BM, BN], gl.float32, MMA)
        for k in range(0, gl.cdiv(inner, BK)):
            a, b = row_buffers.index(block % STAGES), w_buffers.index(block % STAGES)
            if COLUMNS_FIRST:
                b = b.permute((1, 0))
            acc = _multiply_block(acc, a, b, full, empty, block, k == 0, STAGES, FENCE)
            block += 1
        acc = warpgroup_mma_wait(0, deps=(acc,))
        mbarrier.arrive(empty.index((block + STAGES - 1) % STAGES), count=1)
        pieces = _pieces(acc)
        mbarrier.wait(staged_empty, (turn & 1) ^ 1)
        for i in gl.static_range(BN // _PIECE):
            piece = pieces[i]
            if HAS_BIAS:
                expert, _, n, _ = _rows_place(tile, width, expert_offsets, schedule, max_tiles, BM, TILE, GROUP)
                column = i * _PIECE + gl.arange(0, _PIECE, gl.SliceLayout(0, piece.type.layout))
                is_first = column % 2 == 0 if JOINED else column < TILE
                within = n * TILE + (column // 2 if JOINED else column % TILE)
                at = expert.to(gl.int64) * bias_expert + within * bias_column
                bias = gl.load(bias0 + at, mask=is_first & (within < width), other=0.0)
                if PAIRED or JOINED:
                    bias += gl.load(bias1 + at, mask=(is_first == 0) & (within < width), other=0.0)
                piece += bias.to(gl.float32)[None, :]
            staged.index(i).store(piece.to(staged.dtype))
        mbarrier.arrive(staged_full, count=1)
        turn += 1


@gluon.jit
def _up_point(
    expert_offsets, schedule, max_tiles, row_weights, h0, h1, h_row, act, width, num_tiles, staged, staged_full,
    staged_empty,
    ACT: gl.constexpr, PARTS: gl.constexpr, JOINED: gl.constexpr, USES_WEIGHT: gl.constexpr, STORE_H: gl.constexpr,
    STORE_ACT: gl.constexpr, TILE: gl.constexpr, GROUP: gl.constexpr, ROWS: gl.constexpr,
):  # fmt: skip
    """Of each tile: H and the activation."""
    width, h_row = _eights(width), _eights(h_row)
    BM: gl.constexpr = staged.shape[1]
    PIECES: gl.constexpr = staged.shape[0]
    CHUNKS: gl.constexpr = BM // ROWS
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [gl.num_warps(), 1], [1, 0])
    chunks = _as(staged, staged.dtype, [PIECES * CHUNKS, ROWS, _PIECE], staged.layout)
    PAIRED: gl.constexpr = PARTS == 2 and not JOINED
    NUM_PIECES: gl.constexpr = PIECES // 2 if PAIRED else PIECES
    turn = 0
    for tile in range(gl.program_id(0), num_tiles, gl.num_programs(0)):
        _, first_row, n, end = _rows_place(tile, width, expert_offsets, schedule, max_tiles, BM, TILE, GROUP)
        mbarrier.wait(staged_full, turn & 1)
        for i in range(CHUNKS * NUM_PIECES):
            r, c = i // NUM_PIECES, i % NUM_PIECES
            here = first_row + r * ROWS
            h_at, mask = _places(
                h_row, here, (n * NUM_PIECES + c) * _PIECE, end, 2 * width if JOINED else width, ROWS, _PIECE, LAYOUT
            )
            v0 = chunks.index(c * CHUNKS + r).load(LAYOUT)
            v1 = v0
            if PAIRED:
                v1 = chunks.index((c + NUM_PIECES) * CHUNKS + r).load(LAYOUT)
            if STORE_H:
                gl.store(h0 + h_at, v0, mask=mask)
                if PAIRED:
                    gl.store(h1 + h_at, v1, mask=mask)
            if STORE_ACT:
                if JOINED:
                    v0, v1 = v0.reshape([ROWS, _PIECE // 2, 2]).split()
                COLUMNS: gl.constexpr = v0.shape[1]
                OWN: gl.constexpr = v0.type.layout
                at, act_mask = _places(width, here, n * TILE + c * COLUMNS, end, width, ROWS, COLUMNS, OWN)
                w = gl.zeros([ROWS, 1], gl.float32, OWN)
                if USES_WEIGHT:
                    row = here + gl.arange(0, ROWS, gl.SliceLayout(1, OWN))
                    w = gl.expand_dims(gl.load(row_weights + row, mask=row < end, other=0.0).to(gl.float32), 1)
                value = ACT(v0.to(gl.float32), v1.to(gl.float32), w).to(act.dtype.element_ty)
                gl.store(act + at, value, mask=act_mask)
        mbarrier.arrive(staged_empty, count=1)
        turn += 1


@gluon.jit(do_not_specialize=["max_tiles"])
def hopper_up_kernel(
    x, x_desc, x_row, token_ids, expert_offsets, schedule, max_tiles, w0, w1,
    bias0, bias1, bias_expert, bias_column, row_weights, h0, h1, h_row, act, width, inner,
    ACT: gl.constexpr, PARTS: gl.constexpr, JOINED: gl.constexpr, GATHER: gl.constexpr, COLUMNS_FIRST: gl.constexpr,
    HAS_BIAS: gl.constexpr, USES_WEIGHT: gl.constexpr, STORE_H: gl.constexpr, STORE_ACT: gl.constexpr,
    BM: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr, STAGES: gl.constexpr, GROUP: gl.constexpr,
    ROWS: gl.constexpr, POINT_WARPS: gl.constexpr,
):  # fmt: skip
    """See `gemm.up_kernel`. BN: columns of the product, of both parts together."""
    dtype: gl.constexpr = w0.dtype
    PAIRED: gl.constexpr = PARTS == 2 and not JOINED
    TILE: gl.constexpr = BN // PARTS
    W_COLUMNS: gl.constexpr = BN // 2 if PAIRED else BN
    num_tiles = gl.load(schedule + 2 * max_tiles) * gl.cdiv(width, TILE)
    W_SHAPE: gl.constexpr = [W_COLUMNS, BK] if COLUMNS_FIRST else [BK, W_COLUMNS]
    A: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BM, BK], dtype)
    W: gl.constexpr = gl.NVMMASharedLayout.get_default_for(W_SHAPE, dtype)
    STAGED: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BM, _PIECE], dtype)
    row_buffers = gl.allocate_shared_memory(dtype, [STAGES, BM, BK], A)
    w_buffers = gl.allocate_shared_memory(dtype, [STAGES * (2 if PAIRED else 1), W_SHAPE[0], W_SHAPE[1]], W)
    staged = gl.allocate_shared_memory(dtype, [BN // _PIECE, BM, _PIECE], STAGED)
    staged_full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    staged_empty = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(staged_full, count=1)
    mbarrier.init(staged_empty, count=1)
    full, empty = _rings(STAGES)
    gl.warp_specialize(
        [
            (
                _point_multiply,
                (
                    expert_offsets, schedule, max_tiles, bias0, bias1, bias_expert, bias_column, width, inner,
                    num_tiles, row_buffers, w_buffers, full, empty, staged, staged_full, staged_empty,
                    GATHER, PAIRED, JOINED, HAS_BIAS, TILE, COLUMNS_FIRST, GROUP,
                ),
            ),
            (
                _rows_load,
                (
                    x, x_desc, None, x_row, token_ids, expert_offsets, schedule, max_tiles, w0, w1, width, inner,
                    num_tiles, row_buffers, w_buffers, full, empty, 1, PAIRED, JOINED, GATHER, TILE,
                    COLUMNS_FIRST, GROUP,
                ),
            ),
            (
                _up_point,
                (
                    expert_offsets, schedule, max_tiles, row_weights, h0, h1, h_row, act, width, num_tiles, staged,
                    staged_full, staged_empty, ACT, PARTS, JOINED, USES_WEIGHT, STORE_H, STORE_ACT, TILE, GROUP, ROWS,
                ),
            ),
        ],
        [4, POINT_WARPS],
        [56, 112 if POINT_WARPS == 4 else 104],
    )  # fmt: skip


@gluon.jit
def _load_parts(
    h0, h1, h_row, first_row, first_column, end, width, ROWS: gl.constexpr, COLUMNS: gl.constexpr, PARTS: gl.constexpr,
    JOINED: gl.constexpr,
):  # fmt: skip
    """Some columns of the parts of H as they are kept; one alone counts as both. JOINED: pairs in one."""
    if JOINED:
        LAYOUT: gl.constexpr = gl.BlockedLayout([1, 16], [4, 8], [gl.num_warps(), 1], [1, 0])
        at, mask = _places(h_row, first_row, 2 * first_column, end, 2 * width, ROWS, 2 * COLUMNS, LAYOUT)
        a0 = gl.load(h0 + at, mask=mask, other=0.0)
        a1 = a0
    else:
        LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [gl.num_warps(), 1], [1, 0])
        at, mask = _places(h_row, first_row, first_column, end, width, ROWS, COLUMNS, LAYOUT)
        a0 = gl.load(h0 + at, mask=mask, other=0.0)
        a1 = a0
        if PARTS == 2:
            a1 = gl.load(h1 + at, mask=mask, other=0.0)
    return a0, a1


@gluon.jit
def _store_parts(
    h0, h1, d0, d1, h_row, first_row, first_column, end, width, ROWS: gl.constexpr, COLUMNS: gl.constexpr,
    PARTS: gl.constexpr, JOINED: gl.constexpr,
):  # fmt: skip
    if JOINED:
        LAYOUT: gl.constexpr = gl.BlockedLayout([1, 16], [4, 8], [gl.num_warps(), 1], [1, 0])
        at, mask = _places(h_row, first_row, 2 * first_column, end, 2 * width, ROWS, 2 * COLUMNS, LAYOUT)
        pairs = gl.join(d0, d1).reshape([ROWS, 2 * COLUMNS])
        gl.store(h0 + at, gl.convert_layout(pairs, LAYOUT, assert_trivial=True), mask=mask)
    else:
        LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [gl.num_warps(), 1], [1, 0])
        at, mask = _places(h_row, first_row, first_column, end, width, ROWS, COLUMNS, LAYOUT)
        gl.store(h0 + at, d0, mask=mask)
        if PARTS == 2:
            gl.store(h1 + at, d1, mask=mask)


@gluon.jit
def _act_backward_point(
    expert_offsets, schedule, max_tiles, row_weights, h0, h1, dh0, dh1, h_row, scaled_act, dots, num_rows, width,
    num_tiles, staged, staged_full, staged_empty,
    VJP: gl.constexpr, SCALE: gl.constexpr, PARTS: gl.constexpr, HAS_SCALE: gl.constexpr, USES_WEIGHT: gl.constexpr,
    STORE_ACT: gl.constexpr, STORE_DOTS: gl.constexpr, JOINED: gl.constexpr, BN: gl.constexpr, GROUP: gl.constexpr,
    ROWS: gl.constexpr,
):  # fmt: skip
    """Of each tile: dH, scale * A, and the sums <dA', A>, as `gemm.act_backward_kernel`."""
    width, h_row = _eights(width), _eights(h_row)
    BM: gl.constexpr = staged.shape[1]
    PIECES: gl.constexpr = staged.shape[0]
    CHUNKS: gl.constexpr = BM // ROWS
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [gl.num_warps(), 1], [1, 0])
    chunks = _as(staged, staged.dtype, [PIECES * CHUNKS, ROWS, _PIECE], staged.layout)
    dtype: gl.constexpr = dh0.dtype.element_ty
    within, turn = gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT)), 0
    for tile in range(gl.program_id(0), num_tiles, gl.num_programs(0)):
        _, first_row, n, end = _rows_place(tile, width, expert_offsets, schedule, max_tiles, BM, BN, GROUP)
        next0, next1 = _load_parts(h0, h1, h_row, first_row, n * BN, end, width, ROWS, _PIECE, PARTS, JOINED)
        mbarrier.wait(staged_full, turn & 1)
        dot = gl.zeros([ROWS, _PIECE], gl.float32, LAYOUT)
        by_weight = gl.zeros([ROWS, _PIECE], gl.float32, LAYOUT)
        for i in range(CHUNKS * PIECES):
            r, c = i // PIECES, i % PIECES
            row = first_row + r * ROWS + within
            is_mine = row < end
            a0, a1 = next0, next1
            if JOINED:
                a0, a1 = a0.reshape([ROWS, _PIECE, 2]).split()
            a0 = gl.convert_layout(a0, LAYOUT, assert_trivial=True).to(gl.float32)
            a1 = gl.convert_layout(a1, LAYOUT, assert_trivial=True).to(gl.float32)
            # What comes next is on its way while this is worked on.
            next0, next1 = _load_parts(
                h0, h1, h_row, first_row + (i + 1) // PIECES * ROWS, n * BN + (i + 1) % PIECES * _PIECE,
                gl.where(i + 1 < CHUNKS * PIECES, end, 0), width, ROWS, _PIECE, PARTS, JOINED,
            )  # fmt: skip
            w = gl.zeros([ROWS, 1], gl.float32, LAYOUT)
            scale = gl.full([ROWS, 1], 1.0, gl.float32, LAYOUT)
            if HAS_SCALE or USES_WEIGHT:
                w = gl.expand_dims(gl.load(row_weights + row, mask=is_mine, other=0.0).to(gl.float32), 1)
            if HAS_SCALE:
                scale = SCALE(w)
            at, mask = _places(width, first_row + r * ROWS, n * BN + c * _PIECE, end, width, ROWS, _PIECE, LAYOUT)
            grad = chunks.index(c * CHUNKS + r).load(LAYOUT).to(gl.float32)
            grad = gl.where(mask, grad, 0.0)
            value, d0, d1, dw = VJP(a0, a1, w, grad * scale)
            dot += gl.where(mask, grad * value, 0.0)
            if USES_WEIGHT:
                by_weight += gl.where(mask, dw, 0.0)
            _store_parts(
                dh0, dh1, d0.to(dtype), d1.to(dtype), h_row, first_row + r * ROWS, n * BN + c * _PIECE, end, width,
                ROWS, _PIECE, PARTS, JOINED,
            )  # fmt: skip
            if STORE_ACT:
                gl.store(scaled_act + at, (value * scale).to(dtype), mask=mask)
            if c == PIECES - 1:
                if STORE_DOTS:
                    sums = dots + n.to(gl.int64) * num_rows + row
                    if HAS_SCALE:
                        gl.store(sums, gl.sum(dot, 1), mask=is_mine)
                        sums += gl.cdiv(width, BN).to(gl.int64) * num_rows
                    if USES_WEIGHT:
                        gl.store(sums, gl.sum(by_weight, 1), mask=is_mine)
                dot = gl.zeros([ROWS, _PIECE], gl.float32, LAYOUT)
                by_weight = gl.zeros([ROWS, _PIECE], gl.float32, LAYOUT)
        mbarrier.arrive(staged_empty, count=1)
        turn += 1


@gluon.jit(do_not_specialize=["max_tiles", "num_rows"])
def hopper_act_backward_kernel(
    grad, grad_desc, grad_row, token_ids, expert_offsets, schedule, max_tiles, w0, row_weights,
    h0, h1, dh0, dh1, h_row, scaled_act, dots, num_rows, width, inner,
    VJP: gl.constexpr, SCALE: gl.constexpr, PARTS: gl.constexpr, JOINED: gl.constexpr, GATHER: gl.constexpr,
    COLUMNS_FIRST: gl.constexpr,
    HAS_SCALE: gl.constexpr, USES_WEIGHT: gl.constexpr, STORE_ACT: gl.constexpr, STORE_DOTS: gl.constexpr,
    BM: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr, STAGES: gl.constexpr, GROUP: gl.constexpr,
    ROWS: gl.constexpr, POINT_WARPS: gl.constexpr,
):  # fmt: skip
    """See `gemm.act_backward_kernel`."""
    dtype: gl.constexpr = w0.dtype
    num_tiles = gl.load(schedule + 2 * max_tiles) * gl.cdiv(width, BN)
    W_SHAPE: gl.constexpr = [BN, BK] if COLUMNS_FIRST else [BK, BN]
    A: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BM, BK], dtype)
    W: gl.constexpr = gl.NVMMASharedLayout.get_default_for(W_SHAPE, dtype)
    STAGED: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BM, _PIECE], dtype)
    row_buffers = gl.allocate_shared_memory(dtype, [STAGES, BM, BK], A)
    w_buffers = gl.allocate_shared_memory(dtype, [STAGES, W_SHAPE[0], W_SHAPE[1]], W)
    staged = gl.allocate_shared_memory(dtype, [BN // _PIECE, BM, _PIECE], STAGED)
    staged_full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    staged_empty = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(staged_full, count=1)
    mbarrier.init(staged_empty, count=1)
    full, empty = _rings(STAGES)
    gl.warp_specialize(
        [
            (
                _point_multiply,
                (
                    expert_offsets, schedule, max_tiles, None, None, 0, 0, width, inner, num_tiles, row_buffers,
                    w_buffers, full, empty, staged, staged_full, staged_empty, GATHER, False, False, False, BN,
                    COLUMNS_FIRST, GROUP,
                ),
            ),
            (
                _rows_load,
                (
                    grad, grad_desc, None, grad_row, token_ids, expert_offsets, schedule, max_tiles, w0, None,
                    width, inner, num_tiles, row_buffers, w_buffers, full, empty, 1, False, False, GATHER, BN,
                    COLUMNS_FIRST, GROUP,
                ),
            ),
            (
                _act_backward_point,
                (
                    expert_offsets, schedule, max_tiles, row_weights, h0, h1, dh0, dh1, h_row, scaled_act, dots,
                    num_rows, width, num_tiles, staged, staged_full, staged_empty, VJP, SCALE, PARTS, HAS_SCALE,
                    USES_WEIGHT, STORE_ACT, STORE_DOTS, JOINED, BN, GROUP, ROWS,
                ),
            ),
        ],
        [4, POINT_WARPS],
        [56, 112 if POINT_WARPS == 4 else 104],
    )  # fmt: skip
