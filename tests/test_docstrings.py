"""Docstrings are wrapped at 120 columns: no line of a few words is in the middle of a sentence.

Prose names code that exists: a rename must not replace a plain word. Docstrings of tests are sentences: they start with
a verb or a subject.
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
_FRAGMENT = re.compile(r"(?:What|Of|Where|Said|As|By|So|That|Those|Which|How)\b")  # first words of fragments
_DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def find_docstrings(code: str) -> Iterator[tuple[int, list[str]]]:
    """Yield the lines of each docstring, with the number of the first one."""
    lines = code.splitlines()
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, _DOCUMENTED) and ast.get_docstring(node, clean=False) is not None:
            text = node.body[0]
            yield text.lineno, lines[text.lineno - 1 : text.end_lineno]


def find_orphans(lines: list[str]) -> Iterator[int]:
    """Yield the indices of short lines below a full one, in a sentence that the next line continues."""
    for number, (above, line, below) in enumerate(zip(lines, lines[1:], lines[2:], strict=False), start=1):
        words, after = line.strip(), below.strip().removesuffix('"""')
        goes_on = words and after and not re.search(r"[.:;!?|]$", words) and _indent(line) == _indent(below)
        if goes_on and len(words) < _MAX_SHORT and len(above) > _MIN_FULL:
            yield number


def find_double_blanks(lines: list[str]) -> Iterator[int]:
    """Return the indices of blank lines above blank ones."""
    return (i for i, (above, below) in enumerate(itertools.pairwise(lines)) if not above.strip() and not below.strip())


def find_stray_names(code: str, known: Container[str] = ()) -> Iterator[tuple[int, str]]:
    """Yield names between words of docstrings and comments, outside backticks, that `code` and `known` lack."""
    docs = {first for first, _ in find_docstrings(code)}
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


def find_fragments(code: str) -> Iterator[tuple[int, str]]:
    """Yield the first line of each docstring that starts like a fragment, with its number."""
    for first, lines in find_docstrings(code):
        text = lines[0].strip().lstrip('rR"')
        if _FRAGMENT.match(text):
            yield first, text


def find_unknown_arguments(code: str) -> Iterator[tuple[int, str]]:
    """Yield names under `Args:` that are no parameters of the function, or of the class's `__init__` or its fields.

    A function with `*args` documents the arguments of an op's schema.
    """
    for node in ast.walk(ast.parse(code)):
        if not isinstance(node, _DOCUMENTED[1:]) or "Args:" not in (doc := ast.get_docstring(node) or ""):
            continue
        known = {*_list_parameters(node)}
        section = re.split(r"\n\n(?=\w+:\n)", doc.partition("Args:\n")[2])[0]
        for names in re.findall(r"^ {4}(\S[^:`]*?)(?: \(.*?\))?:", section, re.MULTILINE):
            for name in re.split(r"[\s,]+", names):
                if name.lstrip("*") not in known and not ("args" in known and not name.startswith("*")):
                    yield node.lineno, name


def _list_parameters(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.ClassDef):
        for part in node.body:
            if isinstance(part, ast.AnnAssign) and isinstance(part.target, ast.Name):
                yield part.target.id
            elif isinstance(part, ast.FunctionDef) and part.name in ("__init__", "__call__", "__new__"):
                yield from _list_parameters(part)
    elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
        a = node.args
        yield from (p.arg for p in (*a.posonlyargs, *a.args, *a.kwonlyargs, a.vararg, a.kwarg) if p is not None)


def _indent(line: str) -> int:
    return len(line) - len(line.lstrip())


def list_sources(*folders: str) -> Iterator[tuple[Path, str]]:
    """Yield the path, from the root, and the text of each module in folders."""
    for folder in folders:
        for path in sorted((ROOT / folder).rglob("*.py")):
            yield path.relative_to(ROOT), path.read_text(encoding="utf-8")


def test_paragraphs_are_filled():
    found = [
        f"{path}:{first + number}: {lines[number].strip()}"
        for path, text in list_sources(*FOLDERS)
        for first, lines in find_docstrings(text)
        for number in {*find_orphans(lines), *find_double_blanks(lines)}
    ]
    assert not found, "\n".join(found)


def test_prose_has_no_stray_names():
    modules = {path.stem for path, _ in list_sources(*FOLDERS)}
    found = [
        f"{path}:{line}: {name}: put it in backticks, or write a word"
        for path, text in list_sources(*FOLDERS)
        for line, name in find_stray_names(text, modules)
    ]
    assert not found, "\n".join(found)


def test_docstrings_of_tests_are_sentences():
    found = [
        f"{path}:{line}: {fragment}" for path, text in list_sources("tests") for line, fragment in find_fragments(text)
    ]
    assert not found, "start with a verb or a subject:\n" + "\n".join(found)


def test_documented_arguments_are_parameters():
    found = [
        f"{path}:{line}: {name} is documented under Args, and is no parameter"
        for path, text in list_sources(*FOLDERS)
        for line, name in find_unknown_arguments(text)
    ]
    assert not found, "\n".join(found)


def test_unknown_arguments_are_seen():
    doc = '"""Add.\n\n    Args:\n        a, b: x: y\n            kind: of them.\n        *rest: more.\n    """\n'
    for code, unknown in (
        (f"def f(a, *rest, b=1):\n    {doc}", []),
        (f"def f(a, *others):\n    {doc}", ["b", "*rest"]),
        (f"def f(*args):\n    {doc}", ["*rest"]),
        (f"class C:\n    {doc}    a: int\n    b: int\n", ["*rest"]),
        (f"class C:\n    {doc}    def __init__(self, a, b, *rest):\n        pass\n", []),
    ):
        assert [name for _, name in find_unknown_arguments(code)] == unknown


def test_fragments_are_seen():
    assert [*find_fragments('"""What a block returns."""')] == [(1, 'What a block returns."""')]
    assert [line for line, _ in find_fragments('def f():\n    """As in transformers."""')] == [2]
    assert not [*find_fragments('"""Assert that outputs are equal. What follows is free."""')]


def test_stray_names_are_seen():
    code = '"""Invent values if the\n\nblock extra_values a float."""\n'
    assert [*find_stray_names(code)] == [(3, "extra_values")]
    assert [*find_stray_names("# the block extra_values a float\nx = 1\n")] == [(1, "extra_values")]
    assert not [*find_stray_names(code + "extra_values = 1\n")]
    assert not [*find_stray_names(code, {"extra_values"})]
    assert not [*find_stray_names('"""The block returns `extra_values` of a float."""\n')]


def test_faults_are_seen():
    full = "    Every path from the selection passes the first tensor of rows, and so does a path to the exit, if the"
    assert [*find_orphans([full, "    path", "    contains a product."])] == [1]
    assert not [*find_orphans([full, "    path.", "    It contains a product."])]  # a list, or the end of a paragraph
    assert not [*find_orphans([full, "    path", "", "    Args:"])]
    assert not [*find_orphans(["    token = torch.where(chosen == e)[0]", "    if len(token)", "    and e"])]
    assert [*find_double_blanks(["Return it.", "", "", "Raises:"])] == [1]
