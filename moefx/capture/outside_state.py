"""What a call can change outside of tensors and its modules' attributes: containers and objects that its code reaches.

A list of losses in a manager object, a counter in a global, a cache of positions: a capture must leave them as they
were, and a block that writes to them at every call cannot be replaced by a graph that does not.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import types
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any

import torch
from torch import nn

from ..ir.guards.attribute_reads import MODULE_INTERNALS
from ..ir.guards.code_closure import (
    FUNCTION_TYPES,
    CodeClosure,
    collect_code,
    is_user_code,
    list_captured_values,
    trace_closure,
)
from ..ir.guards.stored_values import is_plain
from ..ir.passed_objects import is_passed
from .raw_containers import (
    SlotAttribute,
    copy_items,
    find_base_type,
    have_same_items,
    list_slots,
    list_values,
    restore_items,
)
from .side_effects import is_random_generator
from .tensor_trees import collect_tensors

# Libraries whose objects hold what users put in.
_HOLDERS = {"argparse", "collections", "queue", "types", "weakref"}
_DEPTH = 3
ARGUMENT = "an argument"
_MOST_ITEMS = 256


class OutsideState:
    """The contents of everything that the code of a block and its arguments reach, as they are now.

    Args:
        without: objects that are left out.

    Attributes:
        generators: those of random numbers among it, by path.
    """

    def __init__(self, block: nn.Module, arguments: Any, without: Iterable[Any] = ()):
        self.generators: dict[str, Any] = {}
        self._seen = {id(module) for module in block.modules()} | {id(thing) for thing in without}
        self._held: list[tuple[str, Any, Any, Callable[[Any], None]]] = []  # path, container, its items, to put back
        for prefix, module in block.named_modules():
            for name, value in vars(module).items():
                if name not in MODULE_INTERNALS:
                    self._visit(f"{prefix}.{name}".lstrip("."), value)
        code = _reached(collect_code(block))
        for namespace in {id(one.namespace): one.namespace for one in code.globals}.values():
            self._hold_new_names(namespace)
        for one in code.globals:
            if one.name in one.namespace:
                path = f"{one.module}.{one.name}"
                self._hold_name(path, one.namespace, one.name)
                self._visit(path, one.value)
        for cls in code.classes:
            self._hold_class(cls)
        self._visit(ARGUMENT, arguments)

    def list_changes(self, but: Collection[int] = ()) -> list[str]:
        """Paths of what is not as it was. Args: but: ids of containers that are left out."""
        return [
            path
            for path, thing, items, _ in self._held
            if id(thing) not in but and not _same(now := _items(thing), items) and not _is_filled_cache(items, now)
        ]

    def restore(self) -> None:
        """Put back what differs; what nobody has written to is not written to here either."""
        for _, thing, items, put in self._held:
            if find_base_type(thing) is not None or isinstance(thing, _NewNames) or not _same(_items(thing), items):
                put(items)  # of a container the order may differ alone

    def _visit(self, path: str, value: Any, depth: int = _DEPTH) -> None:
        if id(value) in self._seen or is_passed(value) or isinstance(value, (torch.Tensor, type, types.ModuleType)):
            return
        if isinstance(value, nn.Module):  # the parent of the block, say, in a list so that it is no part of it
            self._seen.add(id(value))
            self._hold_items(path, vars(value))
            return
        if _is_array(value):
            self._seen.add(id(value))
            self._held.append((path, value, value.copy(), functools.partial(value.__setitem__, ...)))
            return
        if is_random_generator(value):
            self._seen.add(id(value))
            self.generators[path] = value
            return
        inner: list[Any] = []
        if find_base_type(value) is not None:
            self._seen.add(id(value))
            self._hold_items(path, value)
            inner += list_values(value)
        elif isinstance(value, tuple):
            inner += tuple.__iter__(value)
        elif isinstance(value, (*FUNCTION_TYPES, functools.partial)):
            self._seen.add(id(value))
            inner += list_captured_values(value)
        if _holds_attributes(type(value)) or (path == ARGUMENT and _is_of_library(type(value))):
            self._seen.add(id(value))
            inner += self._hold_attributes(path, value)
        if depth and len(inner) <= _MOST_ITEMS:
            for item in inner:
                self._visit(path, item, depth - 1)

    def _hold_items(self, path: str, container: Any) -> None:
        self._held.append((path, container, copy_items(container), functools.partial(restore_items, container)))

    def _hold_attributes(self, path: str, thing: Any) -> list[Any]:
        """Hold the attributes of an object, and return their values."""
        inner: list[Any] = []
        for slot in list_slots(thing):
            self._held.append((path, slot, slot.get(), slot.put))
            inner += slot.get()
        if type(own := getattr(thing, "__dict__", None)) is dict:
            self._hold_items(path, own)
            inner += own.values()
        return inner

    def _hold_new_names(self, namespace: dict[str, Any]) -> None:
        """Hold which globals there are: the code may make one for itself when it is first called."""
        before = frozenset(namespace)
        names = _NewNames(namespace, before)
        self._held.append((namespace.get("__name__", "a global"), names, {}, names.remove))

    def _hold_name(self, path: str, namespace: dict[str, Any], name: str) -> None:
        one = _Name(namespace, name)
        self._held.append((path, one, _items(one), lambda items: namespace.update({name: items[0]})))

    def _hold_class(self, cls: type) -> None:
        def put(items: dict[str, Any]) -> None:
            for name in _items(_Class(cls)).keys() - items.keys():
                type.__delattr__(cls, name)
            for name, value in items.items():
                if vars(cls).get(name) is not value:
                    type.__setattr__(cls, name, value)

        self._held.append((cls.__qualname__, _Class(cls), _items(_Class(cls)), put))
        for name, value in vars(cls).items():
            if not name.startswith("__"):
                self._visit(f"{cls.__qualname__}.{name}", value)


_SHOWN_WARNINGS = "__warningregistry__"


class _Name:
    def __init__(self, namespace: dict[str, Any], name: str):
        self.namespace, self.name = namespace, name


class _Class:
    def __init__(self, cls: type):
        self.cls = cls


class _NewNames:
    """Values that a module has gained as globals; not functions, classes and modules, which are loaded once, nor what
    Python notes of warnings that it has shown."""

    def __init__(self, namespace: dict[str, Any], before: frozenset[str]):
        self.namespace, self.before = namespace, before

    def found(self) -> dict[str, Any]:
        gained = {name: self.namespace[name] for name in self.namespace.keys() - self.before - {_SHOWN_WARNINGS}}
        return {k: v for k, v in gained.items() if not isinstance(v, (type, types.ModuleType, types.FunctionType))}

    def remove(self, _: Any) -> None:
        for name in self.found():
            del self.namespace[name]
        if _SHOWN_WARNINGS not in self.before:  # they are shown again to the user
            self.namespace.pop(_SHOWN_WARNINGS, None)


def _holds_attributes(cls: type) -> bool:
    """Whether the attributes of its instances are the user's."""
    return is_user_code(cls) or cls.__module__.split(".")[0] in _HOLDERS


def _is_of_library(cls: type) -> bool:
    """Whether it is a class of a library that users hand around, such as a model's cache; not of torch or Python."""
    return cls.__module__.split(".")[0] not in {"torch", "moefx", "numpy"} | sys.stdlib_module_names


def _is_array(value: Any) -> bool:
    """Of NumPy, which need not be there."""
    return type(value).__module__ == "numpy" and type(value).__name__ == "ndarray" and value.dtype != object


def _same(a: Any, b: Any) -> bool:
    return a.tobytes() == b.tobytes() if _is_array(a) else have_same_items(a, b)


def _items(thing: Any) -> Any:
    """The contents, as a copy."""
    if _is_array(thing):
        return thing.copy()
    if isinstance(thing, _Name):
        return [thing.namespace.get(thing.name)]
    if isinstance(thing, SlotAttribute):
        return thing.get()
    if isinstance(thing, _NewNames):
        return thing.found()
    if isinstance(thing, _Class):
        return {k: v for k, v in vars(thing.cls).items() if not k.startswith("__") and not isinstance(v, property)}
    return copy_items(thing)


def _is_filled_cache(before: Any, now: Any) -> bool:
    """A dict that got objects under new keys (a library's backends, say): neither tensors nor numbers that count."""
    if not isinstance(now, dict) or any(now.get(k, now) is not v for k, v in before.items()):
        return False
    return not any(
        is_plain(v) or collect_tensors(v) or collect_tensors(getattr(v, "__dict__", ())) for v in now.values()
    )


@contextlib.contextmanager
def keep_outside_state(block: nn.Module) -> Iterator[None]:
    """Put back what a run of a block writes to outside of its tensors."""
    surroundings = OutsideState(block, ())
    try:
        yield
    finally:
        surroundings.restore()


@functools.lru_cache(maxsize=64)
def _reached(code: frozenset[Any]) -> CodeClosure:
    """Once a block, not once a capture."""
    return trace_closure(code)


__all__ = ["OutsideState", "keep_outside_state"]
