"""Count the bytes that element-wise operations of modules read and write, for the planner.

Matrix products and attention are limited by arithmetic, and the planner has formulas for them. Norms, rotary
embeddings, casts and sums of residuals are limited by memory. In a model of transformers that runs eagerly they take
about as long as attention itself.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx

from ..tracing.op_sets import CONTRACTIONS, SHAPE_ONLY


def count_traffic(nodes: Sequence[fx.Node], calls: Mapping[str, range]) -> dict[str, float]:
    """Count the bytes of each module's call.

    Args:
        nodes: nodes of a captured run, in program order.
        calls: the positions of each call's nodes.
    """
    sums = list(itertools.accumulate(map(_count_bytes, nodes), initial=0))
    return {name: float(sums[positions.stop] - sums[positions.start]) for name, positions in calls.items()}


def _count_bytes(node: fx.Node) -> int:
    if node.op != "call_function" or node.target in CONTRACTIONS or _is_view(node.target):
        return 0
    inputs = [] if node.target in SHAPE_ONLY else node.all_input_nodes
    return sum(_size(value) for value in (node, *inputs))


def _is_view(target: Any) -> bool:
    """Return whether an op's result shares its argument's memory."""
    returns = target._schema.returns if isinstance(target, torch._ops.OpOverload) else ()
    return any(value.alias_info is not None and not value.alias_info.is_write for value in returns)


def _size(node: fx.Node) -> int:
    """Return the bytes of a node's tensors. An expanded tensor counts with its own memory."""
    values = node.meta.get("val")
    tensors = values if isinstance(values, (tuple, list)) else (values,)
    return sum(_stored_elements(t) * t.element_size() for t in tensors if isinstance(t, torch.Tensor))


def _stored_elements(tensor: torch.Tensor) -> int:
    sizes = [int(size) for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if stride]
    return torch.Size(sizes).numel()
