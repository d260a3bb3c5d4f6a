"""Find the token dims of a region, and interpret numbers of the graph over them."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import sympy
import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import statically_known_true
from torch.utils._sympy.printers import PythonPrinter

from ...capture.arguments.block_arguments import NAMES
from ...capture.sizes.symbolic_sizes import SYMBOLIC_FUNCTIONS
from ...errors import Cause, Refused
from ...ir.graphs.graph_codegen import INFIX
from ...ir.node_values import get_op_name
from .float_inputs import can_be_constant
from .graph_analysis import GraphAnalysis
from .node_queries import get_size_hint, simplify_size
from .region_code import SizeExpression

_PROBES = (101, 103, 107, 109, 113)
_MAX_FACTOR = 4096
_SYMBOLIC = (torch.SymInt, torch.SymFloat)
_CALLED = {"sym_int": "trunc", "sym_sqrt": "sqrt", "sym_log2": "log2", "sym_max": "max", "sym_min": "min"}
_PREFIX = {"sym_float": "1.0*", "neg": "-"}  # multiplication by one is exact


class TokenDims:
    """The token dims of an entry: its axes except the last one and axes of size one.

    Attributes:
        names: outermost first.
        axes: the axis of the entry for each name.
        given: the size of each axis as the graph has it, a number or a symbol.
        sizes: the size in the example, by name.
        probe: other sizes, which equal no constant of the region, by name.
        floats: floats of the caller that are taken as constants, by name.
    """

    def __init__(self, analysis: GraphAnalysis, shape: Sequence[Any], constants: set[int]):
        self.analysis, self.rank = analysis, len(shape)
        self.axes = [i for i, n in enumerate(shape[:-1]) if not (type(n) is int and n == 1)]
        names: tuple[str, ...] = NAMES[: len(self.axes)] if len(self.axes) > 1 else ("S",) * len(self.axes)
        self.names = names
        self.symbols = [sympy.Symbol(name, integer=True, positive=True) for name in names]
        self.axis_sizes = [shape[i] for i in self.axes]
        self.sizes = {name: get_size_hint(shape[i]) for name, i in zip(names, self.axes, strict=True)}
        if 0 in self.sizes.values():
            raise Refused(
                "the graph's inputs have no tokens, so sizes do not identify the token dims", cause=Cause.FEW_TOKENS
            )
        # A symbolic size is never a number in the graph, so equal numbers are constants.
        self.fixed = [at for at, i in enumerate(self.axes) if type(shape[i]) is int]
        self.expressions = {n.node.expr: s for n, s in zip(self.axis_sizes, self.symbols, strict=True)
                            if isinstance(n, torch.SymInt)}  # fmt: skip
        numbers = [
            n for n in analysis.nodes if n.op == "call_function" and isinstance(analysis.value.get(n), _SYMBOLIC)
        ]
        self.computed = {analysis.value[n].node.expr: n for n in reversed(numbers)}
        free = itertools.filterfalse(constants.__contains__, _PROBES)
        self.probe: dict[str, int] = dict(zip(names, free, strict=False))
        self.floats: dict[str, torch.SymFloat] = {}

    def interpret_number(self, n: int) -> list[SizeExpression]:
        """List the products of token dims that a number may be. Dims with symbolic sizes are excluded."""
        products = []
        for count in range(len(self.fixed), 0, -1):
            for subset in itertools.combinations(self.fixed, count):
                product_size = math.prod(self.sizes[self.names[i]] for i in subset)
                times, rest = divmod(n, product_size)
                if rest or not 1 <= times <= _MAX_FACTOR or (times > 1 and count < len(self.names) and subset[-1] == 0):
                    continue
                product = sympy.Mul(times, *(self.symbols[i] for i in subset))
                products.append((times, SizeExpression(_format_expression(product))))
        return [size for _, size in sorted(products, key=lambda f: f[0])]

    def is_token_position(self, shape: Sequence[int], position: int) -> bool:
        """Return whether the number at `position` of a shape is probably a token dim.

        It is one if the entry has it at the same position, with or without axes of size one, or if it is a multiple of
        all tokens and leads the shape.
        """
        units = [i for i in range(self.rank - 1) if i not in self.axes]
        has_units = all(shape[i : i + 1] == [1] for i in units)
        sizes, n = list(self.sizes.values()), shape[position]
        at = dict(zip(self.axes if has_units else range(len(sizes)), sizes, strict=True))
        return at.get(position) == n or (position == 0 and n % math.prod(sizes) == 0)

    def interpret_symbol(self, value: Any, node: fx.Node | None = None) -> list[SizeExpression | int | float]:
        """List the meanings of a symbolic number over the token dims, the most likely first. Empty if it does not
        follow from them.

        Integers are read from their expression. Floats, and integers computed from floats, are followed node by node,
        because SymPy combines factors and so rounds differently.

        Args:
            node: the node that computes it, if known.
        """
        expr = value.node.expr
        is_exact = all(getattr(e, "is_integer", False) for e in sympy.preorder_traversal(expr))
        if is_exact and (meanings := self._list_integer_meanings(value)):
            return [*meanings]
        node = node if node is not None and node.op.startswith("call") else self.computed.get(expr)
        if node in self.analysis.float_inputs:
            name = self.analysis.find_source_name(node.all_input_nodes[0])
            if not can_be_constant(name, value.node.hint):
                return []
            self.floats[name] = value
            return [value.node.hint]
        form = None if node is None else _format_of(node)
        if node is None or form is None:
            return []
        operands = [a for a in node.args if a is not None]
        texts = [self._format_operands(a) for a in operands]
        return [SizeExpression(form.format(*chosen)) for chosen in itertools.product(*texts)]

    def _format_operands(self, operand: Any) -> list[str]:
        """Return the meanings of an operand as Python expressions."""
        value = simplify_size(self.analysis.value[operand]) if isinstance(operand, fx.Node) else operand
        meanings = self.interpret_symbol(value, operand) if isinstance(value, _SYMBOLIC) else [value]
        return [f"({s.text if isinstance(s, SizeExpression) else repr(s)})" for s in meanings]

    def _list_integer_meanings(self, n: torch.SymInt) -> list[SizeExpression | int]:
        """Return the meanings of a symbolic integer by its expression."""
        if not isinstance(number := simplify_size(n), torch.SymInt):
            return [number]
        expr = n.node.expr
        for expression, symbol in sorted(self.expressions.items(), key=lambda e: -len(e[0].free_symbols)):
            expr = _substitute(expr, expression, symbol)
        if expr.free_symbols - set(self.symbols):
            return self._find_equal_product(n)
        if expr.is_Integer:
            return [int(expr)]
        return [SizeExpression(_format_expression(e)) for e in (*self._scale_by_fixed(expr), expr)]

    def _scale_by_fixed(self, expr: sympy.Expr) -> Iterator[sympy.Expr]:
        """Yield `expr` with fixed token dims in position of factors of equal size: `3*S` may be `B*S`."""
        for count in range(len(self.fixed), 0, -1):
            for subset in itertools.combinations(self.fixed, count):
                size = math.prod(self.sizes[self.names[i]] for i in subset)
                times = sympy.Mul(*(self.symbols[i] for i in subset)) / size

                def has_factor(e: sympy.Basic, size: int = size) -> bool:
                    return isinstance(e, sympy.Mul) and e.args[0].is_Integer and int(e.args[0]) % size == 0

                if expr.find(has_factor):
                    scaled: Any = expr.replace(has_factor, lambda e, times=times: e * times)
                    yield scaled

    def _find_equal_product(self, n: torch.SymInt) -> list[SizeExpression | int]:
        """Return the product of token dims that the graph knows to equal a symbol of another input."""
        for count in range(len(self.names), 0, -1):
            for subset in itertools.combinations(range(len(self.names)), count):
                if statically_known_true(n == math.prod(self.axis_sizes[i] for i in subset)):
                    return [SizeExpression("*".join(self.names[i] for i in subset))]
        return []


def _substitute(expr: Any, size: sympy.Expr, symbol: sympy.Symbol) -> Any:
    """Rewrite `expr` in terms of `symbol`, which stands for `size`: `2*s0` becomes `2*S + 2` if S is `s0 - 1`, the
    number of tokens without the last one.
    """
    if not expr.free_symbols & size.free_symbols:
        return expr
    if not size.is_polynomial(*size.free_symbols):  # as in chunks: `(s0 + 1)//2`
        return expr.subs(size, symbol)
    if not expr.is_polynomial(*expr.free_symbols):
        return expr.func(*(_substitute(a, size, symbol) for a in expr.args))
    times, rest = sympy.div(expr, size, *sorted(size.free_symbols, key=str))
    if times == 0 or any(not n.is_Integer for n in (times + rest).atoms(sympy.Rational)):
        return expr
    return _substitute(times, size, symbol) * symbol + rest


def _format_expression(expr: sympy.Expr) -> str:
    return PythonPrinter().doprint(expr)


def _format_of(n: fx.Node) -> str | None:
    """Return the Python expression of a node that computes a number from numbers, with `{}` for operands. None if
    unknown."""
    count = sum(a is not None for a in n.args)
    if n.target in INFIX and count == 2:
        return f"({{}} {INFIX[n.target]} {{}})"
    name = get_op_name(n).strip("_")
    if name in _PREFIX:
        return f"({_PREFIX[name]}{{}})"
    name = _CALLED.get(name, name)
    return f"{name}({', '.join(['{}'] * count)})" if name in SYMBOLIC_FUNCTIONS else None
