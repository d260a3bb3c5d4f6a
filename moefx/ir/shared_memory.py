"""Find tensors that share memory with one that a graph writes to.

A graph reads the values that its arguments had before the call. The original may read new ones: in `block(h, h)`,
`residual += x` changes `x`, too.
"""

from __future__ import annotations

import torch
from torch import Tensor, fx

from .argument_binding import Leaves, format_path

aten = torch.ops.aten


def find_written_inputs(graph: fx.Graph) -> list[int]:
    """Return the positions of the placeholders that a graph writes to."""
    placeholders = [n for n in graph.nodes if n.op == "placeholder"]
    written = {n.args[0] for n in graph.nodes if n.target is aten.copy_.default}
    return [i for i, n in enumerate(placeholders) if n in written]


def find_written_buffers(graph: fx.Graph) -> list[str]:
    """Return the names of the buffers that a graph writes to."""
    written = [n.args[0] for n in graph.nodes if n.target is aten.copy_.default]
    return [n.target for n in written if n.op == "get_attr"]


def find_overlap(written: Leaves, others: Leaves) -> tuple[str, str] | None:
    """Find a tensor that is written to and another one that shares memory with it. Returns their names, or None."""
    pairs = ((target, other) for target in written for other in others if other is not target)
    return next(((format_path(a[0]), format_path(b[0])) for a, b in pairs if share_memory(a[1], b[1])), None)


def share_memory(a: object, b: object) -> bool:
    """Return whether the memory between the first and the last elements of two tensors overlaps."""
    if a is b:
        return isinstance(a, Tensor)
    if not isinstance(a, Tensor) or not isinstance(b, Tensor) or not (a.numel() and b.numel()):
        return False
    if a.layout is not torch.strided or b.layout is not torch.strided:
        return False
    if a.untyped_storage() is not b.untyped_storage():
        return False
    (begin_a, end_a), (begin_b, end_b) = _find_range(a), _find_range(b)
    return begin_a < end_b and begin_b < end_a


def _find_range(t: Tensor) -> tuple[int, int]:
    """Return the first byte of a tensor in its storage, and the one behind the last."""
    first = int(t.storage_offset())
    last = first + sum((n - 1) * step for n, step in zip(t.shape, t.stride(), strict=True))
    return first * t.itemsize, (last + 1) * t.itemsize
