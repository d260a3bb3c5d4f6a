"""Record which plain attributes and globals a forward reads, such as a scale, the top-k, or a configuration flag.

A capture bakes their values into the graph, so the rewrite holds only while these values stay the same.
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

# torch's own attributes
MODULE_INTERNALS = {*vars(nn.Module()), "_compiled_call_impl", "forward"}


class AttributeLocation(NamedTuple):
    """An attribute of a submodule, an attribute of an object stored there, or a global.

    Attributes:
        module: path of the submodule in the block; `@` and the module's name for a global.
        name: the attribute of the submodule, or the global.
        inner: dotted path inside the object stored under `name`, or "".
    """

    module: str
    name: str
    inner: str = ""

    @property
    def attribute(self) -> str:
        """The last name of the path."""
        return (self.inner or self.name).rpartition(".")[2]

    def __str__(self) -> str:
        return ".".join(filter(None, self)).removeprefix("@")


BLOCK_MODE = AttributeLocation("", "training")
_REFLECTION = {"__dict__", "vars", "__getstate__", "__reduce__", "__reduce_ex__", "__getattribute__", "getattr_static"}


def find_attributes(block: nn.Module) -> dict[AttributeLocation, Any]:
    """Return the attributes of a block, of its submodules and of the objects that they hold. Modes (`training`) are
    left out: `record_reads` records these itself."""
    attributes: dict[AttributeLocation, Any] = {}
    for path, module in block.named_modules():
        for name, value in attributes_of(module).items():
            if isinstance(value, nn.Module) or name in MODULE_INTERNALS:
                continue
            attributes[AttributeLocation(path, name)] = value
            attributes |= {AttributeLocation(path, name, inner): v for inner, v in _find_inner(value).items()}
    return attributes


def _find_inner(obj: Any, depth: int = 3) -> dict[str, Any]:
    """Return the attributes of an object and of the configurations in it, by dotted path."""
    if not depth or (is_plain(obj) and not is_configuration(obj)):  # a callable schedule is both
        return {}
    if isinstance(obj, (torch.Tensor, types.ModuleType)) or (depth < 3 and not is_configuration(obj)):
        return {}
    attributes = attributes_of(obj)
    return attributes | {
        f"{k}.{i}": v for k, value in attributes.items() for i, v in _find_inner(value, depth - 1).items()
    }


def find_globals(block: nn.Module) -> dict[AttributeLocation, Any]:
    """Return plain globals that the code of a block names, and plain attributes of objects among its globals."""
    globals_read: dict[AttributeLocation, Any] = {}
    code = trace_closure(collect_code(block))
    for entry in code.globals:
        module = sys.modules.get(entry.module)
        if module is None or vars(module) is not entry.namespace:
            continue  # generated code
        location, value = AttributeLocation(f"@{entry.module}", entry.name), entry.value
        if isinstance(value, type) and not is_namespace(value):
            continue
        if is_plain(value) and not isinstance(value, type):
            globals_read |= {location: value} if not callable(value) or _is_importable(value) else {}
        elif isinstance(value, type) or type(value).__module__.split(".")[0] not in LIBRARIES:
            inner = {k: v for k, v in _find_inner(value).items() if code.names.issuperset(k.split("."))}
            inner = {location._replace(inner=k): v for k, v in inner.items() if is_plain(v) and not callable(v)}
            globals_read |= inner | ({location: value} if inner and is_configuration(value) else {})
    return globals_read


def _is_importable(function: Any) -> bool:
    """Return whether a function's module holds it under its name, so that it can be pickled."""
    module = sys.modules.get(getattr(function, "__module__", None) or "")
    return getattr(module, getattr(function, "__qualname__", ""), None) is function


def read_value(block: nn.Module, location: AttributeLocation) -> Any:
    """Return the current value of an attribute, or MISSING."""
    return getattr(find_owner(block, location), location.attribute, MISSING)


def find_tied_tensors(block: nn.Module) -> dict[AttributeLocation, AttributeLocation]:
    """Map each parameter or buffer that is the same tensor as an earlier one to that one. A capture reads all of them
    at the first location."""
    first: dict[int, AttributeLocation] = {}
    tied: dict[AttributeLocation, AttributeLocation] = {}
    for kind in (block.named_parameters, block.named_buffers):
        for name, t in kind(remove_duplicate=False):
            owner, _, key = name.rpartition(".")
            location = AttributeLocation(owner, key)
            before = first.setdefault(id(t), location)
            # A module that is registered twice is no tie.
            if before.name != key or find_owner(block, before) is not find_owner(block, location):
                tied[location] = before
    return tied


@contextlib.contextmanager
def record_reads(block: nn.Module, attributes: Iterable[AttributeLocation]) -> Iterator[set[AttributeLocation]]:
    """Record which of the watched attributes the code relies on while the context is open.

    An attribute counts if it is read before it is set, or set to its current value. Each is watched by a data
    descriptor on its class, which Python looks up before the instance.
    """
    attributes_read: set[AttributeLocation] = set()
    by_class: dict[tuple[type, str], dict[int, tuple[AttributeLocation, Any]]] = {}
    for location in attributes:
        owner = find_owner(block, location)
        before = getattr(owner, location.attribute, MISSING)
        by_class.setdefault((type(owner), location.attribute), {})[id(owner)] = location, before
    with contextlib.ExitStack() as stack:
        for (cls, name), locations in by_class.items():
            before, inherited = vars(cls).get(name, MISSING), inspect.getattr_static(cls, name, MISSING)
            # a descriptor that the class needs, such as a slot
            if inherited is not MISSING and not is_plain(inherited):
                attributes_read |= {location for location, _ in locations.values()}
                continue
            try:
                setattr(cls, name, _RecordingAttribute(cls, name, locations, attributes_read))
            except (TypeError, AttributeError):  # an extension class: any of its attributes may be read
                attributes_read |= {location for location, _ in locations.values()}
                continue
            if before is MISSING:
                stack.callback(delattr, cls, name)
            else:
                stack.callback(setattr, cls, name, before)
        stack.enter_context(_record_missing(block, attributes_read))
        stack.enter_context(_record_modes(block, attributes_read))
        yield attributes_read


@contextlib.contextmanager
def _record_missing(block: nn.Module, attributes_read: set[AttributeLocation]) -> Iterator[None]:
    """Record reads of attributes that are missing (`getattr(self, "scale", 1.0)`) or None: a later call may find a
    parameter or a buffer there."""
    paths = {id(m): path for path, m in block.named_modules()}
    original = nn.Module.__getattr__

    def get(self: nn.Module, name: str) -> Any:
        try:
            value = original(self, name)
        except AttributeError:
            if id(self) in paths and not name.startswith(("_", "torchdynamo_")):  # Dynamo's own lookups
                attributes_read.add(AttributeLocation(paths[id(self)], name))
            raise
        if value is None and id(self) in paths:
            attributes_read.add(AttributeLocation(paths[id(self)], name))
        return value

    nn.Module.__getattr__ = get  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Module.__getattr__ = original  # type: ignore[method-assign]


@contextlib.contextmanager
def _record_modes(block: nn.Module, attributes_read: set[AttributeLocation]) -> Iterator[None]:
    """Record reads of `training`. The mode of a module outside of the block counts as the block's own, since both
    usually change together. Code that uses reflection counts as reading the block's mode."""
    inside = {id(m): (AttributeLocation(path, "training"), m.training) for path, m in block.named_modules()}
    reader = threading.get_ident()  # other threads may run other models

    class Mode:
        def __get__(self, owner: Any, cls: type) -> Any:
            if owner is None or "training" not in vars(owner):
                raise AttributeError("training")
            location, before = inside.get(id(owner), (BLOCK_MODE, None))
            value = vars(owner)["training"]
            if (before is None or value is before) and threading.get_ident() == reader:
                attributes_read.add(location)
            return value

        def __set__(self, owner: Any, value: Any) -> None:
            location, before = inside.get(id(owner), (BLOCK_MODE, None))
            if value is before and threading.get_ident() == reader:
                attributes_read.add(location)
            vars(owner)["training"] = value

    if _REFLECTION & set(trace_closure(collect_code(block)).names):
        attributes_read.add(BLOCK_MODE)
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
    """Return whether a submodule overrides `train` or `eval`, which may then change any attribute."""
    stock = (nn.Module.train, nn.Module.eval)
    return any(
        (type(m).train, type(m).eval) != stock or not {"train", "eval"}.isdisjoint(vars(m)) for m in model.modules()
    )


def _instance_dict(obj: Any) -> dict[str, Any]:
    """Return `__dict__` without calling a custom `__getattribute__`, which may read the watched attribute itself."""
    return object.__getattribute__(obj, "__dict__")


class _RecordingAttribute:
    """A data descriptor that stands in for an attribute and records its reads.

    Args:
        locations: for each object's id, the attribute's location and its value before the call.
    """

    def __init__(
        self, cls: type, name: str, locations: dict[int, tuple[AttributeLocation, Any]], read: set[AttributeLocation]
    ):
        self.name, self.locations, self.read = name, locations, read
        self.default = getattr(cls, name, MISSING)

    def __get__(self, owner: Any, cls: type) -> Any:
        if owner is None:  # `Block.temperature`
            self.read |= {location for location, _ in self.locations.values()}
            value = self.default
        else:
            value = _instance_dict(owner).get(self.name, self.default)
            if id(owner) in self.locations and value is self.locations[id(owner)][1]:
                self.read.add(self.locations[id(owner)][0])
        if value is MISSING:
            raise AttributeError(f"{cls.__name__!r} object has no attribute {self.name!r}")
        return value

    def __set__(self, owner: Any, value: Any) -> None:
        if id(owner) in self.locations and is_same(value, self.locations[id(owner)][1]):
            self.read.add(self.locations[id(owner)][0])
        _instance_dict(owner)[self.name] = value

    def __delete__(self, owner: Any) -> None:
        del _instance_dict(owner)[self.name]


def find_owner(block: nn.Module, location: AttributeLocation) -> Any:
    """Return the object that holds an attribute, or None if it is gone."""
    return find_holders(block, location)[-1][1]


def find_holders(block: nn.Module, location: AttributeLocation) -> list[tuple[str, Any]]:
    """Return the objects on the path to an attribute, each with its name in its holder; None if one is gone."""
    if location.module.startswith("@"):
        owner: Any = sys.modules.get(location.module[1:])
    else:
        try:
            owner = block.get_submodule(location.module)
        except AttributeError:
            owner = None
    holders = [("", owner)]
    if location.inner:
        for name in [location.name, *location.inner.split(".")[:-1]]:
            holders.append((name, getattr(holders[-1][1], name, None)))
    return holders


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
