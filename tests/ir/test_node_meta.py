"""Each key of `node.meta` in the package is declared in `ir.node_meta`, and each declared key is in use."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from moefx.ir.node_meta import BlockMeta, CachedMeta, CaptureMeta, FlatGraphMeta

PACKAGE = Path(__file__).parents[2] / "moefx"
DECLARED = {key for kind in (BlockMeta, CachedMeta, CaptureMeta, FlatGraphMeta) for key in kind.__annotations__}
_CALLS = {"fold_ancestors": 1, "_fold_dependence": 1}  # functions that write a key, and its position


def find_keys(tree: ast.AST) -> Iterator[str]:
    """Yield the constant keys that code reads or writes in a `meta`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Subscript) and _is_meta(node.value):
            yield from _read_texts(node.slice)
        elif isinstance(node, ast.Compare) and any(map(_is_meta, node.comparators)):
            yield from _read_texts(node.left)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and _is_meta(node.func.value):
            yield from _read_texts(*node.args[:1])
            yield from (k.arg for k in node.keywords if k.arg is not None)
        elif isinstance(node, ast.Call):
            name = getattr(node.func, "id", getattr(node.func, "attr", ""))
            yield from _read_texts(*node.args[_CALLS[name] :][:1]) if name in _CALLS else ()


def _is_meta(node: ast.AST) -> bool:
    return isinstance(node, ast.Attribute) and node.attr == "meta"


def _read_texts(*nodes: ast.AST) -> list[str]:
    return [node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)]


def test_keys_of_meta_are_declared():
    used = {
        key: path.name
        for path in PACKAGE.rglob("*.py")
        if path.parent.name != "demo"
        for key in find_keys(ast.parse(path.read_text()))
    }
    assert not {key: name for key, name in used.items() if key not in DECLARED}
    assert DECLARED - used.keys() <= {"stack_trace"}  # `Node.stack_trace` reads it


def test_undeclared_keys_are_seen():
    code = (
        "n.meta['a']; n.meta.get('b', 0); n.meta.update(c=1); 'd' in n.meta; f.g.meta['e'] = 2; "
        "fold_ancestors(n, 'f', g); _fold_dependence(3, 'h')"
    )
    assert set(find_keys(ast.parse(code))) == set("abcdefh")
