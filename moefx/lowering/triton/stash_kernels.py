"""Put activations of an expert MLP into the stash, and take them out: see `ir.activation_stash`."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...ir.activation_stash import MISSED, TICKET_SIZE, Stash
from ...ir.running_block import running
from .launch import cdiv, choose_block
from .launch_replay import empty, launch


@triton.jit(do_not_specialize=["counter", "num_ring_rows"])
def reserve_kernel(expert_offsets, cursor, ticket, E, counter, num_ring_rows, MISSED: tl.constexpr):
    """ticket = first row, number of rows, counter. Rows that no ring of this size can hold are not reserved."""
    num_rows = tl.load(expert_offsets + E).to(tl.int64)
    fits = num_rows <= num_ring_rows
    start = tl.atomic_add(cursor, num_rows, mask=fits)
    tl.store(ticket, tl.where(fits, start, MISSED))
    tl.store(ticket + 1, num_rows)
    tl.store(ticket + 2, counter.to(tl.int64))


@triton.jit
def _is_stored(ticket, cursor, num_ring_rows):
    """Whether the ring still has the rows of a ticket."""
    start, seen = tl.load(ticket), tl.load(cursor)
    return (start + tl.load(ticket + 1) <= seen) & (seen - start <= num_ring_rows)


@triton.jit(do_not_specialize=["num_ring_rows"])
def move_rows_kernel(
    rows,
    ring,
    ring_row,
    ticket,
    cursor,
    width,
    num_ring_rows,
    TO_RING: tl.constexpr,
    BT: tl.constexpr,
    BD: tl.constexpr,
):
    """ring[(start + r) % num_ring_rows] = rows[r], or the other way round. Moves nothing of a missed ticket."""
    num_rows, row = tl.load(ticket + 1), tl.program_id(0) * BT + tl.arange(0, BT)
    if (tl.program_id(0) * BT < num_rows) & _is_stored(ticket, cursor, num_ring_rows):
        column = tl.program_id(1) * BD + tl.arange(0, BD)
        mask = (row < num_rows)[:, None] & (column < width)[None, :]
        at_rows = rows + row[:, None].to(tl.int64) * width + column[None, :]
        at_ring = ring + ((tl.load(ticket) + row) % num_ring_rows)[:, None] * ring_row + column[None, :]
        if TO_RING:
            tl.store(at_ring, tl.load(at_rows, mask=mask), mask=mask)
        else:
            tl.store(at_rows, tl.load(at_ring, mask=mask), mask=mask)


@triton.jit(do_not_specialize=["num_ring_rows"])
def check_kernel(ticket, cursor, misses, expert_offsets, missing, num_ring_rows, E, E_BINS: tl.constexpr):
    """missing = the experts' offsets if the rows were missed, otherwise zeros. Counts a miss.

    Launched after `move_rows_kernel`: rows that were overwritten during the copy count as missed.
    """
    expert = tl.arange(0, E_BINS)
    offset = tl.load(expert_offsets + expert, mask=expert <= E, other=0)
    is_missed = 1 - _is_stored(ticket, cursor, num_ring_rows).to(tl.int32)
    tl.store(missing + expert, offset * is_missed, mask=expert <= E)
    tl.atomic_add(misses + tl.load(ticket + 2), is_missed.to(tl.int64), mask=tl.load(ticket + 1) > 0)


def put_rows(kept: Sequence[Tensor], expert_offsets: Tensor, stash: Stash) -> Tensor:
    """Put rows of several tensors, [B,F] each, into the stash. Returns the ticket."""
    device, num_ring_rows = expert_offsets.device, stash.num_rows
    ticket = empty((TICKET_SIZE,), torch.int64, device)
    args = (expert_offsets, stash.cursor, ticket, expert_offsets.shape[0] - 1, running.counter, num_ring_rows)
    launch(reserve_kernel, (1,), args, dict(MISSED=MISSED), warps=1)
    _move_rows(kept, stash, ticket, to_ring=True)
    return ticket


def take_rows(kept: Sequence[Tensor], expert_offsets: Tensor, stash: Stash, ticket: Tensor) -> Tensor:
    """Copy the rows of a ticket from the stash to `kept`.

    Returns:
        Offsets of the rows to compute again: `expert_offsets` if the ticket was missed, zeros otherwise.
    """
    _move_rows(kept, stash, ticket, to_ring=False)
    missing = empty(tuple(expert_offsets.shape), expert_offsets.dtype, expert_offsets.device)
    num_experts = expert_offsets.shape[0] - 1
    args = (ticket, stash.cursor, stash.misses, expert_offsets, missing, stash.num_rows, num_experts)
    launch(check_kernel, (1,), args, dict(E_BINS=triton.next_power_of_2(num_experts + 1)), warps=1)
    return missing


def _move_rows(columns: Sequence[Tensor], stash: Stash, ticket: Tensor, to_ring: bool) -> None:
    column = 0
    for rows in columns:
        num_rows, width = rows.shape
        bt, bd = choose_block(width, 4096)
        part = stash.rows[:, column : column + width]
        args = (rows, part, stash.rows.shape[1], ticket, stash.cursor, width, stash.num_rows)
        constants = dict(TO_RING=to_ring, BT=bt, BD=bd)
        launch(move_rows_kernel, (cdiv(num_rows, bt), cdiv(width, bd)), args, constants)
        column += width
