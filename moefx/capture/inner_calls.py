"""Calls of submodules that are given objects or containers, as the run of the whole model records them.

What such a call does beside its result decides whether captures may leave the submodule out (see `skipped_calls`).
"""

from __future__ import annotations

import copy
import dataclasses
import enum
import functools
import types
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from ..ir.attributes import OWN
from ..ir.passed_objects import is_passed
from ..ir.reached import FUNCTIONS
from .captured import below_modes, is_float, tensors_in
from .containers import base_of, contents, same_items, slots_of
from .recorder import Recorder
from .surroundings import Surroundings

_PLAIN = (
    type(None), bool, int, float, complex, str, bytes, torch.Tensor, torch.Size, torch.dtype, torch.device, nn.Module,
    type, enum.Enum, slice, range, types.ModuleType, functools.partial, *FUNCTIONS,
)  # fmt: skip
_DEPTH = 5


def objects_in(args: tuple, kwargs: Mapping[str, Any]) -> Iterator[Any]:
    """Yield the objects and the containers among arguments that a callee can write to."""
    stack = [*args, *kwargs.values()]
    while stack:
        value = stack.pop()
        if is_passed(value) or isinstance(value, _PLAIN):
            continue
        if not isinstance(value, tuple):
            yield value
        if type(value) in (tuple, list, dict):
            stack += value.values() if type(value) is dict else value


def tensors_within(value: Any, depth: int = _DEPTH) -> Iterator[torch.Tensor]:
    """Yield the tensors of an object, and of what it refers to."""
    if isinstance(value, torch.Tensor):
        yield value
    elif depth and not isinstance(value, _PLAIN) and not is_passed(value):
        for inner in _parts(value):
            yield from tensors_within(inner, depth - 1)


def _parts(value: Any) -> list[Any]:
    """What an object refers to: its items and its attributes."""
    inner: list[Any] = []
    if isinstance(value, Mapping):
        inner += value.values()
    elif isinstance(value, (list, tuple, set, frozenset)):
        inner += value
    inner += getattr(value, "__dict__", {}).values()
    return inner + [v for slot in slots_of(value) for v in slot.get()]


def copy_abstract(value: Any) -> Any:
    """Copy an object, with meta tensors in the place of its floats.

    Raises whatever a class raises whose objects cannot be copied.
    """
    memo: dict[int, Any] = {}
    _note_tensors(value, memo, _DEPTH)
    return copy.deepcopy(value, memo)


def _note_tensors(value: Any, memo: dict[int, Any], depth: int) -> None:
    if isinstance(value, torch.Tensor):
        memo[id(value)] = value.detach().to("meta") if is_float(value) else value.detach().cpu().clone()
    elif isinstance(value, nn.Module):
        memo[id(value)] = value  # the cache's owner, say
    elif depth and not isinstance(value, _PLAIN):
        for inner in _parts(value):
            _note_tensors(inner, memo, depth - 1)


@dataclasses.dataclass(frozen=True)
class Changes:
    """What a call of a submodule does beside its result.

    Attributes:
        missed: what it does that a capture would miss, and a remedy.
        containers: positions among `objects_in` its arguments of those that it writes to.
        attributes: those that it sets: submodule, from the called one, and name.
        shares: whether two of its inputs, its results and what it keeps share memory.
        widths: sizes of its parameters.
    """

    missed: tuple[str, str] | None = None
    containers: frozenset[int] = frozenset()
    attributes: frozenset[tuple[str, str]] = frozenset()
    shares: bool = False
    widths: frozenset[int] = frozenset()


class InnerCall:
    """A recorded call of a submodule that is given objects or containers.

    Attributes:
        name: of the submodule, from the block.
        changes: what it does beside.
        is_overwritten: whether the block then writes in place to a tensor that the submodule was given or returned.
    """

    def __init__(self, tracer: Recorder, name: str, args: tuple, kwargs: dict[str, Any], out: Any, changes: Changes):
        self.name, self.args, self.kwargs, self.out, self.changes = name, args, kwargs, out, changes
        self.is_overwritten = False
        self._tensors = [*_tensors_outside_containers((args, kwargs)), *tensors_in(out)]
        self._versions = _versions(tracer, self._tensors)

    def look_back(self, tracer: Recorder) -> None:
        """Note what was written to since the call."""
        self.is_overwritten |= _versions(tracer, self._tensors) != self._versions


def _versions(tracer: Recorder, tensors: Iterable[torch.Tensor]) -> list[int]:
    with below_modes(), torch.DisableTorchFunction():
        return [tracer.versions.get(id(tracer.root(t)), 0) for t in tensors if id(t) in tracer.aliases]


class StateBefore:
    """What a call of a submodule may change, as it is before the call."""

    def __init__(self, tracer: Recorder, model: nn.Module, module: nn.Module, args: tuple, kwargs: dict[str, Any]):
        self.tracer, self.module, self.arguments = tracer, module, (args, kwargs)
        self.objects = list(objects_in(args, kwargs))
        self.tensors = _tensors_outside_containers(self.arguments)
        with below_modes(), torch.DisableTorchFunction():
            for t in tensors_in(self.arguments):
                tracer.node_of(t)
        self.versions = _versions(tracer, self.tensors)
        self.held = [self._held(thing) for thing in self.objects]
        self.attributes = self._attributes()
        inside = {id(m) for m in module.modules()}
        outside = {id(v) for m in model.modules() if id(m) not in inside for v in vars(m).values()}
        self.own = {  # containers of the module, such as a table by length, that no other module has
            key: (value, contents(value))
            for key, value in self.attributes.items()
            if base_of(value) is not None and id(value) not in outside
        }
        self.surroundings = Surroundings(module, (), self.objects)

    def changes(self, out: Any) -> Changes:
        """What was done since."""
        now = self._attributes()
        names = {key for key, value in now.items() if key not in self.attributes or self.attributes[key] is not value}
        names |= {key for key, (value, items) in self.own.items() if not same_items(contents(value), items)}
        modules = dict(self.module.named_modules())
        replaced = [key for path, key in names if key in modules[path]._buffers]
        inputs, results = self._roots(self.tensors), self._roots(tensors_in(out))
        kept = {*self._roots(t for thing in (*self.objects, *now.values()) for t in tensors_within(thing))}
        missed = None
        if _versions(self.tracer, self.tensors) != self.versions:
            missed = "writes to one of its inputs in place", "return a new tensor from it"
        elif {*inputs} & {*results}:
            missed = "returns one of its inputs, or a view of it", "return a new tensor from it"
        elif replaced:
            missed = f"puts another tensor in the place of its buffer {replaced[0]}", "write to the buffer in place"
        elif elsewhere := self.surroundings.changed({id(value) for value, _ in self.own.values()}):
            missed = f"writes to {elsewhere[0]}", "keep it in the object, or in a buffer of its own"
        containers = {
            i
            for i, (thing, (items, versions)) in enumerate(zip(self.objects, self.held, strict=True))
            if not same_items(_items(thing), items) or _versions(self.tracer, tensors_in(items)) != versions
        }
        shares = bool(kept & {*inputs, *results}) or len({*results}) < len(results)
        widths = frozenset(n for p in self.module.parameters() for n in p.shape)
        return Changes(missed, frozenset(containers), frozenset(names), shares, widths)

    def _held(self, thing: Any) -> tuple[Any, list[int]]:
        items = _items(thing)
        return items, _versions(self.tracer, tensors_in(items))

    def _roots(self, tensors: Iterable[torch.Tensor]) -> list[int]:
        with below_modes(), torch.DisableTorchFunction():
            return [id(self.tracer.root(t)) for t in tensors if id(t) in self.tracer.aliases]

    def _attributes(self) -> dict[tuple[str, str], Any]:
        return {
            (name, key): value
            for name, m in self.module.named_modules()
            for key, value in {**vars(m), **m._buffers}.items()
            if key not in OWN
        }


def _items(thing: Any) -> Any:
    """What is in a container, or the attributes of an object."""
    return contents(thing) if base_of(thing) is not None else dict(getattr(thing, "__dict__", {}))


def _tensors_outside_containers(tree: tuple[tuple, dict[str, Any]]) -> list[torch.Tensor]:
    """The tensors among arguments that are not in containers which a callee may write to."""
    args, kwargs = tree
    found: list[torch.Tensor] = []
    stack = [*args, *kwargs.values()]
    while stack:
        value = stack.pop()
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif isinstance(value, tuple):
            stack += value
    return found


__all__ = ["Changes", "InnerCall", "StateBefore", "copy_abstract", "objects_in", "tensors_within"]
