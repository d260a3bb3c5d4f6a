"""`functools` caches that a capture fills: an entry with a symbolic size or an abstract tensor must not outlive it.

A later call at the same size would get it. No list of libraries is needed: the garbage collector knows all caches.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import sys
import types
import weakref
from collections.abc import Iterator
from typing import Any

import torch

from .raw_containers import copy_items, find_base_type
from .symbolic_sizes import Number
from .tracer import Tracer

_CACHE: Any = type(functools.lru_cache(lambda: None))
_MAX_VISITED = 4096  # objects in the entries of one cache


@contextlib.contextmanager
def clear_filled_caches(tracer: Tracer) -> Iterator[None]:
    """Clear the caches that hold something of this capture at the end, and no others."""
    caches = _all_caches()  # keeps them, and so their ids
    misses = {id(cache): cache.cache_info().misses for cache in caches}
    try:
        yield
    finally:
        for cache in _all_caches():  # also those that were made meanwhile
            if cache.cache_info().misses != misses.get(id(cache), 0) and _holds_capture(cache, tracer):
                cache.cache_clear()


class _Found:
    """The caches that were found last, and how many references to their type there were beside theirs: each instance
    holds one, so another number tells of new ones without a look at all objects."""

    def __init__(self) -> None:
        self.caches: list[weakref.ref] = []
        self.others = -1

    def now(self) -> list[Any]:
        alive = [cache for ref in self.caches if (cache := ref()) is not None]
        if sys.getrefcount(_CACHE) - len(alive) != self.others:
            alive = [thing for thing in gc.get_objects() if type(thing) is _CACHE]
            self.caches, self.others = [weakref.ref(c) for c in alive], sys.getrefcount(_CACHE) - len(alive)
        return alive


_all_caches = _Found().now


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
        elif find_base_type(thing) is not None:
            items = copy_items(thing)
            todo += [*items, *items.values()] if type(items) is dict else items
        else:
            todo += getattr(thing, "__dict__", {}).values()
    return False


__all__ = ["clear_filled_caches"]
