"""Clear `functools` caches of the program that a capture has filled with abstract tensors or symbolic sizes.

A later call would get such an entry. The garbage collector lists all caches of the process.
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

from ..sizes.symbolic_sizes import Number
from ..tracing.tracer import Tracer
from .raw_containers import copy_items, find_base_type

_CACHE: Any = type(functools.lru_cache(lambda: None))
_MAX_VISITED = 4096  # objects in the entries of one cache


@contextlib.contextmanager
def clear_filled_caches(tracer: Tracer) -> Iterator[None]:
    """Clear the caches that hold an object of this capture at the end, and no others."""
    caches = _all_caches()  # kept alive, so that ids stay unique
    misses = {id(cache): cache.cache_info().misses for cache in caches}
    try:
        yield
    finally:
        for cache in _all_caches():  # new ones, too
            if cache.cache_info().misses != misses.get(id(cache), 0) and _holds_capture(cache, tracer):
                cache.cache_clear()


class _CacheList:
    """The known caches. Each holds a reference to the type of caches, so its reference count tells of new ones.

    Attributes:
        others: number of references to the type by other objects.
    """

    def __init__(self) -> None:
        self.caches: list[weakref.ref] = []
        self.others = -1

    def update(self) -> list[Any]:
        caches = [cache for ref in self.caches if (cache := ref()) is not None]
        if sys.getrefcount(_CACHE) - len(caches) != self.others:
            caches = [candidate for candidate in gc.get_objects() if type(candidate) is _CACHE]
            self.caches, self.others = [weakref.ref(c) for c in caches], sys.getrefcount(_CACHE) - len(caches)
        return caches


_all_caches = _CacheList().update


def _holds_capture(cache: Any, tracer: Tracer) -> bool:
    """Return whether a key or a result in a cache leads to a tensor or a number of this capture."""
    todo, seen = [r for r in gc.get_referents(cache) if r is not cache.__wrapped__], set()
    while todo and len(seen) < _MAX_VISITED:
        value = todo.pop()
        if id(value) in seen or isinstance(value, (type, types.ModuleType, types.FunctionType, torch.nn.Module)):
            continue
        seen.add(id(value))
        if isinstance(value, Number) or id(value) in tracer.aliases:
            return True
        if isinstance(value, torch.Tensor):
            if getattr(value, "fake_mode", None) is tracer.fake_mode:
                return True
        elif isinstance(value, tuple):
            todo += tuple.__iter__(value)
        elif find_base_type(value) is not None:
            items = copy_items(value)
            todo += [*items, *items.values()] if type(items) is dict else items
        else:
            todo += getattr(value, "__dict__", {}).values()
    return False


__all__ = ["clear_filled_caches"]
