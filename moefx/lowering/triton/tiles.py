"""Tiles of the GEMMs of `gemm_forward` and `gemm_backward`, and the addresses of operands and results.

A tile is BM rows of one expert by BN columns. `schedule_kernel` splits rows into tiles. Tiles of neighbouring columns
and rows run together, for the cache.

A weight is passed as (weight, strides of expert, column, inner), with one of several kinds of access (WEIGHT):

    "strided"           a pointer to a stack, any strides
    "strided, wide"     the same, with offsets of more than 32 bits inside of a matrix
    "descriptor"        a tensor descriptor of the stack (TMA), block [1, ...] as stored
    "table"             a pointer to the E addresses of the experts' separate tensors, multiples of 16 bytes
    "table, unaligned"  the same, with any addresses

COLUMNS_FIRST: the weight is stored as [column, inner] (as `nn.Linear.weight` in the forward).

Offsets inside of a tile, and of a matrix that is not "wide", have 32 bits, offsets of tiles and experts 64 bits. A tile
may reach beyond the expert's last row. The results of these rows are computed, but never stored.
"""

from __future__ import annotations

import triton
import triton.language as tl

# Sizes that change from call to call: kernels are not specialized on them.
VARYING = ["max_tiles", "num_rows"]


@triton.jit(do_not_specialize=VARYING)
def schedule_kernel(expert_offsets, schedule, max_tiles, E: tl.constexpr, E_BINS: tl.constexpr, BM: tl.constexpr):
    """schedule: the expert of each tile; from max_tiles on its first row; from 2 * max_tiles on the end of the expert's
    rows; last the number of tiles."""
    expert, bins = tl.program_id(0), tl.arange(0, E_BINS)
    begin = tl.load(expert_offsets + bins, mask=bins < E, other=0)
    end = tl.load(expert_offsets + bins + 1, mask=bins < E, other=0)
    num_tiles = (end - begin + BM - 1) // BM
    first = tl.sum(tl.where(bins < expert, num_tiles, 0), 0)
    own_tiles = tl.sum(tl.where(bins == expert, num_tiles, 0), 0)
    row = tl.sum(tl.where(bins == expert, begin, 0), 0)
    behind = tl.sum(tl.where(bins == expert, end, 0), 0)
    for start in range(0, own_tiles, 64):
        tile = start + tl.arange(0, 64)
        tl.store(schedule + first + tile, tl.zeros_like(tile) + expert, mask=tile < own_tiles)
        tl.store(schedule + max_tiles + first + tile, row + tile * BM, mask=tile < own_tiles)
        tl.store(schedule + 2 * max_tiles + first + tile, tl.zeros_like(tile) + behind, mask=tile < own_tiles)
    if expert == 0:
        tl.store(schedule + 3 * max_tiles, tl.sum(num_tiles, 0))


@triton.jit
def locate(tile, num_row_tiles, num_column_tiles, GROUP: tl.constexpr):
    """(row tile, column tile): GROUP row tiles at a time, and all their columns."""
    group = tile // (GROUP * num_column_tiles)
    first = group * GROUP
    height = tl.minimum(num_row_tiles - first, GROUP)
    within = tile - group * (GROUP * num_column_tiles)
    return first + within % height, within // height


@triton.jit
def locate_rows(tile, num_row_tiles, width, schedule, max_tiles, TILE: tl.constexpr, GROUP: tl.constexpr):
    """(expert, first row, column tile, end of the expert's rows) of a tile of rows. The end is 0 after the last tile.

    No load waits for another.
    """
    num_column_tiles = tl.cdiv(width, TILE)
    m, n = locate(tile, num_row_tiles, num_column_tiles, GROUP)
    there, at = tile < num_row_tiles * num_column_tiles, schedule + m
    expert, first_row = tl.load(at, mask=there, other=0), tl.load(at + max_tiles, mask=there, other=0)
    return expert, first_row, n, tl.load(at + 2 * max_tiles, mask=there, other=0)


@triton.jit
def locate_outer(tile, height, width, expert_offsets, BM: tl.constexpr, BN: tl.constexpr, GROUP: tl.constexpr):
    """(expert, row tile, column tile, first row, end of the expert's rows) of a tile of an expert's [height,width]."""
    num_row_tiles, num_column_tiles = tl.cdiv(height, BM), tl.cdiv(width, BN)
    expert = tile // (num_row_tiles * num_column_tiles)
    within = tile - expert * (num_row_tiles * num_column_tiles)
    m, n = locate(within, num_row_tiles, num_column_tiles, GROUP)
    return expert, m, n, tl.load(expert_offsets + expert), tl.load(expert_offsets + expert + 1)


@triton.jit
def locate_matrix(w, w_expert, expert, like, WEIGHT: tl.constexpr):
    """Return the pointer to an expert's matrix. A descriptor is returned unchanged."""
    if WEIGHT == "table":
        matrix = tl.multiple_of(tl.load(w + expert).to(tl.pointer_type(like.dtype.element_ty)), 16)
    elif WEIGHT == "table, unaligned":
        matrix = tl.load(w + expert).to(tl.pointer_type(like.dtype.element_ty))
    elif WEIGHT == "strided" or WEIGHT == "strided, wide":
        matrix = w + expert.to(tl.int64) * w_expert
    else:
        matrix = w
    return matrix


@triton.jit
def load_weight_tile(
    w, expert, column, columns, w_column, k, ks, w_inner, inner,
    BN: tl.constexpr, BK: tl.constexpr, WEIGHT: tl.constexpr, COLUMNS_FIRST: tl.constexpr, EVEN_K: tl.constexpr,
):  # fmt: skip
    """Return the tile [BK,BN] of an expert's matrix at inner index k and column `column`."""
    if WEIGHT == "descriptor":
        if COLUMNS_FIRST:
            tile = w.load([expert, column, k]).reshape(BN, BK).T
        else:
            tile = w.load([expert, k, column]).reshape(BK, BN)
    else:
        if WEIGHT == "strided, wide":
            at = w + (k + ks).to(tl.int64)[:, None] * w_inner + columns.to(tl.int64)[None, :] * w_column
        else:
            at = w + k * w_inner + (ks[:, None] * w_inner + columns[None, :] * w_column)
        if EVEN_K:
            tile = tl.load(at)
        else:
            tile = tl.load(at, mask=(ks < inner - k)[:, None], other=0.0)
    return tile


@triton.jit
def safe_indices(index, size, EVEN: tl.constexpr, VECTOR: tl.constexpr):
    """Indices with those from `size` on replaced by 0. VECTOR divides `size`, and runs of VECTOR stay contiguous."""
    if EVEN:
        safe = index
    else:
        safe = tl.max_contiguous(tl.multiple_of(tl.where(index < size, index, 0), VECTOR), VECTOR)
    return safe


@triton.jit
def load_left_rows(token_ids, row, in_expert, first_row, GATHER: tl.constexpr):
    """Return the rows of the left operand that a tile multiplies. Rows outside of the expert are replaced by a valid
    one."""
    if GATHER:
        left_row = tl.load(token_ids + row, mask=in_expert, other=0)
    else:
        left_row = tl.where(in_expert, row, first_row)
    return left_row


@triton.jit
def load_weight_and_scale(
    row_weights, row, in_expert,
    SCALE: tl.constexpr, HAS_SCALE: tl.constexpr, USES_WEIGHT: tl.constexpr, BM: tl.constexpr,
):  # fmt: skip
    """Return the routing weight (0 if unused) and the result's scale (1 without) of rows, float32 [BM,1]."""
    w, scale = tl.zeros((BM, 1), tl.float32), tl.full((BM, 1), 1.0, tl.float32)
    if HAS_SCALE or USES_WEIGHT:
        w = tl.load(row_weights + row, mask=in_expert, other=0.0).to(tl.float32)[:, None]
    if HAS_SCALE:
        scale = SCALE(w)
    return w, scale


@triton.jit
def make_tile_mask(in_expert, column, width, EVEN_N: tl.constexpr):
    """Return the mask of a tile [BM,BN]'s stored elements."""
    if EVEN_N:
        mask = in_expert[:, None]
    else:
        mask = in_expert[:, None] & (column < width)[None, :]
    return mask


@triton.jit
def store_tile(out, at, descriptor, first_row, column, value, mask, is_full, OUT_DESCRIPTOR: tl.constexpr):
    """Store a tile of rows. Only a full tile uses the descriptor, which would overwrite the next expert's rows."""
    if OUT_DESCRIPTOR:
        if is_full:
            descriptor.store([first_row, column], value)
        else:
            tl.store(out + at, value, mask=mask)
    else:
        tl.store(out + at, value, mask=mask)


@triton.jit
def split_pairs(pair, BM: tl.constexpr, BN: tl.constexpr):
    """Split [BM, 2*BN] of interleaved columns into two [BM,BN]."""
    return tl.split(tl.reshape(pair, (BM, BN, 2)))


@triton.jit
def split_halves(tile, BM: tl.constexpr, BN: tl.constexpr):
    """Split [BM,BN] into its left and right half."""
    return tl.split(tl.permute(tl.reshape(tile, (BM, 2, BN // 2)), (0, 2, 1)))


@triton.jit
def load_parts(h0, h1, at, mask, JOINED: tl.constexpr, PARTS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr):
    """Load the variables of the pointwise part from the up-projections, in float32. A single part is returned twice."""
    if JOINED:
        a0, a1 = split_pairs(tl.load(h0 + at, mask=mask, other=0.0), BM, BN)
    else:
        a0 = tl.load(h0 + at, mask=mask, other=0.0)
        a1 = a0
        if PARTS == 2:
            a1 = tl.load(h1 + at, mask=mask, other=0.0)
    return a0.to(tl.float32), a1.to(tl.float32)


@triton.jit
def store_parts(
    h0, h1, at, mask, v0, v1, JOINED: tl.constexpr, PARTS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr
):
    if JOINED:
        tl.store(h0 + at, tl.reshape(tl.join(v0, v1), (BM, 2 * BN)), mask=mask)
    else:
        tl.store(h0 + at, v0, mask=mask)
        if PARTS == 2:
            tl.store(h1 + at, v1, mask=mask)


@triton.jit
def accumulate(
    acc, rows, rows_row, w, w_expert, w_column, w_inner, inner, expert, first_row, row, n, w_columns,
    ROWS_DESCRIPTOR: tl.constexpr, WEIGHT: tl.constexpr, COLUMNS_FIRST: tl.constexpr, EVEN_K: tl.constexpr,
    PRECISION: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """acc + rows @ the expert's matrix. The rows are `row`, or with a descriptor those from `first_row` on."""
    ks = tl.arange(0, BK)
    matrix = locate_matrix(w, w_expert, expert, rows, WEIGHT)
    if not ROWS_DESCRIPTOR:
        rows_at = rows + row[:, None].to(tl.int64) * rows_row + ks[None, :]
    for k in range(0, inner, BK):
        if ROWS_DESCRIPTOR:
            left = rows.load([first_row, k])
        else:
            if EVEN_K:
                left = tl.load(rows_at)
            else:
                left = tl.load(rows_at, mask=(ks < inner - k)[None, :], other=0.0)
            rows_at += BK
        right = load_weight_tile(
            matrix, expert, n * BN, w_columns, w_column, k, ks, w_inner, inner, BN, BK, WEIGHT, COLUMNS_FIRST, EVEN_K
        )
        acc = tl.dot(left, right, acc, input_precision=PRECISION)
    return acc
