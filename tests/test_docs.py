"""Every code block of README and docs/ runs and prints the text below it on the page.

The Python blocks of a page share one module and one temporary folder. The title of a block names its file; a title that
starts with `torchrun` runs the block on several ranks. A ```text block shows the output of the block above it: numbers
and spaces may differ, and `...` stands for any text.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import inspect
import io
import itertools
import pkgutil
import re
import shlex
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import moefx
from moefx import cli, errors

from .distributed.launch import torchrun
from .distributed.run_scripts import SEPARATOR
from .proof_memory import share_proofs

ROOT = Path(__file__).parents[1]
MARKDOWN = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
RUN_BY = {"docs/backend.md": "tests/frontends/dynamo/test_docs.py"}  # in a separate process, with logs
OPTIONAL = ("transformers", "peft", "accelerate")
_FENCE = re.compile(r'^```(\w+)(?: title="([^"]*)")?\n(.*?)^```$', re.M | re.S)
_NUMBER = re.compile(r"\d[\d,]*(?:\.\d+)?(?:e[+-]?\d+)?")


@dataclasses.dataclass(frozen=True)
class CodeBlock:
    language: str
    title: str
    code: str

    @property
    def is_command(self) -> bool:
        """Return whether the block is one shell command of moefx."""
        return self.language == "sh" and self.code.startswith("python -m moefx") and self.code.count("\n") == 1

    @property
    def num_ranks(self) -> int:
        """Return the number of ranks of a torchrun script, 0 for other blocks."""
        found = re.match(r"torchrun --nproc-per-node (\d+) \S+$", self.title)
        return int(found[1]) if found else 0


def read_blocks(page: Path) -> list[CodeBlock]:
    return [CodeBlock(*found) for found in _FENCE.findall(page.read_text(encoding="utf-8"))]


def pair_with_output(blocks: list[CodeBlock]) -> Iterator[tuple[CodeBlock, str | None]]:
    """Yield each block and its output on the page."""
    for block, after in itertools.zip_longest(blocks, blocks[1:]):
        yield block, after.code if after is not None and after.language == "text" else None


def run_page(page: Path, folder: Path) -> list[tuple[str, str]]:
    """Return the printed output and the text on the page for each block that shows one.

    `folder`: the current directory.
    """
    outputs = []
    module = types.ModuleType(f"page_{page.stem}")
    sys.modules[module.__name__] = module  # classes look up their module, as in a script
    torch.manual_seed(0)
    for block, shown in pair_with_output(read_blocks(page)):
        if block.language == "python" and not block.num_ranks:
            printed = _run_python(block, folder / (block.title or f"{page.stem}.py"), module)
        elif block.is_command and shown is not None:
            printed = _run_command(block.code)
        else:
            continue
        if shown is not None:
            outputs.append((printed, shown))
    return outputs


def _run_python(block: CodeBlock, file: Path, module: types.ModuleType) -> str:
    above = file.read_text(encoding="utf-8") if file.exists() else ""
    # Tracebacks and explanations show source lines, which they read from a file.
    file.write_text(above + block.code, encoding="utf-8")
    vars(module)["__file__"] = str(file)
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        exec(compile("\n" * above.count("\n") + block.code, str(file), "exec"), vars(module))
    return printed.getvalue()


def _run_command(code: str) -> str:
    arguments = shlex.split(code.replace("\\\n", ""), comments=True)
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        cli.main(arguments[3:])
    return printed.getvalue()


def _is_below(module: types.ModuleType, folder: Path) -> bool:
    return str(getattr(module, "__file__", None) or "").startswith(str(folder))


def normalize(text: str) -> str:
    return " ".join(_NUMBER.sub("#", text).split())


def find_difference(printed: str, shown: str) -> str:
    """Return the first part of the shown text that was not printed in this order, or ""."""
    found, position = normalize(printed), 0
    parts = [normalize(part) for part in shown.split("...")]
    for number, part in enumerate(parts):
        at = found.find(part, position)
        if at < 0 or (number == 0 and at > 0):
            return part
        position = at + len(part)
    return "" if not parts[-1] or position == len(found) else f"only the start of: {found[position:]}"


def check_output(printed: str, shown: str) -> None:
    missing = find_difference(printed, shown)
    assert not missing, f"not printed: {missing}\n\nprinted:\n{printed}"


def find_optional_packages(code: str) -> list[str]:
    return [package for package in OPTIONAL if re.search(rf"^(?:from|import) {package}", code, re.M)]


def _pages() -> list:
    pages = []
    for page in MARKDOWN:
        name, blocks = str(page.relative_to(ROOT)), read_blocks(page)
        if name in RUN_BY or all(block.language != "python" or block.num_ranks for block in blocks):
            continue
        code = "".join(block.code for block in blocks if block.language == "python")
        needed = find_optional_packages(code)
        pages.append(pytest.param(page, needed, id=name, marks=[pytest.mark.hf] * bool(needed)))
    return pages


@pytest.mark.parametrize(("page", "needed"), _pages())
def test_code_blocks_print_the_output_on_the_page(page, needed, tmp_path, monkeypatch):
    for package in needed:
        pytest.importorskip(package)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    try:
        with share_proofs():
            outputs = run_page(page, tmp_path)
    finally:
        for name in [name for name, module in sys.modules.items() if _is_below(module, tmp_path)]:
            del sys.modules[name]
    for printed, shown in outputs:
        check_output(printed, shown)


@pytest.mark.skipif(not torch.distributed.is_available() or sys.platform != "linux", reason="needs gloo")
def test_scripts_for_several_ranks_print_the_output_on_the_page(tmp_path):
    """Run all scripts with equally many ranks in the same processes, which take longer to start than the scripts."""
    found = [pair for page in MARKDOWN for pair in pair_with_output(read_blocks(page)) if pair[0].num_ranks]
    found = [pair for pair in found if all(map(importlib.util.find_spec, find_optional_packages(pair[0].code)))]
    for ranks in {block.num_ranks for block, _ in found}:
        files, texts = [], []
        for number, (block, shown) in enumerate(found):
            if block.num_ranks == ranks:
                files.append(tmp_path / f"{number}_{block.title.split()[-1]}")
                files[-1].write_text(block.code, encoding="utf-8")
                texts.append(shown)
        command = ["-m", "tests.distributed.run_scripts", *map(str, files)]
        done = torchrun(*command, ranks=ranks, environment={"CUDA_VISIBLE_DEVICES": ""})
        assert done.returncode == 0, done.stderr[-3000:]
        for printed, shown in zip(done.stdout.split(SEPARATOR)[1:], texts, strict=True):
            check_output(printed, shown or "...")


def test_relative_links_and_make_targets_exist():
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for page in MARKDOWN:
        text = page.read_text(encoding="utf-8")
        for link in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", text):
            assert link.startswith("https://") or (page.parent / link).exists(), f"{page.name}: {link}"
        for target in re.findall(r"(?:^|`)make ([a-z][a-z0-9-]*)", text, re.M):
            assert re.search(rf"^{target}:", makefile, re.M), f"{page.name}: {target}"


def test_shell_commands_have_the_options_that_pages_name():
    for page in MARKDOWN:
        for block in read_blocks(page):
            for line in block.code.replace("\\\n", "").splitlines() if block.language == "sh" else ():
                if line.startswith("python -m moefx"):
                    cli.parser().parse_args(shlex.split(line, comments=True)[3:])


def test_the_table_of_calls_is_complete():
    text = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
    table = text[text.index("| call | gives |") :].partition("\n\n")[0]
    assert set(re.findall(r"`moefx\.(\w+)", table)) >= set(moefx.__all__) - {"MoefxError", "NoMoEBlockFound"}


def format_signature(function: Callable[..., Any]) -> str:
    """Return the arguments in the form of the table of calls. It shows defaults of positional ones only."""
    shown = []
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind is parameter.KEYWORD_ONLY:
            shown += ["*"] * ("*" not in shown) + [parameter.name]
        else:
            has_default = parameter.default is not parameter.empty
            shown.append(f"{parameter.name}={parameter.default!r}" if has_default else parameter.name)
    return ", ".join(shown)


def test_the_table_of_calls_has_the_signatures():
    text = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
    calls = re.findall(r"`moefx\.(\w+)\((.*?)\)`", text[text.index("| call | gives |") :].partition("\n\n")[0])
    functions = [(name, shown) for name, shown in calls if not isinstance(getattr(moefx, name), type)]
    assert len(functions) > 12
    assert [(name, format_signature(getattr(moefx, name))) for name, _ in functions] == functions


def test_names_of_the_package_on_pages_exist():
    plan_fields = {field.name for field in dataclasses.fields(moefx.Plan)}
    for page in MARKDOWN:
        text = page.read_text(encoding="utf-8")
        for name in set(re.findall(r"`(moefx(?:\.\w+)+)", text)):
            try:
                pkgutil.resolve_name(name)
            except ModuleNotFoundError as error:  # of a library that is not installed
                assert error.name in OPTIONAL, f"{page.name}: {name}"
        for arguments in re.findall(r"\bPlan\(((?:[^()]|\([^()]*\))*)\)", text):
            unknown = set(re.findall(r"(?:^|, )(\w+)=", arguments)) - plan_fields
            assert not unknown, f"{page.name}: Plan has no {unknown}"


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


def test_every_page_is_in_the_navigation():
    navigation = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    for page in sorted((ROOT / "docs").rglob("*.md")):
        assert str(page.relative_to(ROOT / "docs")) in navigation, page
