"""Numbers that a block computes from its sizes in Python, such as an expert capacity, as formulas.

`capacity = max(4, int(1.25 * T * k / E))` leaves its value, at each size that was captured, and the expressions that
`Size` followed on the way: `1.25*T*2/8`. The formula is one of these, rounded (also to a multiple) and clamped, that
gives all values. Where none does it is the simplest `round(p/q * tokens)`, between a floor and a ceiling; sizes where
rounding is delicate (p/q * tokens an integer) are among those looked at, so that a float formula is told apart from
the exact one.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from fractions import Fraction

from ..capture.sizes import evaluate

Point = tuple[int, int]  # (tokens, value)


@dataclasses.dataclass(frozen=True)
class Formula:
    """An integer as an expression over the token dims, in Python's terms."""

    text: str

    def __call__(self, dims: Mapping[str, int]) -> int:
        return int(evaluate(self.text, dims))

    def __str__(self) -> str:
        return self.text


def find_formula(
    points: Sequence[tuple[Mapping[str, int], int]], expressions: Iterable[str] = (), laws: bool = True
) -> Formula | None:
    """The formula that gives all these values at these sizes: one of the expressions, or (`laws`) a `Law`, or None."""
    if not points or len({v for _, v in points}) < 2:
        return None
    points = [(dict(dims), v) for dims, v in dict.fromkeys((tuple(dims.items()), v) for dims, v in points)]
    tokens = "*".join(points[0][0])
    texts = sorted(expressions, key=lambda e: (len(e), e))
    for changed in (_as_it_is, _rounded, _to_multiples, functools.partial(_and_then, points=points)):
        for text in texts:  # what the program was seen to compute before what it may have done unseen
            for more in changed(text):
                found = _clamped(more, tokens, points)
                if found is not None:
                    return found
    if not laws:
        return None
    law = find_clamped_linear([(math.prod(dims.values()), v) for dims, v in points])
    return Formula(law.over(tokens)) if law is not None else None


_MOST_PLUS = 64
_MULTIPLES = (2, 4, 8, 16, 32, 64, 128, 256)  # of a tile, say
_CLAMPS = (
    "{0}",
    "max({0}, {low})",
    "min({0}, {tokens})",
    "min({0}, {high})",
    "max(min({0}, {tokens}), {low})",
    "min(max({0}, {low}), {tokens})",
    "min(max({0}, {low}), {high})",
)


def _as_it_is(text: str) -> Iterator[str]:
    yield text


def _rounded(text: str) -> Iterator[str]:
    yield from (f"int({text})", f"ceil({text})", f"round({text})")


def _to_multiples(text: str) -> Iterator[str]:
    for whole in (f"int({text})", f"ceil({text})"):
        for m in _MULTIPLES:
            yield from (f"-(-{whole}//{m})*{m}", f"{whole}//{m}*{m}")


def _and_then(text: str, points: Sequence[tuple[Mapping[str, int], int]]) -> Iterator[str]:
    """What Python may have done with a rounded number, unseen: `int(..) + 1`, `2 * int(..)`, `int(..) // E + 1`."""
    for whole in _rounded(text):
        pairs = [(w, v) for dims, v in points if (w := _value(whole, dims))]
        if not pairs:
            continue
        scaled, most = [whole], max(pairs)
        if (times := most[1] // most[0]) > 1:
            scaled.append(f"{whole}*{times}")
        if most[1] and (over := most[0] // most[1]) > 1:
            scaled += [f"{whole}//{over + more}" for more in (0, 1)]
        for changed in scaled:
            shifts = Counter(v - w for dims, v in points if (w := _value(changed, dims)) is not None)
            plus, often = shifts.most_common(1)[0]
            if 2 * often >= len(points) and (plus or changed is not whole) and abs(plus) <= _MOST_PLUS:
                yield f"({changed}+{plus})"


def _value(text: str, dims: Mapping[str, int]) -> int | None:
    try:
        return evaluate(text, dims)
    except (ArithmeticError, ValueError):
        return None


def _clamped(text: str, tokens: str, points: Sequence[tuple[Mapping[str, int], int]]) -> Formula | None:
    """`text`, between a floor and a ceiling where it needs them; a third of the values must be its own."""
    try:
        values = [evaluate(text, dims) for dims, _ in points]
    except (ArithmeticError, ValueError):
        return None
    if sum(a == v for a, (_, v) in zip(values, points, strict=True)) * 3 < len(points):
        return None
    seen = sorted({v for _, v in points})
    for low in seen[:4]:  # where the tokens themselves are a ceiling, the floor is not the least value
        for clamp in _CLAMPS:
            formula = Formula(clamp.format(text, tokens=tokens, low=low, high=seen[-1]))
            if all(formula(dims) == v == evaluate(formula.text, dims) for dims, v in points):
                whole = all(type(evaluate(formula.text, dims)) is int for dims, _ in points)
                return formula if whole else Formula(f"int({formula.text})")
    return None


@dataclasses.dataclass(frozen=True)
class ClampedLinearFormula:
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

    def over(self, tokens: str) -> str:
        """As an expression."""
        p, q = self.slope.numerator, self.slope.denominator
        text = tokens if p == 1 else f"{p}*{tokens}"
        if q != 1:
            text = f"-(-({text})//{q})" if self.up else f"({text})//{q}"
        if self.high is not None:
            text = f"min({text}, {tokens if self.high == 'tokens' else self.high})"
        return text if self.low is None else f"max({text}, {self.low})"

    def __str__(self) -> str:
        text = f"{'ceil' if self.up else 'floor'}({self.slope}*S)"
        if self.high is not None:
            text = f"min({text}, {'S' if self.high == 'tokens' else self.high})"
        return text if self.low is None else f"max({self.low}, {text})"


def find_clamped_linear(points: Sequence[Point]) -> ClampedLinearFormula | None:
    """The simplest law that gives all points, or None."""
    points = sorted(set(points))
    values = [v for _, v in points]
    lows: list[int | None] = [None, values[0]]
    highs: list[int | str | None] = [None, "tokens", values[-1]]
    found = []
    for low in lows:
        for high in highs:
            for up in (False, True):
                slope = _slope(points, up, low, high)
                if slope is None:
                    continue
                law = ClampedLinearFormula(slope, up, low, high)
                if all(law(t) == v for t, v in points):
                    found.append(((low is not None) + (high is not None), slope.denominator, law))
    return min(found, key=lambda f: f[:2])[2] if found else None


def _slope(points: Sequence[Point], up: bool, least: int | None, most: int | str | None) -> Fraction | None:
    """The fraction with the smallest denominator that rounds to all these values, or where these are the least or the
    most to no more or no less; three values at least must be its own."""
    low, high, own = Fraction(0), Fraction(1 << 40), 0
    for t, v in points:
        at_least, at_most = v == least, v == (t if most == "tokens" else most)
        own += not (at_least or at_most)
        if not at_least:  # round(slope * t) >= v
            low = max(low, Fraction(v - 1, t) if up else Fraction(v, t))
        if not at_most:  # round(slope * t) <= v
            high = min(high, Fraction(v, t) if up else Fraction(v + 1, t))
    if own < 3 or low > high:
        return None
    for denominator in range(1, 4097):  # in integers: fractions are slow
        scaled = low.numerator * denominator
        numerator = scaled // low.denominator + 1 if up else -(-scaled // low.denominator)
        left, right = numerator * high.denominator, high.numerator * denominator
        if numerator > 0 and (left <= right if up else left < right):
            return Fraction(numerator, denominator)
    return None
