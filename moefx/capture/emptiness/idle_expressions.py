"""Evaluate the expressions of a function on abstract values: see `idle_flow`, which runs its statements."""

from __future__ import annotations

import ast
import functools
from typing import Any

from ..sizes.routed_numbers import is_emptiness_test
from .idle_calls import OF_ANY_ITEM, OPERATOR_NAMES, PLAIN_CALLS, Calls
from .idle_names import find_len_argument, name_of
from .idle_values import DecidedBy, Env, Kind, Type, Value, find_type


class Expressions(Calls):
    """The expressions of one function."""

    def test(self, node: ast.AST, env: Env) -> DecidedBy:
        """Return what decides a test. A test of a value computed from outcomes escapes."""
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            return max(self.test(node.operand, env), self.find_own_test(node))
        if isinstance(node, ast.BoolOp):
            return max([self.test(v, env) for v in node.values] + [self.find_own_test(node)])
        container = find_len_argument(node)
        if container is not None and node not in self.events and self.value(container, env).kind is Kind.CONTAINER:
            return DecidedBy.OUTCOMES  # the truth of a length is that of its container
        value = self.value(node, env)
        if value.kind is Kind.COMPUTED:
            self.report_escape(node)
        if value.kind in (Kind.OUTCOME, Kind.COMPUTED, Kind.CONTAINER, Kind.OPTIONAL_TENSOR):
            return DecidedBy.OUTCOMES
        return max(DecidedBy.LOAD if value.kind is Kind.LOAD else DecidedBy.NOTHING, self.find_own_test(node))

    def find_own_test(self, node: ast.AST) -> DecidedBy:
        """Return what decides an expression that is an emptiness test itself."""
        event = self.events.get(node)
        if event is None:
            return DecidedBy.NOTHING
        return DecidedBy.LOAD if event.kind is Kind.LOAD else DecidedBy.OUTCOMES

    def value(self, node: ast.AST | None, env: Env) -> Value:
        if node is None:
            return Value(type=Type.NONE)
        method = getattr(self, f"_{type(node).__name__.lower()}_", self._others)
        value = method(node, env)
        event = self.events.get(node)
        if event is None or event.kind is Kind.TRUTH:
            return value
        if event.kind is Kind.ROUTED_KEY:
            is_list = isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Slice)
            return Value(Kind.CONTAINER) if is_list else value
        if isinstance(node, ast.Call) and event.kind is Kind.OUTCOME:
            return self.evaluate_call(node, event)
        if event.kind is Kind.CONTAINER and event.type is Type.UNKNOWN and value.type is Type.TENSOR:
            return event._replace(type=Type.TENSOR)  # the items of a tensor are tensors
        return event

    def evaluate_call(self, node: ast.Call, event: Value) -> Value:
        """Evaluate a call that is an emptiness test itself, such as `any(masks)`."""
        name = name_of(node.func)
        if name in ("min", "max", "sorted", "sort", "topk"):  # their results are routed numbers or tensors
            return Value()
        is_made = name in PLAIN_CALLS or name in ("index", "count", "remove", "list")
        return Value(Kind.COMPUTED, Type.CONSTANT) if is_made and name != "bool" else event

    def _constant_(self, node: ast.Constant, env: Env) -> Value:
        return Value(type=Type.NONE if node.value is None else Type.CONSTANT)

    def _name_(self, node: ast.Name, env: Env) -> Value:
        return env[node.id] if node.id in env else self.seen(node.id)

    def _attribute_(self, node: ast.Attribute, env: Env) -> Value:
        value = self.value(node.value, env)
        if value.kind is Kind.COMPUTED and node.attr in OF_ANY_ITEM:
            return Value()
        if value.kind.is_number:
            return value
        seen_object = self.object_of(node)
        if seen_object is None and value.type is Type.TENSOR and node.attr not in ("dtype", "device"):
            return Value(type=Type.TENSOR)
        return Value(type=find_type(seen_object) if seen_object is not None else Type.UNKNOWN)

    def _tuple_(self, node: ast.Tuple, env: Env) -> Value:
        parts = tuple(self.value(e.value if isinstance(e, ast.Starred) else e, env) for e in node.elts)
        self.shared |= {
            e.id for e, part in zip(node.elts, parts, strict=True) if isinstance(e, ast.Name) and part.type is Type.LIST
        }
        kinds = {p.kind for p in parts}
        if Kind.COMPUTED in kinds:
            kind = Kind.COMPUTED
        elif kinds & {Kind.OUTCOME, Kind.OUTCOME_LIST}:
            kind = Kind.OUTCOME_LIST
        elif kinds & {Kind.CONTAINER, Kind.CONTAINER_LIST}:
            kind = Kind.CONTAINER_LIST
        else:
            kind = Kind.LOAD if Kind.LOAD in kinds else Kind.INDEPENDENT
        is_constant = parts and all(p.type in (Type.CONSTANT, Type.NONE) for p in parts)
        return Value(kind, Type.CONSTANT if is_constant or not parts else Type.UNKNOWN, frozenset(), parts)

    def _list_(self, node: ast.List, env: Env) -> Value:
        value = self._tuple_(node, env)  # type: ignore[arg-type]
        items = zip(node.elts, value.parts, strict=True)
        has_any_length = any(isinstance(e, ast.Starred) and p.kind is Kind.CONTAINER for e, p in items)
        return Value(Kind.CONTAINER if has_any_length else value.kind, Type.LIST)

    _set_ = _list_

    def _dict_(self, node: ast.Dict, env: Env) -> Value:
        kinds = {self.value(v, env).kind for v in (*node.values, *[k for k in node.keys if k is not None])}
        if Kind.COMPUTED in kinds:
            return Value(Kind.COMPUTED, Type.LIST)
        if kinds & {Kind.OUTCOME, Kind.LOAD}:
            return Value(Kind.OUTCOME_LIST, Type.LIST)
        return Value(Kind.CONTAINER_LIST if Kind.CONTAINER in kinds else Kind.INDEPENDENT, Type.LIST)

    def _namedexpr_(self, node: ast.NamedExpr, env: Env) -> Value:
        value = self.value(node.value, env)
        self.store(node.target, value, env, node.value)
        return value

    def _starred_(self, node: ast.Starred, env: Env) -> Value:
        return self.value(node.value, env)

    def _boolop_(self, node: ast.BoolOp, env: Env) -> Value:
        values = [self.value(v, env) for v in node.values]
        kinds = {v.kind for v in values}
        if Kind.COMPUTED in kinds:
            return Value(Kind.COMPUTED, Type.CONSTANT)
        own_test = max(map(self.find_own_test, node.values))
        if Kind.OUTCOME in kinds or own_test is DecidedBy.OUTCOMES:
            return Value(Kind.OUTCOME, Type.CONSTANT)
        if kinds == {Kind.LOAD} or own_test:
            return Value(Kind.LOAD, Type.CONSTANT)
        return functools.reduce(lambda a, b: a.join(b, DecidedBy.NOTHING), values)

    def _unaryop_(self, node: ast.UnaryOp, env: Env) -> Value:
        if isinstance(node.op, ast.Not):
            value = self.value(node.operand, env)
            own_test = self.find_own_test(node.operand)
            if value.kind is Kind.COMPUTED:
                return Value(Kind.COMPUTED, Type.CONSTANT)
            tests = (Kind.OUTCOME, Kind.CONTAINER, Kind.OPTIONAL_TENSOR)
            if value.kind in tests or own_test is DecidedBy.OUTCOMES:
                return Value(Kind.OUTCOME, Type.CONSTANT)
            return Value(Kind.LOAD if value.kind is Kind.LOAD or own_test else Kind.INDEPENDENT, Type.CONSTANT)
        value = self.value(node.operand, env)
        return value._replace(kind=Kind.COMPUTED) if value.kind not in (Kind.INDEPENDENT, Kind.LOAD) else value

    def _binop_(self, node: ast.BinOp, env: Env) -> Value:
        return self.operation(node, self.value(node.left, env), self.value(node.right, env))

    def operation(self, node: ast.AST, left: Value, right: Value) -> Value:
        kinds = {left.kind, right.kind} - {Kind.INDEPENDENT}
        if not kinds:
            is_plain = left.type is right.type is Type.CONSTANT
            types = (Type.LIST, Type.TENSOR)
            other = next((t for t in types if t in (left.type, right.type)), Type.UNKNOWN)
            return Value(type=Type.CONSTANT if is_plain else other)
        has_list = Type.LIST in (left.type, right.type)
        if kinds <= {Kind.CONTAINER, Kind.CONTAINER_LIST} or (Kind.CONTAINER in kinds and has_list):
            return Value(Kind.CONTAINER, left.type if left.kind else right.type)
        if kinds == {Kind.OPTIONAL_TENSOR}:
            return Value(type=Type.TENSOR)
        if kinds == {Kind.LOAD}:
            is_number = all(v.kind or v.type is Type.CONSTANT for v in (left, right))
            return Value(Kind.LOAD, Type.CONSTANT) if is_number else Value(type=Type.TENSOR)
        for one, other in ((left, right), (right, left)):
            is_plain = other.type in (Type.CONSTANT, Type.LIST, Type.NONE)
            if (one.kind.is_number or one.kind is Kind.OUTCOME_LIST) and not other.kind and not is_plain:
                self.report_escape(node)
                return Value(type=Type.TENSOR)
        return Value(Kind.COMPUTED, Type.CONSTANT)

    def _compare_(self, node: ast.Compare, env: Env) -> Value:
        left, *others = values = [self.value(v, env) for v in (node.left, *node.comparators)]
        kinds = {v.kind for v in values} - {Kind.INDEPENDENT}
        if kinds == {Kind.LOAD}:
            return Value(Kind.LOAD, Type.CONSTANT)
        op = type(node.ops[0]).__name__
        if not kinds:
            is_plain = all(v.type in (Type.CONSTANT, Type.NONE) for v in values) or op in ("Is", "IsNot", "In", "NotIn")
            is_tensor = any(v.type is Type.TENSOR for v in values)
            return Value(type=Type.CONSTANT if is_plain else Type.TENSOR if is_tensor else Type.UNKNOWN)
        if len(others) == 1 and Kind.OPTIONAL_TENSOR in kinds and op in ("Is", "IsNot"):
            return Value(Kind.OUTCOME, Type.CONSTANT)
        has_containers = others[0].kind in (Kind.CONTAINER, Kind.CONTAINER_LIST)
        if len(others) == 1 and op in ("In", "NotIn") and not left.kind and has_containers:
            return Value(Kind.OUTCOME, Type.CONSTANT)
        container, number = find_len_argument(node.left), node.comparators[0]
        is_emptiness = isinstance(number, ast.Constant) and is_emptiness_test(OPERATOR_NAMES.get(op, ""), number.value)
        is_length_test = is_emptiness and len(others) == 1 and container is not None
        if is_length_test and self.value(container, env).kind is Kind.CONTAINER:
            return Value(Kind.OUTCOME, Type.CONSTANT)
        if len(others) == 1 and {left.kind, others[0].kind} == {Kind.INDEPENDENT, Kind.OUTCOME}:
            return Value(Kind.OUTCOME, Type.CONSTANT)
        if any(v.kind.is_number for v in values) and any(v.type is Type.TENSOR for v in values):
            self.report_escape(node)
        return Value(Kind.COMPUTED, Type.CONSTANT)

    def _ifexp_(self, node: ast.IfExp, env: Env) -> Value:
        decided_by = self.test(node.test, env)
        one, other = self.value(node.body, env), self.value(node.orelse, env)
        return one._replace(stamp=frozenset([1])).join(other._replace(stamp=frozenset([2])), decided_by)

    def _joinedstr_(self, node: ast.JoinedStr, env: Env) -> Value:
        parts = [self.value(v.value, env) for v in node.values if isinstance(v, ast.FormattedValue)]
        depends = any(p.kind not in (Kind.INDEPENDENT, Kind.OPTIONAL_TENSOR) for p in parts)
        return Value(Kind.COMPUTED if depends else Kind.INDEPENDENT, Type.CONSTANT)

    def _lambda_(self, node: ast.Lambda, env: Env) -> Value:
        for name in ast.walk(node.body):  # the body is another function
            kind = env[name.id].kind if isinstance(name, ast.Name) and name.id in env else Kind.INDEPENDENT
            if kind.is_number or kind.is_container:
                self.report_escape(name)
        return Value()

    def _await_(self, node: Any, env: Env) -> Value:
        return self.value(node.value, env)

    def _yield_(self, node: ast.Yield, env: Env) -> Value:
        value = self.value(node.value, env)
        kind = Kind.CONTAINER if self.tested else Kind.CONTAINER_LIST if value.kind else Kind.INDEPENDENT
        self.returns.append((Value(kind, value.type), DecidedBy.NOTHING))
        return Value()

    def _slice_(self, node: ast.Slice, env: Env) -> Value:
        bounds = [self.value(v, env) for v in (node.lower, node.upper, node.step) if v is not None]
        kinds = {v.kind for v in bounds} - {Kind.INDEPENDENT}
        return Value(Kind.LOAD if kinds == {Kind.LOAD} else Kind.COMPUTED if kinds else Kind.INDEPENDENT, Type.CONSTANT)

    def _subscript_(self, node: ast.Subscript, env: Env) -> Value:
        base, index = self.value(node.value, env), self.value(node.slice, env)
        if base.kind.is_container:
            if isinstance(node.slice, ast.Slice):
                return base
            if base.kind is Kind.CONTAINER_LIST:
                return Value(Kind.CONTAINER, base.type)
            if isinstance(node.slice, (ast.Constant, ast.UnaryOp)):
                return Value(Kind.COMPUTED, Type.CONSTANT if base.type is Type.CONSTANT else Type.UNKNOWN)
            is_outcome = base.kind is Kind.OUTCOME_LIST or (base.type is Type.CONSTANT and not index.kind)
            return Value(Kind.OUTCOME if is_outcome else Kind.INDEPENDENT, base.type)
        if base.kind.is_number:
            return Value(Kind.COMPUTED, Type.CONSTANT)
        if base.kind is Kind.LOAD:
            return base
        if index.kind.is_number:
            return Value(Kind.COMPUTED)
        if index.kind is Kind.LOAD:
            if not isinstance(node.slice, ast.Slice):
                return Value(Kind.LOAD)
            return Value(Kind.CONTAINER if base.type is Type.LIST else Kind.INDEPENDENT)
        if len(base.parts) and isinstance(node.slice, ast.Constant) and type(node.slice.value) is int:
            return base.parts[node.slice.value] if node.slice.value < len(base.parts) else Value()
        if base.type is Type.TENSOR:
            return Value(type=Type.TENSOR)
        seen_object = self.object_of(node)
        return Value(type=find_type(seen_object) if seen_object is not None else Type.UNKNOWN)

    def _listcomp_(self, node: Any, env: Env) -> Value:
        inner = dict(env)
        has_routed_length = False
        for part in node.generators:
            has_routed_length = self.bind(part.target, part.iter, inner) or has_routed_length
            has_routed_length = any([self.test(condition, inner) for condition in part.ifs]) or has_routed_length
        before, self.tested = (
            self.tested,
            max(self.tested, DecidedBy.OUTCOMES if has_routed_length else DecidedBy.NOTHING),
        )
        item = self.value(node.value if isinstance(node, ast.DictComp) else node.elt, inner)
        self.tested = before
        if item.kind is Kind.COMPUTED and not has_routed_length:
            return Value(Kind.COMPUTED, Type.CONSTANT)
        if has_routed_length:
            return Value(Kind.CONTAINER, item.type)
        if item.kind in (Kind.OUTCOME, Kind.LOAD, Kind.OUTCOME_LIST):
            return Value(Kind.OUTCOME_LIST, item.type)
        if item.kind in (Kind.CONTAINER, Kind.CONTAINER_LIST):
            return Value(Kind.CONTAINER_LIST, item.type)
        return Value(type=Type.LIST)

    _setcomp_ = _generatorexp_ = _dictcomp_ = _listcomp_

    def _others(self, node: ast.AST, env: Env) -> Value:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.expr):
                self.value(child, env)
        return Value()
