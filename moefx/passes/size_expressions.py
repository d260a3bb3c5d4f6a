"""Numbers that depend on the sizes of the inputs: from what they were in the captures to nodes that compute them."""

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

from ..capture.captured import Capture
from ..capture.sizes import evaluate
from ..errors import Refused
from ..ir.graph_codegen import FUNCTIONS
from .aligned_nodes import AlignedNodes, op_kind
from .capacity_formulas import Formula, find_formula
from .match.matched import Match

aten = torch.ops.aten

_BINARY = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod, ast.Div: operator.truediv, ast.Pow: operator.pow, ast.LShift: operator.lshift,
    ast.RShift: operator.rshift, ast.BitAnd: operator.and_, ast.BitOr: operator.or_, ast.BitXor: operator.xor,
}  # fmt: skip
_REAL = ("{}", "log({})", "sqrt({})", "log2({})", "1/({})", "1/sqrt({})", "({})**0.5", "({})**-0.5", "-({})")
_ENDS = ("{0}", "max({0}, {low})", "min({0}, {high})")
_SHAPED = (aten.reshape.default, aten.view.default, aten._unsafe_view.default, aten.expand.default)
Spot = tuple  # (twins, "args" or "kwargs", index, ...): where a number stands in a node


class SizeExpressions:
    """`inputs`: placeholders by position. `twins` and `made`: what the graph holds so far, which may have the size."""

    def __init__(
        self, match: Match, graph: fx.Graph, inputs: dict[int, fx.Node],
        twins: dict[fx.Node, AlignedNodes], made: dict[fx.Node, fx.Node],
    ):  # fmt: skip
        self.match, self.graph, self.inputs, self.twins, self.made = match, graph, inputs, twins, made
        self._known: dict[Any, fx.Node] = {}
        self._lines: dict[int, dict[Any, list[fx.Node]]] = {}  # by capture

    def number(self, values: list[int], where: str, spot: Spot | None = None) -> int | fx.Node:
        """An integer that may depend on the input sizes, as a number or as a node that computes it. `spot` is where it
        stands, to be looked up in further captures."""
        if len(set(values)) == 1:
            return values[0]
        if -1 in values and spot is not None and spot[0].first.target in _SHAPED:
            return -1  # the shape of a view, inferred at some of the sizes
        key = tuple(values)
        if key not in self._known:
            made = self._solve(values, spot)
            if made is None and (formula := self._by_probes(values, spot)) is not None:
                made = self.formula(formula)
            if made is None:
                raise Refused(
                    "a number depends on the routing, or on the sizes in a way that was not understood: "
                    f"{', '.join(map(str, values))} "
                    f"at sizes {', '.join(str(s) for s in self.match.sizes)}",
                    source=where,
                    remedy="if the program reads it from a tensor (.item(), int()), compute with the tensor itself",
                )
            self._known[key] = made
        return self._known[key]

    def real(self, values: list[float], spot: Spot | None = None) -> fx.Node | None:
        """A float that the program computed from sizes."""
        if len(set(values)) > 1 and all(v.is_integer() for v in values):  # a capacity as a float
            formula = self._by_probes([int(v) for v in values], spot)
            if formula is not None:
                return self._arith(float, self.formula(formula))
        if len(set(values)) < 2:
            return None
        points = list(zip(self.match.sizes, values, strict=True))
        always = set.intersection(*[lifted.capture.sizes.used for lifted in self.match.lifted])
        # what ops were called with in some captures only (`max(S / 8, 1)`) may be what it is by chance
        formula = _real(always, points)
        if formula is None and (more := self._met(spot)) is not None:
            formula = _real(self.match.expressions, [*points, *more])
        return None if formula is None else self._expression(ast.parse(formula, mode="eval").body)

    def _solve(self, values: list[int], spot: Spot | None) -> fx.Node | None:
        """As a function of the sizes of the inputs, or as the size of something that was computed."""
        found = self._by_dims(values, (_scaled,))
        if found is None and len(set(values)) > 2:  # what was made so far says it without more captures
            found = self._by_result(values)
        if found is None and (formula := self._by_expression(values, spot)) is not None:
            found = self.formula(formula)
        return found or self._by_dims(values, (_divided, _affine), spot) or self._by_result(values)

    def _by_dims(self, values: list[int], laws: Sequence[Callable], spot: Spot | None = None) -> fx.Node | None:
        dims = self.match.arguments.dims
        for count in range(1, len(dims) + 1):
            for chosen in itertools.combinations(dims, count):
                products = [math.prod(s[d] for d in chosen) for s in self.match.sizes]
                for law in laws:
                    found = law(products, values)
                    if found is not None and (law is _scaled or self._holds(chosen, found, spot)):
                        return self._law(chosen, *found)
        return None

    def _holds(self, dims: Sequence[str], law: tuple[int, int, int], spot: Spot | None) -> bool:
        """Few sizes have more laws than the one that the program follows."""
        times, over, plus = law
        points = self._probed(spot)
        return points is not None and all(
            times * math.prod(sizes[d] for d in dims) // over + plus == v for sizes, v in points
        )

    def _by_result(self, values: list[int]) -> fx.Node | None:
        for twins in self.twins.values():  # such as the rows that a mask left
            if twins.first not in self.made:
                continue
            shapes = [getattr(t.meta.get("val"), "shape", ()) for t in twins]
            for axis in range(min(map(len, shapes))):
                if [s[axis] for s in shapes] == values:
                    return self._call(aten.sym_size.int, (self.made[twins.first], axis), {}, {"letters": "n"})
        return None

    def _by_expression(self, values: list[int], spot: Spot | None) -> Formula | None:
        """A formula that the program was seen to compute."""
        if len(set(values)) < 3:
            return None
        points, more = list(zip(self.match.sizes, values, strict=True)), self._probed(spot)
        found = find_formula([*points, *(more or ())], self.match.expressions, laws=False)
        # how a number was rounded shows at more sizes only
        return found if more is not None or found is None or found.text in self.match.expressions else None

    def _by_probes(self, values: list[int], spot: Spot | None) -> Formula | None:
        """A formula for a number, read off more sizes than the proof needed."""
        more = self._probed(spot)
        if more is None:
            return None
        return find_formula([*zip(self.match.sizes, values, strict=True), *more], self.match.expressions)

    def _probed(self, spot: Spot | None) -> list[tuple[dict[str, int], int]] | None:
        """The integer that stands at a place of the program, at more sizes; None where it is not always one."""
        points = self._met(spot)
        if points is None or not all(float(v).is_integer() for _, v in points):
            return None
        return [(sizes, int(v)) for sizes, v in points]

    def _met(self, spot: Spot | None) -> list[tuple[dict[str, int], int | float]] | None:
        """The number that stands at a place of the program, at more sizes."""
        if spot is None:
            return None
        turns = {
            self._of_line(lifted.capture, t).index(t) for lifted, t in zip(self.match.lifted, spot[0], strict=True)
        }
        if len(turns) != 1:
            return None
        turn = turns.pop()
        for routing in self.match.probes:  # there already, and good for this if the program comes to the line there
            points = self._points(spot, turn, routing)
            if points is not None and len(points) == len(self.match.probe(routing)):
                return points
        return self._points(spot, turn, "diverse")

    def _points(self, spot: Spot, turn: int, routing: str) -> list[tuple[dict[str, int], int | float]] | None:
        points = []
        for sizes, capture in self.match.probe(routing):
            alike = self._of_line(capture, spot[0].first)
            if turn < len(alike):
                value: Any = getattr(alike[turn], spot[1])
                for step in spot[2:]:
                    value = value[step]
                if not isinstance(value, (int, float)) or not math.isfinite(value):
                    return None
                points.append((sizes, value))
        return points

    def _of_line(self, capture: Capture, node: fx.Node) -> list[fx.Node]:
        """The ops of one kind that a line of the program came to, turn by turn where it is in a loop."""
        if id(capture) not in self._lines:
            lines = self._lines[id(capture)] = defaultdict(list)
            for n in capture.nodes:
                lines[n.meta["source"], op_kind(n)].append(n)
        return self._lines[id(capture)][node.meta["source"], op_kind(node)]

    def formula(self, formula: Formula) -> fx.Node:
        """The number that a formula gives, as a node."""
        if formula not in self._known:
            self._known[formula] = self._expression(ast.parse(formula.text, mode="eval").body)
        return self._known[formula]

    def _expression(self, e: ast.expr) -> Any:
        match e:
            case ast.Constant():
                return e.value
            case ast.Name():
                return self.dim(e.id)
            case ast.BinOp():
                return self._arith(_BINARY[type(e.op)], self._expression(e.left), self._expression(e.right))
            case ast.UnaryOp():
                return self._arith(operator.neg, self._expression(e.operand))
            case ast.Call():
                return self._arith(FUNCTIONS[e.func.id], *map(self._expression, e.args))  # type: ignore[attr-defined]
        raise AssertionError(ast.dump(e))

    def _law(self, dims: tuple[str, ...], times: int, over: int, plus: int) -> fx.Node:
        node = self.dim(dims[0])
        for d in dims[1:]:
            node = self._arith(operator.mul, node, self.dim(d))
        if times != 1:
            node = self._arith(operator.mul, node, times)
        if over != 1:
            node = self._arith(operator.floordiv, node, over)
        return self._arith(operator.add, node, plus) if plus else node

    def _arith(self, fn: Any, *args: Any) -> fx.Node:
        return self._call(fn, args, {}, {"letters": ""})

    def dim(self, name: str) -> fx.Node:
        """The size of a token axis, read off an input."""
        key = ("dim", name)
        if key not in self._known:
            for position, leaf in enumerate(self.match.arguments.tensors):
                if name in leaf.shape:
                    size = self._call(
                        aten.sym_size.int,
                        (self.inputs[position], leaf.shape.index(name)),
                        {},
                        {"letters": name},
                    )
                    self._known[key] = size
                    break
        return self._known[key]

    def _call(self, target: Any, args: tuple, kwargs: dict[str, Any], meta: dict[str, Any]) -> fx.Node:
        node = self.graph.call_function(target, args, kwargs)
        node.meta.update(meta)
        return node


def _real(texts: Iterable[str], points: Sequence[tuple[dict[str, int], float]]) -> str | None:
    """One of the expressions, or a function of it, that gives all these values at these sizes."""
    seen = {float(v) for _, v in points}
    if len(seen) < 3:
        return None
    for clamp, text in itertools.product(_ENDS, sorted(texts, key=lambda e: (len(e), e))):
        for law in _REAL:
            formula = clamp.format(law.format(text), low=min(seen), high=max(seen))
            try:
                if all(evaluate(formula, sizes) == v for sizes, v in points):
                    return formula
            except (ArithmeticError, ValueError):
                break
    return None


# ---------------------------------------------------------------------- laws: (times, over, plus)
def _scaled(base: list[int], values: list[int]) -> tuple[int, int, int] | None:
    k, rest = divmod(values[0], base[0])
    return (k, 1, 0) if rest == 0 and k and all(v == k * b for b, v in zip(base, values, strict=True)) else None


def _divided(base: list[int], values: list[int]) -> tuple[int, int, int] | None:
    """`times * base // over`, for capacities such as `T * k // E`."""
    if not all(values) or len(set(values)) == 1:
        return None
    for over in range(2, 513):
        low = max(-(-v * over // b) for b, v in zip(base, values, strict=True))
        high = min(((v + 1) * over - 1) // b for b, v in zip(base, values, strict=True))
        for times in range(low, min(high, low) + 1):
            if math.gcd(times, over) == 1 and all(times * b // over == v for b, v in zip(base, values, strict=True)):
                return (times, over, 0) if all(times * b % over == 0 for b in base) else None
    return None


def _affine(base: list[int], values: list[int]) -> tuple[int, int, int] | None:
    if len(set(base)) < 2:
        return None
    i = next(j for j, b in enumerate(base) if b != base[0])
    k, rest = divmod(values[i] - values[0], base[i] - base[0])
    plus = values[0] - k * base[0]
    fits = rest == 0 and k != 0 and len(set(base)) > 2 and abs(plus) <= 4
    return (k, 1, plus) if fits and all(v == k * b + plus for b, v in zip(base, values, strict=True)) else None
