"""A Python script that reproduces a block's history outside of its model: for bug reports."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.fx import Node
from torch.utils import _pytree as pytree

from .history import History

_HEAD = '''\
"""{name}: the graphs after every pass, run side by side.

Kept submodules of the block are stubs that return recorded shapes, filled with random numbers; put the
real block in their place with `block = ...` where that matters.
"""

import torch

import moefx.ir.dialect  # registers the moefx:: ops

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


def script(history: History, block: nn.Module | None = None) -> str:
    """The text of the script; see `History.repro`.

    Raises:
        ValueError: the shape of an input or a parameter is known neither from the graphs nor from `block`.
    """
    parts = [_HEAD.format(name=history.name or "model")]
    functions = []
    for snapshot in history:
        source = snapshot.graph.source()
        name = f"after_{snapshot.index}_{''.join(c if c.isalnum() else '_' for c in snapshot.pass_name)}"
        for alias, value in source.scope.items():
            line = _global(alias, value)
            if line not in parts:
                parts.append(line)
        functions.append((name, f"\n# {snapshot.header}\n" + source.text.replace("def forward(", f"def {name}(", 1)))
    parts += [text for _, text in functions]
    parts += [_STUBS, "block = Node()\n", *_block_lines(history, block), *_call_lines(history, functions)]
    return "".join(parts)


def _block_lines(history: History, block: nn.Module | None) -> list[str]:
    num_experts = max((n.kwargs.get("num_experts", 0) for s in history for n in s.graph.graph.nodes), default=0) or 2
    lines: dict[str, str] = {}
    for snapshot in history:
        for node in snapshot.graph.graph.nodes:
            if node.op == "get_attr":
                value = _attribute(block, str(node.target)) if block is not None else node.meta.get("val")
                lines[str(node.target)] = _tensor(node, value, num_experts)
            elif node.op == "call_module":
                lines[str(node.target)] = f"Node({_results(node, num_experts)})"
    return [f"put(block, {path!r}, {value})\n" for path, value in sorted(lines.items())]


def _call_lines(history: History, functions: list[tuple[str, str]]) -> list[str]:
    first = history.snapshots[0].graph
    inputs = [f"{n.name} = {_tensor(n, n.meta.get('val'), 2)}\n" for n in first.placeholders]
    names = ", ".join(["block", *(n.name for n in first.placeholders)])
    lines = ["\n", *inputs, "\nreference = None\n"]
    for name, _ in functions:
        lines.append(f"result = {name}({names})\n")
        lines.append("flat = [t for t in torch.utils._pytree.tree_leaves(result) if isinstance(t, torch.Tensor)]\n")
        lines.append("reference = reference or flat\n")
        error = "max(float((a.double() - b.double()).abs().max()) for a, b in zip(flat, reference))"
        lines.append(f'print(f"{name}: largest difference {{{error}:.3g}}")\n')
    return lines


def _results(node: Node, num_experts: int) -> str:
    value = node.meta.get("val")
    if isinstance(value, (tuple, list)) and type(value) in (tuple, list):
        return f"({', '.join(_tensor(node, v, num_experts) for v in value)},)"
    return _tensor(node, value, num_experts)


def _tensor(node: Node, value: Any, below: int) -> str:
    if getattr(value, "shape", None) is None:
        raise ValueError(f"shape of {node.target} is not known; pass the block: history.repro(path, block=...)")
    return f"tensor({[int(size) for size in value.shape]}, {value.dtype}, {below})"


def _attribute(block: nn.Module, path: str) -> Any:
    owner, _, name = path.rpartition(".")
    return getattr(block.get_submodule(owner), name)


def _global(alias: str, value: Any) -> str:
    if value is torch:
        return "" if alias == "torch" else f"{alias} = torch\n"
    if isinstance(value, torch._ops._OpNamespace):
        return f"{alias} = torch.ops.{value.name}\n"
    if isinstance(value, pytree.TreeSpec):
        return f"{alias} = torch.utils._pytree.treespec_loads({pytree.treespec_dumps(value)!r})\n"
    if getattr(value, "__module__", None) and getattr(value, "__qualname__", "").isidentifier():
        return f"from {value.__module__} import {value.__qualname__} as {alias}\n"
    return f"{alias} = {value!r}\n"
