"""Plain attributes and globals that a forward reads: a scale, how many experts a token gets, a flag in a configuration.

A capture bakes their values into the graph. So what was read is noted, and the rewrite holds while it is unchanged.
"""

from __future__ import annotations

import collections.abc
import contextlib
import datetime
import enum
import functools
import inspect
import numbers
import pathlib
import sys
import types
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import nn

from .reached import OTHERS, code_of, reached

OWN = {*vars(nn.Module()), "_compiled_call_impl", "forward"}  # what torch itself keeps, and guards elsewhere
_SUBCLASSED = (int, float, str, bytes, enum.Enum, BaseException, torch.Tensor)
_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, enum.Enum, slice, range,
          numbers.Number, datetime.timedelta, pathlib.PurePath)  # fmt: skip


class Missing(enum.Enum):
    """The value of an attribute that is not there; code may ask whether it is."""

    MISSING = "missing"


MISSING = Missing.MISSING


class Where(NamedTuple):
    """An attribute of a submodule, or of an object (a configuration) that hangs there, or of one in that: `inner` is a
    dotted path; or a global of a Python module, whose name then stands behind an `@`."""

    module: str
    name: str
    inner: str = ""

    @property
    def last(self) -> str:
        """The attribute's own name."""
        return (self.inner or self.name).rpartition(".")[2]

    def __str__(self) -> str:
        return ".".join(filter(None, self)).removeprefix("@")


OWN_MODE = Where("", "training")  # of the block
_UNSEEN = {"__dict__", "vars", "__getstate__", "__reduce__", "__reduce_ex__", "__getattribute__", "getattr_static"}


def attributes(block: nn.Module) -> dict[Where, Any]:
    """The attributes of a block, of its submodules and of the objects that they hold, by where they are. Not their
    modes, which `reading` notes by itself."""
    found: dict[Where, Any] = {}
    for path, module in block.named_modules():
        for name, value in _attributes_of(module).items():
            if isinstance(value, nn.Module) or name in OWN:
                continue
            found[Where(path, name)] = value
            found |= {Where(path, name, inner): v for inner, v in _inside(value).items()}
    return found


def _inside(thing: Any, depth: int = 3) -> dict[str, Any]:
    """The attributes of an object, and of the configurations in it, by their paths."""
    is_callable = callable(thing) and is_configuration(thing)  # a schedule, say
    if not depth or (is_plain(thing) and not is_callable and not _is_namespace(thing)):
        return {}
    if isinstance(thing, (torch.Tensor, types.ModuleType)) or (depth < 3 and not is_configuration(thing)):
        return {}
    found = _attributes_of(thing)
    return found | {f"{k}.{inner}": v for k, value in found.items() for inner, v in _inside(value, depth - 1).items()}


def is_configuration(thing: Any) -> bool:
    """Whether it is an object with fields of interest, rather than a value, or a logger or a process group that lead to
    much that is nothing to the block."""
    if isinstance(thing, type):
        return _is_namespace(thing)
    if isinstance(thing, (nn.Module, torch.Tensor, list, tuple, collections.abc.Mapping, *_PLAIN)):
        return False
    return _is_users(type(thing)) or type(thing).__module__ in ("types", "argparse")


def _is_namespace(thing: Any) -> bool:
    """Whether it is a class that is used as an object is: `class Config: top_k = 2`."""
    return isinstance(thing, type) and _is_users(thing) and not issubclass(thing, (nn.Module, tuple, *_SUBCLASSED))


def _is_users(cls: type) -> bool:
    return cls.__module__.split(".")[0] not in {"torch", "builtins", "numpy", *sys.stdlib_module_names}


def globals_of(block: nn.Module) -> dict[Where, Any]:
    """Plain globals that the code of a block names, and plain attributes of the objects among them."""
    found: dict[Where, Any] = {}
    code = reached(code_of(block))
    used = code.names
    for one in code.globals:
        python = sys.modules.get(one.module)
        if python is None or vars(python) is not one.namespace:
            continue  # code that was made on the fly
        where, value = Where(f"@{one.module}", one.name), one.value
        if isinstance(value, type) and not _is_namespace(value):
            continue
        if is_plain(value) and not isinstance(value, type):
            found |= {where: value} if not callable(value) or _can_be_found(value) else {}
        elif isinstance(value, type) or type(value).__module__.split(".")[0] not in OTHERS:
            inner = {k: v for k, v in _inside(value).items() if used.issuperset(k.split("."))}
            inner = {where._replace(inner=k): v for k, v in inner.items() if is_plain(v) and not callable(v)}
            found |= inner | ({where: value} if inner and is_configuration(value) else {})
    return found


def _can_be_found(function: Any) -> bool:
    """Whether a function is what its module knows by its name, so that it can be pickled."""
    module = sys.modules.get(getattr(function, "__module__", None) or "")
    return getattr(module, getattr(function, "__qualname__", ""), None) is function


def value_at(block: nn.Module, where: Where) -> Any:
    """The value of an attribute now; something equal to nothing where it is gone."""
    return getattr(owner_of(block, where), where.last, MISSING)


class Held:
    """A tensor in a container or a configuration, as it was; a copy of it is of the copied tensor."""

    def __init__(self, tensor: torch.Tensor):
        self.tensor = tensor
        self.version = 0 if tensor.is_inference() else tensor._version

    def is_still(self, now: Any) -> bool:
        return now is self.tensor and (now.is_inference() or now._version == self.version)

    def __repr__(self) -> str:
        return f"a tensor of version {self.version}"

    def __getstate__(self) -> tuple[torch.Tensor, bool]:
        return self.tensor, self.is_still(self.tensor)

    def __setstate__(self, state: tuple[torch.Tensor, bool]) -> None:
        self.__init__(state[0])  # a copy counts its changes from 0
        self.version = self.version if state[1] else -1


class HeldClass:
    """What cannot be compared, such as a logger or a module among the items of a container: its class."""

    def __init__(self, thing: Any):
        self.cls = type(thing)

    def is_still(self, now: Any) -> bool:
        return type(now) is self.cls

    def __repr__(self) -> str:
        return f"a {self.cls.__name__}"


class HeldKind:
    """An object whose fields are followed one by one: its class, and which fields it has."""

    def __init__(self, thing: Any):
        self.cls, self.names, self.count = type(thing), _names(thing), len(getattr(thing, "__dict__", ()))

    def is_still(self, now: Any) -> bool:
        if type(now) is not self.cls:
            return False
        return len(getattr(now, "__dict__", ())) == self.count or _names(now) == self.names

    def __repr__(self) -> str:
        return f"a {self.cls.__name__} with {', '.join(sorted(self.names)) or 'nothing'}"


class HeldObject(HeldKind):
    """An object in a container: also what of its fields can be compared."""

    def __init__(self, thing: Any, depth: int):
        super().__init__(thing)
        self.fields = {k: unchanged(v, depth) for k, v in _attributes_of(thing).items() if is_kept(v, depth)}

    def is_still(self, now: Any) -> bool:
        fields = _attributes_of(now)
        return super().is_still(now) and all(same(fields.get(k, MISSING), v) for k, v in self.fields.items())

    def __repr__(self) -> str:
        return f"{self.cls.__name__}({', '.join(f'{k}={v!r}' for k, v in self.fields.items())})"


def _names(thing: Any) -> frozenset[str]:
    """Code may ask which fields an object has. Private ones are what it keeps for itself."""
    return frozenset(name for name in getattr(thing, "__dict__", ()) if not name.startswith("_"))


class HeldItems:
    """A container of another class than Python's own, such as a deque."""

    def __init__(self, things: Any, depth: int):
        self.cls, self.items = type(things), [unchanged(v, depth) for v in things]

    def is_still(self, now: Any) -> bool:
        return type(now) is self.cls and same(list(now), self.items)

    def __repr__(self) -> str:
        return f"{self.cls.__name__}({self.items!r})"


class HeldArray:
    """An array of NumPy's, as it was."""

    def __init__(self, array: Any):
        self.array = array.copy()

    def is_still(self, now: Any) -> bool:
        mine = self.array
        same_kind = type(now) is type(mine) and (now.shape, now.dtype) == (mine.shape, mine.dtype)
        return same_kind and now.tobytes() == mine.tobytes()

    def __repr__(self) -> str:
        return repr(self.array)


_HELD = (Held, HeldClass, HeldObject, HeldItems, HeldKind, HeldArray)


def is_kept(value: Any, depth: int = 3) -> bool:
    """Whether `unchanged` keeps what a value is made of: numbers and tensors, in containers and in objects there."""
    if is_plain(value) or isinstance(value, torch.Tensor):
        return True
    if isinstance(value, (list, tuple, collections.deque, Mapping)):
        return depth > 0 and len(value) <= _MOST_ITEMS
    return depth > 0 and is_configuration(value)


def unchanged(value: Any, depth: int = 3) -> Any:
    """A value that a later change of the container does not reach."""
    if isinstance(value, torch.Tensor):
        return Held(value)
    if _is_array(value):
        return HeldArray(value)
    if isinstance(value, Mapping):
        return {k: unchanged(v, depth - 1) for k, v in value.items()}
    if type(value) is set:
        return set(value) if is_plain(value) else HeldClass(value)
    if type(value) in (list, tuple):
        return type(value)(unchanged(v, depth - 1) for v in value)
    if isinstance(value, collections.deque) or (isinstance(value, (list, tuple)) and not is_plain(value)):
        return HeldItems(value, depth - 1)
    if is_configuration(value) and depth > 0:
        return HeldObject(value, depth - 1)
    return value if is_plain(value) else HeldClass(value)


def holds_tensors(value: Any) -> bool:
    """Whether what `unchanged` returned has tensors in it."""
    if isinstance(value, (list, tuple, dict)):
        return any(map(holds_tensors, value.values() if isinstance(value, dict) else value))
    return isinstance(value, Held)


def compares(value: Any) -> bool:
    """Whether `==` says if what `unchanged` returned is still the same: neither tensors nor arrays are in it."""
    if isinstance(value, (list, tuple, dict)):
        return all(map(compares, value.values() if isinstance(value, dict) else value))
    return not isinstance(value, _HELD)


def comparisons(path: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Expressions of what is at `path`, each with the value that it has while it is as `unchanged` found it: but for
    tensors and arrays, which do not compare."""
    if compares(value):
        yield path, value
        return
    if isinstance(value, (HeldKind, HeldObject)):
        yield f"type({path})", value.cls
    parts: Iterable[tuple[str, Any]] = ()
    if isinstance(value, HeldObject):
        parts = [(f"{path}.{name}", v) for name, v in value.fields.items()]
    elif isinstance(value, (list, tuple, HeldItems)):
        items = value.items if isinstance(value, HeldItems) else value
        yield f"len({path})", len(items)
        parts = [(f"{path}[{i}]", v) for i, v in enumerate(items)]
    elif isinstance(value, dict):
        yield f"len({path})", len(value)
        parts = [(f"{path}[{key!r}]", v) for key, v in value.items() if isinstance(key, (str, int))]
    for part, v in parts:
        yield from comparisons(part, v)


def same(a: Any, b: Any) -> bool:
    if a is b:
        return True
    if isinstance(b, _HELD):
        return b.is_still(a)
    if isinstance(a, Mapping) and isinstance(b, Mapping):  # the copy of one is a dict
        return a.keys() == b.keys() and all(same(v, b[k]) for k, v in a.items())
    if type(a) is not type(b):
        return False
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
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
    """Note which of these attributes are relied on while the context is open: read before they are set, or set to what
    they are. A data descriptor on the class comes before the instance."""
    read: set[Where] = set()
    by_class: dict[tuple[type, str], dict[int, tuple[Where, Any]]] = {}
    for where in watched:
        owner = owner_of(block, where)
        before = getattr(owner, where.last, MISSING)
        by_class.setdefault((type(owner), where.last), {})[id(owner)] = where, before
    with contextlib.ExitStack() as stack:
        for (cls, name), places in by_class.items():
            before, found = vars(cls).get(name, MISSING), inspect.getattr_static(cls, name, MISSING)
            if found is not MISSING and not is_plain(found):  # the class itself may need it, as for slots
                read |= {where for where, _ in places.values()}
                continue
            try:
                setattr(cls, name, _Noting(cls, name, places, read))
            except (TypeError, AttributeError):  # a class of C's: all of it may be read
                read |= {where for where, _ in places.values()}
                continue
            if before is MISSING:
                stack.callback(delattr, cls, name)
            else:
                stack.callback(setattr, cls, name, before)
        stack.enter_context(_noting_missing(block, read))
        stack.enter_context(_noting_modes(block, read))
        yield read


@contextlib.contextmanager
def _noting_missing(block: nn.Module, read: set[Where]) -> Iterator[None]:
    """Attributes that the code asks for and that are not there, `getattr(self, "scale", 1.0)`, or that are None: a
    parameter or a buffer that a later call may find."""
    paths = {id(m): path for path, m in block.named_modules()}
    original = nn.Module.__getattr__

    def get(self: nn.Module, name: str) -> Any:
        try:
            value = original(self, name)
        except AttributeError:
            if id(self) in paths and not name.startswith(("_", "torchdynamo_")):  # not what Dynamo asks for
                read.add(Where(paths[id(self)], name))
            raise
        if value is None and id(self) in paths:
            read.add(Where(paths[id(self)], name))
        return value

    nn.Module.__getattr__ = get  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Module.__getattr__ = original  # type: ignore[method-assign]


@contextlib.contextmanager
def _noting_modes(block: nn.Module, read: set[Where]) -> Iterator[None]:
    """Modes of the block and its parts. That of a module which is none of them changes with the block's own, as a
    rule: it counts as that. So does one that may be looked up unseen."""
    inside = {id(m): (Where(path, "training"), m.training) for path, m in block.named_modules()}

    class Mode:
        def __get__(self, owner: Any, cls: type) -> Any:
            if owner is None or "training" not in vars(owner):
                raise AttributeError("training")
            where, before = inside.get(id(owner), (OWN_MODE, None))
            value = vars(owner)["training"]
            if before is None or value is before:
                read.add(where)
            return value

        def __set__(self, owner: Any, value: Any) -> None:
            where, before = inside.get(id(owner), (OWN_MODE, None))
            if value is before:
                read.add(where)
            vars(owner)["training"] = value

    if _UNSEEN & set(reached(code_of(block)).names):
        read.add(OWN_MODE)
    outer = vars(nn.Module).get("training")
    nn.Module.training = Mode()  # type: ignore[assignment]
    try:
        yield
    finally:
        if outer is None:
            del nn.Module.training
        else:
            nn.Module.training = outer


def follows_its_mode(model: nn.Module) -> bool:
    """Whether a part of a model has a `train` or `eval` of its own: what these change may be anything."""
    stock = (nn.Module.train, nn.Module.eval)
    return any(
        (type(m).train, type(m).eval) != stock or not {"train", "eval"}.isdisjoint(vars(m)) for m in model.modules()
    )


def _state(thing: Any) -> dict[str, Any]:
    """Its `__dict__`, past a `__getattribute__` of its own, which may look up the very attribute that is noted."""
    return object.__getattribute__(thing, "__dict__")


class _Noting:
    """A data descriptor in the place of an attribute, of instances or of the class itself.

    Args:
        places: the attribute of each object, and what it is before a call.
    """

    def __init__(self, cls: type, name: str, places: dict[int, tuple[Where, Any]], read: set[Where]):
        self.name, self.places, self.read = name, places, read
        self.default = getattr(cls, name, MISSING)

    def __get__(self, owner: Any, cls: type) -> Any:
        if owner is None:  # `Block.temperature`
            self.read |= {where for where, _ in self.places.values()}
            value = self.default
        else:
            value = _state(owner).get(self.name, self.default)
            if id(owner) in self.places and value is self.places[id(owner)][1]:
                self.read.add(self.places[id(owner)][0])
        if value is MISSING:
            raise AttributeError(f"{cls.__name__!r} object has no attribute {self.name!r}")
        return value

    def __set__(self, owner: Any, value: Any) -> None:
        if id(owner) in self.places and same(value, self.places[id(owner)][1]):
            self.read.add(self.places[id(owner)][0])
        _state(owner)[self.name] = value

    def __delete__(self, owner: Any) -> None:
        del _state(owner)[self.name]


def owner_of(block: nn.Module, where: Where) -> Any:
    """The object that holds an attribute; None if it is gone."""
    return holders_of(block, where)[-1][1]


def holders_of(block: nn.Module, where: Where) -> list[tuple[str, Any]]:
    """The objects on the way to an attribute, each with its name in the one before."""
    python = where.module.startswith("@")
    found = [("", sys.modules.get(where.module[1:]) if python else block.get_submodule(where.module))]
    if where.inner:
        for name in [where.name, *where.inner.split(".")[:-1]]:
            found.append((name, getattr(found[-1][1], name, None)))
    return found


def _attributes_of(thing: Any) -> dict[str, Any]:
    """Of the instance, and what its own classes say for all instances; torch's classes hold constants."""
    shared: dict[str, Any] = {}
    classes = thing.__mro__ if isinstance(thing, type) else type(thing).__mro__
    for cls in reversed(classes):
        if not cls.__module__.startswith(("torch.", "builtins")):
            shared |= {k: v for k, v in vars(cls).items() if not k.startswith("__") and _is_shared(v)}
    if isinstance(thing, type):
        return shared
    slots = [name for cls in type(thing).__mro__ for name in vars(cls).get("__slots__", ()) if hasattr(thing, name)]
    return {**shared, **{name: getattr(thing, name) for name in slots}, **getattr(thing, "__dict__", {})}


def _is_shared(value: Any) -> bool:
    """Whether what a class has is a value for its instances, rather than a method or a property."""
    return isinstance(value, (*_PLAIN, list, tuple, dict)) or is_configuration(value)


def is_plain(value: Any, depth: int = 4) -> bool:
    """Whether a value can be compared: numbers, names and their containers, and functions by identity; and tensors in
    containers."""
    if isinstance(value, _PLAIN) or _is_array(value) or (callable(value) and not isinstance(value, nn.Module)):
        return True
    if depth and isinstance(value, (list, tuple, set, dict)) and len(value) <= _MOST_ITEMS:
        items = [*value, *value.values()] if isinstance(value, dict) else value
        return all(isinstance(v, torch.Tensor) or is_plain(v, depth - 1) for v in items)
    return False


def _is_array(value: Any) -> bool:
    """Whether it is NumPy's, an array or a number."""
    return type(value).__module__ == "numpy" and hasattr(value, "tobytes") and value.size <= _MOST_ITEMS


_MOST_ITEMS = 4096


__all__ = [
    "MISSING", "OWN", "HeldKind", "Where", "attributes", "compares", "comparisons", "globals_of", "holders_of",
    "holds_tensors", "is_configuration", "is_kept", "is_plain", "owner_of", "reading", "same", "unchanged", "value_at",
]  # fmt: skip
