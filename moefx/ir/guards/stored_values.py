"""Snapshots of attribute values, which a guard compares with the current values at each call.

Numbers, names and functions compare by `==`, tensors by version, arrays by bytes, objects by class and fields, and
containers item by item.
"""

from __future__ import annotations

import collections.abc
import datetime
import enum
import functools
import numbers
import pathlib
import sys
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes

_SUBCLASSED = (int, float, str, bytes, enum.Enum, BaseException, torch.Tensor)
_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, enum.Enum, slice, range,
          numbers.Number, datetime.timedelta, pathlib.PurePath)  # fmt: skip
_MAX_ITEMS = 4096


class Missing(enum.Enum):
    """The value of a missing attribute, since code may ask whether an attribute exists."""

    MISSING = "missing"


MISSING = Missing.MISSING


# ---------------------------------------------------------------------- kinds of values
def attributes_of(obj: Any) -> dict[str, Any]:
    """Return the attributes of an instance and those that its classes define. Classes of torch are left out."""
    class_attributes: dict[str, Any] = {}
    classes = obj.__mro__ if isinstance(obj, type) else type(obj).__mro__
    for cls in reversed(classes):
        if not cls.__module__.startswith(("torch.", "builtins")):
            class_attributes |= {
                k: v for k, v in vars(cls).items() if not k.startswith("__") and _is_class_attribute(v)
            }
    if isinstance(obj, type):
        return class_attributes
    slots = [name for cls in type(obj).__mro__ for name in vars(cls).get("__slots__", ()) if hasattr(obj, name)]
    return {**class_attributes, **{name: getattr(obj, name) for name in slots}, **getattr(obj, "__dict__", {})}


def _is_class_attribute(value: Any) -> bool:
    """Return whether a member of a class is a plain value, rather than a method or a descriptor."""
    if hasattr(type(value), "__get__"):
        return False
    return isinstance(value, (*_PLAIN, list, tuple, dict)) or is_configuration(value)


def is_plain(value: Any, depth: int = 4) -> bool:
    """Return whether a value can be compared: a number, a name, a function, or a container of these and tensors."""
    if isinstance(value, _PLAIN) or is_array(value) or (callable(value) and not isinstance(value, nn.Module)):
        return True
    if depth and isinstance(value, (list, tuple, set, dict)) and len(value) <= _MAX_ITEMS:
        items = [*value, *value.values()] if isinstance(value, dict) else value
        return all(isinstance(v, torch.Tensor) or is_plain(v, depth - 1) for v in items)
    return False


def is_array(value: Any) -> bool:
    """Return whether a value is a small NumPy array or a NumPy number."""
    return type(value).__module__ == "numpy" and hasattr(value, "tobytes") and value.size <= _MAX_ITEMS


def is_configuration(obj: Any) -> bool:
    """Return whether an object's fields are followed. Plain values are not; neither are objects of libraries (a logger,
    a process group)."""
    if isinstance(obj, type):
        return is_namespace(obj)
    if isinstance(obj, (nn.Module, torch.Tensor, list, tuple, collections.abc.Mapping, *_PLAIN)):
        return False
    return _is_user_class(type(obj)) or type(obj).__module__ in ("types", "argparse")


def is_namespace(obj: Any) -> bool:
    """Return whether a class serves as a configuration object itself: `class Config: top_k = 2`."""
    return isinstance(obj, type) and _is_user_class(obj) and not issubclass(obj, (nn.Module, tuple, *_SUBCLASSED))


def _is_user_class(cls: type) -> bool:
    return cls.__module__.split(".")[0] not in {"torch", "builtins", "numpy", *sys.stdlib_module_names}


# ---------------------------------------------------------------------- snapshots
class StoredTensor:
    """A tensor in a container or a configuration, with its version. A copy refers to the copied tensor."""

    def __init__(self, tensor: torch.Tensor):
        self.tensor = tensor
        self.version = 0 if tensor.is_inference() else tensor._version

    def holds(self, value: Any) -> bool:
        return value is self.tensor and (value.is_inference() or value._version == self.version)

    def __repr__(self) -> str:
        return f"a tensor of version {self.version}"

    def __getstate__(self) -> tuple[torch.Tensor, bool]:
        return self.tensor, self.holds(self.tensor)

    def __setstate__(self, state: tuple[torch.Tensor, bool]) -> None:
        self.__init__(state[0])  # versions of a copied tensor start at 0
        self.version = self.version if state[1] else -1


class StoredClass:
    """The class of a value that cannot be compared, such as a logger in a container."""

    def __init__(self, obj: Any):
        self.cls = type(obj)

    def holds(self, value: Any) -> bool:
        return type(value) is self.cls

    def __repr__(self) -> str:
        return f"a {self.cls.__name__}"


class StoredFieldNames(StoredClass):
    """The class and the field names of an object. Each field's value is guarded on its own."""

    def __init__(self, obj: Any):
        super().__init__(obj)
        self.names, self.count = _public_fields(obj), len(getattr(obj, "__dict__", ()))

    def holds(self, value: Any) -> bool:
        if not super().holds(value):
            return False
        return len(getattr(value, "__dict__", ())) == self.count or _public_fields(value) == self.names

    def __repr__(self) -> str:
        return f"a {self.cls.__name__} with {', '.join(sorted(self.names)) or 'nothing'}"


class StoredObject(StoredFieldNames):
    """An object in a container: its class, field names, and comparable field values."""

    def __init__(self, obj: Any, depth: int):
        super().__init__(obj)
        self.fields = {k: snapshot(v, depth) for k, v in attributes_of(obj).items() if can_snapshot(v, depth)}

    def holds(self, value: Any) -> bool:
        fields = attributes_of(value)
        return super().holds(value) and all(is_same(fields.get(k, MISSING), v) for k, v in self.fields.items())

    def __repr__(self) -> str:
        return f"{self.cls.__name__}({', '.join(f'{k}={v!r}' for k, v in self.fields.items())})"


def _public_fields(obj: Any) -> frozenset[str]:
    """Return the names of an object's fields, since code may ask which exist. Private fields do not count."""
    return frozenset(name for name in getattr(obj, "__dict__", ()) if not name.startswith("_"))


class StoredForward(StoredClass):
    """The `forward` of a called module. Wrappers such as FSDP replace the class but keep `forward`."""

    def __init__(self, obj: Any):
        super().__init__(obj)
        self.forward = getattr(self.cls, "forward", None)

    def holds(self, value: Any) -> bool:
        return getattr(type(value), "forward", None) is self.forward

    def __getstate__(self) -> type:
        return self.cls

    def __setstate__(self, cls: type) -> None:
        self.cls, self.forward = cls, getattr(cls, "forward", None)


class StoredSequence:
    """The items of a container that is no builtin, such as a deque."""

    def __init__(self, things: Any, depth: int):
        self.cls, self.items = type(things), [snapshot(v, depth) for v in things]

    def holds(self, value: Any) -> bool:
        return type(value) is self.cls and is_same(list(value), self.items)

    def __repr__(self) -> str:
        return f"{self.cls.__name__}({self.items!r})"


class StoredArray:
    """A copy of a NumPy array."""

    def __init__(self, array: Any):
        self.array = array.copy()

    def holds(self, value: Any) -> bool:
        before = self.array
        is_alike = type(value) is type(before) and (value.shape, value.dtype) == (before.shape, before.dtype)
        return is_alike and value.tobytes() == before.tobytes()

    def __repr__(self) -> str:
        return repr(self.array)


_STORED = (StoredTensor, StoredClass, StoredSequence, StoredArray)


def can_snapshot(value: Any, depth: int = 3) -> bool:
    """Return whether `snapshot` keeps the content of a value, rather than its class alone."""
    if is_plain(value) or isinstance(value, torch.Tensor):
        return True
    if isinstance(value, (list, tuple, collections.deque, Mapping)):
        return depth > 0 and len(value) <= _MAX_ITEMS
    return depth > 0 and is_configuration(value)


def snapshot(value: Any, depth: int = 3) -> Any:
    """Copy a value so that later changes to it can be detected with `is_same(value_now, snapshot)`."""
    if isinstance(value, torch.Tensor):
        return StoredTensor(value)
    if is_array(value):
        return StoredArray(value)
    if isinstance(value, Mapping):
        return {k: snapshot(v, depth - 1) for k, v in value.items()}
    if type(value) is set:
        return set(value) if is_plain(value) else StoredClass(value)
    if type(value) in (list, tuple):
        return type(value)(snapshot(v, depth - 1) for v in value)
    if isinstance(value, collections.deque) or (isinstance(value, (list, tuple)) and not is_plain(value)):
        return StoredSequence(value, depth - 1)
    if is_configuration(value) and depth > 0:
        return StoredObject(value, depth - 1)
    return value if is_plain(value) else StoredClass(value)


def belongs_to_block(value: Any) -> bool:
    """Return whether a snapshot refers to a block's own tensors or methods. A copy of the block has other ones."""
    if isinstance(value, (list, tuple, dict)):
        return any(map(belongs_to_block, value.values() if isinstance(value, dict) else value))
    return isinstance(value, StoredTensor) or isinstance(getattr(value, "__self__", None), torch.nn.Module)


def is_comparable(value: Any) -> bool:
    """Return whether `==` compares a snapshot with a current value. It does not if tensors or arrays are in it."""
    if isinstance(value, (list, tuple, dict)):
        return all(map(is_comparable, value.values() if isinstance(value, dict) else value))
    return not isinstance(value, _STORED)


def list_comparisons(path: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yield `(expression over path, expected value)` pairs that hold while the value equals its snapshot. Tensors and
    arrays are left out, since `==` does not compare them."""
    if is_comparable(value):
        yield path, value
        return
    if isinstance(value, StoredFieldNames):
        yield f"type({path})", value.cls
    parts: Iterable[tuple[str, Any]] = ()
    if isinstance(value, StoredObject):
        parts = [(f"{path}.{name}", v) for name, v in value.fields.items()]
    elif isinstance(value, (list, tuple, StoredSequence)):
        items = value.items if isinstance(value, StoredSequence) else value
        yield f"len({path})", len(items)
        parts = [(f"{path}[{i}]", v) for i, v in enumerate(items)]
    elif isinstance(value, dict):
        yield f"len({path})", len(value)
        parts = [(f"{path}[{key!r}]", v) for key, v in value.items() if isinstance(key, (str, int))]
    for part, v in parts:
        yield from list_comparisons(part, v)


def is_same(a: Any, b: Any) -> bool:
    """Return whether value `a` equals `b`, which is a value or a snapshot. False if comparing them raises."""
    if a is b:
        return True
    if isinstance(b, _STORED):
        return b.holds(a)
    if isinstance(a, Mapping) and isinstance(b, Mapping):  # the snapshot of any mapping is a dict
        return a.keys() == b.keys() and all(is_same(v, b[k]) for k, v in a.items())
    if type(a) is not type(b):
        return False
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(is_same, a, b))
    try:
        if isinstance(a, functools.partial):  # compares by identity
            return is_same(a.func, b.func) and is_same(a.args, b.args) and is_same(a.keywords, b.keywords)
        if isinstance(a, _PLAIN):
            return bool(a == b)
        with _disable_current_modes(), torch.DisableTorchFunction():  # keep the comparison out of a capture
            if isinstance(a, torch.Tensor):
                return a.shape == b.shape and not a.is_meta and bool(torch.equal(a, b))
            return bool(a == b)
    except Exception:
        return False
