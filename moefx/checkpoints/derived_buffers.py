"""Compute buffers again that a checkpoint does not hold, such as the frequencies of rotary embeddings.

A model on the meta device has no values for its non-persistent buffers. The module that made them makes them again: by
transformers' initialisation, by its own `reset_parameters`, or by a new module from the same config.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..errors import InvalidCheckpoint
from ..ir.guards.stored_values import is_same
from ..runtime.ranks.state_dicts import join_name


class DerivedBuffers(NamedTuple):
    """The non-persistent buffers of one module that are on the meta device.

    Attributes:
        owner: the model of transformers around the module, None for others.
    """

    path: str
    module: nn.Module
    names: tuple[str, ...]
    owner: Any


def list_derived_names(model: nn.Module) -> set[str]:
    """Return the names of all buffers that are not in the state dict."""
    return {join_name(path, name) for path, module in model.named_modules() for name in _list_derived(module)}


def find_meta_buffers(model: nn.Module) -> list[DerivedBuffers]:
    """Find the buffers that have no values once the model has left the meta device."""

    def visit(module: nn.Module, path: str, owner: Any) -> Iterator[DerivedBuffers]:
        owner = module if hasattr(module, "_init_weights") else owner
        names = tuple(name for name in _list_derived(module) if module._buffers[name].is_meta)  # type: ignore[union-attr]
        if names:
            yield DerivedBuffers(path, module, names, owner)
        for name, child in module._modules.items():
            if child is not None:
                yield from visit(child, join_name(path, name), owner)

    return list(visit(model, "", None))


@torch.no_grad()
def recompute_buffers(derived: list[DerivedBuffers]) -> None:
    """Compute the buffers again, in place. They are not on the meta device any more.

    Raises:
        InvalidCheckpoint: no way computes all of a module's buffers.
    """
    seen: set[int] = set()
    for buffers in derived:
        if id(buffers.module) in seen:
            continue
        seen.add(id(buffers.module))
        if not any(_computes_all(buffers, way) for way in (_initialize, _reset, _construct)):
            names = ", ".join(join_name(buffers.path, name) for name in buffers.names)
            raise InvalidCheckpoint(
                f"{names}: a checkpoint does not hold these buffers, and {type(buffers.module).__name__} does not say "
                "how to compute them. Give the module a method reset_parameters() that writes them, or build it "
                "outside of torch.device('meta')"
            )


def _computes_all(buffers: DerivedBuffers, compute: Callable[[DerivedBuffers], None]) -> bool:
    """Run one way twice, after different values. Elements that it does not write differ."""
    held: Any = buffers.module._buffers
    shapes = [held[name].shape for name in buffers.names]
    results = []
    for value in (0, 1):
        for name in buffers.names:
            held[name].fill_(value)
        try:
            compute(buffers)
        except Exception:
            return False
        if any(held[name] is None or held[name].is_meta for name in buffers.names):
            return False
        results.append([held[name].clone() for name in buffers.names])
    first, second = results
    return all(a.shape == shape and torch.equal(a, b) for a, b, shape in zip(first, second, shapes, strict=True))


def _initialize(buffers: DerivedBuffers) -> None:
    stand_in = _make_stand_in(buffers)
    buffers.owner._init_weights(stand_in)
    _take_buffers(buffers, stand_in)


def _reset(buffers: DerivedBuffers) -> None:
    stand_in = _make_stand_in(buffers)
    stand_in.reset_parameters()
    _take_buffers(buffers, stand_in)


def _construct(buffers: DerivedBuffers) -> None:
    """Construct a module of the same class from its config, as modules of transformers are, and take its buffers.

    Raises:
        ValueError: the module may have been constructed with further arguments, which the new one does not have.
    """
    fresh = type(buffers.module)(buffers.module.config)  # type: ignore[call-arg]
    if _may_have_further_arguments(fresh, buffers.module):
        raise ValueError("may have been constructed with further arguments")
    _take_buffers(buffers, fresh)
    for name, value in vars(buffers.module).items():  # tensors beside the buffers, of transformers 4
        if isinstance(value, Tensor) and value.is_meta:
            device = buffers.module._buffers[buffers.names[0]].device  # type: ignore[union-attr]
            vars(buffers.module)[name] = vars(fresh)[name].to(device)


def _may_have_further_arguments(fresh: nn.Module, module: nn.Module) -> bool:
    """Return whether a module may have been constructed with other arguments, besides its config, than a new one.

    An argument that a module keeps as an attribute of the same name has the attribute's value. Devices and dtypes do
    not change the buffers that are copied.
    """
    missing = object()
    for name in list(inspect.signature(type(module)).parameters)[1:]:
        new, old = getattr(fresh, name, missing), getattr(module, name, missing)
        if name not in ("device", "dtype") and (new is missing or not is_same(new, old)):
            return True
    return False


def _make_stand_in(buffers: DerivedBuffers) -> Any:
    """Return a module with the same buffers whose own parameters are on the meta device: initialisation must neither
    write the model's parameters, which may be parts, nor draw random numbers."""
    module = buffers.module
    if any(next(child.parameters(), None) is not None for child in module.children()):
        raise NotImplementedError("may initialise the parameters of other modules")
    stand_in = type(module).__new__(type(module))
    vars(stand_in).update(vars(module))
    parameters = {name: p if p is None else nn.Parameter(_to_meta(p), False) for name, p in module._parameters.items()}
    kept = {name: b if b is None or name in buffers.names else _to_meta(b) for name, b in module._buffers.items()}
    vars(stand_in).update(_parameters=parameters, _buffers=kept)
    return stand_in


def _to_meta(tensor: Tensor) -> Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")


def _take_buffers(buffers: DerivedBuffers, module: Any) -> None:
    """Copy the buffers of another module of the same class."""
    for name in buffers.names:
        held, computed = buffers.module._buffers[name], module._buffers[name]
        if computed is not held:
            held.copy_(computed)  # type: ignore[union-attr]


def _list_derived(module: nn.Module) -> list[str]:
    return [name for name in module._non_persistent_buffers_set if module._buffers.get(name) is not None]
