"""Limits that a capture did not come to: a capacity of 64 places, say, at 29 tokens.

Where every expert had room for all its tokens the program seems to drop nothing. So the numbers that cut rows off, or
that counts and ranks are compared with, are looked for, and what lies beyond them is captured, or left alone.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import fx

from ...capture.captured import Capture
from ...capture.source import Source
from .nodes import is_known, is_routed, op_name
from .ranges import UNBOUNDED, Ranges

_ORDERED = ("lt", "le", "gt", "ge")
_NO_END = 1 << 40


Place = tuple[Source, str]


def limits(capture: Capture) -> dict[Place, int | None]:
    """By place in the program, the number that no count or rank of this capture came to, though under another routing
    it may; None where one did."""
    found: dict[Place, int | None] = {}
    ranges: Ranges | None = None
    for n in capture.nodes:
        if n.op != "call_function":
            continue
        name, place = op_name(n), (n.meta["source"], str(n.target))
        if name == "slice":
            for end, reached in _end(capture, n):
                found[place] = None if reached or found.get(place, end) is None else end
        elif name in (*_ORDERED, "eq") and is_known(n):
            for rows, limit, reached in _compared(capture, n, name):
                ranges = ranges or Ranges(capture.nodes)
                if not is_routed(rows) or not _never_beyond(ranges, rows, limit):
                    found[place] = None if reached or found.get(place, limit) is None else limit
    return found


def not_reached(columns: Sequence[dict[Place, int | None]]) -> dict[Place, set[int]]:
    """The limits at the places where no capture came to one, from those of each capture."""
    places = dict.fromkeys(place for column in columns for place in column)
    found = {place: {column[place] for column in columns if place in column} for place in places}
    return {place: seen for place, seen in found.items() if None not in seen}  # type: ignore[misc]


def _end(capture: Capture, n: fx.Node) -> Iterator[tuple[int, bool]]:
    """Where rows of an expert, or tokens, end, and whether some are behind it; from the start or from the end."""
    source, dim, start, end = (*n.args, *(0, None, None)[len(n.args) - 1 :])[:4]
    val: Any = source.meta.get("val")  # type: ignore[union-attr]
    if not isinstance(val, torch.Tensor) or not val.dim():
        return
    rows, ragged = val.shape[dim], source.meta.get("ragged") and dim == 0  # type: ignore[union-attr]
    if not ragged and rows not in capture.sizes.expressions:
        return
    for bound in (end, -start if isinstance(start, int) else None):
        if isinstance(bound, int) and 0 < bound < _NO_END and (ragged or bound != rows):
            yield bound, rows > bound


def _compared(capture: Capture, n: fx.Node, name: str) -> Iterator[tuple[fx.Node, int, bool]]:
    """(what is compared, with which number, whether it came out both ways)."""
    left, right = n.args[:2]
    for rows, other in ((left, right), (right, left)):
        limit = _number(other)
        if limit is None or limit < 2 or not isinstance(rows, fx.Node) or not is_known(rows):
            continue
        value = capture.shadow(rows)
        most = int(value.max()) if value.numel() else 0
        # else it counts if it is of positions in a sequence or a batch, and the limit no size itself
        if not is_routed(rows) and (most + 1 not in capture.sizes.expressions or limit in capture.sizes.expressions):
            continue
        if name != "eq":
            yield rows, limit, len(capture.shadow(n).unique()) != 1 or most > limit
        elif isinstance(other, fx.Node) and n.meta["val"].shape[-1:] == (limit,):  # `one_hot(rank, capacity)`
            yield rows, limit, most >= limit


def _number(x: Any) -> int | None:
    """A number that all elements are compared with; of 0, 1, 2, ... the first that is not among them."""
    if type(x) in (int, float):
        return math.ceil(x) if abs(x) < _NO_END else None
    if not isinstance(x, fx.Node) or is_routed(x) or not is_known(x):
        return None
    val = x.meta["val"].flatten()
    if val.numel() == 1:
        return int(val[0])
    return val.numel() if val.numel() and torch.equal(val, torch.arange(len(val), dtype=val.dtype)) else None


def _never_beyond(ranges: Ranges, rows: fx.Node, limit: int) -> bool:
    """Whether the values are below the limit under every routing, as ids of experts are."""
    found = ranges.of(rows)
    return found is not None and bool((found[1] < limit).all()) and int(found[1].max()) < UNBOUNDED


__all__ = ["limits", "not_reached"]
