"""Kernels that read and add up rows in the memory of other ranks, through a table of the ranks' addresses.

A program reads from one rank at a time. Sums are in float32 and in the order of ranks, rounded once.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _pointer(addresses, rank, like, ALIGNED: tl.constexpr):
    """Return the pointer to a rank's rows, whose elements have the dtype of `like`."""
    rows = tl.load(addresses + rank).to(tl.pointer_type(like.dtype.element_ty))
    return tl.multiple_of(rows, 16) if ALIGNED else rows


@triton.jit(do_not_specialize=["num_tokens"])
def read_rows_kernel(
    addresses, peer_row, local_ids, out, num_tokens, width, experts_per_rank,
    K: tl.constexpr, K_PAD: tl.constexpr, ALIGNED: tl.constexpr, BT: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """out[rank * num_tokens + t] = row t of the rank if the token has an expert on this rank, otherwise 0."""
    rank = tl.program_id(2)
    token = tl.program_id(0) * BT + tl.arange(0, BT)
    column = tl.program_id(1) * BD + tl.arange(0, BD)
    is_token, in_width = token < num_tokens, column < width
    row = rank.to(tl.int64) * num_tokens + token
    number = tl.arange(0, K_PAD)
    expert = tl.load(
        local_ids + row[:, None] * K + number[None, :], mask=is_token[:, None] & (number < K)[None, :], other=-1
    )
    is_needed = tl.max(((expert >= 0) & (expert < experts_per_rank)).to(tl.int32), 1) != 0
    at = _pointer(addresses, rank, out, ALIGNED) + token[:, None].to(tl.int64) * peer_row + column[None, :]
    value = tl.load(at, mask=is_needed[:, None] & in_width[None, :], other=0)
    tl.store(out + row[:, None] * width + column[None, :], value, mask=is_token[:, None] & in_width[None, :])


@triton.jit(do_not_specialize=["num_tokens", "first_row"])
def add_rows_kernel(
    addresses, peer_row, destinations, out, num_tokens, first_row, width, experts_per_rank,
    W: tl.constexpr, K: tl.constexpr, K_PAD: tl.constexpr, ALIGNED: tl.constexpr, BT: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """out[t] = sum of row first_row + t over the ranks with an expert of the token, in the order of ranks."""
    token = tl.program_id(0) * BT + tl.arange(0, BT)
    column = tl.program_id(1) * BD + tl.arange(0, BD)
    is_token, in_width = token < num_tokens, column < width
    number = tl.arange(0, K_PAD)
    at = destinations + token[:, None].to(tl.int64) * K + number[None, :]
    destination = tl.load(at, mask=is_token[:, None] & (number < K)[None, :], other=-1)
    ranks = tl.where(destination >= 0, destination // experts_per_rank, -1)
    row = (first_row + token)[:, None].to(tl.int64) * peer_row + column[None, :]
    total = tl.zeros((BT, BD), tl.float32)
    for rank in tl.static_range(W):
        is_needed = tl.max((ranks == rank).to(tl.int32), 1) != 0
        mask = is_needed[:, None] & in_width[None, :]
        total += tl.load(_pointer(addresses, rank, out, ALIGNED) + row, mask=mask, other=0.0).to(tl.float32)
    at = out + token[:, None].to(tl.int64) * width + column[None, :]
    tl.store(at, total.to(out.dtype.element_ty), mask=is_token[:, None] & in_width[None, :])
