"""Find numbers that follow from the choices of single tokens. More tokens do not change their range.

code = ids[:, 0] * num_experts + ids[:, 1]  # of one token
size = ids.double().norm(dim=-1)  # of one token
rank = F.one_hot(ids, num_experts).cumsum(0)  # of many: grows with the tokens
"""

# torch.fx types the arguments of a node as a wide union, and this code knows the op and so the type.
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportOptionalMemberAccess=false

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.utils._pytree as pytree
from torch import fx

from ...capture.tracing.capture_result import Capture
from ...capture.tracing.node_origins import is_abstract
from ...capture.tracing.op_sets import CONTRACTIONS, SHAPE_ONLY
from ...ir.ancestors import fold_ancestors
from ...ir.node_values import get_argument, get_op_name
from ...util.tensor_trees import is_float
from .graph_nodes import depends_on_choices, is_random, is_state
from .integer_ranges import MAX_OTHER_SIZE
from .op_classes import (
    CONTRACTIONS_OF_ROWS,
    ELEMENT_MOVES,
    INDEXED_WRITES,
    INTEGER_FUNCTIONS,
    LOOKUPS,
    NEW_TENSORS,
    SEARCHES,
)

_MAX_HASHED = 64  # elements of a constant that are compared
_FindAxes = Callable[[fx.Node], set[int]]
_BY_ELEMENT = {
    *ELEMENT_MOVES, *SEARCHES, *(INTEGER_FUNCTIONS - {"all", "any"}), "flatten", "getitem", "masked_fill", "reshape",
    "roll", "split", "split_with_sizes", "unbind", "unfold", "where",
}  # fmt: skip
_OVERWRITES = {"index_copy", "index_fill", "scatter"}
_PRODUCTS_OF_ROWS = {*CONTRACTIONS_OF_ROWS, "addmv", "baddbmm", "dot", "mv"}  # over the last axis of the left operand


def is_token_function(capture: Capture, node: fx.Node) -> bool:
    """Return whether each element of a value follows from the choices of a fixed number of tokens.

    False for counts, ranks and positions, and for ops without a rule here. A number of tokens up to `MAX_OTHER_SIZE`
    may be another size, too: then the first axis of this size counts as the axis of tokens.
    """
    tokens = capture.sizes.tokens

    def find_token_axes(n: fx.Node) -> set[int]:
        shape = n.meta["val"].shape
        axes = {d for d, size in enumerate(shape) if size > 1 and size in capture.sizes.expressions}
        if tokens <= MAX_OTHER_SIZE:
            axes = {d for d in axes if shape.index(shape[d]) == d}
        if tokens > 1 and not (axes and tokens <= MAX_OTHER_SIZE):
            axes |= {d for d, size in enumerate(shape) if size and size % tokens == 0}  # several elements per token
        return axes | ({0} if n.meta.get("ragged") and shape else set())

    def is_of_tokens(n: fx.Node, are: list[bool]) -> bool:
        val, name = n.meta.get("val"), get_op_name(n)
        if is_abstract(n) or n.target in SHAPE_ONLY:
            return True
        if not n.all_input_nodes:
            is_made = isinstance(val, torch.Tensor) and (n.op == "call_function" or n.meta.get("literal"))
            may_count = is_made and n.meta["of_sizes"] and find_token_axes(n)
            return not may_count or len(capture.concrete_value(n).unique()) < 2  # no `arange(T)`
        if name in LOOKUPS:
            return are[0] and (all(are) or depends_on_choices(n.all_input_nodes[0]))
        if not all(are) or is_random(n):
            return False
        if name in INDEXED_WRITES:
            return tokens == 1 or _writes_in_tokens(n, find_token_axes)
        if name in _BY_ELEMENT or torch.Tag.pointwise in getattr(n.target, "tags", ()):
            return True
        if n.target in CONTRACTIONS:
            return _contracts_in_tokens(n, find_token_axes)
        return _reduces_in_tokens(n, find_token_axes)

    def inputs_of(n: fx.Node) -> list[fx.Node]:
        return [] if is_abstract(n) or n.target in SHAPE_ONLY else n.all_input_nodes

    return fold_ancestors(node, "of_tokens", is_of_tokens, inputs_of)


def hash_without_sizes(node: fx.Node) -> int:
    """Hash how a node is computed from the routing and from constants: equal in captures of other sizes.

    `node_origins.hash_computation` compares nodes within one capture instead.
    """

    def combine(n: fx.Node, hashes: list[int]) -> int:
        if n.op == "get_attr":
            val = n.meta["val"]
            is_constant = not is_state(n) and not n.meta["of_sizes"] and val.numel() <= _MAX_HASHED
            return hash(repr(val.tolist()) if is_constant and not is_float(val) else n.meta["fqn"])
        has_shape = not n.all_input_nodes or get_op_name(n) in (ELEMENT_MOVES | NEW_TENSORS) - {"select", "slice"}
        numbers = () if has_shape else pytree.tree_leaves((n.args, n.kwargs))
        known = [a for a in numbers if type(a) in (int, float, bool) and a not in n.meta["of_sizes"]]
        return hash(repr((str(n.target), known, hashes)))  # Python hashes -1 and -2 alike

    return fold_ancestors(node, "without_sizes", combine, lambda n: [] if is_abstract(n) else n.all_input_nodes)


def _writes_in_tokens(n: fx.Node, find_token_axes: _FindAxes) -> bool:
    """Return whether an indexed write overwrites elements, or adds numbers of single tokens."""
    if get_op_name(n) == "index_put":
        return n.args[3:4] != (True,)
    if get_op_name(n) in _OVERWRITES:
        return True
    axes = find_token_axes(n.args[0])
    return bool(axes) and n.args[1] % n.args[0].meta["val"].dim() not in axes


def _contracts_in_tokens(n: fx.Node, find_token_axes: _FindAxes) -> bool:
    """Return whether a product of tensors sums over no axis of tokens."""
    name = get_op_name(n)
    if name == "einsum":
        inputs, arrow, output = n.args[0].replace(" ", "").partition("->")
        operands = n.args[1] if isinstance(n.args[1], (list, tuple)) else n.args[1:]
        letters = inputs.split(",")
        if "." in inputs or not arrow or len(letters) != len(operands):
            return False
        routed = [(labels, a) for labels, a in zip(letters, operands, strict=True) if depends_on_choices(a)]
        return all(labels[axis] in output for labels, a in routed for axis in find_token_axes(a))
    if name not in _PRODUCTS_OF_ROWS:
        return False
    left = n.args[1 if name.startswith("add") or name == "baddbmm" else 0]
    return left.meta["val"].dim() - 1 not in find_token_axes(left)


def _reduces_in_tokens(n: fx.Node, find_token_axes: _FindAxes) -> bool:
    """Return whether an op reduces, scans or orders axes other than those of tokens: all, without an argument `dim`."""
    operand = n.all_input_nodes[0]
    rank = operand.meta["val"].dim()
    try:
        dim = get_argument(n, "dim")
    except (AttributeError, KeyError):
        dim = None
    dims = range(rank) if dim is None or dim == [] else dim if isinstance(dim, (list, tuple)) else [dim]
    return not n.meta.get("ragged") and find_token_axes(operand).isdisjoint(d % max(1, rank) for d in dims)
