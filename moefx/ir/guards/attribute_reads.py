"""Plain attributes and globals that a forward reads: a scale, how many experts a token gets, a flag in a configuration.

A capture bakes their values into the graph. So what was read is noted, and the rewrite holds while it is unchanged.
"""

from __future__ import annotations

import contextlib
import inspect
import sys
import threading
import types
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import nn

from .code_closure import LIBRARIES, collect_code, trace_closure
from .stored_values import MISSING, attributes_of, is_configuration, is_namespace, is_plain, is_same

MODULE_INTERNALS = {
    *vars(nn.Module()),
    "_compiled_call_impl",
    "forward",
}  # what torch itself keeps, and guards elsewhere


class AttributeLocation(NamedTuple):
    """An attribute of a submodule, or of an object (a configuration) that hangs there, or of one in that: `inner` is a
    dotted path; or a global of a Python module, whose name then stands behind an `@`."""

    module: str
    name: str
    inner: str = ""

    @property
    def attribute(self) -> str:
        """The attribute's own name."""
        return (self.inner or self.name).rpartition(".")[2]

    def __str__(self) -> str:
        return ".".join(filter(None, self)).removeprefix("@")


BLOCK_MODE = AttributeLocation("", "training")  # of the block
_UNSEEN = {"__dict__", "vars", "__getstate__", "__reduce__", "__reduce_ex__", "__getattribute__", "getattr_static"}


def find_attributes(block: nn.Module) -> dict[AttributeLocation, Any]:
    """The attributes of a block, of its submodules and of the objects that they hold, by where they are. Not their
    modes, which `record_reads` notes."""
    found: dict[AttributeLocation, Any] = {}
    for path, module in block.named_modules():
        for name, value in attributes_of(module).items():
            if isinstance(value, nn.Module) or name in MODULE_INTERNALS:
                continue
            found[AttributeLocation(path, name)] = value
            found |= {AttributeLocation(path, name, inner): v for inner, v in _inside(value).items()}
    return found


def _inside(thing: Any, depth: int = 3) -> dict[str, Any]:
    """The attributes of an object, and of the configurations in it, by their paths."""
    if not depth or (is_plain(thing) and not is_configuration(thing)):  # which may be called, as a schedule is
        return {}
    if isinstance(thing, (torch.Tensor, types.ModuleType)) or (depth < 3 and not is_configuration(thing)):
        return {}
    found = attributes_of(thing)
    return found | {f"{k}.{inner}": v for k, value in found.items() for inner, v in _inside(value, depth - 1).items()}


def find_globals(block: nn.Module) -> dict[AttributeLocation, Any]:
    """Plain globals that the code of a block names, and plain attributes of the objects among them."""
    found: dict[AttributeLocation, Any] = {}
    code = trace_closure(collect_code(block))
    used = code.names
    for one in code.globals:
        python = sys.modules.get(one.module)
        if python is None or vars(python) is not one.namespace:
            continue  # code that was made on the fly
        where, value = AttributeLocation(f"@{one.module}", one.name), one.value
        if isinstance(value, type) and not is_namespace(value):
            continue
        if is_plain(value) and not isinstance(value, type):
            found |= {where: value} if not callable(value) or _can_be_found(value) else {}
        elif isinstance(value, type) or type(value).__module__.split(".")[0] not in LIBRARIES:
            inner = {k: v for k, v in _inside(value).items() if used.issuperset(k.split("."))}
            inner = {where._replace(inner=k): v for k, v in inner.items() if is_plain(v) and not callable(v)}
            found |= inner | ({where: value} if inner and is_configuration(value) else {})
    return found


def _can_be_found(function: Any) -> bool:
    """Whether a function is what its module knows by its name, so that it can be pickled."""
    module = sys.modules.get(getattr(function, "__module__", None) or "")
    return getattr(module, getattr(function, "__qualname__", ""), None) is function


def read_value(block: nn.Module, where: AttributeLocation) -> Any:
    """The value of an attribute now; something equal to nothing where it is gone."""
    return getattr(find_owner(block, where), where.attribute, MISSING)


def find_tied_tensors(block: nn.Module) -> dict[AttributeLocation, AttributeLocation]:
    """Parameters and buffers that are the same tensor as one before: a capture reads them all there."""
    first: dict[int, AttributeLocation] = {}
    found: dict[AttributeLocation, AttributeLocation] = {}
    for kind in (block.named_parameters, block.named_buffers):
        for name, t in kind(remove_duplicate=False):
            owner, _, key = name.rpartition(".")
            where = AttributeLocation(owner, key)
            before = first.setdefault(id(t), where)
            if before.name != key or find_owner(block, before) is not find_owner(block, where):  # not a module twice
                found[where] = before
    return found


@contextlib.contextmanager
def record_reads(block: nn.Module, watched: Iterable[AttributeLocation]) -> Iterator[set[AttributeLocation]]:
    """Note which of these attributes are relied on while the context is open: read before they are set, or set to what
    they are. A data descriptor on the class comes before the instance."""
    read: set[AttributeLocation] = set()
    by_class: dict[tuple[type, str], dict[int, tuple[AttributeLocation, Any]]] = {}
    for where in watched:
        owner = find_owner(block, where)
        before = getattr(owner, where.attribute, MISSING)
        by_class.setdefault((type(owner), where.attribute), {})[id(owner)] = where, before
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
def _noting_missing(block: nn.Module, read: set[AttributeLocation]) -> Iterator[None]:
    """Attributes that the code asks for and that are not there, `getattr(self, "scale", 1.0)`, or that are None: a
    parameter or a buffer that a later call may find."""
    paths = {id(m): path for path, m in block.named_modules()}
    original = nn.Module.__getattr__

    def get(self: nn.Module, name: str) -> Any:
        try:
            value = original(self, name)
        except AttributeError:
            if id(self) in paths and not name.startswith(("_", "torchdynamo_")):  # not what Dynamo asks for
                read.add(AttributeLocation(paths[id(self)], name))
            raise
        if value is None and id(self) in paths:
            read.add(AttributeLocation(paths[id(self)], name))
        return value

    nn.Module.__getattr__ = get  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Module.__getattr__ = original  # type: ignore[method-assign]


@contextlib.contextmanager
def _noting_modes(block: nn.Module, read: set[AttributeLocation]) -> Iterator[None]:
    """Modes of the block and its parts. That of a module which is none of them changes with the block's own, as a
    rule: it counts as that. So does one that may be looked up unseen."""
    inside = {id(m): (AttributeLocation(path, "training"), m.training) for path, m in block.named_modules()}
    reader = threading.get_ident()  # others use their own models meanwhile

    class Mode:
        def __get__(self, owner: Any, cls: type) -> Any:
            if owner is None or "training" not in vars(owner):
                raise AttributeError("training")
            where, before = inside.get(id(owner), (BLOCK_MODE, None))
            value = vars(owner)["training"]
            if (before is None or value is before) and threading.get_ident() == reader:
                read.add(where)
            return value

        def __set__(self, owner: Any, value: Any) -> None:
            where, before = inside.get(id(owner), (BLOCK_MODE, None))
            if value is before and threading.get_ident() == reader:
                read.add(where)
            vars(owner)["training"] = value

    if _UNSEEN & set(trace_closure(collect_code(block)).names):
        read.add(BLOCK_MODE)
    outer = vars(nn.Module).get("training")
    nn.Module.training = Mode()  # type: ignore[assignment]
    try:
        yield
    finally:
        if outer is None:
            del nn.Module.training
        else:
            nn.Module.training = outer


def has_custom_train(model: nn.Module) -> bool:
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

    def __init__(
        self, cls: type, name: str, places: dict[int, tuple[AttributeLocation, Any]], read: set[AttributeLocation]
    ):
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
        if id(owner) in self.places and is_same(value, self.places[id(owner)][1]):
            self.read.add(self.places[id(owner)][0])
        _state(owner)[self.name] = value

    def __delete__(self, owner: Any) -> None:
        del _state(owner)[self.name]


def find_owner(block: nn.Module, where: AttributeLocation) -> Any:
    """The object that holds an attribute; None if it is gone."""
    return find_holders(block, where)[-1][1]


def find_holders(block: nn.Module, where: AttributeLocation) -> list[tuple[str, Any]]:
    """The objects on the way to an attribute, each with its name in the one before; None for those that are gone."""
    if where.module.startswith("@"):
        owner: Any = sys.modules.get(where.module[1:])
    else:
        try:
            owner = block.get_submodule(where.module)
        except AttributeError:
            owner = None
    found = [("", owner)]
    if where.inner:
        for name in [where.name, *where.inner.split(".")[:-1]]:
            found.append((name, getattr(found[-1][1], name, None)))
    return found


__all__ = [
    "BLOCK_MODE",
    "MODULE_INTERNALS",
    "AttributeLocation",
    "find_attributes",
    "find_globals",
    "find_holders",
    "find_owner",
    "find_tied_tensors",
    "has_custom_train",
    "read_value",
    "record_reads",
]  # fmt: skip
