"""What is asked of ops and of their nodes during a capture: functional forms, shapes, and what a value follows from."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor

from ..errors import CaptureError
from .capture_result import SHAPE_ONLY, fold_ancestors, is_float
from .code_locations import find_user_source

aten = torch.ops.aten
GROUPED_MM = aten._grouped_mm


def find_leaf_kinds(node: fx.Node) -> frozenset[bool]:
    """Of the values without inputs that a node follows from: whether they are buffers, attributes, or single integers
    that are arguments."""

    def of(n: fx.Node, leaves: list[frozenset[bool]]) -> frozenset[bool]:
        is_state = n.op == "get_attr" and n.meta.get("kind") in ("buffer", "attribute")
        return frozenset().union(*leaves) if leaves else frozenset([is_state or _is_single_integer(n)])

    return fold_ancestors(node, "leaves", of)


def _is_single_integer(n: fx.Node) -> bool:
    val = n.meta.get("val")
    return n.op == "placeholder" and isinstance(val, torch.Tensor) and not is_float(val) and val.numel() == 1


def follows_from_floats(node: fx.Node) -> bool:
    """Whether an integer follows from arguments or abstract floats: it is part of the routing."""

    def of(n: fx.Node, are: list[bool]) -> bool:
        return n.op == "placeholder" or isinstance(n.meta.get("val"), FakeTensor) or any(are)

    return fold_ancestors(node, "from_floats", of)


def has_ancestor(node: fx.Node, ancestor: fx.Node) -> bool:
    """Whether a value is computed from another one, or is that."""
    stack, seen = [node], set()
    while stack:
        n = stack.pop()
        if n is ancestor:
            return True
        if n not in seen:
            seen.add(n)
            stack += n.all_input_nodes
    return False


def has_gradients(node: fx.Node) -> bool:
    """Whether gradients may flow from a value to parameters or to an argument."""
    return fold_ancestors(node, "has_gradients", _has_gradients)


def _has_gradients(n: fx.Node, have_inputs: list[bool]) -> bool:
    val = n.meta.get("val")
    if isinstance(val, torch.Tensor) and not is_float(val):
        return False
    if n.op in ("get_attr", "placeholder"):
        return n.op == "placeholder" or (n.meta.get("kind") == "param" and n.meta["original"].requires_grad)
    packet = getattr(n.target, "overloadpacket", None)
    is_like = n.target in SHAPE_ONLY or getattr(packet, "__name__", "").endswith("_like")  # of the shape alone
    is_cut = not n.meta["grad"] or n.target is aten.detach.default or is_like
    return not is_cut and any(have_inputs)


def grouped_result(x: torch.Tensor, w: torch.Tensor, *_: Any) -> torch.Tensor:
    """The shape of a grouped product; torch's own rule accepts bfloat16 only."""
    return x.new_empty((*x.shape[:-1], w.shape[-1]))


def with_leading_ones(value: fx.Node) -> fx.Node:
    """`y[mask] = rows`: where there is one row, torch takes the axis of the rows away."""
    if value.target is aten.reshape.default:
        source: Any = value.args[0]
        shape = tuple(source.meta["val"].shape)
        if shape[:1] == (1,) and shape[shape.count(1) :] == tuple(value.meta["val"].shape):
            return source
    return value


def find_functional_form(
    func: Any, args: Any, kwargs: dict[str, Any], names: list[str]
) -> tuple[Any, Any, dict[str, Any]]:
    """The functional form of an in-place or `out=` op, with its arguments."""
    found, is_same = _functional_op(func)
    if found is None:
        raise CaptureError(f"no functional form of {func} is known, at {find_user_source()}: {find_user_source().text}")
    if not is_same:
        return found, args, kwargs
    return found, args, {**_defaults(func, found, len(args)), **{k: v for k, v in kwargs.items() if k not in names}}


@functools.cache
def _functional_op(func: Any) -> tuple[Any, bool]:
    """The functional form of an op, None if there is none, and whether it takes the same arguments."""
    name, overload = func.overloadpacket.__name__, func._overloadname
    packet = getattr(getattr(torch.ops, func.namespace), name[:-1] if _is_in_place(name) else name, None)
    overloads = packet.overloads() if packet is not None else []
    wanted = _signature(func)
    for candidate in overloads:  # not by its name: `pow_.Scalar` is `pow.Tensor_Scalar`, not `pow.Scalar`
        found = getattr(packet, candidate)
        if _signature(found) == wanted:
            return found, True
    return (getattr(packet, overload), False) if _is_in_place(name) and overload in overloads else (None, False)


def _defaults(func: Any, form: Any, num_args: int) -> dict[str, Any]:
    """What an op takes by default behind its arguments and its other form asks for: the p of `bernoulli_`."""
    own = [a for a in func._schema.arguments if not a.is_out]
    asked = [a for a in form._schema.arguments if not a.is_out]
    pairs = list(zip(own, asked, strict=True))[num_args:]
    return {a.name: a.default_value for a, b in pairs if a.has_default_value() and not b.has_default_value()}


def _is_in_place(name: str) -> bool:
    return name.endswith("_") and not name.endswith("__")


def _signature(op: Any) -> list[tuple[str, str]]:
    """Names and types of what it takes."""
    return [(a.name, str(a.type)) for a in op._schema.arguments if not a.is_out]


# Ops whose kernels take floats of one dtype, which fake tensors do not check, and the arguments of that dtype.
_OF_ONE_DTYPE = {
    **dict.fromkeys((aten.mm, aten.mv, aten.dot), (0, 1)),
    **dict.fromkeys((aten.linear, aten.addmm, aten.addmv), (0, 1, 2)),
    **dict.fromkeys((aten.index_add, aten.index_add_, aten.index_copy, aten.index_copy_), (0, 3)),
    **dict.fromkeys((aten.index_put, aten.index_put_, aten._index_put_impl_), (0, 2)),
}


def require_one_dtype(func: Any, args: tuple) -> None:
    """Raise RuntimeError, as a kernel does, for a mixture of dtypes that fake tensors let pass."""
    places = _OF_ONE_DTYPE.get(func.overloadpacket, ())
    _require_one(str(func.overloadpacket), [args[i] for i in places if i < len(args)])


def require_one_dtype_under(dtype: torch.dtype | None, name: str, tensors: list[torch.Tensor]) -> None:
    """The same of a contraction under autocast to `dtype`, which leaves float64 alone, or (None) without autocast."""
    _require_one(name, tensors, {torch.float16: dtype, torch.bfloat16: dtype, torch.float32: dtype} if dtype else {})


def _require_one(name: str, tensors: list[Any], casts: dict[Any, Any] | None = None) -> None:
    floats = [t.dtype for t in tensors if isinstance(t, torch.Tensor) and t.is_floating_point()]
    dtypes = dict.fromkeys((casts or {}).get(dtype, dtype) for dtype in floats)
    if len(dtypes) > 1:
        raise RuntimeError(
            f"{name} takes one dtype, and is given {' and '.join(map(str, dtypes))} ({find_user_source()})"
        )
