"""Exchange rows with the ranks that hold their experts (X-MoE sections 4.1 and 4.2).

With dedup, a token sends one row to each rank that holds one of its experts. Without, it sends one row for each slot. A
row carries the token's values and, for each slot, the routing weight and the local id of the expert on the receiver (-1
if the expert is elsewhere). The receiver routes it like a token of its own: by the next hop, or by `build_pft` and
`expert_mlp` after the last hop. The result of each row returns, and the sender sums results by token.

`all_to_all_rows` and `all_to_all_back` start a collective; `wait_rows` and `wait_sums` wait for it. Nodes in between
overlap with it. The backward mirrors this: the backward of a wait starts a collective, and the backward of a start
waits for it. Autograd requires a gradient to have the shape of its tensor, and a gradient in transit has as many rows
as the rank sent or received. So each start returns two tensors: the rows in transit, without a gradient, and a
*ticket*. The ticket has no memory; its gradient is the tensor in transit.

Letters: S tokens, K slots, B = S*K, W ranks of the hop, N rows sent, R rows received, J slots of a row (K with dedup,
    otherwise 1), P parts. `splits` [2,W] is on the host, see `exchange_routes`.

Ranks without rows take part in each collective.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .op_definition import fill_gradients, op, unpack_saved
from .row_packing import Column, RowLayout, build_row_layout, join_columns, make_ticket, pack_rows, split_columns
from .token_routing import build_pft_backward, combine
from .uneven_all_to_all import start_all_to_all, wait_for_collective, wait_for_collectives

_PLAN = "Tensor token_ids, Tensor slot_ids, Tensor rank_offsets, Tensor inverse, Tensor splits"
_PLAN_SHAPES = "token_ids[B], slot_ids[B], rank_offsets[E+1], inverse[S,K], splits[_,E]"


class _SendPlan(NamedTuple):
    """The arguments that all exchanges of a hop take: the results of `plan_dispatch`, and `splits` of `read_counts`."""

    token_ids: Tensor
    slot_ids: Tensor
    rank_offsets: Tensor
    inverse: Tensor
    splits: Tensor

    def sum_by_token(self, rows: Tensor) -> Tensor:
        """Sum the rows sent [N,D] by token, [S,D]."""
        return combine(rows, None, self.token_ids[: rows.shape[0]], self.rank_offsets, self.inverse)


def _read_splits(splits: Tensor) -> tuple[list[int], list[int]]:
    """Return the number of rows for each rank, and from each rank."""
    send_counts, receive_counts = splits.tolist()
    return send_counts, receive_counts


# -- layout of rows


class _RowColumns(NamedTuple):
    """The columns of a row, without the local ids.

    Attributes:
        token_values: columns with one value for each token. slot_values: columns with one for each slot. width: J, the
            number of slots of a row.
    """

    token_values: list[Column]
    slot_values: list[Column]
    width: int

    @classmethod
    def of(
        cls, token_values: Sequence[Tensor], slot_values: Sequence[Tensor], destinations: Tensor, dedup: bool
    ) -> _RowColumns:
        width = destinations.shape[1] if dedup else 1
        return cls([*map(Column.of, token_values)], [Column(c.dtype, width) for c in slot_values], width)

    @property
    def gradients(self) -> RowLayout:
        return RowLayout([c for c in (*self.token_values, *self.slot_values) if c.dtype.is_floating_point])

    def ticket(self, template: Tensor, num_rows: Any) -> Tensor:
        """Return a ticket of the width of the packed gradients, on the device of `template`."""
        layout = self.gradients
        dtype = layout.columns[0].dtype
        return make_ticket(template, num_rows, layout.num_bytes // dtype.itemsize, dtype)


# -- dispatch


@op(
    f"all_to_all_rows(Tensor[] tokens, Tensor[] choices, Tensor place, Tensor? packed, {_PLAN}, *, int num_slots, "
    "bool dedup, str group) -> (Tensor, Tensor)",
    contract=f"tokens[*], choices[*], place[S,K], packed[_,_]?, {_PLAN_SHAPES} -> sent[_,_], ticket[_,_]",
)
def all_to_all_rows(
    token_values: list[Tensor],
    slot_values: list[Tensor],
    destinations: Tensor,
    packed: Tensor | None,
    *plan: Tensor,
    num_slots: int,
    dedup: bool,
    group: str,
) -> tuple[Tensor, Tensor]:
    """Start to send the rows of this rank's tokens to the ranks of their experts.

    Args:
        token_values: [S,D] each. slot_values: [S,K] each, such as routing weights. Differentiable.
        packed: result of `pack_rows` if rows were packed before their number was known; None to pack them here.

    Returns:
        The rows in transit as bytes, and the ticket.
    """
    send_plan = _SendPlan(*plan)
    send_counts, receive_counts = _read_splits(send_plan.splits)
    if packed is None:
        sizes = {"num_rows": sum(send_counts), "num_slots": num_slots, "dedup": dedup}
        rows = pack_rows(token_values, slot_values, destinations, *plan[:3], **sizes)
    else:
        rows = packed[: sum(send_counts)]
    values = _RowColumns.of(token_values, slot_values, destinations, dedup)
    return start_all_to_all(rows, send_counts, receive_counts, group), values.ticket(destinations, sum(send_counts))


@op(
    f"all_to_all_rows_backward(Tensor sent, {_PLAN}, *, str[] dtypes, SymInt[] widths, int num_tokens, "
    "bool dedup) -> Tensor[]",
    contract=f"sent[_,_], {_PLAN_SHAPES} -> gradients[*]",
)
def all_to_all_rows_backward(
    sent: Tensor, *plan: Tensor, dtypes: list[str], widths: list[int], num_tokens: int, dedup: bool
) -> list[Tensor]:
    """Wait for the gradients of the rows, and sum them by token.

    Args:
        dtypes, widths: of the columns with a gradient. num_tokens: number of columns with values of tokens; the others
            hold values of slots.
    """
    send_plan = _SendPlan(*plan)
    columns = split_columns(
        [wait_for_collective(sent, in_backward=True).view(torch.uint8)], dtypes=dtypes, widths=widths
    )
    # Only the row to a slot's rank has a gradient for the slot: the sum over a token's rows adds zeros.
    return [
        send_plan.sum_by_token(column)
        if i < num_tokens or dedup
        else build_pft_backward(column[:, 0].contiguous(), send_plan.inverse)
        for i, column in enumerate(columns)
    ]


@op(
    "wait_rows(Tensor[] sent, Tensor[] tickets, Tensor[] splits, Tensor[] tokens, Tensor[] choices, Tensor place, *, "
    "int num_slots, bool dedup, str[] groups) -> Tensor[]",
    contract="sent[*], tickets[*], splits[*], tokens[*], choices[*], place[S,K] -> rows[*]",
)
def wait_rows(
    sent: list[Tensor],
    tickets: list[Tensor],
    splits: list[Tensor],
    token_values: list[Tensor],
    slot_values: list[Tensor],
    destinations: Tensor,
    *,
    num_slots: int,
    dedup: bool,
    groups: list[str],
) -> list[Tensor]:
    """Wait for the rows of P exchanges.

    Args:
        token_values, slot_values, destinations: the arguments of the start, for dtypes and widths.

    Returns:
        For the rows received, in the order of the parts and of their source ranks: values of tokens [R,D], local ids
        int32 [R,J], and values of slots [R,J].
    """
    columns = build_row_layout(
        token_values, slot_values, destinations, destinations_per_rank=num_slots, dedup=dedup
    ).columns
    buffers = wait_for_collectives(sent)
    column_arguments = {"dtypes": [c.dtype_name for c in columns], "widths": [c.width for c in columns]}
    *received_columns, local_ids = split_columns(buffers, **column_arguments, places=True)
    return [*received_columns[: len(token_values)], local_ids, *received_columns[len(token_values) :]]


@op(
    "wait_rows_backward(Tensor[] grads, Tensor[] tickets, Tensor[] splits, *, str[] groups) -> Tensor[]",
    contract="grads[*], tickets[*], splits[*] -> sent[*]",
)
def wait_rows_backward(
    grads: list[Tensor], tickets: list[Tensor], splits: list[Tensor], *, groups: list[str]
) -> list[Tensor]:
    """Start to send the gradients of the rows back. The tensor in transit of a part is the gradient of its ticket."""
    begin, in_transit = 0, []
    for ticket, part_splits, group in zip(tickets, splits, groups, strict=True):
        send_counts, receive_counts = _read_splits(part_splits)
        rows = join_columns([g[begin : begin + sum(receive_counts)] for g in grads])
        begin += sum(receive_counts)
        in_transit.append(start_all_to_all(rows.view(ticket.dtype), receive_counts, send_counts, group))
    return in_transit


# -- combine


@op(
    "all_to_all_back(Tensor rows, Tensor[] splits, Tensor[] tickets, *, str[] groups) -> Tensor[]",
    contract="rows[R,D], splits[*], tickets[*] -> sent[*]",
)
def all_to_all_back(rows: Tensor, splits: list[Tensor], tickets: list[Tensor], *, groups: list[str]) -> list[Tensor]:
    """Start to send the results of the rows received [R,D] back to their source ranks.

    Args:
        tickets: of the exchanges that brought the parts, for the numbers of rows.

    Returns:
        The rows in transit [N,D] of each part, then the ticket of each part.
    """
    begin, in_transit, own_tickets = 0, [], []
    for part_splits, group in zip(splits, groups, strict=True):
        send_counts, receive_counts = _read_splits(part_splits)
        in_transit.append(
            start_all_to_all(rows[begin : begin + sum(receive_counts)], receive_counts, send_counts, group)
        )
        begin += sum(receive_counts)
        own_tickets.append(make_ticket(rows, sum(receive_counts), rows.shape[1], rows.dtype))
    return [*in_transit, *own_tickets]


@op(
    f"wait_sums(Tensor sent, Tensor ticket, {_PLAN}, *, str group) -> Tensor",
    contract=f"sent[_,D], ticket[_,D], {_PLAN_SHAPES} -> out[S,D]",
)
def wait_sums(sent: Tensor, ticket: Tensor, *plan: Tensor, group: str) -> Tensor:
    """Wait for the results of the rows, and sum them by token, [S,D]."""
    return _SendPlan(*plan).sum_by_token(wait_for_collective(sent))


@op(
    f"wait_sums_backward(Tensor grad, Tensor ticket, {_PLAN}, *, str group) -> Tensor",
    contract=f"grad[S,D], ticket[_,D], {_PLAN_SHAPES} -> sent[_,D]",
)
def wait_sums_backward(grad: Tensor, ticket: Tensor, *plan: Tensor, group: str) -> Tensor:
    """Start to send the gradients of the rows, which equal those of their tokens' sums. The result is the gradient of
    the ticket."""
    send_plan = _SendPlan(*plan)
    send_counts, receive_counts = _read_splits(send_plan.splits)
    return start_all_to_all(
        grad.index_select(0, send_plan.token_ids[: sum(send_counts)]), send_counts, receive_counts, group
    )


# -- registration


def _unknown_size() -> Any:
    return torch.library.get_ctx().new_dynamic_size()


@all_to_all_rows.fake
def _(token_values, slot_values, destinations, packed, *plan, num_slots, dedup, group):
    values = _RowColumns.of(token_values, slot_values, destinations, dedup)
    num_bytes = build_row_layout(
        token_values, slot_values, destinations, destinations_per_rank=num_slots, dedup=dedup
    ).num_bytes
    sent = destinations.new_empty((_unknown_size(), num_bytes), dtype=torch.uint8)
    return sent, values.ticket(destinations, _unknown_size())


@all_to_all_rows_backward.fake
def _(sent, token_ids, slot_ids, rank_offsets, inverse, splits, *, dtypes, widths, num_tokens, dedup):
    sizes = [(inverse.shape[0], w if i < num_tokens else inverse.shape[1]) for i, w in enumerate(widths)]
    columns = zip(sizes, RowLayout.of(dtypes, widths).columns, strict=True)
    return [inverse.new_empty(size, dtype=column.dtype) for size, column in columns]


@wait_rows.fake
def _(sent, tickets, splits, token_values, slot_values, destinations, *, num_slots, dedup, groups):
    num = sum(part.shape[0] for part in sent)
    values = _RowColumns.of(token_values, slot_values, destinations, dedup)
    local_ids = Column(torch.int32, values.width)
    return [
        destinations.new_empty((num, c.width), dtype=c.dtype)
        for c in (*values.token_values, local_ids, *values.slot_values)
    ]


wait_rows_backward.fake(lambda grads, tickets, splits, *, groups: [t.new_empty(t.shape) for t in tickets])


@all_to_all_back.fake
def _(rows, splits, tickets, *, groups):
    in_transit = [rows.new_empty((t.shape[0], rows.shape[1])) for t in tickets]
    # A single part has all rows; with several parts the sizes are unknown.
    sizes = [rows.shape[0]] if len(tickets) == 1 else [_unknown_size() for _ in tickets]
    return [*in_transit, *(make_ticket(rows, size, rows.shape[1], rows.dtype) for size in sizes)]


@wait_sums.fake
def _(sent, ticket, token_ids, slot_ids, rank_offsets, inverse, splits, *, group):
    return sent.new_empty((inverse.shape[0], sent.shape[1]))


wait_sums_backward.fake(lambda grad, ticket, *plan, group: ticket.new_empty(ticket.shape))


# -- derivatives


def _save_rows(ctx: Any, args: Sequence[Any], kwargs: dict[str, Any], outputs: Sequence[Tensor]) -> None:
    token_values, slot_values, destinations, _, *plan = args
    ctx.floats = [[t.is_floating_point() for t in ts] for ts in (token_values, slot_values)]
    columns = _RowColumns.of(token_values, slot_values, destinations, kwargs["dedup"]).gradients.columns
    ctx.kwargs = {
        "dtypes": [c.dtype_name for c in columns],
        "widths": [c.width for c in columns],
        "num_tokens": sum(ctx.floats[0]),
        "dedup": kwargs["dedup"],
    }
    ctx.mark_non_differentiable(outputs[0])
    ctx.save_for_backward(*plan)


def _rows_gradients(ctx: Any, grads: Sequence[Any]) -> Sequence[Any]:
    gradients = iter(all_to_all_rows_backward(grads[1], *unpack_saved(ctx), **ctx.kwargs))
    token_gradients, slot_gradients = (
        [next(gradients) if is_float else None for is_float in floats] for floats in ctx.floats
    )
    return token_gradients, slot_gradients, *(None,) * 7


all_to_all_rows.autograd(save=_save_rows, backward=_rows_gradients)
all_to_all_rows_backward.once_differentiable("all_to_all_rows")


def _save_wait_rows(ctx: Any, args: Sequence[Any], kwargs: dict[str, Any], outputs: Sequence[Tensor]) -> None:
    sent, tickets, splits, *_ = args
    ctx.num_parts, ctx.groups = len(sent), kwargs["groups"]
    ctx.outputs = [(o.shape, o.dtype, o.device) for o in outputs]
    ctx.mark_non_differentiable(*(o for o in outputs if not o.is_floating_point()))
    ctx.save_for_backward(*tickets, *splits)


def _wait_rows_gradients(ctx: Any, grads: Sequence[Any]) -> Sequence[Any]:
    saved, num_parts = unpack_saved(ctx), ctx.num_parts
    present_grads = fill_gradients(grads, ctx.outputs)
    sent = wait_rows_backward(present_grads, list(saved[:num_parts]), list(saved[num_parts:]), groups=ctx.groups)
    return None, sent, *(None,) * 4


wait_rows.autograd(save=_save_wait_rows, backward=_wait_rows_gradients)
wait_rows_backward.once_differentiable("all_to_all_rows")


def _save_back(ctx: Any, args: Sequence[Any], kwargs: dict[str, Any], outputs: Sequence[Tensor]) -> None:
    ctx.num_parts = len(args[1])
    ctx.mark_non_differentiable(*outputs[: ctx.num_parts])


def _back_gradients(ctx: Any, grads: Sequence[Any]) -> Sequence[Any]:
    parts = wait_for_collectives(grads[ctx.num_parts :], in_backward=True)
    return (parts[0] if len(parts) == 1 else torch.cat(parts)), None, None


all_to_all_back.autograd(save=_save_back, backward=_back_gradients)


def _save_sums(ctx: Any, args: Sequence[Any], kwargs: dict[str, Any], outputs: Any) -> None:
    ctx.group = kwargs["group"]
    ctx.save_for_backward(*args[1:])


wait_sums.autograd(
    save=_save_sums,
    backward=lambda ctx, grads: (
        None,
        wait_sums_backward(grads[0], *unpack_saved(ctx), group=ctx.group),
        *(None,) * 5,
    ),
)
wait_sums_backward.once_differentiable("all_to_all_back")
