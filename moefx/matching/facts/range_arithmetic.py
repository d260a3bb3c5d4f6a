"""Arithmetic and comparisons of ranges of integers. See `integer_ranges`.

Bounds are exact up to `FAR`; from there on a number may be any. A result that may exceed int64 may be any number at
all, because it wraps around: the product of a token id and a large prime has no sign.
"""

from __future__ import annotations

import operator

import torch

Range = tuple[torch.Tensor, torch.Tensor]  # lo, hi; they broadcast to the shape of the node
UNBOUNDED = 1 << 40  # the bound of numbers that grow with the number of tokens
FAR = 1 << 62  # no bound
_MAX_TOKENS = 1 << 31  # no memory holds more
_INT64 = torch.iinfo(torch.int64)


def compute_range(name: str, a: Range, b: Range) -> Range | None:
    """Return the range of a binary op; None if it is not known."""
    a, b = (tuple(bound.to(torch.int64) for bound in bounds) for bounds in (a, b))  # type: ignore[assignment]
    counts = _is_count(*a) | _is_count(*b)
    (alo, ahi), (blo, bhi) = limit_counts(a), limit_counts(b)
    if name == "add":
        return bound_wrapped(alo + blo, ahi + bhi, alo.double() + blo, ahi.double() + bhi, counts)
    if name == "sub":
        return bound_wrapped(alo - bhi, ahi - blo, alo.double() - bhi, ahi.double() - blo, counts)
    if name == "mul":
        ends = torch.stack(torch.broadcast_tensors(*[x * y for x in (alo, ahi) for y in (blo, bhi)]))
        reals = torch.stack(torch.broadcast_tensors(*[x.double() * y for x in (alo, ahi) for y in (blo, bhi)]))
        return bound_wrapped(ends.amin(0), ends.amax(0), reals.amin(0), reals.amax(0), counts)
    if bool((alo < 0).any() or (blo < 0).any()):
        return None
    if name == "bitwise_and":
        return torch.zeros_like(alo + blo), torch.minimum(a[1], b[1])
    # bitwise_or: at least the larger operand, at most the sum, which does not wrap around
    return bound_wrapped(
        torch.maximum(alo, blo), ahi + bhi, 0 * alo.double(), (ahi.double() + bhi).clamp(max=FAR), counts
    )


def compute_sum_over_tokens(summands: Range, result: Range, is_exact: torch.Tensor) -> Range:
    """Return the range of a sum that runs over more tokens in other calls.

    Args:
        result: the sums of the bounds, at the sizes of the capture.
        is_exact: whether a sum is `result` at all sizes.
    """
    lo, hi = (bound.to(torch.int64).double() for bound in limit_counts(summands))
    least = min(float(lo.min()), 0) * _MAX_TOKENS if lo.numel() else 0.0
    largest = max(float(hi.max()), 1) * _MAX_TOKENS if hi.numel() else 0.0
    below = result[0] < 0
    real_lo = torch.where(below & ~is_exact, min(least, -float(_MAX_TOKENS)), result[0].double())
    real_hi = torch.where(is_exact, result[1].double(), largest)
    return bound_wrapped(
        torch.where(below & ~is_exact, real_lo.clamp(min=-FAR).to(torch.int64), result[0]),
        torch.where(is_exact, result[1], real_hi.clamp(max=FAR).to(torch.int64)),
        real_lo,
        real_hi,
        ~is_exact,
    )


def bound_wrapped(
    lo: torch.Tensor, hi: torch.Tensor, real_lo: torch.Tensor, real_hi: torch.Tensor, counts: torch.Tensor
) -> Range:
    """Return bounds that hold although int64 wraps around.

    Args:
        lo, hi: the bounds as int64 computes them.
        real_lo, real_hi: the same in float64, which does not wrap around.
        counts: whether the number grows with the number of tokens. Such numbers are `UNBOUNDED`, unless larger.
    """
    wraps = (real_hi > _INT64.max) | (real_lo < _INT64.min)
    lo = torch.where(counts & (real_lo <= -_MAX_TOKENS // 2) & (real_lo >= -UNBOUNDED), -UNBOUNDED, lo)
    hi = torch.where(counts & (real_hi >= _MAX_TOKENS // 2) & (real_hi <= UNBOUNDED), UNBOUNDED, hi)
    lo = torch.where(wraps | (real_lo <= -FAR), -FAR, torch.where(real_lo >= FAR, FAR - 1, lo))
    hi = torch.where(wraps | (real_hi >= FAR), FAR, torch.where(real_hi <= -FAR, 1 - FAR, hi))
    return lo, hi


def compare(name: str, a: Range, b: Range) -> Range:
    """Return the range of a comparison: whether it must be true, and whether it may be."""
    (alo, ahi), (blo, bhi) = widen(a), widen(b)
    if name in ("eq", "ne"):
        may, must = (alo <= bhi) & (blo <= ahi), (alo == ahi) & (blo == bhi) & (alo == blo)
        return (must, may) if name == "eq" else (~may, ~must)
    if name in ("gt", "greater", "ge"):
        fn = operator.gt if name != "ge" else operator.ge
        return fn(alo, bhi), fn(ahi, blo)
    fn = operator.lt if name == "lt" else operator.le
    return fn(ahi, blo), fn(alo, bhi)


def widen(bounds: Range) -> Range:
    """Replace bounds that are `FAR` by those of int64."""
    lo, hi = bounds
    if lo.dtype is not torch.int64:
        return bounds
    return torch.where(lo <= -FAR, _INT64.min, lo), torch.where(hi >= FAR, _INT64.max, hi)


def wrap_to_dtype(bounds: Range, dtype: torch.dtype) -> Range:
    """Replace bounds that exceed an integer type by those of the type."""
    info = torch.iinfo(dtype)
    fits = (bounds[0] >= info.min) & (bounds[1] <= info.max)
    if dtype is torch.int32:
        fits |= _is_count(*bounds)
    return torch.where(fits, bounds[0], info.min), torch.where(fits, bounds[1], info.max)


def _is_count(lo: torch.Tensor, hi: torch.Tensor) -> torch.Tensor:
    return (lo == -UNBOUNDED) | (hi == UNBOUNDED)


def limit_counts(bounds: Range) -> Range:
    """Replace the bounds of numbers that grow with the number of tokens by the largest number of tokens."""
    lo, hi = bounds
    return torch.where(lo == -UNBOUNDED, -_MAX_TOKENS, lo), torch.where(hi == UNBOUNDED, _MAX_TOKENS, hi)
