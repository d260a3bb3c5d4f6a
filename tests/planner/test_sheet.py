"""Sheets evaluate formulas in order and show them with their numbers."""

from __future__ import annotations

import pytest
import sympy

from moefx.planner.sheet import Formula, Sheet, distinct, quantities
from moefx.util.unit_text import amount

a, b, total, E, k, N = quantities("a b total E k N")
SHEET = Sheet(
    [
        Formula("total", a * b + sympy.ceiling(a / b), "B", "a paper, section 1"),
        Formula("half", total / 2, "B", "half of it"),
        Formula("most", sympy.Max(a, b), "1", "the larger"),
    ]
)


def test_a_sheet_computes_all_formulas_from_its_inputs():
    assert SHEET.inputs == ["a", "b"]
    assert SHEET(a=7, b=2) == {"total": 18, "half": 9, "most": 7}


def test_whole_numbers_are_integers():
    """Compute bytes of large models as integers: floats have too few digits."""
    assert SHEET(a=2**60 + 1, b=1)["total"] == 2 * (2**60 + 1)


def test_a_result_is_shown_with_its_formula_and_source():
    text = SHEET.format_results("half", a=4096, b=1024)
    assert text.splitlines() == [
        "half = total/2    # half of it",
        "     = 4.194e+06/2 = 2 MiB",
        "total = a*b + ceiling(a/b)    # a paper, section 1",
        "      = 4096*1024 + ceiling(4096/1024) = 4 MiB",
    ]


def test_missing_arguments_raise():
    with pytest.raises(TypeError, match="b"):
        SHEET(a=1)


def test_sheets_are_checked():
    with pytest.raises(ValueError, match="two formulas are named x"):
        Sheet([Formula("x", a, "1", ""), Formula("x", b, "1", "")])
    with pytest.raises(ValueError, match="x uses total, which is not above it"):
        Sheet([Formula("x", total, "1", ""), Formula("total", a, "1", "")])


def test_distinct_ranks_of_a_token_match_the_paper():
    """X-MoE figure 4: redundancy of 75.1 % at EP = 16 and 54.8 % at 32, on nodes of 8."""
    sheet = Sheet([Formula("D", distinct(E, k, N), "1", "")])
    for nodes, redundancy in ((2, 0.751), (4, 0.548)):
        assert 1 - sheet(E=256, k=8, N=nodes)["D"] / 8 == pytest.approx(redundancy, abs=0.0005)
    assert sheet(E=256, k=8, N=1)["D"] == 1
    assert "distinct_parts(256, 8, 2) = 1.993" in sheet.format_results("D", E=256, k=8, N=2)


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (0, "B", "0 B"), (1536, "B", "1.5 KiB"), (1.125 * 2**30, "B", "1.125 GiB"), (0.0042, "s", "4.2 ms"),
        (3e-6, "s", "3 us"), (2.5, "s", "2.5 s"), (0, "s", "0 us"), (1.2e12, "FLOP", "1.2 TFLOP"), (7, "1", "7"),
        (671e9, "1", "671 G"),
    ],
)  # fmt: skip
def test_amounts_are_printed_in_units(value, unit, text):
    assert amount(value, unit) == text
