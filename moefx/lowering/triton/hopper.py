"""The GEMMs of `gemm_forward` for sm90, in Gluon: loads, products and the pointwise part run in parallel.

Each multiprocessor has one block of threads for all its tiles. Its warps have roles, and pass data to each other
through shared memory and barriers:

    load      4 warps       fills a ring of stages: weights and contiguous rows by TMA; scattered rows, and those of
                            an expert's last, shorter stage, by cp.async, which can mask rows
    multiply  8 warps       accumulates a tile's product, and stores it to shared memory, rounded, when it is complete
    point     4 or 8 warps  runs the pointwise part on the latest tile in shared memory, with its rows of H; in
                            kernels without a pointwise part, TMA writes the tile out meanwhile

The ring continues across tiles, so that a tile's first stages are loaded while the previous tile is multiplied. Its
`full` barriers count the loading threads, because each has copies of its own, and one arrival for TMA's bytes.

All tensors have 16 bits; `warp_specialized` describes rows and weights. A tile is BM = 128 rows of one expert. Rows
after the expert's last one are other experts' if TMA loads them, otherwise zeros. Their results are never stored.

The file is long because its two kernels share the ring and its barriers.
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

from .tiles import locate_outer, locate_rows

# Names of triton 3.6 and of later versions.
_tma_load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
_tma_store = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global
_copy = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared

_memory = gl.shared_memory_descriptor
view = getattr(_memory, "reinterpret", None) or _memory._reinterpret

_LOADERS = gl.constexpr(128)  # threads that load
PIECE = gl.constexpr(64)  # columns of a product that are passed on at a time


@gluon.jit
def _wait_empty(empty, block, STAGES: gl.constexpr):
    mbarrier.wait(empty.index(block % STAGES), ((block // STAGES) & 1) ^ 1)


@gluon.jit
def _multiply_block(acc, a, b, full, empty, block, is_first, STAGES: gl.constexpr, FENCE: gl.constexpr):
    """acc + a @ b, once the ring's stage is full. Releases the stage before it."""
    mbarrier.wait(full.index(block % STAGES), (block // STAGES) & 1)
    if FENCE:  # make data of cp.async visible to the matrix unit
        fence_async_shared()
    acc = warpgroup_mma(a, b, acc, is_async=True)
    acc = warpgroup_mma_wait(1, deps=(acc,))
    mbarrier.arrive(empty.index((block + STAGES - 1) % STAGES), count=1, pred=is_first == 0)
    return acc


@gluon.jit
def multiply_blocks(
    acc, row_buffers, w_buffers, full, empty, first, number, COLUMNS_FIRST: gl.constexpr, FENCE: gl.constexpr
):
    """acc + rows @ weights over the ring's next stages. Releases them all."""
    STAGES: gl.constexpr = row_buffers.shape[0]
    for block in range(first, first + number):
        a, b = row_buffers.index(block % STAGES), w_buffers.index(block % STAGES)
        if COLUMNS_FIRST:
            b = b.permute((1, 0))
        acc = _multiply_block(acc, a, b, full, empty, block, block == first, STAGES, FENCE)
    acc = warpgroup_mma_wait(0, deps=(acc,))
    mbarrier.arrive(empty.index((first + number + STAGES - 1) % STAGES), count=1)
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
def row_ring(
    dtype: gl.constexpr, BM: gl.constexpr, BK: gl.constexpr, W_COLUMNS: gl.constexpr, W_BUFFERS: gl.constexpr,
    COLUMNS_FIRST: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Allocate stages of rows [BM,BK] and of W_BUFFERS boxes of weights (as stored), and their barriers."""
    W_SHAPE: gl.constexpr = [W_COLUMNS, BK] if COLUMNS_FIRST else [BK, W_COLUMNS]
    ROWS: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BM, BK], dtype)
    W: gl.constexpr = gl.NVMMASharedLayout.get_default_for(W_SHAPE, dtype)
    row_buffers = gl.allocate_shared_memory(dtype, [STAGES, BM, BK], ROWS)
    w_buffers = gl.allocate_shared_memory(dtype, [STAGES * W_BUFFERS, W_SHAPE[0], W_SHAPE[1]], W)
    full, empty = _rings(STAGES)
    return row_buffers, w_buffers, full, empty


@gluon.jit
def eights(size):
    """Tell the compiler that `size` is a multiple of 8, as all sizes and strides here, so that it moves 16 bytes."""
    return size // 8 * 8


@gluon.jit
def _copy_rows(pointer, row_stride, row, mask, column, width, buffer, LAYOUT: gl.constexpr):
    """Copy rows by cp.async, with zeros for masked rows and columns beyond the width."""
    columns = column + gl.arange(0, buffer.shape[1], gl.SliceLayout(0, LAYOUT))
    there = mask[:, None] & (columns < eights(width))[None, :]
    _copy(buffer, pointer + row[:, None].to(gl.int64) * eights(row_stride) + columns[None, :], mask=there)


@gluon.jit
def _halves(acc):
    left, right = acc.reshape([acc.shape[0], 2, acc.shape[1] // 2]).permute(0, 2, 1).split()
    return left, right


@gluon.jit
def in_pieces(acc):
    """Split [BM,BN] into pieces of 64 columns, from left to right. Elements stay in their threads."""
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
def locate_block(
    row_stride, first_row, first_column, end, width, ROWS: gl.constexpr, COLUMNS: gl.constexpr, LAYOUT: gl.constexpr
):
    """Offsets of a block, and the mask of those before row `end` and column `width`."""
    row = first_row + gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT))
    column = first_column + gl.arange(0, COLUMNS, gl.SliceLayout(0, LAYOUT))
    return row[:, None].to(gl.int64) * row_stride + column[None, :], (row < end)[:, None] & (column < width)[None, :]


# -- gradients of the weights: sums over each expert's rows
# -------------------------------------------------------------------------------------------


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
        expert, m, n, begin, end = locate_outer(tile, height, width, expert_offsets, BM, BN, GROUP)
        acc = gl.zeros([BM, BN], gl.float32, MMA)
        for k in range(begin, end, BK):
            a, b = left_buffers.index(block % STAGES).permute((1, 0)), right_buffers.index(block % STAGES)
            acc = _multiply_block(acc, a, b, full, empty, block, k == begin, STAGES, True)
            block += 1
        acc = warpgroup_mma_wait(0, deps=(acc,))
        mbarrier.arrive(empty.index((block + STAGES - 1) % STAGES), count=1, pred=begin < end)
        pieces = in_pieces(acc.to(staged.dtype))
        tma.store_wait(0)  # those of the last tile; a tile that is not full has none to wait for later
        for i in gl.static_range(BN // PIECE):
            tma.store_wait(1)
            staged.index(i % 2).store(pieces[i])
            fence_async_shared()
            piece = view(staged.index(i % 2), staged.dtype, [1, BM, PIECE], out.layout)
            _tma_store(out, [expert, m * BM, n * BN + i * PIECE], piece)
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
    """TILE columns of w0 and, if PAIRED, as many of w1 beside them; JOINED: pairs of columns."""
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
        tokens, is_mine = next_tokens, first_row + within < end
        next_expert, next_row, next_n, next_end = then_expert, then_row, then_n, then_end
        next_tokens = _tokens(token_ids, next_row + within, next_end, GATHER)
        then_expert, then_row, then_n, then_end = locate_rows(
            tile + 2 * gl.num_programs(0), num_row_tiles, width, schedule, max_tiles, TILE, GROUP
        )
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
                    _tma_load(w0, at, bar, view(w, w.dtype, w0.block_type.shape, w0.layout))
                if PAIRED:
                    w = w_buffers.index(block % STAGES * 2 + 1)
                if PAIRED or term == 1:
                    _tma_load(w1, at, bar, view(w, w.dtype, w1.block_type.shape, w1.layout))
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
    schedule, max_tiles, bias, bias_expert, bias_column, row_weights, out, out_desc, width, inner,
    num_tiles, row_buffers, w_buffers, full, empty, staged,
    SCALE: gl.constexpr, TERMS: gl.constexpr, GATHER: gl.constexpr, BN: gl.constexpr, COLUMNS_FIRST: gl.constexpr,
    HAS_BIAS: gl.constexpr, HAS_SCALE: gl.constexpr, GROUP: gl.constexpr,
):  # fmt: skip
    width = eights(width)
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
        pieces = in_pieces(acc.to(staged.dtype))
        tma.store_wait(0)  # those of the last tile; a tile that is not full has none to wait for later
        for i in gl.static_range(BN // PIECE):
            tma.store_wait(1)
            staged.index(i % 2).store(pieces[i])
            if first_row + BM <= end:
                fence_async_shared()
                _tma_store(out_desc, [first_row, n * BN + i * PIECE], staged.index(i % 2))
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
    row_buffers, w_buffers, full, empty = row_ring(w0.dtype, BM, BK, BN, 1, COLUMNS_FIRST, STAGES)
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
