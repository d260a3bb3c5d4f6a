"""Find formulas for numbers that a block computes from its sizes in Python, such as an expert capacity.

For `capacity = max(4, int(1.25 * T * k / E))`, captures record the value at each captured size, and the expressions
over symbolic sizes that the program evaluates: `1.25*T*2/8`. The search rounds (also to multiples) and clamps these
expressions until one gives all values. If none does, it takes the simplest clamped `round(p/q * tokens)`. The captured
sizes include some with integer p/q * tokens, which tell a float formula from the exact one.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from fractions import Fraction

from ...capture.sizes.size_guards import evaluate_size

Point = tuple[int, int]  # (tokens, value)


@dataclasses.dataclass(frozen=True)
class Formula:
    """An integer as a Python expression over the token dims."""

    text: str

    def __call__(self, dims: Mapping[str, int]) -> int:
        return int(evaluate_size(self.text, dims))

    def __str__(self) -> str:
        return self.text


def find_formula(
    points: Sequence[tuple[Mapping[str, int], int]], expressions: Iterable[str] = (), try_linear: bool = True
) -> Formula | None:
    """Find a formula that gives these values at these sizes, or None.

    Args:
        points: sizes with the value there.
        expressions: expressions that the program evaluates.
        try_linear: whether to try a `ClampedLinearFormula` if no expression fits.
    """
    if not points or len({v for _, v in points}) < 2:
        return None
    points = [(dict(dims), v) for dims, v in dict.fromkeys((tuple(dims.items()), v) for dims, v in points)]
    tokens = "*".join(points[0][0])
    texts = sorted(expressions, key=lambda e: (len(e), e))
    for vary in (_keep, _round, _round_to_multiples, functools.partial(_add_arithmetic, points=points)):
        for text in texts:  # recorded expressions first, then variants of them
            for candidate in vary(text):
                formula = _clamp_to_fit(candidate, tokens, points)
                if formula is not None:
                    return formula
    if not try_linear:
        return None
    linear = find_clamped_linear([(math.prod(dims.values()), v) for dims, v in points])
    return Formula(linear.format_over(tokens)) if linear is not None else None


_MAX_OFFSET = 64
_MULTIPLES = (2, 4, 8, 16, 32, 64, 128, 256)  # such as tile sizes
_CLAMPS = (
    "{0}",
    "max({0}, {low})",
    "min({0}, {tokens})",
    "min({0}, {high})",
    "max(min({0}, {tokens}), {low})",
    "min(max({0}, {low}), {tokens})",
    "min(max({0}, {low}), {high})",
)


def _keep(text: str) -> Iterator[str]:
    yield text


def _round(text: str) -> Iterator[str]:
    yield from (f"int({text})", f"ceil({text})", f"round({text})")


def _round_to_multiples(text: str) -> Iterator[str]:
    for whole in (f"int({text})", f"ceil({text})"):
        for m in _MULTIPLES:
            yield from (f"-(-{whole}//{m})*{m}", f"{whole}//{m}*{m}")


def _add_arithmetic(text: str, points: Sequence[tuple[Mapping[str, int], int]]) -> Iterator[str]:
    """Yield arithmetic on a rounded number that no symbolic size records: `int(..) + 1`, `2 * int(..)`,
    `int(..) // E + 1`."""
    for whole in _round(text):
        pairs = [(w, v) for dims, v in points if (w := _try_evaluate(whole, dims))]
        if not pairs:
            continue
        variants, largest_pair = [whole], max(pairs)
        if (times := largest_pair[1] // largest_pair[0]) > 1:
            variants.append(f"{whole}*{times}")
        if largest_pair[1] and (quotient := largest_pair[0] // largest_pair[1]) > 1:
            variants += [f"{whole}//{quotient + increment}" for increment in (0, 1)]
        for variant in variants:
            offsets = Counter(v - w for dims, v in points if (w := _try_evaluate(variant, dims)) is not None)
            offset, num_hits = offsets.most_common(1)[0]
            if 2 * num_hits >= len(points) and (offset or variant is not whole) and abs(offset) <= _MAX_OFFSET:
                yield f"({variant}+{offset})"


def _try_evaluate(text: str, dims: Mapping[str, int]) -> int | None:
    try:
        return evaluate_size(text, dims)
    except (ArithmeticError, ValueError):
        return None


def _clamp_to_fit(text: str, tokens: str, points: Sequence[tuple[Mapping[str, int], int]]) -> Formula | None:
    """Return `text`, clamped if necessary, if it gives all values. At least a third of them must not be clamped."""
    try:
        values = [evaluate_size(text, dims) for dims, _ in points]
    except (ArithmeticError, ValueError):
        return None
    if sum(a == v for a, (_, v) in zip(values, points, strict=True)) * 3 < len(points):
        return None
    seen = sorted({v for _, v in points})
    for low in seen[:4]:  # below `low` tokens, the ceiling `tokens` gives smaller values
        for clamp in _CLAMPS:
            formula = Formula(clamp.format(text, tokens=tokens, low=low, high=seen[-1]))
            if all(formula(dims) == v == evaluate_size(formula.text, dims) for dims, v in points):
                whole = all(type(evaluate_size(formula.text, dims)) is int for dims, _ in points)
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

    def format_over(self, tokens: str) -> str:
        """Return the formula as an expression over `tokens`."""
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
    """Find the simplest clamped linear formula that gives all points, or None."""
    points = sorted(set(points))
    values = [v for _, v in points]
    lows: list[int | None] = [None, values[0]]
    highs: list[int | str | None] = [None, "tokens", values[-1]]
    ranked_formulas = []
    for low in lows:
        for high in highs:
            for up in (False, True):
                slope = _find_slope(points, up, low, high)
                if slope is None:
                    continue
                formula = ClampedLinearFormula(slope, up, low, high)
                if all(formula(t) == v for t, v in points):
                    ranked_formulas.append(((low is not None) + (high is not None), slope.denominator, formula))
    return min(ranked_formulas, key=lambda f: f[:2])[2] if ranked_formulas else None


def _find_slope(points: Sequence[Point], up: bool, least: int | None, most: int | str | None) -> Fraction | None:
    """Find the fraction with the smallest denominator that rounds to all values between the clamps.

    A value at the clamp `least` or `most` only bounds the fraction on one side. At least three values must be between
    the clamps.
    """
    low, high, num_unclamped = Fraction(0), Fraction(1 << 40), 0
    for t, v in points:
        at_least, at_most = v == least, v == (t if most == "tokens" else most)
        num_unclamped += not (at_least or at_most)
        if not at_least:  # round(slope * t) >= v
            low = max(low, Fraction(v - 1, t) if up else Fraction(v, t))
        if not at_most:  # round(slope * t) <= v
            high = min(high, Fraction(v, t) if up else Fraction(v + 1, t))
    if num_unclamped < 3 or low > high:
        return None
    for denominator in range(1, 4097):  # integer arithmetic, since fractions are slow
        scaled = low.numerator * denominator
        numerator = scaled // low.denominator + 1 if up else -(-scaled // low.denominator)
        left, right = numerator * high.denominator, high.numerator * denominator
        if numerator > 0 and (left <= right if up else left < right):
            return Fraction(numerator, denominator)
    return None
