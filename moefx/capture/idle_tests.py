"""What a program makes of the experts that have no tokens, beyond leaving them out.

The tracer notes where a capture asks whether an expert has rows, or makes lists that are as long as the routing says.
`refuse_remembered` follows the outcomes through the user's functions (see `outcome_flow`): Python may count them, and
decide by the count, which no capture under another routing needs to show.
"""

from __future__ import annotations

import ast
import functools
import linecache
import types
from collections.abc import Mapping
from typing import Any

from torch import nn

from ..errors import Refused
from ..util.user_code import is_user_file
from .code_locations import Source, find_user_opcode, iterate_user_frames
from .outcome_expressions import CONTAINERS
from .outcome_flow import Flow, parameters
from .outcome_names import name_of
from .outcome_values import BOX, FREE, LOAD, OPTION, TEST, UNKNOWN, Value

# ASKS: a boolean tells whether an expert has tokens. TRUTH: the truth of a number or a tensor does. ROWS: a list or a
# loop is as long as an expert's rows. KEYS: a number of the routing is the key of a container, or the turns of a loop.
# LOADS: Python compares an expert's load, and captures show both outcomes.
ASKS, TRUTH, ROWS, KEYS, LOADS = "asks", "truth", "rows", "keys", "loads"
_MAX_ROUNDS = 12
_MAX_LOOKS = 3
_JUMPS = ("POP_JUMP", "JUMP_IF", "TO_BOOL", "UNARY_NOT")
_Calls = tuple[Source, ...]


class IdleQuestions:
    """What one capture, or several, asked.

    Attributes:
        sites: by the calls that led there, the innermost first, how it was asked.
        names: what the names of a function, and of its module, held at such a call.
        errors: the calls in which torch raised an error that the program caught, and whether an argument was as long as
            the routing says.
    """

    def __init__(self) -> None:
        self.sites: dict[tuple[_Calls, str], None] = {}
        self.errors: dict[_Calls, bool] = {}
        self.names: dict[Source, list[tuple[dict[str, Any], dict[str, Any]]]] = {}

    def note(self, how: str) -> None:
        """The user's code asks, at this moment."""
        frames = [*iterate_user_frames()]
        if not frames:
            return
        if how == ASKS and find_user_opcode().startswith(_JUMPS):
            how = TRUTH
        self.sites[tuple(source for source, _ in frames), how] = None
        for source, frame in frames:
            if len(known := self.names.setdefault(source, [])) < _MAX_LOOKS:
                known.append((frame.f_locals.copy(), frame.f_globals))

    def add(self, other: IdleQuestions) -> None:
        self.sites |= other.sites
        self.errors |= {calls: of for calls, of in other.errors.items() if calls not in self.errors or of}
        for source, several in other.names.items():
            known = self.names.setdefault(source, [])
            known += several[: max(0, 2 * _MAX_LOOKS - len(known))]


class _Code:
    """The syntax tree of a file.

    Attributes:
        owner: by expression the function that it stands in.
        at: expressions and statements by their first and last line and column.
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
                place = node.lineno, node.end_lineno or 0, node.col_offset, node.end_col_offset or 0
                if isinstance(node, ast.expr) or place not in self.at:
                    self.at[place] = node
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                first = min([node.lineno, *[d.lineno for d in node.decorator_list]])
                self.functions.setdefault(first, []).append(node)
                owner = node
            if isinstance(node, ast.Lambda):
                self.functions.setdefault(node.lineno, []).append(node)
                owner = node
            stack += [(child, owner) for child in ast.iter_child_nodes(node)]

    def events(self, source: Source, how: str) -> dict[ast.expr, Value]:
        """Return the expressions that a frame evaluated, with their values. Some versions of Python report only the
        statement of a test, and Python 3.10 only its line: then return all expressions there that may ask for tokens.
        """
        if source.where is not None:
            return _events(self.at.get(source.where), how)
        nodes = [n for n in self.at.values() if n.lineno <= source.line <= (n.end_lineno or 0)]
        return {
            k: v
            for n in nodes
            if isinstance(n, _ASKING) or how not in (ASKS, LOADS)
            for k, v in _events(n, how).items()
        }

    def expression(self, source: Source) -> ast.expr | None:
        """The call, or the like, that a frame was at which called another function."""
        node = self.at.get(source.where) if source.where is not None else None
        if source.where is None:
            calls = [n for n in self.at.values() if isinstance(n, ast.Call) and n.lineno == source.line]
            node = calls[0] if calls else None
        return node.iter if isinstance(node, (ast.For, ast.AsyncFor)) else node if isinstance(node, ast.expr) else None


_ASKING = (ast.Compare, ast.Call)
_KEYED_CALLS = {
    "set", "frozenset", "dict", "Counter", "fromkeys", "range", "groupby", "OrderedDict", "repeat", "islice",
}  # fmt: skip
_KEYED_FILLS = {"add", "setdefault", "update", "append", "insert"}
_LOOKUPS = {"get", "pop", "discard", *_KEYED_CALLS, *_KEYED_FILLS} - {"groupby"}


def _events(node: ast.AST | None, how: str) -> dict[ast.expr, Value]:
    if node is None:
        return {}
    if how == TRUTH:
        found = _tests(node) or ([node] if isinstance(node, ast.expr) else [])
        return dict.fromkeys(found, Value(TRUTH))
    box = Value(BOX, "constant" if how == KEYS else UNKNOWN)
    if isinstance(node, (ast.For, ast.AsyncFor)):
        return {node.iter: box}
    if isinstance(node, _COMPREHENSIONS) and how != KEYS:
        return {g.iter: box for g in node.generators}
    called = _called(node)
    if how == KEYS:
        is_kept = isinstance(node, (ast.SetComp, ast.DictComp, ast.Set, ast.Dict)) or called in _KEYED_CALLS
        is_filled = isinstance(node, ast.Subscript) or called in _KEYED_FILLS
        return {node: box} if is_kept else {node: Value(KEYS)} if is_filled else {}  # type: ignore[dict-item]
    if (
        isinstance(node, ast.Subscript)
        or (how in (ASKS, LOADS) and called in _LOOKUPS)
        or not isinstance(node, ast.expr)
    ):
        return {}
    kind = LOAD if how == LOADS and isinstance(node, ast.Compare) else TEST
    return {node: box if how == ROWS or called == "groupby" else Value(kind, "constant")}


_COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.GeneratorExp, ast.DictComp)


def _called(node: ast.AST | None) -> str:
    return name_of(node.func) if isinstance(node, ast.Call) else ""


def _tests(node: ast.AST) -> list[ast.expr]:
    """The operands of `not`, `and` and `or` whose truth a statement or an expression asks for."""
    if isinstance(node, ast.BoolOp):
        return [leaf for v in node.values for leaf in _tests(v) or [v]]
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        return _tests(node.operand) or [node.operand]
    if isinstance(node, (ast.If, ast.While, ast.IfExp, ast.Assert)):
        return _tests(node.test) or [node.test]
    if isinstance(node, _COMPREHENSIONS):
        return [leaf for g in node.generators for v in g.ifs for leaf in _tests(v) or [v]]
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
    """The functions of a program in which tokens were asked for."""

    def __init__(self, questions: IdleQuestions):
        self.questions = questions
        self.events: dict[ast.AST, dict[ast.AST, Value]] = {}  # by function
        self.files: dict[ast.AST, str] = {}
        self.escapes: dict[ast.AST, str] = {}
        self.running: list[ast.AST] = []

    def run(self) -> None:
        for calls, how in self.questions.sites:
            code = self._code(calls[0])
            for node, value in code.events(calls[0], how).items():
                known = self.events.setdefault(self._owner(code, node, calls[0]), {})
                before = known.get(node)
                # a comparison of a load may ask for any rows, too: `start < n`, for a start of 0
                if before is None or (how not in (TRUTH, KEYS) and before.kind != LOAD):
                    known[node] = value
        for _ in range(_MAX_ROUNDS):
            before = {owner: dict(events) for owner, events in self.events.items()}
            returned = {owner: self._flow(owner, {}) for owner in before}
            for calls, how in self.questions.sites:
                self._hand_on(calls, how, returned)
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

    def _hand_on(self, calls: _Calls, how: str, returned: Mapping[ast.AST, Value]) -> None:
        """What a function gives that depends on an outcome, at the call of it."""
        asked = next(iter(self._code(calls[0]).events(calls[0], how)), None)
        if asked is None:
            return
        inner = self._owner(self._code(calls[0]), asked, calls[0])
        for source in calls[1:]:
            code = self._code(source)
            node = code.expression(source)
            outer = self._owner(code, node, source) if node is not None else None
            if outer is inner and not _names(node, inner):
                continue  # a comprehension has a frame of its own
            value = returned.get(inner)
            if value is not None and _depends(value):
                if node is None or outer is None:
                    self.escapes.setdefault(inner, "returns")
                    return
                value = value._replace(stamp=frozenset())
                if isinstance(inner, ast.Lambda) and _called(node) in CONTAINERS:
                    value = Value(BOX, "constant")  # an item or none for each outcome
                self.events.setdefault(outer, {})[node] = value
            if outer is None:
                return
            inner = outer
        if (value := returned.get(inner)) is not None and _is_remembered(value):
            self.escapes.setdefault(inner, "returns")

    def _flow(
        self,
        function: ast.AST,
        given: Mapping[str, Value],
        tested: int = FREE,
        called: types.FunctionType | None = None,
        owner: Any = None,
    ) -> Value:
        names: dict[str, list[Any]] = {}
        globals_: dict[str, Any] = {}
        if called is not None:  # its globals and closure, which no capture need have recorded
            code, cells = called.__code__, called.__closure__ or ()
            globals_ = called.__globals__
            closure = zip(code.co_freevars, cells, strict=True)
            names = {name: [cell.cell_contents] for name, cell in closure if cell != types.CellType()}
            if owner is not None:
                names[code.co_varnames[0]] = [owner]
        for source, several in self.questions.names.items():
            if source.file == self.files.get(function) and _is_within(source, function):
                for own, outer in several:
                    for name, held in own.items():
                        names.setdefault(name, []).append(held)
                    globals_ = outer
        flow = Flow(self.events.get(function, {}), names, globals_, self._called)
        flow.tested = tested
        self.running.append(function)
        value = flow.run(function, given)
        self.running.pop()
        for node in flow.escapes:
            self.escapes.setdefault(node, self.files.get(function, "?"))
        return value

    def _called(self, function: Any, values: list[Value], tested: int, env: Mapping[str, Value]) -> Value | None:
        """What a function of the user's makes of such values; None if it is not known."""
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
        own = parameters(nodes[0], values, has_self)
        is_nested = bool(self.running) and any(nodes[0] is inner for inner in ast.walk(self.running[-1]))
        return self._flow(nodes[0], {**env, **own} if is_nested else own, tested, function, owner)


def _is_definition(node: Any, code: types.CodeType) -> bool:
    """Whether a definition on the first line of some code is that of the code. Several lambdas may be on one line."""
    names = [a.arg for a in (*node.args.posonlyargs, *node.args.args)]
    return getattr(node, "name", "<lambda>") == code.co_name and names == [*code.co_varnames[: code.co_argcount]]


def _is_within(source: Source, function: ast.AST) -> bool:
    return isinstance(function, ast.Module) or function.lineno <= source.line <= function.end_lineno  # type: ignore


def _depends(value: Value) -> bool:
    return bool(value.kind) or any(_depends(part) for part in value.parts)


def _is_remembered(value: Value) -> bool:
    """Whether who calls the block is told."""
    if value.parts:
        return any(map(_is_remembered, value.parts))
    return value.kind not in ("", OPTION) and (value.kind != BOX or value.type == "constant")


def _names(call: ast.AST | None, function: ast.AST) -> bool:
    """Whether a call is one of the function itself."""
    return _called(call) == getattr(function, "name", "")


def refuse_remembered(questions: IdleQuestions) -> None:
    """Check that the program does nothing with the outcomes but to leave experts out.

    Raises:
        Refused: it decides something else by them, which other captures need not show.
    """
    for calls in (calls for calls, is_of_rows in questions.errors.items() if is_of_rows and calls):
        raise Refused(
            f"torch raises an error for some numbers of tokens, which the program catches: {calls[0].text}",
            source=str(calls[0]),
            remedy="ask for the number of rows instead, or treat all of them alike",
        )
    analysis = _Analysis(questions)
    analysis.run()
    for node, file in analysis.escapes.items():
        if file == "returns":
            calls = next(iter(questions.sites))[0]
            raise Refused(
                "the block returns in Python which experts have tokens, or how many of them",
                source=str(calls[0]),
                remedy="return it as a tensor that torch computes from the routing",
            )
        line = node.lineno  # type: ignore[attr-defined]
        raise Refused(
            f"the block decides in Python by which experts have tokens: {linecache.getline(file, line).strip()}",
            source=f"{file.rsplit('/', 1)[-1]}:{line}",
            remedy="leave the decision out, or make it with torch operations on the routing",
        )


__all__ = ["ASKS", "ROWS", "IdleQuestions", "refuse_remembered"]
