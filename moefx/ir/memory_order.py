"""The memory order of a tensor's axes. Code after a block may depend on it (`view`, `as_strided`)."""

from __future__ import annotations

from collections.abc import Sequence


def memory_order(sizes: Sequence[int], strides: Sequence[int]) -> tuple[int, ...] | None:
    """Return the axes from the outermost in memory to the innermost: 0, 1, 2, ... for a contiguous tensor. None if
    there are gaps between elements, or elements share memory."""
    dims = sorted((d for d, n in enumerate(sizes) if n != 1), key=lambda d: -strides[d])
    expected_stride = 1
    for d in reversed(dims):
        if strides[d] != expected_stride:
            return None
        expected_stride *= sizes[d]
    if dims == sorted(dims):
        return tuple(range(len(sizes)))
    return (*(d for d, n in enumerate(sizes) if n == 1), *dims)


def invert_permutation(order: Sequence[int]) -> list[int]:
    """Return the permutation that undoes `order`."""
    return sorted(range(len(order)), key=order.__getitem__)
