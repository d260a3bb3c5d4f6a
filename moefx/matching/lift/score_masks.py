"""Find the scores that a program masks between two selections, as functions of the first selection.

The mask makes the second selection choose another expert than the first one::

    first = scores.argmax(-1)
    second = scores.scatter(-1, first[:, None], float("-inf")).argmax(-1)
"""

# torch.fx types the arguments of a node as a wide union, and this code knows the op and so the type.
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false
# pyright: reportOptionalMemberAccess=false, reportOptionalSubscript=false, reportReturnType=false
# pyright: reportGeneralTypeIssues=false, reportOptionalIterable=false, reportOperatorIssue=false

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import fx

from ...capture.tracing.op_sets import CONTRACTIONS
from ...ir.node_meta import find_original
from ...ir.node_values import get_op_name
from ..facts.graph_nodes import is_random
from ..terms.term import MASKED

_PASSED_ON = {"_to_copy", "alias", "clone", "detach"}
_SOFTMAX = {"_log_softmax", "_softmax", "log_softmax", "softmax"}
_NOT_LOW = {"_softmax", "exp", "relu", "sigmoid", "softmax", "softplus", "tanh"}
_COMBINED = {"add", "div", "mul", "neg", "sub", *_PASSED_ON}


class Derivation(NamedTuple):
    """The elements of an integer tensor as functions of variables.

    Attributes:
        variable: the variable on which each element depends; 0 if it is constant.
        values: the element at each of the N positions that the variable can hold.
    """

    variable: torch.Tensor  # int64 [*shape]
    values: torch.Tensor  # [N, *shape]

    def at(self, position: int) -> torch.Tensor:
        return self.values[min(position, len(self.values) - 1)]


def find_score_masks(scores: fx.Node, is_one: bool, derive: Callable[[Any], Derivation | None]) -> list[Derivation]:
    """Find the masked scores, as functions of earlier variables. Empty if other scores may be as low.

    Args:
        derive: gives the one derivation of a node of integers, or None.
        is_one: whether a single score is selected. The second largest probability may be 0, like masked ones.
    """
    masks: list[Derivation] = []
    node: Any = scores
    while isinstance(node, fx.Node) and node.op == "call_function":
        name, args = get_op_name(node), node.args
        if name in _PASSED_ON or (name in _SOFTMAX and is_one and not masks):
            node = args[0]
            continue
        written: list[Derivation | None] = []  # the positions that this op masks
        earlier: Any = args[0]
        if name == "masked_fill" and _is_low(args[2]):
            written = [derive(args[1])]
        elif name == "where" and len(args) == 3 and _is_low(args[1]):
            written, earlier = [derive(args[0])], args[2]
        elif name == "where" and len(args) == 3 and _is_low(args[2]):
            derivation, earlier = derive(args[0]), args[1]
            written = [derivation and derivation._replace(values=derivation.values == 0)]
        elif name == "scatter" and _is_low(args[3]):
            written = [
                scatter_positions(derivation, args[1], node.meta["val"].shape)
                for derivation in _split_columns(derive(args[2]), args[1])
            ]
        elif name == "index_put" and _is_low(args[2]):
            index = _find_row_index(node)
            derivation = derive(index) if index is not None else None
            written = [
                derivation
                and scatter_positions(
                    Derivation(derivation.variable[..., None], derivation.values[..., None]),
                    -1,
                    node.meta["val"].shape,
                )
            ]
        else:
            break
        if not written or None in written:
            return []
        masks += [Derivation(mask.variable, mask.values != 0) for mask in written if mask is not None]
        node = earlier
    return [] if _may_be_low(node) else masks


def _split_columns(derivation: Derivation | None, axis: int) -> list[Derivation]:
    """Split a derivation into those of the entries at each index along an axis."""
    if derivation is None:
        return []
    axis %= derivation.variable.dim()
    parts = zip(derivation.variable.split(1, axis), derivation.values.split(1, axis + 1), strict=True)
    return [Derivation(variable, values) for variable, values in parts]


def _may_be_low(node: Any) -> bool:
    """Return whether the program itself may make scores as low as masked ones."""
    stack, seen = [node], set()
    while stack:
        n = stack.pop()
        if not isinstance(n, fx.Node) or n in seen:
            continue
        seen.add(n)
        name = get_op_name(n)
        is_made = n.op == "call_function" and (n.target in CONTRACTIONS or name in _NOT_LOW or is_random(n))
        if is_made or (n.op == "get_attr" and n.meta["kind"] == "param"):
            continue
        if name not in _COMBINED:
            return True
        stack += n.all_input_nodes
    return False


def _is_low(value: Any) -> bool:
    """Return whether a number masks the score that it replaces."""
    while isinstance(value, fx.Node) and get_op_name(value) in ("_to_copy", "detach", "lift_fresh"):
        value = value.args[0]
    if isinstance(value, fx.Node) and get_op_name(value) in ("full", "full_like", "scalar_tensor"):
        value = value.args[0 if get_op_name(value) == "scalar_tensor" else 1]
    elif isinstance(value, fx.Node) and value.op == "get_attr" and value.meta["literal"]:
        original = value.meta["concrete"] if "concrete" in value.meta else find_original(value)
        value = float(original) if isinstance(original, torch.Tensor) and original.numel() == 1 else 0
    return type(value) in (int, float) and value <= MASKED


def scatter_positions(index: Derivation | None, axis: int, shape: torch.Size) -> Derivation | None:
    """Derive the mask of the entries that a write at one index along an axis changes."""
    if index is None or index.variable.dim() != len(shape) or index.variable.shape[axis] != 1:
        return None
    axis %= len(shape)
    if any(n != m for i, (n, m) in enumerate(zip(index.variable.shape, shape, strict=True)) if i != axis):
        return None
    indices = torch.arange(shape[axis]).view(-1, *[1] * (len(shape) - axis - 1))
    return Derivation(index.variable.expand(shape), (index.values % shape[axis]) == indices)


def _find_row_index(node: fx.Node) -> fx.Node | None:
    """Return `index` of `scores[torch.arange(n), index] = number`."""
    indices, shape = node.args[1], node.args[0].meta["val"].shape
    if len(indices) != len(shape) or len(shape) != 2 or not all(isinstance(i, fx.Node) for i in indices):
        return None
    rows, index = indices
    while get_op_name(rows) == "detach":
        rows = rows.args[0]
    is_each = not rows.all_input_nodes and torch.equal(rows.meta["val"], torch.arange(shape[0]))
    return index if is_each and index.meta["val"].shape == shape[:1] else None
