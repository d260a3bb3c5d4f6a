"""Align the effects of a block, such as writes to buffers, over all captures."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch.utils._pytree as pytree
from torch import fx

from ...capture.tracing.capture_result import Effect
from ...errors import Refused
from .aligned_nodes import AlignedNodes


class AlignedEffect(NamedTuple):
    """An effect of the block, with its new value in all captures: one `AlignedNodes`, or the leaves of a container."""

    effect: Effect
    leaves: list[Any]


def align_effects(effects: Sequence[Sequence[Effect]]) -> tuple[list[AlignedEffect], list[Effect]]:
    """Align the effects of all captures.

    Args:
        effects: by capture, its effects in order.

    Returns:
        The effects with tensors, and those that set an attribute to a plain value.

    Raises:
        Refused: the captures change other things, or give an attribute values of another structure.
    """
    _require_equal_targets(effects)
    aligned: list[AlignedEffect] = []
    states: list[Effect] = []
    for column in zip(*effects, strict=True):
        if column[0].kind == "state":
            states.append(column[0])
            continue
        leaves, is_constant = _align_leaves(column)
        aligned.append(AlignedEffect(column[0], leaves))
        states += [] if is_constant else [column[0]]
    return aligned, states


def _align_leaves(column: Sequence[Effect]) -> tuple[list[Any], bool]:
    """Return the leaves of an effect's value, `AlignedNodes` over the captures or plain values; and whether the plain
    values are equal in all captures."""
    flat = [pytree.tree_flatten(e.node) for e in column]
    if any(spec != flat[0][1] for _, spec in flat):
        raise Refused(
            f"the value of the block's attribute {column[0].target} depends on the routing",
            culprits=(str(column[0].target),),
            source=_find_line(column),
            remedy="give it the same number of tensors in every call, such as one for each expert",
        )
    leaves: list[Any] = []
    is_constant = True
    for values in zip(*[values for values, _ in flat], strict=True):
        if isinstance(values[0], fx.Node):
            leaves.append(AlignedNodes(values))
        else:
            leaves.append(values[0])
            is_constant = is_constant and all(v == values[0] for v in values)
    return leaves, is_constant


def _require_equal_targets(per_capture: Sequence[Sequence[Effect]]) -> None:
    """Require that all captures change the same buffers, inputs and attributes, in the same order."""
    targets = [[(e.kind, str(e.target)) for e in effects] for effects in per_capture]
    if all(t == targets[0] for t in targets):
        return
    differing = {
        target for t in targets for target in t if any(t.count(target) != other.count(target) for other in targets)
    }
    culprits = tuple(sorted({name for _, name in differing}))
    raise Refused(
        "which buffers or attributes the block changes depends on the routing",
        culprits=culprits,
        source=_find_line([e for effects in per_capture for e in effects if str(e.target) in culprits or not culprits]),
        remedy="change them in every call, and choose between the values by torch.where",
    )


def _find_line(effects: Sequence[Effect]) -> str:
    """Return the user's line that computes the new value of an effect, or "" if none is a tensor."""
    nodes = (node for e in effects for node in pytree.tree_leaves(e.node) if isinstance(node, fx.Node))
    return next((str(node.meta["source"]) for node in nodes if "source" in node.meta), "")
