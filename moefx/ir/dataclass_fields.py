"""Results that are plain dataclasses: pytree does not look into these, so they are opened before it does.

An opened result flattens to the values of its fields, and unflattens to the user's own class.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
import torch.utils._pytree as pytree


class Fields:
    """A dataclass instance as its fields."""

    def __init__(self, cls: type, values: dict[str, Any]):
        self.cls, self.values = cls, values


def open_dataclasses(result: Any, fn: Callable[[torch.Tensor], Any]) -> Any:
    """A result with `fn` of its tensors, its dataclasses as `Fields`."""
    if isinstance(result, torch.Tensor):
        return fn(result)
    if type(result) in (tuple, list):
        return type(result)([open_dataclasses(v, fn) for v in result])
    if type(result) is dict:
        return {k: open_dataclasses(v, fn) for k, v in result.items()}
    if is_plain_dataclass(result):
        return Fields(
            type(result), {f.name: open_dataclasses(getattr(result, f.name), fn) for f in dataclasses.fields(result)}
        )
    if isinstance(result, tuple) and hasattr(result, "_fields"):  # past a constructor that looks at its arguments
        return tuple.__new__(type(result), [open_dataclasses(v, fn) for v in result])
    return pytree.tree_map_only(torch.Tensor, fn, result)


def is_plain_dataclass(value: Any) -> bool:
    """Not those that pytree knows (the outputs of transformers are dicts, too)."""
    return (
        dataclasses.is_dataclass(value)
        and not isinstance(value, (type, dict, tuple))
        and type(value) not in pytree.SUPPORTED_NODES
    )


def _flatten(opened: Fields) -> tuple[list[Any], Any]:
    cls = opened.cls
    by_name = all(f.init for f in dataclasses.fields(cls)) and not hasattr(cls, "__post_init__")
    return [*opened.values.values()], (cls, tuple(opened.values), by_name)


def _unflatten(values: Any, context: Any) -> Any:
    cls, names, by_name = context
    fields = dict(zip(names, values, strict=True))
    if by_name:  # what Dynamo can follow
        return cls(**fields)
    made = object.__new__(cls)  # as the forward left it
    for name, value in fields.items():
        object.__setattr__(made, name, value)
    return made


pytree.register_pytree_node(Fields, _flatten, _unflatten)

__all__ = ["Fields", "is_plain_dataclass", "open_dataclasses"]
