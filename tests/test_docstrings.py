"""Docstrings are wrapped at 120 columns: no line of a few words stands in the middle of a sentence."""

from __future__ import annotations

import ast
import itertools
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
FOLDERS = ("moefx", "tests", "benchmarks", "examples")
_MIN_FULL = 90  # columns: a line of running text
_MAX_SHORT = 40  # characters
_DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def docstrings(code: str) -> Iterator[tuple[int, list[str]]]:
    """Each docstring as lines, with the number of its first one."""
    lines = code.splitlines()
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, _DOCUMENTED) and ast.get_docstring(node, clean=False) is not None:
            text = node.body[0]
            yield text.lineno, lines[text.lineno - 1 : text.end_lineno]


def orphans(lines: list[str]) -> Iterator[int]:
    """The indices of short lines below a full one, in a sentence that the next line continues."""
    for number, (above, line, below) in enumerate(zip(lines, lines[1:], lines[2:], strict=False), start=1):
        words, after = line.strip(), below.strip().removesuffix('"""')
        goes_on = words and after and not re.search(r"[.:;!?|]$", words) and _indent(line) == _indent(below)
        if goes_on and len(words) < _MAX_SHORT and len(above) > _MIN_FULL:
            yield number


def double_blanks(lines: list[str]) -> Iterator[int]:
    """The indices of blank lines above blank ones."""
    return (i for i, (above, below) in enumerate(itertools.pairwise(lines)) if not above.strip() and not below.strip())


def _indent(line: str) -> int:
    return len(line) - len(line.lstrip())


def test_paragraphs_are_filled():
    found = [
        f"{path.relative_to(ROOT)}:{first + number}: {lines[number].strip()}"
        for folder in FOLDERS
        for path in sorted((ROOT / folder).rglob("*.py"))
        for first, lines in docstrings(path.read_text(encoding="utf-8"))
        for number in {*orphans(lines), *double_blanks(lines)}
    ]
    assert not found, "\n".join(found)


def test_faults_are_seen():
    full = "    Every path from the selection passes the first tensor of rows, and so does a path to the exit, if the"
    assert [*orphans([full, "    path", "    contains a product."])] == [1]
    assert not [*orphans([full, "    path.", "    It contains a product."])]  # a list, or the end of a paragraph
    assert not [*orphans([full, "    path", "", "    Args:"])]
    assert not [*orphans(["    token = torch.where(chosen == e)[0]", "    if len(token)", "    and e"])]
    assert [*double_blanks(["Return it.", "", "", "Raises:"])] == [1]
