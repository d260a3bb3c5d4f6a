"""Provider "triton" of `build_pft`: the index arrays by a counting sort, in three launches (four with drop="weight").

There is no global sort, no atomic on memory and no host sync. The sort is stable, so results equal the reference bit by
bit:

    count    counts each block's entries of each expert                            one program for a block
    scan     finds the begin of each block's entries, and the end of the capacity  one program for an expert
    scatter  sorts each block's entries by expert and writes them                  one program for a block
    select   drop="weight" only: the largest weights of each expert, by radix      one program for an expert
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...ir.ops.token_routing import round_up_rows
from .launch import cdiv, use_device
from .launch_replay import apply, empty, launch, replay_or_record

# Entries of a block, which is sorted together. Few warps: their data exchange costs more than the rest.
_BLOCK, _WARPS = 512, 2
_DIGIT = 256  # values of a radix digit
# Sizes that change from call to call: kernels are not specialized on them.
_VARYING = ["num_entries", "num_blocks", "capacity", "room"]


@triton.jit
def _load_expert_ids(topk_ids, keep, entry, in_list, E: tl.constexpr, HAS_KEEP: tl.constexpr):
    """Return the expert of each entry, or E for dropped entries, which sort last."""
    expert = tl.load(topk_ids + entry, mask=in_list, other=-1)
    valid = in_list & (expert >= 0) & (expert < E)
    if HAS_KEEP:
        valid = valid & (tl.load(keep + entry, mask=in_list, other=0) != 0)
    return tl.where(valid, expert, E).to(tl.int32)


@triton.jit(do_not_specialize=_VARYING)
def count_kernel(
    topk_ids, keep, counts, num_entries, num_blocks,
    E: tl.constexpr, E_BINS: tl.constexpr, K: tl.constexpr, QUEUES: tl.constexpr, BLOCK: tl.constexpr,
    HAS_KEEP: tl.constexpr,
):  # fmt: skip
    """counts[e, q, block] of the entries. QUEUES is K if drops go slot by slot, otherwise 1."""
    block = tl.program_id(0)
    entry = block * BLOCK + tl.arange(0, BLOCK)
    expert = _load_expert_ids(topk_ids, keep, entry, entry < num_entries, E, HAS_KEEP)
    bins = tl.arange(0, E_BINS)
    for queue in tl.static_range(QUEUES):
        counted = expert < E
        if QUEUES > 1:
            counted = counted & (entry % K == queue)
        count = tl.histogram(expert, E_BINS, mask=counted)
        tl.store(counts + (bins * QUEUES + queue) * num_blocks + block, count, mask=bins < E)


@triton.jit(do_not_specialize=_VARYING)
def scan_kernel(
    topk_ids, keep, counts, begins, totals, cuts, num_entries, num_blocks, capacity,
    E: tl.constexpr, K: tl.constexpr, QUEUES: tl.constexpr, Q_PAD: tl.constexpr, BLOCK: tl.constexpr,
    CHUNK: tl.constexpr, HAS_KEEP: tl.constexpr, CAPPED: tl.constexpr,
):  # fmt: skip
    """begins[e, block]: number of the expert's kept entries before the block. totals[e]: all of its kept entries.

    With several queues also cuts[e]: entries from this position (by slot, then token) on are dropped. With QUEUES = 1
    begins ignores drops, and `scatter` drops.
    """
    expert = tl.program_id(0)
    queue, offset = tl.arange(0, Q_PAD), tl.arange(0, CHUNK)
    row = counts + expert * QUEUES * num_blocks
    in_queue = tl.zeros((Q_PAD,), tl.int32)
    if QUEUES > 1:
        for start in range(0, num_blocks, CHUNK):
            block = start + offset
            in_range = (queue < QUEUES)[:, None] & (block < num_blocks)[None, :]
            in_queue += tl.sum(tl.load(row + queue[:, None] * num_blocks + block[None, :], mask=in_range, other=0), 1)
    first = tl.cumsum(in_queue, 0) - in_queue  # of each queue, among the expert's entries
    seen, kept_before = tl.zeros((Q_PAD,), tl.int32), tl.zeros((), tl.int32)
    full_queue, full_block, num_left = tl.zeros((), tl.int32), tl.zeros((), tl.int32), tl.zeros((), tl.int32)
    for start in range(0, num_blocks, CHUNK):
        block = start + offset
        in_range = (queue < QUEUES)[:, None] & (block < num_blocks)[None, :]
        count = tl.load(row + queue[:, None] * num_blocks + block[None, :], mask=in_range, other=0)
        kept_counts = count
        if QUEUES > 1:
            before = (first + seen)[:, None] + tl.cumsum(count, 1) - count
            kept_counts = tl.minimum(tl.maximum(capacity - before, 0), count)
            last = (before < capacity) & (before + count >= capacity) & in_range  # the block with the last kept entry
            full_queue += tl.sum(tl.sum(tl.where(last, queue[:, None], 0), 1), 0)
            full_block += tl.sum(tl.sum(tl.where(last, block[None, :], 0), 1), 0)
            num_left += tl.sum(tl.sum(tl.where(last, capacity - before, 0), 1), 0)
            seen += tl.sum(count, 1)
        kept_in_block = tl.sum(kept_counts, 0)
        begin = kept_before + tl.cumsum(kept_in_block, 0) - kept_in_block
        tl.store(begins + expert * num_blocks + block, begin, mask=block < num_blocks)
        kept_before += tl.sum(kept_in_block, 0)
    if CAPPED and QUEUES == 1:
        kept_before = tl.minimum(kept_before, capacity)
    tl.store(totals + expert, kept_before)
    if QUEUES > 1:
        cut = tl.where(capacity > 0, num_entries, 0)
        if num_left > 0:
            entry = full_block * BLOCK + tl.arange(0, BLOCK)
            at = _load_expert_ids(topk_ids, keep, entry, entry < num_entries, E, HAS_KEEP)
            is_counted = ((at == expert) & (entry % K == full_queue)).to(tl.int32)
            is_last = (tl.cumsum(is_counted, 0) == num_left) & (is_counted > 0)
            token = tl.sum(tl.where(is_last, entry // K, 0), 0)
            cut = full_queue * (num_entries // K) + token + 1
        tl.store(cuts + expert, cut)


@triton.jit(do_not_specialize=_VARYING)
def scatter_kernel(
    topk_ids, keep, weights, begins, totals, cuts,
    token_ids, slot_ids, expert_offsets, inverse, combine_weights, num_entries, num_blocks, capacity, room,
    E: tl.constexpr, E_BINS: tl.constexpr, K: tl.constexpr, BLOCK: tl.constexpr, LOG_BLOCK: tl.constexpr,
    HAS_KEEP: tl.constexpr, HAS_WEIGHTS: tl.constexpr, CAPPED: tl.constexpr, BY_SLOT: tl.constexpr,
    STAGE: tl.constexpr,
):  # fmt: skip
    """Write each entry to its row (of `room` rows), and zeros to the tail.

    STAGE: write the entries for `select`, into token_ids.
    """
    block = tl.program_id(0)
    bins, offset = tl.arange(0, E_BINS), tl.arange(0, BLOCK)
    total = tl.load(totals + bins, mask=bins < E, other=0)
    start = tl.cumsum(total, 0) - total
    num_rows = tl.sum(total, 0)
    if block == 0 and not STAGE:
        tl.store(expert_offsets + bins, tl.minimum(start, room), mask=bins < E)
        tl.store(expert_offsets + E + bins, tl.minimum(num_rows, room) + bins, mask=bins < 1)

    entry = block * BLOCK + offset
    expert = _load_expert_ids(topk_ids, keep, entry, entry < num_entries, E, HAS_KEEP)
    if BY_SLOT:
        queue_position = (entry % K) * (num_entries // K) + entry // K
        cut = tl.load(cuts + expert, mask=expert < E, other=0)
        expert = tl.where(queue_position < cut, expert, E)
    key = tl.sort((expert << LOG_BLOCK) | offset)
    expert_sorted, source = key >> LOG_BLOCK, block * BLOCK + (key & (BLOCK - 1))
    valid = expert_sorted < E
    count = tl.histogram(expert, E_BINS, mask=expert < E)
    begin = tl.load(begins + bins * num_blocks + block, mask=bins < E, other=0)
    # Rank of a sorted entry in its expert: entries of earlier blocks, plus earlier ones of this block.
    shift = begin - (tl.cumsum(count, 0) - count)
    safe = tl.where(valid, expert_sorted, 0)
    queue_index = tl.gather(shift, safe, 0) + offset
    if CAPPED:
        valid = valid & (queue_index < capacity)
    row = tl.gather(start, safe, 0) + queue_index
    valid = valid & (row < room)
    tl.store(inverse + source, tl.where(valid, row, -1), mask=source < num_entries)
    in_tail = (entry >= num_rows) & (entry < room)
    if STAGE:
        tl.store(token_ids + row, source, mask=valid)
    else:
        tl.store(token_ids + row, source // K, mask=valid)
        tl.store(slot_ids + row, source % K, mask=valid)
        tl.store(token_ids + entry, tl.zeros_like(entry), mask=in_tail)
        tl.store(slot_ids + entry, tl.zeros_like(entry), mask=in_tail)
    if HAS_WEIGHTS:
        weight = tl.load(weights + source, mask=valid, other=0.0)
        tl.store(combine_weights + row, weight, mask=valid)
        if not STAGE:
            tl.store(combine_weights + entry, tl.zeros_like(weight), mask=in_tail)


@triton.jit
def _make_sort_key(weight):
    """float32 as uint32 in the same order. NaNs are above all numbers, and -0 equals 0."""
    weight = weight.to(tl.float32)
    bits = tl.where(weight == 0, 0.0, weight).to(tl.uint32, bitcast=True)
    negative = (bits >> 31) != 0
    ordered = tl.where(negative, bits ^ 0xFFFFFFFF, bits | 0x80000000)
    return tl.where(weight != weight, tl.full(bits.shape, 0xFFFFFFFF, tl.uint32), ordered)


@triton.jit(do_not_specialize=_VARYING)
def select_kernel(
    entries, staged_weights, totals,
    token_ids, slot_ids, expert_offsets, inverse, combine_weights, num_entries, capacity,
    E: tl.constexpr, E_BINS: tl.constexpr, K: tl.constexpr, BLOCK: tl.constexpr, DIGIT: tl.constexpr,
):  # fmt: skip
    """Keep each expert's `capacity` largest weights, the first ones among equals, in the order of the list."""
    expert = tl.program_id(0)
    bins, offset, digits = tl.arange(0, E_BINS), tl.arange(0, BLOCK), tl.arange(0, DIGIT)
    total = tl.load(totals + bins, mask=bins < E, other=0)
    kept_counts = tl.minimum(total, capacity)
    start = tl.cumsum(kept_counts, 0) - kept_counts
    num_rows = tl.sum(kept_counts, 0)
    if expert == 0:
        tl.store(expert_offsets + bins, start, mask=bins < E)
        tl.store(expert_offsets + E + bins, num_rows + bins, mask=bins < 1)
    row = tl.sum(tl.where(bins == expert, start, 0), 0)
    staged = tl.sum(tl.where(bins < expert, total, 0), 0)
    num_entries_of_expert = tl.sum(tl.where(bins == expert, total, 0), 0)

    # Find the smallest kept weight, digit by digit from the top; `num_wanted` entries with that weight are kept.
    threshold, num_wanted = tl.zeros((), tl.uint32), tl.minimum(num_entries_of_expert, capacity)
    num_eligible = tl.where(num_wanted > 0, num_entries_of_expert, 0)
    for step in tl.static_range(4):
        low = 24 - 8 * step
        count = tl.zeros((DIGIT,), tl.int32)
        for begin in range(0, num_entries_of_expert, BLOCK):
            in_range = begin + offset < num_entries_of_expert
            sort_key = _make_sort_key(tl.load(staged_weights + staged + begin + offset, mask=in_range, other=0.0))
            if step > 0:
                in_range = in_range & ((sort_key >> (low + 8)) == (threshold >> (low + 8)))
            count += tl.histogram(((sort_key >> low) & (DIGIT - 1)).to(tl.int32), DIGIT, mask=in_range)
        count_above = tl.sum(count, 0) - tl.cumsum(count, 0)
        digit = tl.sum(tl.where((count_above < num_wanted) & (count_above + count >= num_wanted), digits, 0), 0)
        num_wanted -= tl.sum(tl.where(digits == digit, count_above, 0), 0)
        threshold = threshold | (digit.to(tl.uint32) << low)

    equal_before = tl.zeros((), tl.int32)
    for begin in range(0, num_entries_of_expert, BLOCK):
        in_range = begin + offset < num_entries_of_expert
        weight = tl.load(staged_weights + staged + begin + offset, mask=in_range, other=0.0)
        entry = tl.load(entries + staged + begin + offset, mask=in_range, other=0)
        sort_key = _make_sort_key(weight)
        equal = (in_range & (sort_key == threshold)).to(tl.int32)
        rank = equal_before + tl.cumsum(equal, 0) - equal
        is_kept = (begin + offset < num_eligible) & ((sort_key > threshold) | ((equal > 0) & (rank < num_wanted)))
        position = row + tl.cumsum(is_kept.to(tl.int32), 0) - 1
        tl.store(token_ids + position, entry // K, mask=is_kept)
        tl.store(slot_ids + position, entry % K, mask=is_kept)
        tl.store(combine_weights + position, weight, mask=is_kept)
        tl.store(inverse + entry, tl.where(is_kept, position, -1), mask=in_range)
        row += tl.sum(is_kept.to(tl.int32), 0)
        equal_before += tl.sum(equal, 0)

    for begin in range(num_rows + expert * BLOCK, num_entries, E * BLOCK):
        tail = begin + offset
        tl.store(token_ids + tail, tl.zeros_like(tail), mask=tail < num_entries)
        tl.store(slot_ids + tail, tl.zeros_like(tail), mask=tail < num_entries)
        zero = tl.zeros((BLOCK,), combine_weights.dtype.element_ty)
        tl.store(combine_weights + tail, zero, mask=tail < num_entries)


@triton.jit(do_not_specialize=_VARYING)
def gather_inverse_kernel(grad, inverse, out, num_entries, BLOCK: tl.constexpr):
    entry = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    row = tl.load(inverse + entry, mask=entry < num_entries, other=-1)
    tl.store(out + entry, tl.load(grad + row, mask=row >= 0, other=0.0), mask=entry < num_entries)


def build_pft(
    topk_ids: Tensor,
    topk_weights: Tensor | None,
    keep: Tensor | None,
    *,
    num_experts: int,
    capacity: int | None = None,
    drop: str = "none",
    num_rows: Tensor | None = None,
    block: int | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """See `ir.ops.token_routing.build_pft`. `block` (a power of two) is for tests."""
    key = ("build_pft", num_experts, capacity, drop, block)
    arguments, room = (topk_ids, topk_weights, keep), round_up_rows(num_rows, topk_ids)

    def host_code() -> list[Tensor]:
        return _build_pft(*arguments, room, num_experts, capacity, drop, block)

    if num_rows is None:
        results = replay_or_record(key, arguments, (), host_code)
    else:  # rows from other ranks: sizes differ in each call, so a tape would not help
        with use_device(topk_ids.device):
            results = host_code()
    return tuple(results)  # pyright: ignore[reportReturnType]


def _build_pft(
    topk_ids: Tensor,
    topk_weights: Tensor | None,
    keep: Tensor | None,
    room: int,
    num_experts: int,
    capacity: int | None,
    drop: str,
    block: int | None,
) -> list[Tensor]:
    num_entries, top_k, device = topk_ids.numel(), topk_ids.shape[1], topk_ids.device
    block = block or _BLOCK
    num_blocks, bins = cdiv(num_entries, block), max(16, triton.next_power_of_2(num_experts))
    if drop == "position_slot" and top_k == 1:
        drop = "position_token"
    queues = top_k if drop == "position_slot" else 1
    capacity = num_entries if capacity is None else max(0, min(capacity, num_entries))
    has_weights, by_weight = topk_weights is not None, drop == "weight"
    ids = topk_ids if topk_ids.element_size() >= 4 else apply(Tensor.int, topk_ids)
    ids, weights = (t if t is None or t.is_contiguous() else apply(Tensor.contiguous, t) for t in (ids, topk_weights))
    if keep is not None:
        is_flat = keep.is_contiguous()
        keep = keep.view(torch.uint8) if is_flat else apply(lambda t: t.contiguous().view(torch.uint8), keep)

    # One allocation for all scratch arrays, one for each result.
    sizes = (num_experts * queues * num_blocks, num_experts * num_blocks, num_experts, num_experts)
    scratch = empty((sum(sizes) + (num_entries if by_weight else 0),), torch.int32, device)
    counts, begins, totals, cuts, entries = scratch.split([*sizes, scratch.shape[0] - sum(sizes)])
    token_ids, slot_ids = (empty((room,), torch.int32, device) for _ in range(2))
    expert_offsets = empty((num_experts + 1,), torch.int32, device)
    inverse = empty(tuple(topk_ids.shape), torch.int32, device)
    weights_form = ((0,), torch.float32) if weights is None else ((room,), weights.dtype)
    combine_weights = empty(*weights_form, device)
    if num_entries == 0:
        return [token_ids, slot_ids, torch.zeros_like(expert_offsets), inverse, combine_weights]

    has_keep = keep is not None
    capped, by_slot = drop == "position_token", drop == "position_slot"
    sizes_of_list = (num_entries, num_blocks)
    constants: dict[str, Any] = dict(E=num_experts, E_BINS=bins, K=top_k, QUEUES=queues, BLOCK=block)
    constants["HAS_KEEP"] = has_keep
    launch(count_kernel, (num_blocks,), (ids, keep, counts, *sizes_of_list), constants, warps=_WARPS)
    chunk = min(1024, max(16, triton.next_power_of_2(num_blocks)))
    queue_pad = triton.next_power_of_2(queues)
    constants = dict(E=num_experts, K=top_k, QUEUES=queues, Q_PAD=queue_pad, BLOCK=block)
    launch(
        scan_kernel,
        (num_experts,),
        (ids, keep, counts, begins, totals, cuts, *sizes_of_list, capacity),
        {**constants, "CHUNK": max(16, chunk // queue_pad), "HAS_KEEP": has_keep, "CAPPED": capped},
        warps=1 if chunk <= 256 and queues == 1 else 4,
    )
    staged = empty(*weights_form, device) if by_weight else combine_weights
    constants = dict(E=num_experts, E_BINS=bins, K=top_k, BLOCK=block, LOG_BLOCK=block.bit_length() - 1)
    constants |= dict(HAS_KEEP=has_keep, HAS_WEIGHTS=has_weights, CAPPED=capped, BY_SLOT=by_slot, STAGE=by_weight)
    args = (ids, keep, weights, begins, totals, cuts, entries if by_weight else token_ids, slot_ids, expert_offsets)
    args = (*args, inverse, staged, *sizes_of_list, capacity, room)
    launch(scatter_kernel, (num_blocks,), args, constants, warps=_WARPS)
    if by_weight:
        args = (entries, staged, totals, token_ids, slot_ids, expert_offsets, inverse, combine_weights)
        constants = dict(E=num_experts, E_BINS=bins, K=top_k, BLOCK=block, DIGIT=_DIGIT)
        launch(select_kernel, (num_experts,), (*args, num_entries, capacity), constants, warps=8)
    return [token_ids, slot_ids, expert_offsets, inverse, combine_weights]


def build_pft_backward(grad: Tensor, inverse: Tensor) -> Tensor:
    """See `ir.ops.token_routing.build_pft_backward`."""

    out = empty(tuple(inverse.shape), grad.dtype, grad.device)
    if inverse.numel():
        with use_device(grad.device):
            args = (grad.contiguous(), inverse, out, inverse.numel())
            launch(gather_inverse_kernel, (cdiv(inverse.numel(), _BLOCK),), args, dict(BLOCK=_BLOCK))
    return out
