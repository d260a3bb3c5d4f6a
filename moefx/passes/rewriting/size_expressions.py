"""Emit numbers that depend on input sizes: from their values in the captures to nodes that compute them."""

from __future__ import annotations

import ast
import itertools
import math
import operator
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import fx

from ...capture.sizes.size_guards import evaluate_size
from ...capture.tracing.capture_result import Capture
from ...capture.tracing.concrete_routing import RoutingKind
from ...errors import Refused
from ...ir.graphs.graph_codegen import FUNCTIONS
from ...matching.results.capacity_formulas import Formula, find_formula
from ...matching.results.match_result import Match
from ...matching.results.size_samples import SizeSamples
from .aligned_nodes import AlignedNodes, name_op_kind

aten = torch.ops.aten

_BINARY = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod, ast.Div: operator.truediv, ast.Pow: operator.pow, ast.LShift: operator.lshift,
    ast.RShift: operator.rshift, ast.BitAnd: operator.and_, ast.BitOr: operator.or_, ast.BitXor: operator.xor,
}  # fmt: skip
_FLOAT_FUNCTIONS = ("{}", "log({})", "sqrt({})", "log2({})", "1/({})", "1/sqrt({})", "({})**0.5", "({})**-0.5", "-({})")
_CLAMPS = ("{0}", "max({0}, {low})", "min({0}, {high})")
_SHAPED = (aten.reshape.default, aten.view.default, aten._unsafe_view.default, aten.expand.default)
_MAX_DIVISOR = 512  # of capacities
_MAX_OFFSET = 4
ArgumentPath = tuple  # (aligned, "args" or "kwargs", index, ...): the path to a number in a node


def extend_path(path: ArgumentPath | None, key: Any) -> ArgumentPath | None:
    return None if path is None else (*path, key)


class LinearFormula(NamedTuple):
    """`factor * size // divisor + offset`, of the size of an axis or of a product of axes."""

    factor: int
    divisor: int = 1
    offset: int = 0

    def evaluate(self, size: int) -> int:
        return self.factor * size // self.divisor + self.offset


class SizeExpressions:
    """Turns numbers that differ between captures into graph nodes over input sizes.

    Args:
        inputs: placeholders by position.
        aligned: the nodes emitted so far, whose shapes may hold a size, by their node in the first capture.
        new_nodes: the emitted nodes, by the same nodes.
    """

    def __init__(
        self, match: Match, samples: SizeSamples, graph: fx.Graph, inputs: dict[int, fx.Node],
        aligned: dict[fx.Node, AlignedNodes], new_nodes: dict[fx.Node, fx.Node],
    ):  # fmt: skip
        self.match, self.samples, self.graph = match, samples, graph
        self.inputs, self.aligned, self.new_nodes = inputs, aligned, new_nodes
        self._known: dict[Any, fx.Node] = {}  # emitted nodes, by their values, by formula, or by axis
        self._lines: dict[int, dict[Any, list[fx.Node]]] = {}  # by capture

    def emit_integer(self, values: list[int], line: str, path: ArgumentPath | None = None) -> int | fx.Node:
        """Return an integer that may depend on the input sizes, as a number or as a node that computes it.

        Args:
            values: one for each capture. line: the user's source line. path: to find the number in further captures.

        Raises:
            Refused: no expression over the sizes gives these values.
        """
        if len(set(values)) == 1:
            return values[0]
        if -1 in values and path is not None and path[0].first.target in _SHAPED:
            return -1  # an inferred axis of a view
        key = tuple(values)
        if key not in self._known:
            node = self._emit_from_captures(values, path)
            if node is None and (formula := self._find_formula_by_probes(values, path)) is not None:
                node = self.emit_formula(formula)
            if node is None:
                raise Refused(
                    "a number depends on the routing, or on the sizes by an unknown formula: "
                    f"{', '.join(map(str, values))} "
                    f"at sizes {', '.join(str(s) for s in self.match.sizes)}",
                    source=line,
                    remedy="if the program reads it from a tensor (.item(), int()), compute with the tensor itself",
                )
            self._known[key] = node
        return self._known[key]

    def emit_float(self, values: list[float], path: ArgumentPath | None = None) -> fx.Node | None:
        """Return a node for a float that the program computed from sizes, or None."""
        if len(set(values)) > 1 and all(v.is_integer() for v in values):  # a capacity as a float
            formula = self._find_formula_by_probes([int(v) for v in values], path)
            if formula is not None:
                return self._emit_arithmetic(float, self.emit_formula(formula))
        if len(set(values)) < 2:
            return None
        points = list(zip(self.match.sizes, values, strict=True))
        common_sizes = set.intersection(*[form.capture.sizes.used for form in self.match.forms])
        # Expressions that only some captures used, as in `max(S / 8, 1)`, may match by chance.
        formula = _find_float_formula(common_sizes, points)
        if formula is None and (probed_points := self._probe_numbers(path)) is not None:
            formula = _find_float_formula(self.match.expressions, [*points, *probed_points])
        return None if formula is None else self._emit_expression(ast.parse(formula, mode="eval").body)

    def _emit_from_captures(self, values: list[int], path: ArgumentPath | None) -> fx.Node | None:
        """Emit a function of the input sizes, or the size of an emitted value. None if neither matches."""
        node = self._emit_from_dims(values, (_fit_scaled,))
        if node is None and len(set(values)) > 2:  # needs no further captures
            node = self._emit_from_result(values)
        if node is None and (formula := self._find_formula_in_program(values, path)) is not None:
            node = self.emit_formula(formula)
        return node or self._emit_from_dims(values, (_fit_divided, _fit_affine), path) or self._emit_from_result(values)

    def _emit_from_dims(
        self, values: list[int], rules: Sequence[_FitRule], path: ArgumentPath | None = None
    ) -> fx.Node | None:
        """Emit a linear formula of an axis, or of a product of axes, that one of the rules fits."""
        dims = self.match.arguments.dims
        for count in range(1, len(dims) + 1):
            for subset in itertools.combinations(dims, count):
                products = [math.prod(s[d] for d in subset) for s in self.match.sizes]
                for rule in rules:
                    formula = rule(products, values)
                    if formula is not None and (rule is _fit_scaled or self._holds_at_probes(subset, formula, path)):
                        return self._emit_linear(subset, formula)
        return None

    def _holds_at_probes(self, dims: Sequence[str], formula: LinearFormula, path: ArgumentPath | None) -> bool:
        """Return whether a formula also holds at the probes' sizes, because several formulas fit a few sizes."""
        points = self._probe_integers(path)
        return points is not None and all(
            formula.evaluate(math.prod(sizes[d] for d in dims)) == value for sizes, value in points
        )

    def _emit_from_result(self, values: list[int]) -> fx.Node | None:
        """Emit the size of an emitted value that has these sizes in the captures, such as rows that a mask selects."""
        for aligned in self.aligned.values():
            if aligned.first not in self.new_nodes:
                continue
            shapes = [getattr(t.meta.get("val"), "shape", ()) for t in aligned]
            for axis in range(min(map(len, shapes))):
                if [s[axis] for s in shapes] == values:
                    return self._emit_call(
                        aten.sym_size.int, (self.new_nodes[aligned.first], axis), {}, {"letters": "n"}
                    )
        return None

    def _find_formula_in_program(self, values: list[int], path: ArgumentPath | None) -> Formula | None:
        """Find a formula among the expressions that the program evaluates."""
        if len(set(values)) < 3:
            return None
        points, probed_points = list(zip(self.match.sizes, values, strict=True)), self._probe_integers(path)
        formula = find_formula([*points, *(probed_points or ())], self.match.expressions, try_linear=False)
        if formula is None or formula.text in self.match.expressions:
            return formula
        return formula if probed_points is not None else None  # rounding can only be verified at further sizes

    def _find_formula_by_probes(self, values: list[int], path: ArgumentPath | None) -> Formula | None:
        """Find a formula from the number's values at further sizes."""
        probed_points = self._probe_integers(path)
        if probed_points is None:
            return None
        return find_formula([*zip(self.match.sizes, values, strict=True), *probed_points], self.match.expressions)

    def _probe_integers(self, path: ArgumentPath | None) -> list[tuple[dict[str, int], int]] | None:
        """Return the integer at `path` at further sizes; None if it is not always an integer."""
        points = self._probe_numbers(path)
        if points is None or not all(float(v).is_integer() for _, v in points):
            return None
        return [(sizes, int(v)) for sizes, v in points]

    def _probe_numbers(self, path: ArgumentPath | None) -> list[tuple[dict[str, int], int | float]] | None:
        """Return the number at `path` at further sizes, or None."""
        if path is None:
            return None
        positions = {
            self._nodes_of_line(form.capture, node).index(node)
            for form, node in zip(self.match.forms, path[0], strict=True)
        }
        if len(positions) != 1:
            return None
        (position,) = positions
        for routing in self.samples.kinds:  # reuse captures that reach the line
            points = self._read_points(path, position, routing)
            if points is not None and len(points) == len(self.samples.sample(routing)):
                return points
        return self._read_points(path, position, "diverse")

    def _read_points(
        self, path: ArgumentPath, position: int, routing: RoutingKind
    ) -> list[tuple[dict[str, int], int | float]] | None:
        """Return the number at `path` in the captures of a routing that reach it; None if some value is no number.

        Args:
            position: index of the node among the nodes of its line.
        """
        points = []
        for sizes, capture in self.samples.sample(routing):
            nodes = self._nodes_of_line(capture, path[0].first)
            if position < len(nodes):
                value: Any = getattr(nodes[position], path[1])
                for step in path[2:]:
                    value = value[step]
                if not isinstance(value, (int, float)) or not math.isfinite(value):
                    return None
                points.append((sizes, value))
        return points

    def _nodes_of_line(self, capture: Capture, node: fx.Node) -> list[fx.Node]:
        """Return the nodes of one op on one source line, in order: several if the line is in a loop."""
        if id(capture) not in self._lines:
            lines = self._lines[id(capture)] = defaultdict(list)
            for n in capture.nodes:
                lines[n.meta["source"], name_op_kind(n)].append(n)
        return self._lines[id(capture)][node.meta["source"], name_op_kind(node)]

    def emit_formula(self, formula: Formula) -> fx.Node:
        """Emit the nodes that compute a formula."""
        if formula not in self._known:
            self._known[formula] = self._emit_expression(ast.parse(formula.text, mode="eval").body)
        return self._known[formula]

    def _emit_expression(self, expression: ast.expr) -> Any:
        match expression:
            case ast.Constant(value=value):
                return value
            case ast.Name(id=name):
                return self.emit_dim(name)
            case ast.BinOp(left=left, op=op, right=right):
                return self._emit_arithmetic(_BINARY[type(op)], *map(self._emit_expression, (left, right)))
            case ast.UnaryOp(operand=operand):  # a minus
                return self._emit_arithmetic(operator.neg, self._emit_expression(operand))
            case ast.Call(func=ast.Name(id=name), args=args):
                return self._emit_arithmetic(FUNCTIONS[name], *map(self._emit_expression, args))
        raise AssertionError(ast.dump(expression))

    def _emit_linear(self, dims: tuple[str, ...], formula: LinearFormula) -> fx.Node:
        """Emit a linear formula of the product of some axes."""
        node = self.emit_dim(dims[0])
        for dim in dims[1:]:
            node = self._emit_arithmetic(operator.mul, node, self.emit_dim(dim))
        if formula.factor != 1:
            node = self._emit_arithmetic(operator.mul, node, formula.factor)
        if formula.divisor != 1:
            node = self._emit_arithmetic(operator.floordiv, node, formula.divisor)
        return self._emit_arithmetic(operator.add, node, formula.offset) if formula.offset else node

    def _emit_arithmetic(self, fn: Any, *args: Any) -> fx.Node:
        return self._emit_call(fn, args, {}, {"letters": ""})

    def emit_dim(self, name: str) -> fx.Node:
        """Emit the size of a token axis, read from an input."""
        key = ("dim", name)
        if key not in self._known:
            for position, leaf in enumerate(self.match.arguments.tensors):
                if name in leaf.shape:
                    size = self._emit_call(
                        aten.sym_size.int,
                        (self.inputs[position], leaf.shape.index(name)),
                        {},
                        {"letters": name},
                    )
                    self._known[key] = size
                    break
        return self._known[key]

    def _emit_call(self, target: Any, args: tuple, kwargs: dict[str, Any], meta: dict[str, Any]) -> fx.Node:
        node = self.graph.call_function(target, args, kwargs)
        node.meta.update(meta)
        return node


def _find_float_formula(texts: Iterable[str], points: Sequence[tuple[dict[str, int], float]]) -> str | None:
    """Find an expression, or a function of one, that gives these values at these sizes."""
    seen = {float(value) for _, value in points}
    if len(seen) < 3:
        return None
    for clamp, text in itertools.product(_CLAMPS, sorted(texts, key=lambda e: (len(e), e))):
        for function in _FLOAT_FUNCTIONS:
            formula = clamp.format(function.format(text), low=min(seen), high=max(seen))
            if all(_evaluate_or_none(formula, sizes) == value for sizes, value in points):
                return formula
    return None


def _evaluate_or_none(formula: str, sizes: dict[str, int]) -> Any:
    """Return the value of a formula; None if it has none at these sizes, such as the logarithm of 0."""
    try:
        return evaluate_size(formula, sizes)
    except (ArithmeticError, ValueError):
        return None


# ---------------------------------------------------------------------- fits of linear formulas
_FitRule = Callable[[list[int], list[int]], "LinearFormula | None"]  # of the sizes and the values in all captures


def _fit_scaled(sizes: list[int], values: list[int]) -> LinearFormula | None:
    """Fit `factor * size`."""
    factor, rest = divmod(values[0], sizes[0])
    return _require_fit(LinearFormula(factor), sizes, values) if factor and not rest else None


def _fit_divided(sizes: list[int], values: list[int]) -> LinearFormula | None:
    """Fit `factor * size // divisor` without rounding, for capacities such as `T * k // E`."""
    if not all(values) or len(set(values)) == 1:
        return None
    for divisor in range(2, _MAX_DIVISOR + 1):
        factor = max(-(-value * divisor // size) for size, value in zip(sizes, values, strict=True))
        formula = LinearFormula(factor, divisor)
        if math.gcd(factor, divisor) == 1 and _require_fit(formula, sizes, values):
            return formula if all(factor * size % divisor == 0 for size in sizes) else None
    return None


def _fit_affine(sizes: list[int], values: list[int]) -> LinearFormula | None:
    """Fit `factor * size + offset`, with a small offset."""
    if len(set(sizes)) < 3:
        return None
    other = next(i for i, size in enumerate(sizes) if size != sizes[0])
    factor, rest = divmod(values[other] - values[0], sizes[other] - sizes[0])
    offset = values[0] - factor * sizes[0]
    if rest or not factor or abs(offset) > _MAX_OFFSET:
        return None
    return _require_fit(LinearFormula(factor, offset=offset), sizes, values)


def _require_fit(formula: LinearFormula, sizes: list[int], values: list[int]) -> LinearFormula | None:
    """Return a formula if it gives all values."""
    return formula if all(formula.evaluate(s) == v for s, v in zip(sizes, values, strict=True)) else None
