"""Kernels over the destinations of slots: they assign destinations, find pilots, and count rows.

A program has a block of tokens with all their slots. A destination (`place`) is rank * (destinations of a
rank) + position on the rank.
"""

from __future__ import annotations

import triton
import triton.language as tl

_VARYING = ["num_tokens"]


@triton.jit(do_not_specialize=["num_entries"])
def place_kernel(
    topk_ids, keep, table, place, num_entries, E,
    HAS_KEEP: tl.constexpr, HAS_TABLE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """place = table[id], or the id itself without a table; -1 if the slot is dropped or the id is outside [0, E)."""
    entry = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    in_list = entry < num_entries
    expert = tl.load(topk_ids + entry, mask=in_list, other=-1)
    valid = in_list & (expert >= 0) & (expert < E)
    if HAS_KEEP:
        valid = valid & (tl.load(keep + entry, mask=in_list, other=0) != 0)
    destination = expert.to(tl.int32)
    if HAS_TABLE:
        destination = tl.load(table + expert, mask=valid, other=-1)
    tl.store(place + entry, tl.where(valid, destination, -1), mask=in_list)


@triton.jit
def _unit(place, token, k: tl.constexpr, in_list, begin, end, near, slots, K: tl.constexpr):
    """Destination unit (of `slots` destinations) of slot k of each token, or -1 if the slot does not count.

    Slots with the destinations begin ... end - 1 do not count; with near = 1 only they count.
    """
    at = tl.load(place + token * K + k, mask=in_list, other=-1)
    inside = ((at >= begin) & (at < end)).to(tl.int32)
    return tl.where((at >= 0) & (inside == near), at // slots, -1)


@triton.jit
def _pilot(place, token, k: tl.constexpr, in_list, begin, end, near, dedup, slots, K: tl.constexpr):
    """As `_unit`. With dedup = 1, also -1 if an earlier slot of the token has the same unit."""
    unit = _unit(place, token, k, in_list, begin, end, near, slots, K)
    first = unit >= 0
    for other in tl.static_range(k):
        first = first & ((_unit(place, token, other, in_list, begin, end, near, slots, K) != unit) | (dedup == 0))
    return tl.where(first, unit, -1)


@triton.jit(do_not_specialize=_VARYING)
def pilots_kernel(place, pilot, num_tokens, num_slots, K: tl.constexpr, BLOCK: tl.constexpr):
    """Return the rank of each slot [S,K] that is its token's first one on that rank, and -1 for the others."""
    token = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    in_list = token < num_tokens
    for k in tl.static_range(K):
        rank = _pilot(place, token, k, in_list, 0, 0, 0, 1, num_slots, K)
        tl.store(pilot + token * K + k, rank, mask=in_list)


@triton.jit(do_not_specialize=_VARYING)
def count_rows_kernel(place, counts, wanted, num_tokens, K: tl.constexpr, BINS: tl.constexpr, BLOCK: tl.constexpr):
    """counts[stored + u] += number of rows for unit u of `slots` destinations, for each row n of `wanted`.

    wanted[n] = (stored, units, slots, dedup, near, begin, end). With near = 1 units are numbered from place `begin`.
    The sums are of integers, so they do not depend on the order of the atomics.
    """
    token = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    in_list = token < num_tokens
    request = wanted + tl.program_id(1) * 7
    stored, units, slots, dedup = tl.load(request), tl.load(request + 1), tl.load(request + 2), tl.load(request + 3)
    near, begin, end = tl.load(request + 4), tl.load(request + 5), tl.load(request + 6)
    bins = tl.arange(0, BINS)
    count = tl.zeros((BINS,), tl.int32)
    for k in tl.static_range(K):
        unit = _pilot(place, token, k, in_list, begin, end, near, dedup, slots, K)
        counted = in_list & (unit >= 0)
        unit -= near * (begin // slots)
        count += tl.histogram(tl.where(counted, unit, 0), BINS, mask=counted)
    tl.atomic_add(counts + stored + bins, count.to(tl.int64), mask=(bins < units) & (count > 0))
