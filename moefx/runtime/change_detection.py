"""Detect changes to absorbed submodules, and to attributes that a block's forward reads.

A rewritten block reads the parameters of its experts but does not call the expert modules: a hook on one would never
fire, and an adapter in its place (LoRA) would be ignored. Every call therefore checks the absorbed modules. Prepared
lists are compared in C, about 50 ns per module. Hooks are checked only after a hook was registered on any module.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from operator import itemgetter, methodcaller
from typing import Any

from torch import nn
from torch.utils.hooks import RemovableHandle

from ..errors import AbsorbedModuleChanged
from ..ir.graphs.block_graph import BlockGraph
from ..ir.guards.attribute_reads import AttributeLocation, find_holders, find_owner, read_value
from ..ir.guards.stored_values import MISSING, StoredForward, is_comparable, is_same

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_children_of, _forward_of = itemgetter("_modules"), methodcaller("get", "forward")


class AbsorbedModules:
    """The absorbed submodules of one block. A deep copy or a pickle watches the copied modules.

    Args:
        block: the block.
        names: names of the submodules, relative to the block.
    """

    def __init__(self, block: nn.Module, names: Sequence[str]):
        self.block = block
        self.names = tuple(names)
        self.modules = [block.get_submodule(name) for name in self.names]
        self.types = [type(module) for module in self.modules]
        self.code = {cls: cls.forward for cls in self.types}
        self.forwards = [module.__dict__.get("forward") for module in self.modules]
        self.children = [dict(module._modules) for module in self.modules]
        self.missing_parameters = [[n for n, p in module._parameters.items() if p is None] for module in self.modules]
        # A parent of an absorbed module may change or be kept: compare only the child that it holds.
        known = set(self.names)
        self.links = [
            (owner, child, getattr(block.get_submodule(owner), child))
            for owner, child in sorted({_split_path(part) for name in self.names for part in _list_path_prefixes(name)})
            if owner not in known
        ]
        self._live: _AbsorbedLists | None = None

    def check(self, block_name: str = "") -> None:
        """Check all modules quickly.

        Raises:
            AbsorbedModuleChanged: a module was replaced, hooked, parametrized, or given another forward.
        """
        live = self._live
        if live is None:
            self.inspect(block_name)
            live = self._live = _AbsorbedLists(self)
        # Read the version before the check: a hook that another thread adds changes it again.
        version = RemovableHandle.next_id
        if (
            version != live.hooks_version
            or list(map(_children_of, live.parents)) != live.children
            or any(live.childless)
            or list(map(len, live.states)) != live.sizes
            or list(map(_forward_of, live.states)) != self.forwards
            or any([list(map(get, registries)) != nothing for get, registries, nothing in live.missing_parameters])
            or any(owner._modules.get(name) is not child for owner, name, child in live.links)
            or list(map(type, self.modules)) != self.types
            or any([cls.forward is not forward for cls, forward in self.code.items()])
        ):
            self.inspect(block_name)
            live.sizes = list(map(len, live.states))
            live.hooks_version = version

    def inspect(self, block_name: str) -> None:
        """Check everything, one module at a time, and raise as `check` does."""
        for owner, name, child in self.links:
            now = self.block.get_submodule(owner)._modules.get(name)
            if now is not child:
                self._raise_changed(block_name, f"{owner}.{name}".strip("."), _describe_replacement(child, now))
        for name, module, cls, children, missing, forward in zip(
            self.names, self.modules, self.types, self.children, self.missing_parameters, self.forwards, strict=True
        ):
            if type(module) is not cls:
                self._raise_changed(block_name, name, f"became a {type(module).__name__}")
            if cls.forward is not self.code[cls]:
                self._raise_changed(block_name, name, f"got a new forward in its class {cls.__name__}")
            for child in {**children, **module._modules}:
                if module._modules.get(child) is not children.get(child):
                    change = _describe_replacement(children.get(child), module._modules.get(child))
                    self._raise_changed(block_name, f"{name}.{child}", change)
            for parameter, value in module._parameters.items():
                if (value is None) is not (parameter in missing):
                    self._raise_changed(
                        block_name, f"{name}.{parameter}", "was removed" if value is None else "was added"
                    )
            if module.__dict__.get("forward") is not forward:
                self._raise_changed(block_name, name, "was given a forward of its own")
            if hook := find_hook_kind(module):
                self._raise_changed(block_name, name, f"got a {hook}")

    def _raise_changed(self, block_name: str, name: str, change: str) -> None:
        raise AbsorbedModuleChanged(
            f"{f'{block_name}.' if block_name else ''}{name} {change} after moefx.compile. The rewritten "
            f"{type(self.block).__name__} reads its parameters but does not call it, so the change would be ignored. "
            "Undo the change, or make it before moefx.compile. The router and shared experts can change at any time"
        )

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_live": None, "code": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.code = {cls: cls.forward for cls in self.types}


class _AbsorbedLists:
    """Lists for comparison in C. They refer to the modules' own dictionaries."""

    def __init__(self, absorbed: AbsorbedModules):
        pairs = list(zip(absorbed.modules, absorbed.children, strict=True))
        self.parents = [module.__dict__ for module, children in pairs if children]
        self.children = [children for _, children in pairs if children]
        # Registries by the names of parameters that are None, such as the bias of Linear(bias=False).
        named: dict[str, list[dict[str, Any]]] = {}
        for module, names in zip(absorbed.modules, absorbed.missing_parameters, strict=True):
            for name in names:
                named.setdefault(name, []).append(module._parameters)
        self.missing_parameters = [
            (methodcaller("get", name), registries, [None] * len(registries)) for name, registries in named.items()
        ]
        self.childless = [module._modules for module, children in pairs if not children]
        self.states = [module.__dict__ for module in absorbed.modules]
        self.sizes = list(map(len, self.states))
        self.links = [(absorbed.block.get_submodule(owner), name, child) for owner, name, child in absorbed.links]
        self.hooks_version = -1


class ReadAttributes:
    """Plain attributes that a program relies on, such as `top_k`, a scale or a flag of a configuration.

    Compares in C, with one call per object.

    Args:
        values: values at capture. For a tensor with two names, the value is the other name (see `ties`).
    """

    def __init__(self, block: nn.Module, values: Mapping[AttributeLocation, Any]):
        self.block, self.values = block, values
        self._live: _AttributeLists | None = None

    def are_unchanged(self) -> bool:
        """Return whether all attributes have their values of capture."""
        if not self.values:
            return True
        if self._live is None:
            if self.find_change() is not None:
                return False
            self._live = _AttributeLists(self.block, self.values)
        if self._live.are_unchanged():
            return True
        self._live = None  # an equal object may have replaced one in the lists
        return self.find_change() is None

    def find_change(self) -> tuple[AttributeLocation, Any] | None:
        """Return the first changed attribute and its new value."""
        for location, value in self.values.items():
            now = read_value(self.block, location)
            if not (
                now is read_value(self.block, value) if isinstance(value, AttributeLocation) else is_same(now, value)
            ):
                return location, now
        return None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_live": None}


class _AttributeLists:
    """Lists for comparison in C. `AbsorbedModules` checks replaced submodules instead."""

    def __init__(self, block: nn.Module, values: Mapping[AttributeLocation, Any]):
        by_owner: dict[int, tuple[Any, dict[str, Any]]] = {}
        self.holders: list[tuple[dict[str, Any], str, Any]] = []
        self.class_attributes: list[tuple[Any, str, Any]] = []  # attributes of classes
        self.tied: list[tuple[Any, str, Any, str]] = []
        for location, value in values.items():
            holders, name = find_holders(block, location), location.attribute
            owner = holders[-1][1]
            if isinstance(value, StoredForward):
                self.holders.append((owner._modules, name, owner._modules.get(name)))
            elif isinstance(value, AttributeLocation):
                self.tied.append((owner, name, find_owner(block, value), value.attribute))
            elif name in getattr(owner, "__dict__", ()) and is_comparable(value):
                by_owner.setdefault(id(owner), (owner, {}))[1][name] = value
            else:
                self.class_attributes.append((owner, name, value))
            for (_, outer), (attribute, inner) in itertools.pairwise(holders):
                if attribute in getattr(outer, "__dict__", ()):
                    self.holders.append((vars(outer), attribute, inner))
                else:
                    self.class_attributes.append((outer, attribute, inner))
        by_names: dict[tuple[str, ...], list[tuple[Any, dict[str, Any]]]] = {}
        for owner, attributes in by_owner.values():
            by_names.setdefault(tuple(attributes), []).append((vars(owner), attributes))
        self.owner_lists = [
            (get, [state for state, _ in pairs], [get(attributes) for _, attributes in pairs])
            for names, pairs in by_names.items()
            for get in [itemgetter(*names)]
        ]

    def are_unchanged(self) -> bool:
        try:
            return (
                all([list(map(get, states)) == expected for get, states, expected in self.owner_lists])
                and all([holder.get(name) is it for holder, name, it in self.holders])
                and all([is_same(getattr(owner, name, MISSING), value) for owner, name, value in self.class_attributes])
                and all([getattr(a, name) is getattr(b, other) for a, name, b, other in self.tied])
            )
        except Exception:  # an attribute is gone, or its values do not compare
            return False


def find_hook_kind(module: nn.Module) -> str:
    """Return the kind of a module's first hook: "forward hook", "backward pre hook", ...; "" without a hook."""
    kind = next((kind for kind in _HOOKS if getattr(module, kind)), "")
    return kind.strip("_").removesuffix("s").replace("_", " ")


def find_absorbed_names(block: nn.Module, graph: BlockGraph, repeated: Sequence[str] = ()) -> tuple[str, ...]:
    """Return the submodules that a graph replaces: they are not called, and neither contain nor belong to a called one.

    Args:
        repeated: modules that the graph calls and whose parts it also computes. The parts count as absorbed.
    """
    called = [str(node.target) for node in graph.graph.nodes if node.op == "call_module"]
    read = [str(node.target).rpartition(".")[0] for node in graph.graph.nodes if node.op == "get_attr"]
    inner = [owner for owner in read if any(owner.startswith(f"{name}.") for name in repeated)]

    def is_kept(name: str) -> bool:
        return any(f"{name}.".startswith(f"{k}.") or f"{k}.".startswith(f"{name}.") for k in called)

    replaced = [name for name, _ in block.named_modules() if name and not is_kept(name)]
    return tuple(dict.fromkeys([*replaced, *inner]))


def _list_path_prefixes(name: str) -> list[str]:
    parts = name.split(".")
    return [".".join(parts[: i + 1]) for i in range(len(parts))]


def _split_path(name: str) -> tuple[str, str]:
    owner, _, child = name.rpartition(".")
    return owner, child


def _describe_replacement(before: nn.Module | None, now: nn.Module | None) -> str:
    if now is None:
        return "was removed"
    if before is None:
        return f"({type(now).__name__}) was added"
    return f"was replaced ({type(before).__name__} by {type(now).__name__})"
