"""docs/private_names.md lists exactly the private names of torch that moefx uses, and the installed torch has them."""

from __future__ import annotations

import functools
import importlib
import inspect
import re
from importlib.metadata import version
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

import moefx

from .private_names import find_private_names, is_private

PAGE = (Path(__file__).parents[1] / "docs" / "private_names.md").read_text(encoding="utf-8")
ROWS = re.findall(r"^\| `([\w.]+)` \| (.+) \| (?:(\w+) )?(\d+\.\d+)(?: to (\d+\.\d+))? \|$", PAGE, re.M)
NAMES = [row[0] for row in ROWS]
_LAST_PARTS = {name.rpartition(".")[2] for name in NAMES}
_OF_MODULE = {name for name in (*dir(nn.Module), *vars(nn.Module())) if is_private(name)}
_NAMESPACES = (torch.ops.aten, torch.ops.c10d, torch.ops.prims)


def _is_of_torch(name: str) -> bool:
    return name in _LAST_PARTS or name in _OF_MODULE


def _is_operator(name: str) -> bool:
    return any(hasattr(namespace, name) for namespace in _NAMESPACES)


def _find_owner(name: str) -> tuple[Any, str]:
    """Follow imports and attributes, and return the last object with the rest of the name."""
    parts = name.split(".")
    found: Any = importlib.import_module(parts.pop(0))
    while len(parts) > 1:
        if not hasattr(found, parts[0]):
            importlib.import_module(f"{found.__name__}.{parts[0]}")
        found = getattr(found, parts.pop(0))
    return found, parts[0]


def is_resolved(name: str) -> bool:
    """Return whether the installed version has a name, as an attribute or in the source of its owner."""
    owner, last = _find_owner(name)
    if hasattr(owner, last):
        return True
    is_python = isinstance(owner, ModuleType) or inspect.isclass(owner)
    return is_python and bool(re.search(rf"\b{last}", _read_source(owner)))


@functools.cache
def _read_source(owner: Any) -> str:
    return inspect.getsource(owner)


@pytest.fixture(scope="module")
def used():
    return find_private_names(Path(moefx.__file__).parent, _is_of_torch, _is_operator)


def test_every_row_is_read():
    assert len(NAMES) == len(re.findall(r"^\| `", PAGE, re.M)) == len(set(NAMES))
    assert all(map(is_private, NAMES))


def test_used_names_are_listed(used):
    paths, attributes = used
    missing = {
        path: where
        for path, where in paths.items()
        if not any(path == name or path.startswith(f"{name}.") or name.startswith(f"{path}.") for name in NAMES)
    }
    missing |= {name: where for name, where in attributes.items() if name not in _LAST_PARTS}
    assert not missing, "list these in docs/private_names.md, or use public names"


def test_listed_names_are_used(used):
    paths, attributes = used
    unused = [
        name
        for name in NAMES
        if name.rpartition(".")[2] not in attributes
        and not any(path == name or path.startswith(f"{name}.") for path in paths)
    ]
    assert not unused, "remove these from docs/private_names.md"


@pytest.mark.every_version
@pytest.mark.parametrize("library", ["torch", "triton", "transformers", "sympy"])
def test_the_installed_version_has_the_names(library):
    """Check names that all releases of torch have on every release, others on those for which they were checked."""
    pytest.importorskip(library)
    installed = _split_version(version(library))
    missing = {
        name: use
        for name, use, column, first, last in ROWS
        if name.startswith(f"{library}.")
        and (not column or _split_version(first) <= installed <= _split_version(last or first))
        and not is_resolved(name)
    }
    assert not missing, f"{library} {version(library)} has none of these, see docs/private_names.md"


def _split_version(release: str) -> tuple[int, ...]:
    return tuple(map(int, release.split(".")[:2]))


def test_versions_agree():
    """The page, the README and pyproject.toml name the same releases of torch."""
    root = Path(__file__).parents[1]
    (checked,) = {(first, last) for _, _, library, first, last in ROWS if not library}
    assert f"torch {checked[0]} to {checked[1]}" in (root / "README.md").read_text(encoding="utf-8")
    assert f'"torch>={checked[0]}"' in (root / "pyproject.toml").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("code", "paths", "attributes"),
    [
        ("import torch\ntorch._C._hidden()", ["torch._C", "torch._C._hidden"], []),
        ("import torch._other as other\nother.public(1)", ["torch._other", "torch._other.public"], []),
        ("from torch._other import public as p\np.more", ["torch._other.public", "torch._other.public.more"], []),
        ("def f():\n from torch import nn\n return nn._f", ["torch.nn._f"], []),
        ("import torch\na, b = torch.x, 1\nc = a\nc._y", ["torch.x._y"], []),
        ("import torch\nx = getattr(torch.x, '_y', None)\nx._z", ["torch.x._y", "torch.x._y._z"], []),
        ("import torch\ndef f(torch):\n return torch._x", [], ["_x"]),
        ("import sys\nsys._getframe()\nimport torch\ntorch.__version__", [], []),
        ("def f(module, graph):\n return module._parameters, graph()._codegen", [], ["_codegen", "_parameters"]),
        ("class A:\n def f(self):\n  self._own = self._buffers\n  return self._own", [], ["_buffers"]),
        ("class A:\n def _apply(self): return self._apply()", [], ["_apply"]),
        ("from . import torch\ntorch._x\n(1)._replace(a=1)", [], ["_x"]),
        ("def f(x):\n return hasattr(x, '_gone') or x.startswith('aten._to_copy')", [], ["_gone", "_to_copy"]),
        ("RULES = {'_softmax', '_mine', 'f_', '_'}\nf'{1}_softmax'", [], ["_softmax"]),
    ],
)
def test_names_are_found_by_path_and_attribute(tmp_path, code, paths, attributes):
    (tmp_path / "module.py").write_text(code)
    found = find_private_names(tmp_path, _is_of_torch, _is_operator)
    assert (sorted(found[0]), sorted(found[1])) == (sorted(paths), sorted(attributes))
