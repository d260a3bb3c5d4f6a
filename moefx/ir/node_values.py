"""Read the op and the arguments of a node, and format its target, and the shape and dtype of its value."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch.fx import Node

BUILD_PFT, PLACE_CHOICES = "moefx::build_pft", "moefx::place_choices"
WAIT_GATHERED = "moefx::wait_gathered"
PULL_TOKENS = "moefx::pull_tokens"
# overloads that do something else than the other overloads of their op
_OTHER_NAMES = dict.fromkeys(
    (torch.ops.aten.scatter.reduce, torch.ops.aten.scatter.value_reduce), "scatter_with_reduce"
)


class TensorSpec(NamedTuple):
    """Shape, dtype and device of a value in a loaded graph, which has no FakeTensors."""

    shape: tuple[Any, ...]
    dtype: torch.dtype
    device: torch.device


def get_argument(node: Node, name: str) -> Any:
    """Return the argument of an op's node that the op's schema calls `name`; its default if the node does not have it.

    Raises:
        KeyError: the op has no such argument.
    """
    for i, argument in enumerate(node.target._schema.arguments):  # type: ignore[union-attr]
        if argument.name == name:
            return node.args[i] if i < len(node.args) else node.kwargs.get(name, argument.default_value)
    raise KeyError(f"{format_target(node)} has no argument {name}")


def set_argument(node: Node, name: str, value: Any) -> None:
    """Set the argument of an op's node that the op's schema calls `name`.

    Raises:
        KeyError: the op has no such argument.
    """
    for i, argument in enumerate(node.target._schema.arguments):  # type: ignore[union-attr]
        if argument.name == name:
            if argument.kwarg_only or i > len(node.args):
                node.update_kwarg(name, value)
            else:
                node.args = (*node.args[:i], value, *node.args[i + 1 :])
            return
    raise KeyError(f"{format_target(node)} has no argument {name}")


def read_item(node: Node) -> tuple[Node, Any]:
    """Return the node and the number of the result that an `operator.getitem` takes."""
    source, number = node.args
    assert isinstance(source, Node)
    return source, number


def get_op_name(node: Node) -> str:
    """Return the name of an op: `topk` for `aten.topk.default`, `torch.topk` and `x.topk`.

    Overloads that do something else than the others have names of their own: `scatter(..., reduce="add")` overwrites
    nothing, and is `scatter_with_reduce`.
    """
    if isinstance(node.target, torch._ops.OpOverload):
        return _OTHER_NAMES.get(node.target, node.target.overloadpacket.__name__)
    return node.target if isinstance(node.target, str) else getattr(node.target, "__name__", str(node.target))


def format_target(node: Node) -> str:
    """Return `"aten::mm"` for any overload of an op, `"linear"` for a function, the attribute path otherwise."""
    if isinstance(node.target, torch._ops.OpOverload):
        return node.target._schema.name
    return node.target if isinstance(node.target, str) else getattr(node.target, "__name__", str(node.target))


def format_value(node: Node) -> str:
    """Format dtype and shape of a node's value, with named letters if known: `"bf16[S,K]"`. Join several results by
    spaces."""
    value, letters = node.meta.get("val"), node.meta.get("letters")
    if isinstance(letters, str):
        return letters
    if isinstance(value, (tuple, list)) and not isinstance(value, TensorSpec):
        names = letters if letters is not None and len(letters) == len(value) else [None] * len(value)
        return " ".join(filter(None, (_value_text(v, n) for v, n in zip(value, names, strict=True))))
    return _value_text(value, letters)


def format_dtype(dtype: torch.dtype | None) -> str:
    """Format a dtype: `torch.bfloat16` -> `"bf16"`."""
    name = str(dtype).removeprefix("torch.")
    for long, short in (("bfloat", "bf"), ("float", "f"), ("uint", "u"), ("int", "i"), ("complex", "c")):
        if name.startswith(long) and name != long:
            return short + name.removeprefix(long)
    return name


def _value_text(value: Any, letters: tuple[str, ...] | None) -> str:
    shape = letters if letters is not None else getattr(value, "shape", None)
    if shape is None:
        return str(value) if isinstance(value, torch.SymInt) else ""
    dtype = getattr(value, "dtype", None)
    return f"{format_dtype(dtype) if dtype else ''}[{','.join(map(str, shape))}]"
