"""Providers "triton" of `ir.ops.peer_rows`: they read and add up rows in the memory of other ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from triton import next_power_of_2

from .launch import cdiv, choose_block, launch, use_device
from .peer_kernels import add_rows_kernel, read_rows_kernel
from .weight_operands import build_address_table


def read_rows(peers: Sequence[Tensor], local_ids: Tensor, *, experts_per_rank: int) -> Tensor:
    """See `ir.ops.peer_rows.read_rows`."""
    num_tokens, width = peers[0].shape
    numbers = num_tokens, width, experts_per_rank
    return _launch(read_rows_kernel, peers, local_ids, num_tokens, numbers, ranks=(len(peers),))


def add_rows(peers: Sequence[Tensor], destinations: Tensor, *, experts_per_rank: int, first_row: int) -> Tensor:
    """See `ir.ops.peer_rows.add_rows`."""
    numbers = destinations.shape[0], first_row, peers[0].shape[1], experts_per_rank
    return _launch(add_rows_kernel, peers, destinations, destinations.shape[0], numbers, W=len(peers))


def _launch(
    kernel: Any,
    peers: Sequence[Tensor],
    entries_by_slot: Tensor,
    num_tokens: int,
    numbers: tuple[int, ...],
    ranks: tuple[int, ...] = (),
    **constants: int,
) -> Tensor:
    """Run a kernel that reads rows of all ranks, and return its rows: one for each row of `entries_by_slot`.

    Args:
        entries_by_slot: local ids or destinations, [rows,K].
        num_tokens: the rows that the programs of one rank compute. ranks: (W,) if each rank has its own programs.
        numbers: the kernel's arguments after the tensors.
    """
    (num_rows, top_k), width = entries_by_slot.shape, peers[0].shape[1]
    out = peers[0].new_empty((num_rows, width))
    if not out.numel():
        return out
    bt, bd = choose_block(width)
    addresses = tuple([peer.data_ptr() for peer in peers])
    constants |= {"K": top_k, "K_PAD": next_power_of_2(top_k), "BT": bt, "BD": bd}
    with use_device(out.device):
        launch(
            kernel,
            (cdiv(num_tokens, bt), cdiv(width, bd), *ranks),
            (
                build_address_table(addresses, out.device),
                peers[0].stride(0),
                entries_by_slot.contiguous(),
                out,
                *numbers,
            ),
            {**constants, "ALIGNED": not any(address % 16 for address in addresses)},
        )
    return out
