"""Write a Python script that reproduces a block's history without its model, for bug reports."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.fx import Node
from torch.utils import _pytree as pytree

from ..ir.graphs.graph_codegen import is_getitem

if TYPE_CHECKING:
    from .history import History

_HEAD = '''\
"""{name}: the graphs after every pass, run side by side.

Kept submodules of the block are stubs that return random tensors of recorded shapes. If their values matter,
replace them by the real block with `block = ...`.
"""

import torch

import moefx.ir.ops.dialect  # registers the moefx:: ops

torch.manual_seed(0)

'''

_STUBS = '''
class Node(torch.nn.Module):
    """Holds parameters and submodules under their names in the block."""

    def __init__(self, results=()):
        super().__init__()
        self.results = results

    def forward(self, *args, **kwargs):
        return self.results


def put(root, path, value):
    *owners, name = path.split(".")
    for owner in owners:
        if not hasattr(root, owner):
            root.add_module(owner, Node())
        root = getattr(root, owner)
    if isinstance(value, torch.nn.Module):
        root.add_module(name, value)
    else:
        root.register_buffer(name, value)


def tensor(shape, dtype, below=2):
    if dtype.is_floating_point:
        return torch.randn(shape, dtype=torch.float32).mul(0.1).to(dtype)
    return torch.randint(0, below, shape).to(dtype)

'''


def build_script(history: History, block: nn.Module | None = None) -> str:
    """Return the text of the script; see `History.repro`.

    Raises:
        ValueError: neither the graphs nor `block` give the shape of a parameter, or a kept submodule returns an object
            of a user's class.
    """
    parts = [_HEAD.format(name=history.name or "model")]
    functions = []
    for snapshot in history:
        source = snapshot.graph.source()
        name = f"after_{snapshot.index}_{''.join(c if c.isalnum() else '_' for c in snapshot.pass_name)}"
        for alias, value in source.scope.items():
            line = _format_global(alias, value)
            if line not in parts:
                parts.append(line)
        functions.append((name, f"\n# {snapshot.header}\n" + source.text.replace("def forward(", f"def {name}(", 1)))
    parts += [text for _, text in functions]
    parts += [_STUBS, "block = Node()\n", *_format_block(history, block), *_format_calls(history, functions)]
    return "".join(parts)


def _format_block(history: History, block: nn.Module | None) -> list[str]:
    num_experts = max((n.kwargs.get("num_experts", 0) for s in history for n in s.graph.graph.nodes), default=0) or 2
    lines: dict[str, str] = {}
    for snapshot in history:
        for node in snapshot.graph.graph.nodes:
            if node.op == "get_attr":
                value = _read_attribute(block, str(node.target)) if block is not None else node.meta.get("val")
                lines[str(node.target)] = _format_value(node, value, num_experts)
            elif node.op == "call_module":
                lines[str(node.target)] = f"Node({_format_value(node, _find_value(node), num_experts)})"
    return [f"put(block, {path!r}, {value})\n" for path, value in sorted(lines.items())]


def _format_calls(history: History, functions: list[tuple[str, str]]) -> list[str]:
    first = history.snapshots[0].graph
    inputs = [f"{n.name} = {_format_value(n, n.meta.get('val'), 2)}\n" for n in first.placeholders]
    names = ", ".join(["block", *(n.name for n in first.placeholders)])
    lines = ["\n", *inputs, "\nreference = None\n"]
    for name, _ in functions:
        lines.append(f"result = {name}({names})\n")
        lines.append("flat = [t for t in torch.utils._pytree.tree_leaves(result) if isinstance(t, torch.Tensor)]\n")
        lines.append("reference = reference or flat\n")
        error = "max(float((a.double() - b.double()).abs().max()) for a, b in zip(flat, reference))"
        lines.append(f'print(f"{name}: largest difference {{{error}:.3g}}")\n')
    return lines


def _find_value(node: Node) -> Any:
    """Return the value of a node; for a container without a recorded value, its items with users."""
    if node.meta.get("val") is not None:
        return node.meta["val"]
    items = {user.args[1]: _find_value(user) for user in node.users if is_getitem(user)}
    if items and all(type(key) is int and key >= 0 for key in items):
        return tuple(items.get(i) for i in range(max(map(int, items)) + 1))  # type: ignore[arg-type]
    return items or None


def _format_value(node: Node, value: Any, below: int) -> str:
    """Return a Python expression for a value of a node. Tensors become random, containers and numbers stay."""

    def literal(part: Any) -> str:
        if hasattr(part, "shape") and hasattr(part, "dtype"):  # a tensor, or the record of one
            return f"tensor({[int(size) for size in part.shape]}, {part.dtype}, {below})"
        if type(part) is tuple:
            return f"({''.join(f'{literal(p)}, ' for p in part)})"
        if type(part) is list:
            return f"[{', '.join(map(literal, part))}]"
        if type(part) is dict:
            return f"{{{', '.join(f'{key!r}: {literal(p)}' for key, p in part.items())}}}"
        if isinstance(part, (torch.SymInt, torch.SymFloat)):
            return repr((int if isinstance(part, torch.SymInt) else float)(part))
        if part is None or type(part) in (bool, int, float, str):
            return repr(part)
        raise ValueError(f"{node.target} holds a {type(part).__name__}, which cannot be written as an expression")

    if value is None and node.op == "get_attr":
        raise ValueError(f"the shape of {node.target} is unknown; pass the block: history.repro(path, block=...)")
    return literal(value)


def _read_attribute(block: nn.Module, path: str) -> Any:
    owner, _, name = path.rpartition(".")
    return getattr(block.get_submodule(owner), name)


def _format_global(alias: str, value: Any) -> str:
    if value is torch:
        return "" if alias == "torch" else f"{alias} = torch\n"
    if isinstance(value, type(torch.ops.aten)):
        return f"{alias} = torch.ops.{value.name}\n"
    if isinstance(value, pytree.TreeSpec):
        return f"{alias} = torch.utils._pytree.treespec_loads({pytree.treespec_dumps(value)!r})\n"
    if getattr(value, "__module__", None) and getattr(value, "__qualname__", "").isidentifier():
        return f"from {value.__module__} import {value.__qualname__} as {alias}\n"
    return f"{alias} = {value!r}\n"
