"""Plain attributes and globals that a forward reads: a scale, how many experts a token gets, a flag in a configuration.

A capture bakes their values into the graph. So what was read is noted, and the rewrite holds while it is unchanged.
"""

from __future__ import annotations

import contextlib
import enum
import functools
import inspect
import sys
import types
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import nn

OWN = {*vars(nn.Module()), "_compiled_call_impl", "forward"}  # what torch itself keeps, and guards elsewhere
_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, enum.Enum, slice, range)


class Missing(enum.Enum):
    """The value of an attribute that is not there; code may ask whether it is."""

    MISSING = "missing"


_MISSING = Missing.MISSING


class Where(NamedTuple):
    """An attribute of a submodule, or of an object (a configuration) that hangs there; or a global of a Python module,
    whose name then stands behind an `@`."""

    module: str
    name: str
    inner: str = ""

    def __str__(self) -> str:
        return ".".join(filter(None, self)).removeprefix("@")


def attributes(block: nn.Module) -> dict[Where, Any]:
    """The attributes of a block, of its submodules and of the objects that they hold, by where they are."""
    found: dict[Where, Any] = {}
    for path, module in block.named_modules():
        for name, value in _attributes_of(module).items():
            if isinstance(value, nn.Module) or (name in OWN and not (name == "training" and path)):
                continue  # the block's own mode is a matter of the specialisation
            found[Where(path, name)] = value
            if not is_plain(value) and not isinstance(value, torch.Tensor) and hasattr(value, "__dict__"):
                found |= {Where(path, name, k): v for k, v in _attributes_of(value).items()}
    return found


def globals_of(block: nn.Module) -> dict[Where, Any]:
    """Plain globals that the code of a block names: its own classes, and the functions and classes that these name."""
    found: dict[Where, Any] = {}
    todo: list[Any] = list({type(module) for module in block.modules()})
    seen: set[int] = set()
    while todo:
        thing = todo.pop()
        if id(thing) in seen or (getattr(thing, "__module__", None) or "torch").split(".")[0] in OTHERS:
            continue
        seen.add(id(thing))
        if isinstance(thing, type):
            todo += [*thing.__mro__[1:], *[getattr(v, "fget", v) for v in vars(thing).values()]]
            continue
        thing = inspect.unwrap(thing) if callable(thing) else thing
        if not isinstance(thing, types.FunctionType) or thing.__module__ not in sys.modules:
            continue
        names = names_in(thing.__code__)
        for name in names & thing.__globals__.keys():
            value = thing.__globals__[name]
            if isinstance(value, (types.FunctionType, type)):
                todo.append(value)
            elif is_plain(value) and not callable(value):
                found[Where(f"@{thing.__module__}", name)] = value
            elif (getattr(value, "__module__", None) or "").split(".")[0] not in OTHERS and hasattr(value, "__dict__"):
                inner = {k: v for k, v in vars(value).items() if k in names and is_plain(v) and not callable(v)}
                found |= {Where(f"@{thing.__module__}", name, k): v for k, v in inner.items()}
    return found


OTHERS = {"torch", "builtins", "transformers", "typing", "collections", "functools", "moefx", "numpy"}


def names_in(code: types.CodeType) -> set[str]:
    nested = [names_in(c) for c in code.co_consts if isinstance(c, types.CodeType)]
    return set(code.co_names).union(*nested)


def value_at(block: nn.Module, where: Where) -> Any:
    """The value of an attribute now; something equal to nothing where it is gone."""
    owner = owner_of(block, where)
    return getattr(owner, where.inner or where.name, _MISSING)


def unchanged(value: Any) -> Any:
    """A value that a later change of the container does not reach."""
    if isinstance(value, Mapping):
        return {k: unchanged(v) for k, v in value.items()}
    return type(value)(map(unchanged, value)) if type(value) in (list, set, tuple) else value


def same(a: Any, b: Any) -> bool:
    if a is b:
        return True
    if isinstance(a, Mapping) and isinstance(b, Mapping):  # the copy of one is a dict
        return a.keys() == b.keys() and all(same(v, b[k]) for k, v in a.items())
    if type(a) is not type(b):
        return False
    try:
        if isinstance(a, torch.Tensor):
            return a.shape == b.shape and not a.is_meta and bool(torch.equal(a, b))
        if isinstance(a, functools.partial):  # compares by identity
            return same(a.func, b.func) and same(a.args, b.args) and same(a.keywords, b.keywords)
        return bool(a == b)
    except Exception:
        return False


@contextlib.contextmanager
def reading(block: nn.Module, watched: Iterable[Where]) -> Iterator[set[Where]]:
    """Note which of these attributes are read while the context is open: a data descriptor on the class comes before
    the instance."""
    read: set[Where] = set()
    by_class: dict[tuple[type, str], dict[int, Where]] = {}
    for where in watched:
        owner = owner_of(block, where)
        by_class.setdefault((type(owner), where.inner or where.name), {})[id(owner)] = where
    with contextlib.ExitStack() as stack:
        for (cls, name), places in by_class.items():
            before = vars(cls).get(name, _MISSING)
            if before is not _MISSING and not is_plain(before):  # the class itself may need it
                read |= set(places.values())
                continue
            try:
                setattr(cls, name, _noting(cls, name, places, read))
            except (TypeError, AttributeError):  # a class of C's: all of it may be read
                read |= set(places.values())
                continue
            if before is _MISSING:
                stack.callback(delattr, cls, name)
            else:
                stack.callback(setattr, cls, name, before)
        stack.enter_context(_noting_missing(block, read))
        yield read


@contextlib.contextmanager
def _noting_missing(block: nn.Module, read: set[Where]) -> Iterator[None]:
    """Attributes that the code asks for and that are not there: `getattr(self, "scale", 1.0)`."""
    paths = {id(m): path for path, m in block.named_modules()}
    original = nn.Module.__getattr__

    def get(self: nn.Module, name: str) -> Any:
        try:
            return original(self, name)
        except AttributeError:
            if id(self) in paths and not name.startswith("_"):
                read.add(Where(paths[id(self)], name))
            raise

    nn.Module.__getattr__ = get  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Module.__getattr__ = original  # type: ignore[method-assign]


def _noting(cls: type, name: str, places: dict[int, Where], read: set[Where]) -> property:
    default = getattr(cls, name, _MISSING)

    def get(self: Any) -> Any:
        if id(self) in places:
            read.add(places[id(self)])
        value = vars(self).get(name, default)
        if value is _MISSING:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return value

    return property(
        get, lambda self, value: vars(self).__setitem__(name, value), lambda self: vars(self).__delitem__(name)
    )


def owner_of(block: nn.Module, where: Where) -> Any:
    """The object that holds an attribute; None if it is gone."""
    if where.module.startswith("@"):
        python = sys.modules.get(where.module[1:])
        return getattr(python, where.name, None) if where.inner else python
    module = block.get_submodule(where.module)
    return getattr(module, where.name, None) if where.inner else module


def _attributes_of(thing: Any) -> dict[str, Any]:
    """Of the instance, and what its own classes say for all instances; torch's classes hold constants."""
    shared: dict[str, Any] = {}
    for cls in reversed(type(thing).__mro__):
        if not cls.__module__.startswith(("torch.", "builtins")):
            shared |= {k: v for k, v in vars(cls).items() if not k.startswith("__") and isinstance(v, _PLAIN)}
    return {**shared, **vars(thing)}


def is_plain(value: Any, depth: int = 2) -> bool:
    """Whether a value can be compared: numbers, names and their containers, and functions by identity."""
    if isinstance(value, _PLAIN) or (callable(value) and not isinstance(value, nn.Module)):
        return True
    if depth and isinstance(value, (list, tuple, set, dict)) and len(value) <= 256:
        items = [*value, *value.values()] if isinstance(value, dict) else value
        return all(is_plain(v, depth - 1) for v in items)
    return False


__all__ = [
    "OTHERS", "OWN", "Where", "attributes", "globals_of", "is_plain", "names_in", "owner_of", "reading", "same",
    "unchanged", "value_at",
]  # fmt: skip
