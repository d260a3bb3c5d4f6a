"""Train models that are spread over ranks with transformers' `Trainer` and with accelerate.

Each class is imported on first use, with the library that it extends.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .spread_accelerator import SpreadAccelerator
    from .spread_trainer import SpreadTrainer

__all__ = ["SpreadAccelerator", "SpreadTrainer"]
_MODULES = {"SpreadAccelerator": ".spread_accelerator", "SpreadTrainer": ".spread_trainer"}


def __dir__() -> list[str]:
    return list(__all__)


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return getattr(importlib.import_module(_MODULES[name], __name__), name)
    raise AttributeError(f"module 'moefx.integrations' has no attribute {name!r}")
