"""Find values of a graph that share memory: a write to one is a write to all."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import fx

from ...ir.node_values import get_argument

_MAY_COPY = {"reshape", "reshape_as", "contiguous", "to", "flatten", "ravel", "type_as", "float", "double", "half"}


def list_storage_ids(value: Any) -> list[int]:
    """Identify the storage of a tensor, or of each tensor in a tuple or list."""
    return [
        _storage_id(t) for t in (value if isinstance(value, (tuple, list)) else (value,)) if isinstance(t, torch.Tensor)
    ]


def _storage_id(t: torch.Tensor) -> int:
    try:
        return t.untyped_storage()._cdata
    except (NotImplementedError, RuntimeError):  # a subclass without storage
        return id(t)


class StorageAliases:
    """Storages that are the same memory. Graphs of `make_fx`, and exported programs after loading, record values
    without the fact that a view shares its base's memory.
    """

    def __init__(self) -> None:
        self._joined: dict[int, int] = {}

    def find_joined_storages(self, value: Any) -> list[int]:
        """Return the storages of a value; aliases have one representative."""
        return [self._find_representative(s) for s in list_storage_ids(value)]

    def join(self, one: int, other: int) -> None:
        one, other = self._find_representative(one), self._find_representative(other)
        if one != other:
            self._joined[other] = one

    def _find_representative(self, storage: int) -> int:
        while storage in self._joined:
            storage = self._joined[storage]
        return storage

    def join_views(self, nodes: Iterable[fx.Node], value: Mapping[fx.Node, Any]) -> None:
        """Join the storages of views with those of their bases, as ops declare them. Ops that may copy count as views
        only if the recorded values show no views at all.
        """
        copies: list[tuple[int, int]] = []
        has_lost_views = False
        for n in nodes:
            for base, may_copy in _find_viewed_arguments(n, value):
                for own_storage, viewed_storage in _list_pairs(
                    n, list_storage_ids(value.get(n)), list_storage_ids(value.get(base))
                ):
                    if may_copy:
                        copies.append((viewed_storage, own_storage))
                    else:
                        has_lost_views |= own_storage != viewed_storage
                        self.join(viewed_storage, own_storage)
        for pair in copies if has_lost_views else ():
            self.join(*pair)


def _find_viewed_arguments(n: fx.Node, value: Mapping[fx.Node, Any]) -> Iterator[tuple[fx.Node, bool]]:
    """Return the arguments whose memory a node's result shares, and whether the result may be a copy instead."""
    source = n.args[0] if n.target is operator.getitem else None
    if isinstance(source, fx.Node) and isinstance(value.get(source), (tuple, list)):
        yield source, False
    if not isinstance(n.target, torch._ops.OpOverload):
        return
    schema = n.target._schema
    returned_sets = {s for r in schema.returns if r.alias_info is not None for s in r.alias_info.before_set}
    for a in schema.arguments:
        argument, alias = get_argument(n, a.name), a.alias_info
        # for lists, such as the result of `unbind`, only the argument declares it
        if (
            alias is not None
            and (alias.before_set & returned_sets or "*" in alias.after_set)
            and isinstance(argument, fx.Node)
        ):
            yield argument, n.target.overloadpacket.__name__ in _MAY_COPY


def _list_pairs(n: fx.Node, own_storages: list[int], viewed: list[int]) -> Iterator[tuple[int, int]]:
    """Pair the storages of a result with those of its base; an item of a list is paired with its own element."""
    if n.target is operator.getitem and len(viewed) > 1 and isinstance(i := n.args[1], int) and len(own_storages) == 1:
        viewed = viewed[i : i + 1 or None]
    yield from ((m, t) for m in own_storages for t in viewed)
