"""The ring of stages through which the warps of the kernels for sm90 pass data, and its barriers: see `hopper`."""

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

# Names of triton 3.6 and of later versions.
tma_load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
tma_store = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global
_copy = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared

_memory = gl.shared_memory_descriptor
view = getattr(_memory, "reinterpret", None) or _memory._reinterpret

_LOADERS = gl.constexpr(128)  # threads that load
PIECE = gl.constexpr(64)  # columns of a product that are passed on at a time


@gluon.jit
def wait_empty(empty, block, STAGES: gl.constexpr):
    mbarrier.wait(empty.index(block % STAGES), ((block // STAGES) & 1) ^ 1)


@gluon.jit
def multiply_block(acc, a, b, full, empty, block, is_first, STAGES: gl.constexpr, FENCE: gl.constexpr):
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
        acc = multiply_block(acc, a, b, full, empty, block, block == first, STAGES, FENCE)
    acc = warpgroup_mma_wait(0, deps=(acc,))
    mbarrier.arrive(empty.index((first + number + STAGES - 1) % STAGES), count=1)
    return acc


@gluon.jit
def allocate_barriers(STAGES: gl.constexpr):
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=_LOADERS + 1)
        mbarrier.init(empty.index(i), count=1)
    fence_async_shared()
    return full, empty


@gluon.jit
def allocate_row_ring(
    dtype: gl.constexpr, BM: gl.constexpr, BK: gl.constexpr, W_COLUMNS: gl.constexpr, W_BUFFERS: gl.constexpr,
    COLUMNS_FIRST: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Allocate stages of rows [BM,BK] and of W_BUFFERS boxes of weights (as stored), and their barriers."""
    W_SHAPE: gl.constexpr = [W_COLUMNS, BK] if COLUMNS_FIRST else [BK, W_COLUMNS]
    ROWS: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BM, BK], dtype)
    W: gl.constexpr = gl.NVMMASharedLayout.get_default_for(W_SHAPE, dtype)
    row_buffers = gl.allocate_shared_memory(dtype, [STAGES, BM, BK], ROWS)
    w_buffers = gl.allocate_shared_memory(dtype, [STAGES * W_BUFFERS, W_SHAPE[0], W_SHAPE[1]], W)
    full, empty = allocate_barriers(STAGES)
    return row_buffers, w_buffers, full, empty


@gluon.jit
def mark_multiple_of_8(size):
    """Tell the compiler that `size` is a multiple of 8, like all sizes and strides here, so that it moves 16 bytes."""
    return size // 8 * 8


@gluon.jit
def copy_rows(pointer, row_stride, row, mask, column, width, buffer, LAYOUT: gl.constexpr):
    """Copy rows by cp.async, with zeros for masked rows and columns beyond the width."""
    columns = column + gl.arange(0, buffer.shape[1], gl.SliceLayout(0, LAYOUT))
    copy_mask = mask[:, None] & (columns < mark_multiple_of_8(width))[None, :]
    _copy(
        buffer, pointer + row[:, None].to(gl.int64) * mark_multiple_of_8(row_stride) + columns[None, :], mask=copy_mask
    )


@gluon.jit
def _halves(acc):
    left, right = acc.reshape([acc.shape[0], 2, acc.shape[1] // 2]).permute(0, 2, 1).split()
    return left, right


@gluon.jit
def split_into_pieces(acc):
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
    """Return the offsets of a block, and a mask that is true before row `end` and column `width`."""
    row = first_row + gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT))
    column = first_column + gl.arange(0, COLUMNS, gl.SliceLayout(0, LAYOUT))
    return row[:, None].to(gl.int64) * row_stride + column[None, :], (row < end)[:, None] & (column < width)[None, :]
