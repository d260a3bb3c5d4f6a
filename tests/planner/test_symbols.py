"""Each symbol of a shown formula is a result with its own formula, or has a meaning, a unit and a value."""

from __future__ import annotations

import re
from html import escape
from typing import get_args

import pytest

from moefx import cli
from moefx.planner.layout import PlannedDispatch
from moefx.planner.memory_formulas import MEMORY
from moefx.planner.regions import TRADE_OFF, explain_ssmb_saving
from moefx.planner.sheet import Formula, Sheet, distinct, quantities
from moefx.planner.step_formulas import build_step_sheet
from moefx.planner.symbols import SYMBOLS, explain_formulas, find_meaning

SHEETS = [MEMORY, TRADE_OFF, build_step_sheet("none", 1)]
SHEETS += [
    build_step_sheet(way, levels)
    for way in get_args(PlannedDispatch)
    for levels in (1, 2, 3)
    if levels > 1 or way in ("flat", "dedup", "gather")
]
UNITS = {"1", "B", "s", "FLOP", "FLOP/s", "B/s", "s/B"}


@pytest.fixture
def ranking(large):
    return large[0]


def test_every_symbol_has_a_meaning_and_none_is_unused():
    """Require a meaning for each new symbol."""
    inputs = {name for sheet in SHEETS for name in sheet.inputs}
    assert all(find_meaning(name)[0] in UNITS and len(find_meaning(name)[1]) > 5 for name in inputs)
    assert {name if name in SYMBOLS else re.sub(r"\d+$", "#", name) for name in inputs} == SYMBOLS.keys()
    assert find_meaning("beta3") == ("s/B", "time of a byte that leaves a rank at level 3")
    with pytest.raises(KeyError):
        find_meaning("unheard_of")


@pytest.mark.parametrize("sheet", SHEETS, ids=range(len(SHEETS)))
def test_results_have_a_meaning(sheet):
    """Require a meaning besides the section of a paper, which readers may not have."""
    for formula in sheet:
        assert re.match(r"(?!Piper|X-MoE|MoEBlaze)\w", formula.meaning), formula


def read_formulas(text):
    """Return the lines with formulas, without their numbers."""
    return [line.partition("    # ")[0] for line in text.splitlines() if "    # " in line]


def test_each_symbol_of_an_entry_is_explained_once(ranking):
    for index in (0, len(ranking) // 2, len(ranking) - 1):
        for shown in ranking.formulas(index):
            results = {line.partition(" = ")[0] for line in read_formulas(shown.formulas)}
            used = {n for line in read_formulas(shown.formulas) for n in re.findall(r"[A-Za-z]\w*", line)}
            rows = [name for name, _, _ in shown.symbols if "(" not in name]
            assert set(rows) == used - results - {"Max", "ceiling", "distinct_parts"} and len(rows) == len(set(rows))
    bytes_of, seconds_of = ({name: value for name, value, _ in shown.symbols} for shown in ranking.formulas(0))
    assert (bytes_of["n_logits"], seconds_of["n_logits"]) == ("0", "1")  # of the first stage, and of the last
    assert seconds_of["peak"] == "1.915e+14 FLOP/s" and seconds_of["z_o"] == str(ranking[0].layout.dp)


def test_symbols_have_values_with_units_and_functions():
    E, k, EP, BW = quantities("E k EP BW")
    shown = explain_formulas(
        Sheet([Formula("D", distinct(E, k, EP) / BW, "s", "a test")]), "D", E=8, k=2, BW=2e12, EP=4
    )
    assert [row[:2] for row in shown.symbols] == [
        ("BW", "2e+12 B/s"), ("E", "8"), ("EP", "4"), ("k", "2"), ("distinct_parts(E, k, n)", "")
    ]  # fmt: skip


def test_the_command_and_the_page_show_symbols(large, capsys):
    ranking, page, _ = large
    asked = ["plan", "deepseek-v3", "--platform", "frontier", "--gpus", "1024", "--explain", "2"]
    assert cli.main(asked) == 0
    printed = capsys.readouterr().out
    for shown in ranking.formulas(1):
        for name, value, text in shown.symbols:
            assert re.search(rf"^  {re.escape(name)} +{re.escape(value)} +{re.escape(text)}$", printed, re.M)
    on_page = [*ranking.formulas(0), explain_ssmb_saving(ranking.model, ranking[0].layout, ranking.platform)]
    for shown in on_page:
        for row in shown.symbols:
            assert "".join(f"<td>{escape(cell)}</td>" for cell in row) in page
    assert f"<td>n_kept</td><td>64</td><td>{escape(find_meaning('n_kept')[1])}</td>" in page
