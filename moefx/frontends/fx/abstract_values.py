"""Compute abstract values of nodes, if the graph does not carry them."""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import sympy
import torch
import torch.nn.functional as F
from torch import fx, nn
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensor, FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

from ...capture.tracing.op_sets import SELECTION_OPS
from ...errors import InvalidInput, Refused, summarize_error
from ...ir.memory_order import invert_permutation
from ...ir.node_values import get_op_name
from ...util.fake_tensor_log import without_fake_tensor_errors
from .node_queries import MODE_SWITCHES, get_size_hint, is_float_tensor

_SIZES = {"size", "numel", "sym_size", "sym_numel"}
_PRIMES = (101, 103, 107, 109, 113, 127, 131, 137)
_EXPORT_ADVICE = "make it with torch.export.export(..., dynamic_shapes=...), which declares the sizes that vary"


def get_traced_value(n: fx.Node) -> Any:
    """Return the value that Dynamo, `torch.export` or `make_fx` recorded for a node, or None."""
    return n.meta.get("example_value", n.meta.get("val"))


def has_traced_values(graph: fx.Graph) -> bool:
    """Return whether each node that is used has a recorded value."""
    return all(
        get_traced_value(n) is not None
        or n.op in ("placeholder", "get_attr", "output")
        or not n.users
        or (n.op == "call_function" and (n.target is operator.setitem or n.target in MODE_SWITCHES))
        for n in graph.nodes
    )


def has_symbolic_sizes(graph: fx.Graph) -> bool:
    """Return whether the graph reads sizes at run time, as graphs of symbolic tracing do, and so holds for all
    sizes."""
    return any(
        (n.target is getattr and n.args[1] == "shape") or (n.op.startswith("call") and get_op_name(n) in _SIZES)
        for n in graph.nodes
    )


def propagate_values(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> dict[fx.Node, Any]:
    """Run a graph on fake tensors of the given inputs. Returns the value of each node.

    Raises:
        InvalidInput: the graph does not run on them. Refused: a value depends on numbers in tensors.
    """
    fakes = [t for t in example_inputs if isinstance(t, FakeTensor)]
    mode = fakes[0].fake_mode if fakes else FakeTensorMode(allow_non_fake_inputs=True)
    inputs = [
        mode.from_tensor(t) if isinstance(t, torch.Tensor) and not isinstance(t, FakeTensor) else t
        for t in example_inputs
    ]
    try:
        return _interpret(gm, mode, inputs)
    except DataDependentOutputException as error:
        raise Refused(f"the graph depends on a value that it reads from a tensor ({error})") from error
    except Exception as error:
        raise InvalidInput(f"the graph does not run on these example_inputs: {summarize_error(error)}") from error


def propagate_symbolic_sizes(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> dict[fx.Node, Any]:
    """Run a graph on inputs of symbolic sizes; weights keep theirs. Returns the value of each node.

    Raises:
        InvalidInput: the graph does not run on the examples.
        Refused: it runs on the examples but not on symbolic sizes, or torch fixes a size that could vary.
    """
    placeholders = [n for n in gm.graph.nodes if n.op == "placeholder"]
    examples = dict(zip(placeholders, example_inputs, strict=True))
    weights = {n for n, t in examples.items() if isinstance(t, nn.Parameter)}
    if not weights and not any(map(is_float_tensor, gm.parameters())):
        weights = guess_weights(gm.graph, examples)
    sizes = {n: list(t.shape) for n, t in examples.items() if isinstance(t, torch.Tensor) and n not in weights}
    for axis in range(max(map(len, sizes.values()), default=0)):  # torch fixes sizes of 1
        longer = {n: [3 if (i, s) == (axis, 1) else s for i, s in enumerate(shape)] for n, shape in sizes.items()}
        if longer != sizes and _runs_at(gm, examples, longer):
            sizes = longer
    mode = FakeTensorMode(shape_env=ShapeEnv(duck_shape=False), allow_non_fake_inputs=True)
    inputs = dict(examples)
    for n, t in examples.items():
        if isinstance(t, torch.Tensor):
            t = _resize(t, sizes[n]) if n in sizes else t
            kind = DimDynamic.DYNAMIC if n in sizes else DimDynamic.STATIC
            context = StatelessSymbolicContext(dynamic_sizes=[kind] * t.dim())
            inputs[n] = mode.from_tensor(t, symbolic_context=context)
    try:
        values = _interpret(gm, mode, list(inputs.values()))
    except Exception as error:
        propagate_values(gm, example_inputs)
        raise Refused(
            f"the graph reads sizes, and does not run on symbolic ones ({summarize_error(error)})",
            remedy=_EXPORT_ADVICE,
        ) from error
    for n, value in values.items():
        if isinstance(value, torch.SymBool):
            raise Refused(f"the graph compares sizes: {n.name}, {value}", remedy=_EXPORT_ADVICE)
    _check_fixed_sizes(gm, examples, {n: inputs[n].shape for n in sizes})
    return values


def _check_fixed_sizes(gm: fx.GraphModule, examples: dict[fx.Node, Any], shapes: dict[fx.Node, torch.Size]) -> None:
    """Check that the sizes that torch has fixed, such as the width of rows that meet weights, cannot vary.

    Raises:
        Refused: the graph also runs with another size.
    """
    axes_by_size: dict[int, list[tuple[fx.Node, int]]] = defaultdict(list)
    symbols: dict[Any, int] = {}
    other: dict[fx.Node, list[int]] = {}
    for n, shape in shapes.items():
        other[n] = []
        for i, size in enumerate(shape):
            expr = sympy.sympify(size.node.expr if isinstance(size, torch.SymInt) else size)
            for symbol in sorted(expr.free_symbols, key=str):
                symbols.setdefault(symbol, _PRIMES[len(symbols) % len(_PRIMES)])  # divisible by no other size
            other[n].append(int(expr.subs(symbols)))
            if expr.is_Integer:
                axes_by_size[int(expr)].append((n, i))
    for number, axes in axes_by_size.items():
        for changed_axes in [axes, *([axis] for axis in axes if len(axes) > 1)]:
            changed_shapes = {
                n: [s + 1 if (n, i) in changed_axes else s for i, s in enumerate(shape)] for n, shape in other.items()
            }
            if _runs_at(gm, examples, changed_shapes):
                n, i = changed_axes[0]
                raise Refused(
                    f"the graph reads sizes, and fixes axis {i} of {n.name} to {number}, although it runs with another "
                    "size",
                    remedy=_EXPORT_ADVICE,
                )


def _runs_at(gm: fx.GraphModule, examples: dict[fx.Node, Any], sizes: dict[fx.Node, list[int]]) -> bool:
    """Return whether the graph runs on examples of these sizes."""
    try:
        propagate_values(gm, [_resize(t, sizes[n]) if n in sizes else t for n, t in examples.items()])
    except (InvalidInput, Refused):
        return False
    return True


def _resize(t: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
    """Return an empty tensor of other sizes, whose axes have the same order in memory."""
    order = sorted(range(t.dim()), key=lambda i: (get_size_hint(t.stride(i)), get_size_hint(t.shape[i])), reverse=True)
    if t.shape == torch.Size(sizes):
        return t
    return torch.empty([sizes[i] for i in order], dtype=t.dtype, device=t.device).permute(invert_permutation(order))


def guess_weights(graph: fx.Graph, examples: Mapping[fx.Node, Any]) -> set[fx.Node]:
    """Guess the weights among inputs that are not marked: all float inputs except the operands that selections derive
    from.
    """
    activations = set()
    for n in graph.nodes:
        if get_op_name(n) in SELECTION_OPS and n.op.startswith("call"):
            current: Any = n
            while isinstance(current, fx.Node) and current.op != "placeholder":
                current = _find_first_operand(current)
            activations.add(current)
    return {n for n, t in examples.items() if is_float_tensor(t) and n not in activations} if activations else set()


def _find_first_operand(n: fx.Node) -> Any:
    """Return the main operand of an op, such as `x` of `addmm(bias, x, w)`."""
    name = get_op_name(n)
    at = 1 if name in ("addmm", "addmv", "einsum", "embedding") and len(n.args) > 1 else 0
    operand: Any = n.args[at] if n.args else next(iter(n.all_input_nodes), None)
    while isinstance(operand, (tuple, list)):
        operand = operand[0] if operand else None
    return operand


class _ValueRecorder(fx.Interpreter):
    """Runs a graph on fake tensors and records the value of each node."""

    def __init__(self, gm: fx.GraphModule, mode: FakeTensorMode):
        super().__init__(gm)
        self.mode, self.values = mode, {}

    def run_node(self, n: fx.Node) -> Any:
        out = super().run_node(n)
        if isinstance(out, torch.Tensor) and not isinstance(out, FakeTensor):
            out = self.mode.from_tensor(out, static_shapes=True)
        self.values[n] = self.values[n.args[0]] if n.target is operator.setitem else out
        return out

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if target is F.one_hot:  # it would fix symbols
            t, classes = args[0], args[1] if len(args) > 1 else kwargs.get("num_classes", -1)
            if isinstance(classes, torch.SymInt):
                return t.new_empty((*t.shape, classes))
        return super().call_function(target, args, kwargs)


def _interpret(gm: fx.GraphModule, mode: FakeTensorMode, inputs: list[Any]) -> dict[fx.Node, Any]:
    """Run a graph under a fake mode. Returns the value of each node."""
    recorder = _ValueRecorder(gm, mode)
    tensors: dict[str, torch.Tensor] = {
        name: mode.from_tensor(t, static_shapes=True) for name, t in (*gm.named_parameters(), *gm.named_buffers())
    }
    with (
        mode,
        without_fake_tensor_errors(),
        torch.nn.utils.stateless._reparametrize_module(gm, tensors, tie_weights=True),
    ):
        recorder.run(*inputs)
    return recorder.values
