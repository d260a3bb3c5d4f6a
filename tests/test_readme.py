"""The README runs as printed, and what it and docs/ point at exists."""

from __future__ import annotations

import contextlib
import io
import re
import sys
from pathlib import Path

import pytest
import torch

import moefx
from moefx import errors

from .distributed.launch import torchrun

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
PYTHON_BLOCKS = re.findall(r"^```python\n(.*?)^```", README, re.M | re.S)


@pytest.mark.parametrize("number", range(len(PYTHON_BLOCKS)))
def test_python_blocks_run(number, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    # Source lines in explain() and tracebacks come from a file, as they do for a user.
    (tmp_path / "readme_block.py").write_text(PYTHON_BLOCKS[number])
    monkeypatch.syspath_prepend(str(tmp_path))
    torch.manual_seed(0)
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(PYTHON_BLOCKS[number], str(tmp_path / "readme_block.py"), "exec"), {"__name__": "readme"})
    assert "build_pft" in printed.getvalue()


def test_relative_links_and_make_targets_exist():
    for page in (ROOT / "README.md", *(ROOT / "docs").glob("*.md")):
        for link in re.findall(r"\]\(([^)#]+)\)", page.read_text(encoding="utf-8")):
            assert link.startswith("https://") or (page.parent / link).exists(), f"{page.name}: {link}"
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for target in re.findall(r"(?:^|`)make ([a-z][a-z0-9-]*)", README, re.M):
        assert re.search(rf"^{target}:", makefile, re.M), target


def test_every_documented_name_exists():
    table = README[README.index("| call | gives |") :]
    for name in re.findall(r"`moefx\.(\w+)\(", table):
        assert name in moefx.__all__, name


def test_the_error_catalogue_is_complete():
    text = (ROOT / "docs" / "errors.md").read_text(encoding="utf-8")
    classes = [
        value
        for value in vars(errors).values()
        if isinstance(value, type) and issubclass(value, errors.MoefxError) and value is not errors.MoefxError
    ]
    rows = dict(re.findall(r"^\| `(\w+)` \|(.*)\|$", text, re.M))
    assert sorted(rows) == sorted(cls.__name__ for cls in classes)
    for cls in classes:
        for base in cls.__mro__[1:]:
            if base.__module__ == "builtins" and base not in (Exception, BaseException, object):
                assert base.__name__ in rows[cls.__name__], cls


@pytest.mark.skipif(not torch.distributed.is_available() or sys.platform != "linux", reason="needs gloo")
def test_the_page_on_several_ranks_runs(tmp_path):
    text = (ROOT / "docs" / "expert_parallelism.md").read_text(encoding="utf-8")
    script = tmp_path / "script.py"
    script.write_text(re.findall(r"^```python\n(.*?)^```", text, re.M | re.S)[0])
    done = torchrun(str(script))
    assert done.returncode == 0, done.stderr[-3000:]
    printed = [re.split(r"\s{2,}#|\s{3,}(?=[a-z])", line)[0] for line in done.stdout.splitlines()]
    shown = re.findall(r"^```text\n(.*?)^```", text, re.M | re.S)[0].splitlines()
    for line in shown:
        code = re.sub(r"\s{2,}[a-z][^=(]*$", "", line.replace("...)", ""))
        wanted = re.sub(r"\s+", " ", code)
        assert any(re.sub(r"\s+", " ", found).startswith(wanted) for found in printed), (wanted, printed)
