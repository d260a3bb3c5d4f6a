"""Emit numbers that depend on input sizes: from their values in the captures to nodes that compute them."""

from __future__ import annotations

import ast
import itertools
import math
import operator
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import fx

from ...capture.capture_result import Capture
from ...capture.sizes.size_guards import evaluate_size
from ...capture.tracing.concrete_routing import RoutingKind
from ...errors import Refused
from ...ir.graph_codegen import FUNCTIONS
from ...matching.capacity_formulas import Formula, find_formula
from ...matching.match_result import Match
from ...matching.size_samples import SizeSamples
from .aligned_nodes import AlignedNodes, op_kind

aten = torch.ops.aten

_BINARY = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod, ast.Div: operator.truediv, ast.Pow: operator.pow, ast.LShift: operator.lshift,
    ast.RShift: operator.rshift, ast.BitAnd: operator.and_, ast.BitOr: operator.or_, ast.BitXor: operator.xor,
}  # fmt: skip
_FLOAT_FUNCTIONS = ("{}", "log({})", "sqrt({})", "log2({})", "1/({})", "1/sqrt({})", "({})**0.5", "({})**-0.5", "-({})")
_CLAMPS = ("{0}", "max({0}, {low})", "min({0}, {high})")
_SHAPED = (aten.reshape.default, aten.view.default, aten._unsafe_view.default, aten.expand.default)
ArgumentPath = tuple  # (aligned, "args" or "kwargs", index, ...): the path to a number in a node


class SizeExpressions:
    """Turns numbers that differ between captures into graph nodes over input sizes.

    Args:
        inputs: placeholders by position. aligned, made: the nodes emitted so far, whose shapes may hold a size.
    """

    def __init__(
        self, match: Match, samples: SizeSamples, graph: fx.Graph, inputs: dict[int, fx.Node],
        aligned: dict[fx.Node, AlignedNodes], made: dict[fx.Node, fx.Node],
    ):  # fmt: skip
        self.match, self.samples, self.graph = match, samples, graph
        self.inputs, self.aligned, self.new_nodes = inputs, aligned, made
        self._known: dict[Any, fx.Node] = {}
        self._lines: dict[int, dict[Any, list[fx.Node]]] = {}  # by capture

    def emit_integer(self, values: list[int], where: str, path: ArgumentPath | None = None) -> int | fx.Node:
        """Return an integer that may depend on the input sizes, as a number or as a node that computes it.

        Args:
            values: one for each capture. where: the user's source line. path: to find the number in further captures.

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
                    source=where,
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
        always = set.intersection(*[form.capture.sizes.used for form in self.match.forms])
        # Expressions that only some captures used, as in `max(S / 8, 1)`, may match by chance.
        formula = _find_float_formula(always, points)
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
        self, values: list[int], rules: Sequence[Callable], path: ArgumentPath | None = None
    ) -> fx.Node | None:
        dims = self.match.arguments.dims
        for count in range(1, len(dims) + 1):
            for chosen in itertools.combinations(dims, count):
                products = [math.prod(s[d] for d in chosen) for s in self.match.sizes]
                for rule in rules:
                    factors = rule(products, values)
                    if factors is not None and (rule is _fit_scaled or self._holds_at_probes(chosen, factors, path)):
                        return self._emit_linear(chosen, *factors)
        return None

    def _holds_at_probes(self, dims: Sequence[str], linear: tuple[int, int, int], path: ArgumentPath | None) -> bool:
        """Return whether a formula also holds at the probes' sizes, because several formulas fit a few sizes."""
        times, over, plus = linear
        points = self._probe_integers(path)
        return points is not None and all(
            times * math.prod(sizes[d] for d in dims) // over + plus == v for sizes, v in points
        )

    def _emit_from_result(self, values: list[int]) -> fx.Node | None:
        for aligned in self.aligned.values():  # such as the rows that a mask selects
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
        # Rounding can only be verified at further sizes.
        return (
            formula if probed_points is not None or formula is None or formula.text in self.match.expressions else None
        )

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
        turns = {
            self._nodes_of_line(form.capture, t).index(t) for form, t in zip(self.match.forms, path[0], strict=True)
        }
        if len(turns) != 1:
            return None
        turn = turns.pop()
        for routing in self.samples.kinds:  # reuse captures that reach the line
            points = self._read_points(path, turn, routing)
            if points is not None and len(points) == len(self.samples.sample(routing)):
                return points
        return self._read_points(path, turn, "diverse")

    def _read_points(
        self, path: ArgumentPath, turn: int, routing: RoutingKind
    ) -> list[tuple[dict[str, int], int | float]] | None:
        points = []
        for sizes, capture in self.samples.sample(routing):
            nodes = self._nodes_of_line(capture, path[0].first)
            if turn < len(nodes):
                value: Any = getattr(nodes[turn], path[1])
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
                lines[n.meta["source"], op_kind(n)].append(n)
        return self._lines[id(capture)][node.meta["source"], op_kind(node)]

    def emit_formula(self, formula: Formula) -> fx.Node:
        """Emit the nodes that compute a formula."""
        if formula not in self._known:
            self._known[formula] = self._emit_expression(ast.parse(formula.text, mode="eval").body)
        return self._known[formula]

    def _emit_expression(self, e: ast.expr) -> Any:
        match e:
            case ast.Constant():
                return e.value
            case ast.Name():
                return self.emit_dim(e.id)
            case ast.BinOp():
                return self._emit_arithmetic(
                    _BINARY[type(e.op)], self._emit_expression(e.left), self._emit_expression(e.right)
                )
            case ast.UnaryOp():
                return self._emit_arithmetic(operator.neg, self._emit_expression(e.operand))
            case ast.Call():
                return self._emit_arithmetic(FUNCTIONS[e.func.id], *map(self._emit_expression, e.args))  # type: ignore[attr-defined]
        raise AssertionError(ast.dump(e))

    def _emit_linear(self, dims: tuple[str, ...], times: int, over: int, plus: int) -> fx.Node:
        node = self.emit_dim(dims[0])
        for d in dims[1:]:
            node = self._emit_arithmetic(operator.mul, node, self.emit_dim(d))
        if times != 1:
            node = self._emit_arithmetic(operator.mul, node, times)
        if over != 1:
            node = self._emit_arithmetic(operator.floordiv, node, over)
        return self._emit_arithmetic(operator.add, node, plus) if plus else node

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
    seen = {float(v) for _, v in points}
    if len(seen) < 3:
        return None
    for clamp, text in itertools.product(_CLAMPS, sorted(texts, key=lambda e: (len(e), e))):
        for law in _FLOAT_FUNCTIONS:
            formula = clamp.format(law.format(text), low=min(seen), high=max(seen))
            try:
                if all(evaluate_size(formula, sizes) == v for sizes, v in points):
                    return formula
            except (ArithmeticError, ValueError):
                break
    return None


# ---------------------------------------------------------------------- linear formulas (times, over, plus)
def _fit_scaled(base: list[int], values: list[int]) -> tuple[int, int, int] | None:
    k, rest = divmod(values[0], base[0])
    return (k, 1, 0) if rest == 0 and k and all(v == k * b for b, v in zip(base, values, strict=True)) else None


def _fit_divided(base: list[int], values: list[int]) -> tuple[int, int, int] | None:
    """Fit `times * base // over`, for capacities such as `T * k // E`."""
    if not all(values) or len(set(values)) == 1:
        return None
    for over in range(2, 513):
        low = max(-(-v * over // b) for b, v in zip(base, values, strict=True))
        high = min(((v + 1) * over - 1) // b for b, v in zip(base, values, strict=True))
        for times in range(low, min(high, low) + 1):
            if math.gcd(times, over) == 1 and all(times * b // over == v for b, v in zip(base, values, strict=True)):
                return (times, over, 0) if all(times * b % over == 0 for b in base) else None
    return None


def _fit_affine(base: list[int], values: list[int]) -> tuple[int, int, int] | None:
    if len(set(base)) < 2:
        return None
    i = next(j for j, b in enumerate(base) if b != base[0])
    k, rest = divmod(values[i] - values[0], base[i] - base[0])
    plus = values[0] - k * base[0]
    fits = rest == 0 and k != 0 and len(set(base)) > 2 and abs(plus) <= 4
    return (k, 1, plus) if fits and all(v == k * b + plus for b, v in zip(base, values, strict=True)) else None
