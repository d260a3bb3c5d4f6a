"""Find the model inside of the wrapper that `torch.compile` makes."""

from __future__ import annotations

from typing import Any

from torch import nn

from ..errors import InvalidInput


def unwrap_model(model: Any) -> nn.Module:
    """Return the model, also if `torch.compile` has wrapped it.

    Raises:
        InvalidInput: not a module.
    """
    if not isinstance(model, nn.Module):
        description = f"the class {model.__name__}" if isinstance(model, type) else f"a {type(model).__name__}"
        raise InvalidInput(f"expected a model, an instance of nn.Module; got {description}")
    return getattr(model, "_orig_mod", model)
