"""Graphs of tracers as the search takes them: with the functions that torch's own modules call in the place of their
calls, with symbols for the sizes that they ask for, and with sizes taken of the inputs."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import sympy
import torch
import torch.nn.functional as F
from torch import fx, nn
from torch.fx.node import map_arg

from .effects import is_plain_module
from .values import asks_for_sizes, is_said, symbolic

_FROM = "moefx_inlined"  # in the meta of a node: the call that it is of, its module, and of how many nodes
_FOUND = "moefx_found"  # that its value is not the graph's own
_SIZE = torch.ops.aten.sym_size.int


def prepared(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> fx.GraphModule:
    """A graph of the same parameters, to be `folded` afterwards; `gm` itself where there is nothing to do.

    Raises:
        InvalidInput: it does not run on the examples. Refused: it asks for sizes, and does not run on symbolic ones.
    """
    return _of_inputs(_with_symbols(_inlined(gm), example_inputs))


def _inlined(gm: fx.GraphModule) -> fx.GraphModule:
    bodies = {n: body for n in gm.graph.nodes if (body := _body(gm, n)) is not None}
    if not bodies:
        return gm
    graph, made = fx.Graph(), {}
    for n in gm.graph.nodes:
        made[n] = _inline(graph, n, bodies[n], made) if n in bodies else graph.node_copy(n, made.__getitem__)
    return with_graph(gm, gm, graph)


def _with_symbols(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> fx.GraphModule:
    """With values for any sizes, where the graph is for any and has none; shapes are in the parts that are sizes."""
    if is_said(gm.graph) or not asks_for_sizes(gm.graph):
        return gm
    values = symbolic(gm, example_inputs)
    graph = fx.Graph()
    made: dict[fx.Node, Any] = {}

    def put(n: fx.Node, value: Any) -> fx.Node:
        n.meta["val"], n.meta[_FOUND] = value, True
        return n

    def shape(of: fx.Node) -> tuple[Any, ...]:
        return tuple(put(graph.call_function(_SIZE, (made[of], i)), size) for i, size in enumerate(values[of].shape))

    for n in gm.graph.nodes:
        parts: Any = map_arg(n.args, made.__getitem__)
        in_parts = _is_shape(values.get(n)) and all(map(_takes_parts, n.users))
        if in_parts and n.target in (getattr, "size"):
            made[n] = shape(n.args[0])
        elif n.target == "size" and len(parts) == 2 and type(parts[1]) is int:
            made[n] = shape(n.args[0])[parts[1]]
        elif n.target is operator.getitem and isinstance(parts[0], tuple):
            made[n] = parts[0][parts[1]]
        elif in_parts and n.target is operator.add:
            made[n] = (*parts[0], *parts[1])
        else:
            made[n] = graph.node_copy(n, made.__getitem__)
            if n.op != "output":
                put(made[n], values[n])
    for n in reversed(graph.nodes):
        if n.target is _SIZE and not n.users:
            graph.erase_node(n)
    return with_graph(gm, gm, graph)


def _is_shape(value: Any) -> bool:
    return isinstance(value, tuple) and bool(value) and all(isinstance(n, (int, torch.SymInt)) for n in value)


def _takes_parts(user: fx.Node) -> bool:
    """Whether a tuple of numbers can stand for a shape in its arguments."""
    if user.target is operator.getitem:
        return isinstance(user.args[1], (int, slice)) and not isinstance(user.args[1], fx.Node)
    of = user.args[0] if user.op == "call_method" else None  # its own methods, as `numel`
    return not isinstance(of, fx.Node) or of.target not in (getattr, "size", operator.getitem, operator.add)


def _of_inputs(gm: fx.GraphModule) -> fx.GraphModule:
    """Of sizes of what is computed, as symbolic tracing takes them: made of those of the inputs, where they follow."""
    inputs: dict[Any, tuple[fx.Node, int]] = {}
    sizes: dict[fx.Node, Any] = {}
    for n in gm.graph.nodes:
        value = n.meta.get("val")
        if n.op == "placeholder" and isinstance(value, torch.Tensor):
            for dim, size in enumerate(value.shape):
                if isinstance(size, torch.SymInt) and size.node.expr.is_Symbol:
                    inputs.setdefault(size.node.expr, (n, dim))
        elif n.target is _SIZE and n.all_input_nodes[0].op != "placeholder":
            sizes[n] = sympy.sympify(value.node.expr if isinstance(value, torch.SymInt) else value)
    sizes = {n: e for n, e in sizes.items() if e.free_symbols <= {*inputs} and _is_simple(e)}
    if not sizes:
        return gm
    graph = fx.Graph()
    made: dict[Any, Any] = {}  # also by expression

    def measured(expr: Any, like: fx.Node) -> Any:
        if expr.is_Integer:
            return int(expr)
        if expr not in made:
            if expr.is_Symbol:
                of, dim = inputs[expr]
                made[expr], value = graph.call_function(_SIZE, (made[of], dim)), of.meta["val"].shape[dim]
            else:
                fn = operator.mul if expr.is_Mul else operator.add
                first, *rest = expr.args
                parts = measured(first, like), measured(expr.func(*rest), like)
                made[expr] = graph.call_function(fn, parts)
                value = fn(*(p if isinstance(p, int) else p.meta["val"] for p in parts))
            made[expr].meta.update(like.meta, val=value)
        return made[expr]

    for n in gm.graph.nodes:
        made[n] = measured(sizes[n], n) if n in sizes else graph.node_copy(n, made.__getitem__)
    return with_graph(gm, gm, graph)


def _is_simple(expr: Any) -> bool:
    return expr.is_Symbol or expr.is_Integer or ((expr.is_Add or expr.is_Mul) and all(map(_is_simple, expr.args)))


def folded(made: fx.GraphModule, gm: fx.GraphModule) -> fx.GraphModule:
    """What was made of a prepared graph; calls of modules of which no region has a part are calls again."""
    for n in made.graph.nodes:
        if n.meta.pop(_FOUND, False):
            del n.meta["val"]
    calls = {n.name: n for n in gm.graph.nodes}
    groups: dict[Any, list[fx.Node]] = {}
    for n in made.graph.nodes:
        if (of := n.meta.pop(_FROM, None)) is not None:
            groups.setdefault(of, []).append(n)
    for (name, target, number), nodes in groups.items():
        mine, last = set(nodes), nodes[-1]
        given = dict.fromkeys(a for n in nodes for a in n.all_input_nodes if a not in mine)
        if len(nodes) < number or len(given) != 1 or any(set(n.users) - mine for n in nodes[:-1]):
            continue
        made.add_submodule(target, gm.get_submodule(target))
        with made.graph.inserting_before(last):
            call = made.graph.call_module(target, tuple(given))
        call.meta.update(calls[name].meta)
        last.replace_all_uses_with(call)
        for n in reversed(nodes):
            made.graph.erase_node(n)
    made.recompile()
    return made


def _body(gm: fx.GraphModule, n: fx.Node) -> fx.Graph | None:
    """What a call of one of torch's modules does with its one argument, where that can be said: without hooks, and the
    same in training."""
    if n.op != "call_module" or len(n.args) != 1 or n.kwargs or not isinstance(n.args[0], fx.Node):
        return None
    module = gm.get_submodule(str(n.target))
    if not is_plain_module(module) or module._modules or module._buffers:
        return None
    before, graphs = module.training, []
    try:
        for training in (True, False):
            module.training = training
            graphs.append(_Through().trace(module))
    except Exception:  # a module that asks for values
        return None
    finally:
        module.training = before
    for graph in graphs:
        _drop_dropout(graph)
    if graphs[0].python_code("self").src != graphs[1].python_code("self").src:
        return None
    *nodes, output = graphs[0].nodes
    is_plain = sum(m.op == "placeholder" for m in nodes) == 1 and output.args == (nodes[-1],)
    return graphs[0] if is_plain else None


def _drop_dropout(graph: fx.Graph) -> None:
    """Where it drops nothing."""
    for n in graph.nodes:
        if n.target is F.dropout and n.kwargs.get("p") == 0.0:
            n.replace_all_uses_with(n.args[0])
            graph.erase_node(n)


class _Through(fx.Tracer):
    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return False


def _inline(graph: fx.Graph, call: fx.Node, body: fx.Graph, made: dict[fx.Node, fx.Node]) -> fx.Node:
    inner: dict[fx.Node, fx.Node] = {}
    number = sum(n.op not in ("placeholder", "output") for n in body.nodes)
    for n in body.nodes:
        if n.op == "placeholder":
            inner[n] = made[call.args[0]]  # type: ignore[index]
        elif n.op == "output":
            return inner[n.args[0]]
        else:
            inner[n] = graph.node_copy(n, inner.__getitem__)
            if n.op == "get_attr":
                inner[n].target = f"{call.target}.{n.target}"
            # Where the module was called, that is.
            stack = list(call.meta.get("nn_module_stack", {}).items())[:-1]
            inner[n].meta = {"nn_module_stack": dict(stack), _FROM: (call.name, call.target, number)}
            inner[n].stack_trace = call.stack_trace
    raise AssertionError("a graph has an output")


def with_graph(gm: fx.GraphModule, root: nn.Module, graph: fx.Graph) -> fx.GraphModule:
    """`gm` with another graph. Args: root: what it finds its attributes in."""
    graph.set_codegen(gm.graph._codegen)
    out = fx.GraphModule(root, graph, class_name=type(gm).__name__)
    out.meta.update(gm.meta)
    out.training = gm.training  # of the modules inside each has its own
    return out
