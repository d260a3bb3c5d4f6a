"""Query a single node: its op, its arguments, its sizes, and the user's lines."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx, nn

from ...capture.environment.code_locations import Source
from ...errors import Refused
from ...ir.node_values import get_op_name
from ...util.user_code import is_user_file

SET_GRAD = torch._C._set_grad_enabled
ENTER_AUTOCAST, EXIT_AUTOCAST = torch.amp.autocast_mode._enter_autocast, torch.amp.autocast_mode._exit_autocast
MODE_SWITCHES = {SET_GRAD, ENTER_AUTOCAST, EXIT_AUTOCAST}
LAYOUT_OPS = {
    "t", "T", "mT", "transpose", "permute", "view", "reshape", "_unsafe_view", "to", "_to_copy", "expand", "unsqueeze",
    "squeeze", "detach", "contiguous", "clone", "alias",
}  # fmt: skip


def find_attribute(gm: nn.Module, path: str) -> Any:
    """Return the attribute at a dotted path, or None."""
    owner: Any = gm
    for part in path.split("."):
        owner = getattr(owner, part, None)
    return owner


def is_float_tensor(t: Any) -> bool:
    return isinstance(t, torch.Tensor) and t.is_floating_point()


def is_hinted(n: Any) -> bool:
    """Return whether a size has a value in the example. A size that depends on data has none."""
    return not isinstance(n, torch.SymInt) or n.node.hint is not None


def get_size_hint(n: Any) -> int:
    """Return the value of a size in the example.

    Raises:
        Refused: the size depends on data.
    """
    if isinstance(n, torch.SymInt):
        hint = n.node.hint
        if hint is None:
            raise Refused(
                "the number of rows depends on data, which is not supported in graphs",
                remedy="moefx.compile(model) supports sizes that depend on the selected experts",
            )
        return int(hint)
    return int(n)


def simplify_size(n: Any) -> Any:
    """Replace a symbolic size by its value if Dynamo has found that it can have no other. The hint is preferred: torch
    2.11 may have another number in the expression if floats were rounded.
    """
    if isinstance(n, torch.SymInt) and n.node.expr.is_Integer:
        return int(n.node.expr) if n.node.hint is None else int(n.node.hint)
    return n


def is_module_tensor(name: str) -> bool:
    """Return whether a source name is a parameter or buffer of a module."""
    return "._parameters[" in name or "._buffers[" in name


def find_selected_axis(n: fx.Node) -> int | None:
    """Return the axis along which an op of `SELECTION_OPS` selects; None if it selects among all elements or two
    tensors."""
    name = get_op_name(n)
    at = 2 if name in ("topk", "kthvalue") else 1
    last = name not in ("max", "min", "argmax", "argmin")  # without an axis
    axis = n.kwargs.get("dim", next((a for a in n.args[at:] if type(a) is int), -1 if last else None))
    return axis if type(axis) is int else None


def find_functorch_nesting(n: fx.Node) -> tuple[str, int] | None:
    """Return the transform that a node begins (1) or ends (-1): of torch.func, or inference mode. None for other
    nodes."""
    name = get_op_name(n).strip("_")
    if name in ("enter_inference_mode", "exit_inference_mode"):
        return "torch.inference_mode", 1 if name.startswith("enter") else -1
    for step, direction in ((1, "increment"), (-1, "decrement")):
        kind, separator, _ = name.partition(f"_{direction}_nesting")
        if separator:
            return {"vmap": "torch.vmap", "grad": "torch.func.grad or vjp"}.get(kind, f"torch.func.{kind}"), step
    return None


def find_user_sources(n: fx.Node, position: int) -> tuple[Source, ...]:
    """Return the user's lines that made a node, innermost first; its position if it has no stack trace."""
    sources = []
    lines = str(n.stack_trace or "").splitlines()
    for i, text in enumerate(lines):
        parts = text.strip().split('"')
        if len(parts) < 3 or not parts[0].startswith("File") or not is_user_file(parts[1]):
            continue
        number = parts[2].partition("line ")[2].partition(",")[0]
        outer_frames = []
        for below in lines[i + 1 :]:
            if below.strip().startswith('File "'):
                break
            outer_frames.append(below)
        sources.append(Source(parts[1], int(number) if number.isdigit() else 0, hash("\n".join(outer_frames))))
    return tuple(reversed(sources)) or (Source("graph", position, 0),)
