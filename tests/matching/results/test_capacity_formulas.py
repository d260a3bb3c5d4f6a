"""Formulas of capacities, found from their values at a few sizes."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from moefx.matching.results.capacity_formulas import ClampedLinearFormula, find_clamped_linear, find_formula

TOKENS = (29, 33, 17, 2, 6, 10, 20, 40, 64, 100, 128, 200, 320, 512)


@settings(max_examples=150, deadline=None)
@given(
    p=st.integers(1, 12),
    q=st.integers(1, 32),
    up=st.booleans(),
    low=st.one_of(st.none(), st.integers(1, 8)),
    high=st.one_of(st.none(), st.just("tokens"), st.integers(20, 60)),
)
def test_formula_gives_all_points_and_nearby_ones(p, q, up, low, high):
    true = ClampedLinearFormula(Fraction(p, q), up, low, high)
    formula = find_clamped_linear([(t, true(t)) for t in TOKENS])
    inside = [t for t in TOKENS if true(t) not in (low, high, t)]
    assume(len(inside) >= 6)
    assert formula is not None
    assert [formula(t) for t in TOKENS] == [true(t) for t in TOKENS]


@pytest.mark.parametrize(
    ("formula", "text"),
    [
        (lambda t: math.ceil(t / 4), "ceil(1/4*S)"),
        (lambda t: int(1.25 * t * 2 / 8), "floor(5/16*S)"),
        (lambda t: max(4, t // 4), "max(4, floor(1/4*S))"),
        (lambda t: min(t, max(4, math.ceil(1.5 * t / 4))), None),
        (lambda t: t, "floor(1*S)"),
        (lambda t: 2 * t, "floor(2*S)"),
    ],
)
def test_usual_formulas_of_capacities_are_recovered(formula, text):
    linear = find_clamped_linear([(t, formula(t)) for t in TOKENS])
    if text is None:  # a floor and a ceiling: correct at the given sizes
        assert linear is None or all(linear(t) == formula(t) for t in TOKENS)
    else:
        assert str(linear) == text and all(linear(t) == formula(t) for t in range(1, 600))


def test_points_without_a_formula():
    assert find_clamped_linear([(t, t * t) for t in TOKENS]) is None
    assert find_clamped_linear([(10, 3), (20, 5)]) is None


@pytest.mark.parametrize(
    ("linear", "text"),
    [
        (ClampedLinearFormula(Fraction(1, 4), True, 4, "tokens"), "max(4, min(ceil(1/4*S), S))"),
        (ClampedLinearFormula(Fraction(3, 2), False, None, 64), "min(floor(3/2*S), 64)"),
    ],
)
def test_a_clamped_linear_function_prints_as_python(linear, text):
    assert str(linear) == text


def test_low_wins_over_high():
    assert ClampedLinearFormula(Fraction(1), False, 8, 4)(100) == 8


@pytest.mark.parametrize("tile", [4, 8, 64])
@pytest.mark.parametrize("up", [True, False], ids=["up", "down"])
def test_multiples_of_a_tile(tile, up):
    """Find `(int(0.9 * T / 4) + 7) // 8 * 8`. Captures do not show the part after `int`."""
    values = [(s, (int(0.9 * s / 4) + (tile - 1 if up else 0)) // tile * tile) for s in TOKENS]
    formula = find_formula([({"S": s}, v) for s, v in values], ["((0.9*S)/4)"], try_linear=False)
    assert formula is not None
    for s in (1, 5, 777, 4096):
        assert formula({"S": s}) == (int(0.9 * s / 4) + (tile - 1 if up else 0)) // tile * tile
