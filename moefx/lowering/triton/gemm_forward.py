"""Grouped GEMMs over rows sorted by expert: the up-projection followed by the pointwise part, and rows times weights
(the down-projection, and the gradient of the gathered rows).

Rows may be gathered: row r of the left operand is row token_ids[r] of a [S,D] tensor, without a gathered copy. `tiles`
describes the access to weights.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .tiles import (
    VARYING,
    accumulate,
    load_left_rows,
    load_weight_tile,
    locate_matrix,
    locate_rows,
    make_tile_mask,
    safe_indices,
    split_pairs,
    store_tile,
)

# -- up-projection and pointwise part


@triton.jit
def _up_tile(
    tile, num_row_tiles, x, x_row, token_ids, schedule, max_tiles,
    w0, w1, w_expert, w_column, w_inner,
    bias0, bias1, bias_expert, bias_column, row_weights, h0, h1, h_row, act, h0_descriptor, h1_descriptor,
    act_descriptor, width, inner,
    ACT: tl.constexpr, PARTS: tl.constexpr, JOINED: tl.constexpr, WEIGHT: tl.constexpr, COLUMNS_FIRST: tl.constexpr,
    HAS_BIAS: tl.constexpr, USES_WEIGHT: tl.constexpr, STORE_H: tl.constexpr, STORE_ACT: tl.constexpr,
    OUT_DESCRIPTOR: tl.constexpr, EVEN_N: tl.constexpr, EVEN_K: tl.constexpr, VECTOR: tl.constexpr,
    PRECISION: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    expert, first_row, n, end = locate_rows(tile, num_row_tiles, width, schedule, max_tiles, BN, GROUP)
    row = first_row + tl.arange(0, BM)
    in_expert, is_full = row < end, first_row + BM <= end
    column, ks = n * BN + tl.arange(0, BN), tl.arange(0, BK)
    token = tl.load(token_ids + row, mask=in_expert, other=0)
    x_at = x + token[:, None].to(tl.int64) * x_row + ks[None, :]
    BW: tl.constexpr = 2 * BN if JOINED else BN
    if JOINED:
        w_columns = safe_indices(n * BW + tl.arange(0, BW), 2 * width, EVEN_N, VECTOR)
    else:
        w_columns = safe_indices(column, width, EVEN_N, VECTOR)
    matrix0 = locate_matrix(w0, w_expert, expert, x, WEIGHT)
    matrix1 = locate_matrix(w1, w_expert, expert, x, WEIGHT)
    acc0 = tl.zeros((BM, BW), tl.float32)
    acc1 = acc0
    for k in range(0, inner, BK):
        if EVEN_K:
            left = tl.load(x_at)
        else:
            left = tl.load(x_at, mask=(ks < inner - k)[None, :], other=0.0)
        x_at += BK
        right0 = load_weight_tile(
            matrix0, expert, n * BW, w_columns, w_column, k, ks, w_inner, inner, BW, BK, WEIGHT, COLUMNS_FIRST, EVEN_K
        )
        acc0 = tl.dot(left, right0, acc0, input_precision=PRECISION)
        if PARTS == 2 and not JOINED:
            right1 = load_weight_tile(
                matrix1, expert, n * BW, w_columns, w_column, k, ks, w_inner, inner,
                BW, BK, WEIGHT, COLUMNS_FIRST, EVEN_K,
            )  # fmt: skip
            acc1 = tl.dot(left, right1, acc1, input_precision=PRECISION)
    if JOINED:
        v0, v1 = split_pairs(acc0, BM, BN)
    else:
        v0, v1 = acc0, acc1
    if HAS_BIAS:
        bias_at = expert.to(tl.int64) * bias_expert + column * bias_column
        v0 += tl.load(bias0 + bias_at, mask=column < width, other=0.0).to(tl.float32)[None, :]
        if PARTS == 2:
            v1 += tl.load(bias1 + bias_at, mask=column < width, other=0.0).to(tl.float32)[None, :]
    # Round as for storage, so that the backward recomputes the same activation.
    v0, v1 = v0.to(x.dtype.element_ty), v1.to(x.dtype.element_ty)
    within, offset = tl.arange(0, BM), tl.arange(0, BN)
    mask = make_tile_mask(in_expert, column, width, EVEN_N)
    if STORE_H:
        if JOINED:
            v, wide = tl.reshape(tl.join(v0, v1), (BM, BW)), tl.arange(0, BW)
            wide_mask = in_expert[:, None] & (n * BW + wide < 2 * width)[None, :]
            h_at = first_row.to(tl.int64) * h_row + n * BW + (within[:, None] * h_row + wide[None, :])
            store_tile(h0, h_at, h0_descriptor, first_row, n * BW, v, wide_mask, is_full, OUT_DESCRIPTOR)
        else:
            h_at = first_row.to(tl.int64) * h_row + n * BN + (within[:, None] * h_row + offset[None, :])
            store_tile(h0, h_at, h0_descriptor, first_row, n * BN, v0, mask, is_full, OUT_DESCRIPTOR)
            if PARTS == 2:
                store_tile(h1, h_at, h1_descriptor, first_row, n * BN, v1, mask, is_full, OUT_DESCRIPTOR)
    if STORE_ACT:
        w = tl.zeros((BM, 1), tl.float32)
        if USES_WEIGHT:
            w = tl.load(row_weights + row, mask=in_expert, other=0.0).to(tl.float32)[:, None]
        value = ACT(v0.to(tl.float32), v1.to(tl.float32), w).to(act.dtype.element_ty)
        act_at = first_row.to(tl.int64) * width + n * BN + (within[:, None] * width + offset[None, :])
        store_tile(act, act_at, act_descriptor, first_row, n * BN, value, mask, is_full, OUT_DESCRIPTOR)


@triton.jit(do_not_specialize=VARYING)
def up_kernel(
    x, x_row, token_ids, schedule, max_tiles,
    w0, w1, w_expert, w_column, w_inner,
    bias0, bias1, bias_expert, bias_column, row_weights, h0, h1, h_row, act, h0_descriptor, h1_descriptor,
    act_descriptor, width, inner,
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
                bias0, bias1, bias_expert, bias_column, row_weights, h0, h1, h_row, act, h0_descriptor, h1_descriptor,
                act_descriptor, width, inner,
                ACT, PARTS, JOINED, WEIGHT, COLUMNS_FIRST, HAS_BIAS, USES_WEIGHT, STORE_H, STORE_ACT, OUT_DESCRIPTOR,
                EVEN_N, EVEN_K, VECTOR, PRECISION, BM, BN, BK, GROUP,
            )  # fmt: skip
    elif tl.program_id(0) < num_tiles:
        _up_tile(
            tl.program_id(0), num_row_tiles, x, x_row, token_ids, schedule, max_tiles,
            w0, w1, w_expert, w_column, w_inner,
            bias0, bias1, bias_expert, bias_column, row_weights, h0, h1, h_row, act, h0_descriptor, h1_descriptor,
            act_descriptor, width, inner,
            ACT, PARTS, JOINED, WEIGHT, COLUMNS_FIRST, HAS_BIAS, USES_WEIGHT, STORE_H, STORE_ACT, OUT_DESCRIPTOR,
            EVEN_N, EVEN_K, VECTOR, PRECISION, BM, BN, BK, GROUP,
        )  # fmt: skip


# -- rows times weights: the down-projection, and the gradient of the gathered rows


@triton.jit
def _rows_tile(
    tile, num_row_tiles, rows0, rows1, rows_row, token_ids, schedule, max_tiles,
    w0, w1, w_expert, w_column, w_inner, bias, bias_expert, bias_column, row_weights, out, out_descriptor, width, inner,
    SCALE: tl.constexpr, TERMS: tl.constexpr, GATHER: tl.constexpr, ROWS_DESCRIPTOR: tl.constexpr,
    OUT_DESCRIPTOR: tl.constexpr,
    WEIGHT: tl.constexpr,
    COLUMNS_FIRST: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_SCALE: tl.constexpr,
    EVEN_N: tl.constexpr, EVEN_K: tl.constexpr, VECTOR: tl.constexpr, PRECISION: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    expert, first_row, n, end = locate_rows(tile, num_row_tiles, width, schedule, max_tiles, BN, GROUP)
    row = first_row + tl.arange(0, BM)
    in_expert = row < end
    left_row = load_left_rows(token_ids, row, in_expert, first_row, GATHER)
    column = n * BN + tl.arange(0, BN)
    w_columns = safe_indices(column, width, EVEN_N, VECTOR)
    acc = tl.zeros((BM, BN), tl.float32)
    if HAS_BIAS:  # before the products: no registers are left for it afterwards
        bias_at = bias + expert.to(tl.int64) * bias_expert + column * bias_column
        acc += tl.load(bias_at, mask=column < width, other=0.0).to(tl.float32)[None, :]
    acc = accumulate(
        acc, rows0, rows_row, w0, w_expert, w_column, w_inner, inner, expert, first_row, left_row, n, w_columns,
        ROWS_DESCRIPTOR, WEIGHT, COLUMNS_FIRST, EVEN_K, PRECISION, BN, BK,
    )  # fmt: skip
    if TERMS == 2:
        acc = accumulate(
            acc, rows1, rows_row, w1, w_expert, w_column, w_inner, inner, expert, first_row, left_row, n, w_columns,
            ROWS_DESCRIPTOR, WEIGHT, COLUMNS_FIRST, EVEN_K, PRECISION, BN, BK,
        )  # fmt: skip
    if HAS_SCALE:
        acc *= SCALE(tl.load(row_weights + row, mask=in_expert, other=0.0).to(tl.float32))[:, None]
    value = acc.to(out.dtype.element_ty)
    at = first_row.to(tl.int64) * width + n * BN + (tl.arange(0, BM)[:, None] * width + tl.arange(0, BN)[None, :])
    mask = make_tile_mask(in_expert, column, width, EVEN_N)
    store_tile(out, at, out_descriptor, first_row, n * BN, value, mask, first_row + BM <= end, OUT_DESCRIPTOR)


@triton.jit(do_not_specialize=VARYING)
def rows_kernel(
    rows0, rows1, rows_row, token_ids, schedule, max_tiles,
    w0, w1, w_expert, w_column, w_inner, bias, bias_expert, bias_column, row_weights, out, out_descriptor, width, inner,
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
                w0, w1, w_expert, w_column, w_inner, bias, bias_expert, bias_column, row_weights, out, out_descriptor,
                width, inner,
                SCALE, TERMS, GATHER, ROWS_DESCRIPTOR, OUT_DESCRIPTOR, WEIGHT, COLUMNS_FIRST, HAS_BIAS, HAS_SCALE,
                EVEN_N, EVEN_K, VECTOR, PRECISION,
                BM, BN, BK, GROUP,
            )  # fmt: skip
    elif tl.program_id(0) < num_tiles:
        _rows_tile(
            tl.program_id(0), num_row_tiles, rows0, rows1, rows_row, token_ids, schedule, max_tiles,
            w0, w1, w_expert, w_column, w_inner, bias, bias_expert, bias_column, row_weights, out, out_descriptor,
            width, inner,
            SCALE, TERMS, GATHER, ROWS_DESCRIPTOR, OUT_DESCRIPTOR, WEIGHT, COLUMNS_FIRST, HAS_BIAS, HAS_SCALE,
            EVEN_N, EVEN_K, VECTOR, PRECISION,
            BM, BN, BK, GROUP,
        )  # fmt: skip
