"""Grouped GEMMs of the backward: the gradient of the activation, followed by the pointwise part's backward, and the
gradients of the weights, which are sums over each expert's rows.

Rows may be gathered as in `gemm_forward`; `tiles` describes the access to weights.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .tiles import (
    VARYING,
    accumulate,
    load_left_rows,
    load_parts,
    load_weight_and_scale,
    locate_outer,
    locate_rows,
    make_tile_mask,
    safe_indices,
    split_halves,
    store_parts,
)

# -- gradient of the activation, and the pointwise part's


@triton.jit
def _pointwise_backward(
    grad, scale, w, h0, h1, dh0, dh1, scaled_act, first_row, n_offset, h_row, width, in_expert,
    VJP: tl.constexpr, PARTS: tl.constexpr, JOINED: tl.constexpr, EVEN_N: tl.constexpr, STORE_ACT: tl.constexpr,
    USES_WEIGHT: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Store dH and scale * A for BN columns from n_offset on. Returns <dA', A> and the gradient of w by A."""
    within, offset = tl.arange(0, BM), tl.arange(0, BN)
    mask = make_tile_mask(in_expert, n_offset + offset, width, EVEN_N)
    base = first_row.to(tl.int64)
    if JOINED:
        wide = tl.arange(0, 2 * BN)
        h_mask = in_expert[:, None] & (2 * n_offset + wide < 2 * width)[None, :]
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
    expert, first_row, n, end = locate_rows(tile, num_row_tiles, width, schedule, max_tiles, BN, GROUP)
    row = first_row + tl.arange(0, BM)
    in_expert = row < end
    column = n * BN + tl.arange(0, BN)
    w_columns = safe_indices(column, width, EVEN_N, VECTOR)
    left_row = load_left_rows(token_ids, row, in_expert, first_row, GATHER)
    acc = accumulate(
        tl.zeros((BM, BN), tl.float32), grad, grad_row, w0, w_expert, w_column, w_inner, inner, expert, first_row,
        left_row, n, w_columns, False, WEIGHT, COLUMNS_FIRST, EVEN_K, PRECISION, BN, BK,
    )  # fmt: skip
    w, scale = load_weight_and_scale(row_weights, row, in_expert, SCALE, HAS_SCALE, USES_WEIGHT, BM)
    # The pointwise part runs in slices: the whole tile does not fit into registers.
    if SLICES == 1:
        dot, by_weight = _pointwise_backward(
            acc, scale, w, h0, h1, dh0, dh1, scaled_act, first_row, n * BN, h_row, width, in_expert,
            VJP, PARTS, JOINED, EVEN_N, STORE_ACT, USES_WEIGHT, BM, BN,
        )  # fmt: skip
    else:
        left_half, right_half = split_halves(acc, BM, BN)
        HALF: tl.constexpr = BN // 2
        if SLICES == 2:
            dot, by_weight = _pointwise_backward(
                left_half, scale, w, h0, h1, dh0, dh1, scaled_act, first_row, n * BN, h_row, width, in_expert,
                VJP, PARTS, JOINED, EVEN_N, STORE_ACT, USES_WEIGHT, BM, HALF,
            )  # fmt: skip
            dot_part, dot_part_by_weight = _pointwise_backward(
                right_half, scale, w, h0, h1, dh0, dh1, scaled_act, first_row, n * BN + HALF, h_row, width, in_expert,
                VJP, PARTS, JOINED, EVEN_N, STORE_ACT, USES_WEIGHT, BM, HALF,
            )  # fmt: skip
            dot += dot_part
            by_weight += dot_part_by_weight
        else:
            QUARTER: tl.constexpr = BN // 4
            dot, by_weight = tl.zeros((BM,), tl.float32), tl.zeros((BM,), tl.float32)
            for half in tl.static_range(2):
                first, second = split_halves(left_half if half == 0 else right_half, BM, HALF)
                for quarter in tl.static_range(2):
                    start = n * BN + half * HALF + quarter * QUARTER
                    dot_part, dot_part_by_weight = _pointwise_backward(
                        first if quarter == 0 else second,
                        scale, w, h0, h1, dh0, dh1, scaled_act, first_row, start, h_row, width, in_expert,
                        VJP, PARTS, JOINED, EVEN_N, STORE_ACT, USES_WEIGHT, BM, QUARTER,
                    )  # fmt: skip
                    dot += dot_part
                    by_weight += dot_part_by_weight
    if STORE_DOTS:
        at = dots + n.to(tl.int64) * num_rows + row
        if HAS_SCALE:
            tl.store(at, dot, mask=in_expert)
            at += tl.cdiv(width, BN).to(tl.int64) * num_rows
        if USES_WEIGHT:
            tl.store(at, by_weight, mask=in_expert)


@triton.jit(do_not_specialize=VARYING)
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
    """Compute dA' = grad[token_ids] @ w; from it and H: dH, scale * A, and <dA', A> for each column tile and row.

    dH may share the storage of H. dots: [column tiles, B] of <dA', A> if HAS_SCALE, followed by [column tiles, B] of
    the row weight's gradient through ACT if USES_WEIGHT.
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


@triton.jit
def _load_columns(
    operand, row_stride, tokens, k, ks, end, column, columns,
    GATHER: tl.constexpr, IS_DESCRIPTOR: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """[BK, columns] of an operand's rows from k on; MASKED: zero from row `end` on, whatever is there."""
    in_rows = (k + ks < end)[:, None]
    if IS_DESCRIPTOR:
        tile = operand.load([k, column])
        if MASKED:  # a descriptor reads into the next expert's rows
            tile = tl.where(in_rows, tile, 0.0)
    else:
        rows = tokens if GATHER else (k + ks).to(tl.int64)
        at = operand + rows[:, None] * row_stride + columns[None, :]
        if MASKED:
            tile = tl.load(at, mask=in_rows, other=0.0)
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
    a = _load_columns(left, left_row, tokens, k, ks, end, i0, i, GATHER_LEFT, LEFT_DESCRIPTOR, MASKED)
    b = _load_columns(right, right_row, tokens, k, ks, end, j0, j, GATHER_RIGHT, RIGHT_DESCRIPTOR, MASKED)
    return tl.dot(a.T, b, acc, input_precision=PRECISION)


@triton.jit
def _outer_tile(
    tile, left, left_row, right, right_row, token_ids, expert_offsets, out, height, width,
    GATHER_LEFT: tl.constexpr, GATHER_RIGHT: tl.constexpr, LEFT_DESCRIPTOR: tl.constexpr,
    RIGHT_DESCRIPTOR: tl.constexpr, OUT_DESCRIPTOR: tl.constexpr, EVEN: tl.constexpr, VECTOR: tl.constexpr,
    PRECISION: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    expert, m, n, begin, end = locate_outer(tile, height, width, expert_offsets, BM, BN, GROUP)
    i, j = m * BM + tl.arange(0, BM), n * BN + tl.arange(0, BN)
    i_safe, j_safe = safe_indices(i, height, EVEN, VECTOR), safe_indices(j, width, EVEN, VECTOR)
    acc = tl.zeros((BM, BN), tl.float32)
    last_whole = begin + (end - begin) // BK * BK
    for k in range(begin, last_whole, BK):
        acc = _outer_block(
            acc, left, left_row, right, right_row, token_ids, k, end, m * BM, i_safe, n * BN, j_safe,
            GATHER_LEFT, GATHER_RIGHT, LEFT_DESCRIPTOR, RIGHT_DESCRIPTOR, False, PRECISION, BK,
        )  # fmt: skip
    if last_whole < end:
        acc = _outer_block(
            acc, left, left_row, right, right_row, token_ids, last_whole, end, m * BM, i_safe, n * BN, j_safe,
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
