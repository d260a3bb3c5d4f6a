"""Grouped GEMMs over rows sorted by expert, with what stands before and behind them fused in.

A tile is BM rows of one expert by BN columns. The rows' side is cut by a schedule (`schedule_kernel`); tiles of
neighbouring columns and rows run together, for the cache. Rows may be gathered: row r of the left operand is then
row token_ids[r] of a [S,D] tensor, and no gathered copy exists.

Each weight comes as (weight, strides of expert, column, inner), and may be reached in several ways (WEIGHT):

    "strided"     a pointer to a stack, any strides
    "strided, wide"     the same, of matrices in which offsets take more than 32 bits
    "descriptor"  a tensor descriptor of the stack (TMA), block [1, ...] as stored
    "table"       a pointer to E addresses, of the experts' separate tensors, each a multiple of 16 bytes
    "table, unaligned"  the same, of parts of them that begin anywhere

COLUMNS_FIRST tells that a weight is stored as [column, inner] (as `nn.Linear.weight` is in the forward).

Offsets within a tile, and within a matrix that is not "wide", are 32 bit, those of tiles and experts 64 bit. The rows
behind a tile's last one belong to another expert or to nobody: they are computed along, and never stored.
"""

from __future__ import annotations

import triton
import triton.language as tl

# Sizes that change from call to call: a kernel is not compiled anew for them.
_VARYING = ["max_tiles", "num_rows"]


@triton.jit(do_not_specialize=_VARYING)
def schedule_kernel(expert_offsets, schedule, max_tiles, E: tl.constexpr, E_BINS: tl.constexpr, BM: tl.constexpr):
    """schedule: of each tile the expert, then (from max_tiles on) the first row, then (from 2 * max_tiles on) the row
    behind the expert's last one; then the number of tiles."""
    expert, bins = tl.program_id(0), tl.arange(0, E_BINS)
    begin = tl.load(expert_offsets + bins, mask=bins < E, other=0)
    end = tl.load(expert_offsets + bins + 1, mask=bins < E, other=0)
    num_tiles = (end - begin + BM - 1) // BM
    first = tl.sum(tl.where(bins < expert, num_tiles, 0), 0)
    mine = tl.sum(tl.where(bins == expert, num_tiles, 0), 0)
    row = tl.sum(tl.where(bins == expert, begin, 0), 0)
    behind = tl.sum(tl.where(bins == expert, end, 0), 0)
    for start in range(0, mine, 64):
        tile = start + tl.arange(0, 64)
        tl.store(schedule + first + tile, tl.zeros_like(tile) + expert, mask=tile < mine)
        tl.store(schedule + max_tiles + first + tile, row + tile * BM, mask=tile < mine)
        tl.store(schedule + 2 * max_tiles + first + tile, tl.zeros_like(tile) + behind, mask=tile < mine)
    if expert == 0:
        tl.store(schedule + 3 * max_tiles, tl.sum(num_tiles, 0))


@triton.jit
def place(tile, num_row_tiles, num_column_tiles, GROUP: tl.constexpr):
    """(row tile, column tile): GROUP row tiles at a time, and all their columns."""
    group = tile // (GROUP * num_column_tiles)
    first = group * GROUP
    height = tl.minimum(num_row_tiles - first, GROUP)
    within = tile - group * (GROUP * num_column_tiles)
    return first + within % height, within // height


@triton.jit
def rows_place(tile, num_row_tiles, width, schedule, max_tiles, TILE: tl.constexpr, GROUP: tl.constexpr):
    """Of a tile of rows: expert, first row, number of the columns' tile, and the row behind the expert's last one;
    behind the last tile that is 0. No load waits for another."""
    num_column_tiles = tl.cdiv(width, TILE)
    m, n = place(tile, num_row_tiles, num_column_tiles, GROUP)
    there, at = tile < num_row_tiles * num_column_tiles, schedule + m
    expert, first_row = tl.load(at, mask=there, other=0), tl.load(at + max_tiles, mask=there, other=0)
    return expert, first_row, n, tl.load(at + 2 * max_tiles, mask=there, other=0)


@triton.jit
def outer_place(tile, height, width, expert_offsets, BM: tl.constexpr, BN: tl.constexpr, GROUP: tl.constexpr):
    """Of a tile of an expert's [height,width]: expert, numbers of the tile, and the expert's first and last rows."""
    num_row_tiles, num_column_tiles = tl.cdiv(height, BM), tl.cdiv(width, BN)
    expert = tile // (num_row_tiles * num_column_tiles)
    within = tile - expert * (num_row_tiles * num_column_tiles)
    m, n = place(within, num_row_tiles, num_column_tiles, GROUP)
    return expert, m, n, tl.load(expert_offsets + expert), tl.load(expert_offsets + expert + 1)


@triton.jit
def _matrix(w, w_expert, expert, like, WEIGHT: tl.constexpr):
    """The pointer to an expert's matrix; a descriptor is left as it is."""
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
def _weight(
    w, expert, column, columns, w_column, k, ks, w_inner, inner,
    BN: tl.constexpr, BK: tl.constexpr, WEIGHT: tl.constexpr, COLUMNS_FIRST: tl.constexpr, EVEN_K: tl.constexpr,
):  # fmt: skip
    """[BK,BN] of an expert's matrix: its inner indices from k on and columns from `column` on."""
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
def _within(index, size, EVEN: tl.constexpr, VECTOR: tl.constexpr):
    """Indices that may be loaded from: those from `size` on are 0. VECTOR divides `size`: so many stay contiguous."""
    if EVEN:
        safe = index
    else:
        safe = tl.max_contiguous(tl.multiple_of(tl.where(index < size, index, 0), VECTOR), VECTOR)
    return safe


@triton.jit
def _mask(is_mine, column, width, EVEN_N: tl.constexpr):
    """Which elements of a tile [BM,BN] are stored."""
    if EVEN_N:
        mask = is_mine[:, None]
    else:
        mask = is_mine[:, None] & (column < width)[None, :]
    return mask


@triton.jit
def _store(out, at, described, first_row, column, value, mask, is_full, OUT_DESCRIPTOR: tl.constexpr):
    """A tile of rows: by its descriptor if it is full, for that would write into the next expert's rows."""
    if OUT_DESCRIPTOR:
        if is_full:
            described.store([first_row, column], value)
        else:
            tl.store(out + at, value, mask=mask)
    else:
        tl.store(out + at, value, mask=mask)


@triton.jit
def _split(pair, BM: tl.constexpr, BN: tl.constexpr):
    """[BM, 2*BN] of interleaved columns as two [BM,BN]."""
    return tl.split(tl.reshape(pair, (BM, BN, 2)))


@triton.jit
def _halves(tile, BM: tl.constexpr, BN: tl.constexpr):
    """The left and right half of [BM,BN]."""
    return tl.split(tl.permute(tl.reshape(tile, (BM, 2, BN // 2)), (0, 2, 1)))


@triton.jit
def load_parts(h0, h1, at, mask, JOINED: tl.constexpr, PARTS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr):
    """The variables of the pointwise part from the up-projections, in float32; one alone counts as both."""
    if JOINED:
        a0, a1 = _split(tl.load(h0 + at, mask=mask, other=0.0), BM, BN)
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


# -- up-projection and pointwise part
# -------------------------------------------------------------------------------------------


@triton.jit
def _up_tile(
    tile, num_row_tiles, x, x_row, token_ids, schedule, max_tiles,
    w0, w1, w_expert, w_column, w_inner,
    bias0, bias1, bias_expert, bias_column, row_weights, h0, h1, h_row, act, described_h0, described_h1,
    described_act, width, inner,
    ACT: tl.constexpr, PARTS: tl.constexpr, JOINED: tl.constexpr, WEIGHT: tl.constexpr, COLUMNS_FIRST: tl.constexpr,
    HAS_BIAS: tl.constexpr, USES_WEIGHT: tl.constexpr, STORE_H: tl.constexpr, STORE_ACT: tl.constexpr,
    OUT_DESCRIPTOR: tl.constexpr, EVEN_N: tl.constexpr, EVEN_K: tl.constexpr, VECTOR: tl.constexpr,
    PRECISION: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    expert, first_row, n, end = rows_place(tile, num_row_tiles, width, schedule, max_tiles, BN, GROUP)
    row = first_row + tl.arange(0, BM)
    is_mine, is_full = row < end, first_row + BM <= end
    column, ks = n * BN + tl.arange(0, BN), tl.arange(0, BK)
    token = tl.load(token_ids + row, mask=is_mine, other=0)
    x_at = x + token[:, None].to(tl.int64) * x_row + ks[None, :]
    BW: tl.constexpr = 2 * BN if JOINED else BN
    if JOINED:
        w_columns = _within(n * BW + tl.arange(0, BW), 2 * width, EVEN_N, VECTOR)
    else:
        w_columns = _within(column, width, EVEN_N, VECTOR)
    matrix0 = _matrix(w0, w_expert, expert, x, WEIGHT)
    matrix1 = _matrix(w1, w_expert, expert, x, WEIGHT)
    acc0 = tl.zeros((BM, BW), tl.float32)
    acc1 = acc0
    for k in range(0, inner, BK):
        if EVEN_K:
            left = tl.load(x_at)
        else:
            left = tl.load(x_at, mask=(ks < inner - k)[None, :], other=0.0)
        x_at += BK
        right0 = _weight(
            matrix0, expert, n * BW, w_columns, w_column, k, ks, w_inner, inner, BW, BK, WEIGHT, COLUMNS_FIRST, EVEN_K
        )
        acc0 = tl.dot(left, right0, acc0, input_precision=PRECISION)
        if PARTS == 2 and not JOINED:
            right1 = _weight(
                matrix1, expert, n * BW, w_columns, w_column, k, ks, w_inner, inner,
                BW, BK, WEIGHT, COLUMNS_FIRST, EVEN_K,
            )  # fmt: skip
            acc1 = tl.dot(left, right1, acc1, input_precision=PRECISION)
    if JOINED:
        v0, v1 = _split(acc0, BM, BN)
    else:
        v0, v1 = acc0, acc1
    if HAS_BIAS:
        bias_at = expert.to(tl.int64) * bias_expert + column * bias_column
        v0 += tl.load(bias0 + bias_at, mask=column < width, other=0.0).to(tl.float32)[None, :]
        if PARTS == 2:
            v1 += tl.load(bias1 + bias_at, mask=column < width, other=0.0).to(tl.float32)[None, :]
    # Rounded as they are kept, so that the backward recomputes the same activation.
    v0, v1 = v0.to(x.dtype.element_ty), v1.to(x.dtype.element_ty)
    within, offset = tl.arange(0, BM), tl.arange(0, BN)
    mask = _mask(is_mine, column, width, EVEN_N)
    if STORE_H:
        if JOINED:
            v, wide = tl.reshape(tl.join(v0, v1), (BM, BW)), tl.arange(0, BW)
            wide_mask = is_mine[:, None] & (n * BW + wide < 2 * width)[None, :]
            h_at = first_row.to(tl.int64) * h_row + n * BW + (within[:, None] * h_row + wide[None, :])
            _store(h0, h_at, described_h0, first_row, n * BW, v, wide_mask, is_full, OUT_DESCRIPTOR)
        else:
            h_at = first_row.to(tl.int64) * h_row + n * BN + (within[:, None] * h_row + offset[None, :])
            _store(h0, h_at, described_h0, first_row, n * BN, v0, mask, is_full, OUT_DESCRIPTOR)
            if PARTS == 2:
                _store(h1, h_at, described_h1, first_row, n * BN, v1, mask, is_full, OUT_DESCRIPTOR)
    if STORE_ACT:
        w = tl.zeros((BM, 1), tl.float32)
        if USES_WEIGHT:
            w = tl.load(row_weights + row, mask=is_mine, other=0.0).to(tl.float32)[:, None]
        value = ACT(v0.to(tl.float32), v1.to(tl.float32), w).to(act.dtype.element_ty)
        act_at = first_row.to(tl.int64) * width + n * BN + (within[:, None] * width + offset[None, :])
        _store(act, act_at, described_act, first_row, n * BN, value, mask, is_full, OUT_DESCRIPTOR)


@triton.jit(do_not_specialize=_VARYING)
def up_kernel(
    x, x_row, token_ids, schedule, max_tiles,
    w0, w1, w_expert, w_column, w_inner,
    bias0, bias1, bias_expert, bias_column, row_weights, h0, h1, h_row, act, described_h0, described_h1,
    described_act, width, inner,
    ACT: tl.constexpr, PARTS: tl.constexpr, JOINED: tl.constexpr, WEIGHT: tl.constexpr, COLUMNS_FIRST: tl.constexpr,
    HAS_BIAS: tl.constexpr, USES_WEIGHT: tl.constexpr, STORE_H: tl.constexpr, STORE_ACT: tl.constexpr,
    OUT_DESCRIPTOR: tl.constexpr, EVEN_N: tl.constexpr, EVEN_K: tl.constexpr, VECTOR: tl.constexpr,
    PRECISION: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr,
    PERSISTENT: tl.constexpr, FLATTEN: tl.constexpr,
):  # fmt: skip
    """a_i = x[token_ids] @ w_i (+ bias_i), kept if STORE_H; act = ACT(a_0, a_1, w) [B,width] if STORE_ACT."""
    num_row_tiles = tl.load(schedule + 3 * max_tiles)
    num_tiles = num_row_tiles * tl.cdiv(width, BN)
    if PERSISTENT:
        for tile in tl.range(tl.program_id(0), num_tiles, tl.num_programs(0), flatten=FLATTEN):
            _up_tile(
                tile, num_row_tiles, x, x_row, token_ids, schedule, max_tiles,
                w0, w1, w_expert, w_column, w_inner,
                bias0, bias1, bias_expert, bias_column, row_weights, h0, h1, h_row, act, described_h0, described_h1,
                described_act, width, inner,
                ACT, PARTS, JOINED, WEIGHT, COLUMNS_FIRST, HAS_BIAS, USES_WEIGHT, STORE_H, STORE_ACT, OUT_DESCRIPTOR,
                EVEN_N, EVEN_K, VECTOR, PRECISION, BM, BN, BK, GROUP,
            )  # fmt: skip
    elif tl.program_id(0) < num_tiles:
        _up_tile(
            tl.program_id(0), num_row_tiles, x, x_row, token_ids, schedule, max_tiles,
            w0, w1, w_expert, w_column, w_inner,
            bias0, bias1, bias_expert, bias_column, row_weights, h0, h1, h_row, act, described_h0, described_h1,
            described_act, width, inner,
            ACT, PARTS, JOINED, WEIGHT, COLUMNS_FIRST, HAS_BIAS, USES_WEIGHT, STORE_H, STORE_ACT, OUT_DESCRIPTOR,
            EVEN_N, EVEN_K, VECTOR, PRECISION, BM, BN, BK, GROUP,
        )  # fmt: skip


# -- rows times weights: the down-projection, and the gradient of the gathered rows
# -------------------------------------------------------------------------------------------


@triton.jit
def _accumulate(
    acc, rows, rows_row, w, w_expert, w_column, w_inner, inner, expert, first_row, row, n, w_columns,
    ROWS_DESCRIPTOR: tl.constexpr, WEIGHT: tl.constexpr, COLUMNS_FIRST: tl.constexpr, EVEN_K: tl.constexpr,
    PRECISION: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    ks = tl.arange(0, BK)
    matrix = _matrix(w, w_expert, expert, rows, WEIGHT)
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
        right = _weight(
            matrix, expert, n * BN, w_columns, w_column, k, ks, w_inner, inner, BN, BK, WEIGHT, COLUMNS_FIRST, EVEN_K
        )
        acc = tl.dot(left, right, acc, input_precision=PRECISION)
    return acc


@triton.jit
def _rows_tile(
    tile, num_row_tiles, rows0, rows1, rows_row, token_ids, schedule, max_tiles,
    w0, w1, w_expert, w_column, w_inner, bias, bias_expert, bias_column, row_weights, out, described_out, width, inner,
    SCALE: tl.constexpr, TERMS: tl.constexpr, GATHER: tl.constexpr, ROWS_DESCRIPTOR: tl.constexpr,
    OUT_DESCRIPTOR: tl.constexpr,
    WEIGHT: tl.constexpr,
    COLUMNS_FIRST: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_SCALE: tl.constexpr,
    EVEN_N: tl.constexpr, EVEN_K: tl.constexpr, VECTOR: tl.constexpr, PRECISION: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    expert, first_row, n, end = rows_place(tile, num_row_tiles, width, schedule, max_tiles, BN, GROUP)
    row = first_row + tl.arange(0, BM)
    is_mine = row < end
    if GATHER:
        left_row = tl.load(token_ids + row, mask=is_mine, other=0)
    else:
        left_row = tl.where(is_mine, row, first_row)
    column = n * BN + tl.arange(0, BN)
    w_columns = _within(column, width, EVEN_N, VECTOR)
    acc = tl.zeros((BM, BN), tl.float32)
    if HAS_BIAS:  # first: behind the products there is no register left for it
        bias_at = bias + expert.to(tl.int64) * bias_expert + column * bias_column
        acc += tl.load(bias_at, mask=column < width, other=0.0).to(tl.float32)[None, :]
    acc = _accumulate(
        acc, rows0, rows_row, w0, w_expert, w_column, w_inner, inner, expert, first_row, left_row, n, w_columns,
        ROWS_DESCRIPTOR, WEIGHT, COLUMNS_FIRST, EVEN_K, PRECISION, BN, BK,
    )  # fmt: skip
    if TERMS == 2:
        acc = _accumulate(
            acc, rows1, rows_row, w1, w_expert, w_column, w_inner, inner, expert, first_row, left_row, n, w_columns,
            ROWS_DESCRIPTOR, WEIGHT, COLUMNS_FIRST, EVEN_K, PRECISION, BN, BK,
        )  # fmt: skip
    if HAS_SCALE:
        acc *= SCALE(tl.load(row_weights + row, mask=is_mine, other=0.0).to(tl.float32))[:, None]
    value = acc.to(out.dtype.element_ty)
    at = first_row.to(tl.int64) * width + n * BN + (tl.arange(0, BM)[:, None] * width + tl.arange(0, BN)[None, :])
    mask = _mask(is_mine, column, width, EVEN_N)
    _store(out, at, described_out, first_row, n * BN, value, mask, first_row + BM <= end, OUT_DESCRIPTOR)


@triton.jit(do_not_specialize=_VARYING)
def rows_kernel(
    rows0, rows1, rows_row, token_ids, schedule, max_tiles,
    w0, w1, w_expert, w_column, w_inner, bias, bias_expert, bias_column, row_weights, out, described_out, width, inner,
    SCALE: tl.constexpr, TERMS: tl.constexpr, GATHER: tl.constexpr, ROWS_DESCRIPTOR: tl.constexpr,
    OUT_DESCRIPTOR: tl.constexpr,
    WEIGHT: tl.constexpr,
    COLUMNS_FIRST: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_SCALE: tl.constexpr,
    EVEN_N: tl.constexpr, EVEN_K: tl.constexpr, VECTOR: tl.constexpr, PRECISION: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr,
    PERSISTENT: tl.constexpr, FLATTEN: tl.constexpr,
):  # fmt: skip
    """out = (rows0 @ w0 (+ rows1 @ w1) (+ bias)) (* SCALE(row weight)), [B,width]; GATHER: row r of the left
    operands is their token_ids[r]."""
    num_row_tiles = tl.load(schedule + 3 * max_tiles)
    num_tiles = num_row_tiles * tl.cdiv(width, BN)
    if PERSISTENT:
        for tile in tl.range(tl.program_id(0), num_tiles, tl.num_programs(0), flatten=FLATTEN):
            _rows_tile(
                tile, num_row_tiles, rows0, rows1, rows_row, token_ids, schedule, max_tiles,
                w0, w1, w_expert, w_column, w_inner, bias, bias_expert, bias_column, row_weights, out, described_out,
                width, inner,
                SCALE, TERMS, GATHER, ROWS_DESCRIPTOR, OUT_DESCRIPTOR, WEIGHT, COLUMNS_FIRST, HAS_BIAS, HAS_SCALE,
                EVEN_N, EVEN_K, VECTOR, PRECISION,
                BM, BN, BK, GROUP,
            )  # fmt: skip
    elif tl.program_id(0) < num_tiles:
        _rows_tile(
            tl.program_id(0), num_row_tiles, rows0, rows1, rows_row, token_ids, schedule, max_tiles,
            w0, w1, w_expert, w_column, w_inner, bias, bias_expert, bias_column, row_weights, out, described_out,
            width, inner,
            SCALE, TERMS, GATHER, ROWS_DESCRIPTOR, OUT_DESCRIPTOR, WEIGHT, COLUMNS_FIRST, HAS_BIAS, HAS_SCALE,
            EVEN_N, EVEN_K, VECTOR, PRECISION,
            BM, BN, BK, GROUP,
        )  # fmt: skip


# -- gradient of the activation, and the pointwise part's
# -------------------------------------------------------------------------------------------


@triton.jit
def _pointwise_backward(
    grad, scale, w, h0, h1, dh0, dh1, scaled_act, first_row, n_offset, h_row, width, is_mine,
    VJP: tl.constexpr, PARTS: tl.constexpr, JOINED: tl.constexpr, EVEN_N: tl.constexpr, STORE_ACT: tl.constexpr,
    USES_WEIGHT: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Of BN columns from n_offset on: stores dH and scale * A; returns <dA', A> and the gradient of w by A."""
    within, offset = tl.arange(0, BM), tl.arange(0, BN)
    mask = _mask(is_mine, n_offset + offset, width, EVEN_N)
    base = first_row.to(tl.int64)
    if JOINED:
        wide = tl.arange(0, 2 * BN)
        h_mask = is_mine[:, None] & (2 * n_offset + wide < 2 * width)[None, :]
        h_at = base * h_row + 2 * n_offset + (within[:, None] * h_row + wide[None, :])
    else:
        h_mask = mask
        h_at = base * h_row + n_offset + (within[:, None] * h_row + offset[None, :])
    a0, a1 = load_parts(h0, h1, h_at, h_mask, JOINED, PARTS, BM, BN)
    grad = tl.where(mask, grad, 0.0)
    value, d0, d1, dw = VJP(a0, a1, w, grad * scale)
    dot = tl.sum(tl.where(mask, grad * value, 0.0), 1)  # a masked value may be anything
    dt = dh0.dtype.element_ty
    store_parts(dh0, dh1, h_at, h_mask, d0.to(dt), d1.to(dt), JOINED, PARTS, BM, BN)
    if STORE_ACT:
        at = base * width + n_offset + (within[:, None] * width + offset[None, :])
        tl.store(scaled_act + at, (value * scale).to(dt), mask=mask)
    by_weight = tl.zeros((BM,), tl.float32)
    if USES_WEIGHT:
        by_weight = tl.sum(tl.where(mask, dw, 0.0), 1)
    return dot, by_weight


@triton.jit
def _act_backward_tile(
    tile, num_row_tiles, grad, grad_row, token_ids, schedule, max_tiles,
    w0, w_expert, w_column, w_inner, row_weights, h0, h1, dh0, dh1, h_row, scaled_act, dots, num_rows, width, inner,
    VJP: tl.constexpr, SCALE: tl.constexpr, PARTS: tl.constexpr, JOINED: tl.constexpr, GATHER: tl.constexpr,
    WEIGHT: tl.constexpr, COLUMNS_FIRST: tl.constexpr, HAS_SCALE: tl.constexpr, USES_WEIGHT: tl.constexpr,
    STORE_ACT: tl.constexpr, STORE_DOTS: tl.constexpr, SLICES: tl.constexpr,
    EVEN_N: tl.constexpr, EVEN_K: tl.constexpr, VECTOR: tl.constexpr, PRECISION: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    expert, first_row, n, end = rows_place(tile, num_row_tiles, width, schedule, max_tiles, BN, GROUP)
    row = first_row + tl.arange(0, BM)
    is_mine = row < end
    column = n * BN + tl.arange(0, BN)
    w_columns = _within(column, width, EVEN_N, VECTOR)
    if GATHER:
        left_row = tl.load(token_ids + row, mask=is_mine, other=0)
    else:
        left_row = tl.where(is_mine, row, first_row)
    acc = _accumulate(
        tl.zeros((BM, BN), tl.float32), grad, grad_row, w0, w_expert, w_column, w_inner, inner, expert, first_row,
        left_row, n, w_columns, False, WEIGHT, COLUMNS_FIRST, EVEN_K, PRECISION, BN, BK,
    )  # fmt: skip
    w = tl.zeros((BM, 1), tl.float32)
    scale = tl.full((BM, 1), 1.0, tl.float32)
    if HAS_SCALE or USES_WEIGHT:
        w = tl.load(row_weights + row, mask=is_mine, other=0.0).to(tl.float32)[:, None]
    if HAS_SCALE:
        scale = SCALE(w)
    # The pointwise part in slices: all of it at once does not fit into registers.
    if SLICES == 1:
        dot, by_weight = _pointwise_backward(
            acc, scale, w, h0, h1, dh0, dh1, scaled_act, first_row, n * BN, h_row, width, is_mine,
            VJP, PARTS, JOINED, EVEN_N, STORE_ACT, USES_WEIGHT, BM, BN,
        )  # fmt: skip
    else:
        left_half, right_half = _halves(acc, BM, BN)
        HALF: tl.constexpr = BN // 2
        if SLICES == 2:
            dot, by_weight = _pointwise_backward(
                left_half, scale, w, h0, h1, dh0, dh1, scaled_act, first_row, n * BN, h_row, width, is_mine,
                VJP, PARTS, JOINED, EVEN_N, STORE_ACT, USES_WEIGHT, BM, HALF,
            )  # fmt: skip
            more, more_by_weight = _pointwise_backward(
                right_half, scale, w, h0, h1, dh0, dh1, scaled_act, first_row, n * BN + HALF, h_row, width, is_mine,
                VJP, PARTS, JOINED, EVEN_N, STORE_ACT, USES_WEIGHT, BM, HALF,
            )  # fmt: skip
            dot += more
            by_weight += more_by_weight
        else:
            QUARTER: tl.constexpr = BN // 4
            dot, by_weight = tl.zeros((BM,), tl.float32), tl.zeros((BM,), tl.float32)
            for half in tl.static_range(2):
                first, second = _halves(left_half if half == 0 else right_half, BM, HALF)
                for quarter in tl.static_range(2):
                    start = n * BN + half * HALF + quarter * QUARTER
                    more, more_by_weight = _pointwise_backward(
                        first if quarter == 0 else second,
                        scale, w, h0, h1, dh0, dh1, scaled_act, first_row, start, h_row, width, is_mine,
                        VJP, PARTS, JOINED, EVEN_N, STORE_ACT, USES_WEIGHT, BM, QUARTER,
                    )  # fmt: skip
                    dot += more
                    by_weight += more_by_weight
    if STORE_DOTS:
        at = dots + n.to(tl.int64) * num_rows + row
        if HAS_SCALE:
            tl.store(at, dot, mask=is_mine)
            at += tl.cdiv(width, BN).to(tl.int64) * num_rows
        if USES_WEIGHT:
            tl.store(at, by_weight, mask=is_mine)


@triton.jit(do_not_specialize=_VARYING)
def act_backward_kernel(
    grad, grad_row, token_ids, schedule, max_tiles,
    w0, w_expert, w_column, w_inner, row_weights, h0, h1, dh0, dh1, h_row, scaled_act, dots, num_rows, width, inner,
    VJP: tl.constexpr, SCALE: tl.constexpr, PARTS: tl.constexpr, JOINED: tl.constexpr, GATHER: tl.constexpr,
    WEIGHT: tl.constexpr, COLUMNS_FIRST: tl.constexpr, HAS_SCALE: tl.constexpr, USES_WEIGHT: tl.constexpr,
    STORE_ACT: tl.constexpr, STORE_DOTS: tl.constexpr, SLICES: tl.constexpr,
    EVEN_N: tl.constexpr, EVEN_K: tl.constexpr, VECTOR: tl.constexpr, PRECISION: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr, PERSISTENT: tl.constexpr,
    FLATTEN: tl.constexpr,
):  # fmt: skip
    """dA' = grad[token_ids] @ w; from it and H: dH, scale * A, and for each column tile and row <dA', A>.

    dH may be the storage of H. dots: [column tiles, B] of <dA', A> if HAS_SCALE, then as many of the gradient of
    the row weight through ACT if USES_WEIGHT.
    """
    num_row_tiles = tl.load(schedule + 3 * max_tiles)
    num_tiles = num_row_tiles * tl.cdiv(width, BN)
    if PERSISTENT:
        for tile in tl.range(tl.program_id(0), num_tiles, tl.num_programs(0), flatten=FLATTEN):
            _act_backward_tile(
                tile, num_row_tiles, grad, grad_row, token_ids, schedule, max_tiles,
                w0, w_expert, w_column, w_inner, row_weights, h0, h1, dh0, dh1, h_row, scaled_act, dots, num_rows,
                width, inner, VJP, SCALE, PARTS, JOINED, GATHER, WEIGHT, COLUMNS_FIRST, HAS_SCALE, USES_WEIGHT,
                STORE_ACT, STORE_DOTS, SLICES, EVEN_N, EVEN_K, VECTOR, PRECISION, BM, BN, BK, GROUP,
            )  # fmt: skip
    elif tl.program_id(0) < num_tiles:
        _act_backward_tile(
            tl.program_id(0), num_row_tiles, grad, grad_row, token_ids, schedule, max_tiles,
            w0, w_expert, w_column, w_inner, row_weights, h0, h1, dh0, dh1, h_row, scaled_act, dots, num_rows,
            width, inner, VJP, SCALE, PARTS, JOINED, GATHER, WEIGHT, COLUMNS_FIRST, HAS_SCALE, USES_WEIGHT,
            STORE_ACT, STORE_DOTS, SLICES, EVEN_N, EVEN_K, VECTOR, PRECISION, BM, BN, BK, GROUP,
        )  # fmt: skip


# -- gradients of the weights: sums over each expert's rows
# -------------------------------------------------------------------------------------------


@triton.jit
def _columns_of(
    operand, row_stride, tokens, k, ks, end, column, columns,
    GATHER: tl.constexpr, IS_DESCRIPTOR: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """[BK, columns] of an operand's rows from k on; MASKED: zero from row `end` on, whatever is there."""
    here = (k + ks < end)[:, None]
    if IS_DESCRIPTOR:
        tile = operand.load([k, column])
        if MASKED:  # it reads on into the next expert's rows
            tile = tl.where(here, tile, 0.0)
    else:
        rows = tokens if GATHER else (k + ks).to(tl.int64)
        at = operand + rows[:, None] * row_stride + columns[None, :]
        if MASKED:
            tile = tl.load(at, mask=here, other=0.0)
        else:
            tile = tl.load(at)
    return tile


@triton.jit
def _outer_block(
    acc, left, left_row, right, right_row, token_ids, k, end, i0, i, j0, j,
    GATHER_LEFT: tl.constexpr, GATHER_RIGHT: tl.constexpr, LEFT_DESCRIPTOR: tl.constexpr,
    RIGHT_DESCRIPTOR: tl.constexpr, MASKED: tl.constexpr, PRECISION: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    ks = tl.arange(0, BK)
    tokens = ks
    if GATHER_LEFT or GATHER_RIGHT:
        if MASKED:
            tokens = tl.load(token_ids + k + ks, mask=k + ks < end, other=0).to(tl.int64)
        else:
            tokens = tl.load(token_ids + k + ks).to(tl.int64)
    a = _columns_of(left, left_row, tokens, k, ks, end, i0, i, GATHER_LEFT, LEFT_DESCRIPTOR, MASKED)
    b = _columns_of(right, right_row, tokens, k, ks, end, j0, j, GATHER_RIGHT, RIGHT_DESCRIPTOR, MASKED)
    return tl.dot(a.T, b, acc, input_precision=PRECISION)


@triton.jit
def _outer_tile(
    tile, left, left_row, right, right_row, token_ids, expert_offsets, out, height, width,
    GATHER_LEFT: tl.constexpr, GATHER_RIGHT: tl.constexpr, LEFT_DESCRIPTOR: tl.constexpr,
    RIGHT_DESCRIPTOR: tl.constexpr, OUT_DESCRIPTOR: tl.constexpr, EVEN: tl.constexpr, VECTOR: tl.constexpr,
    PRECISION: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    expert, m, n, begin, end = outer_place(tile, height, width, expert_offsets, BM, BN, GROUP)
    i, j = m * BM + tl.arange(0, BM), n * BN + tl.arange(0, BN)
    i_safe, j_safe = _within(i, height, EVEN, VECTOR), _within(j, width, EVEN, VECTOR)
    acc = tl.zeros((BM, BN), tl.float32)
    whole = begin + (end - begin) // BK * BK
    for k in range(begin, whole, BK):
        acc = _outer_block(
            acc, left, left_row, right, right_row, token_ids, k, end, m * BM, i_safe, n * BN, j_safe,
            GATHER_LEFT, GATHER_RIGHT, LEFT_DESCRIPTOR, RIGHT_DESCRIPTOR, False, PRECISION, BK,
        )  # fmt: skip
    if whole < end:
        acc = _outer_block(
            acc, left, left_row, right, right_row, token_ids, whole, end, m * BM, i_safe, n * BN, j_safe,
            GATHER_LEFT, GATHER_RIGHT, LEFT_DESCRIPTOR, RIGHT_DESCRIPTOR, True, PRECISION, BK,
        )  # fmt: skip
    if OUT_DESCRIPTOR:
        out.store([expert, m * BM, n * BN], acc.to(out.dtype).reshape(1, BM, BN))
    else:
        at = (expert.to(tl.int64) * height + m * BM) * width + n * BN
        at += tl.arange(0, BM)[:, None] * width + tl.arange(0, BN)[None, :]
        value = acc.to(out.dtype.element_ty)
        if EVEN:
            tl.store(out + at, value)
        else:
            tl.store(out + at, value, mask=(i < height)[:, None] & (j < width)[None, :])


@triton.jit
def outer_kernel(
    left, left_row, right, right_row, token_ids, expert_offsets, out, height, width, num_experts,
    GATHER_LEFT: tl.constexpr, GATHER_RIGHT: tl.constexpr, LEFT_DESCRIPTOR: tl.constexpr,
    RIGHT_DESCRIPTOR: tl.constexpr, OUT_DESCRIPTOR: tl.constexpr, EVEN: tl.constexpr, VECTOR: tl.constexpr,
    PRECISION: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr,
    PERSISTENT: tl.constexpr, FLATTEN: tl.constexpr,
):  # fmt: skip
    """out[e] = left[rows of e]^T @ right[rows of e], [E,height,width]; zero for experts without rows."""
    num_tiles = num_experts * tl.cdiv(height, BM) * tl.cdiv(width, BN)
    if PERSISTENT:
        for tile in tl.range(tl.program_id(0), num_tiles, tl.num_programs(0), flatten=FLATTEN):
            _outer_tile(
                tile, left, left_row, right, right_row, token_ids, expert_offsets, out, height, width,
                GATHER_LEFT, GATHER_RIGHT, LEFT_DESCRIPTOR, RIGHT_DESCRIPTOR, OUT_DESCRIPTOR, EVEN, VECTOR,
                PRECISION, BM, BN, BK, GROUP,
            )  # fmt: skip
    else:
        _outer_tile(
            tl.program_id(0), left, left_row, right, right_row, token_ids, expert_offsets, out, height, width,
            GATHER_LEFT, GATHER_RIGHT, LEFT_DESCRIPTOR, RIGHT_DESCRIPTOR, OUT_DESCRIPTOR, EVEN, VECTOR, PRECISION,
            BM, BN, BK, GROUP,
        )  # fmt: skip
