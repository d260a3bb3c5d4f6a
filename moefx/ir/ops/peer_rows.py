"""Pull the rows that this rank's experts need from the memory of other ranks, and the sums of its own tokens.

Each rank shares its tokens, routing weights and destinations with the other ranks (`peer_memory`). It reads all
destinations and weights, but only the tokens with an expert on this rank. The rows are in the order of `token_gather`;
rows of other tokens are 0. Then the ranks share the sums of their experts, and each rank adds up those of its own
tokens, in the order of ranks, in float32. The backward mirrors this: it pulls the gradients of the sums, and adds up
the gradients of the tokens.

Sizes depend on the number of tokens alone. The host reads no result of the routing, and no buffer can overflow.

Letters: S tokens of this rank, L tokens of a rank with padding, A = W*L tokens of all W ranks, K slots.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .exchange_routes import find_destination_ranks
from .op_definition import fill_gradients, op, unpack_saved
from .peer_memory import shared_columns
from .token_gather import choose_length, make_fake_length
from .uneven_all_to_all import get_group

# -- kernels


@op(
    "read_rows(Tensor[] peers, Tensor local_experts, *, int experts_per_rank) -> Tensor",
    contract="peers[*], local_experts[A,K] -> rows[A,_]",
)
def read_rows(peers: list[Tensor], local_ids: Tensor, *, experts_per_rank: int) -> Tensor:
    """Read the rows of tokens with an expert on this rank, [A,D]. Other rows are 0.

    Args:
        peers: the tokens of each rank, [L,D].
        local_ids: of each slot, outside of [0, experts_per_rank) if the slot's expert is on another rank.
    """
    is_needed = ((local_ids >= 0) & (local_ids < experts_per_rank)).any(1)
    return torch.where(is_needed[:, None], torch.cat(list(peers)), 0)


@op(
    "add_rows(Tensor[] peers, Tensor place, *, int experts_per_rank, int first_row) -> Tensor",
    contract="peers[*], place[S,K] -> sums[S,_]",
)
def add_rows(peers: list[Tensor], destinations: Tensor, *, experts_per_rank: int, first_row: int) -> Tensor:
    """Add up the rows of this rank's tokens from the ranks with one of their experts, [S,D]: in the order of ranks, in
    float32 or wider, rounded once.

    Args:
        peers: the rows of each rank, [A,D]. destinations: see `exchange_routes`. first_row: the row of this rank's
            first token.
    """
    rows, ranks = (
        slice(first_row, first_row + destinations.shape[0]),
        find_destination_ranks(destinations, experts_per_rank),
    )
    wide = torch.promote_types(peers[0].dtype, torch.float32)
    total = torch.zeros((destinations.shape[0], peers[0].shape[1]), dtype=wide, device=destinations.device)
    for rank, peer_rows in enumerate(peers):
        total += torch.where((ranks == rank).any(1)[:, None], peer_rows[rows], 0)
    return total.to(peers[0].dtype)


# -- tokens to experts


@op(
    "pull_tokens(Tensor[] tokens, Tensor[] choices, Tensor place, Tensor? length, *, int max_tokens, int first_place, "
    "int experts_per_rank, int size, str group) -> Tensor[]",
    contract="tokens[*], choices[*], place[S,K], length[1]? -> rows[*]",
)
def pull_tokens(
    token_values: list[Tensor],
    slot_values: list[Tensor],
    destinations: Tensor,
    length: Tensor | None,
    *,
    max_tokens: int,
    first_place: int,
    experts_per_rank: int,
    size: int,
    group: str,
) -> list[Tensor]:
    """Pull the tokens with an expert on this rank, and the slots of all tokens.

    Args:
        token_values: [S,D] each. slot_values: [S,K] each, such as routing weights. Differentiable.
        destinations: of each slot, see `exchange_routes`; -1 for padding.
        length: L, from `agree_length`; None for `max_tokens`.
        first_place: this rank's first destination. experts_per_rank: its number of destinations. size: W.

    Returns:
        Values of tokens [A,D], local ids int32 [A,K], then values of slots [A,K].
    """
    rows = choose_length(destinations.shape[0], length, max_tokens)
    with shared_columns([*token_values, *slot_values, destinations], rows, group, room=rows * size) as peers:
        *values, all_destinations = (
            torch.cat(columns) for columns in zip(*(p[len(token_values) :] for p in peers), strict=True)
        )
        local_ids = all_destinations - first_place
        token_columns = [
            read_rows([p[i] for p in peers], local_ids, experts_per_rank=experts_per_rank)
            for i in range(len(token_values))
        ]
    return [*token_columns, local_ids, *values]


@op(
    "pull_tokens_backward(Tensor[] grads, Tensor place, *, int experts_per_rank, str group) -> Tensor[]",
    contract="grads[*], place[S,K] -> gradients[*]",
)
def pull_tokens_backward(
    grads: list[Tensor], destinations: Tensor, *, experts_per_rank: int, group: str
) -> list[Tensor]:
    """Add up the gradients of this rank's tokens [S,D] and slots [S,K], from those of each rank, [A,...]."""
    return _add_own_rows(grads, destinations, experts_per_rank, group)


# -- sums to the ranks of the tokens


@op(
    "pull_sums(Tensor sums, Tensor local_experts, Tensor place, *, int experts_per_rank, int size, "
    "str group) -> Tensor",
    contract="sums[A,D], local_experts[A,K], place[S,K] -> out[S,D]",
)
def pull_sums(
    sums: Tensor, local_ids: Tensor, destinations: Tensor, *, experts_per_rank: int, size: int, group: str
) -> Tensor:
    """Add up the ranks' sums of this rank's tokens, [S,D].

    Args:
        sums: this rank's sums, for the tokens of all ranks. local_ids: as from `pull_tokens`.
    """
    return _add_own_rows([sums], destinations, experts_per_rank, group)[0]


@op(
    "pull_sums_backward(Tensor grad, Tensor local_experts, *, int experts_per_rank, int size, str group) -> Tensor",
    contract="grad[S,D], local_experts[A,K] -> grads[A,D]",
)
def pull_sums_backward(grad: Tensor, local_ids: Tensor, *, experts_per_rank: int, size: int, group: str) -> Tensor:
    """Pull the gradients of the sums of tokens with an expert on this rank, [A,D]. Other rows are 0."""
    with shared_columns([grad], local_ids.shape[0] // size, group) as peers:
        return read_rows([column for (column,) in peers], local_ids, experts_per_rank=experts_per_rank)


def _add_own_rows(columns: list[Tensor], destinations: Tensor, experts_per_rank: int, group: str) -> list[Tensor]:
    """Add up the rows of this rank's tokens over the ranks, for columns of the tokens of all ranks."""
    num_rows, process_group = columns[0].shape[0], get_group(group)
    first_row = num_rows // process_group.size() * process_group.rank()
    with shared_columns(columns, num_rows, group) as peers:
        return [
            add_rows(list(column), destinations, experts_per_rank=experts_per_rank, first_row=first_row)
            for column in zip(*peers, strict=True)
        ]


# -- registration

read_rows.fake(lambda peers, local_ids, **_: peers[0].new_empty((local_ids.shape[0], peers[0].shape[1])))
add_rows.fake(lambda peers, destinations, **_: peers[0].new_empty((destinations.shape[0], peers[0].shape[1])))


@pull_tokens.fake
def _(token_values, slot_values, destinations, length, *, max_tokens, first_place, experts_per_rank, size, group):
    num_rows = size * make_fake_length(length, max_tokens)
    return [t.new_empty((num_rows, t.shape[1])) for t in (*token_values, destinations, *slot_values)]


@pull_tokens_backward.fake
def _(grads, destinations, *, experts_per_rank, group):
    return [grad.new_empty((destinations.shape[0], grad.shape[1])) for grad in grads]


pull_sums.fake(lambda sums, local_ids, destinations, **_: sums.new_empty((destinations.shape[0], sums.shape[1])))
pull_sums_backward.fake(lambda grad, local_ids, **_: grad.new_empty((local_ids.shape[0], grad.shape[1])))


# -- derivatives

read_rows.without_gradient()
add_rows.without_gradient()


def _save_pull(ctx: Any, args: Sequence[Any], kwargs: dict[str, Any], outputs: Sequence[Tensor]) -> None:
    token_values, slot_values, destinations, _ = args
    ctx.kwargs = {name: kwargs[name] for name in ("experts_per_rank", "group")}
    ctx.floats = [[t.is_floating_point() for t in ts] for ts in (token_values, slot_values)]
    ctx.outputs = [(o.shape, o.dtype, o.device) for o in outputs]
    ctx.mark_non_differentiable(*(o for o in outputs if not o.is_floating_point()))
    ctx.save_for_backward(destinations)


def _pull_gradients(ctx: Any, grads: Sequence[Any]) -> Sequence[Any]:
    (destinations,) = unpack_saved(ctx)
    gradients = iter(pull_tokens_backward(fill_gradients(grads, ctx.outputs), destinations, **ctx.kwargs))
    token_gradients, slot_gradients = (
        [next(gradients) if is_float else None for is_float in floats] for floats in ctx.floats
    )
    return token_gradients, slot_gradients, None, None


pull_tokens.autograd(save=_save_pull, backward=_pull_gradients)
pull_tokens_backward.once_differentiable("pull_tokens")


def _save_sums(ctx: Any, args: Sequence[Any], kwargs: dict[str, Any], outputs: Any) -> None:
    sums, local_ids, _ = args
    ctx.kwargs, ctx.dtype = kwargs, sums.dtype
    ctx.save_for_backward(local_ids)


pull_sums.autograd(
    save=_save_sums,
    backward=lambda ctx, grads: (
        pull_sums_backward(grads[0].to(ctx.dtype), *unpack_saved(ctx), **ctx.kwargs),
        None,
        None,
    ),
)
pull_sums_backward.once_differentiable("pull_sums")
