"""Interpret the numbers of a region as expressions over its token dims.

Dynamo writes the example's sizes into a graph as numbers, unless sizes are dynamic. Here the region runs without data
at other sizes. A number that must change for that is an expression, such as `B*S`. If both readings run, a number in a
shape is a token dim if the entry has it at the same position; other numbers are constants. Choices that fail later are
undone.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import operator
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.node import map_aggregate

from ...capture.tracing.op_sets import SELECTION_OPS
from ...errors import Cause, Refused
from ...ir.node_values import get_op_name
from .graph_analysis import GraphAnalysis
from .node_queries import find_selected_axis, get_size_hint, simplify_size
from .region_bounds import RegionBounds, find_selections
from .region_code import SizeExpression, ValueRef, apply_modes, call_target, map_leaves
from .token_dims import TokenDims

_FACTORIES = {
    "zeros", "ones", "full", "empty", "arange", "rand", "randn", "eye", "linspace", "randperm", "randint",
    "empty_strided", "empty_permuted", "tensor", "scalar_tensor",
}  # fmt: skip
_SHAPED = _FACTORIES | {
    "new_zeros", "new_ones", "new_full", "new_empty", "view", "reshape", "_unsafe_view", "expand", "repeat", "tile",
    "unflatten",
}  # fmt: skip
_MAX_TRIALS = 4000


class GeneralizedRegion:
    """A region for all sizes.

    Attributes:
        dims: the token dims.
        arguments: (args, kwargs) of each node inside, with `ValueRef`s and `SizeExpression`s.
        shapes: the shape of each side input, with `SizeExpression`s.
        probed: the values of all nodes at the probe sizes.
    """

    def __init__(self, analysis: GraphAnalysis, bounds: RegionBounds, number_of: dict[fx.Node, int]):
        self.analysis, self.bounds, self.number_of = analysis, bounds, number_of
        self.node_at = {i: n for n, i in number_of.items()}
        entry = analysis.value[bounds.entry]
        # The meta device is faster, but has no autocast.
        device = entry.device.type
        has_autocast = device != "meta" and torch.is_autocast_enabled(device)
        has_autocast |= any(analysis.modes[n].autocast for n in bounds.inside)
        self.mode = FakeTensorMode() if has_autocast else None
        self.device = entry.device if has_autocast else torch.device("meta")
        constants = {c for n in bounds.inside for c in self._collect_numbers((n.args, n.kwargs))}
        constants |= {get_size_hint(s) for n in bounds.inside if (t := analysis.tensor(n)) is not None for s in t.shape}
        self.dims = TokenDims(analysis, [simplify_size(n) for n in entry.shape], constants)
        if not self.dims.names:
            raise Refused(
                "the graph's inputs have a single token, so sizes do not identify the token dims",
                remedy="call it with more tokens, for which Dynamo compiles another graph",
                cause=Cause.FEW_TOKENS,
            )
        self.arguments: dict[fx.Node, tuple[tuple, dict]] = {}
        self.shapes: dict[fx.Node, tuple] = {}
        self.probed: dict[fx.Node, Any] = {}
        self._search(entry)
        self._check_choices()

    def _search(self, entry: torch.Tensor) -> None:
        """Find meanings for all numbers, node by node with backtracking, at which the region runs at the probe sizes.

        Raises:
            Refused: no combination runs, or too many were tried.
        """
        steps = [*self.bounds.side_inputs, *self.bounds.inside]
        names = dict(zip(self.dims.axes, self.dims.names, strict=True))
        rows = [self.dims.probe[names[i]] if i in names else get_size_hint(n) for i, n in enumerate(entry.shape)]
        self.probed[self.bounds.entry] = self._make_empty(rows, entry.dtype)
        for n, t in self.analysis.weights.items():
            if n in self.number_of:
                self.probed[n] = self._make_empty(
                    [get_size_hint(s) for s in t.shape], t.dtype, [get_size_hint(s) for s in t.stride()]
                )
        levels: list[Iterator[None]] = []
        num_trials, deepest = 0, 0
        while len(levels) < len(steps) or not self._has_all_tokens():
            if len(levels) < len(steps):
                levels.append(self._try_node(steps[len(levels)]))
            while levels:
                try:
                    next(levels[-1])
                    break
                except StopIteration:
                    deepest = max(deepest, len(levels) - 1)
                    levels.pop()
            num_trials += 1
            if not levels or num_trials > _MAX_TRIALS + len(steps):
                raise self._refuse_unclear(steps[min(deepest, len(steps) - 1)])

    def _check_choices(self) -> None:
        """Check that some selection is among a fixed number of candidates; this avoids a needless capture.

        Raises:
            Refused: all selections are among tokens.
        """
        selections, compared = find_selections(self.bounds.inside, self.analysis)
        for n in selections:
            scores, axis = next(filter(self.analysis.is_float, n.all_input_nodes)), find_selected_axis(n)
            if axis is None or self.probed[scores].shape[axis] == get_size_hint(
                self.analysis.value[scores].shape[axis]
            ):
                return
        if selections and not compared:
            raise Refused(
                f"{get_op_name(selections[0])} chooses among tokens, not among experts",
                culprits=(get_op_name(selections[0]),),
                source=self.analysis.find_source_line(selections[0]),
                remedy="let tokens choose their experts (token choice), not experts their tokens",
            )

    def _refuse_unclear(self, n: fx.Node) -> Refused:
        """Build the refusal at the node beyond which no meanings were found."""
        line = self.analysis.find_source_line(n)
        if roots := [root for a in n.all_input_nodes if self.analysis.is_number(a) for root in self._find_unknown(a)]:
            names = [self.analysis.find_source_name(root) or root.name for root in roots]
            description = "a result of Python code between two graphs"
            names = ", ".join(dict.fromkeys(description if "___stack" in name else name for name in names))
            remedy = "let it be a constant of the graph (under torch.compile: dynamic=False)"
            if not self.analysis.number_inputs.isdisjoint(roots):
                remedy = "make it a constant when the graph is made, or a tensor"
            elif any(self.analysis.float_inputs.intersection(root.users) for root in roots):
                remedy = "it changes, and Dynamo compiles a graph for each value: make it a buffer"
            return Refused(
                f"a number does not follow from the sizes [{', '.join(self.dims.names)}] of the region's rows by "
                f"known ops: it depends on {names}",
                culprits=(get_op_name(n),),
                source=line,
                remedy=remedy,
            )
        reason = "the sizes in the graph do not show which of them are token dims"
        return Refused(reason, culprits=(get_op_name(n),), source=line, remedy=self._suggest_sizes())

    def _find_unknown(self, number: fx.Node) -> list[fx.Node]:
        """Return the operands of a number that do not follow from the token dims."""
        if self.analysis.is_number(number) and self._list_meanings(self.analysis.value[number], node=number):
            return []
        return [root for a in number.all_input_nodes for root in self._find_unknown(a)] or [number]

    def _suggest_sizes(self) -> str:
        """Suggest how to call or compile so that sizes identify the token dims."""
        other_sizes = {
            get_size_hint(n)
            for w in self.analysis.weights
            if w in self.number_of
            for n in self.analysis.weights[w].shape
        }
        other_sizes |= {
            n
            for s in self.bounds.inside
            if get_op_name(s) in SELECTION_OPS
            for n in self._collect_numbers((s.args, s.kwargs))
        }
        sizes = list(self.dims.sizes.items())
        ambiguous = [
            f"{name} = {n}" for i, (name, n) in enumerate(sizes) if n in other_sizes or n in dict(sizes[:i]).values()
        ]
        option = "dynamic=False" if self.dims.expressions else "dynamic=True, or mark_dynamic the token dims"
        if not ambiguous:
            return f"compile with {option}"
        rows = f"of rows [{', '.join(self.dims.names)}, ...], {', '.join(ambiguous)} is also the length of another axis"
        return f"{rows}: make the first call with other sizes, or compile with {option}"

    def _has_all_tokens(self) -> bool:
        """Return whether the exit has a row per token at the probe sizes, as it does in the graph."""
        exit_ = self.bounds.exit
        out, original = self.probed[exit_], self.analysis.value[exit_]
        tokens, rows = math.prod(self.dims.sizes.values()), [get_size_hint(n) for n in original.shape]
        if math.prod(rows[:-1]) != tokens:
            return True  # another kind of exit; the matcher decides
        return math.prod(out.shape[:-1]) == math.prod(self.dims.probe.values()) and out.shape[-1] == rows[-1]

    def _make_empty(
        self, shape: Sequence[int], dtype: torch.dtype, strides: Sequence[int] | None = None
    ) -> torch.Tensor:
        """Return an empty tensor on the device of the probe run."""
        with self.mode or contextlib.nullcontext():
            if strides is None:
                return torch.empty(shape, dtype=dtype, device=self.device)
            return torch.empty_strided(shape, strides, dtype=dtype, device=self.device)

    # ------------------------------------------------------------------ one node
    def _try_node(self, n: fx.Node) -> Iterator[None]:
        """Yield once for each combination of meanings with which the node runs; sets its arguments and value."""
        if n in self.bounds.side_inputs:
            yield from self._try_side_input(n)
            return
        leaves: list[list[Any]] = []
        is_shape, position = get_op_name(n) in _SHAPED, itertools.count()
        shape = self._collect_numbers((n.args, n.kwargs))

        def candidates(a: Any) -> None:
            if isinstance(a, fx.Node):
                if self.analysis.is_number(a):
                    leaves.append(self._list_meanings(self.analysis.value[a], node=a))
                    next(position)
            elif type(a) is int:
                at = next(position)
                if a > 1:
                    is_token = (
                        self.dims.is_token_position([a], 0)
                        if get_op_name(n) == "arange"
                        else self.dims.is_token_position(shape, at)
                    )
                    leaves.append(self._list_meanings(a, first=is_shape and is_token))

        map_aggregate((n.args, n.kwargs), candidates)
        for combination in itertools.product(*leaves):
            rest = iter(combination)

            def leaf(a: Any, rest: Iterator[Any] = rest) -> Any:
                if isinstance(a, fx.Node):
                    return next(rest) if self.analysis.is_number(a) else ValueRef(self.number_of[a])
                return next(rest) if type(a) is int and a > 1 else a

            args, kwargs = map_leaves(n.args, leaf), map_leaves(n.kwargs, leaf)
            try:
                out = self._run_node(n, args, kwargs)
            except Exception:  # torch's error for shapes that do not fit
                continue
            if not _has_same_structure(out, self.analysis.value[n]):
                continue
            self.arguments[n], self.probed[n] = (args, kwargs), out
            yield

    def _collect_numbers(self, tree: Any) -> list[int]:
        """Return all numbers among the arguments of a node, with their values in the graph."""
        numbers: list[int] = []

        def number(a: Any) -> None:
            if isinstance(a, fx.Node) and self.analysis.is_number(a):
                numbers.append(
                    get_size_hint(self.analysis.value[a]) if isinstance(self.analysis.value[a], torch.SymInt) else 0
                )
            elif type(a) is int:
                numbers.append(a)

        map_aggregate(tree, number)
        return numbers

    def _list_meanings(self, value: Any, first: bool = False, node: fx.Node | None = None) -> list[Any]:
        """Return the meanings of a number, most likely first. `first`: prefer token dims to a constant."""
        value = simplify_size(value)
        if node in self.analysis.number_inputs:
            return []  # it differs from call to call
        if isinstance(value, (torch.SymInt, torch.SymFloat)):
            return self.dims.interpret_symbol(value, node)
        if type(value) is not int:
            return [value]
        sizes = self.dims.interpret_number(value)
        return [*sizes, value] if first else [value, *sizes]

    def _try_side_input(self, n: fx.Node) -> Iterator[None]:
        """Yield once for each shape that a side input may have; sets its shape and value."""
        t = self.analysis.value[n]
        if not isinstance(t, torch.Tensor):
            return
        sizes = [simplify_size(s) for s in t.shape]
        known_sizes = [get_size_hint(s) for s in sizes]
        axes = [
            self._list_meanings(s, first=type(s) is int and self.dims.is_token_position(known_sizes, at))
            for at, s in enumerate(sizes)
        ]
        for shape in itertools.product(*axes):
            self.shapes[n] = shape
            sizes = [s.at(self.dims.probe) if isinstance(s, SizeExpression) else s for s in shape]
            self.probed[n] = self._make_empty(sizes, t.dtype)
            yield

    def _run_node(self, n: fx.Node, args: tuple, kwargs: dict) -> Any:
        """Run a node on the values at the probe sizes."""

        def value(a: Any) -> Any:
            if isinstance(a, ValueRef):
                return self.probed[self.node_at[a.index]]
            if isinstance(a, SizeExpression):
                return a.at(self.dims.probe)
            return self.device if isinstance(a, torch.device) else a

        args, kwargs = map_leaves(args, value), map_leaves(kwargs, value)
        if n.op == "call_function" and n.target is operator.setitem:
            operator.setitem(*args)
            return args[0]
        if "grouped_mm" in get_op_name(n):
            return args[0].new_empty((*args[0].shape[:-1], args[1].shape[-1]))
        if get_op_name(n) in _FACTORIES and not any(self.analysis.tensor(a) is not None for a in n.all_input_nodes):
            kwargs["device"] = self.device
        with self.mode or contextlib.nullcontext(), apply_modes(self.analysis.modes[n]):
            return call_target(n.target, n.op == "call_method", args, kwargs)


def _has_same_structure(out: Any, was: Any) -> bool:
    """Return whether a value has the same type, rank and dtype as in the graph. Sizes may differ."""
    if isinstance(was, torch.Tensor):
        return isinstance(out, torch.Tensor) and out.dim() == was.dim() and out.dtype == was.dtype
    if isinstance(was, (tuple, list)):
        return isinstance(out, (tuple, list)) and len(out) == len(was) and all(map(_has_same_structure, out, was))
    return True
