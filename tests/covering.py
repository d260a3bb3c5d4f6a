"""Samples of products of parameters: `make test` runs the sample, `make test-all` the product."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Mapping
from typing import Any

import pytest


def covering(*axes: Mapping[str, Any], of: int) -> list:
    """Parameters over the product of `axes`, id -> value (a tuple: several parameters). A sample in which every `of`
    values of different axes meet is marked by nothing, the rest as exhaustive."""
    points = list(itertools.product(*axes))
    met = {point: set(itertools.combinations(enumerate(point), of)) for point in points}
    left, sample, uses = set().union(*met.values()), set(), Counter()
    while left:  # the first of those that bring the most, of what was had least so far
        best = max(points, key=lambda point: (len(met[point] & left), -sum(uses[value] for value in enumerate(point))))
        sample.add(best)
        uses.update(enumerate(best))
        left -= met[best]
    return [
        pytest.param(
            *(value for name, axis in zip(point, axes, strict=True) for value in _several(axis[name])),
            id="-".join(point),
            marks=[] if point in sample else [pytest.mark.exhaustive],
        )
        for point in points
    ]


def _several(value: Any) -> tuple:
    return value if isinstance(value, tuple) else (value,)
