"""Kernels that move or sum rows. They are memory-bound, and sum in float32 and fixed order, rounded once."""

from __future__ import annotations

import triton
import triton.language as tl

from .tiles import load_parts, load_weight_and_scale, store_parts

# Sizes that change from call to call: kernels are not specialized on them.
_VARYING = ["num_tokens", "num_rows", "num_partials"]


@triton.jit
def identity_scale(weight):
    return weight


@triton.jit(do_not_specialize=_VARYING)
def combine_kernel(
    rows, row_weights, inverse, out, num_tokens, width,
    SCALE: tl.constexpr, K: tl.constexpr, HAS_SCALE: tl.constexpr, BT: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """out[s] = sum over k of SCALE(w[r]) * rows[r] with r = inverse[s,k], without dropped slots."""
    token = tl.program_id(0) * BT + tl.arange(0, BT)
    column = tl.program_id(1) * BD + tl.arange(0, BD)
    in_width = column < width
    acc = tl.zeros((BT, BD), tl.float32)
    for k in tl.static_range(K):
        row = tl.load(inverse + token * K + k, mask=token < num_tokens, other=-1)
        is_row = row >= 0
        at = rows + row[:, None].to(tl.int64) * width + column[None, :]
        value = tl.load(at, mask=is_row[:, None] & in_width[None, :], other=0.0).to(tl.float32)
        if HAS_SCALE:
            scale = SCALE(tl.load(row_weights + row, mask=is_row, other=0.0).to(tl.float32))
            # SCALE of a dropped slot may be anything: mask the product.
            value = tl.where(is_row[:, None], value * scale[:, None], 0.0)
        acc += value
    at = out + token[:, None].to(tl.int64) * width + column[None, :]
    tl.store(at, acc.to(out.dtype.element_ty), mask=(token < num_tokens)[:, None] & in_width[None, :])


@triton.jit
def gather_kernel(x, x_row, token_ids, expert_offsets, rows, width, E, BT: tl.constexpr, BD: tl.constexpr):
    """rows[r] = x[token_ids[r]]; the tail is not written."""
    row = tl.program_id(0) * BT + tl.arange(0, BT)
    is_row = row < tl.load(expert_offsets + E)
    column = tl.program_id(1) * BD + tl.arange(0, BD)
    mask = is_row[:, None] & (column < width)[None, :]
    token = tl.load(token_ids + row, mask=is_row, other=0)
    value = tl.load(x + token[:, None].to(tl.int64) * x_row + column[None, :], mask=mask, other=0.0)
    tl.store(rows + row[:, None].to(tl.int64) * width + column[None, :], value, mask=mask)


@triton.jit
def _column(base, AT: tl.constexpr, WORD: tl.constexpr):
    """Return the pointer to a column that begins AT bytes after `base`."""
    return (base.to(tl.pointer_type(tl.uint8), bitcast=True) + AT).to(tl.pointer_type(WORD), bitcast=True)


@triton.jit(do_not_specialize=_VARYING)
def move_kernel(
    wide, wide_row, wide_out, wide_out_row, width,
    narrow, narrow_row, narrow_out, narrow_out_row,
    ids, ids_row, ids_out, ids_out_row,
    token_ids, slot_ids, rank_offsets, num_rows, destinations_per_rank, W,
    WIDE: tl.constexpr, NARROW: tl.constexpr, LOCAL_IDS: tl.constexpr, NARROW_PAD: tl.constexpr,
    LOCAL_IDS_PAD: tl.constexpr, K: tl.constexpr, GATHER: tl.constexpr, BY_SLOT: tl.constexpr,
    BT: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """out[r] = source[i] for up to three columns with rows of any stride: a wide one, a narrow one, and one of ids.

    i is r. With GATHER i is token_ids[r], or with BY_SLOT the row's slot for the narrow column and the ids. With GATHER
    the ids are destinations, which become local ids: -1 for those on another rank than the row's own slot.

    A column is (dtype, width, offset in bytes, offset in out, dtype in out), or None. Strides count elements.
    """
    row = tl.program_id(0) * BT + tl.arange(0, BT)
    is_row = row < num_rows
    token = row
    if GATHER:
        is_row = is_row & (row < tl.load(rank_offsets + W))
        token = tl.load(token_ids + row, mask=is_row, other=0)
    row_wide = row[:, None].to(tl.int64)
    if WIDE is not None:
        column = tl.program_id(1) * BD + tl.arange(0, BD)
        mask = is_row[:, None] & (column < width)[None, :]
        at = _column(wide, WIDE[2], WIDE[0]) + token[:, None].to(tl.int64) * wide_row + column[None, :]
        out_at = _column(wide_out, WIDE[3], WIDE[0]) + row_wide * wide_out_row + column[None, :]
        tl.store(out_at, tl.load(at, mask=mask, other=0), mask=mask)
    is_row = is_row & (row < tl.where(tl.program_id(1) == 0, num_rows, 0))
    slot_index = token
    if GATHER:
        slot_index = token * K + tl.load(slot_ids + row, mask=is_row, other=0)
    index = (slot_index if BY_SLOT else token)[:, None].to(tl.int64)
    if NARROW is not None:
        number = tl.arange(0, NARROW_PAD)
        is_one = is_row[:, None] & (number < NARROW[1])[None, :]
        one_at = _column(narrow, NARROW[2], NARROW[0]) + index * narrow_row + number[None, :]
        one_out_at = _column(narrow_out, NARROW[3], NARROW[0]) + row_wide * narrow_out_row + number[None, :]
        tl.store(one_out_at, tl.load(one_at, mask=is_one, other=0), mask=is_one)
    if LOCAL_IDS is not None:
        slot = tl.arange(0, LOCAL_IDS_PAD)
        is_id = is_row[:, None] & (slot < LOCAL_IDS[1])[None, :]
        destinations = _column(ids, LOCAL_IDS[2], LOCAL_IDS[0])
        local_ids = tl.load(destinations + index * ids_row + slot[None, :], mask=is_id, other=-1)
        if GATHER:
            rank = tl.load(destinations + slot_index, mask=is_row, other=0) // destinations_per_rank
            local_ids = tl.where(
                (local_ids >= 0) & (local_ids // destinations_per_rank == rank[:, None]),
                local_ids % destinations_per_rank,
                -1,
            )
        local_ids_at = _column(ids_out, LOCAL_IDS[3], LOCAL_IDS[4]) + row_wide * ids_out_row + slot[None, :]
        tl.store(local_ids_at, local_ids.to(LOCAL_IDS[4]), mask=is_id)


@triton.jit(do_not_specialize=_VARYING)
def weight_gradient_kernel(
    dots, num_partials, row_weights, grad, grad_row, token_ids, expert_offsets, bias, bias_expert, bias_column,
    out, num_rows, width,
    SCALE_GRAD: tl.constexpr, HAS_SCALE: tl.constexpr, USES_WEIGHT: tl.constexpr, HAS_BIAS: tl.constexpr,
    GATHER: tl.constexpr, E: tl.constexpr, E_BINS: tl.constexpr, BLOCK: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """Gradient of the row weights from the partial sums of `act_backward_kernel`; zero in the tail."""
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_row = row < tl.load(expert_offsets + E)
    total = tl.zeros((BLOCK,), tl.float32)
    at = dots + row
    if HAS_SCALE:
        for _ in range(num_partials):
            total += tl.load(at, mask=is_row, other=0.0)
            at += num_rows
        if HAS_BIAS:  # y has the bias in it: <dO, bias>
            bins = tl.arange(0, E_BINS)
            end = tl.load(expert_offsets + 1 + bins, mask=bins < E, other=2147483647)
            expert = tl.sum((end[None, :] <= row[:, None]).to(tl.int32), 1)
            grad_index = tl.load(token_ids + row, mask=is_row, other=0) if GATHER else row
            for start in range(0, width, BD):
                column = start + tl.arange(0, BD)
                mask = is_row[:, None] & (column < width)[None, :]
                g = tl.load(grad + grad_index[:, None].to(tl.int64) * grad_row + column[None, :], mask=mask, other=0.0)
                b_at = bias + expert[:, None].to(tl.int64) * bias_expert + column[None, :] * bias_column
                total += tl.sum(g.to(tl.float32) * tl.load(b_at, mask=mask, other=0.0).to(tl.float32), 1)
        total *= SCALE_GRAD(tl.load(row_weights + row, mask=is_row, other=0.0).to(tl.float32))
    if USES_WEIGHT:
        for _ in range(num_partials):
            total += tl.load(at, mask=is_row, other=0.0)
            at += num_rows
    tl.store(out + row, tl.where(is_row, total, 0.0).to(out.dtype.element_ty), mask=row < num_rows)


@triton.jit
def sum_rows_kernel(
    rows, rows_row, token_ids, expert_offsets, row_weights, out, width,
    SCALE: tl.constexpr, HAS_SCALE: tl.constexpr, GATHER: tl.constexpr, BR: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """out[e] = sum of the rows of e, each times SCALE(w) if HAS_SCALE, [E,width]."""
    expert, column = tl.program_id(0), tl.program_id(1) * BD + tl.arange(0, BD)
    begin, end = tl.load(expert_offsets + expert), tl.load(expert_offsets + expert + 1)
    acc = tl.zeros((BR, BD), tl.float32)
    for start in range(begin, end, BR):
        row = start + tl.arange(0, BR)
        is_row = row < end
        index = tl.load(token_ids + row, mask=is_row, other=0) if GATHER else row
        mask = is_row[:, None] & (column < width)[None, :]
        value = tl.load(rows + index[:, None].to(tl.int64) * rows_row + column[None, :], mask=mask, other=0.0)
        value = value.to(tl.float32)
        if HAS_SCALE:
            scale = SCALE(tl.load(row_weights + row, mask=is_row, other=0.0).to(tl.float32))
            value = tl.where(is_row[:, None], value * scale[:, None], 0.0)
        acc += value
    total = tl.sum(acc, 0).to(out.dtype.element_ty)
    tl.store(out + expert.to(tl.int64) * width + column, total, mask=column < width)


@triton.jit(do_not_specialize=_VARYING)
def act_kernel(
    h0, h1, h_row, expert_offsets, row_weights, act, width, E,
    ACT: tl.constexpr, PARTS: tl.constexpr, JOINED: tl.constexpr, USES_WEIGHT: tl.constexpr,
    BT: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """act = ACT(a_0, a_1, w), [B,width], from the up-projections."""
    row = tl.program_id(0) * BT + tl.arange(0, BT)
    is_row = row < tl.load(expert_offsets + E)
    start = tl.program_id(1) * BD
    column, row = start + tl.arange(0, BD), row[:, None].to(tl.int64)
    mask = is_row[:, None] & (column < width)[None, :]
    if JOINED:
        wide = 2 * start + tl.arange(0, 2 * BD)
        a0, a1 = load_parts(
            h0, h1, row * h_row + wide[None, :], is_row[:, None] & (wide < 2 * width)[None, :], True, PARTS, BT, BD
        )
    else:
        a0, a1 = load_parts(h0, h1, row * h_row + column[None, :], mask, False, PARTS, BT, BD)
    w = tl.zeros((BT, 1), tl.float32)
    if USES_WEIGHT:
        w = tl.load(row_weights + row, mask=is_row[:, None], other=0.0).to(tl.float32)
    tl.store(act + row * width + column[None, :], ACT(a0, a1, w).to(act.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=_VARYING)
def act_vjp_kernel(
    grad_act, h0, h1, dh0, dh1, h_row, expert_offsets, row_weights, dots, num_rows, width, E,
    VJP: tl.constexpr, SCALE: tl.constexpr, PARTS: tl.constexpr, JOINED: tl.constexpr, HAS_SCALE: tl.constexpr,
    USES_WEIGHT: tl.constexpr, STORE_ACT: tl.constexpr, STORE_DOTS: tl.constexpr, BT: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """`act_backward_kernel` without its GEMM: grad_act is dA' [B,width], and becomes scale * A if STORE_ACT."""
    row = tl.program_id(0) * BT + tl.arange(0, BT)
    is_row = row < tl.load(expert_offsets + E)
    row_wide = row[:, None].to(tl.int64)
    w, scale = load_weight_and_scale(row_weights, row, is_row, SCALE, HAS_SCALE, USES_WEIGHT, BT)
    dot, by_weight = tl.zeros((BT,), tl.float32), tl.zeros((BT,), tl.float32)
    for start in range(0, width, BD):
        column = start + tl.arange(0, BD)
        mask = is_row[:, None] & (column < width)[None, :]
        h_at, h_mask = row_wide * h_row + column[None, :], mask
        if JOINED:
            wide = 2 * start + tl.arange(0, 2 * BD)
            h_at, h_mask = row_wide * h_row + wide[None, :], is_row[:, None] & (wide < 2 * width)[None, :]
        a0, a1 = load_parts(h0, h1, h_at, h_mask, JOINED, PARTS, BT, BD)
        at = grad_act + row_wide * width + column[None, :]
        grad = tl.load(at, mask=mask, other=0.0).to(tl.float32)
        value, d0, d1, dw = VJP(a0, a1, w, grad * scale)
        dt = dh0.dtype.element_ty
        store_parts(dh0, dh1, h_at, h_mask, d0.to(dt), d1.to(dt), JOINED, PARTS, BT, BD)
        if STORE_ACT:
            tl.store(at, (value * scale).to(dt), mask=mask)
        dot += tl.sum(tl.where(mask, grad * value, 0.0), 1)
        if USES_WEIGHT:
            by_weight += tl.sum(tl.where(mask, dw, 0.0), 1)
    if STORE_DOTS:
        if HAS_SCALE:
            tl.store(dots + row, dot, mask=is_row)
            dots += num_rows
        if USES_WEIGHT:
            tl.store(dots + row, by_weight, mask=is_row)
