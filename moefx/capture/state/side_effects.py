"""Side effects of a block's call: collect them as `Effect`s, and undo them.

A capture runs the user's code, which may write to buffers, attributes, inputs and random generators. It restores them
when it ends.
"""

from __future__ import annotations

import contextlib
import pickle
import random
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import NoneType
from typing import Any

import torch
from torch import fx, nn

from ...ir.node_meta import find_original
from ...util.tensor_trees import collect_tensors, is_float, map_tensors
from ..tracing.capture_result import Effect
from ..tracing.tracer import Tracer
from .raw_containers import copy_items, restore_items


def _list_attribute_tensors(block: nn.Module) -> list[tuple[dict[str, Any], str, str, torch.Tensor]]:
    """List tensors that are plain attributes of modules: the module's `vars`, the name, the path, and the tensor."""
    states = [(prefix, vars(module)) for prefix, module in block.named_modules()]
    return [
        (state, key, f"{prefix}.{key}" if prefix else key, value)
        for prefix, state in states
        for key, value in state.items()
        if isinstance(value, torch.Tensor)
    ]


def find_attribute_tensors(block: nn.Module) -> dict[int, str]:
    """Return the paths of tensors that are plain attributes of modules, by id."""
    return {id(value): path for _, _, path, value in _list_attribute_tensors(block)}


def has_integers(block: nn.Module) -> bool:
    """Return whether a parameter, buffer or tensor attribute of a block holds integers."""
    attributes = [value for *_, value in _list_attribute_tensors(block)]
    return not all(map(is_float, [*attributes, *block.parameters(), *block.buffers()]))


def install_copies(block: nn.Module, make_copy: Callable[[torch.Tensor, str], torch.Tensor]) -> dict[int, str]:
    """Replace integer tensors that are plain attributes of modules by copies, until `restore_attributes`.

    Returns:
        The paths of the copies, by id.
    """
    copies: dict[int, torch.Tensor] = {}
    named: dict[int, str] = {}
    for state, key, path, value in _list_attribute_tensors(block):
        if not is_float(value):
            if id(value) not in copies:
                copies[id(value)] = make_copy(value, path)
                named[id(copies[id(value)])] = path
            state[key] = copies[id(value)]
    return named


REGISTRIES = ("_parameters", "_buffers", "_modules")
Registries = list[tuple[str, dict[str, Any], dict[str, Any]]]  # path of a module, one of its registries, a copy
HOOKS = {k for k in vars(nn.Module()) if k.endswith(("_hooks", "_hooks_with_kwargs", "_hooks_always_called"))}


_BEFORE = {"_forward_pre_hooks", "_forward_pre_hooks_with_kwargs"}


@contextlib.contextmanager
def silence_hooks(block: nn.Module) -> Iterator[None]:
    """Remove hooks while moefx runs a block for itself.

    The block's own hooks run outside of its forward. Forward hooks of submodules observe results, such as router
    logits. Pre-hooks of submodules stay, because they may compute weights.
    """
    removed_hooks: list[tuple[dict[str, Any], dict[str, Any]]] = []
    for module in block.modules():
        state = vars(module)
        hooks = {k: state[k] for k in (HOOKS if module is block else HOOKS - _BEFORE) if state.get(k)}
        if hooks:
            removed_hooks.append((state, hooks))
            state.update({k: type(hook)() for k, hook in hooks.items()})
    try:
        yield
    finally:
        for state, hooks in removed_hooks:
            state.update(hooks)


def is_random_generator(obj: Any) -> bool:
    """Return whether an object is a random generator of Python or NumPy. Captures follow those of torch."""
    return _find_accessors(obj) is not None


def _find_accessors(generator: Any) -> tuple[Callable[[], Any], Callable[[Any], None]] | None:
    """Return the functions that get and set the state of a generator; None for another object."""
    if generator is random or isinstance(generator, random.Random):
        return generator.getstate, generator.setstate
    if type(generator).__module__.startswith("numpy.random") or getattr(generator, "__name__", "") == "numpy.random":
        if hasattr(generator, "get_state"):
            return generator.get_state, generator.set_state
        if hasattr(generator, "bit_generator"):
            bits = generator.bit_generator
            return lambda: bits.state, lambda state: setattr(bits, "state", state)
    return None


@contextlib.contextmanager
def keep_random_state(extra: Mapping[str, Any] | None = None) -> Iterator[Callable[[], list[str]]]:
    """Restore the random generators of Python and NumPy at the end.

    Args:
        extra: further generators, by name.

    Yields:
        A function that names the generators that the program has used.
    """
    generators = {**(extra or {}), "random": random, "numpy.random": getattr(sys.modules.get("numpy"), "random", None)}
    accessors = {
        name: pair for name, generator in generators.items() if (pair := _find_accessors(generator)) is not None
    }
    before = {name: get() for name, (get, _) in accessors.items()}
    try:  # states with arrays have no ==
        yield lambda: [n for n, (get, _) in accessors.items() if pickle.dumps(get()) != pickle.dumps(before[n])]
    finally:
        for name, (_, set_state) in accessors.items():
            set_state(before[name])


def collect_effects(
    tracer: Tracer,
    modules: list[tuple[str, nn.Module]],
    before: dict[str, dict[str, Any]],
    initial: dict[str, torch.Tensor],
    state: dict[str, torch.Tensor],
    inputs: list[tuple[int, torch.Tensor, fx.Node]],
) -> list[Effect]:
    """Collect the effects of a call.

    Args:
        modules: those of the block before the call, with their paths.
        before: their `vars` before the call, by path.
        initial, state: parameters and buffers before and after the call.
        inputs: tensor arguments with their position and node.
    """
    effects = []
    for name, t in state.items():
        if t is not initial[name]:  # as `self.load = 0.9 * self.load + ...` does
            effects.append(Effect("attribute", name, tracer.node_of(t)))
        elif tracer.versions.get(id(t)):
            effects.append(Effect("buffer", name, tracer.node_of(t)))
    for _, t, node in inputs:
        if tracer.versions.get(id(t)):
            effects.append(Effect("input", node, tracer.node_of(t)))
    for n, m in modules:
        for key, value in vars(m).items():
            value_before = before[n].get(key, None)
            if value is value_before or key in REGISTRIES or key.startswith("_forward") or key.startswith("_backward"):
                continue
            path = f"{n}.{key}" if n else key
            if _holds_copies(value, value_before, tracer):  # `nn.GRU` lists its parameters again if they were replaced
                continue
            if isinstance(value, torch.Tensor) and id(value) in tracer.aliases:
                effects.append(Effect("attribute", path, tracer.node_of(value)))
            elif _holds_results(value, tracer) and collect_tensors(value):
                effects.append(Effect("attribute", path, map_tensors(value, tracer.node_of)))
            elif not _is_equal(value, value_before):
                effects.append(Effect("state", path, value))
    return effects


def find_registry_changes(registries: Registries) -> list[Effect]:
    """Find submodules, parameters and buffers that a call registered, replaced or removed."""
    effects = []
    for path, registry, before in registries:
        for name in registry.keys() | before.keys():
            if name not in registry or name not in before or registry[name] is not before[name]:
                effects.append(Effect("state", f"{path}.{name}" if path else name, registry.get(name)))
    return effects


def copy_registries(modules: Iterable[tuple[str, nn.Module]], keys: Iterable[str]) -> Registries:
    """Copy the dictionaries `keys` of each module: `REGISTRIES`, or `HOOKS`."""
    states = [(path, vars(module)) for path, module in modules]
    return [(path, state[key], copy_items(state[key])) for path, state in states for key in keys if key in state]


def restore_registries(registries: Registries) -> None:
    for _, registry, before in registries:
        if registry or before:
            restore_items(registry, before)


def _holds_results(value: Any, tracer: Tracer) -> bool:
    """Return whether a container holds only tensors of this call, names and numbers."""
    if type(value) in (list, tuple, dict):
        return all(_holds_results(v, tracer) for v in (value.values() if type(value) is dict else value))
    return id(value) in tracer.aliases if isinstance(value, torch.Tensor) else type(value) in (str, bool, int, NoneType)


def _holds_copies(value: Any, value_before: Any, tracer: Tracer) -> bool:
    """Return whether a list holds, or refers weakly to, the abstract copies of the parameters that it held before
    the call."""
    if type(value) is not list or type(value_before) is not list or len(value) != len(value_before):
        return False
    items, items_before = (
        [v() if isinstance(v, weakref.ref) else v for v in values] for values in (value, value_before)
    )
    nodes = [tracer.node_of(t) for t in items if isinstance(t, torch.Tensor) and id(t) in tracer.aliases]
    if not items or len(nodes) < len(items):
        return False
    return all(n.op == "get_attr" and find_original(n) is t for n, t in zip(nodes, items_before, strict=True))


def _is_equal(value: Any, value_before: Any) -> bool:
    if collect_tensors(value) or collect_tensors(value_before):
        return False
    try:
        return bool(value == value_before)
    except Exception:
        return False


def restore_attributes(module: nn.Module, before: dict[str, Any]) -> None:
    attributes = vars(module)
    for key in [k for k in attributes if k not in before]:
        del attributes[key]
    for key, value in before.items():
        if attributes.get(key) is not value:
            attributes[key] = value
