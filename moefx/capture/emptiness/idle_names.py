"""Store abstract values under names, and look them up: see `idle_flow`."""

from __future__ import annotations

import ast
import builtins
import types
from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from .idle_values import DecidedBy, Env, Kind, Type, Value, find_type


class Names:
    """The names of one function and their values.

    Args:
        events: the values of emptiness tests.
        names: objects that the local names had while the function ran.
        outer_names: the globals of its module.
        call: analyses another function, given the function, the values of its arguments, what decides that it runs,
            and the names here, which a nested function sees.

    Attributes:
        escapes: expressions that decide by an outcome more than to skip an expert. An ordered set.
        tested: what decides that the current statement runs.
        exits: the names at each `continue`, `break` and `raise`.
        returned: whether a `return` was under a test.
        outer: names declared global or nonlocal.
        shared: names whose container has other names.
    """

    def __init__(
        self,
        events: Mapping[ast.AST, Value],
        names: Mapping[str, list[Any]],
        outer_names: Mapping[str, Any],
        call: Callable[[Any, list[Any], DecidedBy, Env], Any],
    ):
        self.events, self.names, self.outer_names, self.call = events, names, outer_names, call
        self.escapes: dict[ast.AST, None] = {}
        self.returns: list[tuple[Value, DecidedBy]] = []
        self.tested = DecidedBy.NOTHING
        self.exits: list[tuple[str, Env, DecidedBy]] = []
        self.raising: list[Env] | None = None  # the names before each statement of a `try`, which may raise
        self.returned = False
        self.outer: set[str] = set()
        self.function_name, self.owner_name = "", ""
        self.shared: set[str] = set()

    def value(self, node: ast.AST | None, env: Env) -> Value:
        """Evaluate an expression."""
        raise NotImplementedError

    def report_escape(self, node: ast.AST) -> None:
        """Note that an expression decides by an outcome more than to skip an expert."""
        self.escapes[node] = None

    def type_seen(self, name: str) -> Type:
        """Return the common type of the objects that a name had. Symbolic and routed numbers count as tensors."""
        objects = self.names.get(name) or [self.outer_names.get(name)]
        types = {find_type(v) for v in objects} - {Type.NONE}
        if types == {Type.TENSOR, Type.CONSTANT}:
            return Type.TENSOR
        return types.pop() if len(types) == 1 else Type.UNKNOWN

    def seen(self, name: str) -> Value:
        return Value(type=self.type_seen(name))

    def object_of(self, node: ast.AST) -> Any:
        """Return the object of a name or an attribute, if a capture recorded it."""
        if isinstance(node, ast.Name):
            held = self.names.get(node.id, ())
            return held[-1] if held else self.outer_names.get(node.id, getattr(builtins, node.id, None))
        if isinstance(node, ast.Attribute) and name_of(getattr(node.value, "func", node)) == "super":
            return self._inherited(node.attr)
        if isinstance(node, ast.Attribute) and (owner := self.object_of(node.value)) is not None:
            if isinstance(owner, nn.Module):
                instance_attributes = {**vars(owner), **owner._modules, **owner._parameters, **owner._buffers}
                attribute = getattr(type(owner), node.attr, None)
                attribute = (
                    types.MethodType(attribute, owner) if isinstance(attribute, types.FunctionType) else attribute
                )
                return instance_attributes.get(node.attr, attribute)
            if isinstance(owner, (type, types.ModuleType)):
                return getattr(owner, node.attr, None)
        if isinstance(node, ast.Subscript):  # take any item for all
            held = self.object_of(node.value)
            if isinstance(held, (list, tuple, nn.ModuleList, nn.Sequential)):
                return next(iter(held), None)
            if isinstance(held, (dict, nn.ModuleDict)):
                return next(iter(held.values()), None)
        return None

    def _inherited(self, name: str) -> Any:
        """Return the method that `super()` finds: the second of its name, if the current method overrides it."""
        owner = self.object_of(ast.Name(self.owner_name))
        methods = [vars(cls)[name] for cls in type(owner).__mro__ if name in vars(cls)]
        methods = [types.MethodType(f, owner) for f in methods if isinstance(f, types.FunctionType)]
        at = 1 if name == self.function_name else 0
        return methods[at] if len(methods) > at else None

    def store(self, target: ast.AST, value: Value, env: Env, source: ast.AST) -> None:
        self.share(source, target, env)
        if isinstance(target, ast.Name):
            if target.id in self.outer and (value.kind or (self.tested and value.type is not Type.TENSOR)):
                self.report_escape(target)
            type_ = self.type_seen(target.id) if value.type is Type.UNKNOWN and not value.kind else value.type
            env[target.id] = value._replace(type=type_, stamp=frozenset([id(target)]))
        elif isinstance(target, ast.Starred):
            self.store(target.value, value, env, source)
        elif isinstance(target, (ast.Tuple, ast.List)):
            parts = value.parts if len(value.parts) == len(target.elts) else None
            for i, one in enumerate(target.elts):
                # a target gets no item if a container of variable length is too short
                kind = Kind.COMPUTED if value.kind is Kind.CONTAINER else value.kind.item or value.kind
                type_ = Type.TENSOR if value.type is Type.TENSOR else Type.UNKNOWN
                self.store(one, parts[i] if parts else Value(kind, type_), env, source)
        elif isinstance(target, ast.Attribute):
            is_kept = value.type is Type.TENSOR and isinstance(self.object_of(target.value), nn.Module)
            if value.kind not in (Kind.INDEPENDENT, Kind.OPTIONAL_TENSOR) or (self.tested and not is_kept):
                self.report_escape(target)
        elif isinstance(target, ast.Subscript):
            index, base = self.value(target.slice, env), self.value(target.value, env)
            is_container = base.kind.is_container or base.type is Type.LIST
            if target in self.events:  # at a routed number
                self.mark(target.value, env, value, True)
            elif is_container and (self.tested or value.kind or index.kind):
                self.mark(target.value, env, value)
            elif (
                value.kind.is_number
                or value.kind is Kind.OUTCOME_LIST
                or index.kind.is_number
                or (self.tested and base.type is not Type.TENSOR)
            ):
                self.report_escape(target)

    def share(self, source: ast.AST, target: ast.AST, env: Env) -> None:
        """Note containers that get another name, directly or by a method (`note = seen.add`)."""
        owner = source.value if isinstance(source, ast.Attribute) else source
        names = [n for n in (source, owner) if isinstance(n, (ast.Name, ast.Attribute))]
        if any(self.value(n, env).type is Type.LIST for n in names):
            self.shared |= {root_name(source), *([target.id] if isinstance(target, ast.Name) else [])}

    def mark(self, container: ast.AST, env: Env, item: Value, is_decided: bool = False) -> None:
        """Note that a container was filled under an outcome.

        Args:
            is_decided: whether the fill itself depends on outcomes, not only its item.
        """
        has_outcome = item.kind.is_number or item.kind is Kind.LOAD
        kind = Kind.OUTCOME_LIST if has_outcome and not self.tested and not is_decided else Kind.CONTAINER
        if isinstance(container, ast.Name) and container.id in self.shared:
            self.report_escape(container)  # it may be read under another name
            return
        while isinstance(container, (ast.Subscript, ast.Call, ast.Attribute)):
            if isinstance(container, ast.Subscript):
                kind = Kind.CONTAINER_LIST
            elif isinstance(container, ast.Attribute):  # an attribute may be read elsewhere
                self.report_escape(container)
                return
            container = container.func.value if isinstance(container, ast.Call) and isinstance(  # type: ignore
                container.func, ast.Attribute) else getattr(container, "value", ast.Constant(None))  # fmt: skip
        if isinstance(container, ast.Name):
            old = env.get(container.id, Value())
            is_constant = Type.CONSTANT in (item.type, old.type if old.kind else item.type)
            type_ = Type.CONSTANT if is_constant else item.type
            env[container.id] = Value(kind, type_, old.stamp | {id(container)})

    def bind(self, target: ast.AST, source: ast.AST, env: Env) -> bool:
        """Store an item of a loop's iterable in the target. Returns whether outcomes decide the number of items."""
        function_name = source.func.id if isinstance(source, ast.Call) and isinstance(source.func, ast.Name) else ""
        parts = target.elts if isinstance(target, (ast.Tuple, ast.List)) else []
        is_event = source in self.events
        if function_name == "enumerate" and len(parts) == 2 and source.args and not is_event:  # type: ignore[attr-defined]
            is_decided = self.bind(parts[1], source.args[0], env)  # type: ignore[attr-defined]
            self.store(parts[0], Value(Kind.COMPUTED if is_decided else Kind.INDEPENDENT, Type.CONSTANT), env, source)
            return is_decided
        if function_name == "zip" and len(parts) == len(source.args) and not is_event:  # type: ignore[attr-defined]
            return any([self.bind(p, a, env) for p, a in zip(parts, source.args, strict=True)])  # type: ignore
        value = self.value(source, env)
        if value.kind is Kind.COMPUTED:
            self.report_escape(source)
        if (
            name_of(getattr(source, "func", source)) == "items"
            and len(parts) == 2
            and value.kind is Kind.CONTAINER_LIST
        ):
            self.store(parts[0], Value(type=Type.CONSTANT), env, source)
            self.store(parts[1], Value(Kind.CONTAINER, value.type), env, source)
            return is_event
        is_known = value.kind or value.type is Type.TENSOR
        type_ = Type.CONSTANT if function_name == "range" else value.type if is_known else Type.UNKNOWN
        if isinstance(target, ast.Name) and type_ is Type.UNKNOWN:
            type_ = self.type_seen(target.id)
        self.store(target, Value(value.kind.item, type_), env, source)
        return value.kind is Kind.CONTAINER or is_event


def name_of(function: ast.AST) -> str:
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")


def root_name(node: ast.AST) -> str:
    while isinstance(node, ast.Attribute):
        node = node.value
    return getattr(node, "id", "")


def find_len_argument(node: ast.AST) -> ast.AST | None:
    """Return the argument of `len` in an expression; None if it is no call of `len`."""
    return node.args[0] if isinstance(node, ast.Call) and name_of(node.func) == "len" and node.args else None
