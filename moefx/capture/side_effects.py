"""What a call of a block changes besides returning a value, and how a capture leaves no trace."""

from __future__ import annotations

import contextlib
import pickle
import random
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping
from types import NoneType
from typing import Any

import torch
from torch import fx, nn

from .capture_result import Effect
from .tensor_trees import collect_tensors, is_float, map_tensors
from .tracer import Tracer


def _attributes(block: nn.Module) -> list[tuple[dict[str, Any], str, str, torch.Tensor]]:
    """Tensors that hang on modules as ordinary attributes: where each hangs, its name there and from the block."""
    return [
        (vars(module), key, f"{prefix}.{key}" if prefix else key, value)
        for prefix, module in block.named_modules()
        for key, value in vars(module).items()
        if isinstance(value, torch.Tensor)
    ]


def find_attribute_tensors(block: nn.Module) -> dict[int, str]:
    """Tensors that hang on modules as ordinary attributes, by identity."""
    return {id(value): path for _, _, path, value in _attributes(block)}


def has_integers(block: nn.Module) -> bool:
    """Whether parameters, buffers or attributes of a block are integers."""
    attributes = [value for *_, value in _attributes(block)]
    return not all(map(is_float, [*attributes, *block.parameters(), *block.buffers()]))


def install_stand_ins(block: nn.Module, stand_in: Callable[[torch.Tensor, str], torch.Tensor]) -> dict[int, str]:
    """Put stand-ins in the place of integers that hang on modules as ordinary attributes, until `restore`. Returns the
    names of these by their identity."""
    made: dict[int, torch.Tensor] = {}
    named: dict[int, str] = {}
    for state, key, path, value in _attributes(block):
        if not is_float(value):
            if id(value) not in made:
                made[id(value)] = stand_in(value, path)
                named[id(made[id(value)])] = path
            state[key] = made[id(value)]
    return named


HOOKS = {k for k in vars(nn.Module()) if k.endswith(("_hooks", "_hooks_with_kwargs", "_hooks_always_called"))}


_BEFORE = {"_forward_pre_hooks", "_forward_pre_hooks_with_kwargs"}


@contextlib.contextmanager
def silence_hooks(block: nn.Module) -> Iterator[None]:
    """While moefx runs a block for itself: without the block's own hooks, which stay outside of its forward, and those
    that look at what its parts return, such as a recorder of router logits. Hooks that make a part's weights stay."""
    taken: list[tuple[dict[str, Any], dict[str, Any]]] = []
    for module in block.modules():
        state = vars(module)
        hooks = {k: state[k] for k in (HOOKS if module is block else HOOKS - _BEFORE) if state.get(k)}
        if hooks:
            taken.append((state, hooks))
            state.update({k: type(held)() for k, held in hooks.items()})
    try:
        yield
    finally:
        for state, hooks in taken:
            state.update(hooks)


def is_random_generator(thing: Any) -> bool:
    """Whether it draws random numbers: Python's or NumPy's; torch's are followed."""
    return _accessors(thing) is not None


def _accessors(thing: Any) -> tuple[Callable[[], Any], Callable[[Any], None]] | None:
    """What gives the state of a generator, and what sets it."""
    if thing is random or isinstance(thing, random.Random):
        return thing.getstate, thing.setstate
    if type(thing).__module__.startswith("numpy.random") or getattr(thing, "__name__", "") == "numpy.random":
        if hasattr(thing, "get_state"):
            return thing.get_state, thing.set_state
        if hasattr(thing, "bit_generator"):
            of = thing.bit_generator
            return lambda: of.state, lambda state: setattr(of, "state", state)
    return None


@contextlib.contextmanager
def keep_random_state(held: Mapping[str, Any] | None = None) -> Iterator[Callable[[], list[str]]]:
    """Random numbers of Python's and of NumPy's come out as if none had been drawn. Yields what names the generators of
    which some were. Args: held: more of them than those of the modules, by name."""
    known = {**(held or {}), "random": random, "numpy.random": getattr(sys.modules.get("numpy"), "random", None)}
    accessors = {name: found for name, thing in known.items() if (found := _accessors(thing)) is not None}
    before = {name: get() for name, (get, _) in accessors.items()}
    try:  # states with arrays do not compare
        yield lambda: [n for n, (get, _) in accessors.items() if pickle.dumps(get()) != pickle.dumps(before[n])]
    finally:
        for name, (_, put) in accessors.items():
            put(before[name])


def collect_effects(
    tracer: Tracer,
    block: nn.Module,
    before: dict[str, dict[str, Any]],
    given: dict[str, torch.Tensor],
    state: dict[str, torch.Tensor],
    inputs: list[tuple[int, torch.Tensor, fx.Node]],
) -> list[Effect]:
    """`given`, `state`: parameters and buffers before and after the call."""
    found = []
    for name, t in state.items():
        if t is not given[name]:  # `self.load = 0.9 * self.load + ...` puts another tensor there
            found.append(Effect("attribute", name, tracer.node_of(t)))
        elif tracer.versions.get(id(t)):
            found.append(Effect("buffer", name, tracer.node_of(t)))
    for _, t, node in inputs:
        if tracer.versions.get(id(t)):
            found.append(Effect("input", node, tracer.node_of(t)))
    for n, m in block.named_modules():
        for key, value in vars(m).items():
            old = before[n].get(key, None)
            if (
                value is old
                or key in ("_parameters", "_buffers", "_modules")
                or key.startswith("_forward")
                or key.startswith("_backward")
            ):
                continue
            path = f"{n}.{key}" if n else key
            if _stand_for(value, old, tracer):  # `nn.GRU` lists its parameters again if they are other objects
                continue
            if isinstance(value, torch.Tensor) and id(value) in tracer.aliases:
                found.append(Effect("attribute", path, tracer.node_of(value)))
            elif _holds_results(value, tracer) and collect_tensors(value):
                found.append(Effect("attribute", path, map_tensors(value, tracer.node_of)))
            elif not _unchanged(value, old):
                found.append(Effect("state", path, value))
    return found


def _holds_results(value: Any, tracer: Tracer) -> bool:
    """Whether a container is made of tensors of this call, and of names and numbers."""
    if type(value) in (list, tuple, dict):
        return all(_holds_results(v, tracer) for v in (value.values() if type(value) is dict else value))
    return id(value) in tracer.aliases if isinstance(value, torch.Tensor) else type(value) in (str, bool, int, NoneType)


def _stand_for(value: Any, old: Any, tracer: Tracer) -> bool:
    """Whether a list holds, or refers weakly to, what stands for the parameters that it held before the call."""
    if type(value) is not list or type(old) is not list or len(value) != len(old):
        return False
    now, before = ([v() if isinstance(v, weakref.ref) else v for v in some] for some in (value, old))
    nodes = [tracer.node_of(t) for t in now if isinstance(t, torch.Tensor) and id(t) in tracer.aliases]
    if not now or len(nodes) < len(now):
        return False
    return all(n.op == "get_attr" and n.meta["original"] is t for n, t in zip(nodes, before, strict=True))


def _unchanged(value: Any, old: Any) -> bool:
    if collect_tensors(value) or collect_tensors(old):
        return False
    try:
        return bool(value == old)
    except Exception:
        return False


def restore_attributes(module: nn.Module, before: dict[str, Any]) -> None:
    now = vars(module)
    for key in [k for k in now if k not in before]:
        del now[key]
    for key, value in before.items():
        if now.get(key) is not value:
            now[key] = value
