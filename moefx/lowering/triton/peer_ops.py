"""Providers "triton" of `ir.ops.peer_rows`: they read and add up rows in the memory of other ranks.

A program reads from one rank at a time, through the table of the ranks' addresses.
"""

from __future__ import annotations

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor
from triton import next_power_of_2

from .launch import cdiv, choose_block, launch, use_device
from .weight_operands import build_address_table


@triton.jit
def _pointer(addresses, rank, like, ALIGNED: tl.constexpr):
    """Return the pointer to a rank's rows, whose elements have the dtype of `like`."""
    rows = tl.load(addresses + rank).to(tl.pointer_type(like.dtype.element_ty))
    return tl.multiple_of(rows, 16) if ALIGNED else rows


@triton.jit(do_not_specialize=["num_tokens"])
def read_rows_kernel(
    addresses, peer_row, slots, out, num_tokens, width, num_slots,
    K: tl.constexpr, K_PAD: tl.constexpr, ALIGNED: tl.constexpr, BT: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """out[rank * num_tokens + t] = row t of the rank if one of the token's slots is here, else 0."""
    rank = tl.program_id(2)
    token = tl.program_id(0) * BT + tl.arange(0, BT)
    column = tl.program_id(1) * BD + tl.arange(0, BD)
    there, in_width = token < num_tokens, column < width
    row = rank.to(tl.int64) * num_tokens + token
    number = tl.arange(0, K_PAD)
    slot = tl.load(slots + row[:, None] * K + number[None, :], mask=there[:, None] & (number < K)[None, :], other=-1)
    is_needed = tl.max(((slot >= 0) & (slot < num_slots)).to(tl.int32), 1) != 0
    at = _pointer(addresses, rank, out, ALIGNED) + token[:, None].to(tl.int64) * peer_row + column[None, :]
    value = tl.load(at, mask=is_needed[:, None] & in_width[None, :], other=0)
    tl.store(out + row[:, None] * width + column[None, :], value, mask=there[:, None] & in_width[None, :])


@triton.jit(do_not_specialize=["num_tokens", "first_row"])
def add_rows_kernel(
    addresses, peer_row, place, out, num_tokens, first_row, width, num_slots,
    W: tl.constexpr, K: tl.constexpr, K_PAD: tl.constexpr, ALIGNED: tl.constexpr, BT: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """out[t] = sum over the ranks with one of the token's slots of their row first_row + t, in the order of ranks."""
    token = tl.program_id(0) * BT + tl.arange(0, BT)
    column = tl.program_id(1) * BD + tl.arange(0, BD)
    there, in_width = token < num_tokens, column < width
    number = tl.arange(0, K_PAD)
    at = place + token[:, None].to(tl.int64) * K + number[None, :]
    destination = tl.load(at, mask=there[:, None] & (number < K)[None, :], other=-1)
    ranks = tl.where(destination >= 0, destination // num_slots, -1)
    row = (first_row + token)[:, None].to(tl.int64) * peer_row + column[None, :]
    total = tl.zeros((BT, BD), tl.float32)
    for rank in tl.static_range(W):
        is_needed = tl.max((ranks == rank).to(tl.int32), 1) != 0
        mask = is_needed[:, None] & in_width[None, :]
        total += tl.load(_pointer(addresses, rank, out, ALIGNED) + row, mask=mask, other=0.0).to(tl.float32)
    at = out + token[:, None].to(tl.int64) * width + column[None, :]
    tl.store(at, total.to(out.dtype.element_ty), mask=there[:, None] & in_width[None, :])


def read_rows(peers: Sequence[Tensor], slots: Tensor, *, num_slots: int) -> Tensor:
    """See `ir.ops.peer_rows.read_rows`."""
    num_tokens, width = peers[0].shape
    out = peers[0].new_empty((slots.shape[0], width))
    if out.numel():
        bt, bd = choose_block(width)
        with use_device(out.device):
            table, is_aligned = _build_table(peers)
            launch(
                read_rows_kernel,
                (cdiv(num_tokens, bt), cdiv(width, bd), len(peers)),
                (table, peers[0].stride(0), slots.contiguous(), out, num_tokens, width, num_slots),
                dict(**_slots_of(slots), ALIGNED=is_aligned, BT=bt, BD=bd),
            )
    return out


def add_rows(peers: Sequence[Tensor], place: Tensor, *, num_slots: int, first_row: int) -> Tensor:
    """See `ir.ops.peer_rows.add_rows`."""
    num_tokens, width = place.shape[0], peers[0].shape[1]
    out = peers[0].new_empty((num_tokens, width))
    if out.numel():
        bt, bd = choose_block(width)
        with use_device(out.device):
            table, is_aligned = _build_table(peers)
            launch(
                add_rows_kernel,
                (cdiv(num_tokens, bt), cdiv(width, bd)),
                (table, peers[0].stride(0), place.contiguous(), out, num_tokens, first_row, width, num_slots),
                dict(W=len(peers), **_slots_of(place), ALIGNED=is_aligned, BT=bt, BD=bd),
            )
    return out


def _build_table(peers: Sequence[Tensor]) -> tuple[Tensor, bool]:
    """Return the addresses of the ranks' rows, and whether all are multiples of 16 bytes."""
    addresses = tuple([peer.data_ptr() for peer in peers])
    return build_address_table(addresses, peers[0].device), not any(a % 16 for a in addresses)


def _slots_of(destinations: Tensor) -> dict[str, int]:
    return {"K": destinations.shape[1], "K_PAD": next_power_of_2(destinations.shape[1])}
