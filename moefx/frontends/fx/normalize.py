"""Normalise graphs of tracers for the search: inline modules of torch, replace reads of sizes by symbols, and express
sizes of computed values by sizes of inputs.
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Sequence
from typing import Any

import sympy
import torch
import torch.nn.functional as F
from torch import fx, nn
from torch.fx.node import has_side_effect, map_arg

from ...errors import AbsorbedModuleChanged, InvalidInput
from ...ir.node_values import get_op_name
from .abstract_values import get_traced_value, has_symbolic_sizes, has_traced_values, propagate_symbolic_sizes
from .node_effects import find_effects, is_plain_module
from .node_queries import ENTER_AUTOCAST, EXIT_AUTOCAST, find_attribute, is_float_tensor

_ORIGIN = "moefx_inlined"  # in a node's meta: its call, the module, and the number of nodes of the call
_ADDED_VALUE = "moefx_found"  # in a node's meta: its value was added
_SIZE = torch.ops.aten.sym_size.int
_MODE_BODY_ARGUMENT = {"wrap_with_set_grad_enabled": 1, "wrap_with_autocast": 4}  # op, and which argument is the graph


def normalize(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> fx.GraphModule:
    """Return a graph with the same parameters that the search understands, or `gm` itself if nothing changes. Call
    `restore_calls` on the result of the rewrite.

    Raises:
        InvalidInput: it does not run on the examples. Refused: it reads sizes, and does not run on symbolic ones.
    """
    return _derive_sizes_from_inputs(_add_symbolic_values(_inline_modules(_inline_mode_bodies(gm)), example_inputs))


def _inline_mode_bodies(gm: fx.GraphModule) -> fx.GraphModule:
    """Inline the graphs that `torch.export` makes for regions without gradients or under autocast. Results of a region
    without gradients are detached: a mode switch would restore the wrong mode if the graph itself runs without
    gradients.
    """
    if not any(_is_mode_body(gm, n) for n in gm.graph.nodes):
        return gm
    graph = fx.Graph()

    def copy_node(n: fx.Node, new_nodes: dict[fx.Node, Any], owner: nn.Module, prefix: str) -> Any:
        parts: Any = map_arg(n.args, new_nodes.__getitem__)
        if n.target is operator.getitem and isinstance(parts[0], tuple):
            return parts[0][parts[1]]
        if not _is_mode_body(owner, n):
            out = graph.node_copy(n, new_nodes.__getitem__)
            if n.op in ("get_attr", "call_module"):
                out.target = f"{prefix}{n.target}"
            return out
        at = _MODE_BODY_ARGUMENT[get_op_name(n)]
        name = str(n.args[at].target)  # type: ignore[union-attr]
        nodes = find_attribute(owner, name).graph.nodes
        inner = dict(zip((m for m in nodes if m.op == "placeholder"), parts[at + 1 :], strict=True))
        context = graph.call_function(ENTER_AUTOCAST, parts[:at]) if at > 1 else None
        for m in nodes:
            if m.op not in ("placeholder", "output"):
                inner[m] = copy_node(m, inner, find_attribute(owner, name), f"{prefix}{name}.")
        results: Any = map_arg(next(iter(reversed(nodes))).args[0], inner.__getitem__)
        if context is not None:
            graph.call_function(EXIT_AUTOCAST, (context,))
            return tuple(results)
        return tuple(detach(r) for r in results)

    def detach(n: Any) -> Any:
        if not isinstance(n, fx.Node) or not is_float_tensor(get_traced_value(n)):
            return n
        out = graph.call_function(torch.ops.aten.detach.default, (n,))
        out.meta.update(n.meta, val=get_traced_value(n).detach())
        return out

    new_nodes: dict[fx.Node, Any] = {}
    for n in gm.graph.nodes:
        new_nodes[n] = copy_node(n, new_nodes, gm, "")
    for n in reversed(graph.nodes):
        if n.op == "get_attr" and not n.users:
            graph.erase_node(n)
    return replace_graph(gm, gm, graph)


def _is_mode_body(owner: nn.Module, n: fx.Node) -> bool:
    """Return whether a node calls a graph only to set a mode, and the graph writes to nothing."""
    if n.op != "call_function" or get_op_name(n) not in _MODE_BODY_ARGUMENT:
        return False
    if n.args[0] is True:  # it turns gradients on
        return False
    at = n.args[_MODE_BODY_ARGUMENT[get_op_name(n)]]
    body = find_attribute(owner, str(at.target)) if isinstance(at, fx.Node) else None
    return isinstance(body, fx.GraphModule) and not any(find_effects(body, m).writes for m in body.graph.nodes)


def _inline_modules(gm: fx.GraphModule) -> fx.GraphModule:
    """Inline calls of torch's own modules."""
    bodies = {n: body for n in gm.graph.nodes if (body := _trace_module(gm, n)) is not None}
    if not bodies:
        return gm
    graph, new_nodes = fx.Graph(), {}
    for n in gm.graph.nodes:
        new_nodes[n] = (
            _inline_call(graph, n, bodies[n], new_nodes) if n in bodies else graph.node_copy(n, new_nodes.__getitem__)
        )
    return replace_graph(gm, gm, graph)


def _add_symbolic_values(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> fx.GraphModule:
    """Add values of symbolic sizes to a graph that holds for all sizes and has no values. Shapes become tuples of
    sizes."""
    if has_traced_values(gm.graph) or not has_symbolic_sizes(gm.graph):
        return gm
    values = propagate_symbolic_sizes(gm, example_inputs)
    graph = fx.Graph()
    new_nodes: dict[fx.Node, Any] = {}

    def add_value(n: fx.Node, value: Any) -> fx.Node:
        n.meta["val"], n.meta[_ADDED_VALUE] = value, True
        return n

    def shape(node: fx.Node) -> tuple[Any, ...]:
        return tuple(
            add_value(graph.call_function(_SIZE, (new_nodes[node], i)), size)
            for i, size in enumerate(values[node].shape)
        )

    for n in gm.graph.nodes:
        parts: Any = map_arg(n.args, new_nodes.__getitem__)
        in_parts = _is_size_tuple(values.get(n)) and all(map(_accepts_size_tuple, n.users))
        if in_parts and n.target in (getattr, "size"):
            new_nodes[n] = shape(n.args[0])
        elif n.target == "size" and len(parts) == 2 and type(parts[1]) is int:
            new_nodes[n] = shape(n.args[0])[parts[1]]
        elif n.target is operator.getitem and isinstance(parts[0], tuple):
            new_nodes[n] = parts[0][parts[1]]
        elif in_parts and n.target is operator.add:
            new_nodes[n] = (*parts[0], *parts[1])
        else:
            new_nodes[n] = graph.node_copy(n, new_nodes.__getitem__)
            if n.op != "output":
                add_value(new_nodes[n], values[n])
    for n in reversed(graph.nodes):
        if n.target is _SIZE and not n.users:
            graph.erase_node(n)
    return replace_graph(gm, gm, graph)


def _is_size_tuple(value: Any) -> bool:
    """Return whether a value is a non-empty tuple of sizes."""
    return isinstance(value, tuple) and bool(value) and all(isinstance(n, (int, torch.SymInt)) for n in value)


def _accepts_size_tuple(user: fx.Node) -> bool:
    """Return whether a tuple of numbers can replace a shape among a node's arguments."""
    if user.target is operator.getitem:
        return len(user.all_input_nodes) == 1  # the index is a number
    owner = user.args[0] if user.op == "call_method" else None  # a method of the shape, such as `numel`
    return not isinstance(owner, fx.Node) or owner.target not in (getattr, "size", operator.getitem, operator.add)


def _derive_sizes_from_inputs(gm: fx.GraphModule) -> fx.GraphModule:
    """Replace sizes of computed values, which symbolic tracing reads, by expressions over sizes of inputs."""
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
    sizes = {n: e for n, e in sizes.items() if e.free_symbols <= {*inputs} and _is_sum_or_product(e)}
    if not sizes:
        return gm
    graph = fx.Graph()
    new_nodes: dict[Any, Any] = {}  # by node and by expression

    def emit_size(expr: Any, template: fx.Node) -> Any:
        if expr.is_Integer:
            return int(expr)
        if expr not in new_nodes:
            if expr.is_Symbol:
                base, dim = inputs[expr]
                new_nodes[expr] = graph.call_function(_SIZE, (new_nodes[base], dim))
                value = base.meta["val"].shape[dim]
            else:
                fn = operator.mul if expr.is_Mul else operator.add
                first, *operands = expr.args
                parts = emit_size(first, template), emit_size(expr.func(*operands), template)
                new_nodes[expr] = graph.call_function(fn, parts)
                value = fn(*(p if isinstance(p, int) else p.meta["val"] for p in parts))
            new_nodes[expr].meta.update(template.meta, val=value)
        return new_nodes[expr]

    for n in gm.graph.nodes:
        new_nodes[n] = emit_size(sizes[n], n) if n in sizes else graph.node_copy(n, new_nodes.__getitem__)
    return replace_graph(gm, gm, graph)


def _is_sum_or_product(expr: Any) -> bool:
    """Return whether an expression consists of symbols, integers, sums and products."""
    return (
        expr.is_Symbol or expr.is_Integer or ((expr.is_Add or expr.is_Mul) and all(map(_is_sum_or_product, expr.args)))
    )


def restore_calls(rewritten: fx.GraphModule, gm: fx.GraphModule) -> fx.GraphModule:
    """Undo the normalisation of a rewritten graph: modules that no region contains are called again."""
    inputs = [n for n in rewritten.graph.nodes if n.op == "placeholder"]
    for n in inputs[::-1]:
        if _ADDED_VALUE in n.meta and isinstance(value := n.meta["val"], torch.Tensor):
            with rewritten.graph.inserting_after(inputs[-1]):
                rewritten.graph.call_function(expect_rank, (n, value.dim(), str(n.target)))
    for n in rewritten.graph.nodes:
        if n.meta.pop(_ADDED_VALUE, False):
            del n.meta["val"]
    calls = {n.name: n for n in gm.graph.nodes}
    groups: dict[Any, list[fx.Node]] = {}
    for n in rewritten.graph.nodes:
        if (original := n.meta.pop(_ORIGIN, None)) is not None:
            groups.setdefault(original, []).append(n)
    for (name, target, number), nodes in groups.items():
        members, last = set(nodes), nodes[-1]
        inputs_of_call = dict.fromkeys(a for n in nodes for a in n.all_input_nodes if a not in members)
        if len(nodes) < number or len(inputs_of_call) != 1 or any(set(n.users) - members for n in nodes[:-1]):
            continue
        rewritten.add_submodule(target, gm.get_submodule(target))
        with rewritten.graph.inserting_before(last):
            call = rewritten.graph.call_module(target, tuple(inputs_of_call))
        call.meta.update(calls[name].meta)
        last.replace_all_uses_with(call)
        for n in reversed(nodes):
            rewritten.graph.erase_node(n)
    called_modules, remaining_modules = (
        {str(n.target) for n in g.graph.nodes if n.op == "call_module"} for g in (gm, rewritten)
    )
    for target in sorted(called_modules - remaining_modules):
        with contextlib.suppress(AttributeError):  # it may have no parameters
            rewritten.add_submodule(target, AbsorbedModule(target, rewritten.get_submodule(target)))
    rewritten.recompile()
    return rewritten


@has_side_effect  # otherwise it is dead code
def expect_rank(x: torch.Tensor, rank: int, name: str) -> None:
    """Check the rank of an input: the graph was for all ranks, but its rewrite holds for one.

    Raises:
        InvalidInput: `x` has another rank.
    """
    if x.dim() != rank:
        raise InvalidInput(
            f"{name} is {list(x.shape)}; the graph was rewritten for examples of {rank} dimensions. "
            "Rewrite it again, with examples like this one"
        )


class AbsorbedModule(nn.Module):
    """Holds the parameters of a module whose call has become part of a region."""

    def __init__(self, name: str, holder: nn.Module):
        super().__init__()
        self.name = name
        self._parameters, self._buffers, self._modules = holder._parameters, holder._buffers, holder._modules

    def _refuse(self, *args: Any, **kwargs: Any) -> Any:
        raise AbsorbedModuleChanged(
            f"{self.name} is not called any more: its computation is part of a rewritten region. "
            "Add hooks before moefx.rewrite_graph: the region then stays unchanged"
        )

    forward = register_forward_hook = register_forward_pre_hook = _refuse
    register_full_backward_hook = register_full_backward_pre_hook = register_backward_hook = _refuse


def _trace_module(gm: fx.GraphModule, n: fx.Node) -> fx.Graph | None:
    """Return the graph of a call of torch's own modules with one argument, or None. The module must have no hooks, and
    the same code in training and evaluation.
    """
    if n.op != "call_module" or len(n.args) != 1 or n.kwargs or not isinstance(n.args[0], fx.Node):
        return None
    module = gm.get_submodule(str(n.target))
    if not is_plain_module(module) or module._modules or module._buffers:
        return None
    before, graphs = module.training, []
    try:
        for training in (True, False):
            module.training = training
            graphs.append(_FullTracer().trace(module))
    except Exception:  # the module depends on values
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
    """Remove dropouts with rate 0."""
    for n in graph.nodes:
        if n.target is F.dropout and n.kwargs.get("p") == 0.0:
            n.replace_all_uses_with(n.args[0])
            graph.erase_node(n)


class _FullTracer(fx.Tracer):
    """Traces into all modules."""

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return False


def _inline_call(graph: fx.Graph, call: fx.Node, body: fx.Graph, new_nodes: dict[fx.Node, fx.Node]) -> fx.Node:
    """Copy the graph of a module in place of its call. Returns the result's node."""
    inner: dict[fx.Node, fx.Node] = {}
    number = sum(n.op not in ("placeholder", "output") for n in body.nodes)
    for n in body.nodes:
        if n.op == "placeholder":
            inner[n] = new_nodes[call.args[0]]  # type: ignore[index]
        elif n.op == "output":
            return inner[n.args[0]]
        else:
            inner[n] = graph.node_copy(n, inner.__getitem__)
            if n.op == "get_attr":
                inner[n].target = f"{call.target}.{n.target}"
            # The stack of the call, without the module itself.
            stack = list(call.meta.get("nn_module_stack", {}).items())[:-1]
            inner[n].meta = {"nn_module_stack": dict(stack), _ORIGIN: (call.name, call.target, number)}
            inner[n].stack_trace = call.stack_trace
    raise AssertionError("a graph has an output")


def replace_graph(gm: fx.GraphModule, root: nn.Module, graph: fx.Graph) -> fx.GraphModule:
    """Return `gm` with another graph.

    Args:
        root: the module that holds the attributes of the graph.
    """
    graph.set_codegen(gm.graph._codegen)
    out = fx.GraphModule(root, graph, class_name=type(gm).__name__)
    out.meta.update(gm.meta)
    out.training = gm.training  # of the modules inside each has its own
    return out
