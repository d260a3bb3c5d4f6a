"""Refuse programs that decide in Python by which experts have no tokens, beyond skipping these experts.

The tracer logs where the program tests whether an expert has rows, and where lists have a length from the routing.
`check_emptiness_tests` follows these outcomes through the user's functions (see `idle_flow`). Python may count them and
decide by the count, and captures under other routings may all miss the other decision.
"""

from __future__ import annotations

import ast
import functools
import linecache
import types
from collections.abc import Mapping
from typing import Any

from torch import nn

from ...errors import Refused
from ...util.user_code import is_user_file
from ..environment.code_locations import Source, find_user_opcode, iterate_user_frames
from .idle_calls import CONTAINERS
from .idle_flow import Flow, bind_parameters
from .idle_names import name_of
from .idle_values import DecidedBy, Kind, Type, Value

# Kinds of emptiness tests. BOOLEAN: a boolean tells whether an expert has tokens. TRUTH: the truth of a number or
# tensor tells it. ROWS: a list or a loop is as long as an expert's rows. KEYS: a routed number is the key of a
# container, or the number of iterations of a loop. LOADS: Python compares a load, and captures show both outcomes.
BOOLEAN, TRUTH, ROWS, KEYS, LOADS = "boolean", "truth", "rows", "keys", "loads"
_MAX_ROUNDS = 12
_MAX_SNAPSHOTS = 3  # of the names at one location
_JUMPS = ("POP_JUMP", "JUMP_IF", "TO_BOOL", "UNARY_NOT")
_Calls = tuple[Source, ...]


class EmptinessTests:
    """The tests whether experts have tokens, in one or several captures.

    Attributes:
        sites: the call stacks, innermost location first, each with the kind of test. An ordered set.
        names: the local and global variables of functions at these locations.
        errors: the call stacks in which torch raised an error that the program caught, and whether the number of rows
            of an argument follows from the routing.
    """

    def __init__(self) -> None:
        self.sites: dict[tuple[_Calls, str], None] = {}
        self.errors: dict[_Calls, bool] = {}
        self.names: dict[Source, list[tuple[dict[str, Any], dict[str, Any]]]] = {}

    def log(self, kind: str) -> None:
        """Log that the code of the user makes a test now."""
        frames = [*iterate_user_frames()]
        if not frames:
            return
        if kind == BOOLEAN and find_user_opcode().startswith(_JUMPS):
            kind = TRUTH
        self.sites[tuple(source for source, _ in frames), kind] = None
        for source, frame in frames:
            if len(snapshots := self.names.setdefault(source, [])) < _MAX_SNAPSHOTS:
                snapshots.append((frame.f_locals.copy(), frame.f_globals))

    def add(self, other: EmptinessTests) -> None:
        self.sites |= other.sites
        self.errors |= {calls: rows for calls, rows in other.errors.items() if calls not in self.errors or rows}
        for source, others in other.names.items():
            snapshots = self.names.setdefault(source, [])
            snapshots += others[: max(0, 2 * _MAX_SNAPSHOTS - len(snapshots))]


class _Code:
    """The syntax tree of a file.

    Attributes:
        owner: the function that contains an expression or statement.
        at: expressions and statements by their first and last line, first and last column.
        functions: definitions by their first line.
    """

    def __init__(self, tree: ast.Module):
        self.owner: dict[ast.AST, ast.AST] = {}
        self.at: dict[tuple[int, int, int, int], Any] = {}
        self.functions: dict[int, list[ast.AST]] = {}
        stack: list[tuple[ast.AST, ast.AST]] = [(tree, tree)]
        while stack:
            node, owner = stack.pop()
            if isinstance(node, (ast.expr, ast.stmt)):
                self.owner[node] = owner
                span = node.lineno, node.end_lineno or 0, node.col_offset, node.end_col_offset or 0
                if isinstance(node, ast.expr) or span not in self.at:
                    self.at[span] = node
            inner: list[ast.AST] = []  # defaults and decorators run in the outer function
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                first = min([node.lineno, *[d.lineno for d in node.decorator_list]])
                self.functions.setdefault(first, []).append(node)
                inner = [*node.body]
            if isinstance(node, ast.Lambda):
                self.functions.setdefault(node.lineno, []).append(node)
                inner = [node.body]
            stack += [(child, node if child in inner else owner) for child in ast.iter_child_nodes(node)]

    def events(self, source: Source, kind: str) -> dict[ast.expr, Value]:
        """Return the expressions that a frame evaluated, with their values.

        Some versions of Python report only the statement of a test, and Python 3.10 only its line. Then return all
        expressions there that may be tests.
        """
        if source.where is not None:
            return _list_events(self.at.get(source.where), kind)
        nodes = [n for n in self.at.values() if n.lineno <= source.line <= (n.end_lineno or 0)]
        return {
            k: v
            for n in nodes
            if isinstance(n, _TEST_NODES) or kind not in (BOOLEAN, LOADS)
            for k, v in _list_events(n, kind).items()
        }

    def expression(self, source: Source) -> ast.expr | None:
        """Return the expression in which a frame called another function, such as a call or the iterable of a loop."""
        node = self.at.get(source.where) if source.where is not None else None
        if source.where is None:
            calls = [n for n in self.at.values() if isinstance(n, ast.Call) and n.lineno == source.line]
            node = calls[0] if calls else None
        return node.iter if isinstance(node, (ast.For, ast.AsyncFor)) else node if isinstance(node, ast.expr) else None


_TEST_NODES = (ast.Compare, ast.Call)
_KEYED_CALLS = {
    "set", "frozenset", "dict", "Counter", "fromkeys", "range", "groupby", "OrderedDict", "repeat", "islice",
}  # fmt: skip
_KEYED_FILLS = {"add", "setdefault", "update", "append", "insert"}
_LOOKUPS = {"get", "pop", "discard", *_KEYED_CALLS, *_KEYED_FILLS} - {"groupby"}


def _list_events(node: ast.AST | None, kind: str) -> dict[ast.expr, Value]:
    if node is None:
        return {}
    if kind == TRUTH:
        nodes = _list_tests(node) or ([node] if isinstance(node, ast.expr) else [])
        return dict.fromkeys(nodes, Value(Kind.TRUTH))
    container = Value(Kind.CONTAINER, Type.CONSTANT if kind == KEYS else Type.UNKNOWN)
    if isinstance(node, (ast.For, ast.AsyncFor)):
        return {node.iter: container}
    if isinstance(node, _COMPREHENSIONS) and kind != KEYS:
        return {g.iter: container for g in node.generators}
    function_name = _called_name(node)
    if kind == KEYS:
        is_kept = isinstance(node, (ast.SetComp, ast.DictComp, ast.Set, ast.Dict)) or function_name in _KEYED_CALLS
        is_filled = isinstance(node, ast.Subscript) or function_name in _KEYED_FILLS
        return {node: container} if is_kept else {node: Value(Kind.ROUTED_KEY)} if is_filled else {}  # type: ignore[dict-item]
    if (
        isinstance(node, ast.Subscript)
        or (kind in (BOOLEAN, LOADS) and function_name in _LOOKUPS)
        or not isinstance(node, ast.expr)
    ):
        return {}
    outcome = Kind.LOAD if kind == LOADS and isinstance(node, ast.Compare) else Kind.OUTCOME
    return {node: container if kind == ROWS or function_name == "groupby" else Value(outcome, Type.CONSTANT)}


_COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.GeneratorExp, ast.DictComp)


def _called_name(node: ast.AST | None) -> str:
    return name_of(node.func) if isinstance(node, ast.Call) else ""


def _list_tests(node: ast.AST) -> list[ast.expr]:
    """Return the operands of `not`, `and` and `or` whose truth a statement or an expression tests."""
    if isinstance(node, ast.BoolOp):
        return [leaf for v in node.values for leaf in _list_tests(v) or [v]]
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        return _list_tests(node.operand) or [node.operand]
    if isinstance(node, (ast.If, ast.While, ast.IfExp, ast.Assert)):
        return _list_tests(node.test) or [node.test]
    if isinstance(node, _COMPREHENSIONS):
        return [leaf for g in node.generators for v in g.ifs for leaf in _list_tests(v) or [v]]
    return []


@functools.lru_cache(maxsize=256)
def _parse(text: str) -> _Code | None:
    """Parse the text of a file, or return None. Another notebook cell of the same name has another text."""
    try:
        return _Code(ast.parse(text))
    except (SyntaxError, ValueError):
        return None


def _code(file: str) -> _Code | None:
    lines = linecache.getlines(file)
    return _parse("".join(lines)) if lines else None


class _Analysis:
    """The analysis of all functions of a program that test which experts have tokens.

    Attributes:
        events: for each function, the values of emptiness tests.
        escapes: expressions by which the program decides more than to skip an expert, with their file.
    """

    def __init__(self, emptiness_tests: EmptinessTests):
        self.emptiness_tests = emptiness_tests
        self.events: dict[ast.AST, dict[ast.AST, Value]] = {}
        self.files: dict[ast.AST, str] = {}
        self.escapes: dict[ast.AST, str] = {}
        self.running: list[ast.AST] = []

    def run(self) -> None:
        for calls, kind in self.emptiness_tests.sites:
            code = self._code(calls[0])
            for node, value in code.events(calls[0], kind).items():
                owner_events = self.events.setdefault(self._owner(code, node, calls[0]), {})
                before = owner_events.get(node)
                # a comparison of a load may also test for any rows: `start < n`, for a start of 0
                if before is None or (kind not in (TRUTH, KEYS) and before.kind is not Kind.LOAD):
                    owner_events[node] = value
        for _ in range(_MAX_ROUNDS):
            before = {owner: dict(events) for owner, events in self.events.items()}
            values = {owner: self._flow(owner, {}) for owner in before}
            for calls, kind in self.emptiness_tests.sites:
                self._propagate(calls, kind, values)
            if self.escapes or before == self.events:
                return

    def _code(self, source: Source) -> _Code:
        if (code := _code(source.file)) is None:
            raise Refused(
                "the block asks which experts have tokens, in code whose source Python does not have",
                source=str(source),
                remedy="define it in a file",
            )
        return code

    def _owner(self, code: _Code, node: ast.AST, source: Source) -> ast.AST:
        self.files[owner := code.owner[node]] = source.file
        return owner

    def _propagate(self, calls: _Calls, kind: str, value_by_owner: Mapping[ast.AST, Value]) -> None:
        """Give the callers of a function its returned value, if it depends on an outcome."""
        test = next(iter(self._code(calls[0]).events(calls[0], kind)), None)
        if test is None:
            return
        inner = self._owner(self._code(calls[0]), test, calls[0])
        for source in calls[1:]:
            code = self._code(source)
            node = code.expression(source)
            outer = self._owner(code, node, source) if node is not None else None
            if outer is inner and not _is_call_of(node, inner):
                continue  # a comprehension has a frame of its own
            value = value_by_owner.get(inner)
            if value is not None and _depends(value):
                if node is None or outer is None:
                    self.escapes.setdefault(inner, "returns")
                    return
                value = value._replace(stamp=frozenset())
                if isinstance(inner, ast.Lambda) and _called_name(node) in CONTAINERS:
                    value = Value(Kind.CONTAINER, Type.CONSTANT)  # an item or none for each outcome
                self.events.setdefault(outer, {})[node] = value
            if outer is None:
                return
            inner = outer
        if (value := value_by_owner.get(inner)) is not None and _is_remembered(value):
            self.escapes.setdefault(inner, "returns")

    def _flow(
        self,
        function: ast.AST,
        arguments: Mapping[str, Value],
        decided_by: DecidedBy = DecidedBy.NOTHING,
        callee: types.FunctionType | None = None,
        owner: Any = None,
    ) -> Value:
        names: dict[str, list[Any]] = {}
        globals_: dict[str, Any] = {}
        if callee is not None:  # captures may not have recorded its globals and closure
            code, cells = callee.__code__, callee.__closure__ or ()
            globals_ = callee.__globals__
            closure = zip(code.co_freevars, cells, strict=True)
            names = {name: [cell.cell_contents] for name, cell in closure if cell != types.CellType()}
            if owner is not None:
                names[code.co_varnames[0]] = [owner]
        for source, snapshots in self.emptiness_tests.names.items():
            if source.file == self.files.get(function) and _is_inside_function(source, function):
                for bindings, outer in snapshots:
                    for name, bound_value in bindings.items():
                        names.setdefault(name, []).append(bound_value)
                    globals_ = outer
        flow = Flow(self.events.get(function, {}), names, globals_, self._call)
        flow.tested = decided_by
        self.running.append(function)
        value = flow.run(function, arguments)
        self.running.pop()
        for node in flow.escapes:
            self.escapes.setdefault(node, self.files.get(function, "?"))
        return value

    def _call(
        self, function: Any, values: list[Value], decided_by: DecidedBy, env: Mapping[str, Value]
    ) -> Value | None:
        """Return the value of a call of a user's function; None if its source is unknown."""
        owner = function if isinstance(function, nn.Module) else getattr(function, "__self__", None)
        has_self = isinstance(function, (nn.Module, types.MethodType))
        if isinstance(function, nn.Module):
            function = type(function).forward
        function = getattr(function, "__func__", function)
        if not isinstance(function, types.FunctionType) or not is_user_file(function.__code__.co_filename):
            return None
        code = _code(file := function.__code__.co_filename)
        nodes = code.functions.get(function.__code__.co_firstlineno, []) if code is not None else []
        nodes = [node for node in nodes if _is_definition(node, function.__code__)]
        if len(nodes) != 1 or nodes[0] in self.running:
            return None
        self.files[nodes[0]] = file
        arguments = bind_parameters(nodes[0], values, has_self)
        is_nested = bool(self.running) and any(nodes[0] is inner for inner in ast.walk(self.running[-1]))
        return self._flow(nodes[0], {**env, **arguments} if is_nested else arguments, decided_by, function, owner)


def _is_definition(node: Any, code: types.CodeType) -> bool:
    """Return whether a definition belongs to a code object with the same first line; a line may have several
    lambdas."""
    names = [a.arg for a in (*node.args.posonlyargs, *node.args.args)]
    return getattr(node, "name", "<lambda>") == code.co_name and names == [*code.co_varnames[: code.co_argcount]]


def _is_inside_function(source: Source, function: ast.AST) -> bool:
    return isinstance(function, ast.Module) or function.lineno <= source.line <= function.end_lineno  # type: ignore


def _depends(value: Value) -> bool:
    return bool(value.kind) or any(_depends(part) for part in value.parts)


def _is_remembered(value: Value) -> bool:
    """Return whether a returned value tells the caller of the block which experts have tokens."""
    if value.parts:
        return any(map(_is_remembered, value.parts))
    return value.kind not in (Kind.INDEPENDENT, Kind.OPTIONAL_TENSOR) and (
        value.kind is not Kind.CONTAINER or value.type is Type.CONSTANT
    )


def _is_call_of(call: ast.AST | None, function: ast.AST) -> bool:
    """Return whether a call's name is that of a function."""
    return _called_name(call) == getattr(function, "name", "")


def check_emptiness_tests(emptiness_tests: EmptinessTests) -> None:
    """Check that the program only skips experts by these outcomes.

    Raises:
        Refused: it decides more by them, which other captures may miss.
    """
    for calls in (calls for calls, depends_on_rows in emptiness_tests.errors.items() if depends_on_rows and calls):
        raise Refused(
            f"torch raises an error for some numbers of tokens, which the program catches: {calls[0].text}",
            source=str(calls[0]),
            remedy="test the number of rows instead, or treat all numbers alike",
        )
    analysis = _Analysis(emptiness_tests)
    analysis.run()
    for node, file in analysis.escapes.items():
        if file == "returns":
            calls = next(iter(emptiness_tests.sites))[0]
            raise Refused(
                "the block returns in Python which experts have tokens, or how many of them",
                source=str(calls[0]),
                remedy="return it as a tensor that torch computes from the routing",
            )
        line = node.lineno  # type: ignore[attr-defined]
        raise Refused(
            "Python code of the block depends on which experts have tokens, or compares activations: "
            + linecache.getline(file, line).strip(),
            source=f"{file.rsplit('/', 1)[-1]}:{line}",
            remedy="leave the decision out, or make it with torch operations on the routing; run a loop a fixed number "
            "of times",
        )


__all__ = ["BOOLEAN", "ROWS", "EmptinessTests", "check_emptiness_tests"]
