"""The page on the planner runs as printed."""

from __future__ import annotations

import re
from pathlib import Path

from moefx.planner.platforms import PLATFORMS

PAGE = (Path(__file__).parents[2] / "docs" / "planner.md").read_text(encoding="utf-8")


def test_it_runs(capsys):
    (block,) = re.findall(r"^```python\n(.*?)^```", PAGE, re.M | re.S)
    exec(block, {"__name__": "page"})
    printed = capsys.readouterr().out
    for text in (
        "deepseek-v3 on 1024 x AMD MI250X",
        "rejected",
        "M_gpu = ",
        "MFU = ",
        "Layout(pp=",
        "Plan(checkpoint=",
    ):
        assert text in printed


def test_platforms_are_named():
    assert all(f"`{name}`" in PAGE for name in PLATFORMS)
