"""Find example inputs: those of the user, the model's own dummies, or guesses from its first module."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import nn

from ...errors import InvalidInput

_BATCH, _LENGTH = 2, 7
_MAX_WIDTHS = 5
Example = tuple[tuple, dict[str, Any]]


def find_example_calls(model: nn.Module, example_inputs: Any) -> list[Example]:
    """Return (args, kwargs) of example calls, the most likely first: the given inputs, or guesses.

    Raises:
        InvalidInput: the given inputs do not fit the signature, or there are none and no guess is possible.
    """
    if example_inputs is not None:
        args, kwargs = _normalize_inputs(example_inputs)
        try:
            inspect.signature(model.forward).bind(*args, **kwargs)
        except TypeError as error:
            raise InvalidInput(f"example_inputs do not fit {type(model).__name__}.forward: {error}") from None
        return [(args, kwargs)]
    dummies = getattr(model, "dummy_inputs", None)
    if isinstance(dummies, dict) and dummies:
        return [((), _disable_cache(model, dict(dummies)))]
    first = next(
        (m for m in model.modules() if not list(m.children()) and next(m.parameters(recurse=False), None) is not None),
        None,
    )
    name = next(
        (p.name for p in inspect.signature(model.forward).parameters.values() if p.kind == p.POSITIONAL_OR_KEYWORD),
        None,
    )
    if name is None or first is None:
        raise InvalidInput(
            f"{type(model).__name__} has no parameters or no arguments to guess example inputs from; "
            "pass example_inputs=(...)"
        )
    if isinstance(first, nn.Embedding):
        ids = torch.arange(_BATCH * _LENGTH).reshape(_BATCH, _LENGTH) % first.num_embeddings
        return [((ids,), {})]
    weight = next(first.parameters())
    sizes = [n for p in (weight, *model.parameters()) for n in reversed(p.shape)] or [1]
    return [
        ((torch.empty(*lead, width, dtype=weight.dtype, device="meta"),), {})
        for width in list(dict.fromkeys(sizes))[:_MAX_WIDTHS]
        for lead in ((_BATCH, _LENGTH), (_BATCH * _LENGTH,))
    ]


def _normalize_inputs(example_inputs: Any) -> tuple[tuple, dict[str, Any]]:
    if isinstance(example_inputs, dict) or hasattr(example_inputs, "keys"):
        return (), dict(example_inputs)
    if isinstance(example_inputs, torch.Tensor):
        return (example_inputs,), {}
    if isinstance(example_inputs, (tuple, list)):
        return tuple(example_inputs), {}
    raise InvalidInput(f"example_inputs is a {type(example_inputs).__name__}; expected a tuple, a dict or a tensor")


def _disable_cache(model: nn.Module, inputs: dict[str, Any]) -> dict[str, Any]:
    """Switch off the key-value cache, which an abstract run does not need."""
    if "use_cache" in inspect.signature(model.forward).parameters:
        inputs.setdefault("use_cache", False)
    return inputs
