"""The pages on the planner run and print the shown text."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest

from moefx.planner.platforms import PLATFORMS
from moefx.ranking import plan

DOCS = Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "planner.md").read_text(encoding="utf-8")
FORMULAS = (DOCS / "concepts" / "planner_formulas.md").read_text(encoding="utf-8")


def test_the_pages_run(capsys):
    for page in (PAGE, FORMULAS):
        space: dict[str, object] = {"__name__": "page"}
        for block in re.findall(r"^```python\n(.*?)^```", page, re.M | re.S):
            exec(block, space)
    printed = capsys.readouterr().out
    for text in (
        "deepseek-v3 on 1024 x AMD MI250X",
        "rejected",
        "M_gpu = ",
        "MFU = ",
        "Layout(pp=",
        "Plan(checkpoint=",
        "routing of skew 0.5, seed 0",
    ):
        assert text in printed


def test_the_signature_is_the_one():
    """Show all arguments in order and with their defaults."""
    (text,) = re.findall(r"^moefx\.plan\((.*?)\) -> Ranking$", PAGE, re.M | re.S)
    parameters = inspect.signature(plan).parameters.values()
    shown = [p.name if p.default is p.empty else f"{p.name}={p.default!r}" for p in parameters]
    assert re.sub(r"\s+", " ", text).replace('"', "'") == ", ".join([*shown[:3], "*", *shown[3:]])
    assert all(f"\n| `{p.name}` | " in PAGE for p in parameters)


def test_platforms_are_named():
    assert all(f"`{name}`" in PAGE for name in PLATFORMS)


@pytest.mark.parametrize("name", ["olmoe-1b-7b", "gpt-oss-20b", "mixtral-8x22b"])
def test_simulated_seconds_are_those_of_the_table(name):
    """Match the table within two units of the last digit: rates and formulas may change, and the table with them."""
    (row,) = re.findall(rf"^\| {name} \| ([\w-]+), (\d+) \| ([\d ]+) \| ([\d.]+) \| ([\d.]+) \|$", FORMULAS, re.M)
    platform, ranks, division, without, skewed = row
    ranking = plan(name, platform, int(ranks))
    x = ranking[0].layout
    assert f"{x.pp} {x.tp} {x.dp} {x.ep}" == division
    for skew, ratio in ((0.0, without), (0.5, skewed)):
        assert ranking.simulate(skew=skew).ratio == pytest.approx(float(ratio), abs=0.02)
