"""Kernels over the destinations of slots: they assign destinations, find pilots, and count rows.

A program has a block of tokens with all their slots. See `ir.ops.exchange_routes` for destinations.
"""

from __future__ import annotations

import triton
import triton.language as tl

_VARYING = ["num_tokens"]


@triton.jit(do_not_specialize=["num_entries"])
def destinations_kernel(
    topk_ids, keep, table, destinations, num_entries, E,
    HAS_KEEP: tl.constexpr, HAS_TABLE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """destinations = table[id], or the id without a table; -1 if the slot is dropped or the id is outside [0, E)."""
    entry = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    in_list = entry < num_entries
    expert = tl.load(topk_ids + entry, mask=in_list, other=-1)
    valid = in_list & (expert >= 0) & (expert < E)
    if HAS_KEEP:
        valid = valid & (tl.load(keep + entry, mask=in_list, other=0) != 0)
    destination = expert.to(tl.int32)
    if HAS_TABLE:
        destination = tl.load(table + expert, mask=valid, other=-1)
    tl.store(destinations + entry, tl.where(valid, destination, -1), mask=in_list)


@triton.jit
def _find_unit(destinations, token, k: tl.constexpr, in_list, begin, end, near, unit_size, K: tl.constexpr):
    """Return the destination unit (of `unit_size` destinations) of slot k of each token, or -1 if the slot does not
    count.

    With near = 1 only slots with the destinations begin ... end - 1 count, otherwise only the others.
    """
    destination = tl.load(destinations + token * K + k, mask=in_list, other=-1)
    inside = ((destination >= begin) & (destination < end)).to(tl.int32)
    return tl.where((destination >= 0) & (inside == near), destination // unit_size, -1)


@triton.jit
def _find_pilot(destinations, token, k: tl.constexpr, in_list, begin, end, near, dedup, unit_size, K: tl.constexpr):
    """Return `_find_unit`, with dedup = 1 also -1 if an earlier slot of the token has the same unit."""
    unit = _find_unit(destinations, token, k, in_list, begin, end, near, unit_size, K)
    first = unit >= 0
    for other in tl.static_range(k):
        first = first & (
            (_find_unit(destinations, token, other, in_list, begin, end, near, unit_size, K) != unit) | (dedup == 0)
        )
    return tl.where(first, unit, -1)


@triton.jit(do_not_specialize=_VARYING)
def pilots_kernel(destinations, pilots, num_tokens, destinations_per_rank, K: tl.constexpr, BLOCK: tl.constexpr):
    """pilots [S,K] = the rank of each slot that is its token's first one on that rank, -1 for the others."""
    token = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    in_list = token < num_tokens
    for k in tl.static_range(K):
        rank = _find_pilot(destinations, token, k, in_list, 0, 0, 0, 1, destinations_per_rank, K)
        tl.store(pilots + token * K + k, rank, mask=in_list)


@triton.jit(do_not_specialize=_VARYING)
def count_rows_kernel(
    destinations, counts, requests, num_tokens, K: tl.constexpr, BINS: tl.constexpr, BLOCK: tl.constexpr
):
    """counts[first_count + u] += number of rows for unit u of `unit_size` destinations, for each row of `requests`.

    A request is (first_count, units, unit_size, dedup, near, begin, end). With near = 1 units are numbered from
    destination `begin`. Sums of integers do not depend on the order of the atomics.
    """
    token = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    in_list = token < num_tokens
    request = requests + tl.program_id(1) * 7
    first_count, units, unit_size, dedup = (
        tl.load(request),
        tl.load(request + 1),
        tl.load(request + 2),
        tl.load(request + 3),
    )
    near, begin, end = tl.load(request + 4), tl.load(request + 5), tl.load(request + 6)
    bins = tl.arange(0, BINS)
    count = tl.zeros((BINS,), tl.int32)
    for k in tl.static_range(K):
        unit = _find_pilot(destinations, token, k, in_list, begin, end, near, dedup, unit_size, K)
        counted = in_list & (unit >= 0)
        unit -= near * (begin // unit_size)
        count += tl.histogram(tl.where(counted, unit, 0), BINS, mask=counted)
    tl.atomic_add(counts + first_count + bins, count.to(tl.int64), mask=(bins < units) & (count > 0))
