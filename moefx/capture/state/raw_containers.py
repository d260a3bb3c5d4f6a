"""Read and write containers through the methods of their built-in base type, without code of a subclass.

A subclass may create items at each lookup, count its reads, or refuse writes. A capture must not trigger this.
"""

from __future__ import annotations

import collections
import types
from typing import Any

_BASES: tuple[Any, ...] = (collections.OrderedDict, dict, list, set, collections.deque)  # a subclass before its base


def find_base_type(obj: Any) -> Any:
    """Return the built-in container type that stores the items of `obj`; None if it is no container."""
    kind = type(obj)
    return kind if kind in _BASES else next((base for base in _BASES if issubclass(kind, base)), None)


def copy_items(container: Any) -> Any:
    """Return a copy of the stored items: a plain dict, set or list."""
    kind = type(container)
    if kind is dict:
        return container.copy()  # does not hash the keys, as a symbolic size refuses it
    if kind is collections.OrderedDict:
        return dict(container)
    base = find_base_type(container)
    if issubclass(base, dict):
        return dict(base.items(container))
    return set(container) if base is set else list(base.__iter__(container))


def list_values(container: Any) -> list[Any]:
    """List the stored items; the values of a dict."""
    items = copy_items(container)
    return list(items.values() if type(items) is dict else items)


def have_same_items(a: Any, b: Any) -> bool:
    """Return whether two results of `copy_items` hold the same objects, dicts in any order."""
    if type(a) is dict:
        return a.keys() == b.keys() and all(a[k] is b[k] for k in a)
    return a == b if type(a) is set else len(a) == len(b) and all(x is y for x, y in zip(a, b, strict=True))


def restore_items(container: Any, items: Any) -> None:
    """Restore items that `copy_items` returned, in the same order. Write only differences."""
    base, current = find_base_type(container), copy_items(container)
    if have_same_items(current, items) and list(current) == list(items):
        return
    if base is list:
        list.__setitem__(container, slice(None), items)
    elif base in (set, collections.deque):
        base.clear(container)
        (set.update if base is set else collections.deque.extend)(container, items)
    else:
        _restore_dict(base, container, current, items)


def _restore_dict(base: Any, container: Any, current: dict[Any, Any], items: dict[Any, Any]) -> None:
    for key in current.keys() - items.keys():
        base.__delitem__(container, key)
    for key, value in items.items():
        if key not in current or current[key] is not value:
            base.__setitem__(container, key, value)
    if list(base.keys(container)) != list(items):
        base.clear(container)
        for key, value in items.items():
            base.__setitem__(container, key, value)


class SlotAttribute:
    """One of the `__slots__` of an object."""

    def __init__(self, owner: Any, member: Any):
        self.owner, self.member = owner, member

    def get(self) -> list[Any]:
        """Return its value in a list; an empty list if it has none."""
        try:
            return [self.member.__get__(self.owner)]
        except AttributeError:
            return []

    def put(self, value: list[Any]) -> None:
        if value:
            self.member.__set__(self.owner, *value)
        else:
            self.member.__delete__(self.owner)


def list_slots(obj: Any) -> list[SlotAttribute]:
    """List the attributes in the `__slots__` of an object's classes."""
    members = [member for cls in type(obj).__mro__ for member in vars(cls).values()]
    return [SlotAttribute(obj, member) for member in members if type(member) is types.MemberDescriptorType]


__all__ = [
    "SlotAttribute",
    "copy_items",
    "find_base_type",
    "have_same_items",
    "list_slots",
    "list_values",
    "restore_items",
]
