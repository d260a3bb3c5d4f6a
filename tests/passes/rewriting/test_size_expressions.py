"""Formulas that fit the values of a number in several captures."""

from __future__ import annotations

import pytest

from moefx.passes.rewriting.size_expressions import (
    LinearFormula,
    _find_float_formula,
    _fit_affine,
    _fit_divided,
    _fit_scaled,
)

SIZES = [29, 24, 13]


@pytest.mark.parametrize(
    ("fit", "sizes", "formula"),
    [
        (_fit_scaled, SIZES, LinearFormula(3)),
        (_fit_divided, [3200, 2400, 1600], LinearFormula(3, 8)),
        (_fit_affine, SIZES, LinearFormula(2, offset=-3)),
    ],
)
def test_a_linear_formula_is_fitted(fit, sizes, formula):
    assert fit(sizes, [formula.evaluate(size) for size in sizes]) == formula


@pytest.mark.parametrize(
    ("fit", "sizes", "values"),
    [
        (_fit_scaled, SIZES, [58, 48, 27]),
        (_fit_divided, SIZES, [10, 9, 4]),  # 3 * size // 8, which rounds
        (_fit_affine, SIZES[:2], [57, 47]),  # two sizes fit any line
        (_fit_affine, SIZES, [34, 29, 18]),  # an offset of 5
    ],
)
def test_other_values_have_no_linear_formula(fit, sizes, values):
    assert fit(sizes, values) is None


def test_a_function_is_found_behind_one_without_a_value():
    """The logarithm of 0 comes before the square root."""
    assert _find_float_formula(["S-1"], [({"S": 1}, 0.0), ({"S": 5}, 2.0), ({"S": 10}, 3.0)]) == "sqrt(S-1)"
