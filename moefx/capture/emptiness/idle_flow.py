"""Follow emptiness tests through a user's function with an abstract interpreter.

A program may skip an expert that has no tokens. It must not compute anything else from which experts are empty:
captures may all miss that branch. The interpreter runs the syntax tree on `Value`s that record whether a name depends
on the outcome of an emptiness test.

Inside a branch on such an outcome, the program may store tensors and append to lists. It may iterate over these lists
and pass them to torch. A plain number that it assigns there depends on the outcome afterwards, and using that number is
refused.

Comparisons of a load are an exception, because captures show both outcomes (see `matching.probes.load_comparisons`).
Their results may be used within the same loop iteration (`Kind.LOAD`); in the next iteration they count as outcomes.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import itertools
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from .idle_calls import belongs_to_torch
from .idle_expressions import Expressions
from .idle_names import root_name
from .idle_values import DecidedBy, Env, Kind, Type, Value

_MAX_PASSES = 6  # over a loop's body


class Flow(Expressions):
    """Runs the statements of one function, for all outcomes."""

    def run(self, function: Any, values: Mapping[str, Value]) -> Value:
        self.function_name = getattr(function, "name", "")
        arguments = getattr(function, "args", None)  # None for a module
        self.owner_name = arguments.args[0].arg if arguments is not None and arguments.args else ""
        if isinstance(function, ast.Lambda):
            return self.value(function.body, dict(values))
        env = self.run_statements(function.body, dict(values))
        if env is not None and self.returns:
            self.returns.append((Value(type=Type.NONE), self.tested))
        if not self.returns:
            return Value(type=Type.NONE)
        decided_by = max(decided_by for _, decided_by in self.returns)
        value = functools.reduce(lambda a, b: a.join(b, decided_by), [v for v, _ in self.returns])
        is_generator = any(isinstance(node, (ast.Yield, ast.YieldFrom)) for node in ast.walk(function))
        return value._replace(type=Type.UNKNOWN) if is_generator and not value.kind else value

    # ------------------------------------------------------------------ statements
    def run_statements(self, statements: Iterable[ast.stmt], env: Env | None) -> Env | None:
        """Run statements in turn. Returns None if the end is unreachable: `env` is None behind a return or a break."""
        for statement in statements:
            if env is None:
                return None
            if self.raising is not None:
                self.raising.append(dict(env))
            method = getattr(self, f"_{type(statement).__name__.lower()}", None)
            env = method(statement, env) if method else env
        return env

    def _expr(self, s: ast.Expr, env: Env) -> Env:
        self.value(s.value, env)
        if self.tested and not isinstance(s.value, (ast.Call, ast.Await, ast.Yield, ast.Constant)):
            self.report_escape(s)  # an operator of an object may keep its operands
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
        if isinstance(s.target, ast.Name) and (old.kind is Kind.CONTAINER or old.type is Type.LIST):
            if self.tested or new.kind:
                env[s.target.id] = Value(
                    Kind.CONTAINER, new.type if new.kind else _item_type(s.value), frozenset([id(s)])
                )
            return env
        self.store(s.target, self.operation(s, old, new), env, s.value)
        return env

    def _return(self, s: ast.Return, env: Env) -> None:
        value = self.value(s.value, env) if s.value is not None else Value(type=Type.NONE)
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

    def _classdef(self, s: ast.ClassDef, env: Env) -> Env:
        if self.tested or any(node in self.events for node in ast.walk(s)):
            self.report_escape(s)  # a class keeps what its body assigns
        return env

    def _functiondef(self, s: ast.FunctionDef | ast.AsyncFunctionDef, env: Env) -> Env:
        for default in (*s.args.defaults, *s.args.kw_defaults):
            if default is not None and self.value(default, env).kind:
                self.report_escape(default)  # kept until the function is called
        return env

    _asyncfunctiondef = _functiondef

    def _if(self, s: ast.If, env: Env) -> Env | None:
        return self.run_branches(self.test(s.test, env), [s.body, s.orelse], env)

    def _match(self, s: Any, env: Env) -> Env | None:
        guards = [self.test(case.guard, env) for case in s.cases if case.guard is not None]
        decided_by = max([self.test(s.subject, env), *guards])
        return self.run_branches(decided_by, [*[case.body for case in s.cases], []], env)

    def run_branches(self, decided_by: DecidedBy, bodies: list[list[ast.stmt]], env: Env) -> Env | None:
        """Run the alternatives of a test, and join them. Returns None if all ends are unreachable."""
        before = self.tested
        ends = []
        for statements in bodies:
            self.tested = max(before, decided_by)
            ends.append((self.run_statements(statements, dict(env)), self.tested))
        open_ends = [end for end, _ in ends if end is not None]
        # later statements run only if no branch has left the loop or the function by an outcome
        inner = DecidedBy.NOTHING
        if not decided_by:
            inner = max((by for end, by in ends if end is not None), default=DecidedBy.NOTHING)
        self.tested = max(before, inner, decided_by if 0 < len(open_ends) < len(ends) else DecidedBy.NOTHING)
        return functools.reduce(lambda a, b: self.join(a, b, max(decided_by, inner)), open_ends) if open_ends else None

    def _for(self, s: ast.For, env: Env) -> Env | None:
        def start(names: Env) -> DecidedBy:
            return DecidedBy.OUTCOMES if self.bind(s.target, s.iter, names) else DecidedBy.NOTHING

        return self.run_loop(s, env, start)

    _asyncfor = _for

    def _while(self, s: ast.While, env: Env) -> Env | None:
        return self.run_loop(s, env, lambda e: self.test(s.test, e))

    def run_loop(self, loop: Any, env: Env, start: Callable[[Env], DecidedBy]) -> Env | None:
        """Run a loop until its names no longer change. None if the statements behind it are unreachable.

        Args:
            start: begins an iteration; returns the kind of test that decides whether it runs.
        """
        before, outer, head = self.tested, self.exits, env
        is_left = False  # by a break under an outcome
        breaks: list[tuple[Env, DecidedBy]] = []
        for _ in range(_MAX_PASSES):
            self.exits, iteration = [], dict(head)
            decided_by = start(iteration)
            # a loop over one expert's rows stays in its iteration
            end_pass = dict if decided_by is DecidedBy.LOAD else _end_iteration
            self.tested = max(before, decided_by, DecidedBy.OUTCOMES if is_left else DecidedBy.NOTHING)
            end = self.run_statements(loop.body, iteration)
            ends = [(end, self.tested)] if end is not None else []
            ends += [(e, by) for kind, e, by in self.exits if kind == "continue"]
            breaks = [(end_pass(e), by) for kind, e, by in self.exits if kind == "break"]
            is_left = is_left or any(by for _, by in breaks) or self.returned
            outer += [e for e in self.exits if e[0] == "raise"]
            skips = max((by for _, by in ends), default=DecidedBy.NOTHING)
            new = functools.reduce(lambda a, b: self.join(a, b, skips), [e for e, _ in ends]) if ends else head
            new = self.join(head, end_pass(new), DecidedBy.OUTCOMES if is_left else decided_by)
            if new == head:
                break
            head = new
        self.exits, self.tested = outer, max(before, DecidedBy.OUTCOMES if is_left else DecidedBy.NOTHING)
        end = self.run_statements(loop.orelse, dict(head))
        self.tested = DecidedBy.OUTCOMES if self.returned else before
        open_ends = [e for e in (end, *[e for e, _ in breaks]) if e is not None]
        ended_by = DecidedBy.OUTCOMES if is_left else DecidedBy.NOTHING
        return functools.reduce(lambda a, b: self.join(a, b, ended_by), open_ends) if open_ends else None

    def _try(self, statement: ast.Try, env: Env) -> Env | None:
        outer, self.exits, before = self.exits, [], self.tested
        outer_raising, self.raising = self.raising, []
        end = self.run_statements(statement.body, dict(env))
        raising = self.raising if end is None else [*self.raising, end]
        self.raising = None if outer_raising is None else outer_raising + raising
        raised_by = max((by for kind, _, by in self.exits if kind == "raise"), default=DecidedBy.NOTHING)
        self.exits = outer + [e for e in self.exits if e[0] != "raise" or not statement.handlers]
        if end is not None:
            end = self.run_statements(statement.orelse, end)
        ends = [end] if end is not None else []
        for handler in statement.handlers:
            self.tested = max(before, raised_by)
            middle = functools.reduce(lambda a, b: self.join(a, b, raised_by), raising)
            if (handler_end := self.run_statements(handler.body, dict(middle))) is not None:
                ends.append(handler_end)
        self.tested = DecidedBy.OUTCOMES if self.returned else before
        env_after = functools.reduce(lambda a, b: self.join(a, b, raised_by), ends) if ends else None
        if statement.finalbody:
            exits = self.exits[len(outer) :]  # exits run the `finally`, too
            ends = [(e, by) for _, e, by in exits] + ([(env_after, self.tested)] if env_after is not None else [])
            self.tested = max([self.tested, *[by for _, by in ends]])
            env_before = functools.reduce(
                lambda a, b: self.join(a, b, self.tested), [e for e, _ in ends] or [dict(env)]
            )
            env_finally = self.run_statements(statement.finalbody, env_before)
            self.tested = DecidedBy.OUTCOMES if self.returned else before
            if env_finally is None:
                return None
            self.exits[len(outer) :] = [(kind, env_finally, by) for kind, _, by in exits]
            env_after = env_finally if env_after is not None else None
        return env_after

    _trystar = _try

    def _with(self, s: ast.With, env: Env) -> Env | None:
        may_suppress = False
        for item in s.items:
            value = self.value(item.context_expr, env)
            call = item.context_expr
            function = self.object_of(call.func) if isinstance(call, ast.Call) else None
            is_known = belongs_to_torch(function) or function is contextlib.nullcontext or root_name(
                getattr(call, "func", call)) == "torch"  # fmt: skip
            may_suppress = may_suppress or not is_known
            has_tests = any(node in self.events for one in s.body for node in ast.walk(one))
            if value.kind or ((self.tested or has_tests) and not is_known):
                self.report_escape(item.context_expr)
            if item.optional_vars is not None:
                self.store(item.optional_vars, Value(), env, item.context_expr)
        first = len(self.exits)
        end = self.run_statements(s.body, env)
        raised = [names for kind, names, _ in self.exits[first:] if kind == "raise"]
        if end is None and raised and may_suppress:
            return functools.reduce(lambda a, b: self.join(a, b, self.tested), raised)
        return end

    _asyncwith = _with

    def _delete(self, s: ast.Delete, env: Env) -> Env:
        if self.tested:
            self.report_escape(s)
        return env

    def join(self, a: Env, b: Env, decided_by: DecidedBy) -> Env:
        if a is b:
            return a
        joined = {}
        for name in {**a, **b}:
            one, other = a.get(name), b.get(name)
            if one is None or other is None:  # stored in one branch: read there only, or stored before
                one, other = one or self.seen(name), other or self.seen(name)
            joined[name] = one.join(other, decided_by, self.type_seen(name))
        return joined


def _end_iteration(env: Env) -> Env:
    """Return the names for the next expert, where values computed from a load count as outcomes."""
    return {
        name: value._replace(kind=Kind.COMPUTED) if value.kind is Kind.LOAD else value for name, value in env.items()
    }


def _item_type(node: ast.AST) -> Type:
    items = getattr(node, "elts", [])
    return Type.CONSTANT if items and all(isinstance(i, ast.Constant) for i in items) else Type.UNKNOWN


def bind_parameters(function: Any, values: list[Value], has_self: bool) -> dict[str, Value]:
    """Return the values of a call's arguments by parameter. Parameters with defaults may be missing."""
    names = [a.arg for a in function.args.args]
    return dict(itertools.islice(zip(names[has_self:], values, strict=False), len(names)))
