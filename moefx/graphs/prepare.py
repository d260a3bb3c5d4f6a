"""Graphs of tracers as the search takes them: with the functions that torch's own modules call in the place of their
calls, and with sizes taken of the inputs."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx, nn

from .effects import is_plain_module

_FROM = "moefx_inlined"  # in the meta of a node: the call that it is of, its module, and of how many nodes
_SIZE = torch.ops.aten.sym_size.int


def prepared(gm: fx.GraphModule) -> fx.GraphModule:
    """A graph of the same parameters, to be `folded` afterwards; `gm` itself where there is nothing to do."""
    bodies = {n: body for n in gm.graph.nodes if (body := _body(gm, n)) is not None}
    sizes = _sizes(gm.graph)
    if not bodies and not sizes:
        return gm
    graph = fx.Graph()
    made: dict[fx.Node, fx.Node] = {}
    measured: dict[tuple[fx.Node, int], fx.Node] = {}
    for n in gm.graph.nodes:
        if n in bodies:
            made[n] = _inline(graph, n, bodies[n], made)
        elif n in sizes:
            of, dim = sizes[n]
            if (of, dim) not in measured:
                measured[of, dim] = graph.call_function(_SIZE, (made[of], dim))
                measured[of, dim].meta.update(n.meta)
            made[n] = measured[of, dim]
        else:
            made[n] = graph.node_copy(n, made.__getitem__)
    return with_graph(gm, gm, graph)


def folded(made: fx.GraphModule, gm: fx.GraphModule) -> fx.GraphModule:
    """What was made of a prepared graph; calls of modules of which no region has a part are calls again."""
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
    if graphs[0].python_code("self").src != graphs[1].python_code("self").src:
        return None
    *nodes, result, output = graphs[0].nodes
    is_plain = sum(m.op == "placeholder" for m in nodes) == 1 and output.args == (result,)
    return graphs[0] if is_plain else None


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


def _sizes(graph: fx.Graph) -> dict[fx.Node, tuple[fx.Node, int]]:
    """Of sizes of what is computed, as symbolic tracing takes them: which input has the same, and where."""
    inputs: dict[Any, tuple[fx.Node, int]] = {}
    for n in graph.nodes:
        if n.op == "placeholder" and isinstance(t := n.meta.get("val"), torch.Tensor):
            for dim, size in enumerate(t.shape):
                if isinstance(size, torch.SymInt):
                    inputs.setdefault(size.node.expr, (n, dim))
    found = {}
    for n in graph.nodes:
        size = n.meta.get("val")
        is_size = n.op == "call_function" and n.target is _SIZE and isinstance(size, torch.SymInt)
        if is_size and n.all_input_nodes[0].op != "placeholder" and size.node.expr in inputs:
            found[n] = inputs[size.node.expr]
    return found


def with_graph(gm: fx.GraphModule, root: nn.Module, graph: fx.Graph) -> fx.GraphModule:
    """`gm` with another graph. Args: root: what it finds its attributes in."""
    graph.set_codegen(gm.graph._codegen)
    out = fx.GraphModule(root, graph, class_name=type(gm).__name__)
    out.meta.update(gm.meta)
    out.training = gm.training  # of the modules inside each has its own
    return out
