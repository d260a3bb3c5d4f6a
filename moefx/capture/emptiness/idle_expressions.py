"""Evaluate the expressions of a function on abstract values: see `idle_flow`, which runs its statements."""

from __future__ import annotations

import ast
import builtins
import functools
from typing import Any

import torch
from torch import nn

from ..sizes.routed_numbers import is_emptiness_test
from .idle_calls import (
    CONTAINERS,
    EMPTIES,
    FILLS,
    LOGS,
    OF_ANY_ITEM,
    OF_NUMBERS,
    OPERATOR_NAMES,
    PLAIN_CALLS,
    PURE,
    READS,
    belongs_to_torch,
    is_pure,
    is_terminal,
)
from .idle_names import Names, find_len_argument, name_of, root_name
from .idle_values import (
    BOX,
    BOXES,
    BY_LOAD,
    BY_OUTCOME,
    CONSTANT,
    FREE,
    KEYS,
    LIST,
    LOAD,
    NONE,
    OPTION,
    PLAIN,
    TENSOR,
    TEST,
    TESTS,
    TRUTH,
    UNKNOWN,
    Env,
    Value,
    find_type,
)


class Expressions(Names):
    """The expressions of one function."""

    def test(self, node: ast.AST, env: Env) -> int:
        """Return whether an outcome decides a test. A test of a value computed from outcomes escapes."""
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            return max(self.test(node.operand, env), self.find_own_test(node))
        if isinstance(node, ast.BoolOp):
            return max([self.test(v, env) for v in node.values] + [self.find_own_test(node)])
        container = find_len_argument(node)
        if container is not None and node not in self.events and self.value(container, env).kind == BOX:
            return BY_OUTCOME  # the truth of a length is that of its container
        value = self.value(node, env)
        if value.kind == PLAIN:
            self.report_escape(node)
        if value.kind in (TEST, PLAIN, BOX, OPTION):
            return BY_OUTCOME
        return max(BY_LOAD if value.kind == LOAD else FREE, self.find_own_test(node))

    def find_own_test(self, node: ast.AST) -> int:
        """Return whether an expression itself is an emptiness test."""
        event = self.events.get(node)
        return FREE if event is None else BY_LOAD if event.kind == LOAD else BY_OUTCOME

    def value(self, node: ast.AST | None, env: Env) -> Value:
        if node is None:
            return Value("", NONE)
        method = getattr(self, f"_{type(node).__name__.lower()}_", self._others)
        value = method(node, env)
        event = self.events.get(node)
        if event is None or event.kind == TRUTH:
            return value
        if event.kind == KEYS:
            is_list = isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Slice)
            return Value(BOX, UNKNOWN) if is_list else value
        return event if not (isinstance(node, ast.Call) and event.kind == TEST) else self.evaluate_call(node, event)

    def evaluate_call(self, node: ast.Call, event: Value) -> Value:
        """Evaluate a call that is an emptiness test itself, such as `any(masks)`."""
        name = name_of(node.func)
        if event.kind == BOX:
            return event
        if name in ("min", "max", "sorted", "sort", "topk"):  # their results are routed numbers or tensors
            return Value()
        is_made = name in PLAIN_CALLS or name in ("index", "count", "remove", "list")
        return Value(PLAIN, CONSTANT) if is_made and name != "bool" else event

    def _constant_(self, node: ast.Constant, env: Env) -> Value:
        return Value("", NONE if node.value is None else CONSTANT)

    def _name_(self, node: ast.Name, env: Env) -> Value:
        return env[node.id] if node.id in env else self.seen(node.id)

    def _attribute_(self, node: ast.Attribute, env: Env) -> Value:
        value = self.value(node.value, env)
        if value.kind == PLAIN and node.attr in OF_ANY_ITEM:
            return Value()
        if value.kind in (PLAIN, TEST):
            return value
        held = self.object_of(node)
        if held is None and value.type == TENSOR and node.attr not in ("dtype", "device"):
            return Value("", TENSOR)
        return Value("", find_type(held) if held is not None else UNKNOWN)

    def _tuple_(self, node: ast.Tuple, env: Env) -> Value:
        parts = tuple(self.value(e.value if isinstance(e, ast.Starred) else e, env) for e in node.elts)
        self.shared |= {
            e.id for e, part in zip(node.elts, parts, strict=True) if isinstance(e, ast.Name) and part.type == LIST
        }
        kinds = {p.kind for p in parts}
        several = TESTS if kinds & {TEST, TESTS} else BOXES if kinds & {BOX, BOXES} else LOAD if LOAD in kinds else ""
        kind = PLAIN if PLAIN in kinds else several
        is_constant = parts and all(p.type in (CONSTANT, NONE) for p in parts)
        return Value(kind, CONSTANT if is_constant or not parts else UNKNOWN, frozenset(), parts)

    def _list_(self, node: ast.List, env: Env) -> Value:
        value = self._tuple_(node, env)  # type: ignore[arg-type]
        is_box = any(isinstance(e, ast.Starred) and p.kind == BOX for e, p in zip(node.elts, value.parts, strict=True))
        return Value(BOX if is_box else value.kind, LIST)

    _set_ = _list_

    def _dict_(self, node: ast.Dict, env: Env) -> Value:
        kinds = {self.value(v, env).kind for v in (*node.values, *[k for k in node.keys if k is not None])}
        return Value(
            PLAIN if PLAIN in kinds else TESTS if kinds & {TEST, LOAD} else BOXES if BOX in kinds else "", LIST
        )

    def _namedexpr_(self, node: ast.NamedExpr, env: Env) -> Value:
        value = self.value(node.value, env)
        self.store(node.target, value, env, node.value)
        return value

    def _starred_(self, node: ast.Starred, env: Env) -> Value:
        return self.value(node.value, env)

    def _boolop_(self, node: ast.BoolOp, env: Env) -> Value:
        values = [self.value(v, env) for v in node.values]
        kinds = {v.kind for v in values}
        if PLAIN in kinds:
            return Value(PLAIN, CONSTANT)
        own_test = max(map(self.find_own_test, node.values))
        if TEST in kinds or own_test == BY_OUTCOME:
            return Value(TEST, CONSTANT)
        if kinds == {LOAD} or own_test:
            return Value(LOAD, CONSTANT)
        return functools.reduce(lambda a, b: a.join(b, FREE, ""), values)

    def _unaryop_(self, node: ast.UnaryOp, env: Env) -> Value:
        if isinstance(node.op, ast.Not):
            value = self.value(node.operand, env)
            own_test = self.find_own_test(node.operand)
            is_test = value.kind in (TEST, BOX, OPTION) or own_test == BY_OUTCOME
            kind = LOAD if value.kind == LOAD or own_test else ""
            return Value(PLAIN if value.kind == PLAIN else TEST if is_test else kind, CONSTANT)
        value = self.value(node.operand, env)
        return value._replace(kind=PLAIN) if value.kind not in ("", LOAD) else value

    def _binop_(self, node: ast.BinOp, env: Env) -> Value:
        return self.operation(node, self.value(node.left, env), self.value(node.right, env))

    def operation(self, node: ast.AST, left: Value, right: Value) -> Value:
        kinds = {left.kind, right.kind} - {""}
        if not kinds:
            is_plain = left.type == right.type == CONSTANT
            is_list = LIST in (left.type, right.type)
            return Value("", CONSTANT if is_plain else LIST if is_list else TENSOR if TENSOR in (
                left.type, right.type) else UNKNOWN)  # fmt: skip
        if kinds <= {BOX, BOXES} or (BOX in kinds and LIST in (left.type, right.type)):
            return Value(BOX, left.type if left.kind else right.type)
        if kinds == {OPTION}:
            return Value("", TENSOR)
        if kinds == {LOAD}:
            is_number = all(v.kind or v.type == CONSTANT for v in (left, right))
            return Value(LOAD, CONSTANT) if is_number else Value("", TENSOR)
        for one, other in ((left, right), (right, left)):
            if one.kind in (PLAIN, TEST, TESTS) and not other.kind and other.type not in (CONSTANT, LIST, NONE):
                self.report_escape(node)
                return Value("", TENSOR)
        return Value(PLAIN, CONSTANT)

    def _compare_(self, node: ast.Compare, env: Env) -> Value:
        left, *others = values = [self.value(v, env) for v in (node.left, *node.comparators)]
        kinds = {v.kind for v in values} - {""}
        if kinds == {LOAD}:
            return Value(LOAD, CONSTANT)
        op = type(node.ops[0]).__name__
        if not kinds:
            is_plain = all(v.type in (CONSTANT, NONE) for v in values) or op in ("Is", "IsNot", "In", "NotIn")
            is_tensor = any(v.type == TENSOR for v in values)
            return Value("", CONSTANT if is_plain else TENSOR if is_tensor else UNKNOWN)
        if len(others) == 1 and OPTION in kinds and op in ("Is", "IsNot"):
            return Value(TEST, CONSTANT)
        if len(others) == 1 and op in ("In", "NotIn") and not left.kind and others[0].kind in (BOX, BOXES):
            return Value(TEST, CONSTANT)
        container, number = find_len_argument(node.left), node.comparators[0]
        is_emptiness = isinstance(number, ast.Constant) and is_emptiness_test(OPERATOR_NAMES.get(op, ""), number.value)
        if is_emptiness and len(others) == 1 and container is not None and self.value(container, env).kind == BOX:
            return Value(TEST, CONSTANT)
        if len(others) == 1 and sorted((left.kind, others[0].kind)) == ["", TEST]:
            return Value(TEST, CONSTANT)
        if any(v.kind in (PLAIN, TEST) for v in values) and any(v.type == TENSOR for v in values):
            self.report_escape(node)
        return Value(PLAIN, CONSTANT)

    def _ifexp_(self, node: ast.IfExp, env: Env) -> Value:
        tested = self.test(node.test, env)
        one, other = self.value(node.body, env), self.value(node.orelse, env)
        return one._replace(stamp=frozenset([1])).join(other._replace(stamp=frozenset([2])), tested, "")

    def _joinedstr_(self, node: ast.JoinedStr, env: Env) -> Value:
        parts = [self.value(v.value, env) for v in node.values if isinstance(v, ast.FormattedValue)]
        return Value(PLAIN if any(p.kind not in ("", OPTION) for p in parts) else "", CONSTANT)

    def _lambda_(self, node: ast.Lambda, env: Env) -> Value:
        for name in ast.walk(node.body):  # the body is another function
            if isinstance(name, ast.Name) and name.id in env and env[name.id].kind in (PLAIN, TEST, BOX, TESTS, BOXES):
                self.report_escape(name)
        return Value()

    def _await_(self, node: Any, env: Env) -> Value:
        return self.value(node.value, env)

    def _yield_(self, node: ast.Yield, env: Env) -> Value:
        value = self.value(node.value, env)
        self.returns.append((Value(BOX if self.tested else value.kind and BOXES, value.type), FREE))
        return Value()

    def _slice_(self, node: ast.Slice, env: Env) -> Value:
        kinds = {self.value(v, env).kind for v in (node.lower, node.upper, node.step) if v is not None} - {""}
        return Value(LOAD if kinds == {LOAD} else PLAIN if kinds else "", CONSTANT)

    def _subscript_(self, node: ast.Subscript, env: Env) -> Value:
        base, index = self.value(node.value, env), self.value(node.slice, env)
        if base.kind in (BOX, TESTS, BOXES):
            if isinstance(node.slice, ast.Slice):
                return base
            if base.kind == BOXES:
                return Value(BOX, base.type)
            if isinstance(node.slice, (ast.Constant, ast.UnaryOp)):
                return Value(PLAIN, CONSTANT if base.type == CONSTANT else UNKNOWN)
            return Value(TEST if base.kind == TESTS or (base.type == CONSTANT and not index.kind) else "", base.type)
        if base.kind in (PLAIN, TEST):
            return Value(PLAIN, CONSTANT)
        if base.kind == LOAD:
            return base
        if index.kind in (PLAIN, TEST):
            return Value(PLAIN, UNKNOWN)
        if index.kind == LOAD:
            is_part = isinstance(node.slice, ast.Slice)
            return Value((BOX if base.type == LIST else "") if is_part else LOAD, UNKNOWN)
        if len(base.parts) and isinstance(node.slice, ast.Constant) and type(node.slice.value) is int:
            return base.parts[node.slice.value] if node.slice.value < len(base.parts) else Value()
        if base.type == TENSOR:
            return Value("", TENSOR)
        held = self.object_of(node)
        return Value("", find_type(held) if held is not None else UNKNOWN)

    def _listcomp_(self, node: Any, env: Env) -> Value:
        inner = dict(env)
        is_box = False
        for part in node.generators:
            is_box = self.bind(part.target, part.iter, inner) or is_box
            is_box = any([self.test(condition, inner) for condition in part.ifs]) or is_box
        before, self.tested = self.tested, max(self.tested, BY_OUTCOME if is_box else FREE)
        item = self.value(node.value if isinstance(node, ast.DictComp) else node.elt, inner)
        self.tested = before
        if item.kind == PLAIN and not is_box:
            return Value(PLAIN, CONSTANT)
        if is_box:
            return Value(BOX, item.type)
        kind = {TEST: TESTS, LOAD: TESTS, TESTS: TESTS, BOX: BOXES, BOXES: BOXES}.get(item.kind, "")
        return Value(kind, item.type if kind else LIST)

    _setcomp_ = _generatorexp_ = _dictcomp_ = _listcomp_

    def _call_(self, node: ast.Call, env: Env) -> Value:
        name = name_of(node.func)
        if self._is_log(node, name):
            return Value("", NONE)
        arguments = [*node.args, *[k.value for k in node.keywords]]
        if (name == "len" and len(arguments) == 1) or name in ("isinstance", "getattr", "hasattr"):
            value = self.value(arguments[0], env)
            return Value(PLAIN, CONSTANT) if value.kind in (BOX, PLAIN, TEST) else Value("", UNKNOWN)
        values = [self.value(a, env) for a in arguments]
        kinds = {v.kind for v in values} - {"", OPTION}
        is_builtin = isinstance(node.func, ast.Name) and name not in env and hasattr(builtins, name)
        if is_builtin or name in CONTAINERS:
            return self._builtin(node, name, values, kinds)
        if (
            isinstance(node.func, ast.Attribute)
            and (result := self._method(node, name, values, kinds, env)) is not None
        ):
            return result
        if self.value(node.func, env).kind in (PLAIN, TEST):
            self.report_escape(node)
            return Value("", TENSOR)
        function = self.object_of(node.func)
        if not kinds & {PLAIN, TEST}:
            if self._gives_tensors(node, function, kinds, env):
                if TESTS in kinds:
                    self.report_escape(node)
                return Value("", TENSOR)
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

    def _gives_tensors(self, node: ast.Call, function: Any, kinds: set[str], env: Env) -> bool:
        """Return whether a call is of torch, a submodule, or a tensor's method, which keep nothing in Python."""
        if isinstance(function, nn.Module):
            return not kinds
        if isinstance(function, type) and not issubclass(function, torch.Tensor):
            return False
        if root_name(node.func) in ("torch", "F") or belongs_to_torch(function):
            return True
        if function is None and isinstance(node.func, ast.Attribute) and kinds and kinds <= {BOX, BOXES, LOAD}:
            return True  # a tensor's method: `rows.split(counts)`, `out.index_add(0, ids, y)`
        return not kinds and self.value(node.func, env).type == TENSOR

    def _builtin(self, node: ast.Call, name: str, values: list[Value], kinds: set[str]) -> Value:
        is_fresh = name == "next" and isinstance(node.args[0], ast.GeneratorExp)
        if self.tested and name not in PURE and name not in CONTAINERS and not is_fresh:
            self.report_escape(node)  # `next(iterator)`, `setattr(...)`
        if not kinds:
            is_list = name in CONTAINERS
            is_number = name in OF_NUMBERS and any(v.type != CONSTANT for v in values)
            return Value("", LIST if is_list else CONSTANT if name in PLAIN_CALLS and not is_number else UNKNOWN)
        if kinds == {LOAD} and name not in CONTAINERS and name != "range":
            return Value(LOAD, CONSTANT)
        type_ = CONSTANT if any(v.type == CONSTANT for v in values if v.kind) else UNKNOWN
        if name in ("takewhile", "dropwhile", "filter") or (name in CONTAINERS and BOX in kinds):
            return Value(BOX, type_)
        if name == "range":
            return Value(BOX, CONSTANT)
        if name in CONTAINERS and kinds <= {TESTS, BOXES}:
            return Value(TESTS if TESTS in kinds else BOXES, type_)
        if name == "bool" and kinds == {TEST}:
            return Value(TEST, CONSTANT)
        if name == "sum" and kinds == {BOX} and type_ != CONSTANT:
            return Value("", TENSOR)
        return Value(PLAIN, CONSTANT)

    def _method(self, node: ast.Call, name: str, values: list[Value], kinds: set[str], env: Env) -> Value | None:
        """Evaluate a method of a container; None if the owner is no container."""
        owner = node.func.value  # type: ignore[attr-defined]
        value = self.value(owner, env)
        is_container = value.kind in (BOX, TESTS, BOXES) or value.type == LIST
        if is_container and name in FILLS:
            is_decided = owner in self.events or node in self.events or (name in ("extend", "update") and BOX in kinds)
            if self.tested or kinds or is_decided:
                self.mark(owner, env, values[-1] if values else Value(), is_decided)
            return Value("", NONE)
        if is_container and name in EMPTIES:
            if self.tested or kinds:
                self.mark(owner, env, Value("", value.type))
            is_same_iteration = self.tested or not value.kind
            return Value("" if is_same_iteration else PLAIN, UNKNOWN)
        if value.kind in (BOX, TESTS, BOXES):
            if name in ("keys", "values", "items", "copy", "__iter__"):
                return value
            return Value(OPTION, UNKNOWN) if name == "get" else Value(PLAIN, CONSTANT)
        if value.type == CONSTANT and not value.kind:  # a string's method
            return Value(PLAIN if kinds - {OPTION} else "", CONSTANT)
        if value.type == LIST and not value.kind:
            if self.tested and name not in READS:
                self.report_escape(node)
            return None if kinds else Value()
        if value.kind == PLAIN and name not in OF_ANY_ITEM:
            return Value(PLAIN, value.type)
        return None

    def _others(self, node: ast.AST, env: Env) -> Value:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.expr):
                self.value(child, env)
        return Value()
