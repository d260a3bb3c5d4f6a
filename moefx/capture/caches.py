"""`functools` caches that a capture fills: an entry with a symbolic size or an abstract tensor must not outlive it.

A later call at the same size would get it. No list of libraries is needed: the garbage collector knows all caches.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import gc
import sys
import types
from collections.abc import Iterator
from typing import Any

import torch

from .containers import base_of, contents
from .sizes import Number
from .tracer import Tracer

_CACHE: Any = type(functools.lru_cache(lambda: None))
_known: contextvars.ContextVar[list[Any] | None] = contextvars.ContextVar("caches", default=None)
_MAX_VISITED = 4096  # objects in the entries of one cache


@contextlib.contextmanager
def known_caches() -> Iterator[None]:
    """Look for all caches once, not for each capture."""
    token = _known.set(_all_caches())
    try:
        yield
    finally:
        _known.reset(token)


@contextlib.contextmanager
def clearing_caches(tracer: Tracer) -> Iterator[None]:
    """Clear the caches that hold something of this capture at the end, and no others."""
    caches = _known.get()
    caches = _all_caches() if caches is None else caches
    misses, modules = [cache.cache_info().misses for cache in caches], len(sys.modules)
    try:
        yield
    finally:
        filled = [c for c, before in zip(caches, misses, strict=True) if c.cache_info().misses != before]
        if len(sys.modules) != modules:  # an import at the first call may have brought more
            before = set(map(id, caches))
            filled += [cache for cache in _all_caches() if id(cache) not in before]
        for cache in filled:
            if _holds_capture(cache, tracer):
                cache.cache_clear()


def _all_caches() -> list[Any]:
    return [thing for thing in gc.get_objects() if type(thing) is _CACHE]


def _holds_capture(cache: Any, tracer: Tracer) -> bool:
    """Whether a key or a result in a cache leads to a tensor or a number of this capture."""
    todo, seen = [r for r in gc.get_referents(cache) if r is not cache.__wrapped__], set()
    while todo and len(seen) < _MAX_VISITED:
        thing = todo.pop()
        if id(thing) in seen or isinstance(thing, (type, types.ModuleType, types.FunctionType, torch.nn.Module)):
            continue
        seen.add(id(thing))
        if isinstance(thing, Number) or id(thing) in tracer.aliases:
            return True
        if isinstance(thing, torch.Tensor):
            if getattr(thing, "fake_mode", None) is tracer.fake_mode:
                return True
        elif isinstance(thing, tuple):
            todo += tuple.__iter__(thing)
        elif base_of(thing) is not None:
            items = contents(thing)
            todo += [*items, *items.values()] if type(items) is dict else items
        else:
            todo += getattr(thing, "__dict__", {}).values()
    return False


__all__ = ["clearing_caches", "known_caches"]
