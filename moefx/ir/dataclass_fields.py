"""Make results that are plain dataclasses visible to pytree, which does not look into them.

An opened dataclass flattens to its field values and unflattens to the user's own class.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
import torch.utils._pytree as pytree


class Fields:
    """The class and the field values of a dataclass instance; a pytree node."""

    def __init__(self, cls: type, values: dict[str, Any]):
        self.cls, self.values = cls, values


def open_dataclasses(result: Any, fn: Callable[[torch.Tensor], Any]) -> Any:
    """Map `fn` over the tensors of a result, and replace its dataclasses by `Fields`."""
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
    if isinstance(result, tuple) and hasattr(result, "_fields"):  # the constructor may check its arguments
        return tuple.__new__(type(result), [open_dataclasses(v, fn) for v in result])
    return pytree.tree_map_only(torch.Tensor, fn, result)


def is_plain_dataclass(value: Any) -> bool:
    """Return whether a value is a dataclass instance that pytree does not know. (transformers' outputs are dicts
    too.)"""
    return (
        dataclasses.is_dataclass(value)
        and not isinstance(value, (type, dict, tuple))
        and type(value) not in pytree.SUPPORTED_NODES
    )


def _flatten(fields: Fields) -> tuple[list[Any], Any]:
    cls = fields.cls
    by_name = all(f.init for f in dataclasses.fields(cls)) and not hasattr(cls, "__post_init__")
    return [*fields.values.values()], (cls, tuple(fields.values), by_name)


def _unflatten(values: Any, context: Any) -> Any:
    cls, names, by_name = context
    fields = dict(zip(names, values, strict=True))
    if by_name:  # Dynamo can trace this
        return cls(**fields)
    instance = object.__new__(cls)  # `__init__` or `__post_init__` could change the fields
    for name, value in fields.items():
        object.__setattr__(instance, name, value)
    return instance


pytree.register_pytree_node(Fields, _flatten, _unflatten)

__all__ = ["Fields", "is_plain_dataclass", "open_dataclasses"]
