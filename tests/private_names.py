"""Find the private names of torch and triton in the files of a package, by their syntax trees.

A name is private if a part of its dotted path begins with an underscore. Names are followed through imports,
assignments (`aten = torch.ops.aten`) and `getattr` with a literal. An attribute of an object of unknown class has no
path: `module._parameters` is the name `_parameters`.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

_LIBRARIES = ("torch", "triton")
_WITH_LITERALS = {"getattr", "hasattr", "setattr", "delattr", "startswith"}
_OF_NAMEDTUPLE = {"_asdict", "_fields", "_make", "_replace"}
_Function = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
_NAMING = (*_Function, ast.Import, ast.ImportFrom, ast.Assign, ast.Attribute, ast.Call, ast.Constant, ast.Name)
Uses = dict[str, str]  # a name -> "file:line" of one use


def is_private(name: str) -> bool:
    return any(part.startswith("_") and part.strip("_") and not part.endswith("__") for part in name.split("."))


def find_private_names(
    package: Path, of_torch: Callable[[str], bool], of_operators: Callable[[str], bool]
) -> tuple[Uses, Uses]:
    """Find the private names that a package uses: dotted paths, and attributes and literals without a path.

    Args:
        package: its folder.
        of_torch: whether torch has this name. Called for literals and for attributes that the package also defines.
        of_operators: whether a literal is the name of an operator.
    """
    trees = {file: ast.parse(file.read_text(encoding="utf-8")) for file in sorted(package.rglob("*.py"))}
    defined = _OF_NAMEDTUPLE.union(*map(_collect_definitions, trees.values()))
    paths: Uses = {}
    attributes: Uses = {}
    for file, tree in trees.items():
        shown = file.relative_to(package.parent)
        for node, known in _nodes_with_names(tree, {}):
            for path in _list_imports(node).values() if isinstance(node, ast.ImportFrom) else [_find_path(node, known)]:
                if path.partition(".")[0] in _LIBRARIES and is_private(path):
                    paths[path] = f"{shown}:{node.lineno}"
            name = _find_name_without_path(node, known)
            if not name or not is_private(name):
                continue
            is_literal = isinstance(node, ast.Constant)
            if of_torch(name) or (of_operators(name) if is_literal else name not in defined):
                attributes[name] = f"{shown}:{node.lineno}"
    return paths, attributes


def _nodes_with_names(scope: ast.AST, outer: Mapping[str, str]) -> Iterator[tuple[Any, Mapping[str, str]]]:
    """Yield the nodes of a scope and its inner functions, each with the paths of the names in its scope."""
    nodes = _list_nodes(scope)
    known = {**outer, **{name: "" for name in _list_parameters(scope)}}
    for node in nodes:
        known |= _list_imports(node)
    for node in nodes:
        if isinstance(node, ast.Assign):
            for target in node.targets:
                known |= {name: _find_path(value, known) for name, value in _pair_targets(target, node.value)}
    for node in nodes:
        yield node, known
        if isinstance(node, _Function):
            yield from _nodes_with_names(node, known)


def _list_nodes(scope: ast.AST) -> list[ast.AST]:
    """List the nodes of a module or function that may contain names, except those of inner functions."""
    found, left = [], list(ast.iter_child_nodes(scope))[::-1]
    while left:
        node = left.pop()
        if isinstance(node, _NAMING):
            found.append(node)
        if not isinstance(node, _Function):
            is_text = isinstance(node, ast.JoinedStr)  # its constants are parts of a text
            left += [n for n in ast.iter_child_nodes(node) if not (is_text and isinstance(n, ast.Constant))][::-1]
    return found


def _list_parameters(scope: ast.AST) -> list[str]:
    return [a.arg for a in ast.walk(scope.args) if isinstance(a, ast.arg)] if isinstance(scope, _Function) else []


def _list_imports(node: ast.AST) -> dict[str, str]:
    """Return the full path of each name that an import binds, "" for relative imports."""
    if isinstance(node, ast.Import):
        return {a.asname: a.name for a in node.names if a.asname} | {
            root: root for a in node.names if not a.asname for root in [a.name.partition(".")[0]]
        }
    if isinstance(node, ast.ImportFrom):
        return {a.asname or a.name: "" if node.level else f"{node.module}.{a.name}" for a in node.names}
    return {}


def _pair_targets(target: ast.expr, value: ast.expr) -> Iterator[tuple[str, ast.expr]]:
    if isinstance(target, ast.Name):
        yield target.id, value
    elif isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
        for one, its in zip(target.elts, value.elts, strict=False):
            yield from _pair_targets(one, its)


def _find_path(node: ast.AST, known: Mapping[str, str]) -> str:
    """Return the dotted path that an expression names, or ""."""
    if isinstance(node, ast.Name):
        return known.get(node.id, "")
    owner, name = (node.value, node.attr) if isinstance(node, ast.Attribute) else _read_literal_of_call(node)
    path = _find_path(owner, known) if owner is not None and name else ""
    return f"{path}.{name}" if path else ""


def _read_literal_of_call(node: ast.AST) -> tuple[ast.expr | None, str]:
    """Return the object and the name in calls of `getattr(object, "name")` and similar functions."""
    if not isinstance(node, ast.Call):
        return None, ""
    called = node.func.id if isinstance(node.func, ast.Name) else getattr(node.func, "attr", "")
    literals = [a.value for a in node.args if isinstance(a, ast.Constant) and isinstance(a.value, str)]
    if called not in _WITH_LITERALS or not literals:
        return None, ""
    return node.args[0], literals[0]


def _find_name_without_path(node: ast.AST, known: Mapping[str, str]) -> str:
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) and node.value.isidentifier() else ""
    if isinstance(node, ast.Attribute):
        root = node.value
        while isinstance(root, ast.Attribute):
            root = root.value
        # a path of another library, such as sys._getframe
        return "" if isinstance(root, ast.Name) and known.get(root.id) else node.attr
    return "" if _find_path(node, known) else _read_literal_of_call(node)[1].rpartition(".")[2]


def _collect_definitions(tree: ast.AST) -> set[str]:
    """Collect the names that a file defines: functions, classes, variables, parameters and attributes of `self`."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            found.add(node.name)
        elif isinstance(node, ast.arg):
            found.add(node.arg)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and isinstance(node.value, ast.Name):
            found |= {node.attr} if node.value.id in ("self", "cls") else set()
    return found
