"""Generate the Python function that runs an FX graph on the user's block.

The function is `forward(self, *placeholders)`, and `self` is the block. It reads parameters through the module tree at
each call, and calls submodules as modules, so that their hooks fire. It has no state: blocks of the same structure
share one function, and `torch.compile` of repeated layers compiles it once. Its source is in `linecache`, for
tracebacks and debuggers.
"""

from __future__ import annotations

import hashlib
import linecache
import math
import operator
import re
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx import Graph, Node
from torch.utils import _pytree as pytree

from ..argument_binding import Guard
from ..attribute_paths import attribute_expression, is_plain_name, quote, read_range, split_into_ranges

INFIX = {
    operator.add: "+", operator.sub: "-", operator.mul: "*", operator.truediv: "/", operator.floordiv: "//",
    operator.mod: "%", operator.pow: "**", operator.matmul: "@", operator.and_: "&", operator.or_: "|",
    operator.eq: "==", operator.ne: "!=", operator.lt: "<", operator.le: "<=", operator.gt: ">",
    operator.ge: ">=",
}  # fmt: skip


def list_results(node: Node) -> list[Node | None] | None:
    """Return the results of a node by index, None for unused ones. Return None if the node may be more than unpacked.

    It is only unpacked if the number of its results is known (from the op's schema or `meta["val"]`) and all its users
    are `getitem` with a constant index, each index once.
    """
    count = num_results(node)
    if count is None or not node.users:
        return None
    results: list[Node | None] = [None] * count
    for user in node.users:
        if not is_getitem(user) or user.args[0] is not node:
            return None
        index = user.args[1]
        if not isinstance(index, int) or not -count <= index < count or results[index] is not None:
            return None
        results[index] = user
    return results


def num_results(node: Node) -> int | None:
    """Return the number of results in a node's tuple or list; None for a single value or an unknown number."""
    if isinstance(node.target, torch._ops.OpOverload) and len(node.target._schema.returns) > 1:
        return len(node.target._schema.returns)
    value = node.meta.get("val")
    return len(value) if isinstance(value, (tuple, list)) and type(value) in (tuple, list) else None


def is_getitem(node: Node) -> bool:
    return node.op == "call_function" and node.target is operator.getitem


class GeneratedSource:
    """Python source of a graph (`text`), and the global names that it needs (`scope`).

    Args:
        graph: the graph.
        output: the value to return instead of the output node's.
        record: nodes whose values are returned after the output, as a second element.
        output_spec: the pytree to rebuild from the flat list `output` at run time, or None.
    """

    def __init__(
        self,
        graph: Graph,
        output: Any,
        record: Sequence[Node] = (),
        output_spec: pytree.TreeSpec | None = None,
    ):
        self.scope: dict[str, Any] = {}
        # Names that the generated text uses itself.
        self._used_names = {node.name for node in graph.nodes} | {
            "self", "getattr", "setattr", "slice", "float", "torch", "autocast",
        }  # fmt: skip
        self._recorded = frozenset(record)
        self._inline: dict[Node, str] = {}
        self._lines: list[str] = []
        placeholders = [node.name for node in graph.nodes if node.op == "placeholder"]
        last = _last_uses(graph, record)
        unpacked: set[Node] = set()
        for node in graph.nodes:
            if node.op == "placeholder":
                line = ""
            elif node.op == "output":
                line = self._output(output, record, output_spec)
            elif node in unpacked:
                continue
            else:
                line = self._statement(node, unpacked)
            dead = [n.name for n in last.get(node, ()) if n not in self._inline]
            if dead and node.op != "output":
                line = f"{line}; {' = '.join(dead)} = None".removeprefix("; ")
            if line:
                self._lines.append(f"    {line}")
        self.text = "\n".join([f"def forward({', '.join(['self', *placeholders])}):", *self._lines, ""])

    def _statement(self, node: Node, unpacked: set[Node]) -> str:
        line = self._plain_statement(node, unpacked)
        if line and "autocast" in node.meta and node.all_input_nodes:
            dtype, operand = node.meta["autocast"], self._value(node.all_input_nodes[0])
            self.scope["autocast"] = torch.autocast
            line = f"with autocast({operand}.device.type, {dtype}, {dtype is not None}): {line}"
            self.scope["torch"] = torch
        return line

    def _plain_statement(self, node: Node, unpacked: set[Node]) -> str:
        call = self._call(node)
        if node.op == "get_attr" and len(node.users) == 1 and not is_getitem(next(iter(node.users))):
            # Read at its use: a list of expert weights becomes one comprehension, and a parameter that a submodule's
            # hooks swap (FSDP) is current.
            self._inline[node] = call
            return ""
        results = list_results(node)
        if results is None:
            return f"{node.name} = {call}" if node.users else call
        unpacked.update(n for n in results if n is not None)
        names = [n.name if n and (n.users or n in self._recorded) else "_" for n in results]
        return f"{', '.join(names)}{',' * (len(names) == 1)} = {call}"

    def _call(self, node: Node) -> str:
        target = node.target
        if node.op == "get_attr":
            return attribute_expression("self", str(target))
        if node.op == "call_module":
            return f"{attribute_expression('self', str(target))}({self._arguments(node.args, node.kwargs)})"
        if node.op == "call_method":
            return f"{self._value(node.args[0])}.{target}({self._arguments(node.args[1:], node.kwargs)})"
        if target is operator.getitem:
            return f"{self._value(node.args[0])}[{self._value(node.args[1])}]"
        if target is setattr:  # the user's code stores a value, such as an auxiliary loss, on a module
            path, name, value = node.args
            owner = attribute_expression("self", str(path)) if path else "self"
            if not is_plain_name(str(name)):
                return f"setattr({owner}, {quote(str(name))}, {self._value(value)})"
            return f"{owner}.{name} = {self._value(value)}"
        if target in INFIX and len(node.args) == 2 and not node.kwargs:
            left, right = map(self._value, node.args)
            return f"({left}) {INFIX[target]} {right}" if left[0] == "-" else f"{left} {INFIX[target]} {right}"
        return f"{self._function(target)}({self._arguments(node.args, node.kwargs)})"

    def _output(self, output: Any, record: Sequence[Node], output_spec: pytree.TreeSpec | None) -> str:
        value = self._value(output)
        if output_spec is not None:
            unflatten = self._global("tree_unflatten", pytree.tree_unflatten)
            value = f"{unflatten}({value}, {self._global('output_spec', output_spec)})"
        return f"return {value}, ({''.join(f'{n.name}, ' for n in record)})" if record else f"return {value}"

    def _function(self, target: Any) -> str:
        if isinstance(target, torch._ops.OpOverload):
            namespace, _, name = target._schema.name.partition("::")
            package = self._global(namespace, getattr(torch.ops, namespace))
            return f"{package}.{name}.{target._overloadname}"
        name = getattr(target, "__name__", "function")
        for path, module in (("", torch), (".nn.functional", torch.nn.functional)):
            if getattr(module, name, None) is target:
                return f"{self._global('torch', torch)}{path}.{name}"
        return self._global(name, target)

    def _arguments(self, args: Sequence[Any], kwargs: dict[str, Any]) -> str:
        return ", ".join([self._value(a) for a in args] + [self._keyword(k, v) for k, v in kwargs.items()])

    def _keyword(self, name: str, value: Any) -> str:
        text = self._value(value)
        return f"{name}={text}" if is_plain_name(name) else f"**{{{quote(name)}: {text}}}"

    def _value(self, value: Any) -> str:
        if isinstance(value, Node):
            return self._inline.get(value, value.name)
        if isinstance(value, (list, tuple)):
            items = self._attribute_items(value) or [self._value(v) for v in value]
            if isinstance(value, list) and len(items) == 1 and items[0].startswith("*"):
                return items[0].removeprefix("*")
            if isinstance(value, list):
                return f"[{', '.join(items)}]"
            if hasattr(value, "_fields"):
                return f"{self._global(type(value).__name__, type(value))}({', '.join(items)})"
            return f"({', '.join(items)}{',' * (len(items) == 1)})"
        if isinstance(value, dict):
            return "{" + ", ".join(f"{k!r}: {self._value(v)}" for k, v in value.items()) + "}"
        if isinstance(value, slice):
            return f"slice({self._value(value.start)}, {self._value(value.stop)}, {self._value(value.step)})"
        if value is None or type(value) in (bool, int, str, bytes):
            return repr(value)
        if value is ...:
            return "..."
        if type(value) is float:
            return repr(value) if math.isfinite(value) else f'float("{value}")'
        if isinstance(value, (torch.dtype, torch.layout, torch.memory_format)):
            return f"{self._global('torch', torch)}.{str(value).removeprefix('torch.')}"
        if isinstance(value, torch.device):
            return f"{self._global('torch', torch)}.device({str(value)!r})"
        return self._global(getattr(value, "__name__", "constant"), value)

    def _attribute_items(self, values: Sequence[Any]) -> list[str] | None:
        """Return runs of parameters as comprehensions; None if the list holds anything but inlined parameters."""
        if not all(isinstance(v, Node) and v.op == "get_attr" and v in self._inline for v in values):
            return None
        runs = split_into_ranges([str(v.target) for v in values])
        return [
            attribute_expression("self", run)
            if isinstance(run, str)
            else f"*{run.expression('self', self._global('read_range', read_range))}"
            for run in runs
        ]

    def _global(self, alias: str, value: Any) -> str:
        alias = re.sub(r"\W", "_", alias)
        while alias in self._used_names or self.scope.setdefault(alias, value) is not value:
            alias += "_"
        return alias


_torch: Any = torch
# Functions in expressions over sizes. `math.sqrt` would specialize a symbolic size to its number; torch's functions
# equal those of `math` on plain numbers.
FUNCTIONS: dict[str, Callable[..., Any]] = {
    "ceil": math.ceil, "floor": math.floor, "trunc": math.trunc, "int": int, "round": round, "abs": abs,
    "min": min, "max": max, "log": math.log, "log2": _torch._sym_log2, "sqrt": torch.sym_sqrt,
}  # fmt: skip


def guard_source(placeholders: Sequence[str], guards: Sequence[Guard]) -> str:
    """Return the source of a function of block and placeholders that returns the index of the first failing guard, or
    -1."""
    lines = [f"    if not ({guard.condition}):\n        return {i}" for i, guard in enumerate(guards)]
    return "\n".join([f"def guard({', '.join(['self', *placeholders])}):", *lines, "    return -1", ""])


def compile_source(source: str, scope: dict[str, Any], name: str, title: str) -> Callable[..., Any]:
    """Execute `source` and return its function `name`. Equal source over the same objects returns the same function.

    Args:
        title: part of the file name in tracebacks, `<moefx layers.3.mlp 1f09ab>`.
    """
    key = (source, tuple((alias, id(value)) for alias, value in scope.items()))
    function = _functions.get(key)
    if function is None:
        digest = hashlib.sha256(source.encode()).hexdigest()[:8]
        filename = f"<moefx {title or 'model'} {digest}>"
        namespace = dict(scope)
        exec(compile(source, filename, "exec"), namespace)
        function = namespace.pop(name)
        # linecache.checkcache() drops files that are not on disk, unless mtime is None.
        linecache.cache[filename] = (len(source), None, source.splitlines(keepends=True), filename)
        _functions[key] = function
    return function


_functions: weakref.WeakValueDictionary[Any, Callable[..., Any]] = weakref.WeakValueDictionary()


def _last_uses(graph: Graph, record: Sequence[Node]) -> dict[Node, list[Node]]:
    """Map each node to the values whose last user it is, in the order of the graph."""
    seen: set[Node] = set(record)
    last: dict[Node, list[Node]] = {}
    anchor: dict[Node, Node] = {}  # unpacked results, with the node that returns them
    for node in graph.nodes:
        for result in list_results(node) or ():
            if result is not None:
                anchor[result] = node
    for node in reversed(graph.nodes):
        if node in anchor:
            continue
        for value in node.all_input_nodes:
            if value not in seen:
                seen.add(value)
                last.setdefault(node, []).append(value)
    return last
