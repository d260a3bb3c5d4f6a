"""Rows on their way to the ranks that hold their experts, and back (X-MoE sections 4.1 and 4.2).

A row goes to each rank of a hop that one of its token's choices is at ("dedup"), or one row for each choice ("flat").
It takes along what the experts need: the token's values, and of each choice its place there (-1 where it is at another
rank) and its routing weight. What arrives is routed as if the tokens were the rank's own: by the next hop, or at last
by `build_pft` and `expert_mlp`. The sums of each row come back and are added up by token.

`all_to_all_rows` and `all_to_all_back` only start a collective, `wait_rows` and `wait_sums` wait for it; what stands
between them runs meanwhile. So does the backward, in reverse: the backward of a wait starts a collective, that of
a start waits for it. The gradient on its way there has rows as the rank sent or received them, and autograd wants it
to have the shape of what it is the gradient of. Each start therefore returns two tensors: the rows on their way, which
have no gradient, and a ticket, which has no values (nor memory): its gradient is what travels back.

Letters: S tokens, K choices, B = S*K, W ranks of the hop, N rows sent, R rows received, J choices of a row: K, or 1 in
    a flat exchange, P parts. `splits` [2,W] is on the host, see `exchange_routes`.

Ranks without rows take part as all others do.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .op_definition import op, unpack_saved
from .row_packing import Column, Layout, join_columns, layout_of_rows, pack_rows, split_columns
from .token_routing import build_pft_backward, combine
from .uneven_all_to_all import start, wait

_PLAN = "Tensor token_ids, Tensor slot_ids, Tensor rank_offsets, Tensor inverse, Tensor splits"
_PLAN_SHAPES = "token_ids[B], slot_ids[B], rank_offsets[E+1], inverse[S,K], splits[_,E]"


class _Plan(NamedTuple):
    """What `plan_dispatch` and `exchange_counts` found, the arguments of the exchanges."""

    token_ids: Tensor
    slot_ids: Tensor
    rank_offsets: Tensor
    inverse: Tensor
    splits: Tensor

    def summed(self, rows: Tensor) -> Tensor:
        """The rows sent [N,D] by token, [S,D]."""
        return combine(rows, None, self.token_ids[: rows.shape[0]], self.rank_offsets, self.inverse)


def _there_and_back(splits: Tensor) -> tuple[list[int], list[int]]:
    """Rows for each rank, and from each rank."""
    sent, received = splits.tolist()
    return sent, received


# -- what travels
# ------------------------------------------------------------------------------------------------------


class _Values(NamedTuple):
    """What travels with a row, but for the places of its choices.

    Attributes:
        tokens, choices: values of the token, and of each choice that its row has. width: J, of these.
    """

    tokens: list[Column]
    choices: list[Column]
    width: int

    @classmethod
    def like(cls, tokens: Sequence[Tensor], choices: Sequence[Tensor], place: Tensor, dedup: bool) -> _Values:
        width = place.shape[1] if dedup else 1
        return cls([*map(Column.of, tokens)], [Column(c.dtype, width) for c in choices], width)

    @property
    def gradients(self) -> Layout:
        return Layout([c for c in (*self.tokens, *self.choices) if c.dtype.is_floating_point])

    def ticket(self, like: Tensor, num_rows: Any) -> Tensor:
        """As wide as gradients are."""
        columns = self.gradients
        dtype = columns.columns[0].dtype
        return _ticket(like, num_rows, columns.num_bytes // dtype.itemsize, dtype)


def _ticket(like: Tensor, num_rows: Any, width: Any, dtype: torch.dtype) -> Tensor:
    return like.new_empty((), dtype=dtype).expand(num_rows, width)


# -- there
# ------------------------------------------------------------------------------------------------------


@op(
    f"all_to_all_rows(Tensor[] tokens, Tensor[] choices, Tensor place, Tensor? packed, {_PLAN}, *, int num_slots, "
    "bool dedup, str group) -> (Tensor, Tensor)",
    contract=f"tokens[*], choices[*], place[S,K], packed[_,_]?, {_PLAN_SHAPES} -> sent[_,_], ticket[_,_]",
)
def all_to_all_rows(
    tokens: list[Tensor],
    choices: list[Tensor],
    place: Tensor,
    packed: Tensor | None,
    *plan: Tensor,
    num_slots: int,
    dedup: bool,
    group: str,
) -> tuple[Tensor, Tensor]:
    """Start to send the rows of this rank's tokens to the ranks of their experts.

    Args:
        tokens: values of tokens, [S,D]. choices: values of choices (routing weights), [S,K]. Differentiable.
        packed: what `pack_rows` made of them before it was known how many rows there are; None: it is done here.

    Returns:
        The rows on their way, bytes, and the ticket.
    """
    route = _Plan(*plan)
    sent, received = _there_and_back(route.splits)
    if packed is None:
        how = {"num_rows": sum(sent), "num_slots": num_slots, "dedup": dedup}
        rows = pack_rows(tokens, choices, place, *plan[:3], **how)
    else:
        rows = packed[: sum(sent)]
    values = _Values.like(tokens, choices, place, dedup)
    return start(rows, sent, received, group), values.ticket(place, sum(sent))


@op(
    f"all_to_all_rows_backward(Tensor sent, {_PLAN}, *, str[] dtypes, SymInt[] widths, int num_tokens, "
    "bool dedup) -> Tensor[]",
    contract=f"sent[_,_], {_PLAN_SHAPES} -> gradients[*]",
)
def all_to_all_rows_backward(
    sent: Tensor, *plan: Tensor, dtypes: list[str], widths: list[int], num_tokens: int, dedup: bool
) -> list[Tensor]:
    """Wait for the gradients of the rows, and add them up by token.

    Args:
        dtypes, widths: of the values of rows that have a gradient. num_tokens: how many of them are of tokens, the
            others are of choices.
    """
    route = _Plan(*plan)
    columns = split_columns([wait(sent).view(torch.uint8)], dtypes=dtypes, widths=widths)
    # A choice has a gradient in the row of its rank alone: the sum over a token's rows adds zeros to it.
    return [
        route.summed(column)
        if i < num_tokens or dedup
        else build_pft_backward(column[:, 0].contiguous(), route.inverse)
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
    tokens: list[Tensor],
    choices: list[Tensor],
    place: Tensor,
    *,
    num_slots: int,
    dedup: bool,
    groups: list[str],
) -> list[Tensor]:
    """Wait for the rows that P exchanges brought.

    Args:
        tokens, choices, place: what was sent, for its dtypes and widths.

    Returns:
        Of the rows received, in the order of the parts and of the ranks they come from: tokens [R,D], the places of
        their choices int32 [R,J], then choices [R,J].
    """
    layout = layout_of_rows(tokens, choices, place, num_slots=num_slots, dedup=dedup).columns
    arrived = [wait(part) for part in sent]
    named = {"dtypes": [c.dtype_name for c in layout], "widths": [c.width for c in layout]}
    *columns, places = split_columns(arrived, **named, places=True)
    return [*columns[: len(tokens)], places, *columns[len(tokens) :]]


@op(
    "wait_rows_backward(Tensor[] grads, Tensor[] tickets, Tensor[] splits, *, str[] groups) -> Tensor[]",
    contract="grads[*], tickets[*], splits[*] -> sent[*]",
)
def wait_rows_backward(
    grads: list[Tensor], tickets: list[Tensor], splits: list[Tensor], *, groups: list[str]
) -> list[Tensor]:
    """Start to send the gradients of the rows back: of each part what its ticket's gradient is."""
    begin, on_their_way = 0, []
    for ticket, counts, group in zip(tickets, splits, groups, strict=True):
        sent, received = _there_and_back(counts)
        rows = join_columns([g[begin : begin + sum(received)] for g in grads])
        begin += sum(received)
        on_their_way.append(start(rows.view(ticket.dtype), received, sent, group))
    return on_their_way


# -- back
# ------------------------------------------------------------------------------------------------------


@op(
    "all_to_all_back(Tensor rows, Tensor[] splits, Tensor[] tickets, *, str[] groups) -> Tensor[]",
    contract="rows[R,D], splits[*], tickets[*] -> sent[*]",
)
def all_to_all_back(rows: Tensor, splits: list[Tensor], tickets: list[Tensor], *, groups: list[str]) -> list[Tensor]:
    """Start to send what became of the rows received [R,D] to the ranks they came from.

    Args:
        tickets: of the exchanges that brought the parts, for the numbers of rows.

    Returns:
        Of each part the rows on their way, [N,D]; then the tickets of the parts.
    """
    begin, on_their_way, own_tickets = 0, [], []
    for counts, group in zip(splits, groups, strict=True):
        sent, received = _there_and_back(counts)
        on_their_way.append(start(rows[begin : begin + sum(received)], received, sent, group))
        begin += sum(received)
        own_tickets.append(_ticket(rows, sum(received), rows.shape[1], rows.dtype))
    return [*on_their_way, *own_tickets]


@op(
    f"wait_sums(Tensor sent, Tensor ticket, {_PLAN}, *, str group) -> Tensor",
    contract=f"sent[_,D], ticket[_,D], {_PLAN_SHAPES} -> out[S,D]",
)
def wait_sums(sent: Tensor, ticket: Tensor, *plan: Tensor, group: str) -> Tensor:
    """Wait for what came back of the rows, and add it up by token, [S,D]."""
    return _Plan(*plan).summed(wait(sent))


@op(
    f"wait_sums_backward(Tensor grad, Tensor ticket, {_PLAN}, *, str group) -> Tensor",
    contract=f"grad[S,D], ticket[_,D], {_PLAN_SHAPES} -> sent[_,D]",
)
def wait_sums_backward(grad: Tensor, ticket: Tensor, *plan: Tensor, group: str) -> Tensor:
    """Start to send the gradients of the rows, those of their tokens' sums: what the ticket's gradient is."""
    route = _Plan(*plan)
    sent, received = _there_and_back(route.splits)
    return start(grad.index_select(0, route.token_ids[: sum(sent)]), sent, received, group)


# -- registration
# ------------------------------------------------------------------------------------------------------


def _some_rows() -> Any:
    return torch.library.get_ctx().new_dynamic_size()


@all_to_all_rows.fake
def _(tokens, choices, place, packed, *plan, num_slots, dedup, group):
    values = _Values.like(tokens, choices, place, dedup)
    num_bytes = layout_of_rows(tokens, choices, place, num_slots=num_slots, dedup=dedup).num_bytes
    sent = place.new_empty((_some_rows(), num_bytes), dtype=torch.uint8)
    return sent, values.ticket(place, _some_rows())


@all_to_all_rows_backward.fake
def _(sent, token_ids, slot_ids, rank_offsets, inverse, splits, *, dtypes, widths, num_tokens, dedup):
    sizes = [(inverse.shape[0], w if i < num_tokens else inverse.shape[1]) for i, w in enumerate(widths)]
    columns = zip(sizes, Layout.of(dtypes, widths).columns, strict=True)
    return [inverse.new_empty(size, dtype=column.dtype) for size, column in columns]


@wait_rows.fake
def _(sent, tickets, splits, tokens, choices, place, *, num_slots, dedup, groups):
    num = sum(part.shape[0] for part in sent)
    values = _Values.like(tokens, choices, place, dedup)
    places = Column(torch.int32, values.width)
    return [place.new_empty((num, c.width), dtype=c.dtype) for c in (*values.tokens, places, *values.choices)]


wait_rows_backward.fake(lambda grads, tickets, splits, *, groups: [t.new_empty(t.shape) for t in tickets])


@all_to_all_back.fake
def _(rows, splits, tickets, *, groups):
    on_their_way = [rows.new_empty((t.shape[0], rows.shape[1])) for t in tickets]
    # One part is all rows; of several the sizes are not known.
    sizes = [rows.shape[0]] if len(tickets) == 1 else [_some_rows() for _ in tickets]
    return [*on_their_way, *(_ticket(rows, size, rows.shape[1], rows.dtype) for size in sizes)]


@wait_sums.fake
def _(sent, ticket, token_ids, slot_ids, rank_offsets, inverse, splits, *, group):
    return sent.new_empty((inverse.shape[0], sent.shape[1]))


wait_sums_backward.fake(lambda grad, ticket, *plan, group: ticket.new_empty(ticket.shape))


# -- derivatives
# ------------------------------------------------------------------------------------------------------


def _save_rows(ctx: Any, args: Sequence[Any], kwargs: dict[str, Any], outputs: Sequence[Tensor]) -> None:
    tokens, choices, place, _, *plan = args
    ctx.floats = [[t.is_floating_point() for t in ts] for ts in (tokens, choices)]
    columns = _Values.like(tokens, choices, place, kwargs["dedup"]).gradients.columns
    ctx.kwargs = {
        "dtypes": [c.dtype_name for c in columns],
        "widths": [c.width for c in columns],
        "num_tokens": sum(ctx.floats[0]),
        "dedup": kwargs["dedup"],
    }
    ctx.mark_non_differentiable(outputs[0])
    ctx.save_for_backward(*plan)


def _rows_gradients(ctx: Any, grads: Sequence[Any]) -> Sequence[Any]:
    found = iter(all_to_all_rows_backward(grads[1], *unpack_saved(ctx), **ctx.kwargs))
    of_tokens, of_choices = ([next(found) if float else None for float in floats] for floats in ctx.floats)
    return of_tokens, of_choices, *(None,) * 7


all_to_all_rows.autograd(save=_save_rows, backward=_rows_gradients)
all_to_all_rows_backward.once_differentiable("all_to_all_rows")


def _save_waited(ctx: Any, args: Sequence[Any], kwargs: dict[str, Any], outputs: Sequence[Tensor]) -> None:
    sent, tickets, splits, *_ = args
    ctx.num_parts, ctx.groups = len(sent), kwargs["groups"]
    ctx.like = [(o.shape, o.dtype, o.device) for o in outputs]
    ctx.mark_non_differentiable(*(o for o in outputs if not o.is_floating_point()))
    ctx.save_for_backward(*tickets, *splits)


def _waited_gradients(ctx: Any, grads: Sequence[Any]) -> Sequence[Any]:
    saved, num = unpack_saved(ctx), ctx.num_parts
    # Every rank takes part in the collective, whatever it has a gradient of.
    known = [
        torch.zeros(shape, dtype=dtype, device=device) if grad is None else grad
        for grad, (shape, dtype, device) in zip(grads, ctx.like, strict=True)
        if dtype.is_floating_point
    ]
    sent = wait_rows_backward(known, list(saved[:num]), list(saved[num:]), groups=ctx.groups)
    return None, sent, *(None,) * 4


wait_rows.autograd(save=_save_waited, backward=_waited_gradients)
wait_rows_backward.once_differentiable("all_to_all_rows")


def _save_back(ctx: Any, args: Sequence[Any], kwargs: dict[str, Any], outputs: Sequence[Tensor]) -> None:
    ctx.num_parts = len(args[1])
    ctx.mark_non_differentiable(*outputs[: ctx.num_parts])


def _back_gradients(ctx: Any, grads: Sequence[Any]) -> Sequence[Any]:
    parts = [wait(grad) for grad in grads[ctx.num_parts :]]
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
