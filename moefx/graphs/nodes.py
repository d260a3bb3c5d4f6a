"""What a single node says: its op, what it writes to, whether it is random, and the user's line that it is from."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx, nn

from ..capture.source import Source, is_users
from ..errors import Refused

_IN_PLACE = {
    operator.setitem, operator.iadd, operator.isub, operator.imul, operator.itruediv, operator.ifloordiv,
    operator.imod, operator.ipow, operator.iand, operator.ior, operator.ixor, operator.imatmul,
}  # fmt: skip
SELECT = {"topk", "max", "min", "argmax", "argmin", "sort", "argsort", "kthvalue", "multinomial"}
MOVES = {
    "t", "T", "mT", "transpose", "permute", "view", "reshape", "_unsafe_view", "to", "_to_copy", "expand", "unsqueeze",
    "squeeze", "detach", "contiguous", "clone", "alias",
}  # fmt: skip


def attribute(gm: nn.Module, path: str) -> Any:
    owner: Any = gm
    for part in path.split("."):
        owner = getattr(owner, part, None)
    return owner


def is_float_tensor(t: Any) -> bool:
    return isinstance(t, torch.Tensor) and t.is_floating_point()


def hint(n: Any) -> int:
    if isinstance(n, torch.SymInt):
        found = n.node.hint
        if found is None:
            raise Refused("how many rows there are follows from data: sizes like that are not followed in graphs")
        return int(found)
    return int(n)


def plain(n: Any) -> Any:
    """A size; of a symbol that can be one number only, that number: where Dynamo has seen that it must be."""
    if isinstance(n, torch.SymInt) and n.node.expr.is_Integer:
        return int(n.node.expr)
    return n


def is_held(name: str) -> bool:
    """Whether a source is a parameter or buffer of a module."""
    return "._parameters[" in name or "._buffers[" in name


def target_name(n: fx.Node) -> str:
    """`topk` of `aten.topk.default`, `torch.topk` and `x.topk`."""
    if n.op == "call_method":
        return str(n.target)
    if isinstance(n.target, torch._ops.OpOverload):
        return n.target.overloadpacket.__name__
    return getattr(n.target, "__name__", str(n.target))


def written_by(n: fx.Node) -> fx.Node | None:
    """The argument that a node writes to, in place."""
    if n.op == "call_method":
        name = str(n.target)
        return n.args[0] if name.endswith("_") and not name.endswith("__") else None  # type: ignore[return-value]
    if n.op != "call_function":
        return None
    out = n.kwargs.get("out")
    if isinstance(out, fx.Node):
        return out
    if isinstance(n.target, torch._ops.OpOverload):
        for i, a in enumerate(n.target._schema.arguments):
            if a.alias_info is not None and a.alias_info.is_write:
                found = n.args[i] if i < len(n.args) else n.kwargs.get(a.name)
                return found if isinstance(found, fx.Node) else None
        return None
    name = getattr(n.target, "__name__", "")
    in_place = n.target in _IN_PLACE or (name.endswith("_") and not name.endswith("__")) or n.kwargs.get("inplace")
    return n.args[0] if in_place and n.args and isinstance(n.args[0], fx.Node) else None


def transform(n: fx.Node) -> tuple[str, int] | None:
    """Of a node that begins (1) or ends (-1) one of torch.func's transforms: which."""
    name = target_name(n).strip("_")
    for step, word in ((1, "increment"), (-1, "decrement")):
        kind, found, _ = name.partition(f"_{word}_nesting")
        if found:
            return {"vmap": "torch.vmap", "grad": "torch.func.grad or vjp"}.get(kind, f"torch.func.{kind}"), step
    return None


def is_switch(n: fx.Node) -> bool:
    """Whether a node is called for what it does to the program around it: what stands before it stays before it."""
    return n.op == "call_function" and not n.users and not n.all_input_nodes


def is_pure(n: fx.Node) -> bool:
    """Whether a node that nobody reads may go. Of what is no operation on tensors nothing is known."""
    if n.target is operator.getitem:
        return True
    is_op = isinstance(n.target, torch._ops.OpOverload) and not n.target._schema.is_mutable
    return is_op and "batch_norm" not in target_name(n) and not is_random(n)  # its schemas do not tell what it keeps


def is_random(n: fx.Node) -> bool:
    if torch.Tag.nondeterministic_seeded in getattr(n.target, "tags", ()):
        return True
    name = str(n.target) if n.op == "call_method" else getattr(n.target, "__name__", "")
    if "dropout" in name:
        return bool(n.kwargs.get("training", n.args[2] if len(n.args) > 2 else True))
    return name.strip("_") in (
        "rand", "randn", "rand_like", "randn_like", "randint", "randint_like", "randperm", "bernoulli", "multinomial",
        "normal", "uniform", "exponential", "gumbel_softmax", "rrelu", "poisson", "cauchy", "log_normal", "geometric",
        "random",
    )  # fmt: skip


def sources_of(n: fx.Node, position: int) -> tuple[Source, ...]:
    """The user's lines that made a node, the innermost first; without a stack trace its place in the graph."""
    found = []
    lines = str(n.stack_trace or "").splitlines()
    for i, text in enumerate(lines):
        parts = text.strip().split('"')
        if len(parts) < 3 or not parts[0].startswith("File") or not is_users(parts[1]):
            continue
        number = parts[2].partition("line ")[2].partition(",")[0]
        rest = []
        for below in lines[i + 1 :]:
            if below.strip().startswith('File "'):
                break
            rest.append(below)
        found.append(Source(parts[1], int(number) if number.isdigit() else 0, hash("\n".join(rest))))
    return tuple(reversed(found)) or (Source("graph", position, 0),)
