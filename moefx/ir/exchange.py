"""Rows on their way to the ranks that hold their experts, and back (X-MoE sections 4.1 and 4.2).

A choice of an expert is a place: rank * num_slots + slot, -1 where the choice does not count. A row goes to each rank
that one of its token's choices is at ("dedup"), or one row for each choice ("flat"). It takes along what the experts
need: the token's values, and of each choice its slot there (-1 where it is at another rank) and its routing weight.
What arrives is routed as if the tokens were the rank's own, by `build_pft` and `expert_mlp`. The sums of each row
come back and are added up by token.

Letters: S tokens, K choices, E experts, W ranks of the group, B = S*K, N rows sent, R rows received, J choices of a
    row: K, or 1 in a flat exchange. `splits` [2,W] is on the host: rows sent to, and received from, each rank.

There is one exchange of counts with one copy to the host, then one collective each way, in the forward and in the
backward. Ranks without rows take part as all others do.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from .op import op
from .payload import exchanged, group_of
from .routing import build_pft, build_pft_backward, combine

_PLAN = "Tensor place, Tensor token_ids, Tensor slot_ids, Tensor rank_offsets, Tensor inverse, Tensor splits"
_PLAN_SHAPES = "place[S,K], token_ids[B], slot_ids[B], rank_offsets[E+1], inverse[S,K], splits[_,E]"


@op(
    "plan_dispatch(Tensor topk_ids, Tensor? keep, *, int[] places, int num_ranks, int num_slots, bool dedup) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    contract="topk_ids[S,K], keep[S,K]? -> place[S,K], token_ids[B], slot_ids[B], rank_offsets[_], inverse[S,K]",
)
def plan_dispatch(
    topk_ids: Tensor,
    keep: Tensor | None,
    *,
    places: Sequence[int],
    num_ranks: int,
    num_slots: int,
    dedup: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Which rows go to which rank: the ERI arrays of ranks instead of experts.

    Args:
        places: of each expert, rank * num_slots + slot.

    Returns:
        place[S,K]: of each choice, -1 where `keep` is False or the id is outside [0, E). int32. token_ids[B],
        slot_ids[B], rank_offsets[W+1], inverse[S,K]: as of `build_pft`, the rows in the order of the ranks. With
        `dedup` the first choice of a token at a rank stands for all of them there (the pilot), and inverse is -1 for
        the others; else rows are in the order of their experts' places.
    """
    num_experts = len(places)
    valid = (topk_ids >= 0) & (topk_ids < num_experts)
    if keep is not None:
        valid = valid & keep
    place = topk_ids.to(torch.int32)
    if list(places) != list(range(num_experts)):
        place = _table(tuple(places), topk_ids.device)[topk_ids.clamp(0, num_experts - 1).to(torch.int64)]
    place = place.masked_fill(~valid, -1)
    if not dedup:
        token_ids, slot_ids, offsets, inverse, _ = build_pft(place, None, None, num_experts=num_ranks * num_slots)
        return place, token_ids, slot_ids, offsets[::num_slots].contiguous(), inverse
    rank = _rank_of(place, num_slots)
    again = (rank[:, :, None] == rank[:, None, :]).tril_(-1).any(-1)
    token_ids, slot_ids, offsets, inverse, _ = build_pft(rank, None, ~again, num_experts=num_ranks)
    return place, token_ids, slot_ids, offsets, inverse


@functools.lru_cache(maxsize=64)
def _table(places: tuple[int, ...], device: torch.device) -> Tensor:
    return torch.tensor(places, dtype=torch.int32, device=device)


def _rank_of(place: Tensor, num_slots: int) -> Tensor:
    return torch.div(place, num_slots, rounding_mode="floor")  # -1 stays -1


@plan_dispatch.fake
def _(topk_ids, keep, *, places, num_ranks, num_slots, dedup):
    place = topk_ids.new_empty(topk_ids.shape, dtype=torch.int32)
    token_ids = place.new_empty((topk_ids.shape[0] * topk_ids.shape[1],))
    return place, token_ids, torch.empty_like(token_ids), place.new_empty((num_ranks + 1,)), torch.empty_like(place)


@op("exchange_counts(Tensor rank_offsets, *, str group) -> Tensor", contract="rank_offsets[_] -> splits[_,_]")
def exchange_counts(rank_offsets: Tensor, *, group: str) -> Tensor:
    """Rows sent to and received from each rank, int64 [2,W] on the host: the one copy that the host waits for."""
    sent = rank_offsets.diff().to(torch.int64)
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=group_of(group))
    return torch.stack([sent, received]).cpu()


@exchange_counts.fake
def _(rank_offsets, *, group):
    return torch.empty((2, rank_offsets.shape[0] - 1), dtype=torch.int64, device="cpu")


class _Send(NamedTuple):
    """What `plan_dispatch` and `exchange_counts` found, the arguments of the exchanges."""

    place: Tensor
    token_ids: Tensor
    slot_ids: Tensor
    rank_offsets: Tensor
    inverse: Tensor
    splits: Tensor

    @property
    def counts(self) -> list[int]:
        """Rows for each rank."""
        return self.splits[0].tolist()

    @property
    def received(self) -> list[int]:
        """Rows from each rank."""
        return self.splits[1].tolist()

    def summed(self, rows: Tensor) -> Tensor:
        """The rows sent [N,...] by token, [S,...]."""
        flat, ids = rows.reshape(rows.shape[0], rows.shape[1:].numel()), self.token_ids[: rows.shape[0]]
        out = combine(flat, None, ids, self.rank_offsets, self.inverse)
        return out.reshape(self.inverse.shape[0], *rows.shape[1:])


@op(
    f"all_to_all_rows(Tensor[] tokens, Tensor[] choices, {_PLAN}, *, int num_slots, bool dedup, str group) -> Tensor[]",
    contract=f"tokens[*], choices[*], {_PLAN_SHAPES} -> rows[*]",
)
def all_to_all_rows(
    tokens: list[Tensor], choices: list[Tensor], *plan: Tensor, num_slots: int, dedup: bool, group: str
) -> list[Tensor]:
    """The rows of all ranks' tokens that need experts of this rank.

    Args:
        tokens: values of tokens, [S,...]. choices: values of choices (routing weights), [S,K]. Differentiable.

    Returns:
        Of the rows received, in the order of the ranks they come from: tokens [R,...], the slots of their choices
        int32 [R,J], then choices [R,J].
    """
    send = _Send(*plan)
    token, slot = (ids[: sum(send.counts)].to(torch.int64) for ids in (send.token_ids, send.slot_ids))
    own = send.place[token, slot][:, None]
    if dedup:
        local = send.place[token]
        local = (local % num_slots).masked_fill_(_rank_of(local, num_slots) != _rank_of(own, num_slots), -1)
    else:
        local = own % num_slots
    of_choices = [c[token] if dedup else c[token, slot][:, None] for c in choices]
    return exchanged([*(t[token] for t in tokens), local, *of_choices], send.counts, send.received, group)


@op(
    f"all_to_all_rows_backward(Tensor[] grads, {_PLAN}, *, int num_tokens, bool dedup, str group) -> Tensor[]",
    contract=f"grads[*], {_PLAN_SHAPES} -> gradients[*]",
)
def all_to_all_rows_backward(
    grads: list[Tensor], *plan: Tensor, num_tokens: int, dedup: bool, group: str
) -> list[Tensor]:
    """Gradients of `tokens` (the first `num_tokens` of `grads`, [R,...]) and of `choices` (the others, [R,J])."""
    send = _Send(*plan)
    rows = exchanged(grads, send.received, send.counts, group) if grads else []
    of_tokens = [send.summed(r) for r in rows[:num_tokens]]
    # A choice has a gradient in the row of its rank alone: the sum over a token's rows adds zeros to it.
    of_choices = [
        send.summed(r) if dedup else build_pft_backward(r[:, 0].contiguous(), send.inverse) for r in rows[num_tokens:]
    ]
    return [*of_tokens, *of_choices]


@op(
    f"all_to_all_back(Tensor rows, {_PLAN}, *, str group) -> Tensor",
    contract=f"rows[_,D], {_PLAN_SHAPES} -> out[S,D]",
)
def all_to_all_back(rows: Tensor, *plan: Tensor, group: str) -> Tensor:
    """What the experts made of the rows received [R,D], at the ranks they came from, summed by token, [S,D]."""
    send = _Send(*plan)
    (back,) = exchanged([rows], send.received, send.counts, group)
    return send.summed(back)


@op(
    f"all_to_all_back_backward(Tensor grad, {_PLAN}, *, str group) -> Tensor",
    contract=f"grad[S,D], {_PLAN_SHAPES} -> rows[_,D]",
)
def all_to_all_back_backward(grad: Tensor, *plan: Tensor, group: str) -> Tensor:
    """Gradient of the rows: that of their tokens' sums."""
    send = _Send(*plan)
    rows = grad.index_select(0, send.token_ids[: sum(send.counts)])
    return exchanged([rows], send.counts, send.received, group)[0]


# -- registration
# ------------------------------------------------------------------------------------------------------


def _num_received() -> Any:
    return torch.library.get_ctx().new_dynamic_size()


@all_to_all_rows.fake
def _(tokens, choices, place, *plan, num_slots, dedup, group):
    num = _num_received()
    width = place.shape[1] if dedup else 1
    return [
        *(t.new_empty((num, *t.shape[1:])) for t in tokens),
        place.new_empty((num, width)),
        *(c.new_empty((num, width)) for c in choices),
    ]


@all_to_all_rows_backward.fake
def _(grads, place, *plan, num_tokens, dedup, group):
    of_tokens = [g.new_empty((place.shape[0], *g.shape[1:])) for g in grads[:num_tokens]]
    return [*of_tokens, *(g.new_empty(place.shape) for g in grads[num_tokens:])]


all_to_all_back.fake(lambda rows, place, *plan, group: rows.new_empty((place.shape[0], rows.shape[1])))
all_to_all_back_backward.fake(lambda grad, *plan, group: grad.new_empty((_num_received(), grad.shape[1])))


def _save_rows(ctx: Any, args: Sequence[Any], kwargs: dict[str, Any], outputs: Sequence[Tensor]) -> None:
    tokens, _, *plan = args
    ctx.kwargs = {"dedup": kwargs["dedup"], "group": kwargs["group"]}
    ctx.num_tokens = len(tokens)
    ctx.shapes = [(o.shape, o.dtype, o.device) for o in outputs]
    ctx.mark_non_differentiable(outputs[len(tokens)])
    ctx.save_for_backward(*plan)


def _rows_gradients(ctx: Any, grads: Sequence[Any]) -> Sequence[Any]:
    num_tokens = ctx.num_tokens
    # Every rank takes part in the collective, whatever it has a gradient of.
    known = [
        torch.zeros(shape, dtype=dtype, device=device) if grad is None else grad
        for i, (grad, (shape, dtype, device)) in enumerate(zip(grads, ctx.shapes, strict=True))
        if i != num_tokens
    ]
    results = all_to_all_rows_backward(known, *ctx.saved_tensors, num_tokens=num_tokens, **ctx.kwargs)
    return results[:num_tokens], results[num_tokens:], *(None,) * 6


all_to_all_rows.autograd(save=_save_rows, backward=_rows_gradients)
all_to_all_rows_backward.once_differentiable("all_to_all_rows")


def _save_back(ctx: Any, args: Sequence[Any], kwargs: dict[str, Any], outputs: Any) -> None:
    ctx.group = kwargs["group"]
    ctx.save_for_backward(*args[1:])


all_to_all_back.autograd(
    save=_save_back,
    backward=lambda ctx, grads: (
        all_to_all_back_backward(grads[0], *ctx.saved_tensors, group=ctx.group),
        *(None,) * 6,
    ),
)
all_to_all_back_backward.once_differentiable("all_to_all_back")
