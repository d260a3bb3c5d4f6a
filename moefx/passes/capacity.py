"""Numbers that a block computes from its sizes in Python, such as an expert capacity, read off several sizes.

`capacity = max(4, int(1.25 * T * k / E))` leaves no trace but its value. More captures give its value at more sizes;
the law is the simplest `round(p/q * tokens)`, between a floor and a ceiling, that gives them all. Sizes where rounding is
delicate (p/q * tokens an integer) are probed too, so that a float formula is told apart from the exact one.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from fractions import Fraction

Point = tuple[int, int]  # (tokens, value)


@dataclasses.dataclass(frozen=True)
class Law:
    """`clamp(round(slope * tokens), low, high)`; `high` may be `tokens` itself."""

    slope: Fraction
    up: bool  # round up, else down
    low: int | None = None
    high: int | str | None = None

    def __call__(self, tokens: int) -> int:
        exact = self.slope * tokens
        value = math.ceil(exact) if self.up else math.floor(exact)
        if self.high is not None:
            value = min(value, tokens if self.high == "tokens" else int(self.high))
        return value if self.low is None else max(value, self.low)

    def __str__(self) -> str:
        text = f"{'ceil' if self.up else 'floor'}({self.slope}*S)"
        if self.high is not None:
            text = f"min({text}, {'S' if self.high == 'tokens' else self.high})"
        return text if self.low is None else f"max({self.low}, {text})"


def find_law(points: Sequence[Point]) -> Law | None:
    """The simplest law that gives all points, or None."""
    points = sorted(set(points))
    values = [v for _, v in points]
    lows: list[int | None] = [None, values[0]]
    highs: list[int | str | None] = [None, "tokens", values[-1]]
    found = []
    for low in lows:
        for high in highs:
            for up in (False, True):
                slope = _slope(
                    [(t, v) for t, v in points if v != low and v != (t if high == "tokens" else high)], up
                )
                if slope is None:
                    continue
                law = Law(slope, up, low, high)
                if all(law(t) == v for t, v in points):
                    found.append(((low is not None) + (high is not None), slope.denominator, law))
    return min(found, key=lambda f: f[:2])[2] if found else None


def _slope(points: Sequence[Point], up: bool) -> Fraction | None:
    """The fraction with the smallest denominator that rounds to all these values; two points at least must tell."""
    if len(points) < 3:
        return None
    low = max(Fraction(v - 1, t) if up else Fraction(v, t) for t, v in points)
    high = min(Fraction(v, t) if up else Fraction(v + 1, t) for t, v in points)
    for denominator in range(1, 4097):
        first = math.floor(low * denominator) + 1 if up else math.ceil(low * denominator)
        candidate = Fraction(first, denominator)
        inside = (low < candidate <= high) if up else (low <= candidate < high)
        if inside and candidate > 0:
            return candidate
    return None
