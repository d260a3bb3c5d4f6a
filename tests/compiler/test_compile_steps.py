"""The table of the compilation's steps: it agrees with the passes, the files and docs/architecture.md."""

from __future__ import annotations

from pathlib import Path

import pytest

import moefx
from moefx.compiler.compile_steps import COMPILE_STEPS, CompileStep, list_optional_passes
from moefx.ir.graphs.graph_levels import LEVELS
from moefx.passes.pass_manager import find_pass_location, get_pass_name

ROOT = Path(moefx.__file__).parent


@pytest.mark.parametrize("step", COMPILE_STEPS, ids=lambda step: step.name)
def test_a_step_agrees_with_its_pass_and_file(step: CompileStep):
    assert (ROOT / step.code).is_file() and step.level in ("", *LEVELS)
    if step.run is not None:
        declared = get_pass_name(step.run), step.run.level.name, find_pass_location(step.run).partition(":")[0]
        assert declared == (step.name, step.level, step.code)
    else:
        assert not step.is_optional and step.bind is None


def test_a_plan_may_disable_the_optional_passes():
    assert list_optional_passes() == ["fuse", "checkpoint", "overlap"]


def format_row(number: int, step: CompileStep) -> str:
    cells = [str(number), step.name, f"`{step.code}`", step.level or "-", step.when.words, "yes" * step.is_optional]
    return f"| {' | '.join(cell or '-' for cell in cells)} |"


def test_the_architecture_page_shows_the_table():
    page = (ROOT.parent / "docs/architecture.md").read_text(encoding="utf-8")
    head, _, table = page.partition("| step | name |")[2].partition("\n")
    assert head
    rows = table.partition("\n\n")[0].splitlines()[1:]
    assert rows == [format_row(number, step) for number, step in enumerate(COMPILE_STEPS, start=1)]
