"""Gather the tokens of all ranks on every rank, and sum the results on the tokens' own ranks.

Each rank runs its own experts on the tokens of all ranks. A reduce-scatter adds up the ranks' sums of each token and
leaves a rank with its own tokens. Both collectives are even: their sizes depend on the number of tokens alone, so the
host reads nothing, and a CUDA graph can hold the whole exchange. The backward mirrors this: it gathers the gradients of
the sums, and scatters the sums of the tokens' gradients.

`gather_tokens` and `scatter_sums` start collectives, `wait_gathered` and `wait_scattered` wait for them. A start also
returns tickets, whose gradients are the tensors in transit of the backward (see `row_exchange`).

All ranks pad to one length L, the largest number of tokens of a rank. It is `max_tokens` if the plan names it.
Otherwise the hosts agree on it before each call (`agree_length`).

Letters: S tokens of this rank, L tokens of a rank with padding, A = W*L tokens of all W ranks, K slots.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ...errors import InvalidInput, RanksLost
from .op_definition import copy_unless_joined, fill_gradients, op, unpack_saved
from .row_packing import Column, RowLayout, join_columns, make_ticket, pad_rows, split_columns
from .uneven_all_to_all import (
    format_ranks,
    get_group,
    raise_ranks_lost,
    refuse_capture,
    wait_for_collective,
    wait_for_collectives,
)

# -- lengths


@op(
    "agree_length(Tensor place, *, int fingerprint, str host_group) -> Tensor",
    contract="place[S,K] -> length[1]",
)
def agree_length(destinations: Tensor, *, fingerprint: int, host_group: str) -> Tensor:
    """Agree with the hosts of all ranks on the largest number of tokens, int64 [1] on the host. Reads no device memory.

    Args:
        fingerprint: identifies the program; ranks with different programs would mix their tokens.
        host_group: a process group whose backend works on the CPU.

    Raises:
        MoefxError: a CUDA graph is being captured, which cannot hold this step.
        RanksLost: another rank runs another program, or does not answer.
    """
    refuse_capture(destinations, "agrees on the number of tokens between hosts", "Plan(max_tokens=...)")
    group = get_group(host_group)
    length_and_fingerprint = torch.tensor([destinations.shape[0], fingerprint], dtype=torch.int64)
    answers = [torch.empty_like(length_and_fingerprint) for _ in range(group.size())]
    with raise_ranks_lost():
        dist.all_gather(answers, length_and_fingerprint, group=group)
    numbers = torch.stack(answers)
    if bool((numbers[:, 1] != fingerprint).any()):
        ranks = dist.get_process_group_ranks(group)
        other_ranks = [ranks[i] for i in (numbers[:, 1] != fingerprint).nonzero()[:, 0].tolist()]
        raise RanksLost(
            f"rank {dist.get_rank()} and {format_ranks(other_ranks)} run different programs of this block: give all "
            "ranks the same model, mode, dtypes and arguments"
        )
    return numbers[:, 0].amax().reshape(1)


def choose_length(num_tokens: Any, length: Tensor | None, max_tokens: int) -> Any:
    """Return L of a call.

    Raises:
        InvalidInput: this rank has more than `max_tokens`.
    """
    if length is not None:
        return int(length)
    if isinstance(num_tokens, int) and num_tokens > max_tokens:
        raise InvalidInput(
            f"this call has {num_tokens} tokens on rank {dist.get_rank()}, and Plan(max_tokens={max_tokens}) allows "
            "fewer: compile with a larger max_tokens, or give the ranks fewer tokens"
        )
    return max_tokens


def _build_slot_layout(slot_values: Sequence[Tensor], destinations: Tensor) -> RowLayout:
    """Return the layout of the buffer with the values and destinations of a token's slots."""
    return RowLayout([*map(Column.of, slot_values), Column(torch.int32, destinations.shape[1])])


# -- tokens to the experts


@op(
    "gather_tokens(Tensor[] tokens, Tensor[] choices, Tensor place, Tensor? length, *, int max_tokens, int size, "
    "str group) -> Tensor[]",
    contract="tokens[*], choices[*], place[S,K], length[1]? -> sent[*]",
)
def gather_tokens(
    token_values: list[Tensor],
    slot_values: list[Tensor],
    destinations: Tensor,
    length: Tensor | None,
    *,
    max_tokens: int,
    size: int,
    group: str,
) -> list[Tensor]:
    """Start to gather the tokens of all ranks.

    Args:
        token_values: [S,D] each. slot_values: [S,K] each, such as routing weights. Differentiable.
        destinations: of each slot, see `exchange_routes`; -1 for padding.
        length: L, from `agree_length`; None for `max_tokens`. size: W.

    Returns:
        The tensors in transit: each of `token_values`, [A,D], and one buffer of `slot_values` and `destinations`, uint8
        [A,bytes]. Then a ticket for each of `token_values` [L,D] and `slot_values` [L,K].
    """
    num_rows = choose_length(destinations.shape[0], length, max_tokens)
    columns = [pad_rows(values, num_rows) for values in slot_values] + [pad_rows(destinations, num_rows, -1)]
    gathered = start_gather(
        [*(pad_rows(values, num_rows) for values in token_values), join_columns(columns)], size, group
    )
    return [*gathered, *(make_ticket(values, num_rows, values.shape[1]) for values in (*token_values, *slot_values))]


@op(
    "gather_tokens_backward(Tensor[] sent, *, SymInt num_tokens) -> Tensor[]",
    contract="sent[*] -> gradients[*]",
)
def gather_tokens_backward(sent: list[Tensor], *, num_tokens: int) -> list[Tensor]:
    """Wait for the gradients of this rank's tokens and slots, and cut off the padding."""
    return [copy_unless_joined(part[:num_tokens]) for part in wait_for_collectives(sent, in_backward=True)]


@op(
    "wait_gathered(Tensor[] sent, Tensor[] tickets, Tensor[] choices, Tensor place, *, int first_place=0, int size, "
    "str group) -> Tensor[]",
    contract="sent[*], tickets[*], choices[*], place[S,K] -> rows[*]",
)
def wait_gathered(
    sent: list[Tensor],
    tickets: list[Tensor],
    slot_values: list[Tensor],
    destinations: Tensor,
    *,
    first_place: int = 0,
    size: int,
    group: str,
) -> list[Tensor]:
    """Wait for the tokens of all ranks, in the order of the process group.

    Returns:
        Values of tokens [A,D], destinations minus `first_place` int32 [A,K], then values of slots [A,K].
    """
    *token_values, packed = wait_for_collectives(sent)
    columns = _build_slot_layout(slot_values, destinations).columns
    column_arguments = {"dtypes": [c.dtype_name for c in columns], "widths": [c.width for c in columns]}
    *received_values, all_destinations = split_columns([packed], **column_arguments, places=False)
    return [
        *map(copy_unless_joined, token_values),
        all_destinations - first_place if first_place else all_destinations,
        *received_values,
    ]


@op(
    "wait_gathered_backward(Tensor[] grads, Tensor[] tickets, *, int size, str group) -> Tensor[]",
    contract="grads[*], tickets[*] -> sent[*]",
)
def wait_gathered_backward(grads: list[Tensor], tickets: list[Tensor], *, size: int, group: str) -> list[Tensor]:
    """Start to add up the gradients of each rank's tokens, [A,D], on that rank."""
    return start_scatter([grad.to(t.dtype) for grad, t in zip(grads, tickets, strict=True)], size, group)


# -- sums to the ranks of the tokens


@op(
    "scatter_sums(Tensor sums, *, int size, str group) -> (Tensor, Tensor)",
    contract="sums[A,D] -> sent[_,D], ticket[A,D]",
)
def scatter_sums(sums: Tensor, *, size: int, group: str) -> tuple[Tensor, Tensor]:
    """Start to add up the ranks' sums of each token, on the rank that has the token.

    Returns:
        The sums of this rank's tokens in transit, [L,D], and a ticket [A,D].
    """
    (sent,) = start_scatter([sums], size, group)
    return sent, make_ticket(sums, sums.shape[0], sums.shape[1])


@op(
    "wait_scattered(Tensor sent, Tensor ticket, Tensor place, *, int size, str group) -> Tensor",
    contract="sent[_,D], ticket[_,D], place[S,K] -> out[S,D]",
)
def wait_scattered(sent: Tensor, ticket: Tensor, destinations: Tensor, *, size: int, group: str) -> Tensor:
    """Wait for the sums of this rank's tokens, [S,D]."""
    rows = wait_for_collective(sent)
    return copy_unless_joined(rows) if rows.shape[0] == destinations.shape[0] else rows[: destinations.shape[0]].clone()


@op(
    "wait_scattered_backward(Tensor grad, Tensor ticket, *, int size, str group) -> Tensor",
    contract="grad[_,D], ticket[_,D] -> sent[_,D]",
)
def wait_scattered_backward(grad: Tensor, ticket: Tensor, *, size: int, group: str) -> Tensor:
    """Start to gather the gradients of all ranks' sums, [A,D]."""
    (sent,) = start_gather([pad_rows(grad.to(ticket.dtype), ticket.shape[0] // size)], size, group)
    return sent


def start_gather(parts: Sequence[Tensor], size: int, group: str) -> list[Tensor]:
    """Start one collective that gathers several tensors of all ranks."""
    if len(parts) == 1:
        return [torch.ops._c10d_functional.all_gather_into_tensor(parts[0], size, group)]
    return list(torch.ops._c10d_functional.all_gather_into_tensor_coalesced(list(parts), size, group))


def start_scatter(parts: Sequence[Tensor], size: int, group: str) -> list[Tensor]:
    """Start one collective that adds up several tensors over the ranks, and leaves each rank its part of the rows."""
    parts = [part.contiguous() for part in parts]
    if len(parts) == 1:
        return [torch.ops._c10d_functional.reduce_scatter_tensor(parts[0], "sum", size, group)]
    return list(torch.ops._c10d_functional.reduce_scatter_tensor_coalesced(parts, "sum", size, group))


# -- registration


def make_fake_length(length: Any, max_tokens: int) -> Any:
    return torch.library.get_ctx().new_dynamic_size() if length is not None else max_tokens


agree_length.fake(lambda destinations, **_: torch.empty(1, dtype=torch.int64))


@gather_tokens.fake
def _(token_values, slot_values, destinations, length, *, max_tokens, size, group):
    num_rows = make_fake_length(length, max_tokens)
    packed = destinations.new_empty(
        (size * num_rows, _build_slot_layout(slot_values, destinations).num_bytes), dtype=torch.uint8
    )
    gathered = [t.new_empty((size * num_rows, t.shape[1])) for t in token_values]
    return [*gathered, packed, *(make_ticket(t, num_rows, t.shape[1]) for t in (*token_values, *slot_values))]


@gather_tokens_backward.fake
def _(sent, *, num_tokens):
    return [part.new_empty((num_tokens, part.shape[1])) for part in sent]


@wait_gathered.fake
def _(sent, tickets, slot_values, destinations, *, first_place=0, size, group):
    num_rows = sent[-1].shape[0]
    values = [c.new_empty((num_rows, c.shape[1])) for c in slot_values]
    return [
        *(t.new_empty(t.shape) for t in sent[:-1]),
        destinations.new_empty((num_rows, destinations.shape[1])),
        *values,
    ]


wait_gathered_backward.fake(lambda grads, tickets, **_: [t.new_empty(t.shape) for t in tickets])


@scatter_sums.fake
def _(sums, *, size, group):
    return sums.new_empty((sums.shape[0] // size, sums.shape[1])), make_ticket(sums, sums.shape[0], sums.shape[1])


wait_scattered.fake(lambda sent, ticket, destinations, **_: sent.new_empty((destinations.shape[0], sent.shape[1])))
wait_scattered_backward.fake(lambda grad, ticket, **_: ticket.new_empty(ticket.shape))


# -- derivatives


def _save_gather(ctx: Any, args: Sequence[Any], kwargs: dict[str, Any], outputs: Sequence[Tensor]) -> None:
    token_values, slot_values, destinations, _ = args
    ctx.floats = [[t.is_floating_point() for t in ts] for ts in (token_values, slot_values)]
    ctx.num_tokens, ctx.num_sent = destinations.shape[0], len(token_values) + 1
    ctx.mark_non_differentiable(*outputs[: ctx.num_sent], *(o for o in outputs if not o.is_floating_point()))


def _gather_gradients(ctx: Any, grads: Sequence[Any]) -> Sequence[Any]:
    present_grads = [g for g in grads[ctx.num_sent :] if g is not None]
    gradients = iter(gather_tokens_backward(present_grads, num_tokens=ctx.num_tokens))
    token_gradients, slot_gradients = (
        [next(gradients) if is_float else None for is_float in floats] for floats in ctx.floats
    )
    return token_gradients, slot_gradients, None, None


gather_tokens.autograd(save=_save_gather, backward=_gather_gradients)
gather_tokens_backward.once_differentiable("gather_tokens")


def _save_wait_gathered(ctx: Any, args: Sequence[Any], kwargs: dict[str, Any], outputs: Sequence[Tensor]) -> None:
    sent, tickets, *_ = args
    ctx.kwargs, ctx.num_sent = {name: kwargs[name] for name in ("size", "group")}, len(sent)
    ctx.outputs = [(o.shape, o.dtype, o.device) for o in outputs]
    ctx.floats = [t.is_floating_point() for t in tickets]
    ctx.mark_non_differentiable(*(o for o in outputs if not o.is_floating_point()))
    ctx.save_for_backward(*(t for t in tickets if t.is_floating_point()))


def _wait_gathered_gradients(ctx: Any, grads: Sequence[Any]) -> Sequence[Any]:
    present_grads = fill_gradients(grads, ctx.outputs)
    sent = iter(wait_gathered_backward(present_grads, list(unpack_saved(ctx)), **ctx.kwargs))
    return None, [next(sent) if is_float else None for is_float in ctx.floats], None, None


wait_gathered.autograd(save=_save_wait_gathered, backward=_wait_gathered_gradients)
wait_gathered_backward.once_differentiable("gather_tokens")


def _save_scatter(ctx: Any, args: Sequence[Any], kwargs: dict[str, Any], outputs: Sequence[Tensor]) -> None:
    ctx.mark_non_differentiable(outputs[0])


scatter_sums.autograd(
    save=_save_scatter, backward=lambda ctx, grads: (wait_for_collective(grads[1], in_backward=True),)
)


def _save_scattered(ctx: Any, args: Sequence[Any], kwargs: dict[str, Any], outputs: Any) -> None:
    ctx.kwargs = kwargs
    ctx.save_for_backward(args[1])


wait_scattered.autograd(
    save=_save_scattered,
    backward=lambda ctx, grads: (None, wait_scattered_backward(grads[0], *unpack_saved(ctx), **ctx.kwargs), None),
)
wait_scattered_backward.once_differentiable("scatter_sums")
