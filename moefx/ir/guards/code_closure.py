"""What the code of a block names, from outside: globals, through the functions and classes that it uses."""

from __future__ import annotations

import dis
import functools
import inspect
import sys
import types
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from torch import nn

# what is no part of the user's program, and is taken to stay as it is
LIBRARIES = {"torch", "builtins", "transformers", "typing", "collections", "functools", "moefx", "numpy"}


class Global(NamedTuple):
    """A name of a Python module that the code uses."""

    module: str
    namespace: dict[str, Any]
    name: str

    @property
    def value(self) -> Any:
        return self.namespace.get(self.name)


class CodeClosure(NamedTuple):
    """What some code leads to: globals and classes of the user's, and all names and numbers in it."""

    globals: list[Global]
    classes: list[type]
    names: frozenset[str]
    numbers: frozenset[float]


def collect_code(block: nn.Module) -> frozenset[Any]:
    """Its classes, those of its parts, and the functions that hang on them."""
    kinds = (*FUNCTION_TYPES, functools.partial)
    own = [v for module in block.modules() for v in vars(module).values() if isinstance(v, kinds)]
    return frozenset([*map(type, block.modules()), *map(unwrap_callable, own)])


FUNCTION_TYPES = (types.FunctionType, types.MethodType)


def unwrap_callable(value: Any) -> Any:
    """The function of a method or of a partial. A method may be of any callable, such as a partial."""
    while isinstance(value, (types.MethodType, functools.partial)):
        value = value.func if isinstance(value, functools.partial) else value.__func__
    return value


def list_captured_values(value: Any) -> list[Any]:
    """What a function, a method or a partial has in it: variables of the code around it, and bound arguments."""
    if isinstance(value, functools.partial):
        return [value.func, *value.args, *value.keywords.values()]
    if isinstance(value, types.MethodType):
        return list_captured_values(value.__func__)
    if not isinstance(value, types.FunctionType):
        return [value]
    return [cell.cell_contents for cell in value.__closure__ or () if cell != types.CellType()]


def trace_closure(code: Iterable[Any]) -> CodeClosure:
    """What these classes and functions name, and the functions, classes and modules that they name."""
    users: list[type] = []
    found: dict[tuple[str, str], Global] = {}
    every: set[str] = set()
    numbers: set[float] = set()
    todo: list[Any] = [c for thing in code for c in (thing.__mro__ if isinstance(thing, type) else [thing])]
    seen: set[int] = set()
    while todo:
        thing = todo.pop()
        if id(thing) in seen or not is_user_code(thing):
            continue
        seen.add(id(thing))
        if isinstance(thing, type):
            users.append(thing)
            todo += [*thing.__mro__[1:], *[_function(v) for v in vars(thing).values()]]
            continue
        thing = inspect.unwrap(thing) if callable(thing) else thing
        if not isinstance(thing, types.FunctionType):
            continue
        codes = list(_with_nested(thing.__code__))
        names = frozenset(name for code in codes for name in code.co_names)
        every |= names
        numbers |= {n for code in codes for c in code.co_consts for n in _numbers(c)}
        for value in _closed_over(thing):
            numbers |= {*_numbers(value)}
            todo.append(value if isinstance(value, (type, types.FunctionType)) else type(value))
        for one in _globals(thing.__globals__, frozenset().union(*map(_from_globals, codes)), names):
            found[one.module, one.name] = one
            numbers |= {*_numbers(one.value)}
            todo.append(one.value if isinstance(one.value, (type, types.FunctionType)) else type(one.value))
    return CodeClosure(list(found.values()), users, frozenset(every), frozenset(numbers))


def _globals(own: dict[str, Any], names: frozenset[str], attributes: frozenset[str]) -> Iterator[Global]:
    """What a function names of its globals, and as attributes of modules among them."""
    todo, seen = [(own, names)], {id(own)}
    while todo:
        space, asked = todo.pop()
        for name in asked & space.keys():
            value = space[name]
            if not isinstance(value, types.ModuleType):
                yield Global(space.get("__name__", ""), space, name)
            elif _of_user(value.__name__) and id(vars(value)) not in seen:
                seen.add(id(vars(value)))
                todo.append((vars(value), attributes))


@functools.lru_cache(maxsize=4096)
def _from_globals(code: types.CodeType) -> frozenset[str]:
    """Names that are looked up among the globals: `self.scale` says nothing of a `scale` there."""
    return frozenset(i.argval for i in dis.get_instructions(code) if "GLOBAL" in i.opname or i.opname == "LOAD_NAME")


def is_user_code(thing: Any) -> bool:
    """Whether a class or a function is of the user's program, not of a library that it stands on."""
    return _of_user(getattr(thing, "__module__", None) or "builtins")


def _of_user(name: str) -> bool:
    return name.split(".")[0] not in LIBRARIES | sys.stdlib_module_names


def _function(member: Any) -> Any:
    """Of a class: of a property and of a class or static method, the function."""
    return getattr(member, "fget", None) or getattr(member, "__func__", member)


def _closed_over(function: types.FunctionType) -> list[Any]:
    """What a function has from where it was made: variables of the code around it, and defaults."""
    return [*list_captured_values(function), *(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]


def _numbers(value: Any) -> list[float]:
    """Those that a value is, or has in it."""
    several = value if type(value) in (tuple, frozenset, list, set) else (value,)
    return [n for n in several if type(n) in (int, float)]


def _with_nested(code: types.CodeType) -> Iterator[types.CodeType]:
    yield code
    for inner in code.co_consts:
        if isinstance(inner, types.CodeType):
            yield from _with_nested(inner)


__all__ = [
    "FUNCTION_TYPES",
    "LIBRARIES",
    "CodeClosure",
    "Global",
    "collect_code",
    "is_user_code",
    "list_captured_values",
    "trace_closure",
    "unwrap_callable",
]
