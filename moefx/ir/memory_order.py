"""In which order the axes of a tensor lie in memory: code behind a block may ask for it (`view`, `as_strided`)."""

from __future__ import annotations

from collections.abc import Sequence


def memory_order(sizes: Sequence[int], strides: Sequence[int]) -> tuple[int, ...] | None:
    """The axes from the outermost in memory to the innermost: 0, 1, 2, ... where it is contiguous; None where elements
    have gaps between them, or share memory."""
    long = sorted((d for d, n in enumerate(sizes) if n != 1), key=lambda d: -strides[d])
    within = 1
    for d in reversed(long):
        if strides[d] != within:
            return None
        within *= sizes[d]
    if long == sorted(long):
        return tuple(range(len(sizes)))
    return (*(d for d, n in enumerate(sizes) if n == 1), *long)


def invert_permutation(order: Sequence[int]) -> list[int]:
    """The permutation that undoes another."""
    return sorted(range(len(order)), key=order.__getitem__)
