"""State outside of a block's tensors and attributes: containers, objects and globals that its code reaches.

A capture must restore a list of losses in a manager object, a counter in a global, or a cache of positions. A block
that writes to them at every call is refused, because its graph would not write.
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

from ...ir.guards.attribute_reads import MODULE_INTERNALS
from ...ir.guards.code_closure import (
    FUNCTION_TYPES,
    CodeClosure,
    collect_code,
    is_user_code,
    list_captured_values,
    trace_closure,
)
from ...ir.guards.stored_values import is_plain
from ...ir.passed_objects import is_passed
from ...util.tensor_trees import collect_tensors
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

# Library modules whose objects hold the user's data.
_HOLDERS = {"argparse", "collections", "queue", "types", "weakref"}
_MAX_DEPTH = 3
_SCALARS = {bool, int, float, str, types.NoneType}
ARGUMENT = "an argument"
_MAX_ITEMS = 256


class OutsideState:
    """A snapshot of all objects that the code of a block and its arguments reach.

    Args:
        excluded_objects: objects to leave out.

    Attributes:
        generators: random generators among them, by path.
    """

    def __init__(self, block: nn.Module, arguments: Any, excluded_objects: Iterable[Any] = ()):
        self.generators: dict[str, Any] = {}
        modules = [*block.named_modules()]
        self._seen = {id(module) for _, module in modules} | {id(excluded) for excluded in excluded_objects}
        self._saved: list[tuple[str, Any, Any, Callable[[Any], None]]] = []  # path, object, its items, restore
        for prefix, module in modules:
            for name, value in vars(module).items():
                if name not in MODULE_INTERNALS:
                    self._visit(f"{prefix}.{name}".lstrip("."), value)
        code = _trace_closure(collect_code(block))
        for namespace in {id(one.namespace): one.namespace for one in code.globals}.values():
            self._save_new_names(namespace)
        for one in code.globals:
            if one.name in one.namespace:
                path = f"{one.module}.{one.name}"
                self._save_name(path, one.namespace, one.name)
                self._visit(path, one.value)
        for cls in code.classes:
            self._save_class(cls)
        self._visit(ARGUMENT, arguments)

    def list_changes(self, but: Collection[int] = ()) -> list[str]:
        """Return the paths of objects that differ from the snapshot. Args: but: ids of containers to leave out."""
        return [
            path
            for path, obj, items, _ in self._saved
            if id(obj) not in but and not _has_content(obj, items) and not _is_filled_cache(items, _copy_content(obj))
        ]

    def find_new_tensors(self, path: str) -> list[torch.Tensor]:
        """Return the tensors that a changed object holds now, and that the snapshot lacks."""
        of_path = [(_copy_content(obj), items) for at, obj, items, _ in self._saved if at == path]
        known = {id(t) for _, items in of_path for t in collect_tensors(items)}
        return [t for now, _ in of_path for t in collect_tensors(now) if id(t) not in known]

    def restore(self) -> None:
        """Restore objects that differ. Unchanged objects are not written to."""
        for _, obj, items, restore_content in self._saved:
            if find_base_type(obj) is not None or isinstance(obj, _NewNames) or not _has_content(obj, items):
                restore_content(items)  # a container may differ in its order alone

    def _visit(self, path: str, value: Any, depth: int = _MAX_DEPTH) -> None:
        if type(value) in _SCALARS or id(value) in self._seen:
            return
        if is_passed(value) or isinstance(value, (torch.Tensor, type, types.ModuleType)):
            return
        if isinstance(value, nn.Module):  # such as the parent of the block, in a list so that it is no submodule
            self._seen.add(id(value))
            self._save_items(path, vars(value))
            return
        if _is_array(value):
            self._seen.add(id(value))
            self._saved.append((path, value, value.copy(), functools.partial(value.__setitem__, ...)))
            return
        if is_random_generator(value):
            self._seen.add(id(value))
            self.generators[path] = value
            return
        inner: list[Any] = []
        if find_base_type(value) is not None:
            self._seen.add(id(value))
            self._save_items(path, value)
            inner += list_values(value)
        elif isinstance(value, tuple):
            inner += tuple.__iter__(value)
        elif isinstance(value, (*FUNCTION_TYPES, functools.partial)):
            self._seen.add(id(value))
            inner += list_captured_values(value)
        if _holds_attributes(type(value)) or (path == ARGUMENT and _belongs_to_library(type(value))):
            self._seen.add(id(value))
            inner += self._save_attributes(path, value)
        if depth and len(inner) <= _MAX_ITEMS:
            for item in inner:
                self._visit(path, item, depth - 1)

    def _save_items(self, path: str, container: Any) -> None:
        self._saved.append((path, container, copy_items(container), functools.partial(restore_items, container)))

    def _save_attributes(self, path: str, obj: Any) -> list[Any]:
        """Save the attributes of an object, and return their values."""
        inner: list[Any] = []
        for slot in list_slots(obj):
            self._saved.append((path, slot, slot.get(), slot.put))
            inner += slot.get()
        if type(attributes := getattr(obj, "__dict__", None)) is dict:
            self._save_items(path, attributes)
            inner += attributes.values()
        return inner

    def _save_new_names(self, namespace: dict[str, Any]) -> None:
        """Save the names of the globals: the code may add one at its first call."""
        before = frozenset(namespace)
        names = _NewNames(namespace, before)
        self._saved.append((namespace.get("__name__", "a global"), names, {}, names.remove))

    def _save_name(self, path: str, namespace: dict[str, Any], name: str) -> None:
        one = _Name(namespace, name)
        self._saved.append((path, one, _copy_content(one), lambda items: namespace.update({name: items[0]})))

    def _save_class(self, cls: type) -> None:
        def put(items: dict[str, Any]) -> None:
            for name in _copy_content(_Class(cls)).keys() - items.keys():
                type.__delattr__(cls, name)
            for name, value in items.items():
                if vars(cls).get(name) is not value:
                    type.__setattr__(cls, name, value)

        self._saved.append((cls.__qualname__, _Class(cls), _copy_content(_Class(cls)), put))
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
    """Globals that a module has gained.

    Functions, classes and modules do not count, as they are loaded once, nor does Python's registry of shown warnings.
    """

    def __init__(self, namespace: dict[str, Any], before: frozenset[str]):
        self.namespace, self.before = namespace, before

    def read_values(self) -> dict[str, Any]:
        new_values = {name: self.namespace[name] for name in self.namespace.keys() - self.before - {_SHOWN_WARNINGS}}
        return {k: v for k, v in new_values.items() if not isinstance(v, (type, types.ModuleType, types.FunctionType))}

    def remove(self, _: Any) -> None:
        for name in self.read_values():
            del self.namespace[name]
        if _SHOWN_WARNINGS not in self.before:  # so that the user sees them again
            self.namespace.pop(_SHOWN_WARNINGS, None)


def _holds_attributes(cls: type) -> bool:
    """Return whether the attributes of a class's instances are the user's."""
    return is_user_code(cls) or cls.__module__.split(".")[0] in _HOLDERS


def _belongs_to_library(cls: type) -> bool:
    """Return whether a class belongs to a library other than torch, NumPy and Python, such as a model's cache."""
    return cls.__module__.split(".")[0] not in {"torch", "moefx", "numpy"} | sys.stdlib_module_names


def _is_array(value: Any) -> bool:
    """Return whether a value is a NumPy array. NumPy need not be installed."""
    return type(value).__module__ == "numpy" and type(value).__name__ == "ndarray" and value.dtype != object


def _has_content(obj: Any, items: Any) -> bool:
    content = _copy_content(obj)
    return content.tobytes() == items.tobytes() if _is_array(content) else have_same_items(content, items)


def _copy_content(obj: Any) -> Any:
    """Return a copy of an object's items."""
    if _is_array(obj):
        return obj.copy()
    if isinstance(obj, _Name):
        return [obj.namespace.get(obj.name)]
    if isinstance(obj, SlotAttribute):
        return obj.get()
    if isinstance(obj, _NewNames):
        return obj.read_values()
    if isinstance(obj, _Class):
        return {k: v for k, v in vars(obj.cls).items() if not k.startswith("__") and not isinstance(v, property)}
    return copy_items(obj)


def _is_filled_cache(before: Any, after: Any) -> bool:
    """Return whether a dict only gained objects under new keys, without tensors and numbers, like a library's
    backends."""
    if not isinstance(after, dict) or any(after.get(k, after) is not v for k, v in before.items()):
        return False
    return not any(
        is_plain(v) or collect_tensors(v) or collect_tensors(getattr(v, "__dict__", ())) for v in after.values()
    )


@contextlib.contextmanager
def keep_outside_state(block: nn.Module) -> Iterator[None]:
    """Restore the outside state after a run of a block."""
    state = OutsideState(block, ())
    try:
        yield
    finally:
        state.restore()


@functools.lru_cache(maxsize=64)
def _trace_closure(code: frozenset[Any]) -> CodeClosure:
    """Trace once per block, not once per capture."""
    return trace_closure(code)


__all__ = ["OutsideState", "keep_outside_state"]
