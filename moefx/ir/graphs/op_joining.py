"""Find consecutive dialect ops in a graph, and replace each run of them by one call of a `JoinedOps`."""

from __future__ import annotations

import operator
import weakref
from collections.abc import Callable, Container, Sequence
from typing import Any

import torch
from torch.fx import Graph, Node
from torch.fx.node import map_arg

from ..op_providers import registry
from ..ops.op_definition import NAMESPACE, Op
from . import graph_codegen
from .graph_codegen import GeneratedSource, is_getitem, num_results
from .joined_ops import JoinedOps, Wiring

_READ_LOCAL = "to_local"  # a method that reads a parameter; it may run before the joined ops


def join_ops(graph: Graph, title: str) -> Graph:
    """Return a graph in which consecutive dialect ops are one node. Its target is a `JoinedOps`.

    A node holds the tensors that its ops save until its backward has run. So one node has at most one op that keeps
    activations.

    Args:
        title: see `graph_codegen.compile_source`.
    """
    joined_graph, values = Graph(), {}
    run: list[Node] = []
    parts: dict[Node, None] = {}  # the ops of the run and their results, in order

    def finish_run() -> None:
        if len(run) > 1 and any(user not in parts for node in parts for user in node.users):
            _insert_joined(joined_graph, run, parts, values, title)
        else:
            for node in parts:
                values[node] = _copy_node(joined_graph, node, values)
        run.clear()
        parts.clear()

    for node in graph.nodes:
        is_joined = is_getitem(node) and node.args[0] not in values and node.args[0] not in parts
        if node in values or is_joined:  # a result of ops that were joined, or one that nothing uses
            continue
        if _is_joinable(node):
            if _get_op(node).keeps_activations and any(_get_op(n).keeps_activations for n in run):
                finish_run()
            run.append(node)
            parts[node] = None
        elif is_getitem(node) and node.args[0] in parts:
            parts[node] = None
        else:
            if not _is_hoisted(node, parts):
                finish_run()
            values[node] = _copy_node(joined_graph, node, values)
    return joined_graph


def _copy_node(graph: Graph, node: Node, values: dict[Node, Node]) -> Node:
    copied = graph.node_copy(node, values.__getitem__)
    if node.op == "call_method" and node.target == _READ_LOCAL:
        from .local_part import read_local  # imports torch.distributed, which a block of one rank does not need

        copied.op, copied.target = "call_function", read_local
    copied.name = node.name
    return copied


def _is_joinable(node: Node) -> bool:
    target = node.target
    is_dialect = isinstance(target, torch._ops.OpOverload) and target._schema.name.startswith(f"{NAMESPACE}::")
    return is_dialect and "autocast" not in node.meta and node.op == "call_function"


def _is_hoisted(node: Node, parts: Container[Node]) -> bool:
    """Return whether a node may run ahead of the ops before it."""
    is_method = node.op == "call_method" and node.target == _READ_LOCAL
    is_read = is_method or node.op == "get_attr" or is_getitem(node)
    return is_read and not any(n in parts for n in node.all_input_nodes)


def _insert_joined(
    graph: Graph, calls: Sequence[Node], parts: Container[Node], values: dict[Node, Node], title: str
) -> None:
    """Insert the call of a run of ops, and enter its results into `values`."""
    inputs = list(dict.fromkeys(n for call in calls for n in call.all_input_nodes if n not in parts))
    results = [node for call in calls for node in _list_result_nodes(call)]
    outputs = [node for node in results if any(user not in parts for user in node.users)]
    target = _compile_joined(inputs, calls, outputs, title)
    joined_node = graph.call_function(target, tuple(values[n] for n in inputs))  # type: ignore[arg-type]
    if len(outputs) == 1:
        joined_node.name, joined_node.meta = outputs[0].name, outputs[0].meta
        values[outputs[0]] = joined_node
        return
    joined_node.meta["val"] = tuple(n.meta.get("val") for n in outputs)
    for index, node in enumerate(outputs):
        values[node] = graph.call_function(operator.getitem, (joined_node, index))
        values[node].name, values[node].meta = node.name, node.meta


_compiled: weakref.WeakValueDictionary[Callable[..., Any], JoinedOps] = weakref.WeakValueDictionary()


def _compile_joined(inputs: Sequence[Node], calls: Sequence[Node], outputs: Sequence[Node], title: str) -> JoinedOps:
    """Compile the function of joined ops. Equal ops over equal values share one `JoinedOps`."""
    graph = Graph()
    ops = graph.placeholder("ops")
    values = {node: graph.placeholder(node.name) for node in inputs}
    for index, call in enumerate(calls):
        args, kwargs = map_arg((call.args, call.kwargs), values.__getitem__)
        arguments: Any = (ops, _get_op(call), index, *args)
        run_node = values[call] = graph.call_method("run", arguments, kwargs)
        run_node.name = call.name
        count = num_results(call)
        if count is not None and not _get_op(call).without_backward:  # it has fewer results without a backward
            run_node.meta["val"] = (None,) * count
        for node, position in _list_result_nodes(call).items():
            if node is not call:
                values[node] = graph.call_function(operator.getitem, (run_node, position))
                values[node].name = node.name
    output = tuple(values[n] for n in outputs)
    graph.output(output)
    source = GeneratedSource(graph, output)
    function = graph_codegen.compile_source(source.text, source.scope, "forward", f"{title} joined ops")
    joined_ops = _compiled.get(function)
    if joined_ops is None:
        names = [_get_op(call).name for call in calls]
        joined_ops = _compiled[function] = JoinedOps(function, _wire(inputs, calls, outputs), names)
    return joined_ops


def _wire(inputs: Sequence[Node], calls: Sequence[Node], outputs: Sequence[Node]) -> Wiring:
    """Number the values of a run of ops."""
    number = {node: i for i, node in enumerate(inputs)}
    arguments, is_list, results, total = [], [], [], len(inputs)
    for call in calls:
        lists = tuple(isinstance(a, (list, tuple)) for a in call.args)
        items: Any = [a if is_one_list else (a,) for a, is_one_list in zip(call.args, lists, strict=True)]
        arguments.append(tuple(tuple(number[n] for n in item if isinstance(n, Node)) for item in items))
        is_list.append(lists)
        nodes = _list_result_nodes(call)
        number.update({node: total + index for node, index in nodes.items()})
        results.append(range(total, total + 1 + max(nodes.values())))
        total = results[-1].stop
    output_numbers = tuple(number[n] for n in outputs)
    return Wiring(tuple(arguments), tuple(is_list), tuple(results), output_numbers, len(inputs), total)


def _list_result_nodes(call: Node) -> dict[Node, int]:
    """Return the nodes of an op's results, with their positions."""
    if call.users and all(is_getitem(user) and user.args[0] is call for user in call.users):
        return {user: int(user.args[1]) for user in call.users}  # type: ignore[arg-type]
    return {call: 0}


def _get_op(node: Node) -> Op:
    return registry[node.target._schema.name.partition("::")[2]]  # type: ignore[union-attr]
