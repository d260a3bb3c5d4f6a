"""The backend of `torch.compile`, as `explain` and `verify` call it. It registers itself when Dynamo loads it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple


class GraphBackend(NamedTuple):
    """Functions of the backend.

    Attributes:
        find_record: returns the record of a model or function that the backend compiled, and its regions by name.
        find_recipes: returns how the backend compiled a model or parts of it, by name.
        verify: compares a model that the backend compiled, as `verify` does.
    """

    find_record: Callable[..., Any]
    find_recipes: Callable[..., Any]
    verify: Callable[..., Any]


_registered: list[GraphBackend] = []


def register_backend(backend: GraphBackend) -> None:
    """Let `explain` and `verify` call a backend."""
    _registered.append(backend)


def find_backend() -> GraphBackend | None:
    """Return the backend; None if no model was compiled with it."""
    return _registered[-1] if _registered else None
