"""Captures restore the user's containers exactly, without calling their methods."""

from __future__ import annotations

import collections
import functools
import gc
from collections.abc import Callable, MutableMapping
from typing import Any

import pytest
import torch
from torch import nn

import moefx
from moefx.capture.state import filled_caches
from moefx.capture.state.outside_state import OutsideState

from ..blocks import D, Loop


def _refuses(*names: str) -> Callable[[type], type]:
    """Return a decorator that makes these methods of a class raise."""

    def called(self, *_, **__):
        raise AssertionError("a method of a user's container was called")

    def decorate(cls: type) -> type:
        for name in names:
            setattr(cls, name, called)
        return cls

    return decorate


class Makes(collections.OrderedDict):
    """Return a new instance of the stored class on each access."""

    def __getitem__(self, key):
        return super().__getitem__(key)()


_READS = ("__getitem__", "__iter__", "__len__", "__eq__", "__contains__", "copy")
_DICT = (*_READS, "__setitem__", "__delitem__", "items", "keys", "values", "get", "update", "clear", "pop")


@_refuses(*_DICT)
class SealedDict(dict):
    __hash__ = None


@_refuses(*_DICT)
class SealedOrderedDict(collections.OrderedDict):
    __hash__ = None


@_refuses(*_READS, "__setitem__", "append", "extend", "clear")
class SealedList(list):
    __hash__ = None


@_refuses("__iter__", "__len__", "__eq__", "__contains__", "copy", "add", "update", "clear")
class SealedSet(set):
    __hash__ = None


@_refuses("__getitem__", "__iter__", "__len__", "__eq__", "copy", "append", "extend", "clear")
class SealedDeque(collections.deque):
    __hash__ = None


class Loads(MutableMapping):
    """Load each value on its first access."""

    def __init__(self):
        self.store: dict[str, Any] = {}

    def __getitem__(self, key):
        return self.store.setdefault(key, object())

    def __setitem__(self, key, value):
        self.store[key] = value

    def __delitem__(self, key):
        del self.store[key]

    def __iter__(self):
        self.store["read"] = True
        return iter(self.store)

    def __len__(self):
        return len(self.store)


class Slotted:
    __slots__ = ("empty", "last")

    def __init__(self):
        self.last: int | None = None


def _put(base: Any, *items: Any) -> Callable[[Any], None]:
    def write(container):
        for item in items:
            if issubclass(base, dict):
                base.__setitem__(container, *item)
            else:
                getattr(base, "add" if base is set else "append")(container, item)

    return write


def _set_slots(slotted: Slotted) -> None:
    slotted.last = slotted.empty = 1


def _read_slots(slotted: Slotted) -> list[Any]:
    return [getattr(slotted, name, "nothing") for name in Slotted.__slots__]


def _move_to_end(container: Any) -> None:
    collections.OrderedDict.move_to_end(container, "a")


def _reinsert(container: Any) -> None:
    dict.__setitem__(container, "a", dict.pop(container, "a"))


def _list_ordered(container: Any) -> list[Any]:
    return list(collections.OrderedDict.items(container))


def _list_pairs(container: Any) -> list[Any]:
    return list(dict.items(container))


def _fill(cls: Any) -> Any:
    instance, base = cls(), collections.OrderedDict if issubclass(cls, collections.OrderedDict) else dict
    for name, value in (("a", nn.SiLU), ("b", nn.ReLU)):
        base.__setitem__(instance, name, value)
    return instance


# Per container: a constructor, a write in a call, and a function that lists the stored items.
CONTAINERS: dict[str, tuple[Callable[[], Any], Callable[[Any], None], Callable[[Any], Any]]] = {
    "makes instances": (lambda: Makes(a=nn.SiLU, b=nn.ReLU), _put(collections.OrderedDict, ("c", 1)), _list_ordered),
    "a dict": (lambda: _fill(SealedDict), _put(dict, ("c", 1), ("a", 2)), _list_pairs),
    "an OrderedDict": (lambda: _fill(SealedOrderedDict), _put(collections.OrderedDict, ("c", 1)), _list_ordered),
    "an order": (lambda: _fill(collections.OrderedDict), _move_to_end, _list_ordered),
    "an order of a dict": (lambda: _fill(dict), _reinsert, _list_pairs),
    "a defaultdict": (lambda: collections.defaultdict(list, a=[1]), lambda d: d["b"].append(1), _list_pairs),
    "a Counter": (lambda: collections.Counter("aab"), lambda c: c.update("b"), _list_pairs),
    "a list": (lambda: SealedList([1, 2]), _put(list, 3), lambda c: list(list.__iter__(c))),
    "a set": (lambda: SealedSet({1, 2}), _put(set, 3), lambda c: set(set.__iter__(c))),
    "a deque": (
        lambda: SealedDeque([1, 2], maxlen=2), _put(collections.deque, 3),
        lambda c: list(collections.deque.__iter__(c)),
    ),
    "a UserDict": (lambda: collections.UserDict(a=1), lambda d: d.update(b=2), lambda d: dict(d.data)),
    "a mapping that loads": (Loads, lambda d: d["a"], lambda d: dict(d.store)),
    "slots": (Slotted, _set_slots, _read_slots),
}  # fmt: skip


@pytest.mark.parametrize("make, write, stored", CONTAINERS.values(), ids=CONTAINERS)
@pytest.mark.parametrize("nested", [False, True], ids=["", "nested"])
def test_containers_are_restored_exactly(make, write, stored, nested):
    container = make()
    before = stored(container)
    surroundings = OutsideState(nn.Identity(), ([container] if nested else container,))
    surroundings.restore()
    assert stored(container) == before and not surroundings.list_changes()
    write(container)
    assert stored(container) != before
    surroundings.restore()
    now = stored(container)
    assert now == before and list(now) == list(before)


ACTIVATIONS = Makes(relu=nn.ReLU, silu=nn.SiLU)


class Looks(Loop):
    """Name a registry of activations in the constructor only, or in the forward too."""

    def __init__(self, used: bool):
        super().__init__()
        self.used, self.act = used, ACTIVATIONS["silu"]

    def mixed(self, x, w, ids):
        act = ACTIVATIONS["silu"] if self.used else self.act
        return act(super().mixed(x, w, ids))


@pytest.mark.parametrize("used", [False, True])
def test_a_registry_that_makes_instances_outlives_explain(used):
    found = moefx.explain(Looks(used), example_inputs=(torch.randn(5, D),))
    assert [block.name for block in found.matched] == [""]
    assert dict(collections.OrderedDict.items(ACTIVATIONS)) == {"relu": nn.ReLU, "silu": nn.SiLU}
    assert Looks(used)(torch.randn(3, D)).shape == (3, D)


@functools.lru_cache(maxsize=64)
def _split_shape(shape: tuple[int, ...]) -> tuple[int, ...]:
    return shape[0] // 2, 2, shape[1]


@functools.cache
def _make_table() -> torch.Tensor:
    return torch.ones(D)


@functools.cache
def _read_settings() -> list[int]:
    return [2]


class Caches(Loop):
    """Use a library that caches shapes, like einops, and a table that is created in the first call."""

    def forward(self, x):
        w, ids = self.route(x)
        flat = ids.flatten()
        order, rows = flat.argsort(), x.repeat_interleave(2, 0) * _make_table()
        ends = flat.bincount(minlength=len(self.experts)).cumsum(0).tolist()
        parts = [e(rows[order][a:b]) for e, a, b in zip(self.experts, [0, *ends], ends, strict=False) if a < b]
        back = torch.cat(parts)[order.argsort()] * w.flatten()[:, None]
        return back.reshape(_split_shape(back.shape)).sum(1) * len(_read_settings())


@pytest.mark.parametrize("is_warm", [False, True], ids=["", "warm"])
def test_a_cache_keeps_nothing_of_a_capture(is_warm):
    for cache in (_split_shape, _make_table):
        cache.cache_clear()
    model, settings = Caches(), _read_settings()
    with torch.no_grad():
        wanted = [model(torch.full((t, D), 0.5)) for t in range(1, 40)] if is_warm else []
    moefx.explain(model, example_inputs=(torch.randn(14, D),))
    with torch.no_grad():
        found = [model(torch.full((t, D), 0.5)) for t in range(1, 40)]
    assert [y.shape for y in found] == [(t, D) for t in range(1, 40)]
    assert all(map(torch.equal, wanted, found))
    assert type(_make_table()) is torch.Tensor and _read_settings() is settings


_LATE: list = []


class CachesLater(Caches):
    """Create the cache in a call."""

    def forward(self, x):
        if not _LATE:
            _LATE.append(functools.lru_cache(lambda shape: (shape[0], shape[1])))
        return super().forward(x).view(_LATE[0](x.shape))


def test_a_cache_that_a_call_makes_keeps_nothing_either():
    cache = functools.lru_cache(lambda shape: (shape[0], shape[1]))
    moefx.explain(Caches(), example_inputs=(torch.randn(14, D),))  # searches for caches; later ones are new
    model = CachesLater()
    for late in ([], [cache]):
        _LATE[:] = late
        moefx.explain(model, example_inputs=(torch.randn(14, D),))
        assert [y.shape for y in map(model, map(torch.ones, range(1, 40), [D] * 39))] == [(t, D) for t in range(1, 40)]
    assert [cache] == _LATE


def test_caches_are_found_without_a_look_at_all_objects(monkeypatch):
    def all_caches():
        return {id(cache) for cache in filled_caches._all_caches()}

    looks, look = [], gc.get_objects
    monkeypatch.setattr(filled_caches.gc, "get_objects", lambda: looks.append(1) or look())
    assert all_caches() >= {id(_split_shape), id(_make_table)}
    looks.clear()
    assert all_caches() >= {id(_split_shape), id(_make_table)} and not looks
    caches = [functools.cache(lambda: 3) for _ in range(3)]
    assert all_caches() >= set(map(id, caches)) and len(looks) == 1
    caches.pop()
    caches.append(functools.cache(lambda: 4))  # the number of caches is the same as before
    assert all_caches() >= set(map(id, caches)) and len(looks) == 2
