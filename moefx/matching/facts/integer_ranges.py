"""The ranges of integers under any routing, not only under the routings of the captures.

An expert index that `topk` selects among E scores lies in [0, E). So a comparison with the sentinel -1 has one result
under every routing, and needs no probe. A range is `lo <= value <= hi` for each element. A tensor whose shape depends
on the routing has one range for all elements.
"""

# torch.fx types the arguments of a node as a wide union, and this code knows the op and so the type.
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportOptionalMemberAccess=false
# pyright: reportIndexIssue=false, reportOptionalSubscript=false, reportOptionalIterable=false, reportCallIssue=false
# pyright: reportAssignmentType=false, reportReturnType=false, reportOperatorIssue=false, reportUnhashable=false
# pyright: reportGeneralTypeIssues=false

from __future__ import annotations

import math
from collections.abc import Collection
from typing import Any

import torch
from torch import fx

from ...capture.sizes.routed_numbers import RoutedInt
from ...capture.sizes.symbolic_sizes import unwrap_numbers
from ...capture.tracing.capture_result import Capture
from ...ir.node_values import get_op_name
from .graph_nodes import SELECTION_DIMS, find_lookups, is_state, position_axis
from .op_classes import AXIS_REDUCTIONS, CLOSED_ON_INTEGERS, COMPARISONS, ELEMENT_MOVES, LOOKUPS, MONOTONE
from .range_arithmetic import (
    FAR,
    UNBOUNDED,
    Range,
    bound_wrapped,
    compare,
    compute_range,
    compute_sum_over_tokens,
    limit_counts,
    widen,
    wrap_to_dtype,
)

aten = torch.ops.aten
NARROW = {torch.int8, torch.uint8, torch.int16}  # counts of tokens may overflow these; no memory holds 2**31 tokens

MAX_OTHER_SIZE = 8  # a size up to this may be the number of expert groups, or of slots


def find_token_sizes(capture: Capture) -> set[int]:
    """Find the sizes of the capture that only numbers of tokens have: above 8, and of no parameter."""
    parameter_sizes = {
        n for node in capture.nodes if node.op == "get_attr" for n in getattr(node.meta.get("val"), "shape", ())
    }
    return {n for n in capture.sizes.expressions if n > MAX_OTHER_SIZE} - parameter_sizes


class IntegerRanges:
    """The ranges of the integer nodes of one capture.

    Args:
        nodes: the nodes of the capture.
        of_call: give arguments and buffers the full range of their type; by default they have no range.
        sizes: numbers of tokens, which other calls may exceed. Positions on an axis of this size are unbounded, unless
            they are compared with the size.
        sizes_of_tokens: sizes of all axes that may be token axes, also those that parameters share. By default, any
            axis may be one.
    """

    def __init__(
        self,
        nodes: list[fx.Node],
        of_call: bool = False,
        sizes: Collection[int] = (),
        sizes_of_tokens: Collection[int] | None = None,
    ):
        self._nodes, self._read = nodes, 0
        self._known: dict[fx.Node, Range | None] = {}  # of the nodes read so far, as the next node may use them
        self._limited: dict[fx.Node, Range | None] = {}  # with the limits of all lookups, also later ones
        self._of_call, self._sizes = of_call, sizes
        self._at_these_sizes = IntegerRanges(nodes, of_call) if sizes else None
        self._parameter_sizes = {
            n for node in nodes if node.op == "get_attr" for n in getattr(node.meta.get("val"), "shape", ())
        }
        self._fixed = set[int]() if sizes_of_tokens is None else self._parameter_sizes - {*sizes_of_tokens}

    @classmethod
    def with_more_tokens(cls, capture: Capture) -> IntegerRanges:
        """Return the ranges for any number of tokens. Cached in the capture."""
        sizes_of_tokens = capture.sizes.expressions
        return capture.compute_once(
            "ranges", lambda: cls(capture.nodes, False, find_token_sizes(capture), sizes_of_tokens)
        )

    def get(self, node: fx.Node) -> Range | None:
        """Return the range of a node, or None if it is not known.

        Reads the capture up to the node only: probes ask for few ranges, mostly of nodes before a loop over experts.
        """
        if node not in self._limited:
            while node not in self._known and self._read < len(self._nodes):
                self._read_next()
            node_range = self._known.get(node)
            for user in node.users if node in self._known else ():
                for i, dim, allowed in find_lookups(user):
                    if i is node:
                        node_range = self._limit(node_range, user.args[0], node.meta["val"], dim, allowed)
            self._limited[node] = node_range
        return self._limited[node]

    def is_decided(self, node: fx.Node, comparison: tuple[str, Any] | None = None) -> bool:
        """Return whether a boolean, or a `comparison` of a number (`("lt", 8)`), is equal for all routings."""
        value_range = self.get(node)
        if value_range is None:
            return False
        if comparison is not None:
            if isinstance(comparison[1], RoutedInt):
                return False
            number = unwrap_numbers(comparison[1])
            if self._at_these_sizes is not None and number in self._sizes:
                return self._at_these_sizes.is_decided(node, comparison)
            lo, hi = map(torch.tensor, _hull(value_range))
            value_range = compare(comparison[0], (lo, hi), self._pair(number))
        return bool((value_range[0] == value_range[1]).all())

    def _find_range(self, node: fx.Node, val: torch.Tensor) -> Range | None:
        if self._of_call and (node.op == "placeholder" or is_state(node)) and val.dtype is not torch.bool:
            info = torch.iinfo(val.dtype)
            return _uniform(max(info.min, -FAR), min(info.max, FAR), val)
        if node.op == "get_attr" and node.meta.get("literal") and not node.meta["of_sizes"]:
            exact = val.to(torch.int64)
            return exact, exact
        if node.op != "call_function":
            return None
        if not node.all_input_nodes:
            exact = val.to(torch.int64)
            may_be_more = val.numel() in self._sizes or node.meta.get("ragged")
            if self._at_these_sizes is not None and may_be_more and len(exact.unique()) > 1:
                return _uniform(-UNBOUNDED if exact.min() < 0 else 0, UNBOUNDED, val)
            return exact, exact
        name = get_op_name(node)
        if name == "getitem":
            bundle, i = node.args
            source = bundle.args[0].meta.get("val") if isinstance(bundle, fx.Node) and bundle.args else None
            if i == 0 and (
                get_op_name(bundle) in SELECTION_DIMS or get_op_name(bundle).startswith(("_unique", "unique"))
            ):
                source_range = self._known.get(bundle.args[0])
                return source_range and _uniform(*_hull(source_range), val)
            if i == 1 and get_op_name(bundle) in SELECTION_DIMS and source is not None and source.dim():
                dim, _ = SELECTION_DIMS[get_op_name(bundle)](bundle)
                return _uniform(0, self._find_last_position(bundle.args[0], dim), val)
            return None
        if name in ("argmax", "argmin", "argsort"):
            return _uniform(0, self._find_last_position(node.args[0], position_axis(node)), val)
        if name == "nonzero":
            return self._nonzero(node, val)
        if name in ("bincount", "histc"):
            return _uniform(0, UNBOUNDED, val)
        if name == "scatter" and len(node.args) == 4:
            return self._scatter(node, val)
        inputs = [self._known.get(a) for a in node.all_input_nodes]
        if any(r is None for r in inputs):
            return _uniform(0, 1, val) if val.dtype == torch.bool else None
        return self._propagate(node, name, val)

    def _read_next(self) -> None:
        node = self._nodes[self._read]
        self._read += 1
        val = node.meta.get("val")
        is_integer = isinstance(val, torch.Tensor) and not (val.dtype.is_floating_point or val.dtype.is_complex)
        node_range = self._find_range(node, val) if is_integer else None
        may_wrap = is_integer and val.dtype in {*NARROW, torch.int32}
        self._known[node] = wrap_to_dtype(node_range, val.dtype) if may_wrap and node_range is not None else node_range
        for i, dim, allowed in find_lookups(node):
            self._known[i] = self._limit(self._known.get(i), node.args[0], i.meta["val"], dim, allowed)

    def _limit(
        self, node_range: Range | None, base: fx.Node, val: torch.Tensor, dim: int | None, allowed: range
    ) -> Range | None:
        """Limit integers to the axis from which they read entries, since the program fails otherwise.

        A token axis gives no limit: it is longer in other calls.
        """
        shape = base.meta["val"].shape
        is_last = (
            dim is not None
            and len(shape) > 1
            and dim % len(shape) == len(shape) - 1
            and shape[dim] in self._parameter_sizes
        )
        if not (is_state(base) or is_last):
            return node_range
        lo, hi = node_range or _uniform(allowed.start, allowed.stop - 1, val)
        return lo.clamp(min=allowed.start), hi.clamp(max=allowed.stop - 1)

    def _find_last_position(self, source: fx.Node, dim: int | None) -> int:
        """Return the last position along an axis, or among all elements."""
        shape = source.meta["val"].shape
        axes = range(len(shape)) if dim is None else [dim % len(shape)] if shape else []
        if any(self._is_token_axis(source, d) for d in axes):
            return UNBOUNDED
        return math.prod(shape[d] for d in axes) - 1

    def _is_token_axis(self, source: fx.Node, dim: int) -> bool:
        is_ragged = dim == 0 and bool(source.meta.get("ragged"))
        return self._at_these_sizes is not None and (is_ragged or source.meta["val"].shape[dim] in self._sizes)

    def _is_over_fixed(self, node: fx.Node) -> bool:
        """Return whether a sum runs only over axes with sizes of parameters, such as the expert axis."""
        shape = node.args[0].meta["val"].shape
        dims = node.args[1] if len(node.args) > 1 and node.args[1] else range(len(shape))
        return not node.args[0].meta.get("ragged") and all(shape[d] in self._fixed for d in dims)

    def _is_over_rows(self, node: fx.Node) -> bool:
        """Return whether a sum runs over the rows of an expert."""
        operand, dims = node.args[0], node.args[1] if len(node.args) > 1 else ()
        axes = dims if isinstance(dims, (list, tuple)) else (dims,)
        return bool(operand.meta.get("ragged")) and (not axes or any(d % operand.meta["val"].dim() == 0 for d in axes))

    def _propagate(self, node: fx.Node, name: str, val: torch.Tensor) -> Range | None:
        """Return the range of an op whose integer operands all have ranges."""
        try:
            if name in LOOKUPS:
                return _uniform(*_hull(self._known[node.args[0]]), val)
            is_logical = val.dtype is torch.bool and name in ("bitwise_and", "bitwise_or")
            is_sum = name == "add" and val.dtype is not torch.bool
            if (name in CLOSED_ON_INTEGERS or is_sum) and not is_logical and not node.kwargs and not node.args[2:]:
                return compute_range(name, *(self._pair(x) for x in node.args[:2]))
            if (
                name in ELEMENT_MOVES | AXIS_REDUCTIONS
                or is_logical
                or (name in MONOTONE and not _has_negative_factor(node))
            ):
                return self._propagate_bounds(node, name, val)
            is_division = name in ("floor_divide", "div") and not isinstance(node.args[1], fx.Node)
            if is_division and not _has_negative_factor(node):
                return tuple(node.target(x, *node.args[1:], **node.kwargs) for x in widen(self._known[node.args[0]]))
            if name == "remainder" and type(node.args[1]) is int and node.args[1] > 0:
                lo, hi = self._known[node.args[0]]
                inside = (lo >= 0) & (hi < node.args[1])
                return torch.where(inside, lo, 0), torch.where(inside, hi, node.args[1] - 1)
            if name in COMPARISONS:
                if self._at_these_sizes is not None and any(self._is_size(x) for x in node.args[:2]):
                    return self._at_these_sizes.get(node)
                a, b = (self._pair(x) for x in node.args[:2])
                return compare(name, a, b)
            if name in ("masked_fill", "where") and len(node.args) == 3:
                return self._propagate_fill(node, name)
            if name in ("logical_not", "bitwise_not") and val.dtype == torch.bool:
                return compare("eq", self._known[node.args[0]], self._pair(0))
        except (RuntimeError, TypeError, ValueError):
            pass
        return _uniform(0, 1, val) if val.dtype == torch.bool else None

    def _propagate_bounds(self, node: fx.Node, name: str, val: torch.Tensor) -> Range:
        """Return the range of a monotone op: run it on the lower and on the upper bounds of its operands."""
        is_reshaped, is_sum = name in ("view", "_unsafe_view"), name in ("sum", "cumsum")

        def run(side: int, dtype: torch.dtype | None = None) -> torch.Tensor:
            def bound(n: fx.Node) -> torch.Tensor:
                known = self._known[n]
                known = compare("ne", known, self._pair(0)) if val.dtype is torch.bool else known
                known = limit_counts(known) if is_sum else known
                shape = n.meta["val"].shape
                whole = known[side] if known[side].shape == shape else known[side].expand(shape)
                whole = whole if dtype is None else whole.to(dtype)
                return whole.contiguous() if is_reshaped else whole

            kwargs = {k: v for k, v in node.kwargs.items() if k not in ("device", "dtype")}  # all in int64 first
            args, kwargs = fx.node.map_arg((node.args, kwargs), bound)
            result = node.target(*args, **kwargs)
            return (result[0] if isinstance(result, tuple) else result).to(dtype or torch.int64)

        lo, hi = run(0), run(1)
        if not is_sum:
            return lo, hi
        if (name == "sum" and not self._is_over_fixed(node)) or (
            name == "cumsum" and val.dim() and val.shape[node.args[1]] > 1
        ):  # other calls may sum over more tokens
            is_exact = lo == hi
            if self._is_over_rows(node):  # their number depends on the routing
                is_exact &= lo == 0
            return compute_sum_over_tokens(self._known[node.args[0]], (lo, hi), is_exact)
        counts = torch.tensor(bool((self._known[node.args[0]][1] == UNBOUNDED).any()))
        return bound_wrapped(lo, hi, run(0, torch.float64), run(1, torch.float64), counts)

    def _propagate_fill(self, node: fx.Node, name: str) -> Range:
        """Return the range of `ids.masked_fill(ids == E, 0)`: the kept numbers are not those that the mask replaces."""
        mask = node.args[1 if name == "masked_fill" else 0]
        kept, put = (node.args[0], node.args[2]) if name == "masked_fill" else (node.args[2], node.args[1])
        whole = self._pair(kept)
        lo, hi = _hull_exact(whole)
        if get_op_name(mask) in COMPARISONS and mask.args[0] is kept and type(mask.args[1]) is int:
            lo, hi = _exclude(get_op_name(mask), mask.args[1], lo, hi)
        (plo, phi), (klo, khi) = self._pair(put), whole
        return torch.minimum(plo, klo.clamp(min=lo)), torch.maximum(phi, khi.clamp(max=hi))

    def _is_size(self, x: Any) -> bool:
        """Return whether an operand is a number of tokens, or `arange` over it."""
        if not isinstance(x, fx.Node):
            return x in self._sizes
        val = x.meta.get("val")
        return not x.all_input_nodes and isinstance(val, torch.Tensor) and val.numel() in self._sizes

    def _pair(self, x: Any) -> Range:
        if isinstance(x, fx.Node):
            return self._known[x]
        exact = torch.as_tensor(x, dtype=torch.float32 if type(x) is float else None)
        return exact, exact

    def _nonzero(self, node: fx.Node, val: torch.Tensor) -> Range | None:
        """Return the range of the coordinates of entries that may be true."""
        mask = node.args[0]
        mask_range = self._known.get(mask)
        shape = mask.meta["val"].shape
        hi = [n - 1 for n in shape]
        if mask_range is not None and mask_range[1].shape == tuple(shape):
            indices = ((mask_range[0] != 0) | (mask_range[1] != 0)).nonzero()
            hi = indices.amax(0).tolist() if len(indices) else [0] * len(shape)
        hi = [UNBOUNDED if self._is_token_axis(mask, d) else last for d, last in enumerate(hi)]
        return torch.zeros((1, len(hi)), dtype=torch.int64), torch.tensor([hi], dtype=torch.int64)

    def _scatter(self, node: fx.Node, val: torch.Tensor) -> Range | None:
        """Return the range of a constant that is written at indices with a range, as in `one_hot`."""
        base, dim, index, value = node.args
        index_range, base_range = self._known.get(index), self._known.get(base)
        if index_range is None or base_range is None or not isinstance(value, (int, bool)):
            return None
        inside = torch.zeros(val.shape, dtype=torch.bool)
        inside.narrow(dim, 0, min(_hull(index_range)[1] + 1, val.shape[dim])).fill_(True)
        lo, hi = (x.expand(val.shape) for x in base_range)
        return torch.where(inside, lo.clamp(max=int(value)), lo), torch.where(inside, hi.clamp(min=int(value)), hi)


def _uniform(lo: int, hi: int, val: torch.Tensor) -> Range:
    return torch.full(val.shape, lo), torch.full(val.shape, hi)


def _hull(value_range: Range) -> tuple[int, int]:
    """Return the least and the largest possible element, with 0."""
    lo, hi = value_range
    return min([0, *lo.reshape(-1).tolist()]), max([0, *hi.reshape(-1).tolist()])


def _hull_exact(value_range: Range) -> tuple[int, int]:
    """Return the least and the largest possible element."""
    return int(value_range[0].min()), int(value_range[1].max())


def _exclude(name: str, number: int, lo: int, hi: int) -> tuple[int, int]:
    """Exclude the numbers for which a comparison with `number` is true from a range."""
    if name in ("ge", "gt", "greater"):
        return lo, min(hi, number - (name == "ge"))
    if name in ("le", "lt"):
        return max(lo, number + (name == "le")), hi
    if name == "eq":
        return lo + (lo == number), hi - (hi == number)
    return lo, hi


def _has_negative_factor(node: fx.Node) -> bool:
    return any(isinstance(a, (int, float)) and a < 0 for a in node.args) or bool(node.kwargs.get("alpha", 1) != 1)
