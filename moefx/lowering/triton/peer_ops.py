"""Providers "triton" of `ir.ops.peer_rows`: they read and add up rows in the memory of other ranks."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor
from triton import next_power_of_2

from .launch import cdiv, choose_block, launch, use_device
from .peer_kernels import add_rows_kernel, read_rows_kernel
from .weight_operands import build_address_table


def read_rows(peers: Sequence[Tensor], local_experts: Tensor, *, experts_per_rank: int) -> Tensor:
    """See `ir.ops.peer_rows.read_rows`."""
    num_tokens, width = peers[0].shape
    out = peers[0].new_empty((local_experts.shape[0], width))
    if out.numel():
        bt, bd = choose_block(width)
        with use_device(out.device):
            table, is_aligned = _build_table(peers)
            launch(
                read_rows_kernel,
                (cdiv(num_tokens, bt), cdiv(width, bd), len(peers)),
                (table, peers[0].stride(0), local_experts.contiguous(), out, num_tokens, width, experts_per_rank),
                dict(**_slots_of(local_experts), ALIGNED=is_aligned, BT=bt, BD=bd),
            )
    return out


def add_rows(peers: Sequence[Tensor], place: Tensor, *, experts_per_rank: int, first_row: int) -> Tensor:
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
                (table, peers[0].stride(0), place.contiguous(), out, num_tokens, first_row, width, experts_per_rank),
                dict(W=len(peers), **_slots_of(place), ALIGNED=is_aligned, BT=bt, BD=bd),
            )
    return out


def _build_table(peers: Sequence[Tensor]) -> tuple[Tensor, bool]:
    """Return the addresses of the ranks' rows, and whether all are multiples of 16 bytes."""
    addresses = tuple([peer.data_ptr() for peer in peers])
    return build_address_table(addresses, peers[0].device), not any(a % 16 for a in addresses)


def _slots_of(destinations: Tensor) -> dict[str, int]:
    return {"K": destinations.shape[1], "K_PAD": next_power_of_2(destinations.shape[1])}
