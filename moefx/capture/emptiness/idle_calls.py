"""Evaluate the calls of a function on abstract values: see `idle_expressions`.

The tables say by their names which calls keep nothing, fill a container or return plain numbers.
"""

from __future__ import annotations

import ast
import builtins
import sys
from typing import Any

import torch
from torch import nn

from .idle_names import Names, name_of, root_name
from .idle_values import Env, Kind, Type, Value

CONTAINERS = {
    "list", "tuple", "sorted", "set", "frozenset", "enumerate", "zip", "reversed", "iter", "dict", "deque", "map",
    "filter", "chain", "islice", "Counter", "defaultdict", "OrderedDict", "takewhile", "dropwhile", "accumulate",
    "pairwise", "product",
}  # fmt: skip
FILLS = {"append", "add", "insert", "appendleft", "extend", "update", "setdefault", "extendleft", "__setitem__"}
EMPTIES = {"pop", "popleft", "popitem", "remove", "discard", "clear"}
LOGS = {"debug", "info", "warning", "error", "log", "warn", "critical", "exception"}
OF_ANY_ITEM = {"dtype", "device", "shape", "size", "dim", "ndim", "new_zeros", "new_empty", "new_full", "new_ones"}
OPERATOR_NAMES = {"Eq": "eq", "NotEq": "ne", "Gt": "gt", "LtE": "le", "GtE": "ge", "Lt": "lt"}
READS = {"copy", "count", "get", "index", "items", "keys", "reverse", "sort", "values"}
PURE_MODULES = ("math", "operator", "_operator", "einops", "copy")
PLAIN_CALLS = {
    "len", "int", "float", "bool", "str", "abs", "round", "any", "all", "min", "max", "sum", "repr", "hash", "ord",
    "chr", "isinstance", "hasattr", "divmod", "pow", "next", "range", "format", "bin",
}  # fmt: skip
PURE = PLAIN_CALLS - {"next"} | {"type", "slice", "getattr", "super", "complex", "callable", "id"}
OF_NUMBERS = {"min", "max", "abs", "sum", "round", "divmod", "pow", "int", "len"}  # results may be symbolic


def belongs_to_torch(function: Any) -> bool:
    return (getattr(function, "__module__", None) or "").split(".")[0] in ("torch", "torchvision")


def is_terminal(value: Any) -> bool:
    return any(value is stream for stream in (sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__))


def is_pure(function: Any) -> bool:
    """Return whether a function keeps nothing. A constructor counts, as its object is dropped unless it is stored."""
    module = (getattr(function, "__module__", None) or "").split(".")[0]
    return isinstance(function, type) or module in PURE_MODULES


class Calls(Names):
    """The calls of one function."""

    def _call_(self, node: ast.Call, env: Env) -> Value:
        name = name_of(node.func)
        if self._is_log(node, name):
            return Value(type=Type.NONE)
        arguments = [*node.args, *[k.value for k in node.keywords]]
        if (name == "len" and len(arguments) == 1) or name in ("isinstance", "getattr", "hasattr"):
            value = self.value(arguments[0], env)
            depends = value.kind is Kind.CONTAINER or value.kind.is_number
            return Value(Kind.COMPUTED, Type.CONSTANT) if depends else Value()
        values = [self.value(a, env) for a in arguments]
        kinds = {v.kind for v in values} - {Kind.INDEPENDENT, Kind.OPTIONAL_TENSOR}
        is_builtin = isinstance(node.func, ast.Name) and name not in env and hasattr(builtins, name)
        if is_builtin or name in CONTAINERS:
            return self._builtin(node, name, values, kinds)
        if (
            isinstance(node.func, ast.Attribute)
            and (result := self._method(node, name, values, kinds, env)) is not None
        ):
            return result
        if self.value(node.func, env).kind.is_number:
            self.report_escape(node)
            return Value(type=Type.TENSOR)
        function = self.object_of(node.func)
        if not kinds & {Kind.COMPUTED, Kind.OUTCOME}:
            if self._gives_tensors(node, function, kinds, env):
                if Kind.OUTCOME_LIST in kinds:
                    self.report_escape(node)
                return Value(type=Type.TENSOR)
            if (result := self.call(function, values, self.tested, env)) is not None:
                return result
        if kinds or (self.tested and not is_pure(function)):
            self.report_escape(node)  # the function may keep its arguments
        return Value()

    def _is_log(self, node: ast.Call, name: str) -> bool:
        """Return whether a call writes to a log or to the terminal, which the block cannot read."""
        if name == "print":
            return all(is_terminal(self.object_of(k.value)) for k in node.keywords if k.arg == "file")
        if not isinstance(node.func, ast.Attribute):
            return False
        return name in LOGS or (name == "write" and is_terminal(self.object_of(node.func.value)))

    def _gives_tensors(self, node: ast.Call, function: Any, kinds: set[Kind], env: Env) -> bool:
        """Return whether a call is of torch, a submodule, or a tensor's method, which keep nothing in Python."""
        if isinstance(function, nn.Module):
            return not kinds
        if isinstance(function, type) and not issubclass(function, torch.Tensor):
            return False
        if root_name(node.func) in ("torch", "F") or belongs_to_torch(function):
            return True
        is_method = function is None and isinstance(node.func, ast.Attribute)
        if is_method and kinds and kinds <= {Kind.CONTAINER, Kind.CONTAINER_LIST, Kind.LOAD}:
            return True  # a tensor's method: `rows.split(counts)`, `out.index_add(0, ids, y)`
        return not kinds and self.value(node.func, env).type is Type.TENSOR

    def _builtin(self, node: ast.Call, name: str, values: list[Value], kinds: set[Kind]) -> Value:
        is_fresh = name == "next" and isinstance(node.args[0], ast.GeneratorExp)
        if self.tested and name not in PURE and name not in CONTAINERS and not is_fresh:
            self.report_escape(node)  # `next(iterator)`, `setattr(...)`
        if not kinds:
            if name in CONTAINERS:
                return Value(type=Type.LIST)
            may_be_symbolic = name in OF_NUMBERS and any(v.type is not Type.CONSTANT for v in values)
            return Value(type=Type.CONSTANT if name in PLAIN_CALLS and not may_be_symbolic else Type.UNKNOWN)
        if kinds == {Kind.LOAD} and name not in CONTAINERS and name != "range":
            return Value(Kind.LOAD, Type.CONSTANT)
        type_ = Type.CONSTANT if any(v.type is Type.CONSTANT for v in values if v.kind) else Type.UNKNOWN
        if name in ("takewhile", "dropwhile", "filter") or (name in CONTAINERS and Kind.CONTAINER in kinds):
            return Value(Kind.CONTAINER, type_)
        if name == "range":
            return Value(Kind.CONTAINER, Type.CONSTANT)
        if name in CONTAINERS and kinds <= {Kind.OUTCOME_LIST, Kind.CONTAINER_LIST}:
            return Value(Kind.OUTCOME_LIST if Kind.OUTCOME_LIST in kinds else Kind.CONTAINER_LIST, type_)
        if name == "bool" and kinds == {Kind.OUTCOME}:
            return Value(Kind.OUTCOME, Type.CONSTANT)
        if name == "sum" and kinds == {Kind.CONTAINER} and type_ is not Type.CONSTANT:
            return Value(type=Type.TENSOR)
        return Value(Kind.COMPUTED, Type.CONSTANT)

    def _method(self, node: ast.Call, name: str, values: list[Value], kinds: set[Kind], env: Env) -> Value | None:
        """Evaluate a method of a container; None if the owner is no container."""
        owner = node.func.value  # type: ignore[attr-defined]
        value = self.value(owner, env)
        is_container = value.kind.is_container or value.type is Type.LIST
        if is_container and name in FILLS:
            extends = name in ("extend", "update") and Kind.CONTAINER in kinds
            is_decided = owner in self.events or node in self.events or extends
            if self.tested or kinds or is_decided:
                self.mark(owner, env, values[-1] if values else Value(), is_decided)
            return Value(type=Type.NONE)
        if is_container and name in EMPTIES:
            if self.tested or kinds:
                self.mark(owner, env, Value(type=value.type))
            is_same_iteration = self.tested or not value.kind
            return Value(Kind.INDEPENDENT if is_same_iteration else Kind.COMPUTED)
        if value.kind.is_container:
            if name in ("keys", "values", "items", "copy", "__iter__"):
                return value
            return Value(Kind.OPTIONAL_TENSOR) if name == "get" else Value(Kind.COMPUTED, Type.CONSTANT)
        if value.type is Type.CONSTANT and not value.kind:  # a string's method
            return Value(Kind.COMPUTED if kinds - {Kind.OPTIONAL_TENSOR} else Kind.INDEPENDENT, Type.CONSTANT)
        if value.type is Type.LIST and not value.kind:
            if self.tested and name not in READS:
                self.report_escape(node)
            return None if kinds else Value()
        if value.kind is Kind.COMPUTED and name not in OF_ANY_ITEM:
            return Value(Kind.COMPUTED, value.type)
        return None
