"""Routing, and movement between tokens and rows: `build_pft`, `dispatch`, `combine`."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ...errors import InvalidInput
from ..guards.recomputed_choice import observe_pft
from .op_definition import op, unpack_saved

DROP_RULES = ("none", "position_token", "position_slot", "weight")


class PftResult(enum.IntEnum):
    """The index of each result of `build_pft`."""

    TOKEN_IDS = 0
    SLOT_IDS = 1
    EXPERT_OFFSETS = 2
    INVERSE = 3
    COMBINE_WEIGHTS = 4


@op(
    "build_pft(Tensor topk_ids, Tensor? topk_weights, Tensor? keep, *, int num_experts, "
    'SymInt? capacity=None, str drop="none", Tensor? num_rows=None) -> (Tensor, Tensor, Tensor, Tensor, Tensor)',
    contract="topk_ids[S,K], topk_weights[S,K]?, keep[S,K]? -> "
    "token_ids[B], slot_ids[B], expert_offsets[E+1], inverse[S,K], combine_weights[B]?",
)
def build_pft(
    topk_ids: Tensor,
    topk_weights: Tensor | None,
    keep: Tensor | None,
    *,
    num_experts: int,
    capacity: int | None = None,
    drop: str = "none",
    num_rows: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Build the index arrays of the padding-free token buffer (ERI arrays of X-MoE, Listing 1) from the routing.

    Slot number s*K+k is slot k of token s. Rows are sorted by expert and, within an expert, by slot number. A slot is
    dropped if its id is outside [0, E), if `keep` is False, or if its expert's queue already has `capacity` slots.
    `drop` is the order of the queue: "position_token" (s, then k), "position_slot" (k, then s: all first slots first),
    "weight" (largest weight first, ties by slot number). Slots dropped by id or `keep` do not queue.

    Args:
        num_rows: number of valid slots, int64 [1] on the host, if known. B is then `round_up_rows`, otherwise S*K.
            Slots beyond B are dropped. Not with `capacity`.

    Returns:
        token_ids[B], slot_ids[B]: token and slot of row r; 0 in the tail. int32.
        expert_offsets[E+1]: rows of expert e are offsets[e]:offsets[e+1]; offsets[E] is the number of valid rows.
        int32. inverse[S,K]: the row of each slot, -1 if dropped. int32. combine_weights[B]: `topk_weights` in row
        order, 0 in the tail; [0] without weights. Differentiable.
    """
    _check_routing(topk_ids, topk_weights, keep, num_rows, num_experts, capacity, drop)
    top_k, num_slots, device = topk_ids.shape[1], topk_ids.numel(), topk_ids.device
    room = round_up_rows(num_rows, topk_ids)
    expert_ids = topk_ids.reshape(-1)
    if expert_ids.element_size() < 4:
        expert_ids = expert_ids.to(torch.int32)  # num_experts itself may not fit into int8
    valid = (expert_ids >= 0) & (expert_ids < num_experts)
    if keep is not None:
        valid &= keep.reshape(-1)
    expert_ids = torch.where(valid, expert_ids, num_experts).to(torch.int32)  # dropped slots sort last
    if capacity is not None:
        queue = _order_queue(topk_ids.shape, topk_weights, drop, device)
        expert_ids = torch.where(
            _find_queue_indices(expert_ids, queue, num_experts) < capacity, expert_ids, num_experts
        )
    sorted_ids, order = torch.sort(expert_ids, stable=True)
    bounds = torch.arange(num_experts + 1, dtype=torch.int32, device=device)
    expert_offsets = torch.searchsorted(sorted_ids, bounds, out_int32=True).clamp_(max=room)
    rows = torch.arange(num_slots, dtype=torch.int32, device=device)
    in_tail = rows >= expert_offsets[num_experts]
    inverse = torch.empty_like(rows).scatter_(0, order, rows.masked_fill(in_tail, -1)).view(topk_ids.shape)
    slots = order.to(torch.int32).masked_fill_(in_tail, 0)
    token_ids = torch.div(slots, top_k, rounding_mode="floor")
    slot_ids = slots - token_ids * top_k
    if topk_weights is None:
        combine_weights = torch.empty(0, dtype=torch.float32, device=device)
    else:
        # Fill the tail instead of multiplying it by 0: a dropped weight may be NaN.
        combine_weights = topk_weights.reshape(-1).index_select(0, order).masked_fill_(in_tail, 0)
    by_row = token_ids, slot_ids, combine_weights
    token_ids, slot_ids, combine_weights = by_row if room == num_slots else (t[:room].clone() for t in by_row)
    return token_ids, slot_ids, expert_offsets, inverse, combine_weights


def round_up_rows(num_rows: Tensor | None, topk_ids: Tensor) -> int:
    """Return the number of rows B: `num_rows` rounded up by at most 1/64, so that few distinct sizes occur and the
    allocator can reuse blocks."""
    if num_rows is None:
        return topk_ids.numel()
    min_rows = int(num_rows)
    step = 1 << max(0, min_rows.bit_length() - 7)
    return min(-(-min_rows // step) * step, topk_ids.numel())


def _order_queue(shape: Sequence[int], weights: Tensor | None, drop: str, device: torch.device) -> Tensor:
    """Return the slots in the order of the queue."""
    num_tokens, top_k = shape
    flat = torch.arange(num_tokens * top_k, device=device)
    if drop == "position_slot":
        return flat.view(num_tokens, top_k).t().reshape(-1)
    if drop == "weight":
        assert weights is not None
        return torch.sort(weights.detach().reshape(-1), descending=True, stable=True).indices
    return flat


def _find_queue_indices(expert_ids: Tensor, queue: Tensor, num_experts: int) -> Tensor:
    """Return the number of slots of the same expert that precede each slot in the queue."""
    in_queue = expert_ids.index_select(0, queue)
    by_expert, order = torch.sort(in_queue, stable=True)
    first = torch.searchsorted(by_expert, torch.arange(num_experts + 1, dtype=torch.int32, device=expert_ids.device))
    queue_index = torch.arange(expert_ids.shape[0], device=expert_ids.device) - first.index_select(0, by_expert)
    return torch.empty_like(queue_index).scatter_(0, queue.index_select(0, order), queue_index)


def _check_routing(
    topk_ids: Tensor,
    topk_weights: Tensor | None,
    keep: Tensor | None,
    num_rows: Tensor | None,
    num_experts: int,
    capacity: Any,
    drop: str,
) -> None:
    if topk_ids.dtype.is_floating_point or topk_ids.dtype is torch.bool:
        raise InvalidInput(f"moefx::build_pft: topk_ids are {topk_ids.dtype}, expected integers")
    if num_experts < 1:
        raise InvalidInput(f"moefx::build_pft: num_experts={num_experts}, expected at least 1")
    if topk_weights is not None and not topk_weights.dtype.is_floating_point:
        raise InvalidInput(f"moefx::build_pft: topk_weights are {topk_weights.dtype}, expected floating point")
    if keep is not None and keep.dtype is not torch.bool:
        raise InvalidInput(f"moefx::build_pft: keep is {keep.dtype}, expected torch.bool")
    if drop not in DROP_RULES:
        raise InvalidInput(f"moefx::build_pft: drop={drop!r}, expected one of {', '.join(map(repr, DROP_RULES))}")
    if (capacity is None) != (drop == "none"):
        raise InvalidInput(f"moefx::build_pft: capacity={capacity} does not go with drop={drop!r}")
    if drop == "weight" and topk_weights is None:
        raise InvalidInput("moefx::build_pft: drop='weight' orders by topk_weights, which are None")
    if num_rows is not None and capacity is not None:
        raise InvalidInput(f"moefx::build_pft: num_rows is given, and capacity={capacity} would leave fewer rows")


@build_pft.fake
def _(topk_ids, topk_weights, keep, *, num_experts, capacity=None, drop="none", num_rows=None):
    _check_routing(topk_ids, topk_weights, keep, num_rows, num_experts, capacity, drop)
    num_slots = topk_ids.shape[0] * topk_ids.shape[1]
    room = num_slots if num_rows is None else torch.library.get_ctx().new_dynamic_size()
    index = topk_ids.new_empty((room,), dtype=torch.int32)
    offsets = topk_ids.new_empty((num_experts + 1,), dtype=torch.int32)
    inverse = topk_ids.new_empty(topk_ids.shape, dtype=torch.int32)
    weights = topk_ids.new_empty((0,), dtype=torch.float32)
    if topk_weights is not None:
        weights = topk_weights.new_empty((room,))
    return index, torch.empty_like(index), offsets, inverse, weights


@op(
    "build_pft_backward(Tensor grad, Tensor inverse) -> Tensor",
    contract="grad[B], inverse[S,K] -> topk_weights[S,K]",
)
def build_pft_backward(grad: Tensor, inverse: Tensor) -> Tensor:
    """Return the gradient of `topk_weights`: the gradient of each slot's row, 0 if dropped."""
    return _gather_slots(grad, inverse)


def _gather_slots(grad: Tensor, inverse: Tensor) -> Tensor:
    """Gather the value of each slot's row, [S,K,...], 0 if dropped."""
    if grad.shape[0] == 0:
        return grad.new_zeros((*inverse.shape, *grad.shape[1:]))
    gathered = grad.index_select(0, inverse.reshape(-1).clamp(min=0)).view(*inverse.shape, *grad.shape[1:])
    is_dropped = (inverse < 0).view(*inverse.shape, *[1] * (grad.dim() - 1))
    return gathered.masked_fill_(is_dropped, 0)


build_pft_backward.fake(lambda grad, inverse: grad.new_empty(inverse.shape))
build_pft_backward.once_differentiable("build_pft")
build_pft.observe = observe_pft
build_pft.autograd(
    save=lambda ctx, args, kwargs, outputs: ctx.save_for_backward(outputs[3]),
    backward=lambda ctx, grads: (None, build_pft_backward(grads[4], *unpack_saved(ctx)), None),
)


@op(
    "pick_choices(Tensor values, Tensor token_ids, Tensor slot_ids, Tensor inverse) -> Tensor",
    contract="token_ids[B], slot_ids[B], inverse[S,K] -> rows[B,...]",
)
def pick_choices(values: Tensor, token_ids: Tensor, slot_ids: Tensor, inverse: Tensor) -> Tensor:
    """Gather the value of each row's slot, [B,...] from values [S,K,...]. Differentiable; the tail has no gradient."""
    return values[token_ids.to(torch.int64), slot_ids.to(torch.int64)]


@op(
    "pick_choices_backward(Tensor grad, Tensor inverse) -> Tensor",
    contract="inverse[S,K] -> values[S,K,...]",
)
def pick_choices_backward(grad: Tensor, inverse: Tensor) -> Tensor:
    """Return the gradient of the values: the gradient of each slot's row, 0 if dropped."""
    return _gather_slots(grad, inverse)


@pick_choices.fake
def _(values, token_ids, slot_ids, inverse):
    return values.new_empty((token_ids.shape[0], *values.shape[2:]))


pick_choices_backward.fake(lambda grad, inverse: grad.new_empty((*inverse.shape, *grad.shape[1:])))
pick_choices_backward.once_differentiable("pick_choices")
pick_choices.autograd(
    save=lambda ctx, args, kwargs, outputs: ctx.save_for_backward(args[3]),
    backward=lambda ctx, grads: (pick_choices_backward(grads[0], *unpack_saved(ctx)), None, None, None),
)


# -- between tokens and rows


@op(
    "dispatch(Tensor x, Tensor token_ids, Tensor expert_offsets, Tensor inverse) -> Tensor",
    contract="x[S,D], token_ids[B], expert_offsets[E+1], inverse[S,K] -> rows[B,D]",
)
def dispatch(x: Tensor, token_ids: Tensor, expert_offsets: Tensor, inverse: Tensor) -> Tensor:
    """Gather the routed rows: rows[r] = x[token_ids[r]]. Its derivative is `combine` without weights."""
    return x.index_select(0, token_ids)


@op(
    "combine(Tensor rows, Tensor? combine_weights, Tensor token_ids, Tensor expert_offsets, Tensor inverse) -> Tensor",
    contract="rows[B,D], combine_weights[B]?, token_ids[B], expert_offsets[E+1], inverse[S,K] -> out[S,D]",
)
def combine(
    rows: Tensor, combine_weights: Tensor | None, token_ids: Tensor, expert_offsets: Tensor, inverse: Tensor
) -> Tensor:
    """Gather-sum: out[s] = sum over k of combine_weights[r] * rows[r] with r = inverse[s,k].

    Dropped slots are left out. The sum runs for k ascending (no atomics: bitwise repeatable), in float32 at least, and
    is rounded once to the dtype of `rows`. Its derivative by `rows` is `dispatch` without weights.
    """
    dtype = torch.promote_types(rows.dtype, torch.float32)
    if combine_weights is not None:
        dtype = torch.promote_types(dtype, combine_weights.dtype)
    out = torch.zeros((inverse.shape[0], rows.shape[1]), dtype=dtype, device=rows.device)
    for k in range(inverse.shape[1] if rows.shape[0] else 0):
        row = inverse[:, k].clamp(min=0)
        value = rows.index_select(0, row).to(dtype)
        if combine_weights is not None:
            value *= combine_weights.index_select(0, row).to(dtype)[:, None]
        out += value.masked_fill_((inverse[:, k] < 0)[:, None], 0)
    return out.to(rows.dtype)


@op(
    "combine_backward(Tensor grad, Tensor rows, Tensor combine_weights, Tensor token_ids, "
    "Tensor expert_offsets) -> (Tensor, Tensor)",
    contract="grad[S,D], rows[B,D], combine_weights[B], token_ids[B], expert_offsets[E+1] -> rows[B,D], weights[B]",
)
def combine_backward(
    grad: Tensor, rows: Tensor, combine_weights: Tensor, token_ids: Tensor, expert_offsets: Tensor
) -> tuple[Tensor, Tensor]:
    """Compute the gradients of the rows and of the weights of a weighted `combine`."""
    dtype = torch.promote_types(torch.promote_types(rows.dtype, torch.float32), combine_weights.dtype)
    gathered = grad.index_select(0, token_ids).to(dtype)
    grad_weights = (gathered * rows).sum(1)
    return (gathered * combine_weights[:, None]).to(rows.dtype), clear_tail(grad_weights, expert_offsets).to(
        combine_weights.dtype
    )


def clear_tail(vector: Tensor, expert_offsets: Tensor) -> Tensor:
    """Zero the tail of a [B] vector in place, because the user's graph may reduce over it."""
    row = torch.arange(vector.shape[0], dtype=expert_offsets.dtype, device=vector.device)
    return vector.masked_fill_(row >= expert_offsets[-1], 0)


dispatch.fake(lambda x, token_ids, expert_offsets, inverse: x.new_empty((token_ids.shape[0], x.shape[1])))
combine_backward.fake(
    lambda grad, rows, combine_weights, token_ids, expert_offsets: (
        rows.new_empty(rows.shape),
        combine_weights.new_empty(combine_weights.shape),
    )
)


@combine.fake
def _(rows, combine_weights, token_ids, expert_offsets, inverse):
    return rows.new_empty((inverse.shape[0], rows.shape[1]))


def _combine_gradients(ctx: Any, grads: Sequence[Any]) -> Sequence[Any]:
    token_ids, expert_offsets, inverse, *weighted = unpack_saved(ctx)
    if weighted:
        grad_rows, grad_weights = combine_backward(grads[0], *weighted, token_ids, expert_offsets)
    else:
        grad_rows, grad_weights = dispatch(grads[0], token_ids, expert_offsets, inverse), None
    return grad_rows, grad_weights, None, None, None


def _save_for_combine(ctx: Any, args: Sequence[Any], kwargs: Any, outputs: Any) -> None:
    rows, combine_weights, *indices = args
    ctx.save_for_backward(*indices, *(() if combine_weights is None else (rows, combine_weights)))


combine.autograd(save=_save_for_combine, backward=_combine_gradients)
combine_backward.once_differentiable("combine")
dispatch.autograd(
    save=lambda ctx, args, kwargs, outputs: ctx.save_for_backward(*args[1:]),
    backward=lambda ctx, grads: (combine(grads[0], None, *unpack_saved(ctx)), None, None, None),
)
