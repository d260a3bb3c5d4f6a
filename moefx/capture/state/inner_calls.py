"""Record the calls of submodules that get objects or containers, such as a key-value cache, and their side effects.

The survey of the whole model uses these records. A call's side effects decide whether captures may skip the submodule
(see `skipped_calls`).
"""

from __future__ import annotations

import copy
import dataclasses
import enum
import functools
import types
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from ...ir.guards.attribute_reads import MODULE_INTERNALS
from ...ir.guards.code_closure import FUNCTION_TYPES
from ...ir.passed_objects import is_passed
from ...util.tensor_trees import collect_tensors, is_float, suspend_modes
from ..tracing.graph_recorder import Recorder
from .outside_state import OutsideState
from .raw_containers import copy_items, find_base_type, have_same_items, list_slots

_PLAIN = (
    type(None), bool, int, float, complex, str, bytes, torch.Tensor, torch.Size, torch.dtype, torch.device, nn.Module,
    type, enum.Enum, slice, range, types.ModuleType, functools.partial, *FUNCTION_TYPES,
)  # fmt: skip
_DEPTH = 5


def iterate_objects(args: tuple, kwargs: Mapping[str, Any]) -> Iterator[Any]:
    """Yield the objects and containers among arguments that a callee can write to."""
    stack = [*args, *kwargs.values()]
    while stack:
        value = stack.pop()
        if is_passed(value) or isinstance(value, _PLAIN):
            continue
        if not isinstance(value, tuple):
            yield value
        if type(value) in (tuple, list, dict):
            stack += value.values() if type(value) is dict else value


def collect_given_tensors(arguments: Iterable[Any]) -> list[torch.Tensor]:
    """Collect the tensors among arguments, alone or in tuples; not in containers, which a callee may write to."""
    tensors: list[torch.Tensor] = []
    for value in arguments:
        if isinstance(value, torch.Tensor):
            tensors.append(value)
        elif isinstance(value, tuple):
            tensors += collect_given_tensors(value)
    return tensors


def iterate_tensors(value: Any, depth: int = _DEPTH) -> Iterator[torch.Tensor]:
    """Yield the tensors of an object, and of the objects that it refers to."""
    if isinstance(value, torch.Tensor):
        yield value
    elif depth and not isinstance(value, _PLAIN) and not is_passed(value):
        for inner in _list_parts(value):
            yield from iterate_tensors(inner, depth - 1)


def _list_parts(value: Any) -> list[Any]:
    """Return the items and the attributes of an object."""
    inner: list[Any] = []
    if isinstance(value, Mapping):
        inner += value.values()
    elif isinstance(value, (list, tuple, set, frozenset)):
        inner += value
    inner += getattr(value, "__dict__", {}).values()
    return inner + [v for slot in list_slots(value) for v in slot.get()]


def copy_abstract(value: Any) -> Any:
    """Copy an object, with meta tensors in the place of its floats.

    Raises:
        Exception: the object does not support `copy.deepcopy`.
    """
    memo: dict[int, Any] = {}
    _copy_tensors(value, memo, _DEPTH)
    return copy.deepcopy(value, memo)


def _copy_tensors(value: Any, memo: dict[int, Any], depth: int) -> None:
    if isinstance(value, torch.Tensor):
        memo[id(value)] = value.detach().to("meta") if is_float(value) else value.detach().cpu().clone()
    elif isinstance(value, nn.Module):
        memo[id(value)] = value  # such as the owner of a cache
    elif depth and not isinstance(value, _PLAIN):
        for inner in _list_parts(value):
            _copy_tensors(inner, memo, depth - 1)


@dataclasses.dataclass(frozen=True)
class CallChanges:
    """The side effects of a submodule's call.

    Attributes:
        missed: a change that a capture would miss, in words, and a remedy.
        attributes: the attributes that it sets: the path of their module from the called one, and their name.
    """

    missed: tuple[str, str] | None = None
    attributes: frozenset[tuple[str, str]] = frozenset()


class InnerCall:
    """A recorded call of a submodule that gets objects or containers.

    Attributes:
        name: path of the submodule from the block.
        changes: its side effects.
        is_overwritten: whether the block later writes in place to a tensor that the submodule got or returned.
    """

    def __init__(
        self, tracer: Recorder, name: str, args: tuple, kwargs: dict[str, Any], out: Any, changes: CallChanges
    ):
        self.name, self.args, self.kwargs, self.out, self.changes = name, args, kwargs, out, changes
        self.is_overwritten = False
        self._tensors = [*collect_given_tensors((*args, *kwargs.values())), *collect_tensors(out)]
        self._versions = _count_versions(tracer, self._tensors)

    def log_overwritten(self, tracer: Recorder) -> None:
        """Update `is_overwritten`."""
        self.is_overwritten |= _count_versions(tracer, self._tensors) != self._versions

    def find_missed_change(self, known_ids: Collection[int]) -> tuple[str, str] | None:
        """Return a change by the call that captures would miss, in words, and a remedy; None if there is none.

        Args:
            known_ids: ids of the objects that the block got as arguments, which captures replace.
        """
        if unknown := [o for o in iterate_objects(self.args, self.kwargs) if id(o) not in known_ids]:
            change = f"a {type(unknown[0]).__name__} that the block itself did not get, and that it may write to, too"
            return change, f"pass its content to {self.name}: tensors and numbers, alone or in a tuple"
        if self.is_overwritten:
            return (
                "the block writes in place to a tensor that it got or returned, and that may be kept",
                "compute a new tensor instead: y = y + x, not y += x",
            )
        return self.changes.missed


def _count_versions(tracer: Recorder, tensors: Iterable[torch.Tensor]) -> list[tuple[int, int]]:
    """Return the number of writes to each tensor, and the number of its attributes."""
    with suspend_modes(), torch.DisableTorchFunction():
        tracked = [t for t in tensors if id(t) in tracer.aliases]
        return [(tracer.versions.get(id(tracer.find_base(t)), 0), len(vars(t))) for t in tracked]


class StateSnapshot:
    """The state that a call of a submodule may change, before the call."""

    def __init__(self, tracer: Recorder, model: nn.Module, module: nn.Module, args: tuple, kwargs: dict[str, Any]):
        self.tracer, self.module = tracer, module
        self.tensors = collect_given_tensors((*args, *kwargs.values()))
        with suspend_modes(), torch.DisableTorchFunction():
            for t in self.tensors:
                tracer.node_of(t)
        self.versions = _count_versions(tracer, self.tensors)
        self.attributes = self._list_attributes()
        inside = {id(m) for m in module.modules()}
        outer_ids = {id(v) for m in model.modules() if id(m) not in inside for v in vars(m).values()}
        self.containers = {  # containers that only this module has, such as a table of positions by length
            key: (value, copy_items(value))
            for key, value in self.attributes.items()
            if find_base_type(value) is not None and id(value) not in outer_ids
        }
        self.outside_state = OutsideState(module, (), iterate_objects(args, kwargs))

    def find_changes(self, out: Any) -> CallChanges:
        """Compare with the state after the call, which returned `out`."""
        attributes = self._list_attributes()
        names = {
            key for key, value in attributes.items() if key not in self.attributes or self.attributes[key] is not value
        }
        names |= {
            key for key, (value, items) in self.containers.items() if not have_same_items(copy_items(value), items)
        }
        modules = dict(self.module.named_modules())
        buffers = [key for path, key in names if key in modules[path]._buffers]
        results = self._find_roots(collect_tensors(out))
        missed_change = None
        if _count_versions(self.tracer, self.tensors) != self.versions:
            missed_change = "writes to one of its inputs in place", "return a new tensor from it"
        elif {*self._find_roots(self.tensors)} & {*results}:
            missed_change = "returns one of its inputs, or a view of it", "return a new tensor from it"
        elif len({*results}) < len(results):
            missed_change = "returns two tensors that share memory", "return new tensors from it"
        elif buffers:
            missed_change = f"replaces its buffer {buffers[0]} by another tensor", "write to the buffer in place"
        elif outside_changes := self.outside_state.list_changes({id(value) for value, _ in self.containers.values()}):
            missed_change = f"writes to {outside_changes[0]}", "keep it in the object, or in a buffer of its own"
        return CallChanges(missed_change, frozenset(names))

    def _find_roots(self, tensors: Iterable[torch.Tensor]) -> list[int]:
        with suspend_modes(), torch.DisableTorchFunction():
            return [id(self.tracer.find_base(t)) for t in tensors if id(t) in self.tracer.aliases]

    def _list_attributes(self) -> dict[tuple[str, str], Any]:
        return {
            (name, key): value
            for name, m in self.module.named_modules()
            for key, value in {**vars(m), **m._buffers}.items()
            if key not in MODULE_INTERNALS
        }


__all__ = [
    "CallChanges",
    "InnerCall",
    "StateSnapshot",
    "collect_given_tensors",
    "copy_abstract",
    "iterate_objects",
    "iterate_tensors",
]
