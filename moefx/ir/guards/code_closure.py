"""Trace which globals, classes and functions the code of a block reaches."""

from __future__ import annotations

import dis
import functools
import inspect
import sys
import types
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from torch import nn

# Packages whose code and globals count as constant.
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
    """The globals and classes of the user's program that some code reaches, and all names and numbers in that code."""

    globals: list[Global]
    classes: list[type]
    names: frozenset[str]
    numbers: frozenset[float]


def collect_code(block: nn.Module) -> frozenset[Any]:
    """Return the classes of a block and its submodules, and the functions among their instance attributes."""
    kinds = (*FUNCTION_TYPES, functools.partial)
    functions = [v for module in block.modules() for v in vars(module).values() if isinstance(v, kinds)]
    return frozenset([*map(type, block.modules()), *map(unwrap_callable, functions)])


FUNCTION_TYPES = (types.FunctionType, types.MethodType)


def unwrap_callable(value: Any) -> Any:
    """Return the function inside methods and partials. Methods may wrap any callable, such as a partial."""
    while isinstance(value, (types.MethodType, functools.partial)):
        value = value.func if isinstance(value, functools.partial) else value.__func__
    return value


def list_captured_values(value: Any) -> list[Any]:
    """Return the values that a function, method or partial captures: closure variables and bound arguments."""
    if isinstance(value, functools.partial):
        return [value.func, *value.args, *value.keywords.values()]
    if isinstance(value, types.MethodType):
        return list_captured_values(value.__func__)
    if not isinstance(value, types.FunctionType):
        return [value]
    return [cell.cell_contents for cell in value.__closure__ or () if cell != types.CellType()]


def trace_closure(code: Iterable[Any]) -> CodeClosure:
    """Follow the names in classes and functions to the functions, classes and modules that these names refer to."""
    classes: list[type] = []
    globals_by_name: dict[tuple[str, str], Global] = {}
    all_names: set[str] = set()
    numbers: set[float] = set()
    pending: list[Any] = [c for obj in code for c in (obj.__mro__ if isinstance(obj, type) else [obj])]
    seen: set[int] = set()
    while pending:
        obj = pending.pop()
        if id(obj) in seen or not is_user_code(obj):
            continue
        seen.add(id(obj))
        if isinstance(obj, type):
            classes.append(obj)
            pending += [*obj.__mro__[1:], *[_unwrap_member(v) for v in vars(obj).values()]]
            continue
        obj = inspect.unwrap(obj) if callable(obj) else obj
        if not isinstance(obj, types.FunctionType):
            continue
        codes = list(_with_nested(obj.__code__))
        names = frozenset(name for code in codes for name in code.co_names)
        all_names |= names
        numbers |= {n for code in codes for c in code.co_consts for n in _numbers(c)}
        for value in _list_defaults_and_closure(obj):
            numbers |= {*_numbers(value)}
            pending.append(value if isinstance(value, (type, types.FunctionType)) else type(value))
        for entry in _iter_globals(obj.__globals__, frozenset().union(*map(_global_names, codes)), names):
            globals_by_name[entry.module, entry.name] = entry
            numbers |= {*_numbers(entry.value)}
            pending.append(entry.value if isinstance(entry.value, (type, types.FunctionType)) else type(entry.value))
    return CodeClosure(list(globals_by_name.values()), classes, frozenset(all_names), frozenset(numbers))


def _iter_globals(
    function_globals: dict[str, Any], names: frozenset[str], attributes: frozenset[str]
) -> Iterator[Global]:
    """Yield the globals that a function names, and the attributes that it names of modules among these globals."""
    pending, seen = [(function_globals, names)], {id(function_globals)}
    while pending:
        namespace, wanted_names = pending.pop()
        for name in wanted_names & namespace.keys():
            value = namespace[name]
            if not isinstance(value, types.ModuleType):
                yield Global(namespace.get("__name__", ""), namespace, name)
            elif _is_user_module(value.__name__) and id(vars(value)) not in seen:
                seen.add(id(vars(value)))
                pending.append((vars(value), attributes))


@functools.lru_cache(maxsize=4096)
def _global_names(code: types.CodeType) -> frozenset[str]:
    """Return the names that code looks up among the globals, which `scale` in `self.scale` is not."""
    return frozenset(i.argval for i in dis.get_instructions(code) if "GLOBAL" in i.opname or i.opname == "LOAD_NAME")


def is_user_code(obj: Any) -> bool:
    """Return whether a class or function belongs to the user's program, not to a library."""
    return _is_user_module(getattr(obj, "__module__", None) or "builtins")


def _is_user_module(name: str) -> bool:
    return name.split(".")[0] not in LIBRARIES | sys.stdlib_module_names


def _unwrap_member(member: Any) -> Any:
    """Return the function of a property, class method or static method; other members as they are."""
    return getattr(member, "fget", None) or getattr(member, "__func__", member)


def _list_defaults_and_closure(function: types.FunctionType) -> list[Any]:
    return [*list_captured_values(function), *(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]


def _numbers(value: Any) -> list[float]:
    """Return the number itself, or the numbers in a container."""
    values = value if type(value) in (tuple, frozenset, list, set) else (value,)
    return [n for n in values if type(n) in (int, float)]


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
