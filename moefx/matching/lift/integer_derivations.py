"""Derive the integers of a capture as functions of the positions that its selections return.

A program may compute expert ids from these positions, for example by adding an offset per group::

    best = scores.view(T, 2, 4).argmax(-1)   # two selections of a position in 0 to 3: two variables per token
    ids = best + torch.tensor([0, 4])        # functions of these: 0 to 3, and 4 to 7

A *variable* is one entry that a selection returns, numbered from 1. Variables in the same *row* hold different
positions: one selection returns them, or a later selection masks the earlier ones.
"""

# torch.fx types the arguments of a node as a wide union, and this code knows the op and so the type.
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportGeneralTypeIssues=false
# pyright: reportCallIssue=false, reportOptionalMemberAccess=false, reportOptionalSubscript=false
# pyright: reportOptionalIterable=false, reportReturnType=false, reportOperatorIssue=false

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor

from ...capture.tracing.capture_result import Capture
from ...capture.tracing.op_sets import SHAPE_ONLY
from ...ir.node_values import get_argument, get_op_name
from ..facts.graph_nodes import SELECTION_DIMS, collect_numbers, is_random, position_axis
from ..facts.integer_ranges import find_token_sizes
from .score_masks import Derivation, find_score_masks, scatter_positions

MOVES = {
    "_unsafe_view", "cat", "constant_pad_nd", "expand", "flatten", "flip", "permute", "repeat", "reshape", "roll",
    "select", "slice", "squeeze", "stack", "t", "transpose", "unsqueeze", "view",
}  # fmt: skip
_SPLITS = {"chunk", "split", "split_with_sizes", "unbind"}
_GATHERS = {"gather", "index", "index_select"}
_POINTWISE = {"_to_copy", "detach", "floor_divide", "lift_fresh"}  # besides the ops that torch tags as pointwise
# The values of these ops depend only on the arguments from this number on; the ones before are a tensor or a shape.
_SHAPE_ARGS = {
    "_unsafe_view": 2, "expand": 2, "full": 1, "new_full": 2, "new_ones": 2, "new_zeros": 2, "ones": 1, "reshape": 2,
    "view": 2, "zeros": 1,
}  # fmt: skip
_MAX_DERIVATIONS = 8


class IntegerDerivations:
    """The derivations of the integers of one capture.

    Args:
        others: captures at other sizes. If sizes became plain numbers, a number that differs there is a size.
        follows_masks: whether to assume that a selection never returns an entry that was masked before it.
    """

    def __init__(self, capture: Capture, others: Sequence[Capture], follows_masks: bool = True):
        self._follows_masks = follows_masks
        self._tokens = find_token_sizes(capture)
        self._fixed: dict[Any, Any] | None = None
        if capture.sizes.leaks or capture.sizes.leaked_routing:
            own_numbers, *other_numbers = (collect_numbers(c.nodes) for c in (capture, *others))
            self._fixed = {at: n for at, n in own_numbers.items() if all(n == other.get(at) for other in other_numbers)}
        self._known: dict[fx.Node, list[Derivation] | None] = {}
        self._same: dict[str, list[Derivation] | None] = {}  # by op and arguments: it selects the same again
        self._rows = torch.zeros(1, dtype=torch.int64)  # by variable: its row
        self._sizes = torch.ones(1, dtype=torch.int64)  # by variable: the number of positions

    def may_coincide(self, a: Derivation, b: Derivation, among: torch.Tensor) -> bool:
        """Return whether two slots ([T] variables and [N, T] values each) can hold one of these numbers together."""
        counts, is_at = zip(*(self._count_positions(derivation, among) for derivation in (a, b)), strict=True)
        if counts[0] is None or counts[1] is None:
            return True
        n = min(len(at) for at in is_at)
        both = (is_at[0][:n] & is_at[1][:n]).sum(0)  # by number: positions at which both slots hold it
        is_same = a.variable == b.variable
        is_beside = ~is_same & (self._rows[a.variable] == self._rows[b.variable])
        is_apart = ~(is_same | is_beside)
        cases = [(is_same, both), (is_beside, counts[0] * counts[1] - both), (is_apart, counts[0] * counts[1])]
        return any(bool(tokens.any() and pairs.any()) for tokens, pairs in cases)

    def _count_positions(self, derivation: Derivation, among: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor]:
        """Count the positions at which a slot is each of these numbers.

        Returns:
            The counts, or None if tokens differ, and whether the slot is each number at each position: [N, numbers].
        """
        sizes = self._sizes[derivation.variable]
        values = derivation.values[: int(sizes[0])]
        is_at = values[:, :1] == among
        is_uniform = bool((sizes == sizes[0]).all() and (values == values[:, :1]).all())
        return (is_at.sum(0) if is_uniform else None), is_at

    # ------------------------------------------------------------------ derivations of nodes
    def derive(self, node: fx.Node) -> list[Derivation] | None:
        """Return the possible derivations of a node, or None if some element has none."""
        stack = [node]
        while stack:
            n = stack[-1]
            unseen = [a for a in _list_integer_inputs(n) if a not in self._known] if n not in self._known else []
            stack += unseen
            if not unseen:
                stack.pop()
                if n not in self._known:
                    self._known[n] = self._derive_node(n) if _holds_integers(n) else None
                    if not is_random(_find_op(n)):
                        self._known[n] = self._same.setdefault(_describe_run(n), self._known[n])
        return self._known[node]

    def _derive_node(self, node: fx.Node) -> list[Derivation] | None:
        """Derive a node whose inputs are known: a constant, a selection, a branch, or a computation on these."""
        val: torch.Tensor = node.meta["val"]
        if self._depends_on_sizes(node):
            return None
        if _is_constant(node):
            is_counting = val.numel() in self._tokens and len(val.unique()) > 1
            return None if is_counting else [_derive_constant(val)]
        chosen = self._derive_selection(node, val.shape)
        if chosen is not None:
            return [chosen._replace(values=chosen.values.to(val.dtype))]
        if get_op_name(node) in ("where", "masked_fill") and len(node.args) == 3:
            mask = node.args[0 if get_op_name(node) == "where" else 1]
            if self._known[mask] is None:
                return self._derive_branches(val, [a for a in node.args if a is not mask])
        try:
            return self._derive_computation(node)
        except RuntimeError:  # at a position that is never selected; otherwise the program fails as well
            return None

    def _depends_on_sizes(self, node: fx.Node) -> bool:
        """Return whether a number that is not a shape depends on sizes or routing, and so changes between calls."""
        if node.op == "get_attr":
            return bool(node.meta["of_sizes"]) or self._fixed is not None
        numbers_of_sizes, shapes = node.meta["of_sizes"], _SHAPE_ARGS.get(get_op_name(node), 0)
        args = (*node.args[shapes:], *node.kwargs.values()) if shapes else (node.args, node.kwargs)
        if numbers_of_sizes and any(n in numbers_of_sizes for n in pytree.tree_leaves(args) if type(n) in (int, float)):
            return True
        if self._fixed is None or shapes:
            return False
        return any(self._fixed.get(at) is None for at in collect_numbers([_find_op(node)]))

    def _derive_selection(self, node: fx.Node, shape: torch.Size) -> Derivation | None:
        """Derive the result of a selection among scores, or among different numbers."""
        name, producer = get_op_name(node), _find_op(node)
        if not producer.all_input_nodes or not shape:
            return None
        source_shape = getattr(producer.all_input_nodes[0].meta.get("val"), "shape", ())
        axis: Any = None  # along which all results are different
        among: int | None = None  # along which the op selects
        if name == "getitem" and get_op_name(producer) in SELECTION_DIMS:
            axis, is_kept = SELECTION_DIMS[get_op_name(producer)](producer)
            if node.args[1] == 0:
                return self._reselect(producer.args[0], axis, shape) if is_kept else None
            size, axis, among = source_shape[axis], axis if is_kept else None, axis
        elif name in ("argmax", "argmin"):
            among = position_axis(node)
            size = math.prod(source_shape) if among is None else source_shape[among]
        elif name == "argsort":
            axis = among = position_axis(node)
            size = source_shape[axis]
        elif name == "multinomial":
            axis = None if get_argument(node, "replacement") else -1
            size = source_shape[-1]
        elif name == "gather" and self._find_distinct(node.args[2], axis := node.args[1]) is not None:
            return self._reselect(node.args[0], axis, shape)
        else:
            return None
        if size in self._tokens:
            return None
        derivation = self._add_variables(axis, torch.arange(size).view(-1, *[1] * len(shape)).expand(size, *shape))
        if among is not None and self._follows_masks:
            self._join_earlier(derivation, producer.args[0], among)
        return derivation

    def _join_earlier(self, derivation: Derivation, scores: fx.Node, axis: int) -> None:
        """Add new variables to the row of earlier ones, if the scores at these are masked before the selection."""
        axis, shape = axis % scores.meta["val"].dim(), scores.meta["val"].shape
        is_one = derivation.variable.dim() < len(shape) or derivation.variable.shape[axis] == 1
        masks = find_score_masks(scores, is_one, self._derive_only)
        if sum(int(mask.values.sum(axis + 1).max()) for mask in masks) >= shape[axis]:
            return  # every score may be masked
        rows, earlier = None, []
        for mask in masks:
            variable = mask.variable.expand(shape).narrow(axis, 0, 1)
            is_at = mask.values.expand(-1, *shape).movedim(axis + 1, -1).diagonal(dim1=0, dim2=-1)
            is_equal_in_row = bool((mask.variable == mask.variable.narrow(axis, 0, 1)).all())
            if len(mask.values) != shape[axis] or not is_equal_in_row or not bool(is_at.all()):
                continue
            if rows is None or torch.equal(self._rows[variable], rows):
                rows = self._rows[variable]
                earlier.append(variable.flatten())
        if rows is None or rows.unique().numel() < rows.numel():
            return
        of_rows = torch.isin(self._rows, rows).nonzero().flatten()
        if not bool(torch.isin(of_rows, torch.cat(earlier)).all()):
            return  # the row has a variable that is not masked
        rows = rows if derivation.variable.dim() == len(shape) else rows.squeeze(axis)
        self._rows[derivation.variable] = rows.expand(derivation.variable.shape)

    def _derive_only(self, node: Any) -> Derivation | None:
        derivations = self.derive(node) if isinstance(node, fx.Node) and _holds_integers(node) else None
        return derivations[0] if derivations is not None and len(derivations) == 1 else None

    def _add_variables(self, axis: int | None, values: torch.Tensor) -> Derivation:
        """Add variables with these values by position. If `axis` is given, variables along it share a row."""
        variable = len(self._rows) + torch.arange(values[0].numel()).view(values.shape[1:])
        # A row is named after its first variable.
        rows = variable if axis is None else variable.narrow(axis, 0, 1).expand(variable.shape)
        self._rows = torch.cat([self._rows, rows.flatten()])
        self._sizes = torch.cat([self._sizes, torch.full((variable.numel(),), len(values))])
        return Derivation(variable, values)

    def _reselect(self, node: Any, axis: int, shape: torch.Size) -> Derivation | None:
        """Derive a selection without replacement among different numbers."""
        derivation, along = self._find_distinct(node, axis), axis % len(shape)
        if derivation is None or any(
            n != m for i, (n, m) in enumerate(zip(shape, derivation.variable.shape, strict=True)) if i != along
        ):
            return None
        first = derivation.values.narrow(along + 1, 0, 1)
        return self._add_variables(axis, first.expand(len(first), *shape))

    def _find_distinct(self, node: Any, axis: int) -> Derivation | None:
        """Return the derivation of a node if its numbers differ along an axis, as one function of the position."""
        derivations = self._known.get(node)
        if derivations is None or len(derivations) != 1 or not derivations[0].variable.dim():
            return None
        variable, values = derivations[0]
        is_aligned = all(bool((x == x.narrow(axis, 0, 1)).all()) for x in (self._rows[variable], *values))
        are_distinct = bool(variable.sort(axis).values.diff(dim=axis).all() and values.sort(0).values.diff(dim=0).all())
        return derivations[0] if is_aligned and are_distinct and variable.all() else None

    def _derive_branches(self, val: torch.Tensor, branches: list[Any]) -> list[Derivation] | None:
        """Derive a `where` with an unknown mask: the derivations of both branches."""
        branch_derivations: list[Derivation] = []
        for branch in branches:
            derivations = (
                self._known[branch] if isinstance(branch, fx.Node) else [_derive_constant(torch.tensor(branch))]
            )
            if derivations is None or len(branch_derivations) + len(derivations) > _MAX_DERIVATIONS:
                return None
            for variable, values in derivations:
                values = values.view(len(values), *[1] * (val.dim() - values.dim() + 1), *values.shape[1:])
                branch_derivations.append(
                    Derivation(variable.expand(val.shape), values.expand(-1, *val.shape).to(val.dtype))
                )
        return branch_derivations

    def _derive_computation(self, node: fx.Node) -> list[Derivation] | None:
        """Derive an op that moves numbers, or computes with those of one variable."""
        by = _find_op(node)
        name, inputs = get_op_name(by), by.all_input_nodes
        derivations_of_inputs = [derivations for a in inputs if (derivations := self._known[a]) is not None]
        if name == "scatter" and len(derivations_of_inputs) == len(inputs) and not isinstance(by.args[3], fx.Node):
            base, index = (self._known[a] for a in by.args[:3:2])
            if len(base) != 1 or len(index) != 1 or bool(base[0].variable.any()):
                return None
            at = scatter_positions(index[0], by.args[1], node.meta["val"].shape)
            put = torch.tensor(by.args[3], dtype=node.meta["val"].dtype)
            return at and [Derivation(at.variable, torch.where(at.values, put, base[0].values[0]))]
        looks_up, moves = name in _GATHERS, name in MOVES | _SPLITS
        computes = name in _POINTWISE or torch.Tag.pointwise in getattr(by.target, "tags", ())
        if not (looks_up or moves or computes) or is_random(by) or len(derivations_of_inputs) < len(inputs):
            return None
        if math.prod(map(len, derivations_of_inputs)) > _MAX_DERIVATIONS:
            return None
        if looks_up and not self._is_at_constants(by):
            return None
        results = []
        for derivations in itertools.product(*derivations_of_inputs):
            derivation_by_input = dict(zip(inputs, derivations, strict=True))
            values = torch.stack(
                [
                    _run_again(node, {a: derivation.at(n) for a, derivation in derivation_by_input.items()})
                    for n in range(_find_max_positions(derivations))
                ]
            )
            if computes:
                variable = _find_common_variable(
                    [derivation.variable.expand(values.shape[1:]) for derivation in derivations]
                )
            elif looks_up:
                indices = {a: derivation.at(0) for a, derivation in derivation_by_input.items()}
                variable = _run_again(node, indices | {inputs[0]: derivations[0].variable})
            else:
                variable = _run_again(
                    node, {a: derivation.variable for a, derivation in derivation_by_input.items()}, padding=0
                )
            if variable is None:
                return None
            results.append(Derivation(variable, values))
        return results

    def _is_at_constants(self, node: fx.Node) -> bool:
        indices: list[fx.Node] = []
        fx.node.map_arg((node.args[1:], node.kwargs), indices.append)
        return bool(indices) and all(_is_constant(a) and self._known[a] is not None for a in indices)


def _describe_run(node: fx.Node) -> str:
    by = _find_op(node)
    return str((by.op, by.target, by.args, by.kwargs, node.args[1] if by is not node else ""))


def _find_op(node: fx.Node) -> fx.Node:
    """Return the op itself, if the node is one of its several results."""
    return node.args[0] if get_op_name(node) == "getitem" and isinstance(node.args[0], fx.Node) else node


def _list_integer_inputs(node: fx.Node) -> list[fx.Node]:
    return [] if not _holds_integers(node) or _is_constant(node) else _find_op(node).all_input_nodes


def _holds_integers(node: fx.Node) -> bool:
    val = node.meta.get("val")
    return isinstance(val, torch.Tensor) and not isinstance(val, FakeTensor) and not val.is_floating_point()


def _is_constant(node: fx.Node) -> bool:
    """Return whether a node has the same value in all runs of the program."""
    if node.op == "get_attr":
        return node.meta["kind"] == "constant" and node.meta["literal"]
    is_made = node.op == "call_function" and (not node.all_input_nodes or node.target in SHAPE_ONLY)
    return is_made and not is_random(node) and "empty" not in get_op_name(node)


def _derive_constant(val: torch.Tensor) -> Derivation:
    return Derivation(torch.zeros(val.shape, dtype=torch.int64), val[None])


def _find_max_positions(derivations: Iterable[Derivation]) -> int:
    return max((len(derivation.values) for derivation in derivations), default=0)


def _find_common_variable(variables: list[torch.Tensor]) -> torch.Tensor | None:
    """Return the variable on which each element depends; None if some element depends on two."""
    common = torch.stack(variables).amax(0)
    return common if all(bool(((c == 0) | (c == common)).all()) for c in variables) else None


def _run_again(node: fx.Node, inputs: dict[fx.Node, torch.Tensor], padding: int | None = None) -> torch.Tensor:
    """Run the op of a node on other inputs. padding: replaces the value with which the op pads."""
    by = _find_op(node)
    args, kwargs = fx.node.map_arg((by.args, by.kwargs), inputs.__getitem__)
    if padding is not None and get_op_name(by) == "constant_pad_nd":
        args = *args[:2], padding
    out = by.target(*args, **{k: v for k, v in kwargs.items() if k != "device"})
    return out if by is node else out[node.args[1]]
