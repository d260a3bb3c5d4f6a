"""The package follows docs/architecture.md.

Imports point down its tables, no modules import each other in a circle, no module reads the words of a refusal, and the
page names functions and carriers that exist.
"""

from __future__ import annotations

import ast
import functools
import importlib
import inspect
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FILES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
    for path in sorted((ROOT / "moefx").rglob("*.py"))
}


@functools.cache
def read_layers() -> dict[str, tuple[int, int]]:
    """Map each unit of the tables to its row, counted from the bottom: (that of its folder, its own in the folder)."""
    layers: dict[str, tuple[int, int]] = {}
    for table in (ROOT / "docs/architecture.md").read_text().partition("## Layers")[2].split("\n\n"):
        head, *lines = table.splitlines() or [""]
        rows = [line.split("|")[1] for line in lines if line.startswith("| `")]
        if head.startswith("| layer |"):
            layers |= {unit: (i, 0) for i, row in enumerate(reversed(rows)) for unit in find_names(row)}
        elif head.startswith("| part of"):
            (folder,) = find_names(head)
            row_of_folder = layers.pop(folder)[0]  # the table of folders is the first
            layers |= {unit: (row_of_folder, i) for i, row in enumerate(reversed(rows)) for unit in find_names(row)}
    return layers


def find_names(text: str) -> list[str]:
    """Return the names in backticks."""
    return re.findall("`([^`]+)`", text)


def list_imports(module: str, tree: ast.AST, is_package: bool) -> Iterator[str]:
    """Yield the modules of the package that a module imports, except below `if TYPE_CHECKING`."""
    typing_only = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)
        for part in node.body
        for inner in ast.walk(part)
    }
    for node in ast.walk(tree):
        if id(node) in typing_only:
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.partition(".")[0] == "moefx")
        elif isinstance(node, ast.ImportFrom):
            package = module.split(".") if is_package else module.split(".")[:-1]
            base = package[: len(package) - node.level + 1] if node.level else []
            source = ".".join([*base, *filter(None, [node.module])])
            if source.partition(".")[0] == "moefx":
                yield from (f"{source}.{a.name}" if f"{source}.{a.name}" in FILES else source for a in node.names)


@pytest.fixture(scope="module")
def edges() -> dict[str, set[str]]:
    return {
        module: {
            b for b in list_imports(module, ast.parse(path.read_text()), path.name == "__init__.py") if b != module
        }
        for module, path in FILES.items()
    }


def find_unit(module: str) -> str:
    """Return the longest name in the table that equals or contains the module, or ""."""
    inner = module.split(".")[1:]
    names = [".".join(inner[:n]) for n in range(len(inner), 0, -1)] or ["__init__"]
    return next((name for name in names if name in read_layers()), "")


def test_every_module_has_a_layer():
    with_code = {module for module, path in FILES.items() if path.read_text().strip()}
    assert not [module for module in with_code if not find_unit(module)]
    assert {find_unit(module) for module in with_code} == set(read_layers())


def find_upward_imports(edges: dict[str, set[str]]) -> list[str]:
    row = read_layers() | {"": (-1, 0)}  # a folder without code is below all
    return [f"{a} -> {b}" for a in edges for b in sorted(edges[a]) if row[find_unit(a)] < row[find_unit(b)]]


def test_imports_point_down(edges):
    assert not find_upward_imports(edges)


def find_circles(edges: dict[str, set[str]]) -> list[list[str]]:
    """List groups of modules that reach each other."""
    reached = {module: _find_reached(module, edges) for module in edges}
    together = {frozenset(b for b in reached[a] if a in reached.get(b, ())) for a in edges}
    return [sorted(circle) for circle in together if circle]


def _find_reached(module: str, edges: dict[str, set[str]]) -> set[str]:
    found: set[str] = set()
    stack = [*edges[module]]
    while stack:
        if (here := stack.pop()) not in found:
            found.add(here)
            stack += edges.get(here, ())
    return found


def test_no_module_is_in_a_circle(edges):
    assert not find_circles(edges)


def read_rows(heading: str) -> list[list[str]]:
    """Return the cells of the table of architecture.md whose head starts with some cells."""
    table = (ROOT / "docs/architecture.md").read_text().partition(heading)[2].partition("\n\n")[0]
    return [
        [cell.strip("` ") for cell in line.split("|")[1:-1]] for line in table.splitlines() if line.startswith("| `")
    ]


def find_documented(name: str, path: str):
    """Return a function, class or method, or the class that sets a documented attribute."""
    found = importlib.import_module(f"moefx.{path.removesuffix('.py').replace('/', '.')}")
    for part in name.split("."):
        if inspect.isclass(found) and not hasattr(found, part):
            assert f"self.{part}" in inspect.getsource(found), name
        else:
            found = getattr(found, part)
    return found


@pytest.mark.parametrize(
    "heading",
    ["From `compile` to a graph", "From a proof to installed programs", "From a call to a kernel",
     "From `pipeline` to a step", "From a folder to a rank's part"],
)  # fmt: skip
def test_the_functions_on_the_way_exist(heading):
    rows = read_rows(f"### {heading}\n\n")
    for names, path, _ in rows:
        for name in names.replace("`", "").split(", "):
            assert callable(find_documented(name, path)), name
    assert len(rows) > 3


def find_stale_references(text: str) -> list[str]:
    """Return the names in backticks that begin with a folder of the package but lead to no module or public name."""
    modules = {module.removeprefix("moefx.") for module in FILES}
    folders = {name.partition(".")[0] for name in modules if "." in name}
    stale = []
    for name in re.findall(r"`(?:moefx\.)?([a-z_]+(?:\.\w+)+)`", text):
        parts = name.split(".")
        prefixes = {".".join(parts[:n]) for n in range(max(2, len(parts) - 2), len(parts) + 1)}
        if parts[0] in folders and not prefixes & modules:
            public = getattr(importlib.import_module(f"moefx.{parts[0]}"), "__all__", ())
            stale += [name] if parts[1] not in public else []
    return stale


def test_references_to_modules_exist():
    texts = [*FILES.values(), *(ROOT / "docs").rglob("*.md")]
    assert not {str(path): stale for path in texts if (stale := find_stale_references(path.read_text()))}
    assert find_stale_references("see `capture.skipped_calls`, `capture.search.skipped_calls`") == [
        "capture.skipped_calls"
    ]


def test_carriers_are_frozen_as_documented():
    rows = read_rows("| carrier | file |")
    parameters = {row[0]: getattr(find_documented(*row[:2]), "__dataclass_params__", None) for row in rows}
    frozen = {name for name, found in parameters.items() if found is not None and found.frozen}
    assert frozen == {row[0] for row in rows if row[5] == "yes"} and "MatchedBlock" in frozen


def find_comparisons_of_reasons(tree: ast.AST) -> Iterator[int]:
    """Yield lines that compare the text of a refusal's reason. Modules compare `Refused.cause` instead."""

    def has_reason(node: ast.AST) -> bool:
        return any(isinstance(inner, ast.Attribute) and inner.attr == "reason" for inner in ast.walk(node))

    for node in ast.walk(tree):
        if isinstance(node, ast.Compare):
            found = any(map(has_reason, (node.left, *node.comparators)))
        elif isinstance(node, ast.Call):
            is_search = isinstance(node.func, ast.Attribute) and node.func.attr in _SEARCHES
            found = is_search and any(map(has_reason, (node.func, *node.args)))
        else:
            found = isinstance(node, ast.Match) and has_reason(node.subject)
        if found:
            yield node.lineno


_SEARCHES = {"count", "endswith", "find", "fullmatch", "index", "match", "partition", "search", "split", "startswith"}


def test_no_module_compares_reasons():
    found = {module: [*find_comparisons_of_reasons(ast.parse(path.read_text()))] for module, path in FILES.items()}
    assert not {module: lines for module, lines in found.items() if lines}


@pytest.mark.parametrize(
    "line",
    [
        "'routed' in why.reason",
        "any(text in why.reason for text in texts)",
        "error.reason == MIXING",
        "str(error.reason).lower().startswith(('a', 'b'))",
        "re.search('routed', why.reason)",
        "why.reason.find('routed')",
    ],
)
def test_comparisons_of_reasons_are_seen(line):
    assert [*find_comparisons_of_reasons(ast.parse(line))]


def test_faults_are_seen():
    edges = {"moefx.compiler.survey": {"moefx.driver.plan_check", "moefx.ir.op_providers"}}
    assert find_upward_imports(edges) == ["moefx.compiler.survey -> moefx.driver.plan_check"]
    edges = {"moefx.matching.lift.lifter": {"moefx.matching.prove", "moefx.matching.terms.term", "moefx.errors"}}
    assert find_upward_imports(edges) == ["moefx.matching.lift.lifter -> moefx.matching.prove"]
    assert find_circles({"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}}) == [["a", "b", "c"]]
    tree = ast.parse("def f():\n    from ...api import compile\nif TYPE_CHECKING:\n    from ... import cli")
    assert [*list_imports("moefx.ir.ops.op_definition", tree, False)] == ["moefx.api"]
