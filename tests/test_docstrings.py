"""Docstrings are wrapped at 120 columns: no line of a few words stands in the middle of a sentence.

Prose names code that exists: renaming a name everywhere must not put it in the place of a plain word.
"""

from __future__ import annotations

import ast
import io
import itertools
import re
import tokenize
from collections.abc import Container, Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
FOLDERS = ("moefx", "tests", "benchmarks", "examples")
_MIN_FULL = 90  # columns: a line of running text
_MAX_SHORT = 40  # characters
_NAME_AMONG_WORDS = re.compile(r"\b[a-z]+\s+([a-z]+(?:_[a-z0-9]+)+)(?=\s+[a-z])")
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


def stray_names(code: str, known: Container[str] = ()) -> Iterator[tuple[int, str]]:
    """Names between words of a docstring or comment, outside of backticks, that neither `code` nor `known` has."""
    docs = {first for first, _ in docstrings(code)}
    text, names = [], set()
    for token in tokenize.generate_tokens(io.StringIO(code).readline):
        if token.type == tokenize.COMMENT or (token.type == tokenize.STRING and token.start[0] in docs):
            text.append(token)
        else:
            names.update(re.findall(r"\w+", token.string))
    for token in text:
        prose = re.sub(r"`[^`]*`", lambda quoted: re.sub(r"[^\n]", "`", quoted[0]), token.string)
        for found in _NAME_AMONG_WORDS.finditer(prose):
            if found[1] not in names and found[1] not in known:
                yield token.start[0] + prose.count("\n", 0, found.start(1)), found[1]


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


def test_prose_has_no_stray_names():
    paths = [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))]
    modules = {path.stem for path in paths}
    found = [
        f"{path.relative_to(ROOT)}:{line}: {name}: put it in backticks, or write a word"
        for path in paths
        for line, name in stray_names(path.read_text(encoding="utf-8"), modules)
    ]
    assert not found, "\n".join(found)


def test_stray_names_are_seen():
    code = '"""Invent values if the\n\nblock extra_values a float."""\n'
    assert [*stray_names(code)] == [(3, "extra_values")]
    assert [*stray_names("# the block extra_values a float\nx = 1\n")] == [(1, "extra_values")]
    assert not [*stray_names(code + "extra_values = 1\n")]
    assert not [*stray_names(code, {"extra_values"})]
    assert not [*stray_names('"""The block returns `extra_values` of a float."""\n')]


def test_faults_are_seen():
    full = "    Every path from the selection passes the first tensor of rows, and so does a path to the exit, if the"
    assert [*orphans([full, "    path", "    contains a product."])] == [1]
    assert not [*orphans([full, "    path.", "    It contains a product."])]  # a list, or the end of a paragraph
    assert not [*orphans([full, "    path", "", "    Args:"])]
    assert not [*orphans(["    token = torch.where(chosen == e)[0]", "    if len(token)", "    and e"])]
    assert [*double_blanks(["Return it.", "", "", "Raises:"])] == [1]
