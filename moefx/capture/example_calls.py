"""Example inputs for models that come without: the model's own dummies, token ids, or hidden states."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import nn

from ..errors import InvalidInput

_BATCH, _LENGTH = 2, 7
_MOST_WIDTHS = 5
Example = tuple[tuple, dict[str, Any]]


def find_example_calls(model: nn.Module, example_inputs: Any) -> list[Example]:
    """(args, kwargs) of calls of `model`, the likeliest first: what was given, or what can be guessed.

    Raises:
        InvalidInput: nothing was given and nothing can be guessed, or what was given does not fit the signature.
    """
    if example_inputs is not None:
        args, kwargs = _given(example_inputs)
        try:
            inspect.signature(model.forward).bind(*args, **kwargs)
        except TypeError as error:
            raise InvalidInput(f"example_inputs do not fit {type(model).__name__}.forward: {error}") from None
        return [(args, kwargs)]
    dummies = getattr(model, "dummy_inputs", None)
    if isinstance(dummies, dict) and dummies:
        return [((), _without_cache(model, dict(dummies)))]
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
        for width in list(dict.fromkeys(sizes))[:_MOST_WIDTHS]
        for lead in ((_BATCH, _LENGTH), (_BATCH * _LENGTH,))
    ]


def _given(example_inputs: Any) -> tuple[tuple, dict[str, Any]]:
    if isinstance(example_inputs, dict) or hasattr(example_inputs, "keys"):
        return (), dict(example_inputs)
    if isinstance(example_inputs, torch.Tensor):
        return (example_inputs,), {}
    if isinstance(example_inputs, (tuple, list)):
        return tuple(example_inputs), {}
    raise InvalidInput(f"example_inputs is a {type(example_inputs).__name__}; expected a tuple, a dict or a tensor")


def _without_cache(model: nn.Module, inputs: dict[str, Any]) -> dict[str, Any]:
    """A key-value cache is state that the abstract run has no use for."""
    if "use_cache" in inspect.signature(model.forward).parameters:
        inputs.setdefault("use_cache", False)
    return inputs
