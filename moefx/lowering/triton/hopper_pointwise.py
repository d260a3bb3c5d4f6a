"""The GEMMs of `hopper` followed by the pointwise part, which runs in separate warps.

They read a tile's product from shared memory, 64 columns at a time, while the next product is accumulated.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from .hopper import rows_load
from .hopper_ring import (
    PIECE,
    allocate_row_ring,
    locate_block,
    mark_multiple_of_8,
    multiply_blocks,
    split_into_pieces,
    view,
)
from .tiles import locate_rows


@gluon.jit
def _stage(dtype: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr):
    """Allocate shared memory for a tile's product, in pieces of 64 columns, and its barriers."""
    LAYOUT: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BM, PIECE], dtype)
    staged = gl.allocate_shared_memory(dtype, [BN // PIECE, BM, PIECE], LAYOUT)
    full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(full, count=1)
    mbarrier.init(empty, count=1)
    return staged, full, empty


@gluon.jit
def _multiply_for_pointwise(
    schedule, max_tiles, bias0, bias1, bias_expert, bias_column, width, inner, num_tiles,
    row_buffers, w_buffers, full, empty, staged, staged_full, staged_empty,
    FENCE: gl.constexpr, PAIRED: gl.constexpr, JOINED: gl.constexpr, HAS_BIAS: gl.constexpr,
    TILE: gl.constexpr, COLUMNS_FIRST: gl.constexpr, GROUP: gl.constexpr,
):  # fmt: skip
    """Store a tile's products, rounded, for the pointwise warps."""
    STAGES: gl.constexpr = row_buffers.shape[0]
    BM: gl.constexpr = row_buffers.shape[1]
    BK: gl.constexpr = row_buffers.shape[2]
    BN: gl.constexpr = staged.shape[0] * PIECE
    MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, 128, 16])
    block, num_blocks, turn = 0, gl.cdiv(inner, BK), 0
    if PAIRED:
        W_SHAPE: gl.constexpr = [STAGES, BN, BK] if COLUMNS_FIRST else [STAGES, BK, BN]
        w_buffers = view(w_buffers, w_buffers.dtype, W_SHAPE, w_buffers.layout)
    num_row_tiles = gl.load(schedule + 3 * max_tiles)
    for tile in range(gl.program_id(0), num_tiles, gl.num_programs(0)):
        acc = gl.zeros([BM, BN], gl.float32, MMA)
        acc = multiply_blocks(acc, row_buffers, w_buffers, full, empty, block, num_blocks, COLUMNS_FIRST, FENCE)
        block += num_blocks
        pieces = split_into_pieces(acc)
        mbarrier.wait(staged_empty, (turn & 1) ^ 1)
        for i in gl.static_range(BN // PIECE):
            piece = pieces[i]
            if HAS_BIAS:
                expert, _, n, _ = locate_rows(tile, num_row_tiles, width, schedule, max_tiles, TILE, GROUP)
                column = i * PIECE + gl.arange(0, PIECE, gl.SliceLayout(0, piece.type.layout))
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
def _load_weights(row_weights, row, end, HAS_WEIGHT: gl.constexpr):
    w = gl.zeros_like(row).to(gl.float32)
    if HAS_WEIGHT:
        w = gl.load(row_weights + row, mask=row < end, other=0.0).to(gl.float32)
    return w


@gluon.jit
def _store_act(
    act, v0, v1, row_weights, first_row, n, c, end, width, ACT: gl.constexpr, JOINED: gl.constexpr,
    USES_WEIGHT: gl.constexpr, TILE: gl.constexpr,
):  # fmt: skip
    """Store the activation of the c-th piece of a tile."""
    if JOINED:
        v0, v1 = v0.reshape([v0.shape[0], v0.shape[1] // 2, 2]).split()
    ROWS: gl.constexpr = v0.shape[0]
    COLUMNS: gl.constexpr = v0.shape[1]
    LAYOUT: gl.constexpr = v0.type.layout
    at, mask = locate_block(width, first_row, n * TILE + c * COLUMNS, end, width, ROWS, COLUMNS, LAYOUT)
    row = first_row + gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT))
    w = gl.expand_dims(_load_weights(row_weights, row, end, USES_WEIGHT), 1)
    value = ACT(v0.to(gl.float32), v1.to(gl.float32), w)
    gl.store(act + at, value.to(act.dtype.element_ty), mask=mask)


@gluon.jit
def _up_pointwise(
    schedule, max_tiles, row_weights, h0, h1, h_row, act, width, num_tiles, staged, staged_full,
    staged_empty,
    ACT: gl.constexpr, PARTS: gl.constexpr, JOINED: gl.constexpr, USES_WEIGHT: gl.constexpr, STORE_H: gl.constexpr,
    STORE_ACT: gl.constexpr, TILE: gl.constexpr, GROUP: gl.constexpr, ROWS: gl.constexpr,
):  # fmt: skip
    """Store H and the activation of each tile."""
    width, h_row = mark_multiple_of_8(width), mark_multiple_of_8(h_row)
    BM: gl.constexpr = staged.shape[1]
    PIECES: gl.constexpr = staged.shape[0]
    CHUNKS: gl.constexpr = BM // ROWS
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [gl.num_warps(), 1], [1, 0])
    chunks = view(staged, staged.dtype, [PIECES * CHUNKS, ROWS, PIECE], staged.layout)
    PAIRED: gl.constexpr = PARTS == 2 and not JOINED
    NUM_PIECES: gl.constexpr = PIECES // 2 if PAIRED else PIECES
    turn = 0
    num_row_tiles = gl.load(schedule + 3 * max_tiles)
    _, next_row, next_n, next_end = locate_rows(
        gl.program_id(0), num_row_tiles, width, schedule, max_tiles, TILE, GROUP
    )
    for tile in range(gl.program_id(0), num_tiles, gl.num_programs(0)):
        first_row, n, end = next_row, next_n, next_end
        _, next_row, next_n, next_end = locate_rows(
            tile + gl.num_programs(0), num_row_tiles, width, schedule, max_tiles, TILE, GROUP
        )
        mbarrier.wait(staged_full, turn & 1)
        for r in range(CHUNKS):
            here = first_row + r * ROWS
            for c in gl.static_range(NUM_PIECES):
                h_at, mask = locate_block(
                    h_row, here, (n * NUM_PIECES + c) * PIECE, end, 2 * width if JOINED else width, ROWS, PIECE, LAYOUT
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
                    _store_act(act, v0, v1, row_weights, here, n, c, end, width, ACT, JOINED, USES_WEIGHT, TILE)
        mbarrier.arrive(staged_empty, count=1)
        turn += 1


@gluon.jit(do_not_specialize=["max_tiles"])
def hopper_up_kernel(
    x, x_desc, x_row, token_ids, schedule, max_tiles, w0, w1,
    bias0, bias1, bias_expert, bias_column, row_weights, h0, h1, h_row, act, width, inner,
    ACT: gl.constexpr, PARTS: gl.constexpr, JOINED: gl.constexpr, GATHER: gl.constexpr, COLUMNS_FIRST: gl.constexpr,
    HAS_BIAS: gl.constexpr, USES_WEIGHT: gl.constexpr, STORE_H: gl.constexpr, STORE_ACT: gl.constexpr,
    BM: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr, STAGES: gl.constexpr, GROUP: gl.constexpr,
    ROWS: gl.constexpr, POINTWISE_WARPS: gl.constexpr,
):  # fmt: skip
    """See `gemm_forward.up_kernel`. BN: columns of the product, of both parts together."""
    PAIRED: gl.constexpr = PARTS == 2 and not JOINED
    TILE: gl.constexpr = BN // PARTS
    W_BUFFERS: gl.constexpr = 2 if PAIRED else 1
    num_tiles = gl.load(schedule + 3 * max_tiles) * gl.cdiv(width, TILE)
    staged, staged_full, staged_empty = _stage(w0.dtype, BM, BN)
    row_buffers, w_buffers, full, empty = allocate_row_ring(
        w0.dtype, BM, BK, BN // W_BUFFERS, W_BUFFERS, COLUMNS_FIRST, STAGES
    )
    gl.warp_specialize(
        [
            (
                _multiply_for_pointwise,
                (
                    schedule, max_tiles, bias0, bias1, bias_expert, bias_column, width, inner,
                    num_tiles, row_buffers, w_buffers, full, empty, staged, staged_full, staged_empty,
                    GATHER, PAIRED, JOINED, HAS_BIAS, TILE, COLUMNS_FIRST, GROUP,
                ),
            ),
            (
                rows_load,
                (
                    x, x_desc, None, x_row, token_ids, schedule, max_tiles, w0, w1, width, inner,
                    num_tiles, row_buffers, w_buffers, full, empty, 1, PAIRED, JOINED, GATHER, TILE,
                    COLUMNS_FIRST, GROUP,
                ),
            ),
            (
                _up_pointwise,
                (
                    schedule, max_tiles, row_weights, h0, h1, h_row, act, width, num_tiles, staged,
                    staged_full, staged_empty, ACT, PARTS, JOINED, USES_WEIGHT, STORE_H, STORE_ACT, TILE, GROUP, ROWS,
                ),
            ),
        ],
        [4, POINTWISE_WARPS],
        [48, 112],
    )  # fmt: skip


@gluon.jit
def _load_parts(
    h0, h1, h_row, first_row, first_column, end, width, ROWS: gl.constexpr, PARTS: gl.constexpr, JOINED: gl.constexpr
):
    """Load 64 columns of the parts of H as stored. A single part is returned twice. JOINED: pairs of columns in one."""
    if JOINED:
        LAYOUT: gl.constexpr = gl.BlockedLayout([1, 16], [4, 8], [gl.num_warps(), 1], [1, 0])
        at, mask = locate_block(h_row, first_row, 2 * first_column, end, 2 * width, ROWS, 2 * PIECE, LAYOUT)
        a0 = gl.load(h0 + at, mask=mask, other=0.0)
        a1 = a0
    else:
        LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [gl.num_warps(), 1], [1, 0])
        at, mask = locate_block(h_row, first_row, first_column, end, width, ROWS, PIECE, LAYOUT)
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
        at, mask = locate_block(h_row, first_row, 2 * first_column, end, 2 * width, ROWS, 2 * COLUMNS, LAYOUT)
        pairs = gl.join(d0, d1).reshape([ROWS, 2 * COLUMNS])
        gl.store(h0 + at, gl.convert_layout(pairs, LAYOUT, assert_trivial=True), mask=mask)
    else:
        LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [gl.num_warps(), 1], [1, 0])
        at, mask = locate_block(h_row, first_row, first_column, end, width, ROWS, COLUMNS, LAYOUT)
        gl.store(h0 + at, d0, mask=mask)
        if PARTS == 2:
            gl.store(h1 + at, d1, mask=mask)


@gluon.jit
def _act_backward_pointwise(
    schedule, max_tiles, row_weights, h0, h1, dh0, dh1, h_row, scaled_act, dots, num_rows, width,
    num_tiles, staged, staged_full, staged_empty,
    VJP: gl.constexpr, SCALE: gl.constexpr, PARTS: gl.constexpr, HAS_SCALE: gl.constexpr, USES_WEIGHT: gl.constexpr,
    STORE_ACT: gl.constexpr, STORE_DOTS: gl.constexpr, JOINED: gl.constexpr, BN: gl.constexpr, GROUP: gl.constexpr,
    ROWS: gl.constexpr,
):  # fmt: skip
    """Store dH, scale * A and the sums <dA', A> of each tile, as `gemm_backward.act_backward_kernel` does."""
    width, h_row = mark_multiple_of_8(width), mark_multiple_of_8(h_row)
    BM: gl.constexpr = staged.shape[1]
    PIECES: gl.constexpr = staged.shape[0]
    CHUNKS: gl.constexpr = BM // ROWS
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [gl.num_warps(), 1], [1, 0])
    chunks = view(staged, staged.dtype, [PIECES * CHUNKS, ROWS, PIECE], staged.layout)
    dtype: gl.constexpr = dh0.dtype.element_ty
    HAS_WEIGHT: gl.constexpr = HAS_SCALE or USES_WEIGHT
    within, turn = gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT)), 0
    num_row_tiles = gl.load(schedule + 3 * max_tiles)
    _, next_row, next_n, next_end = locate_rows(gl.program_id(0), num_row_tiles, width, schedule, max_tiles, BN, GROUP)
    next_w = _load_weights(row_weights, next_row + within, next_end, HAS_WEIGHT)
    ahead = ()
    for c in gl.static_range(PIECES):
        ahead += (_load_parts(h0, h1, h_row, next_row, next_n * BN + c * PIECE, next_end, width, ROWS, PARTS, JOINED),)
    for tile in range(gl.program_id(0), num_tiles, gl.num_programs(0)):
        first_row, n, end = next_row, next_n, next_end
        _, next_row, next_n, next_end = locate_rows(
            tile + gl.num_programs(0), num_row_tiles, width, schedule, max_tiles, BN, GROUP
        )
        mbarrier.wait(staged_full, turn & 1)
        for r in range(CHUNKS):
            row = first_row + r * ROWS + within
            in_expert = row < end
            # Load the next rows, of this or the next tile, at the same time. Each piece goes into the registers of the
            # same piece of the current rows, because a copy between registers would wait for the load.
            is_last = r == CHUNKS - 1
            then_row = gl.where(is_last, next_row, first_row + (r + 1) * ROWS)
            then_column, then_end = gl.where(is_last, next_n, n) * BN, gl.where(is_last, next_end, end)
            w = gl.expand_dims(next_w, 1)
            next_w = _load_weights(row_weights, then_row + within, then_end, HAS_WEIGHT)
            scale = gl.full([ROWS, 1], 1.0, gl.float32, LAYOUT)
            if HAS_SCALE:
                scale = SCALE(w)
            dot = gl.zeros([ROWS, PIECE], gl.float32, LAYOUT)
            by_weight = gl.zeros([ROWS, PIECE], gl.float32, LAYOUT)
            here, ahead = ahead, ()
            for c in gl.static_range(PIECES):
                a0, a1 = here[c]
                if JOINED:
                    a0, a1 = a0.reshape([ROWS, PIECE, 2]).split()
                a0 = gl.convert_layout(a0, LAYOUT, assert_trivial=True).to(gl.float32)
                a1 = gl.convert_layout(a1, LAYOUT, assert_trivial=True).to(gl.float32)
                column = then_column + c * PIECE
                ahead += (_load_parts(h0, h1, h_row, then_row, column, then_end, width, ROWS, PARTS, JOINED),)
                column = n * BN + c * PIECE
                at, mask = locate_block(width, first_row + r * ROWS, column, end, width, ROWS, PIECE, LAYOUT)
                grad = chunks.index(c * CHUNKS + r).load(LAYOUT).to(gl.float32)
                value, d0, d1, dw = VJP(a0, a1, w, grad * scale)
                dot += gl.where(mask, grad * value, 0.0)
                if USES_WEIGHT:
                    by_weight += gl.where(mask, dw, 0.0)
                _store_parts(
                    dh0, dh1, d0.to(dtype), d1.to(dtype), h_row, first_row + r * ROWS, column, end, width,
                    ROWS, PIECE, PARTS, JOINED,
                )  # fmt: skip
                if STORE_ACT:
                    gl.store(scaled_act + at, (value * scale).to(dtype), mask=mask)
            if STORE_DOTS:
                sums = dots + n.to(gl.int64) * num_rows + row
                if HAS_SCALE:
                    gl.store(sums, gl.sum(dot, 1), mask=in_expert)
                    sums += gl.cdiv(width, BN).to(gl.int64) * num_rows
                if USES_WEIGHT:
                    gl.store(sums, gl.sum(by_weight, 1), mask=in_expert)
        mbarrier.arrive(staged_empty, count=1)
        turn += 1


@gluon.jit(do_not_specialize=["max_tiles", "num_rows"])
def hopper_act_backward_kernel(
    grad, grad_desc, grad_row, token_ids, schedule, max_tiles, w0, row_weights,
    h0, h1, dh0, dh1, h_row, scaled_act, dots, num_rows, width, inner,
    VJP: gl.constexpr, SCALE: gl.constexpr, PARTS: gl.constexpr, JOINED: gl.constexpr, GATHER: gl.constexpr,
    COLUMNS_FIRST: gl.constexpr,
    HAS_SCALE: gl.constexpr, USES_WEIGHT: gl.constexpr, STORE_ACT: gl.constexpr, STORE_DOTS: gl.constexpr,
    BM: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr, STAGES: gl.constexpr, GROUP: gl.constexpr,
    ROWS: gl.constexpr, POINTWISE_WARPS: gl.constexpr,
):  # fmt: skip
    """See `gemm_backward.act_backward_kernel`."""
    num_tiles = gl.load(schedule + 3 * max_tiles) * gl.cdiv(width, BN)
    staged, staged_full, staged_empty = _stage(w0.dtype, BM, BN)
    row_buffers, w_buffers, full, empty = allocate_row_ring(w0.dtype, BM, BK, BN, 1, COLUMNS_FIRST, STAGES)
    gl.warp_specialize(
        [
            (
                _multiply_for_pointwise,
                (
                    schedule, max_tiles, None, None, 0, 0, width, inner, num_tiles, row_buffers,
                    w_buffers, full, empty, staged, staged_full, staged_empty, GATHER, False, False, False, BN,
                    COLUMNS_FIRST, GROUP,
                ),
            ),
            (
                rows_load,
                (
                    grad, grad_desc, None, grad_row, token_ids, schedule, max_tiles, w0, None,
                    width, inner, num_tiles, row_buffers, w_buffers, full, empty, 1, False, False, GATHER, BN,
                    COLUMNS_FIRST, GROUP,
                ),
            ),
            (
                _act_backward_pointwise,
                (
                    schedule, max_tiles, row_weights, h0, h1, dh0, dh1, h_row, scaled_act, dots,
                    num_rows, width, num_tiles, staged, staged_full, staged_empty, VJP, SCALE, PARTS, HAS_SCALE,
                    USES_WEIGHT, STORE_ACT, STORE_DOTS, JOINED, BN, GROUP, ROWS,
                ),
            ),
        ],
        [4, POINTWISE_WARPS],
        [40, 136] if POINTWISE_WARPS == 4 else [48, 112],
    )  # fmt: skip
