"""Models of the test corpus. `build(name)` returns a `Case`; names are unique over all suites."""

from __future__ import annotations

import importlib
from typing import Any

import torch

from .case import Case, Verdict

# suite -> (module, attribute); imported on first use, since transformers alone takes seconds
SUITES = {
    "plain": ("plain", "PLAIN"),
    "hf": ("hf", "HF"),
    "pypi": ("pypi", "PYPI"),
    "unseen": ("unseen", "UNSEEN"),
}


def suite(name: str) -> Any:
    module, attribute = SUITES[name]
    return getattr(importlib.import_module(f".{module}", __name__), attribute)


def names(suite_name: str, verdict: Verdict | None = None) -> list[str]:
    return suite(suite_name).names(verdict)


def suite_of(name: str) -> str:
    for suite_name in SUITES:
        if name in names(suite_name):
            return suite_name
    raise KeyError(f"no case {name!r} (or its package is not installed)")


def build(name: str, seed: int = 0, dtype: torch.dtype = torch.float32) -> Case:
    return suite(suite_of(name)).build(name, seed, dtype)
