"""Follow the outcome of "has this expert tokens?" through a function of the user's, by its syntax tree.

A block may leave an expert out that has no tokens. It may not remember in Python which experts it left out: no capture
sees a decision on that. An abstract interpreter runs the statements on `Value`s that only say whether a name depends on
such an outcome. Under a test of an outcome, tensors may be stored and lists filled; a plain number that is stored there
depends on the outcome from the end of the branch on. Lists that depend on it may be iterated over and given to torch.

Comparisons of an expert's load are shown both ways for each expert (see `matching.probes.load_comparisons`). What is
made of one may be used in the turn of its expert (`LOAD`), and is an outcome like others in the next turn.
"""

from __future__ import annotations

import ast
import builtins
import contextlib
import functools
import itertools
import types
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import nn

from .counts import is_empty_test
from .sizes import Number

Env: TypeAlias = "dict[str, Value]"
_MAX_PASSES = 6  # over the body of a loop

# What decides whether a statement runs: no outcome, the load of this turn's expert, or outcomes.
FREE, BY_LOAD, BY_OUTCOME = 0, 1, 2

# Kinds of values, of which "" depends on no outcome.
TEST = "test"  # tells of one expert whether it has tokens, or is one of several such questions
PLAIN = "plain"  # a number, string or flag that was made of outcomes
BOX = "box"  # a container whose length or keys depend on outcomes
LOAD = "load"  # a test or a number made of a load that Python compares, in the turn of this expert alone
TESTS, BOXES = "tests", "boxes"  # a container of a fixed length, of those
OPTION = "option"  # None, or a tensor
KEYS = "keys"  # of an access to a container, at a key that the routing says
TRUTH = "truth"  # of an expression whose truth tells of tokens, and whose value does not

# Types, as far as the syntax and the names of a running function tell.
CONSTANT, LIST, NONE, TENSOR, UNKNOWN = "constant", "list", "none", "tensor", "unknown"


class Value(NamedTuple):
    """`stamp`: the statements that may have stored it. `parts`: the values of a tuple. Of a container `type` is that of
    its items where it depends on outcomes."""

    kind: str = ""
    type: str = UNKNOWN
    stamp: frozenset[int] = frozenset()
    parts: tuple[Any, ...] = ()

    def joined(self, other: Value, tested: int, seen: str) -> Value:
        """The value where two ways meet. Args: `seen`: the type that the name was seen to have while the code ran."""
        if self == other:
            return self
        types_ = {self.type, other.type}
        type_ = next((t for t in (CONSTANT, LIST, TENSOR, UNKNOWN, NONE) if t in types_), UNKNOWN)
        kinds = {self.kind, other.kind} - {""}
        kind = min(kinds, key=(PLAIN, TEST, BOX, BOXES, TESTS, LOAD, OPTION).index) if kinds else ""
        if tested and not kind and self.stamp != other.stamp:
            if LIST in types_:
                kind = BOX
            elif types_ == {TENSOR, NONE} or (NONE in types_ and seen == TENSOR):
                kind = OPTION
            elif types_ != {TENSOR} and seen != TENSOR:
                kind = PLAIN if tested == BY_OUTCOME else LOAD
        parts = (
            tuple(a.joined(b, tested, "") for a, b in zip(self.parts, other.parts, strict=True))
            if len(self.parts) == len(other.parts)
            else ()
        )
        return Value(kind, type_, self.stamp | other.stamp, parts)


CONTAINERS = {
    "list", "tuple", "sorted", "set", "frozenset", "enumerate", "zip", "reversed", "iter", "dict", "deque", "map",
    "filter", "chain", "islice", "Counter", "defaultdict", "OrderedDict", "takewhile", "dropwhile", "accumulate",
    "pairwise", "product",
}  # fmt: skip
_FILLS = {"append", "add", "insert", "appendleft", "extend", "update", "setdefault", "extendleft", "__setitem__"}
_EMPTIES = {"pop", "popleft", "popitem", "remove", "discard", "clear"}
_LOGS = {"debug", "info", "warning", "error", "log", "warn", "print", "critical", "exception", "write"}
_OF_ANY_ITEM = {"dtype", "device", "shape", "size", "dim", "ndim", "new_zeros", "new_empty", "new_full", "new_ones"}
_COMPARISONS = {"Eq": "eq", "NotEq": "ne", "Gt": "gt", "LtE": "le", "GtE": "ge", "Lt": "lt"}
_READS = {"copy", "count", "get", "index", "items", "keys", "reverse", "sort", "values"}
_PURE_MODULES = ("math", "operator", "_operator", "einops", "copy")
_PLAIN_CALLS = {
    "len", "int", "float", "bool", "str", "abs", "round", "any", "all", "min", "max", "sum", "repr", "hash", "ord",
    "chr", "isinstance", "hasattr", "divmod", "pow", "next", "range", "format", "bin",
}  # fmt: skip
_PURE = _PLAIN_CALLS - {"next"} | {"type", "slice", "print", "getattr", "super", "complex", "callable", "id"}
_OF_NUMBERS = {"min", "max", "abs", "sum", "round", "divmod", "pow", "int", "len"}  # may remember where they come from


class Flow:
    """One function.

    Args:
        events: what expressions evaluate to that ask for tokens.
        names: what names held, as seen while the function ran.
        outer_names: those of its module.
        call: analyses another function, given its name's value, the values of the arguments, what decides whether it
            runs, and the names here, which a nested function sees.
    """

    def __init__(
        self,
        events: Mapping[ast.AST, Value],
        names: Mapping[str, list[Any]],
        outer_names: Mapping[str, Any],
        call: Callable[[Any, list[Any], int, Env], Any],
    ):
        self.events, self.names, self.outer_names, self.call = events, names, outer_names, call
        self.escapes: dict[ast.AST, None] = {}  # where decisions are taken on outcomes
        self.returns: list[tuple[Value, int]] = []
        self.tested = FREE  # what decides if a statement runs
        self.exits: list[tuple[str, Env, int]] = []  # continue, break, raise
        self.returned = False  # under a test
        self.outer: set[str] = set()
        self.function_name, self.owner_name = "", ""
        self.shared: set[str] = set()  # names whose value has other names

    def run(self, function: Any, given: Mapping[str, Value]) -> Value:
        self.function_name = getattr(function, "name", "")
        arguments = getattr(function, "args", None)  # a module has none
        self.owner_name = arguments.args[0].arg if arguments is not None and arguments.args else ""
        if isinstance(function, ast.Lambda):
            return self.value(function.body, dict(given))
        env = self.block(function.body, dict(given))
        if env is not None and self.returns:
            self.returns.append((Value("", NONE), self.tested))
        if not self.returns:
            return Value("", NONE)
        tested = max(tested for _, tested in self.returns)
        value = functools.reduce(lambda a, b: a.joined(b, tested, ""), [v for v, _ in self.returns])
        is_generator = any(isinstance(node, (ast.Yield, ast.YieldFrom)) for node in ast.walk(function))
        return value._replace(type=UNKNOWN) if is_generator and not value.kind else value

    # ------------------------------------------------------------------ statements
    def block(self, statements: Iterable[ast.stmt], env: Env | None) -> Env | None:
        for statement in statements:
            if env is None:
                return None
            method = getattr(self, f"_{type(statement).__name__.lower()}", None)
            env = method(statement, env) if method else env
        return env

    def _expr(self, s: ast.Expr, env: Env) -> Env:
        self.value(s.value, env)
        if self.tested and not isinstance(s.value, (ast.Call, ast.Await, ast.Yield, ast.Constant)):
            self.escape(s)  # an operator of an object that may keep something
        return env

    def _assign(self, s: ast.Assign, env: Env) -> Env:
        value = self.value(s.value, env)
        for target in s.targets:
            self.store(target, value, env, s.value)
        return env

    def _annassign(self, s: ast.AnnAssign, env: Env) -> Env:
        if s.value is not None:
            self.store(s.target, self.value(s.value, env), env, s.value)
        return env

    def _augassign(self, s: ast.AugAssign, env: Env) -> Env:
        old, new = self.value(s.target, env), self.value(s.value, env)
        if isinstance(s.target, ast.Name) and (old.kind == BOX or old.type == LIST):
            if self.tested or new.kind:
                env[s.target.id] = Value(BOX, new.type if new.kind else _item_type(s.value), frozenset([id(s)]))
            return env
        self.store(s.target, self.operation(s, old, new), env, s.value)
        return env

    def _return(self, s: ast.Return, env: Env) -> None:
        value = self.value(s.value, env) if s.value is not None else Value("", NONE)
        self.returns.append((value._replace(stamp=frozenset([id(s)])), self.tested))
        self.returned = self.returned or bool(self.tested)

    def _raise(self, s: ast.Raise, env: Env) -> None:
        self.exits.append(("raise", env, self.tested))

    def _continue(self, s: ast.Continue, env: Env) -> None:
        self.exits.append(("continue", env, self.tested))

    def _break(self, s: ast.Break, env: Env) -> None:
        self.exits.append(("break", env, self.tested))

    def _global(self, s: ast.Global, env: Env) -> Env:
        self.outer |= {*s.names}
        return env

    _nonlocal = _global

    def _if(self, s: ast.If, env: Env) -> Env | None:
        return self.branches(self.test(s.test, env), [s.body, s.orelse], env)

    def _match(self, s: Any, env: Env) -> Env | None:
        guards = [self.test(case.guard, env) for case in s.cases if case.guard is not None]
        tested = max([self.test(s.subject, env), *guards])
        return self.branches(tested, [*[case.body for case in s.cases], []], env)

    def branches(self, tested: int, several: list[list[ast.stmt]], env: Env) -> Env | None:
        before = self.tested
        ends = []
        for statements in several:
            self.tested = max(before, tested)
            ends.append((self.block(statements, dict(env)), self.tested))
        left = [end for end, _ in ends if end is not None]
        # what follows runs only if no branch left the loop or the function, on an outcome
        inner = FREE if tested else max((by for end, by in ends if end is not None), default=FREE)
        self.tested = max(before, inner, tested if 0 < len(left) < len(ends) else FREE)
        return functools.reduce(lambda a, b: self.join(a, b, max(tested, inner)), left) if left else None

    def _for(self, s: ast.For, env: Env) -> Env | None:
        return self.loop(s, env, lambda e: BY_OUTCOME if self.bind(s.target, s.iter, e) else FREE)

    _asyncfor = _for

    def _while(self, s: ast.While, env: Env) -> Env | None:
        return self.loop(s, env, lambda e: self.test(s.test, e))

    def loop(self, s: Any, env: Env, start: Callable[[Env], int]) -> Env | None:
        before, outer, head = self.tested, self.exits, env
        is_left = False  # by a break, on an outcome
        breaks: list[tuple[Env, int]] = []
        for _ in range(_MAX_PASSES):
            self.exits, turn = [], dict(head)
            decided = start(turn)
            after = dict if decided == BY_LOAD else _after_turn  # a loop over one expert's rows is no turn of its own
            self.tested = max(before, decided, BY_OUTCOME if is_left else FREE)
            end = self.block(s.body, turn)
            ends = [(end, self.tested)] if end is not None else []
            ends += [(e, by) for kind, e, by in self.exits if kind == "continue"]
            breaks = [(after(e), by) for kind, e, by in self.exits if kind == "break"]
            is_left = is_left or any(by for _, by in breaks) or self.returned
            outer += [e for e in self.exits if e[0] == "raise"]
            skips = max((by for _, by in ends), default=FREE)
            new = functools.reduce(lambda a, b: self.join(a, b, skips), [e for e, _ in ends]) if ends else head
            new = self.join(head, after(new), BY_OUTCOME if is_left else decided)
            if new == head:
                break
            head = new
        self.exits, self.tested = outer, max(before, BY_OUTCOME if is_left else FREE)
        end = self.block(s.orelse, dict(head))
        self.tested = BY_OUTCOME if self.returned else before
        left = [e for e in (end, *[e for e, _ in breaks]) if e is not None]
        return functools.reduce(lambda a, b: self.join(a, b, BY_OUTCOME if is_left else FREE), left) if left else None

    def _try(self, s: ast.Try, env: Env) -> Env | None:
        outer, self.exits, before = self.exits, [], self.tested
        end = self.block(s.body, dict(env))
        raised = max((by for kind, _, by in self.exits if kind == "raise"), default=FREE)
        self.exits = outer + [e for e in self.exits if e[0] != "raise" or not s.handlers]
        if end is not None:
            end = self.block(s.orelse, end)
        ends = [end] if end is not None else []
        for handler in s.handlers:
            self.tested = max(before, raised)
            middle = self.join(env, end, raised) if end is not None else env
            if (caught := self.block(handler.body, dict(middle))) is not None:
                ends.append(caught)
        self.tested = BY_OUTCOME if self.returned else before
        found = functools.reduce(lambda a, b: self.join(a, b, raised), ends) if ends else None
        if s.finalbody:
            left = self.exits[len(outer) :]  # these run it too
            ends = [(e, by) for _, e, by in left] + ([(found, self.tested)] if found is not None else [])
            self.tested = max([self.tested, *[by for _, by in ends]])
            every = functools.reduce(lambda a, b: self.join(a, b, self.tested), [e for e, _ in ends] or [dict(env)])
            after = self.block(s.finalbody, every)
            self.tested = BY_OUTCOME if self.returned else before
            if after is None:
                return None
            self.exits[len(outer) :] = [(kind, after, by) for kind, _, by in left]
            found = after if found is not None else None
        return found

    _trystar = _try

    def _with(self, s: ast.With, env: Env) -> Env | None:
        for item in s.items:
            value = self.value(item.context_expr, env)
            call = item.context_expr
            function = self.object_of(call.func) if isinstance(call, ast.Call) else None
            is_known = _is_of_torch(function) or function is contextlib.nullcontext or _root(
                getattr(call, "func", call)) == "torch"  # fmt: skip
            asks = any(node in self.events for one in s.body for node in ast.walk(one))
            if value.kind or ((self.tested or asks) and not is_known):
                self.escape(item.context_expr)
            if item.optional_vars is not None:
                self.store(item.optional_vars, Value(), env, item.context_expr)
        return self.block(s.body, env)

    _asyncwith = _with

    def _delete(self, s: ast.Delete, env: Env) -> Env:
        if self.tested:
            self.escape(s)
        return env

    def join(self, a: Env, b: Env, tested: int) -> Env:
        if a is b:
            return a
        found = {}
        for name in {**a, **b}:
            one, other = a.get(name), b.get(name)
            if one is None or other is None:  # stored on one of the ways: it is read on that alone, or was there before
                one, other = one or self.seen(name), other or self.seen(name)
            found[name] = one.joined(other, tested, self.type_seen(name))
        return found

    # ------------------------------------------------------------------ names
    def type_seen(self, name: str) -> str:
        """The type of all values that a name was seen to hold; numbers that remember where they come from are such."""
        held = self.names.get(name) or [self.outer_names.get(name)]
        found = {type_of(v) for v in held} - {NONE}
        return found.pop() if len(found) == 1 else TENSOR if found == {TENSOR, CONSTANT} else UNKNOWN

    def seen(self, name: str) -> Value:
        return Value("", self.type_seen(name))

    def object_of(self, node: ast.AST) -> Any:
        """What a name or an attribute of one holds, if that was seen."""
        if isinstance(node, ast.Name):
            held = self.names.get(node.id, ())
            return held[-1] if held else self.outer_names.get(node.id, getattr(builtins, node.id, None))
        if isinstance(node, ast.Attribute) and name_of(getattr(node.value, "func", node)) == "super":
            return self._inherited(node.attr)
        if isinstance(node, ast.Attribute) and (owner := self.object_of(node.value)) is not None:
            if isinstance(owner, nn.Module):
                own = {**vars(owner), **owner._modules, **owner._parameters, **owner._buffers}
                found = getattr(type(owner), node.attr, None)
                found = types.MethodType(found, owner) if isinstance(found, types.FunctionType) else found
                return own.get(node.attr, found)
            if isinstance(owner, (type, types.ModuleType)):
                return getattr(owner, node.attr, None)
        if isinstance(node, ast.Subscript):  # an item like the others
            held = self.object_of(node.value)
            if isinstance(held, (list, tuple, nn.ModuleList, nn.Sequential)):
                return next(iter(held), None)
            if isinstance(held, (dict, nn.ModuleDict)):
                return next(iter(held.values()), None)
        return None

    def _inherited(self, name: str) -> Any:
        """The method that `super()` gives: of this name the second one, in the method that overrides it."""
        owner = self.object_of(ast.Name(self.owner_name))
        found = [vars(cls)[name] for cls in type(owner).__mro__ if name in vars(cls)]
        found = [types.MethodType(f, owner) for f in found if isinstance(f, types.FunctionType)]
        at = 1 if name == self.function_name else 0
        return found[at] if len(found) > at else None

    def store(self, target: ast.AST, value: Value, env: Env, source: ast.AST) -> None:
        self.share(source, target, env)
        if isinstance(target, ast.Name):
            if target.id in self.outer and (value.kind or (self.tested and value.type != TENSOR)):
                self.escape(target)
            type_ = self.type_seen(target.id) if value.type == UNKNOWN and not value.kind else value.type
            env[target.id] = value._replace(type=type_, stamp=frozenset([id(target)]))
        elif isinstance(target, ast.Starred):
            self.store(target.value, value, env, source)
        elif isinstance(target, (ast.Tuple, ast.List)):
            parts = value.parts if len(value.parts) == len(target.elts) else None
            for i, one in enumerate(target.elts):
                kind = {BOX: PLAIN, TESTS: TEST, BOXES: BOX}.get(value.kind, value.kind)
                type_ = TENSOR if value.type == TENSOR else UNKNOWN
                self.store(one, parts[i] if parts else Value(kind, type_), env, source)
        elif isinstance(target, ast.Attribute):
            is_kept = value.type == TENSOR and isinstance(self.object_of(target.value), nn.Module)
            if value.kind not in ("", OPTION) or (self.tested and not is_kept):
                self.escape(target)
        elif isinstance(target, ast.Subscript):
            index, base = self.value(target.slice, env), self.value(target.value, env)
            is_container = base.kind in (BOX, TESTS, BOXES) or base.type == LIST
            if target in self.events:  # by a number of the routing
                self.mark(target.value, env, value, True)
            elif is_container and (self.tested or value.kind or index.kind):
                self.mark(target.value, env, value)
            elif (
                value.kind in (PLAIN, TEST, TESTS)
                or index.kind in (PLAIN, TEST)
                or (self.tested and base.type != TENSOR)
            ):
                self.escape(target)

    def share(self, source: ast.AST, target: ast.AST, env: Env) -> None:
        """Note lists that get another name, by themselves or by one of their methods (`note = seen.add`)."""
        owner = source.value if isinstance(source, ast.Attribute) else source
        if any(isinstance(n, (ast.Name, ast.Attribute)) and self.value(n, env).type == LIST for n in (source, owner)):
            self.shared |= {_root(source), *([target.id] if isinstance(target, ast.Name) else [])}

    def mark(self, container: ast.AST, env: Env, item: Value, is_decided: bool = False) -> None:
        """A container was filled, as an outcome decided."""
        kind = BOX if self.tested or is_decided or item.kind not in (TEST, PLAIN, LOAD) else TESTS
        if isinstance(container, ast.Name) and container.id in self.shared:
            self.escape(container)  # others may ask it under another name
            return
        while isinstance(container, (ast.Subscript, ast.Call, ast.Attribute)):
            if isinstance(container, ast.Subscript):
                kind = BOXES
            elif isinstance(container, ast.Attribute):  # of an object: others may ask it
                self.escape(container)
                return
            container = container.func.value if isinstance(container, ast.Call) and isinstance(  # type: ignore
                container.func, ast.Attribute) else getattr(container, "value", ast.Constant(None))  # fmt: skip
        if isinstance(container, ast.Name):
            old = env.get(container.id, Value())
            type_ = CONSTANT if CONSTANT in (item.type, old.type if old.kind else "") else item.type
            env[container.id] = Value(kind, type_, old.stamp | {id(container)})

    def bind(self, target: ast.AST, source: ast.AST, env: Env) -> bool:
        """Store an item of what a loop is over. Returns whether outcomes decide how many there are."""
        called = source.func.id if isinstance(source, ast.Call) and isinstance(source.func, ast.Name) else ""
        parts = target.elts if isinstance(target, (ast.Tuple, ast.List)) else []
        is_event = source in self.events
        if called == "enumerate" and len(parts) == 2 and source.args and not is_event:  # type: ignore[attr-defined]
            found = self.bind(parts[1], source.args[0], env)  # type: ignore[attr-defined]
            self.store(parts[0], Value(PLAIN if found else "", CONSTANT), env, source)
            return found
        if called == "zip" and len(parts) == len(source.args) and not is_event:  # type: ignore[attr-defined]
            return any([self.bind(p, a, env) for p, a in zip(parts, source.args, strict=True)])  # type: ignore
        value = self.value(source, env)
        if value.kind == PLAIN:
            self.escape(source)
        if name_of(getattr(source, "func", source)) == "items" and len(parts) == 2 and value.kind == BOXES:
            self.store(parts[0], Value("", CONSTANT), env, source)
            self.store(parts[1], Value(BOX, value.type), env, source)
            return is_event
        kind = {TESTS: TEST, BOXES: BOX}.get(value.kind, "")
        type_ = CONSTANT if called == "range" else value.type if value.kind or value.type == TENSOR else UNKNOWN
        if isinstance(target, ast.Name) and type_ == UNKNOWN:
            type_ = self.type_seen(target.id)
        self.store(target, Value(kind, type_), env, source)
        return value.kind == BOX or is_event

    # ------------------------------------------------------------------ expressions
    def escape(self, node: ast.AST) -> None:
        self.escapes[node] = None

    def test(self, node: ast.AST, env: Env) -> int:
        """What decides a test; one on what was made of outcomes escapes."""
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            return max(self.test(node.operand, env), self.asks(node))
        if isinstance(node, ast.BoolOp):
            return max([self.test(v, env) for v in node.values] + [self.asks(node)])
        value = self.value(node, env)
        if value.kind == PLAIN:
            self.escape(node)
        if value.kind in (TEST, PLAIN, BOX, OPTION):
            return BY_OUTCOME
        return max(BY_LOAD if value.kind == LOAD else FREE, self.asks(node))

    def asks(self, node: ast.AST) -> int:
        """Whether an expression asks for tokens itself."""
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
        return event if not (isinstance(node, ast.Call) and event.kind == TEST) else self.called(node, event)

    def called(self, node: ast.Call, event: Value) -> Value:
        """What a call gives that asks for tokens itself, as `any(masks)` does."""
        name = name_of(node.func)
        if event.kind == BOX:
            return event
        if name in ("min", "max", "sorted", "sort", "topk"):  # their results remember where they come from
            return Value()
        is_made = name in _PLAIN_CALLS or name in ("index", "count", "remove", "list")
        return Value(PLAIN, CONSTANT) if is_made and name != "bool" else event

    def _constant_(self, node: ast.Constant, env: Env) -> Value:
        return Value("", NONE if node.value is None else CONSTANT)

    def _name_(self, node: ast.Name, env: Env) -> Value:
        return env[node.id] if node.id in env else self.seen(node.id)

    def _attribute_(self, node: ast.Attribute, env: Env) -> Value:
        value = self.value(node.value, env)
        if value.kind == PLAIN and node.attr in _OF_ANY_ITEM:
            return Value()
        if value.kind in (PLAIN, TEST):
            return value
        held = self.object_of(node)
        if held is None and value.type == TENSOR and node.attr not in ("dtype", "device"):
            return Value("", TENSOR)
        return Value("", type_of(held) if held is not None else UNKNOWN)

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
        asked = max(map(self.asks, node.values))
        if TEST in kinds or asked == BY_OUTCOME:
            return Value(TEST, CONSTANT)
        if kinds == {LOAD} or asked:
            return Value(LOAD, CONSTANT)
        return functools.reduce(lambda a, b: a.joined(b, FREE, ""), values)

    def _unaryop_(self, node: ast.UnaryOp, env: Env) -> Value:
        if isinstance(node.op, ast.Not):
            value = self.value(node.operand, env)
            asked = self.asks(node.operand)
            is_asked = value.kind in (TEST, BOX, OPTION) or asked == BY_OUTCOME
            kind = LOAD if value.kind == LOAD or asked else ""
            return Value(PLAIN if value.kind == PLAIN else TEST if is_asked else kind, CONSTANT)
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
                self.escape(node)
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
        measured, number = _measured(node.left), node.comparators[0]
        is_emptiness = isinstance(number, ast.Constant) and is_empty_test(_COMPARISONS.get(op, ""), number.value)
        if is_emptiness and len(others) == 1 and measured is not None and self.value(measured, env).kind == BOX:
            return Value(TEST, CONSTANT)
        if len(others) == 1 and sorted((left.kind, others[0].kind)) == ["", TEST]:
            return Value(TEST, CONSTANT)
        if any(v.kind in (PLAIN, TEST) for v in values) and any(v.type == TENSOR for v in values):
            self.escape(node)
        return Value(PLAIN, CONSTANT)

    def _ifexp_(self, node: ast.IfExp, env: Env) -> Value:
        tested = self.test(node.test, env)
        one, other = self.value(node.body, env), self.value(node.orelse, env)
        return one._replace(stamp=frozenset([1])).joined(other._replace(stamp=frozenset([2])), tested, "")

    def _joinedstr_(self, node: ast.JoinedStr, env: Env) -> Value:
        parts = [self.value(v.value, env) for v in node.values if isinstance(v, ast.FormattedValue)]
        return Value(PLAIN if any(p.kind not in ("", OPTION) for p in parts) else "", CONSTANT)

    def _lambda_(self, node: ast.Lambda, env: Env) -> Value:
        for name in ast.walk(node.body):  # its body is a function of its own
            if isinstance(name, ast.Name) and name.id in env and env[name.id].kind in (PLAIN, TEST, BOX, TESTS, BOXES):
                self.escape(name)
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
        return Value("", type_of(held) if held is not None else UNKNOWN)

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
        if name in _LOGS and (isinstance(node.func, ast.Attribute) or name == "print"):
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
        if isinstance(node.func, ast.Attribute) and (found := self._method(node, name, values, kinds, env)) is not None:
            return found
        if self.value(node.func, env).kind in (PLAIN, TEST):
            self.escape(node)
            return Value("", TENSOR)
        function = self.object_of(node.func)
        if not kinds & {PLAIN, TEST}:
            if self._gives_tensors(node, function, kinds, env):
                if TESTS in kinds:
                    self.escape(node)
                return Value("", TENSOR)
            if (found := self.call(function, values, self.tested, env)) is not None:
                return found
        if kinds or (self.tested and not _is_pure(function)):
            self.escape(node)  # who knows what it keeps
        return Value()

    def _gives_tensors(self, node: ast.Call, function: Any, kinds: set[str], env: Env) -> bool:
        """Whether a call is one of torch, of a submodule, or of a method of a tensor: it keeps nothing in Python."""
        if isinstance(function, nn.Module):
            return not kinds
        if isinstance(function, type) and not issubclass(function, torch.Tensor):
            return False
        if _root(node.func) in ("torch", "F") or _is_of_torch(function):
            return True
        if function is None and isinstance(node.func, ast.Attribute) and kinds and kinds <= {BOX, BOXES, LOAD}:
            return True  # of a tensor: `rows.split(counts)`, `out.index_add(0, ids, y)`
        return not kinds and self.value(node.func, env).type == TENSOR

    def _builtin(self, node: ast.Call, name: str, values: list[Value], kinds: set[str]) -> Value:
        is_fresh = name == "next" and isinstance(node.args[0], ast.GeneratorExp)
        if self.tested and name not in _PURE and name not in CONTAINERS and not is_fresh:
            self.escape(node)  # `next(iterator)`, `setattr(...)`
        if not kinds:
            is_list = name in CONTAINERS
            is_number = name in _OF_NUMBERS and any(v.type != CONSTANT for v in values)
            return Value("", LIST if is_list else CONSTANT if name in _PLAIN_CALLS and not is_number else UNKNOWN)
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
        """What a method of a container does; None if it is none."""
        owner = node.func.value  # type: ignore[attr-defined]
        value = self.value(owner, env)
        is_container = value.kind in (BOX, TESTS, BOXES) or value.type == LIST
        if is_container and name in _FILLS:
            is_decided = owner in self.events or node in self.events or (name in ("extend", "update") and BOX in kinds)
            if self.tested or kinds or is_decided:
                self.mark(owner, env, values[-1] if values else Value(), is_decided)
            return Value("", NONE)
        if is_container and name in _EMPTIES:
            if self.tested or kinds:
                self.mark(owner, env, Value("", value.type))
            is_in_turn = self.tested or not value.kind
            return Value("" if is_in_turn else PLAIN, UNKNOWN)
        if value.kind in (BOX, TESTS, BOXES):
            if name in ("keys", "values", "items", "copy", "__iter__"):
                return value
            return Value(OPTION, UNKNOWN) if name == "get" else Value(PLAIN, CONSTANT)
        if value.type == CONSTANT and not value.kind:  # of a string
            return Value(PLAIN if kinds - {OPTION} else "", CONSTANT)
        if value.type == LIST and not value.kind:
            if self.tested and name not in _READS:
                self.escape(node)
            return None if kinds else Value()
        if value.kind == PLAIN and name not in _OF_ANY_ITEM:
            return Value(PLAIN, value.type)
        return None

    def _others(self, node: ast.AST, env: Env) -> Value:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.expr):
                self.value(child, env)
        return Value()


def _after_turn(env: Env) -> Env:
    """What is made of an expert's load is an outcome like others for the next expert."""
    return {name: value._replace(kind=PLAIN) if value.kind == LOAD else value for name, value in env.items()}


def type_of(held: Any) -> str:
    if held is None:
        return NONE
    if isinstance(held, (Number, torch.Tensor, nn.Module)) or _holds_tensors(held):
        return TENSOR
    if isinstance(held, (bool, int, float, str)):
        return CONSTANT
    return LIST if isinstance(held, (list, dict, set)) else UNKNOWN


def _holds_tensors(held: Any) -> bool:
    """Whether a value is a tuple of tensors, which `where` and `topk` return."""
    return isinstance(held, tuple) and bool(held) and all(type_of(v) == TENSOR for v in held)


def _is_of_torch(function: Any) -> bool:
    return (getattr(function, "__module__", None) or "").split(".")[0] in ("torch", "torchvision")


def _is_pure(function: Any) -> bool:
    """Whether a function is known to keep nothing. An object that is made keeps what it is given until it is stored."""
    module = (getattr(function, "__module__", None) or "").split(".")[0]
    return isinstance(function, type) or module in _PURE_MODULES


def _item_type(node: ast.AST) -> str:
    items = getattr(node, "elts", [])
    return CONSTANT if items and all(isinstance(i, ast.Constant) for i in items) else UNKNOWN


def name_of(function: ast.AST) -> str:
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")


def _root(node: ast.AST) -> str:
    while isinstance(node, ast.Attribute):
        node = node.value
    return getattr(node, "id", "")


def _measured(node: ast.AST) -> ast.AST | None:
    """What an expression asks the length of."""
    return node.args[0] if isinstance(node, ast.Call) and name_of(node.func) == "len" and node.args else None


def parameters(function: Any, values: list[Value], has_self: bool) -> dict[str, Value]:
    """The values of a call's arguments, by the names of the parameters."""
    names = [a.arg for a in function.args.args]
    return dict(itertools.islice(zip(names[has_self:], values, strict=False), len(names)))
