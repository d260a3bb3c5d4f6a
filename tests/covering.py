"""Sample products of parameters: `make test` runs the sample, `make test-all` the product."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Mapping
from typing import Any

import pytest


def sample_product(*axes: Mapping[str, Any], order: int) -> list:
    """Build parameters over the product of `axes`, each a map from ids to values (tuples for several parameters).

    The sample contains each combination of `order` values of different axes. The other parameters are marked as
    exhaustive.
    """
    points = list(itertools.product(*axes))
    met = {point: set(itertools.combinations(enumerate(point), order)) for point in points}
    left, sample, uses = set().union(*met.values()), set(), Counter()
    while left:  # pick the point with the most new combinations, then with the least used values
        best = max(points, key=lambda point: (len(met[point] & left), -sum(uses[value] for value in enumerate(point))))
        sample.add(best)
        uses.update(enumerate(best))
        left -= met[best]
    return [
        pytest.param(
            *(value for name, axis in zip(point, axes, strict=True) for value in _as_tuple(axis[name])),
            id="-".join(point),
            marks=[] if point in sample else [pytest.mark.exhaustive],
        )
        for point in points
    ]


def _as_tuple(value: Any) -> tuple:
    return value if isinstance(value, tuple) else (value,)
