"""Arithmetic on shapes and indices: broadcasting, unravelled indices, and the axes that a reshape merges or splits."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def broadcast(shapes: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    """Return the shape to which tensors of these shapes broadcast.

    Raises:
        ValueError: they do not.
    """
    if len(set(shapes)) == 1:
        return shapes[0]
    out = [1] * max(map(len, shapes), default=0)
    for shape in shapes:
        for axis, n in enumerate(shape, len(out) - len(shape)):
            if n != 1:
                if out[axis] not in (1, n):
                    raise ValueError(f"shapes {shapes} do not broadcast")
                out[axis] = n
    return tuple(out)


def unravel(i: int, shape: Sequence[int]) -> list[int]:
    """Return the coordinates of flat index `i`."""
    out = []
    for n in reversed(shape):
        i, at = divmod(i, n)
        out.append(at)
    return out[::-1]


def list_coordinates(shape: Sequence[int]) -> torch.Tensor:
    """Return the coordinates of every element of a tensor of this shape: [len(shape), *shape]."""
    return torch.stack(torch.meshgrid(*[torch.arange(n) for n in shape], indexing="ij"))


def reshape_group(old: tuple[int, ...], new: tuple[int, ...], axis: int) -> tuple[list[int], list[int]]:
    """Return the input and output axes of the smallest group of a reshape that contains output axis `axis`."""
    i = j = 0
    while i < len(old) or j < len(new):
        ins, outs, a, b = [], [], 1, 1
        while not (ins or outs) or a != b or (i < len(old) and old[i] == 1):
            if i < len(old) and (a <= b or old[i] == 1) and not (ins and a == b and old[i] != 1):
                ins.append(i)
                a *= old[i]
                i += 1
            elif j < len(new):
                outs.append(j)
                b *= new[j]
                j += 1
            else:
                break
        if axis in outs:
            return [d for d in ins if old[d] != 1], [d for d in outs if new[d] != 1]
    raise AssertionError((old, new, axis))


def without_row(indices: torch.Tensor, q: int) -> torch.Tensor:
    """Return the index tensor without the coordinates of axis `q`."""
    return torch.cat([indices[:q], indices[q + 1 :]])
