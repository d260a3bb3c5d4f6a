"""Find functions of the experts' loads, such as the number of idle experts. A part of `count_functions`.

Protects from a statistic with one value under the few patterns of loads that captures show::

    loads = torch.bincount(chosen.flatten(), minlength=num_experts)
    weights = weights * torch.where((loads == 0).sum() == 2, 0.5, 1.0)

`vary_count_functions` forces other values of these functions.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from ...capture.tracing.capture_result import Capture
from ...capture.tracing.op_sets import SHAPE_ONLY
from .graph_nodes import depends_on_floats, follows_from_integers


def is_load_statistic(capture: Capture, node: fx.Node) -> bool:
    """Return whether a value follows from loads alone, and another op uses it.

    A mask of one expert's tokens has an axis of tokens, so `(ids == e).any()` is no such statistic. `loads.min() == 0`
    is one. `branch_outcomes` looks at a value that only Python reads.
    """
    if node.op != "call_function" or node.target in SHAPE_ONLY or not node.users or not has_loads(capture, node):
        return False
    chosen = [a for a in node.all_input_nodes if depends_on_floats(a)]
    return bool(chosen) and all(has_loads(capture, a) for a in chosen)


def has_loads(capture: Capture, node: fx.Node) -> bool:
    """Return whether a value follows from the choice of experts, and has no axis of tokens."""
    val: Any = node.meta.get("val")
    values = val if isinstance(val, (tuple, list)) else [val]
    return (
        follows_from_integers(node)
        and depends_on_floats(node)
        and all(_has_no_tokens(capture, node, v) for v in values)
    )


def _has_no_tokens(capture: Capture, node: fx.Node, val: Any) -> bool:
    if not isinstance(val, torch.Tensor) or (val.dim() and node.meta.get("ragged")):
        return False
    sizes = capture.sizes
    # an axis of tokens, or of several entries per token, such as choices
    return not any(n > 1 and (n in sizes.expressions or n % max(2, sizes.tokens) == 0) for n in val.shape)


__all__ = ["has_loads", "is_load_statistic"]
